"""Packages whose names a version has changed: `make update`, and `dev/renaming.py` by itself."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
from renaming import Renames, modules_in

from tests.baked import RAW
from tests.test_update import ADA, Small, commit, edit, git, run

NAMES = {"pipeline": "onceward", "operate": "onceward.cli", "page": "onceward.page"}
ENGINE = {
    "src/pipeline/__init__.py": "from pipeline.apply.inbox import Inbox\n",
    "src/pipeline/apply/__init__.py": "",
    "src/pipeline/apply/inbox.py": "class Inbox:\n    number = 1\n\n\nlast = 1\n",
    "src/pipeline/migrations/versions/0001.py": "",
    "src/operate/__init__.py": "",
    "src/operate/output.py": "import pipeline\n\nprint(pipeline.Inbox)\n",
    "src/page/__init__.py": "",
    "src/page/settings.py": "",
    "tests/pipeline/__init__.py": "",
    "tests/pipeline/test_inbox.py": "from tests.pipeline import nasty\n",
}
HANDLERS = """from operate.output import write
from pipeline import Inbox

ROWS = "SELECT * FROM pipeline.backlog"  # see `pipeline.apply.inbox`
"""


@pytest.fixture
def renames() -> Renames:
    return Renames(modules_in(ENGINE, NAMES, moved=False), ENGINE, ENGINE.__getitem__)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from pipeline import Inbox", "from onceward import Inbox"),
        ("    from operate.output import write", "    from onceward.cli.output import write"),
        ("from tests.pipeline import nasty", "from tests.onceward import nasty"),
        ("import pipeline\n\npipeline.Inbox", "import onceward\n\nonceward.Inbox"),
        ("import operate\n\na.operate = 1", "import onceward.cli\n\na.operate = 1"),
        ("pipeline.Inbox()", "pipeline.Inbox()"),
        ("page.settings.read()", "page.settings.read()"),
        ("'pipeline.apply.inbox.last'", "'onceward.apply.inbox.last'"),
        ("'pipeline.apply.inbox.first'", "'pipeline.apply.inbox.first'"),
        ("'pipeline.Inbox.number'", "'onceward.Inbox.number'"),
        ("'SELECT 1 FROM pipeline.backlog'", "'SELECT 1 FROM pipeline.backlog'"),
        ("# see `src/operate/output.py`", "# see `src/onceward/cli/output.py`"),
        ("'operate/output.py'", "'onceward/cli/output.py'"),
        ("'operate/mine.py'", "'operate/mine.py'"),
        ("ROOT / 'src' / 'page'", "ROOT / 'src' / 'page'"),
        ('ROOT / "src" / "page"\n', 'ROOT / "src" / "onceward" / "page"\n'),
        ('logging.getLogger("page")', 'logging.getLogger("onceward.page")'),
        ("'program = import pipeline'", "'program = import pipeline'"),
        ("'import pipeline'", "'import onceward'"),
        (r"'one\nfrom pipeline import Inbox'", r"'one\nfrom onceward import Inbox'"),
        (r"'one\nimport pipeline\n'", r"'one\nimport onceward\n'"),
        ("from pipelines import pipeline", "from pipelines import pipeline"),
        ('"page"', '"page"'),
        ("def broken(:\n", "def broken(:\n"),
    ],
)
def test_names_in_code_are_replaced_where_they_are_modules(
    renames: Renames, before: str, after: str
) -> None:
    assert renames.text("mine.py", before) == after


def test_names_in_pages_and_configuration_are_replaced(renames: Renames) -> None:
    assert renames.text("alembic.ini", "a = pipeline:migrations/versions\n") == (
        "a = onceward:migrations/versions\n"
    )
    assert renames.text("a.md", "`tests/pipeline` has `page.settings`, `page.title`") == (
        "`tests/onceward` has `onceward.page.settings`, `page.title`"
    )
    assert renames.text("a.html", "{{ page.settings }}") == "{{ page.settings }}"


def test_what_the_template_does_not_have_keeps_its_name() -> None:
    own = {"src/page/__init__.py": ""}
    assert modules_in(own, {"page": "onceward.page"}, moved=True) == {}
    assert modules_in({"tests/page/a.py": ""}, NAMES, moved=False) == {
        "tests.page": "tests.onceward.page"
    }


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")


def moved(files: dict[str, str]) -> dict[str, str]:
    """Return the files as a version with the new names has them."""
    renames = Renames(modules_in(files, NAMES, moved=False), files, files.__getitem__)
    return {renames.path(name): renames.text(name, text) for name, text in files.items()}


@pytest.fixture
def renaming(tmp_path: Path) -> Small:
    """A service at v0.1.0. The template's v0.2.0 has new names, and a line more in the inbox."""
    template = tmp_path / "template"
    raw = template / "{{cookiecutter.name}}"
    raw.mkdir(parents=True)
    git(template.parent, "init", "--quiet", "--initial-branch=main", str(template))
    engine, service = ENGINE, tmp_path / "small"
    for version in ("0.1.0", "0.2.0"):
        given = {"name": "small", "_template_version": version}
        record = {"template_version": version, "cookiecutter": {"name": "small"}}
        if version == "0.2.0":
            git(template, "rm", "-r", "--quiet", ".")
            engine = moved(ENGINE)
            engine["src/onceward/apply/inbox.py"] += "following = 2\n"
            engine["src/onceward/renamed.json"] = json.dumps(NAMES)
        sums = (
            f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n"
            for name, text in sorted(engine.items())
            if name.startswith("src/")
        )
        handlers = HANDLERS if version == "0.1.0" else moved({"a.py": HANDLERS, **ENGINE})["a.py"]
        files = {**engine, "src/small/handlers.py": handlers, ".engine.sha256": "".join(sums)}
        write(template, {"cookiecutter.json": json.dumps(given)})
        write(raw, {**files, ".cookiecutter.json": json.dumps(record), ".gitignore": "build/\n"})
        commit(template, version)
        git(template, "tag", f"v{version}")
        if version == "0.1.0":
            source = {
                "template": str(template),
                "commit": git(template, "rev-parse", "HEAD").strip(),
            }
            write(service, {**files, ".gitignore": "build/\n"})
            write(
                service, {".cookiecutter.json": json.dumps({**source, **record}, indent=4) + "\n"}
            )
    git(service, "init", "--quiet", "--initial-branch=main")
    for name, value in ADA.items():
        git(service, "config", name, value)
    edit(service / "src/small/handlers.py", (r"from pipeline import Inbox", r"\g<0>, last"))
    write(service, {"src/small/own.py": "import pipeline\n\nprint(pipeline.Inbox)\n"})
    commit(service, "Ada's")
    return Small(template, service)


