"""The list of traps and the tests that name them."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
NAMED = re.compile(r"\btraps? ((?:\d+)(?:(?:, | and )\d+)*)", re.IGNORECASE)


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_every_trap_of_the_list_is_held_off_by_the_tests_that_it_names() -> None:
    named: dict[str, set[str]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        for text in docstrings(path):
            for numbers in NAMED.findall(text):
                for number in re.findall(r"\d+", numbers):
                    named[number].add(path.stem)
    listed = {}
    for row in re.findall(
        r"^\| (\d+) \|.*\| (.*) \|$", (TESTS / "TRAPS.md").read_text("utf-8"), re.MULTILINE
    ):
        listed[row[0]] = set(re.findall(r"`(\w+)`", row[1]))
    assert set(listed) == {str(n) for n in range(1, 38)}
    del listed["36"]  # its tests are those of the optional package `debezium`
    assert listed == named
