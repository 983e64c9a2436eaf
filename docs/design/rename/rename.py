"""Give the packages of the template their names below `onceward`, in the working tree of a clone.

    python rename.py CLONE [--format]

Standard library only. `--format` also sorts imports and formats, with the clone's own ruff. It ends
with 1 and a list if a person has to look at something; all else is done by then. It is not meant to
run twice: `git checkout . && git clean -fd` before another run.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
RAW = "<<cookiecutter.service_name>>"
sys.path.insert(0, str(HERE.parents[2] / RAW / "dev"))

from renaming import Renames, folder_of, modules_in  # noqa: E402

NAMES: dict[str, str] = json.loads((HERE / "renamed.json").read_text("utf-8"))
OLD = "|".join(sorted(NAMES, key=len, reverse=True))

LEFT = (
    "CHANGELOG.md",  # of releases, which had the old names; its first part is edited below
    "docs/decisions/",
    "docs/performance/",
    "docs/design/",
    "benchmarks/instructions.json",
    "tests/releases/1.0.0.sql",
    "demo/otelcol/",
    "requirements",
    f"{RAW}/requirements/",
    f"{RAW}/contracts/",
    f"{RAW}/dev/renaming.py",
    f"{RAW}/dev/update.py",
    "tests/test_renaming.py",  # its old names are in its small template
    "imports.txt",
    "releases.json",
)
"""Beginnings of paths of files that stay as they are."""

DATABASE = re.compile(
    r"(\w+_)*(audit|backlog|claim|guarded|inbox|outbox|personal_(key|forgotten)|position"
    r"|retention_round|scheduled|throttle|new|refuse)(_\w+)?"
)
"""Names in the schema `pipeline` of the database."""

PATH_OF_FILE = re.compile(r"(?P<before>Path\(__file__\)(?:\.resolve\(\))?\.parents\[)(?P<up>\d+)\]")


class Tree:
    """The working tree of a clone, and what a person has to look at."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.doubts: list[str] = []

    def git(self, *words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=self.root, check=True, capture_output=True, text=True
        ).stdout

    def files(self) -> list[str]:
        """Return the files that git knows, and those that are new."""
        listed = self.git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
        found = dict.fromkeys(filter(None, listed.split("\0")))
        return [one for one in found if (self.root / one).is_file()]

    def texts(self) -> dict[str, str]:
        """Return all texts by their paths, without those that are left."""
        found = {}
        for name in self.files():
            if not name.startswith(LEFT) and not (self.root / name).is_symlink():
                try:
                    found[name] = (self.root / name).read_bytes().decode("utf-8")
                except UnicodeDecodeError:
                    continue
        return found

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(text.encode("utf-8"))

    def edit(self, name: str, *edits: tuple[str, str | Callable[[re.Match[str]], str]]) -> None:
        """Replace patterns (multi-line, `.` is any character but a line feed) in a file.

        What is not there is a doubt.
        """
        path = self.root / name
        if not path.is_file():
            self.doubts.append(f"{name}: there is no such file to edit")
            return
        text = path.read_bytes().decode("utf-8")
        for pattern, new in edits:
            text, count = re.subn(pattern, new, text, flags=re.MULTILINE)
            if not count:
                self.doubts.append(f"{name}: nothing matches {pattern!r}")
        self.write(name, text)


def literally(text: str) -> str:
    """Return a pattern for a text."""
    return re.escape(text)


def plainly(text: str) -> Callable[[re.Match[str]], str]:
    """Return a replacement that stands for itself."""
    return lambda _: text


def move(tree: Tree, renames: Renames, modules: dict[str, str]) -> None:
    """Move the folders; `pipeline` first, as all others go into it."""
    for old, new in modules.items():
        source, target = folder_of(old), folder_of(new)
        (tree.root / RAW / target).parent.mkdir(parents=True, exist_ok=True)
        tree.git("mv", f"{RAW}/{source}", f"{RAW}/{target}")
        left = tree.root / RAW / source
        if left.exists() and not [one for one in left.rglob("*") if one.suffix == ".py"]:
            shutil.rmtree(left)  # caches


def rewrite(tree: Tree, renames: Renames, old_paths: dict[str, str]) -> None:
    """Replace the names in all files; `old_paths` has the path that a file was moved from."""
    for name, text in tree.texts().items():
        new = renames.text(name, text)
        below, moved = place(renames, old_paths.get(name, name))
        new = PATH_OF_FILE.sub(lambda found: deeper(found, below, moved), new)  # noqa: B023
        new = sort_runs(new) if name.endswith((".py", ".md")) and new != text else new
        if new != text:
            tree.write(name, new)


def place(renames: Renames, old: str) -> tuple[int, int]:
    """Return how many folders of a file lie below the folder that was moved, and how far it went."""
    for folder, new in renames.moves.items():
        if old.startswith(f"{RAW}/{folder}/"):
            rest = old.removeprefix(f"{RAW}/{folder}/")
            return rest.count("/"), new.count("/") - folder.count("/")
    return 0, 0


