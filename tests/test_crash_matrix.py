"""The page on the crash matrix says what the engine's test does."""

import importlib.util
import re
from types import ModuleType

from tests.baked import RAW, ROOT

PAGE = (ROOT / "docs" / "crash-matrix.md").read_text("utf-8")


def listed() -> ModuleType:
    """Return the engine's list, which nothing here could import by its name."""
    path = RAW / "tests" / "pipeline" / "integration" / "boundaries.py"
    spec = importlib.util.spec_from_file_location("boundaries", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_and_the_counts_of_the_page_are_those_of_the_list() -> None:
    cells = re.findall(r"^\| (`\w+: .+?`) \|", PAGE, re.MULTILINE)
    in_table = [name for cell in cells for name in re.findall("`(.+?)`", cell)]
    counts = re.search(
        r"are (\d+) boundaries\..+ of (\d+) of them, .+ the other (\d+)\b", PAGE, re.DOTALL
    )
    assert counts

    names = [boundary.name for boundary in listed().BOUNDARIES]
    assert sorted(in_table) == sorted(name for name in names if name in in_table)
    others = len(names) - len(in_table)
    assert list(map(int, counts.groups())) == [len(names), others, len(in_table)]


def test_every_row_says_what_the_next_process_finds() -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("| `")]

    assert rows
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 3, row
        assert all(cells), row


def test_the_page_explains_the_moments_at_which_the_test_kills() -> None:
    explained = re.findall(r"^- `(\w+)`: ", PAGE, re.MULTILINE)
    (header,) = re.findall(r"^\| boundary \|.+", PAGE, re.MULTILINE)

    moments = [moment.value for moment in listed().Moment]
    assert explained == moments
    assert re.findall("`(.+?)`", header) == moments
