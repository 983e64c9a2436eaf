"""The protocols of PostgreSQL and Kafka, as far as they name a request and end an answer."""

import asyncio
import re
import struct
from collections.abc import AsyncIterator, Mapping

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import asyncpg

from onceward.apply import statements as apply_statements
from onceward.consume import statements as consume_statements
from onceward.handlers import statements as handler_statements
from onceward.relay import statements as relay_statements
from onceward.retention import partition_statements
from onceward.retention import statements as retention_statements
from onceward.retry import count_statements
from onceward.retry import statements as retry_statements
from onceward.servers import statements as server_statements

from . import bank
from .wire import Answer, Request

_STATEMENTS: Mapping[object, str] = {
    server_statements.READ_DATABASE: "schema: read owner",
    server_statements.LIST_APPLIED_REVISIONS: "schema: read revisions",
    server_statements.FIND_WRONG_COLUMNS: "schema: compare columns",
    server_statements.FIND_MISSING_COLUMNS: "schema: find missing columns",
    server_statements.FIND_SHARED_DEFAULTS: "schema: find shared defaults",
    partition_statements.LIST_PARTITIONS: "retention: list partitions",
    partition_statements.READ_OWNER: "retention: check ownership",
    partition_statements.LOCK_PARTITIONS: "partition: lock",
    partition_statements.BECOME_OWNER: "partition: set role",
    partition_statements.LIMIT_WAIT_FOR_LOCK: "partition: set lock timeout",
    retention_statements.READ_GENERATION: "retention: read generation",
    retention_statements.BEGIN_ROUND: "retention: begin round",
    retention_statements.MUST_ARCHIVE_DAY: "retention: check archive",
    retention_statements.SUMMARIZE_INDEXES: "retention: summarize",
    retention_statements.FINISH_ROUND: "retention: finish round",
    retention_statements.LIST_CLOSED_GENERATIONS: "retention: list closed generations",
    retention_statements.CLOSE_DAYS: "retention: close days",
    retention_statements.LIMIT_WAIT_FOR_DAY: "published: set lock timeout",
    retention_statements.MARK_DAY_PUBLISHED: "published: mark day",
    retention_statements.LIST_CLOSED_DAYS: "retention: list closed days",
    server_statements.COMPARE_CLUSTER: "connection: compare cluster",
    consume_statements.READ_DATABASE_ID: "database: read id",
    server_statements.READ_BROKERS: "database: read brokers",
    server_statements.STORE_BROKERS: "database: store brokers",
    retention_statements.FIND_UNFINISHED_SHARDS: "retention: find shards behind",
    retention_statements.FIND_OLDEST_WRITER: "retention: find oldest writer",
    retention_statements.REOPEN_DAYS: "retention: reopen days",
    retention_statements.LOCK_GENERATIONS: "rotation: lock",
    retention_statements.CLOSE_GENERATION: "rotation: close generation",
    retention_statements.FORGET_GENERATIONS: "rotation: forget generations",
    apply_statements.REGISTER_CONSUMERS: "consumers: register",
    apply_statements.READ_POSITION: "reader: read position",
    apply_statements.INSERT_POSITION: "reader: store start",
    apply_statements.COUNT_START: "reader: count start",
    apply_statements.FORGIVE_START: "reader: undo start count",
    apply_statements.MOVE_POSITIONS: "consume: move position",
    apply_statements.COUNT_DUPLICATES: "consume: count duplicates",
    apply_statements.FIND_MARKERS_IN_CLOSED_GENERATIONS: "consume: look up closed generations",
    apply_statements.INSERT_MARKERS: "consume: insert markers",
    apply_statements.FIND_MARKERS_IN_CURRENT_GENERATION: "consume: read existing markers",
    apply_statements.FIND_IN_BACKLOG: "consume: look up backlog",
    apply_statements.FIND_CONSUMERS_SINCE: "consume: check inbox coverage",
    apply_statements.STORE_RESULTS: "consume: store results",
    apply_statements.DELETE_MARKERS: "consume: delete markers",
    apply_statements.ADD_TO_BACKLOG: "consume: add to backlog",
    handler_statements.INSERT_EVENTS: "consume: write outbox",
    handler_statements.SCHEDULE_EVENTS: "consume: schedule",
    bank.CLAIM: "consume: insert claims",
    handler_statements.LOCK_SCHEDULED: "consume: cancel scheduled",
    handler_statements.CANCEL_SCHEDULED: "consume: cancel scheduled",
    relay_statements.IS_SCHEDULED_DUE: "scheduled: poll",
    relay_statements.LOCK_MOVE: "scheduled: lock",
    relay_statements.MOVE_SCHEDULED: "scheduled: move to outbox",
    apply_statements.READ_STOPS: "throttle: look",
    apply_statements.NOTE_TAKEN: "throttle: move on",
    count_statements.TAKE_TURN_TO_COUNT: "backlog: take turn to count",
    count_statements.COUNT_BACKLOG: "backlog: count",
    count_statements.STORE_COUNT: "backlog: store count",
    count_statements.READ_COUNT: "backlog: read count",
    retry_statements.CLAIM_LANES: "backlog: claim lane",
    retry_statements.READ_DUE_ROWS: "backlog: read due rows",
    retry_statements.EXTEND_LEASES: "backlog: extend lease",
    retry_statements.HOLD_LANES: "backlog: fence lane",
    retry_statements.DELETE_ENDED_PAUSES: "backlog: end pauses",
    retry_statements.DELETE_ROWS: "backlog: delete settled rows",
    retry_statements.UPDATE_FAILED_ROWS: "backlog: update failed rows",
    retry_statements.FIND_OVERTAKEN_KEYS: "backlog: compare heads",
    retry_statements.SCHEDULE_HEADS: "backlog: schedule heads",
    retry_statements.RELEASE_LANES: "backlog: release lane",
    relay_statements.ANNOUNCE_RELAY: "relay: announce",
    relay_statements.COUNT_RELAYS: "relay: count relays",
    relay_statements.FIND_EXPIRED_RELAYS: "relay: find expired relays",
    relay_statements.CLAIM_SHARDS: "relay: claim shards",
    relay_statements.WRITE_PROGRESS: "relay: write cursor",
    relay_statements.DELETE_RELAY: "relay: leave",
    relay_statements.COUNT_REJECTED_BY_TOPIC: "rejected: count",
    relay_statements.ADD_REJECTED: "rejected: add",
    relay_statements.READ_WAITING_EVENTS: "rejected: read waiting events",
    relay_statements.DELETE_SENT_EVENTS: "rejected: delete sent events",
    relay_statements.UPDATE_REJECTED: "rejected: set reason",
    relay_statements.READ_SNAPSHOT: "relay: poll",
    relay_statements.MEASURE_WINDOW: "relay: measure window",
    relay_statements.READ_WINDOW: "relay: read window",
    relay_statements.READ_PAGE: "relay: read page",
}
"""The statements that the engine has written down."""