def deeper(found: re.Match[str], below: int, moved: int) -> str:
    """Return `Path(__file__).parents[n]` of a file that was moved."""
    up = int(found["up"])
    return f"{found['before']}{up + moved if up > below else up}]"


RUN = re.compile(r"(?m)(?:^from onceward[\w.]* import [^(\n]+\n){2,}")


def module_of(line: str) -> str:
    return line.split()[1]


def sort_runs(text: str) -> str:
    """Sort lines that import from the engine: ruff does not see all files, and no pages."""
    return RUN.sub(
        lambda found: "".join(sorted(found[0].splitlines(keepends=True), key=module_of)), text
    )


CONDITIONAL = re.compile(
    r"(?m)(?:^(?:# <% if [^%\n]+ %>|# <% endif %>|from onceward[\w.]* import [^(\n]+)\n){3,}"
)


def sort_conditional(found: re.Match[str]) -> str:
    """Sort imports of the engine that each may be under one condition."""
    lines: list[tuple[str, str]] = []
    condition = ""
    for line in found[0].splitlines():
        if line.startswith("# <% if"):
            condition = line
        elif line == "# <% endif %>":
            condition = ""
        else:
            lines.append((condition, line))
    written: list[str] = []
    last = ""
    for condition, line in sorted(lines, key=lambda one: module_of(one[1])):
        if condition != last:
            written += ["# <% endif %>"] * bool(last) + [condition] * bool(condition)
        written.append(line)
        last = condition
    written += ["# <% endif %>"] * bool(last)
    return "".join(f"{line}\n" for line in written)


def tools(tree: Tree, renames: Renames) -> None:
    """Edit the configuration of tools, and the lists of what is copied."""

    def listed(found: re.Match[str]) -> str:
        names = re.sub(rf'"({OLD})"', lambda one: f'"{renames.module(one[1])}"', found[2])
        return found[1] + names

    project = tree.root / RAW / "pyproject.toml"
    text = project.read_text("utf-8")
    first = re.search(
        r'type = "layers"\nlayers = \[\n'
        r'    "<<cookiecutter\.package_name>>",\n((?:.*\n)*?)    "pipeline",\n\]\n',
        text,
    )
    if first is None:
        tree.doubts.append("pyproject.toml of the service: the first contract is another one")
        above = ""
    else:
        above = "".join(
            line
            if "# <%" in line  # its questions keep their names
            else re.sub(
                rf"\b({OLD})\b", lambda one: renames.module(one[1]).removeprefix("onceward."), line
            )
            for line in first[1].splitlines(keepends=True)
        )
        layers = '    "<<cookiecutter.package_name>>",\n    "onceward",\n'
        text = text.replace(first[0], f'type = "layers"\nlayers = [\n{layers}]\n')
    tree.write(f"{RAW}/pyproject.toml", text)
    tree.edit(
        f"{RAW}/pyproject.toml",
        (rf"^((?:containers|source_modules|forbidden_modules) = )(\[.*\])$", listed),
        (r"^(page|history)( = \[\")", r'"onceward.\1"\2'),
        (r"^sections = \{ engine = \[.*\] \}$", 'sections = { engine = ["onceward"] }'),
        (
            r'^root_packages = \[\n    "<<cookiecutter\.package_name>>",\n(?:.*\n)*?\]$',
            plainly('root_packages = ["<<cookiecutter.package_name>>", "onceward"]'),
        ),
        (
            r'^(containers = \["onceward"\]\nlayers = \[\n)',
            lambda found: found[1] + above,
        ),
        (r'^    "redaction",\n\]', '    "aliases | redaction",\n]'),
        (
            literally('filterwarnings = ["error", "default:import .* from:DeprecationWarning"]'),
            plainly(
                "filterwarnings = [\n"
                '    "error",\n'
                '    "default:import .* from:DeprecationWarning",\n'
                '    "default:the module .* is now:DeprecationWarning",\n'
                "]"
            ),
        ),
    )
    tree.edit(
        "pyproject.toml", (rf'^module = \[(?:"(?:{OLD})\.\*"(?:, )?)+\]', 'module = ["onceward.*"]')
    )
    tree.edit(
        "hooks/post_gen_project.py",
        (r"^PACKAGES = \((?:.*\n)*?^\)\nENGINE = .*\n", 'ENGINE = ("src/onceward",)\n'),
    )
    tree.edit("cookiecutter.json", (r'^ +"(?:src|tests)/onceward/[^"]*",\n', ""))
    manifest = tree.root / RAW / ".features.json"
    features = json.loads(manifest.read_text("utf-8"))
    features = {name: sorted(paths) for name, paths in features.items()}
    tree.write(f"{RAW}/.features.json", json.dumps(features, indent=4) + "\n")


