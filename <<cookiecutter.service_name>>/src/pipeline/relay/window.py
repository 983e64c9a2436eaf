"""The window: which events the relay has still to publish, read from a snapshot.

The relay stores the snapshot `seen` up to which it has published. The next window is what is
visible now and was not visible in `seen`. That is exact in whatever order transactions commit:
gaps in `id` lose nothing, and a long transaction delays nothing. PgQ's ticks work alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import asyncpg

from pipeline.servers.cluster import NotAdopted

Snapshot = tuple[int, int, tuple[int, ...]]
"""A `pg_snapshot` as asyncpg reads and binds it: xmin, xmax, running."""

_SCAN_AT_MOST = 50_000
"""Rows that one page scans: one late row in a wide window does not make it scan all of them."""

PAGE_BYTES = 8 * 2**20
"""Memory for the events of one page, without its last one; two pages exist at once."""

COLUMNS = """id, created_at, topic, key, payload, event_id, source, type, subject, sequence,
       content_type, traceparent, tracestate, baggage, headers,
       dataref, datalength, datachecksum"""
"""An event, as it is sent."""


def filled(page: str, *, columns: str, place: str, at_most: str) -> str:
    """Return the statement that reads a page, cut off behind the event that fills it.

    PostgreSQL computes the size of a payload without reading it.
    """
    return f"""
