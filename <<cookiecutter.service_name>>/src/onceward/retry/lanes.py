"""Lanes of the backlog and their rows: what workers do to them."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import NamedTuple

import asyncpg

from onceward.apply.item import Row
from onceward.apply.positions import Generations
from onceward.errors import SourceLost, StoreUnavailable
from onceward.handlers.policy import GAP
from onceward.schema import FIRST_LANE_OF_CALLS

from . import count_statements, statements

_FIRST = 100
"""Rows of each lane and consumer that are due and that `waiting` reads in any case."""
_DEMOTED = 10_000
"""Rows of a key whose `due_at` one statement clears at most, so that it does not take long."""


class LaneLost(SourceLost):
    """The lane's lease has ended, and another worker has claimed the lane."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Lanes that a worker has claimed together."""

    lanes: Sequence[int]
    tokens: Sequence[int]
    """Of each lane."""
    starts: int
    """Workers that have claimed a lane and not released it, this one included: more than one only
    if there is a single lane."""
    ended_at: datetime
    """When the lease before has ended: its worker can't have read a row that was stored later."""
    seconds: float
    """Time for which the lease is extended before each transaction."""
    unavailable: dict[str, StoreUnavailable] = field(default_factory=dict)
    """Topics whose rows could not be decoded since, because a schema registry is unavailable."""

    def of(self, lanes: Collection[int]) -> "Lease":
        """Return the lease of these of its lanes alone."""
        kept = [one for one in zip(self.lanes, self.tokens, strict=True) if one[0] in lanes]
        return replace(self, lanes=[lane for lane, _ in kept], tokens=[token for _, token in kept])


class Waiting(NamedTuple):
    """What the backlog holds for a consumer in the lanes of messages, or in those of calls."""

    consumer: str
    """Empty for records that no handler has seen."""
    has_calls: bool
    waiting: int
    dead: int
    failing: int
    """Those waiting that have failed before."""
    oldest: float
    """Seconds since the first of those waiting was received."""
    unserved: float
    """Seconds for which the first is due, 0 if a worker has held a lane of its kind since."""
    oldest_by_topic: dict[str, float]
    """`oldest` by topic; 0 if only dead messages of it were counted."""


async def claim(
    connection: asyncpg.Connection,
    owner: str,
    lease: float,
    consumers: Collection[str],
    unanswered: Collection[str] = (),
    most: int = 1,
) -> Lease | None:
    """Claim at most so many lanes with rows due for these consumers; None if none has.

    Those that were released first. `unanswered` are owners of earlier claims of the process whose
    answers were lost: their lanes are claimed at once, without a start. The lane of a worker that
    died can be claimed when its lease, in seconds, has run out.
    """
    rows = await connection.fetch(
        statements.CLAIM_LANES, owner, lease, list(consumers), list(unanswered), most
    )
    if not rows:
        return None
    numbers, tokens, starts, ended = map(list, zip(*rows, strict=True))
    return Lease(numbers, tokens, starts[0], ended[0], lease)


async def hold(connection: asyncpg.Connection, lease: Lease) -> Generations:
    """Lock the lanes to the end of the transaction. Raises `LaneLost`."""
    row = await connection.fetchrow(statements.HOLD_LANES, lease.lanes, lease.tokens)
    *generations, held = row
    _require(lease, held or ())
    return Generations(*generations)


async def extend(connection: asyncpg.Connection, lease: Lease) -> None:
    """Extend the lease. Raises `LaneLost`, or `TimeoutError` if that takes as long as it lasts."""
    async with asyncio.timeout(lease.seconds):
        rows = await connection.fetch(
            statements.EXTEND_LEASES, lease.lanes, lease.tokens, lease.seconds
        )
    _require(lease, [row["lane"] for row in rows])


async def extend_unlocked(connection: asyncpg.Connection, lease: Lease) -> None:
    """Extend the lease of those of the lanes that no transaction has locked."""
    await connection.execute(
        statements.EXTEND_UNLOCKED_LEASES, lease.lanes, lease.tokens, lease.seconds
    )