_SHAPES = {
    r"CREATE TABLE IF NOT EXISTS pipeline\.(outbox_p|inbox_g)\d+ \(LIKE": "partition: create",
    r"ALTER TABLE pipeline\.(outbox|inbox) ATTACH PARTITION": "partition: attach",
    r"LOCK TABLE pipeline\.outbox_cursor ": "published: lock cursor",
    r"ALTER TABLE pipeline\.(outbox|inbox) DETACH PARTITION": "partition: detach",
    r"LOCK TABLE pipeline\.(outbox_p|inbox_g)\d+ ": "partition: lock table",
    r"DROP TABLE pipeline\.(outbox_p|inbox_g)\d+$": "partition: drop",
    r"SELECT xid FROM pipeline\.(outbox_p\d+|{name}) ": ("retention: read last event of day"),
    r"WITH old AS \( SELECT (?:key|id|{key}) FROM pipeline\.(backlog|outbox_rejected|{table}) ": (
        "retention: delete discarded rows"
    ),
    r"INSERT INTO pipeline\.backlog \(.*'probe'": "probe: write",
    r"WITH RECURSIVE of_name \(name, id\) AS ": "consume: read catalog",
    r"WITH RECURSIVE one \(id\) AS ": "consume: compare catalog",
    r"SELECT account\..* FOR NO KEY UPDATE": "consume: lock accounts",
    r"INSERT INTO account ": "consume: insert accounts",
    r"UPDATE account ": "consume: update accounts",
    r"SAVEPOINT \w+$": "consume: begin run",
    r"RELEASE SAVEPOINT ": "consume: end run",
    r"ROLLBACK TO SAVEPOINT ": "consume: undo run",
    "SELECT$": "consume: check for failed statement",
    "BEGIN ISOLATION LEVEL READ COMMITTED;.*pg_advisory_xact_lock_shared": "consume: begin",
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY$": "relay: begin snapshot",
    "BEGIN$": "retention: begin",
    # What SQLAlchemy and asyncpg ask a new connection.
    r"BEGIN ISOLATION LEVEL READ COMMITTED$|select pg_catalog\.version|select current_schema|show "
    r"|SELECT current_setting\('jit'\)|SELECT set_config\('jit'"
    r"|.*\btypeinfo_tree\b": "connection: set up",
}
"""Statements that are put together when they are needed, by how they look."""


