"""The guides to errors against the engine that they describe."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks.measures import MEASURES
from chaos.schedule import KINDS

from tests.baked import RAW, ROOT, BakedProject, Template

HANDLING = (RAW / "docs" / "handling-errors.md").read_text("utf-8")
OPERATING = (RAW / "docs" / "operating-errors.md").read_text("utf-8")
TIME = (RAW / "docs" / "time.md").read_text("utf-8")
ARCHIVE = (RAW / "docs" / "archive.md").read_text("utf-8")
OUTSIDE = (RAW / "docs" / "outside.md").read_text("utf-8")
EVENTS = OPERATING.partition("## Events that Kafka refuses")[2].partition("\n## ")[0]
ENGINE = RAW / "src" / "pipeline"


def blocks(text: str) -> str:
    """Return the guide's examples as one module: later ones go on from the earlier."""
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


def assigned(module: str, name: str) -> ast.expr:
    """Return what a module of the engine assigns to a name."""
    for node in ast.parse((ENGINE / module).read_text("utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value:
            return node.value
    raise LookupError(name)


def fields(module: str, name: str) -> list[str]:
    """Return the fields of a class of the engine, with their defaults."""
    for node in ast.parse((ENGINE / module).read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)]
    raise LookupError(name)


@pytest.mark.parametrize(
    "guide", [HANDLING, TIME, OUTSIDE], ids=["handling-errors", "time", "outside"]
)
@pytest.mark.parametrize("command", [[], ["-m", "mypy", "--strict"]], ids=["runs", "types"])
def test_the_examples_for_authors_of_handlers_work(
    tmp_path: Path, command: list[str], guide: str
) -> None:
    module = tmp_path / "examples.py"
    module.write_text(blocks(guide), "utf-8")
    config = ["--config-file", str(RAW / "pyproject.toml")] if command else []
    done = subprocess.run(
        [sys.executable, *command, *config, str(module)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(RAW / "src"), "MYPYPATH": str(RAW / "src"), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("operations_page", ["yes", "no"])
@pytest.mark.parametrize("object_store", ["yes", "no"])
def test_every_guide_comes_with_a_service_whose_read_me_points_to_it(
    template: Template, output: Path, object_store: str, operations_page: str
) -> None:
    project = template.bake(output, object_store=object_store, operations_page=operations_page)
    guides = {name for name in project.files() if re.fullmatch(r"docs/.*\.md", name)}
    names = {
        "deploying",
        "handling-errors",
        "how-it-works",
        "operating-errors",
        "outside",
        "protocol",
        "runbook",
        "security",
        "settings",
        "time",
    }
    if object_store == "yes":
        names |= {"archive", "claims"}
    if operations_page == "yes":
        names |= {"operations-page"}
    assert guides == {f"docs/{name}.md" for name in names}
    named = re.compile(r"`(docs/[\w./-]+)`")
    assert set(named.findall(project.read("README.md"))) == guides
    for name, content in project.files().items():
        if name.endswith((".md", ".py")):
            assert set(named.findall(content.decode())) <= guides, name


def test_every_page_that_the_template_names_exists() -> None:
    for page in re.findall(r"`(docs/[\w./-]+)`", (ROOT / "README.md").read_text("utf-8")):
        assert [*ROOT.glob(f"{page}*"), *RAW.glob(f"{page}*")], page


def test_every_picture_that_a_page_shows_exists() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), RAW / "README.md", *RAW.glob("docs/*.md")]
    pictures = [
        page.parent / picture
        for page in pages
        for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text("utf-8"))
    ]
    assert len(pictures) > 20
    assert [one for one in pictures if not one.is_file()] == []