SELECT {columns}
  FROM (SELECT page.*,
               sum(octet_length(payload)) OVER (
                   ORDER BY {place} ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
          FROM ({page}) AS page) AS summed
 WHERE before < {at_most} OR before IS NULL
 ORDER BY {place}
"""


def _headed(page: str, *, place: str, at_most: str) -> str:
    """Put a row before those of the page, with what is common to them."""
    rows = filled(page, columns=f"NULL, NULL, NULL, {COLUMNS}", place=place, at_most=at_most)
    return f"""
SELECT pg_postmaster_start_time() AS server, pg_current_snapshot() AS target,
       pg_sequence_last_value('pipeline.outbox_id_seq') AS high_id,
       {COLUMNS}
  FROM (SELECT (NULL::pipeline.outbox).*) AS nothing
 UNION ALL ({rows})"""


# Executed on the primary, by itself in READ COMMITTED or in a read-only snapshot, so that the
# snapshot it returns is the one it reads with. A snapshot's xmax is the latest *completed*
# transaction + 1, so rows of running ones may lie above it: the window is not bounded by an id.
# `id + 0` and `xid <` keep the planner off the wrong index; pg_sequence_last_value prevents a
# parallel plan, in which the head row might not come first.
_BEGUN_SINCE = "xid >= pg_snapshot_xmax($1) AND xid < pg_snapshot_xmax(pg_current_snapshot())"
_FRESH = _headed(
    f"""
SELECT {COLUMNS}
  FROM (SELECT {COLUMNS}
          FROM pipeline.outbox
         WHERE {_BEGUN_SINCE} AND shard = ANY ($2)
        UNION ALL
        SELECT {COLUMNS}
          FROM pipeline.outbox
         WHERE shard = ANY ($2)
           AND xid = ANY (ARRAY(
               SELECT running FROM pg_snapshot_xip($1) AS running
                WHERE pg_visible_in_snapshot(running, pg_current_snapshot())))) AS unseen
 ORDER BY id + 0
 LIMIT $3""",
    place="id + 0",
    at_most="$4",
)

# FRESH reads a whole window to sort it. These open a wide one at an id that none in it is below.
_MEASURE = f"""
SELECT count(*) > $2 AS is_wide, pg_postmaster_start_time() AS server,
       pg_current_snapshot() AS target, pg_sequence_last_value('pipeline.outbox_id_seq') AS high_id
  FROM ((SELECT xid FROM pipeline.outbox WHERE {_BEGUN_SINCE} ORDER BY xid LIMIT $2 + 1)
        UNION ALL
        (SELECT ended.xid FROM pg_snapshot_xip($1) AS running, LATERAL (
                SELECT xid FROM pipeline.outbox WHERE xid BETWEEN running AND running
                 ORDER BY xid LIMIT $2 + 1) AS ended)) AS unseen
"""
# As a number: PostgreSQL 14 has no max(xid8).
_LOWEST = """
SELECT min(id) AS id, max(xid::text::bigint) AS xid, count(*) AS rows
  FROM (SELECT id, xid FROM pipeline.outbox
         WHERE xid >= $1 AND xid < $2 ORDER BY xid LIMIT $3) AS piece
"""

# Functions instead of comparisons of xid make the planner use the index on id.
_PAGE = _headed(
    f"""
SELECT {COLUMNS}
  FROM pipeline.outbox
 WHERE id > $3 AND id <= $4
   AND NOT pg_visible_in_snapshot(xid, $1) AND pg_visible_in_snapshot(xid, $2)
   AND shard = ANY ($5)
 ORDER BY id
 LIMIT $6""",
    place="id",
    at_most="$7",
)

# Also counts what a relay has published in the quarter of a second since it wrote its cursor.
_COUNT = """
SELECT topic, count(*) AS count,
       GREATEST(extract(epoch FROM clock_timestamp() - min(created_at)), 0)::float AS oldest
  FROM (SELECT topic, created_at
          FROM pipeline.outbox JOIN pipeline.outbox_cursor USING (shard)
         WHERE xid >= (SELECT pg_snapshot_xmin(seen) FROM pipeline.outbox_cursor
                        ORDER BY pg_snapshot_xmin(seen) LIMIT 1)
           AND NOT pg_visible_in_snapshot(xid, seen)
           AND (target IS NULL OR id > last_id OR NOT pg_visible_in_snapshot(xid, target))
         ORDER BY xid LIMIT $1) AS unpublished
 GROUP BY topic
"""

_NOW = "SELECT pg_postmaster_start_time() AS server, pg_current_snapshot() AS snapshot"


@dataclass(frozen=True)
class Progress:
    """How far a shard is published. While `target` is set, up to `last_id` of its window."""

    seen: Snapshot
    target: Snapshot | None
    last_id: int
    high_id: int


@dataclass(frozen=True)
class Page:
    """Events to send, and the progress of their shards when all of them are acknowledged."""

    shards: Sequence[int]
    events: Sequence[asyncpg.Record]
    then: Progress
    server: datetime
    """When the server that executed the statement was started."""


async def is_as_seen(
    connection: asyncpg.Connection, progress: Iterable[Progress], server: datetime | None
) -> bool:
    """Whether nothing was committed since `seen`, so that `fresh` would read nothing.

    This costs a tenth of `fresh`.
    """
    now = await connection.fetchrow(_NOW)
    return now["server"] == server and all(
        one.target is None and one.seen == now["snapshot"] for one in progress
    )


async def count(connection: asyncpg.Connection, most: int) -> tuple[int, dict[str, float]]:
    """Return how many events are not published, up to a number, and the age of the oldest one of
    each topic among these, in seconds."""
    rows = await connection.fetch(_COUNT, most)
    return sum(row["count"] for row in rows), {row["topic"]: row["oldest"] for row in rows}


async def fresh(
    connection: asyncpg.Connection,
    progress: Progress,
    shards: Sequence[int],
    limit: int,
    at_most: int = PAGE_BYTES,
    *,
    may_be_wide: bool = True,
) -> Page:
    """Read events that became visible since `seen`: `limit`, or `at_most` bytes and one event.

    With `may_be_wide` none are read of more than one page scans: the window is opened for `page`.
    Raises `NotAdopted` if `seen` is a snapshot of another cluster.
    """
    if may_be_wide:
        wide = await connection.fetchrow(_MEASURE, progress.seen, _SCAN_AT_MOST)
        if wide["is_wide"]:
            lowest = await _lowest(connection, progress.seen, wide["target"])
            then = Progress(progress.seen, wide["target"], lowest - 1, wide["high_id"])
            return Page(shards, [], then, wide["server"])
    head, *events = await connection.fetch(_FRESH, progress.seen, shards, limit + 1, at_most)
    if head["target"][1] < progress.seen[1]:
        raise NotAdopted
    if len(events) <= limit and not _fill(events, at_most):
        then = replace(progress, seen=head["target"])
    else:
        events = events[:limit]
        then = Progress(progress.seen, head["target"], events[-1]["id"], head["high_id"])
    return Page(shards, events, then, head["server"])


async def _lowest(connection: asyncpg.Connection, seen: Snapshot, target: Snapshot) -> int:
    """Return the lowest id in a window with events, or a lower one; read piece by piece."""
    ids = []
    for first, end in [*((one, one + 1) for one in seen[2]), (seen[1], target[1])]:
        xid, limit, is_last = first, _SCAN_AT_MOST, False
        while not is_last:
            piece = await connection.fetchrow(_LOWEST, xid, end, limit)
            ids.append(piece["id"])
            is_last = piece["rows"] < limit
            # Rows of one transaction may fill a piece, which is read again, then as a larger one.
            limit *= 2 if piece["xid"] == xid else 1
            xid = piece["xid"]
    return int(min(one for one in ids if one is not None))


async def page(
    connection: asyncpg.Connection,
    progress: Progress,
    shards: Sequence[int],
    limit: int,
    at_most: int = PAGE_BYTES,
) -> Page:
    """Read the next page of an open window."""
    upto = min(progress.high_id, progress.last_id + _SCAN_AT_MOST)
    head, *events = await connection.fetch(
        _PAGE, progress.seen, progress.target, progress.last_id, upto, shards, limit, at_most
    )
    if len(events) == limit or _fill(events, at_most):
        then = replace(progress, last_id=events[-1]["id"])
    elif upto < progress.high_id:
        then = replace(progress, last_id=upto)
    else:
        assert progress.target is not None
        then = Progress(progress.target, None, 0, 0)
    return Page(shards, events, then, head["server"])


def _fill(events: Sequence[asyncpg.Record], at_most: int) -> bool:
    """Whether the payloads fill a page, so that the statement may have cut it off behind them."""
    return sum(len(event["payload"] or b"") for event in events) >= at_most