def engine(tree: Tree, renames: Renames) -> None:
    """Edit what names packages without a path: logs, the test kit, the page, the service."""
    src, tests = f"{RAW}/src/onceward", f"{RAW}/tests"
    tree.edit(
        f"{src}/observe/logs.py",
        (r"^_PACKAGES = \((?:.*\n)*?^\)\n\"\"\".*\"\"\"\n", '_ENGINE = "onceward"\n'),
        (literally("(*_PACKAGES, *loggers)"), "(_ENGINE, *loggers)"),
    )
    tree.edit(
        f"{src}/testing/observed.py",
        (
            r'^    names = \("pipeline", .*\n',
            '    kinds = (kind.__module__.partition(".")[0] for kind in service.workers)\n'
            '    names = {"onceward", *kinds}\n',
        ),
    )
    tree.edit(
        f"{src}/page/rendering.py", (r'packages = \["page", ', 'packages = ["onceward.page", ')
    )
    tree.edit(
        f"{src}/__init__.py",
        (
            r"^from \.service import Misconfigured, Service\n",
            "from . import aliases\nfrom .service import Misconfigured, Service\n\naliases.install()\n",
        ),
    )
    tree.edit(f"{src}/__init__.py", (r'"plain"\)$', '"onceward.plain")'))
    tree.edit(
        f"{src}/handlers/registry.py",
        (
            r"see the optional package `http_api`;\n( +)handlers of a topic can",
            r"see the optional package\n\1`onceward.http`; handlers of a topic can",
        ),
    )
    tree.edit(
        f"{src}/oidc/settings.py",
        (
            r"\A.*\n",
            '"""Settings of the client at the OIDC provider: `OIDC_<FIELD>`.\n\n'
            "They are read when `onceward.oidc.tokens` is named.\n"
            '"""\n',
        ),
    )
    tree.edit(
        f"{src}/README.md",
        (
            r"\Z",
            "\nNext to the rooms are the command line, in `cli`, and optional packages. They import the"
            " engine, which never imports them.\n",
        ),
    )
    tree.edit(
        f"{tests}/servers/zygote.py",
        (r'^_OPTIONAL = \{"http_api": ', '_OPTIONAL = {"onceward.http": '),
        (
            r"^    return find_spec\(name\.partition\(\"\.\"\)\[0\]\) is not None$",
            '    return find_spec(".".join(name.split(".")[:2])) is not None',
        ),
    )
    tree.edit(
        f"{RAW}/dev/stack.py",
        (r'has\(SOURCE / "(page|personal)", ', r'has(SOURCE / "onceward" / "\1", '),
    )
    package = f"{RAW}/src/<<cookiecutter.package_name>>"
    tree.edit(f"{package}/main.py", (CONDITIONAL.pattern[4:], sort_conditional))
    calls = r'# <% if cookiecutter\.outside_calls == "yes" %>\n'
    end = r"# <% endif %>\n"
    tree.edit(
        f"{package}/handlers.py",
        (  # parcels
            rf"^(from onceward\.effects import .*\n){end}(from onceward import .*\n)",
            lambda found: (
                f'# <% endif %>\n{found[2]}# <% if cookiecutter.outside_calls == "yes" %>\n'
                f"{found[1]}# <% endif %>\n"
            ),
        ),
    )
    # Without an example nothing stands before the condition, which the first edit has left empty.
    tree.edit(f"{package}/handlers.py", (rf"^{calls}{end}(?=from onceward import)", ""))