def test_every_reason_is_in_the_guide_for_operators() -> None:
    known = set(ast.literal_eval(assigned("dead.py", "REASONS")))
    chapter = OPERATING.partition("## The reasons")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([^`]+)` ", chapter, re.MULTILINE)) == known


def test_every_reason_for_which_an_event_is_not_sent_is_in_the_guide_for_operators() -> None:
    known = set(ast.literal_eval(assigned("dead_events.py", "REASONS")))
    assert set(re.findall(r"^\| `([^`]+)` ", EVENTS, re.MULTILINE)) == known


def test_the_fields_of_events_for_scripts_are_those_that_the_commands_write() -> None:
    written = {
        *fields("dead_events.py", "UnsentEvent"),
        *fields("dead_events.py", "EventDetail"),
        *fields("dead_events.py", "EventGroup"),
    } - {"event"}
    paragraph = re.search(r"^With `--json` .*", EVENTS, re.DOTALL | re.MULTILINE)
    assert paragraph
    named = set(re.findall(r"`([a-z_]+)`", paragraph[0]))
    assert named - {"list", "show", "redrive", "discard"} == written


def test_the_fields_for_scripts_are_those_that_the_commands_write() -> None:
    written = {
        *fields("dead.py", "Letter"),
        *fields("dead.py", "Detail"),
        *fields("dead.py", "Group"),
        *("found", "redriven", "became", "died", "discarded"),
    } - {"letter"}
    paragraph = re.search(r"^For scripts, .*?(?=\n\n)", OPERATING, re.DOTALL | re.MULTILINE)
    assert paragraph
    named = set(re.findall(r"`([a-z_]+)`", paragraph[0]))
    assert named - {"list", "show", "redrive", "discard"} == written


def test_the_settings_and_defaults_that_the_guides_name_exist() -> None:
    settings = (ENGINE / "settings.py").read_text("utf-8")
    claims = (ENGINE.parent / "claims" / "settings.py").read_text("utf-8")
    for name in re.findall(r"`PIPELINE_(\w+)`", HANDLING + OPERATING + TIME + OUTSIDE + ARCHIVE):
        if name.startswith("CLAIM_"):
            assert f"    {name.removeprefix('CLAIM_').lower()}: " in claims, name
        elif name != "ARCHIVE_URL":  # the archive's own
            assert f"    {name.lower()}: " in settings, name
    policy = (ENGINE / "policy.py").read_text("utf-8")
    for name in fields("policy.py", "Policy"):
        assert f"| `{name}`" in HANDLING
    assert "attempts: int = 6" in policy
    assert "(30.0, 120.0, 480.0, 1_920.0, 3_600.0)" in policy
    assert "breaker_keys: Count = 20" in settings
    assert "unclean_starts: Count = 3" in settings
    assert "unsent_pause: Seconds = 5.0" in settings
    assert "unsent_attempts: Count = 100" in settings
    assert "unsent_age: Seconds = 86_400.0" in settings
    assert "relay_lease: Annotated[Seconds, Field(ge=1)] = 10.0" in settings
    assert "hang_timeout: Annotated[Seconds, Field(ge=2)] = 30.0" in settings


PARSE = """
import contextlib, io, shlex, sys
from parcel_tracker.main import main
for line in sys.stdin:
    # With a question for help nothing is done, but options and commands must exist.
    sys.argv = ["service", *shlex.split(line, comments=True), "--help"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code
    if code:
        print(line, said.getvalue())
"""


EXAMPLES = """
import typer
from parcel_tracker.main import main

def examples(command, *path):
    for name, one in getattr(command, "commands", {}).items():
        commands = getattr(one, "commands", None)
        if commands:
            examples(one, *path, name)
        if not commands or one.invoke_without_command:
            print(" ".join([*path, name]), one.epilog, sep="|")

examples(typer.main.get_command(main))
"""


def told(code: str, lines: Iterable[str], project: BakedProject) -> str:
    """Return what Python says to these lines, beside the service's source."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],
        input="\n".join(lines),
        env={"PYTHONPATH": str(project.path / "src"), "PATH": "", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_command_of_a_service_has_an_example_that_is_one(
    default_project: BakedProject,
) -> None:
    listed = [line.split("|") for line in told(EXAMPLES, [], default_project).splitlines()]
    names = {name for name, _ in listed}
    assert {"claims sweep", "archive find", "dead events list", "run", "relay", "page"} < names
    for name, epilog in listed:
        assert epilog.startswith(f"For example: service {name}"), name
    examples = [epilog.removeprefix("For example: service ") for _, epilog in listed]
    assert told(PARSE, examples, default_project) == ""


def test_every_command_that_a_page_shows_exists_with_its_options(
    default_project: BakedProject,
) -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), RAW / "README.md", *RAW.glob("docs/*.md")]
    shown = {
        command
        for page in pages
        for command in re.findall(
            r"^(?:\$ )?(?:\S*/)?service (.*)",
            blocks_of_shells(page.read_text("utf-8")),
            re.MULTILINE,
        )
    }
    made_up = "dead list --reasons failed"

    said = told(PARSE, [*sorted(shown), made_up], default_project)

    assert len(shown) > 40
    assert said.startswith(made_up), said


def programs() -> set[str]:
    """Return what the template's own pages have Python run: themselves, or by `make`."""
    pages = [one.read_text("utf-8") for one in (ROOT / "README.md", *ROOT.glob("docs/*.md"))]
    lines = [
        line.partition("#")[0].strip()
        for page in pages
        for line in (*blocks_of_shells(page).splitlines(), *re.findall(r"`([^`\n]+)`", page))
    ]
    found = {line.removeprefix("python -m ") for line in lines if line.startswith("python -m ")}
    for line in lines:
        # Those of a service, and the tests themselves, are run by other tests.
        if made := re.match(r"(?:[A-Z_]+=\S+ )*make ((?:demo|chaos|bench)\b.*)", line):
            told = subprocess.run(
                ["make", "--dry-run", *made[1].split()],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.replace("\\\n", " ")
            found |= {
                " ".join(one.split()) for one in re.findall(r"python -m ((?!pip|venv).*)", told)
            }
    return found


def test_every_program_that_a_page_shows_takes_its_options() -> None:
    shown = programs()
    assert {one.split()[0] for one in shown} >= {"benchmarks.run", "chaos.run", "demo.traced"}
    for program in sorted(shown):
        module, *options = program.split()
        helped = subprocess.run(
            [sys.executable, "-m", module, *options, "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert helped.returncode == 0, helped.stderr
        for option in options:
            if option.startswith("--"):
                assert option.partition("=")[0] in helped.stdout, program


def test_what_a_page_chooses_of_faults_and_measures_exists() -> None:
    chosen: dict[str, set[str]] = {"--faults": set(), "--only": set()}
    for program in programs():
        for option, values in re.findall(r"(--faults|--only)[ =](\S+)", program):
            chosen[option] |= set(values.split(","))
    assert {"kill", "pause"} <= chosen["--faults"] <= set(KINDS)
    assert {"layers", "throughput"} <= chosen["--only"] <= set(MEASURES)


def test_the_part_of_the_crash_matrix_that_the_page_runs_is_one() -> None:
    page = (ROOT / "docs" / "crash-matrix.md").read_text("utf-8")
    (line,) = re.findall(r"-m pytest (.*)", blocks_of_shells(page))
    arguments = shlex.split(line)

    def selected(*arguments: str) -> set[str]:
        # The servers are asked for only when a test runs.
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments],
            cwd=RAW,
            capture_output=True,
            text=True,
            check=True,
        )
        return {one for one in done.stdout.splitlines() if "::" in one}

    part = selected(*arguments)
    every = selected(*arguments[: arguments.index("-k")])
    assert 0 < len(part) < len(every)
    assert all("consume" in one and "commit" in one for one in part)


def test_a_shell_that_was_told_to_completes_commands_and_their_options(
    default_project: BakedProject, tmp_path: Path
) -> None:
    service = tmp_path / "service"
    service.write_text(
        f"#!{sys.executable} -B\nfrom parcel_tracker.main import main\n\nmain()\n", "utf-8"
    )
    service.chmod(0o755)

    def bash(text: str) -> str:
        done = subprocess.run(
            ["bash", "-c", f"{text}\ntrue"],  # so that the shell stays the one that is asked
            env={
                "PYTHONPATH": str(default_project.path / "src"),
                "PATH": f"{tmp_path}:/usr/bin:/bin",
                "HOME": str(tmp_path),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    assert "completion installed" in bash("service --install-completion")

    def completed(words: str) -> list[str]:
        last = len(words.split()) - (not words.endswith(" "))
        ask = f'source ~/.bashrc; COMP_WORDS=({words} ""); COMP_CWORD={last};'
        return bash(
            f'{ask} $(complete -p service | grep -o "_[a-z_]*") service\necho "${{COMPREPLY[@]}}"'
        ).split()

    assert "redrive" in completed("service dead ")
    assert "--dry-run" in completed("service dead redrive --d")


def blocks_of_shells(text: str) -> str:
    """Return what a page shows for a shell, and of shells."""
    return "\n".join(re.findall(r"^```(?:sh|text)\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
