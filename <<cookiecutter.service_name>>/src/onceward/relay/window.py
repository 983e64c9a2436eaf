"""The window: which events the relay has still to publish, read from a snapshot.

The relay stores the snapshot `seen` up to which it has published. The next window is what is
visible now and was not visible in `seen`. That is exact in whatever order transactions commit:
gaps in `id` lose nothing, and a long transaction delays nothing. PgQ's ticks work alike.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import asyncpg

from onceward.servers.cluster import NotAdopted

from . import statements

Snapshot = tuple[int, int, tuple[int, ...]]
"""A `pg_snapshot` as asyncpg reads and binds it: xmin, xmax, running."""

_SCAN_AT_MOST = 50_000
"""Rows that one page scans: one late row in a wide window does not make it scan all of them."""

PAGE_BYTES = 8 * 2**20
"""Memory for the events of one page, without its last one; two pages exist at once."""


@dataclass(frozen=True)
class Progress:
    """How far a shard is published. While `target` is set, up to `last_id` of its window."""

    seen: Snapshot
    target: Snapshot | None
    last_id: int
    high_id: int
    """Of the sequence when `target` was taken: no event of the window has a higher one."""


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
    now = await connection.fetchrow(statements.READ_SNAPSHOT)
    return now["server"] == server and all(
        one.target is None and one.seen == now["snapshot"] for one in progress
    )


async def opened(
    connection: asyncpg.Connection,
    progress: Progress,
    shards: Sequence[int],
    extend: Callable[[], Awaitable[object]],
) -> Page | None:
    """Open the window since `seen` for `page` if it has more events than one page scans.

    That takes as long as there are events to look at: `extend` is called between the pieces.
    """
    wide = await connection.fetchrow(statements.MEASURE_WINDOW, progress.seen, _SCAN_AT_MOST)
    if not wide["is_wide"]:
        return None
    lowest = await _lowest(connection, progress.seen, wide["target"], extend)
    then = Progress(progress.seen, wide["target"], lowest - 1, wide["high_id"])
    return Page(shards, [], then, wide["server"])


async def fresh(
    connection: asyncpg.Connection,
    progress: Progress,
    shards: Sequence[int],
    limit: int,
    at_most: int = PAGE_BYTES,
) -> Page:
    """Read events that became visible since `seen`: `limit`, or `at_most` bytes and one event.

    Raises `NotAdopted` if `seen` is a snapshot of another cluster.
    """
    head, *events = await connection.fetch(
        statements.READ_WINDOW, progress.seen, shards, limit + 1, at_most
    )
    if head["target"][1] < progress.seen[1]:
        raise NotAdopted
    if len(events) <= limit and not _fill(events, at_most):
        then = replace(progress, seen=head["target"])
    else:
        events = events[:limit]
        then = Progress(progress.seen, head["target"], events[-1]["id"], head["high_id"])
    return Page(shards, events, then, head["server"])


async def _lowest(
    connection: asyncpg.Connection,
    seen: Snapshot,
    target: Snapshot,
    extend: Callable[[], Awaitable[object]],
) -> int:
    """Return the lowest id in a window with events, or a lower one; read piece by piece."""
    ids = []
    for first, end in [*((one, one + 1) for one in seen[2]), (seen[1], target[1])]:
        xid, is_last = first, False
        while not is_last:
            await extend()
            piece = await connection.fetchrow(statements.FIND_LOWEST_ID, xid, end, _SCAN_AT_MOST)
            ids.append(piece["id"])
            is_last = piece["rows"] < _SCAN_AT_MOST
            if not is_last and piece["xid"] == xid:  # one transaction has more rows than a piece
                return int(await connection.fetchval(statements.FIND_FIRST_ID))
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
        statements.READ_PAGE,
        progress.seen,
        progress.target,
        progress.last_id,
        upto,
        shards,
        limit,
        at_most,
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
