"""The list of traps, and that tests name each."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
NAMED = re.compile(r"\btraps? ((?:\d+)(?:(?:, | and )\d+)*)", re.IGNORECASE)


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_every_trap_of_the_list_is_held_off_by_a_test() -> None:
    named = {
        number
        for path in TESTS.rglob("test_*.py")
        for text in docstrings(path)
        for numbers in NAMED.findall(text)
        for number in re.findall(r"\d+", numbers)
    }
    listed = re.findall(r"^(\d+)\. ", (TESTS / "TRAPS.md").read_text("utf-8"), re.MULTILINE)
    assert listed == [str(number) for number in range(1, 38)]
    assert named | {"36"} == set(listed)  # 36 is tested with the optional package `debezium`
