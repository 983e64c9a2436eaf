"""The list of boundaries holds each statement that the engine has written down."""

import importlib
import pkgutil
import re

import sqlalchemy as sa

import pipeline
from pipeline.apply import statements as apply_statements
from pipeline.apply import throttle_statements
from pipeline.handlers import statements as handler_statements
from pipeline.relay import rejected_statements, window_statements
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

BY_COMMANDS_TOO = (
    apply_statements.SET_POSITION,
    apply_statements.SET_POSITION_BACK,
    apply_statements.READ_POSITIONS_OF_GROUP,
    throttle_statements.LOCK_STOPS,
    throttle_statements.LIST_STOPS,
    throttle_statements.FIND_STOPS_OF_KEY,
    throttle_statements.FIND_PUBLICATION,
    throttle_statements.STORE_STOPS,
    throttle_statements.DELETE_ENDED_STOPS,
    throttle_statements.DELETE_STOPS,
    throttle_statements.HOLD_KEYS,
    throttle_statements.RELEASE_KEYS,
    throttle_statements.ADD_TO_AUDIT,
    retry_statements.READ_ROW,
    *(
        retry_statements.FENCE_LANE,
        retry_statements.LOCK_LANE,
        retry_statements.REDRIVE_ROWS,
        retry_statements.DISCARD_ROWS,
    ),
    retention_statements.SKIP_ARCHIVE,
    retention_statements.NOTE_NO_ARCHIVING,
    relay_statements.LIST_SCHEDULED,
    *(
        relay_statements.COUNT_SCHEDULED,
        window_statements.COUNT_UNPUBLISHED,
        relay_statements.LIST_RELAYS,
        relay_statements.HAS_ANY_RELAY_BEGUN,
    ),
    *(
        rejected_statements.COUNT_WAITING_EVENTS,
        rejected_statements.COUNT_DEAD_EVENTS,
        rejected_statements.HOLD_SHARD,
    ),
    *(rejected_statements.REDRIVE_EVENTS, rejected_statements.DISCARD_EVENTS),
    *(server_statements.COUNT_WHAT_WAITS, server_statements.REMOVE_LIMITS),
    *(server_statements.READ_SNAPSHOT_TO_ADOPT, server_statements.END_LEASES),
    *(server_statements.FORGET_PROGRESS, server_statements.RENEW_EVENTS),
    *(server_statements.CLOSE_DAYS_AGAIN, server_statements.STORE_CLUSTER),
    *(server_statements.LIST_SEQUENCES, server_statements.IS_SEQUENCE_BEHIND),
    server_statements.ADVANCE_SEQUENCE,
)

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
    window_statements.FIND_LOWEST_ID,
    apply_statements.TAKE_TURN,
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
