"""The statements that `service sql` prints."""

import ast
import pkgutil
import re
from pathlib import Path

import onceward
from onceward import sql

from tests.onceward import rooms

OF_SERVICES = "onceward.observe.statements"
"""Tells what a service's own statements do, and has none."""
ELSEWHERE = {"migrations", "testing", "sql.py", "statements.py"}
"""What runs beside a service, prints statements, or tells what a service's own do."""
NO_STATEMENTS = {"SELECT", "DELETE 0", "SELECT undistribute_table('pipeline."}
"""A question whether the transaction has failed, an answer of the server, and an advice."""


def test_every_statement_says_what_it_locks_and_how_it_finds_rows() -> None:
    for one in sql.statements():
        assert re.search(r"^Locks: .*\.$", one.comment, re.MULTILINE | re.DOTALL), one.name
        assert re.search(r"^Plan: .*\.$", one.comment, re.MULTILINE | re.DOTALL), one.name


def test_no_statement_is_written_down_elsewhere() -> None:
    root, texts = rooms.ENGINE, set[str]()
    printed = {Path(module.__file__ or "") for module in sql.MODULES}
    for path in rooms.files():
        if path not in printed and not ELSEWHERE & {*path.relative_to(root).parts}:
            found = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))))
            values = (one.value for one in found if isinstance(one, ast.Constant))
            texts |= {value for value in values if sql.is_statement(value)}
    assert texts == NO_STATEMENTS


def test_every_public_statement_of_a_module_of_statements_is_printed() -> None:
    modules = pkgutil.walk_packages(onceward.__path__, "onceward.")
    names = {
        one.name for one in modules if one.name.endswith("statements") and rooms.have(one.name)
    }
    assert names - {OF_SERVICES} == {module.__name__ for module in sql.MODULES}
    for module in sql.MODULES:
        of_module = {
            name.lower()
            for name, value in vars(module).items()
            if sql.is_statement(value) and not name.startswith("_")
        }
        assert of_module <= {one.name for one in sql.statements()}, module.__name__