def tests_of_engine(tree: Tree) -> None:
    """Edit tests that look at the engine's own modules, which are now next to the packages."""
    tests = f"{RAW}/tests/onceward"
    tree.write(f"{tests}/rooms.py", ROOMS)
    of_rooms = "from tests.onceward import rooms\n"
    tree.edit(
        f"{tests}/integration/test_boundaries.py",
        (literally('onceward.__path__, "pipeline."'), 'onceward.__path__, "onceward."'),
        (
            literally("names = {one.name for one in modules if not one.name.startswith(NO_PARTS)}"),
            "found = {one.name for one in modules if rooms.have(one.name)}\n"
            "    names = {name for name in found if not name.startswith(NO_PARTS)}",
        ),
        (r"^from \.boundaries import", f"{of_rooms}\nfrom .boundaries import"),
    )
    tree.edit(
        f"{tests}/unit/test_exports.py",
        (r"one\.__module__\.startswith\(\"pipeline\.\"\)", "rooms.have(one.__module__)"),
        (r"^(import onceward\n(?:(?:from|import) onceward.*\n)*)", rf"\1\n{of_rooms}"),
        (literally("from plain, not from pipeline$"), "from onceward.plain, not from onceward$"),
        (literally("module 'pipeline' has"), "module 'onceward' has"),
    )
    tree.edit(
        f"{tests}/unit/test_sql.py",
        (r"^(from onceward import sql\n)", rf"\1\n{of_rooms}"),
        (
            r'^    root, texts = .*\n(    printed = .*\n)    for path in root\.rglob\("\*\.py"\):$',
            r"    root, texts = rooms.ENGINE, set[str]()\n\1    for path in rooms.files():",
        ),
        (literally('onceward.__path__, "pipeline."'), 'onceward.__path__, "onceward."'),
        (
            literally('if one.name.endswith("statements")}'),
            'if one.name.endswith("statements") and rooms.have(one.name)}',
        ),
    )
    tree.edit(
        f"{tests}/effects/app.py",
        (
            r"\A.*\n",
            '"""The bank as a program that tells an outside of its deposits.\n\n'
            "`python -m tests.onceward.effects.app` runs it.\n"
            '"""\n',
        ),
    )
    tree.edit(
        f"{tests}/page/app.py",
        (
            r"\A.*\n",
            '"""The bank with its page and a correction, as a program.\n\n'
            "`python -m tests.onceward.page.app page` runs it.\n"
            '"""\n',
        ),
    )
    tree.edit(
        f"{tests}/history/test_views.py",
        (
            r"^(from tests\.onceward\.page\.conftest import) (TOKEN, .*), opened  (# noqa: F401 .*)$",
            lambda found: (
                f"{found[1]} (\n    "
                + ",\n    ".join(found[2].split(", "))
                + f",\n    opened,  {found[3]}\n)"
            ),
        ),
    )
    tree.edit(
        f"{tests}/page/exhibit.py",
        (
            r"^Run with the variables of .*\n.*\n",
            "Run with the variables of `tests.onceward.page.app`; it makes tables, topics, rows and records,"
            "\nthen runs the service and its page until the latter ends.\n",
        ),
    )
    tree.edit(
        f"{tests}/unit/test_private_names.py",
        (r"^(import onceward\n)", rf"\1\n{of_rooms}"),
        (literally('onceward.__path__, "pipeline."'), 'onceward.__path__, "onceward."'),
        (
            literally('if not f"{one.name}.".startswith(NOT_THE_ENGINE):'),
            'if rooms.have(one.name) and not f"{one.name}.".startswith(NOT_THE_ENGINE):',
        ),
        (literally('if library == "pipeline":'), 'if library == "onceward":'),
    )
    tree.edit(
        f"{tests}/unit/test_runtime.py",
        (literally(r"WARNING pipeline\.runtime: "), plainly(r"WARNING onceward\.runtime: ")),
    )
    tree.edit(
        f"{tests}/integration/test_kit.py",
        (literally('one.name.startswith("pipeline.")'), 'one.name.startswith("onceward.")'),
    )
    tree.edit(
        f"{tests}/unit/test_reasons.py",
        (
            literally('(*ENGINE.rglob("*.py"), *OPERATE.glob("*.py"))'),
            '(*rooms.files(), *CLI.glob("*.py"))',
        ),
        (r"^OPERATE = .*$", 'CLI = ENGINE / "cli"'),
        (r"\bOPERATE\b", "CLI"),
        (r"^(from onceward\.relay import \w+\n)", rf"\1\n{of_rooms}"),
    )
    tree.edit(
        f"{tests}/unit/test_conventions.py",
        (literally('ENGINE.rglob("*.py")'), "rooms.files()"),
        (r"^(from onceward\.observe import statements, traces\n)", rf"\1\n{of_rooms}"),
    )
    for name in ("test_tables", "test_terminal"):
        tree.edit(
            f"{tests}/unit/{name}.py",
            (r"^(SOURCES = Path\(\w+\.__file__\)\.parents)\[1\]$", r"\1[2]"),
        )
    tree.edit(
        f"{tests}/unit/test_logs.py",
        (r"\bpipeline\.test\b", "onceward.test"),
        (rf'^        "({OLD})(\.\w+)?",$', lambda one: f'        "{NAMES[one[1]]}{one[2] or ""}",'),
    )
    tree.edit(
        f"{tests}/integration/test_consume.py",
        (literally('one.name.startswith("pipeline")'), 'one.name.startswith("onceward")'),
    )


ROOMS = '''"""The engine's own modules, without the optional packages and the command line."""

import re
from pathlib import Path

import onceward

ENGINE = Path(onceward.__file__).parent
ROOMS = frozenset(re.findall(r"`(\\w+)/`", (ENGINE / "README.md").read_text("utf-8")))
"""Folders of the engine, which its page lists."""


def files() -> list[Path]:
    """Return the engine's modules."""
    return [*ENGINE.glob("*.py"), *(path for room in ROOMS for path in (ENGINE / room).rglob("*.py"))]


def have(module: str) -> bool:
    """Return whether a module is one of the engine."""
    top, *rest = module.split(".")
    return top == "onceward" and rest != [] and (
        rest[0] in ROOMS or (ENGINE / f"{rest[0]}.py").exists()
    )
'''