@pytest.mark.slow
def test_an_update_moves_packages_and_replaces_names_in_the_services_own_files(
    renaming: Small,
) -> None:
    before = renaming.git("rev-parse", "HEAD")

    outcome = renaming.update("--to=v0.2.0")

    assert outcome.code == 0, outcome.said
    assert "Packages have new names" in outcome.said
    files = renaming.git("ls-files").split()
    assert not [name for name in files if "pipeline" in name or "operate" in name]
    assert renaming.read("src/onceward/apply/inbox.py").endswith("following = 2\n")
    assert renaming.read("src/small/own.py") == "import onceward\n\nprint(onceward.Inbox)\n"
    handlers = renaming.read("src/small/handlers.py")
    assert "from onceward.cli.output import write\nfrom onceward import Inbox, last\n" in handlers
    assert "FROM pipeline.backlog" in handlers
    assert json.loads(renaming.read(".cookiecutter.json"))["template_version"] == "0.2.0"
    assert renaming.git("status", "--porcelain") == ""
    commits = renaming.git("rev-list", "--first-parent", "--count", f"{before}..HEAD")
    assert commits == "2", "where the service came from, and the merge"
    assert "Nothing to merge" in renaming.update("--to=v0.2.0").said


@pytest.mark.slow
def test_an_edited_engine_is_merged_under_its_new_name(renaming: Small) -> None:
    edit(renaming.path / "src/pipeline/apply/inbox.py", (r"number = 1", "number = 4711"))
    commit(renaming.path, "The engine")

    outcome = renaming.update("--to=v0.2.0")

    assert outcome.code == 0, outcome.said
    inbox = renaming.read("src/onceward/apply/inbox.py")
    assert "number = 4711" in inbox
    assert inbox.endswith("following = 2\n")


@pytest.mark.slow
def test_a_conflict_is_left_to_the_owner_who_can_go_back(renaming: Small) -> None:
    edit(renaming.path / "src/pipeline/apply/inbox.py", (r"last = 1\n", "last = 1\nmine = 2\n"))
    commit(renaming.path, "The engine")
    before = renaming.git("rev-parse", "HEAD")

    outcome = renaming.update("--to=v0.2.0")

    assert outcome.code == 1, outcome.said
    unmerged = renaming.git("diff", "--name-only", "--diff-filter=U")
    assert unmerged == "src/onceward/apply/inbox.py"
    renaming.git("merge", "--abort")
    assert renaming.git("diff", before, "HEAD") == ""
    assert renaming.git("status", "--porcelain") == ""
    assert renaming.read("src/small/own.py") == "import pipeline\n\nprint(pipeline.Inbox)\n"
    assert renaming.update("--to=v0.2.0").code == 1, "and again"


@pytest.mark.slow
def test_an_update_with_new_names_can_be_reverted_and_repeated(renaming: Small) -> None:
    assert renaming.update("--to=v0.2.0").code == 0
    updated = renaming.git("rev-parse", "HEAD^{tree}")

    renaming.git("revert", "--no-edit", "-m", "1", "HEAD")

    assert renaming.read("src/small/own.py") == "import pipeline\n\nprint(pipeline.Inbox)\n"
    assert renaming.update("--to=v0.2.0").code == 0
    assert renaming.git("rev-parse", "HEAD^{tree}") == updated


@pytest.mark.slow
def test_a_file_in_the_way_of_a_move_is_named(renaming: Small) -> None:
    write(renaming.path, {"src/onceward/apply/inbox.py": "MINE = True\n"})
    commit(renaming.path, "In the way")

    said = renaming.refusal("--to=v0.2.0")

    assert "src/onceward/apply/inbox.py will be the path of src/pipeline/apply/inbox.py" in said


@pytest.mark.slow
def test_old_names_that_an_older_update_has_left_are_replaced(renaming: Small) -> None:
    """As by `dev/update.py` of 1.0, which knows of no names."""
    old = ("src/pipeline", "src/operate", "src/page", "tests", ".engine.sha256")
    renaming.git("rm", "-r", "--quiet", *old)
    new = moved(ENGINE) | {"src/onceward/renamed.json": json.dumps(NAMES)}
    write(renaming.path, new)
    write(renaming.path, {"dev/renaming.py": (RAW / "dev/renaming.py").read_text("utf-8")})
    commit(renaming.path, "Merged")

    done = run(renaming.path, sys.executable, "dev/renaming.py")

    assert sorted(done.said.split()) == ["src/small/handlers.py", "src/small/own.py"]
    assert renaming.read("src/small/own.py") == "import onceward\n\nprint(onceward.Inbox)\n"
