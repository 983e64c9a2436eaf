"""The list of boundaries holds each statement that the engine has written down."""

import importlib
import pkgutil
import re

import sqlalchemy as sa

import onceward
from onceward.apply import statements as apply_statements
from onceward.handlers import statements as handler_statements
from onceward.relay import statements as relay_statements
from onceward.retention import partition_statements
from onceward.retention import statements as retention_statements
from onceward.retry import statements as retry_statements
from onceward.servers import statements as server_statements

from .boundaries import BOUNDARIES
from .languages import boundary_of
from tests.onceward import rooms

BY_COMMANDS = (
    "onceward.cli.dead",
    "onceward.cli.dead_events",
    "onceward.cli.dead_letters",
    "onceward.cli.doctor",
    "onceward.cli.inbox_commands",
    "onceward.cli.moves",
    "onceward.cli.status",
)
"""Modules whose statements run when a person asks for it; a service never does."""

UNMET = (
    *(handler_statements.GUARD_WRITER, handler_statements.GUARD_COMMIT),
    *(handler_statements.END_GUARD, handler_statements.CHECK_GUARD),
    *(retry_statements._LOCKED, retry_statements.EXTEND_UNLOCKED_LEASES),
    apply_statements.SHARE_GENERATIONS,  # a part of the statement that begins a transaction
    apply_statements.COUNT_DUE,
    server_statements.PROBE_WRITING,
    server_statements.FIND_DISTRIBUTED_TABLE,
    partition_statements.FIND_USER_OF_PARTITION,
    retention_statements.NOTE_DAY_NOT_ARCHIVED,
    retention_statements.NOTE_ARCHIVING,
    retention_statements.CONTINUE_ROUND,
    relay_statements.FIND_LOWEST_ID,
    relay_statements.FIND_FIRST_ID,
    apply_statements.TAKE_TURN,
)
"""Statements that only damage, a long outage, an isolated message or somebody else leads to, or
a handler's session."""

SQL = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b")

NO_PARTS = "onceward.migrations", "onceward.operators", "onceward.testing"
"""What runs beside a service, and not in its processes, which can't import it."""


def test_every_statement_that_the_engine_has_written_down_is_in_the_list() -> None:
    modules = pkgutil.walk_packages(onceward.__path__, "onceward.")
    found = {one.name for one in modules if rooms.have(one.name)}
    names = {name for name in found if not name.startswith(NO_PARTS)}
    statements = [
        value
        for name in sorted(names.difference(BY_COMMANDS))
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, str | sa.TextClause) and SQL.match(str(value))
        if value not in UNMET
    ]
    assert len(statements) > 15
    assert {boundary_of(statement) for statement in statements} <= {one.name for one in BOUNDARIES}