def tests_of_template(tree: Tree, renames: Renames) -> None:
    """Edit tests, chaos test, benchmarks and site."""
    tree.edit("chaos/sabotage.py", (literally('"../effects/'), '"effects/'))
    tree.edit(
        "tests/test_chaos.py",
        (
            r'^    engine = tmp_path / "pipeline"\n    for package in .*:\n        shutil\.copytree\(.*\n',
            '    engine = tmp_path / "onceward"\n'
            '    shutil.copytree(RAW / "src" / "onceward", engine)\n',
        ),
    )
    tree.edit(
        "tests/test_secrets.py",
        (literally('ours = ("pipeline.", "parcel_tracker.")'), 'ours = ("onceward.", "parcel_tracker.")'),
    )
    tree.edit(
        "tests/test_wheel.py",
        (r"\bpipeline\.__file__", "onceward.__file__"),
        (literally('tmp_path / "pipeline" / "__init__.py"'), 'tmp_path / "onceward" / "__init__.py"'),
    )
    tree.edit("tests/test_deploy.py", (r"site-packages/pipeline\b", "site-packages/onceward"))
    tree.edit(
        "tests/test_guides.py",
        (
            literally('(ENGINE.parent / "claims" / "settings.py")'),
            '(ENGINE / "claims" / "settings.py")',
        ),
        (
            literally('(ENGINE.parent / "operate" / "words.json")'),
            '(ENGINE / "cli" / "words.json")',
        ),
    )
    tree.edit(
        "tests/test_answers.py",
        (
            r'^    \*\("pipeline", "operate"(?:.*\n)*?.*"schema_registry", "attr"\),\n',
            '    *("onceward", "attr"),\n',
        ),
    )
    tree.edit(
        "tests/test_bake.py",
        (
            r'^COPIED = \(\n(?:    \*\("(?:src|tests)/onceward.*\n)+',
            'COPIED = (\n    *("src/onceward", "tests/onceward"),\n',
        ),
        (
            literally('"|".join(one.removeprefix("tests/") for one in folders)'),
            plainly('"|".join(one.removeprefix("tests/").replace("/", r"\\.") for one in folders)'),
        ),
    )
    tree.edit(
        "tests/releases/dumps.py",
        (
            r"^(LOCATIONS = .*\n)",
            r'\1OLD_LOCATIONS = ("pipeline:migrations/versions", "personal:migrations")\n'
            '"""Of version 1, whose packages had other names."""\n',
        ),
        (
            literally('        locations = "".join(f"\\n    {one}" for one in LOCATIONS)'),
            plainly(
                '        is_old = (code / "src" / "pipeline").exists()\n'
                '        locations = "".join(f"\\n    {one}" for one in (OLD_LOCATIONS if is_old else LOCATIONS))'
            ),
        ),
    )
    tree.edit(
        "tests/test_update.py",
        (
            r"(def test_a_service_of_an_old_commit_with_an_edited_engine_is_updated\((?:.*\n)*?)"
            r'    edit\(project\.path / "src/onceward/settings\.py", ',
            r"\1"
            '    engines = (project.path / "src" / one for one in ("onceward", "pipeline"))\n'
            "    [engine] = (one for one in engines if one.exists())\n"
            '    edit(engine / "settings.py", ',
        ),
        (
            literally('"from onceward import Plain, Position'),
            '"from pipeline import Plain, Position',
        ),
        (
            literally('"import Plain from plain, not from pipeline"'),
            '"import Plain from onceward.plain, not from onceward"',
        ),
    )
    tree.edit(
        "tests/test_read_me.py",
        (
            r"^PACKAGES = \((?:.*\n)*?^\)\n",
            lambda found: (
                'ENGINE = RAW / "src" / "onceward"\n'
                + re.sub(
                    rf'"({OLD})"', lambda one: f'"{NAMES[one[1]].rpartition(".")[2]}"', found[0]
                )
            ),
        ),
        (
            r"^def lines_of\((?:.*\n)*?^    return .*\n",
            plainly(
                "def lines_of(*folders: str) -> int:\n"
                '    """Return how many lines of Python folders of the engine have."""\n'
                '    modules = (one for name in folders for one in (ENGINE / name).rglob("*.py"))\n'
                '    return sum(len(one.read_text("utf-8").splitlines()) for one in modules)\n'
                "\n\n"
                "def rooms() -> list[str]:\n"
                '    """Return the engine\'s folders, without the packages next to them."""\n'
                '    return re.findall(r"`(\\w+)/`", (ENGINE / "README.md").read_text("utf-8"))\n'
            ),
        ),
        (
            literally('    assert lines_of("pipeline") == pytest.approx('),
            '    modules = sum(len(one.read_text("utf-8").splitlines()) for one in ENGINE.glob("*.py"))\n'
            "    assert lines_of(*rooms()) + modules == pytest.approx(",
        ),
        (literally("counted = sum(map(lines_of, PACKAGES))"), "counted = lines_of(*PACKAGES)"),
        (
            r"^    folders = \{.*\}$",
            plainly(
                '    engine = default_project.path / "src" / "onceward"\n'
                '    folders = {one.parent.name for one in engine.glob("*/__init__.py")}'
            ),
        ),
        (
            literally('assert folders == {"pipeline", default_project.package, *PACKAGES}'),
            "assert folders == {*rooms(), *PACKAGES}",
        ),
    )
    tree.edit(
        "benchmarks/engine.py",
        (r"^import subprocess$", "import re\nimport subprocess"),
        (
            r'^(ENGINE = ".*/src/onceward"\n)',
            plainly(
                f'ENGINE = "{RAW}/src/onceward"\n'
                '_ROOMS = re.findall(r"`(\\w+)/`", (ROOT / ENGINE / "README.md").read_text("utf-8"))\n'
                "_PLACES = (\n"
                '    *(f"{ENGINE}/{room}" for room in _ROOMS),\n'
                '    f":(glob){ENGINE}/*.py",\n'
                f'    "{RAW}/src/pipeline",\n'
                ")\n"
                '"""Where the engine is, without the packages next to it; the last one is of version 1."""\n'
            ),
        ),
        (r'"--", ENGINE\)', '"--", *_PLACES)'),
    )
    tree.edit(
        "website/reference.py",
        (rf'"({OLD})"(?=[:,)])', lambda one: f'"{NAMES[one[1]]}"'),
        (literally('one.__module__.partition(".")[0]'), 'one.__module__.rpartition(".")[0]'),
    )


