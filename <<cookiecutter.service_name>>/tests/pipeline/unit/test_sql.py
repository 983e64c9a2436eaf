"""The statements that `service sql` prints."""

import pkgutil
import re

import pipeline
from pipeline import sql

OF_SERVICES = "pipeline.observe.statements"
"""Tells what a service's own statements do, and has none."""


def test_every_statement_says_what_it_locks_and_how_it_finds_rows() -> None:
    for one in sql.statements():
        assert re.search(r"^Locks: .*\.$", one.comment, re.MULTILINE | re.DOTALL), one.name
        assert re.search(r"^Plan: .*\.$", one.comment, re.MULTILINE | re.DOTALL), one.name


def test_every_public_statement_of_a_module_of_statements_is_printed() -> None:
    modules = pkgutil.walk_packages(pipeline.__path__, "pipeline.")
    names = {one.name for one in modules if one.name.endswith("statements")}
    assert names - {OF_SERVICES} == {module.__name__ for module in sql.MODULES}
    for module in sql.MODULES:
        of_module = {
            name.lower()
            for name, value in vars(module).items()
            if sql.is_statement(value) and not name.startswith("_")
        }
        assert of_module <= {one.name for one in sql.statements()}, module.__name__
