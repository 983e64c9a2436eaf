"""The list of boundaries holds each statement that the engine has written down."""

import importlib
import pkgutil
import re

import sqlalchemy as sa

import pipeline
from pipeline.apply import statements as apply_statements
from pipeline.handlers import statements as handler_statements
from pipeline.relay import statements as relay_statements
from pipeline.retention import partition_statements
from pipeline.retention import statements as retention_statements
from pipeline.retry import statements as retry_statements
from pipeline.servers import statements as server_statements

from .boundaries import BOUNDARIES
from .languages import boundary_of

BY_COMMANDS = (
    "operate.dead",
    "operate.dead_events",
    "operate.dead_letters",
    "operate.doctor",
    "operate.inbox_commands",
    "operate.moves",
    "operate.status",
)
"""Modules whose statements run when a person asks for it; a service never does."""

UNMET = (
    *(handler_statements.GUARD_WRITER, handler_statements.GUARD_COMMIT, handler_statements._GUARD),
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

NO_PARTS = "pipeline.migrations", "pipeline.operators", "pipeline.testing"
"""What runs beside a service, and not in its processes, which can't import it."""


def test_every_statement_that_the_engine_has_written_down_is_in_the_list() -> None:
    modules = pkgutil.walk_packages(pipeline.__path__, "pipeline.")
    names = {one.name for one in modules if not one.name.startswith(NO_PARTS)}
    statements = [
        value
        for name in sorted(names.difference(BY_COMMANDS))
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, str | sa.TextClause) and SQL.match(str(value))
        if value not in UNMET
    ]
    assert len(statements) > 15
    assert {boundary_of(statement) for statement in statements} <= {one.name for one in BOUNDARIES}