def pages(tree: Tree) -> None:
    """Edit sentences about packages."""
    tree.edit(
        f"{RAW}/README.md",
        (literally("all others from `pipeline`"), "all others from `onceward`"),
        (
            r"^- `src/onceward/`, other folders of `src/`: the engine, optional packages: don't edit them$",
            "- `src/onceward/`: the engine and optional packages: don't edit them",
        ),
    )
    tree.edit(
        f"{RAW}/AGENTS.md",
        (
            r"^- Never edit `src/onceward`.*`make update` brings",
            "- Never edit `src/onceward`. `make update` brings",
        ),
    )
    tree.edit(
        f"{RAW}/docs/outside.md", (literally(", from `effects`."), ", from `onceward.effects`.")
    )
    tree.edit(f"{RAW}/docs/codecs.md", (r"errors are in `pipeline`", "errors are in `onceward`"))
    tree.edit(
        f"{RAW}/docs/protocol.md", (r"^- request \(`http_api`\)", "- request (`onceward.http`)")
    )
    tree.edit(
        f"{RAW}/docs/updating.md",
        (
            r"^(- \*\*Migrations\*\* run before .*\n)",
            r"\1- **Packages with new names**, as in version 2, also have them in your files. After"
            "\n  `cruft update`, or an update by a `dev/update.py` of version 1.0, run"
            " `python dev/renaming.py`.\n",
        ),
    )
    tree.edit(
        f"{RAW}/tests/onceward/unit/test_exports.py",
        (r"the names that `pipeline` exports", "the names that `onceward` exports"),
    )
    tree.edit(
        "CHANGELOG.md",
        (
            r"^- `Loads` can be imported from `pipeline`\.",
            "- `Loads` can be imported from `onceward`.",
        ),
        (literally("are in the package `plain`."), "are in `onceward.plain`."),
        (
            literally("they can be imported from `pipeline`, with"),
            "they can be imported from `onceward`, with",
        ),
        (
            r"\A((?:.*\n)*?## .*\n\n)",
            r"\1- **One name.** `src/onceward` has the engine (`pipeline`), the command line `cli`"
            " (`operate`), `http` (`http_api`) and the other packages.\n"
            "  `make update` moves folders and replaces names in your files; old names can be imported"
            " until version 3, with a warning. Settings, metrics and the\n"
            "  database keep their names. Loggers, `error.type` and errors of dead letters have the new"
            " ones. After an update by a `dev/update.py` of 1.0, run `python dev/renaming.py`.\n",
        ),
    )


def clean_up(tree: Tree) -> None:
    """Remove this script, which is done."""
    tree.git("rm", "-r", "--quiet", "docs/design/rename")
    tree.edit("pyproject.toml", (r'^(extend-exclude = \[.*), "docs/design/rename"\]', r"\1]"))


def install(tree: Tree) -> None:
    """Add the finder of old names, its data and tests."""
    for name, target in (
        ("renamed.json", f"{RAW}/src/onceward/renamed.json"),
        ("aliases.py", f"{RAW}/src/onceward/aliases.py"),
        ("test_aliases.py", f"{RAW}/tests/onceward/unit/test_aliases.py"),
        ("test_renamed.py", "tests/test_renamed.py"),
    ):
        if (HERE / name).exists():
            tree.write(target, (HERE / name).read_text("utf-8"))
        else:
            tree.doubts.append(f"{name} is not in the folder of this script")


