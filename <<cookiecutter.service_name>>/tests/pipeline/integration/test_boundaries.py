"""The list of boundaries holds each statement that the engine has written down."""

import importlib
import pkgutil
import re

import sqlalchemy as sa

import pipeline
from pipeline.apply import backlog, positions, turns
from pipeline.handlers import sessions
from pipeline.relay import cursor, rejected, scheduled, window
from pipeline.retention import archive, partitions
from pipeline.retry import lanes
from pipeline.servers import probe, revisions

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
    "pipeline.apply.audit",
    "pipeline.apply.stopping",
    "pipeline.retry.copies",
    "pipeline.servers.cluster",
)
"""Modules whose statements run when a person asks for it; a service never does."""

BY_COMMANDS_TOO = (
    *(positions._SEEK, positions._REWIND, positions._OF_GROUP),
    *(lanes._FENCE, lanes._LOCK_ONLY, lanes._REDRIVE, lanes._DISCARD),
    archive._SKIP_ARCHIVE,
    archive._ARCHIVES_NO_LONGER,
    scheduled._LIST,
    *(scheduled._COUNT, window._COUNT, cursor._RELAYS, cursor._HAS_BEGUN),
    *(rejected._COUNT_WAITING, rejected._COUNT_DEAD, rejected._HOLD_SHARD),
    *(rejected._REDRIVE, rejected._DISCARD),
)

UNMET = (
    *(sessions.BEGIN, sessions.GUARD_COMMIT, sessions._GUARD),
    sessions.DONE,
    *(sessions._IS_AT_WORK, lanes._LOCKED, lanes._EXTEND_UNLOCKED),
    backlog._DUE,
    probe._WRITE,
    revisions._DISTRIBUTED,
    partitions._USED_BY,
    archive._NOT_ARCHIVED,
    archive._ARCHIVES,
    archive._CONTINUE_ROUND,
    window._LOWEST,
    turns._TAKE,
)
"""Statements that only damage, a long outage, an isolated message or somebody else leads to, or
a handler's session."""

SQL = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b")

NO_PARTS = "pipeline.migrations", "pipeline.testing"
"""What runs beside a service, and not in its processes."""


def test_every_statement_that_the_engine_has_written_down_is_in_the_list() -> None:
    modules = pkgutil.walk_packages(pipeline.__path__, "pipeline.")
    names = {one.name for one in modules if not one.name.startswith(NO_PARTS)}
    statements = [
        value
        for name in sorted(names.difference(BY_COMMANDS))
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, str | sa.TextClause) and SQL.match(str(value))
        if value not in BY_COMMANDS_TOO + UNMET
    ]
    assert len(statements) > 15
    assert {boundary_of(statement) for statement in statements} <= {one.name for one in BOUNDARIES}