def _require(lease: Lease, held: Collection[int]) -> None:
    if lost := {*lease.lanes}.difference(held):
        raise LaneLost("; ".join(f"backlog lane {lane} was taken over" for lane in sorted(lost)))


async def overtaken(
    connection: asyncpg.Connection, heads: Mapping[bytes, tuple[bytes, int, float]]
) -> Collection[bytes]:
    """Return the order keys whose first row is not as it was read, or not due any more.

    `heads` are, by order key, the key of the row, and its attempts and the time waited then.
    """
    rows = [(key, *head) for key, head in heads.items()]
    found = await connection.fetch(
        statements.FIND_OVERTAKEN_KEYS, *map(list, zip(*rows, strict=True))
    )
    return {row["order_key"] for row in found}


async def release(connection: asyncpg.Connection, lease: Lease, *, forgets_deaths: bool) -> None:
    """Release the lanes on a clean end: the worker's start does not count any more.

    `forgets_deaths`: nor do the starts of earlier workers. It can be repeated.
    """
    await connection.execute(statements.RELEASE_LANES, lease.lanes, lease.tokens, forgets_deaths)


async def end_pauses(connection: asyncpg.Connection, keys: Collection[bytes]) -> None:
    """Delete the rows at the heads of keys whose pause is over. Call `settle` after."""
    await connection.execute(statements.DELETE_ENDED_PAUSES, list(keys))


async def delete(connection: asyncpg.Connection, keys: Collection[bytes]) -> None:
    """Delete rows by their keys. Lock their lanes before, and call `settle` after."""
    if keys:
        await connection.execute(statements.DELETE_ROWS, list(keys))


async def settle(
    connection: asyncpg.Connection,
    lease: Lease,
    *,
    done: Collection[bytes],
    changed: Sequence[Row],
    keys: Collection[bytes],
    keys_with_progress: Collection[bytes],
) -> None:
    """Delete the rows `done` and update the rows `changed`, by their keys, then schedule heads.

    `keys` are the order keys of all rows read; for `keys_with_progress` see `schedule_heads`.
    """
    await delete(connection, done)
    if changed:
        await connection.execute(
            statements.UPDATE_FAILED_ROWS,
            [row.key for row in changed],
            [row.decision.reason for row in changed],
            *map(list, zip(*(row.decision.history for row in changed), strict=True)),
            [row.decision.due_in for row in changed],
            [row.decision.holds for row in changed],
            [row.decision.error for row in changed],
            [row.decision.traceback for row in changed],
            [row.remembered for row in changed],
            [row.first_trace for row in changed],
        )
    await schedule_heads(connection, lease.lanes, keys, keys_with_progress)


async def waiting(connection: asyncpg.Connection, most: int, idle: float) -> list[Waiting]:
    """Return what waits and what is dead, counted among so many rows of each.

    If there are more, those of the first keys count, by their hashes, which is a fair sample, and
    the first due ones of each consumer and lane: only a topic without any of these is missing.
    `unserved` looks `idle` seconds back.
    """
    limit = timedelta(seconds=idle)
    rows = await connection.fetch(
        count_statements.COUNT_BACKLOG, most, FIRST_LANE_OF_CALLS, limit, _FIRST
    )
    return [
        Waiting(*(*numbers, dict(zip(topics, ages, strict=True))))
        for *numbers, topics, ages in rows
    ]


async def schedule_heads(
    connection: asyncpg.Connection,
    lanes: Collection[int],
    keys: Collection[bytes],
    keys_with_progress: Collection[bytes] = (),
) -> None:
    """Make the first row of each order key the only one that is due. Lock the lanes before.

    If the first row waits for an earlier message of its sequence, it becomes due only if its key is
    among `keys_with_progress`, those of which a row is done: that may have been the message.
    """
    await connection.execute(
        statements.SCHEDULE_HEADS, list(keys), list(lanes), _DEMOTED, GAP, list(keys_with_progress)
    )