KNOWN = (
    (".json", '"pipeline"'),  # a tag of the dashboard
    ("", "`pipeline`"),  # the schema
    ("pyproject.toml", '"http_server"'),
    ("/test_read_me.py", '"http_server"'),
    ("/errors.py", '"pipeline"'),
    ("/0001_pipeline.py", '"pipeline"'),  # a branch of revisions
    ("/computed.py", '"pipeline"'),  # names of meters, tracers, handlers of logs and a server stay
    ("/health.py", '"pipeline"'),
    ("/logs.py", '"pipeline"'),
    ("/metrics.py", '"pipeline"'),
    ("/statements.py", '"pipeline"'),
    ("/traces.py", '"pipeline"'),
    ("/schema.py", '"pipeline"'),
    ("/test_migration.py", '"pipeline"'),
    ("/test_failures.py", '"pipeline"'),
    ("/test_alerts.py", "pipeline.elsewhere"),  # tables of these tests
    ("/test_throttles.py", "pipeline.elsewhere"),
    ("/test_migrations.py", "pipeline.stray"),
    ("/test_revisions.py", "pipeline.rest"),
    ("/test_roles.py", "pipeline.mine"),
    ("/test_roles.py", "pipeline.later"),
    ("/test_chaos.py", "pipeline.begun"),
    ("/test_chaos.py", "pipeline.taken"),
    ("/test_update.py", '"pipeline"'),
    ("/test_update.py", "from pipeline import"),  # in a service of version 1
    ("/dumps.py", '"pipeline"'),
    ("/test_conventions.py", '"pipeline."'),  # of metrics
    ("/test_travel.py", '"pipeline."'),  # of a table
    ("benchmarks/engine.py", "src/pipeline"),
    ("contributing.md", "pipeline.new_"),
    ("backlog.pml", "pipeline.lane"),
)
"""What a person has looked at, and stays: the end of a path, and what is there."""


def look(tree: Tree, metrics: set[str]) -> None:
    """Collect what still has an old name, and is not known to be a name that stays."""
    finds = (
        (rf"(?<![\w./$-])(?P<all>({OLD})\.(?P<next>\w+)[\w.]*)", "dotted"),
        (rf"(?<![\w-])(?P<all>(?:src|tests)/({OLD})\b(?![-_]))", "path"),
        (rf"(?<![\w.])(?P<all>from ({OLD})[\w.]* import|^import ({OLD})\b)", "import"),
        (r'(?P<all>["`](operate|http_server|pipeline)["`])', "name"),
        (r'(?P<all>"pipeline\.")', "prefix"),
        (r"(?P<all>pipeline\\.(?P<next>\w+))", "pattern"),
        (rf"(?P<all>[\"'](?!pipeline\b)({OLD})(\.(?!md\b|html\b|log\b)\w+)+[\"'])", "literal"),
    )
    skipped = (".html", ".css", ".js", ".svg", ".sql")
    for name, text in tree.texts().items():
        if name.endswith(skipped) or name.endswith(
            ("renamed.json", "aliases.py", "test_aliases.py")
        ):
            continue
        if name in (f"{RAW}/dev/renaming.py", "tests/test_renamed.py"):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            for pattern, kind in finds:
                for found in re.finditer(pattern, line):
                    all_ = found["all"]
                    if kind == "pattern" and DATABASE.fullmatch(found["next"]):
                        continue
                    if kind == "dotted" and (
                        not all_.startswith("pipeline.")  # mostly variables
                        and not all_.startswith(("operate.", "http_server."))
                        or all_.startswith("pipeline.")
                        and (DATABASE.fullmatch(found["next"]) or all_.rstrip(".") in metrics)
                    ):
                        continue
                    if not any(name.endswith(end) and all_ == text for end, text in KNOWN):
                        tree.doubts.append(f"{name}:{number}: {kind} {all_}")
            if name.endswith(".py") and len(line) > 100 and "onceward" in line:
                tree.doubts.append(f"{name}:{number}: {len(line)} columns")