def boundary_of(statement: object) -> str:
    """Return the boundary of a statement; for one that nobody has listed, itself."""
    sql = _text(statement)
    for shape, boundary in _SHAPES.items():
        if re.match(shape, sql):
            return boundary
    return _BY_TEXT.get(sql, sql)


def _text(statement: object) -> str:
    if isinstance(statement, sa.TextClause):
        statement = statement.compile(dialect=asyncpg.dialect())  # type: ignore[no-untyped-call]
    return " ".join(str(statement).split()).rstrip(";")


_BY_TEXT = {_text(statement): boundary for statement, boundary in _STATEMENTS.items()}


_SHARED = {
    "consume: move position": "shared: move positions",
    "consume: insert markers": "shared: insert markers",
    "consume: lock accounts": "shared: lock accounts",
    "consume: write outbox": "shared: write outbox",
    "consume: commit": "shared: commit",
}
"""Statements of a transaction that moves the positions of several partitions."""


_GO = (b"S", b"Q", b"H", b"p", b"X")
"""Messages that are not followed by others of the same request."""


class Postgres:
    """PostgreSQL's protocol 3, in clear text, on one connection."""

    def __init__(self) -> None:
        self._prepared: dict[str, str] = {}
        self._last = ""
        """The boundary before this one."""
        self._is_in_lane = False
        """Whether a lane is held, to the end of the transaction."""
        self._is_shared = False
        """Whether positions of several partitions have moved, to the end of the transaction."""
        self._number = 0
        self._ends: bytes = b""
        """Types of the messages that complete the answer."""

    async def requests(self, client: asyncio.StreamReader) -> AsyncIterator[Request]:
        """Yield the start of the connection, and then what the server answers as a whole."""
        size = await client.readexactly(4)
        start = size + await client.readexactly(int.from_bytes(size) - 4)
        yield self._request(start, "connection: open", b"R")
        sent, boundary = b"", None
        while True:
            type, body, message = await _message(client)
            sent += message
            if type == b"P":
                name, sql, _ = body.split(b"\0", 2)
                self._prepared[name.decode()] = sql.decode()
            elif type == b"B":
                boundary = self._bound(body)
            elif type == b"Q":
                boundary = self._simple(boundary_of(body.rstrip(b"\0").decode()))
            if type in _GO:
                yield self._request(sent, boundary, b"Z")
                sent, boundary = b"", None

    def _request(self, sent: bytes, boundary: str | None, ends: bytes) -> Request:
        self._number += 1
        self._ends = ends
        self._last = boundary or self._last
        if self._is_shared and boundary is not None:
            self._is_shared = boundary not in ("consume: commit", "consume: rollback")
            boundary = _SHARED.get(boundary, boundary)
        return Request(sent, self._number, boundary)

    def _bound(self, body: bytes) -> str:
        """Name a statement that was prepared, by its text and by what is bound."""
        _, name, rest = body.split(b"\0", 2)
        boundary = boundary_of(self._prepared[name.decode()])
        self._is_in_lane |= boundary == "backlog: fence lane"
        if boundary == "consume: move position":
            self._is_shared = _length(_bound_values(rest)[1]) > 1
        if boundary == "retention: list partitions" and self._last == "partition: lock":
            return "partition: list again"
        if boundary == "relay: write cursor":
            if _bound_values(rest)[6] == b"\0":
                return "relay: release shards"
            if self._last in ("relay: announce", "relay: extend leases"):
                return "relay: extend leases"
        return boundary

    def _simple(self, boundary: str) -> str:
        """Name the end of a transaction by what was done in it."""
        if boundary in ("COMMIT", "ROLLBACK"):
            room = "backlog" if self._is_in_lane else self._last.partition(":")[0]
            self._is_in_lane = False
            if room in ("retention", "partition"):
                # Or a rollback, where SIGTERM has cancelled it in between.
                return "partition: commit"
            return f"{room}: {'set up' if room == 'connection' else boundary.lower()}"
        if boundary == "retention: begin" and self._last.startswith(("relay:", "rejected:")):
            return "rejected: begin"
        if boundary == "retention: begin" and self._last.startswith("scheduled:"):
            return "scheduled: begin"
        return boundary

    async def answers(self, server: asyncio.StreamReader) -> AsyncIterator[Answer]:
        """Yield the messages; an answer is complete when the server waits for us again."""
        while True:
            type, _, message = await _message(server)
            yield Answer(message, self._number if type in self._ends else None)


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes, bytes]:
    """Return type, content, and all of it."""
    head = await reader.readexactly(5)
    body = await reader.readexactly(int.from_bytes(head[1:]) - 4)
    return head[:1], body, head + body