class Imports:
    """The modules of the raw tree, and what imports from them."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._files: dict[str, str] = {}
        self._names: dict[str, set[str]] = {}
        for name in tree.files():
            path = name.removeprefix(f"{RAW}/")
            if path != name and path.startswith(("src/", "tests/")) and path.endswith(".py"):
                parts = Path(path.removeprefix("src/")).with_suffix("").parts
                self._files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = name

    def check(self) -> None:
        """Add a doubt for each import of the engine, or of tests of the raw tree, that fails."""
        modules = {file: module for module, file in self._files.items()}
        for name, text in self._tree.texts().items():
            if not name.endswith(".py") or name.startswith("docs/design/"):
                continue
            try:
                unbaked = text.replace("<<cookiecutter.package_name>>", "unbaked")
                nodes = [*ast.walk(ast.parse(unbaked))]
            except SyntaxError as error:
                self._tree.doubts.append(f"{name}:{error.lineno}: {error.msg}")
                continue
            for node in nodes:
                for module, wanted in self._imported(node, modules.get(name), name):
                    if problem := self._problem(module, wanted):
                        self._tree.doubts.append(f"{name}:{vars(node)['lineno']}: {problem}")

    def _imported(
        self, node: ast.AST, module: str | None, file: str
    ) -> list[tuple[str, str | None]]:
        match node:
            case ast.Import(names=names):
                return [(one.name, None) for one in names]
            case ast.ImportFrom(module=found, names=names, level=0):
                return [(found or "", one.name) for one in names]
            case ast.ImportFrom(module=found, names=names, level=level) if module:
                parts = module.split(".")
                up = level - file.endswith("/__init__.py")
                base = ".".join(parts[: len(parts) - up] + ([found] if found else []))
                return [(base, one.name) for one in names]
        return []

    def _problem(self, module: str, wanted: str | None) -> str | None:
        top = module.split(".")[0]
        if top in NAMES and top != "contracts":  # contracts: a folder of services, too
            return f"{module} has its old name"
        if top != "onceward" and not module.startswith(("tests.onceward", "tests.servers")):
            return None
        if module not in self._files:
            return None if self._is_folder(module) else f"there is no {module}"
        if wanted in (None, "*") or f"{module}.{wanted}" in self._files:
            return None
        if wanted in self._bound(module) or self._is_folder(f"{module}.{wanted}"):
            return None
        return f"{module} has no {wanted}"

    def _is_folder(self, module: str) -> bool:
        return any(one.startswith(f"{module}.") for one in self._files)

    def _bound(self, module: str) -> set[str]:
        if module not in self._names:
            tree = ast.parse((self._tree.root / self._files[module]).read_text("utf-8"))
            found = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}
            kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            found |= {one.name for one in ast.walk(tree) if isinstance(one, kinds)}
            for one in ast.walk(tree):
                if isinstance(one, ast.Import | ast.ImportFrom):
                    found |= {each.asname or each.name.split(".")[0] for each in one.names}
            self._names[module] = found
        return self._names[module]


def names_of_telemetry(tree: Tree) -> set[str]:
    """Return names of metrics, attributes and settings of a session in the engine's code."""
    found: set[str] = set()
    for name, text in tree.texts().items():
        if name.startswith(f"{RAW}/src/") and name.endswith(".py"):
            found.update(re.findall(r"[\"'](pipeline\.[a-z_.]+)[\"']", text))
    return found


def tidy(tree: Tree) -> None:
    """Sort imports and format, as `make format` does, without its other fixes."""
    ruff = [str(tree.root / ".venv/bin/ruff")]
    settings = ["--config", "pyproject.toml"]
    check = [*ruff, "check", *settings, "--no-cache", "--select", "I", "--fix", "--quiet", "."]
    subprocess.run(check, cwd=tree.root, check=False)
    subprocess.run(
        [*ruff, "format", *settings, "--no-cache", "--quiet", "."], cwd=tree.root, check=False
    )


def main() -> int:
    """Rename all; return 1 if a person has to look at something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--format", action="store_true")
    chosen = parser.parse_args()
    tree = Tree(chosen.clone.resolve())
    if tree.git("status", "--porcelain", "--untracked-files=no").strip():
        sys.exit("the working tree has changes")
    inside = f"{RAW}/"
    paths = [one.removeprefix(inside) for one in tree.files() if one.startswith(inside)]
    sources = {one: (tree.root / RAW / one).read_bytes() for one in paths if one.endswith(".py")}
    modules = modules_in(paths, NAMES, moved=False)
    missing = {*NAMES} - {*modules}
    if missing:
        sys.exit(f"src has no {', '.join(sorted(missing))}")
    known = {*modules.values(), "<<cookiecutter.package_name>>"}
    packages = {one.split("/")[1] for one in paths if re.match(r"src/[^/]+/__init__\.py", one)}
    new = packages - {*NAMES} - known
    if new:
        sys.exit(f"renamed.json has no {', '.join(sorted(new))}")
    renames = Renames(modules, paths, lambda path: sources[path].decode("utf-8"))
    metrics = names_of_telemetry(tree)
    old_paths = {f"{inside}{renames.path(one)}": f"{inside}{one}" for one in paths}
    move(tree, renames, modules)
    rewrite(tree, renames, old_paths)
    tools(tree, renames)
    engine(tree, renames)
    tests_of_engine(tree)
    tests_of_template(tree, renames)
    pages(tree)
    install(tree)
    clean_up(tree)
    if chosen.format:
        tidy(tree)
    look(tree, metrics)
    Imports(tree).check()
    print("\n".join(sorted(dict.fromkeys(tree.doubts))) or "nothing is left to look at")
    return 1 if tree.doubts else 0


if __name__ == "__main__":
    sys.exit(main())