def _bound_values(rest: bytes) -> list[bytes | None]:
    """Return the parameters of a Bind message, from behind its names."""
    (formats,) = struct.unpack_from(">h", rest)
    at = 2 + 2 * formats
    (count,) = struct.unpack_from(">h", rest, at)
    at += 2
    values: list[bytes | None] = []
    for _ in range(count):
        (size,) = struct.unpack_from(">i", rest, at)
        at += 4
        values.append(rest[at : at + size] if size >= 0 else None)
        at += max(size, 0)
    return values


def _length(array: bytes | None) -> int:
    """Return the number of elements of an array with one dimension, in binary format."""
    (number,) = struct.unpack_from(">i", array or b"", 12)
    return int(number)


_METADATA, _FIND_COORDINATOR = 3, 10
_APIS = {
    0: "produce",
    1: "fetch",
    2: "look up offsets",
    _METADATA: "connect",
    8: "commit offsets",
    9: "read offsets",
    _FIND_COORDINATOR: "find coordinator",
    11: "join group",
    12: "heartbeat",
    13: "leave group",
    14: "get assignment",
    15: "describe group",
    18: "connect",
    22: "get id",
    32: "read topic retention",
}


class Kafka:
    """Kafka's protocol on one connection. The broker seems to listen on our port."""

    def __init__(self, host: str, port: int, ours: int) -> None:
        self._address = host.encode() + struct.pack(">i", port)
        self._ours = host.encode() + struct.pack(">i", ours)
        self._apis: dict[int, int] = {}

    async def requests(self, client: asyncio.StreamReader) -> AsyncIterator[Request]:
        """Yield the requests, named by who asks and the API."""
        while True:
            body, frame = await _frame(client)
            api, _, correlation, length = struct.unpack_from(">hhih", body)
            client_id = body[10 : 10 + length].decode()
            self._apis[correlation] = api
            who = "producer" if client_id.endswith("-relay") else "member"
            yield Request(frame, correlation, f"{who}: {_APIS.get(api, f'API {api}')}")

    async def answers(self, server: asyncio.StreamReader) -> AsyncIterator[Answer]:
        """Yield the answers, with our address in the place of the broker's."""
        while True:
            body, frame = await _frame(server)
            correlation = int.from_bytes(body[:4], signed=True)
            if self._apis.pop(correlation) in (_METADATA, _FIND_COORDINATOR):
                frame = frame.replace(self._address, self._ours)
            yield Answer(frame, correlation)


async def _frame(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    size = await reader.readexactly(4)
    body = await reader.readexactly(int.from_bytes(size))
    return body, size + body
