"""Positions in Kafka's topics: moving them, and following a replay from an earlier one.

A replay reads records again, and the inbox skips those that took effect. Records for which it may
have no markers any more would become dead letters as too old, so they are counted before.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic
from typing import Literal

import asyncpg

from onceward.apply import positions
from onceward.apply.positions import Slot
from onceward.servers import topics
from onceward.settings import CLOCK_MARGIN, Settings

from .errors import Refused
from .terminal import Invocation

_LOOK_SECONDS = 1.0
_STALLED_SECONDS = 30.0
_COUNT_SECONDS = 600.0
"""Time limit for counting markers, which have no index by time."""

_MARGIN = 1 / 8
"""Part of the time for which the inbox keeps markers. A replay takes long, so markers that will be
deleted within this time count as deleted."""

# Nothing is too old for consumers whose first generation is later than `soon.last`.
_MEMORY = """
SELECT CASE WHEN EXISTS (
           SELECT FROM unnest($3::text[]) AS reader (consumer)
             LEFT JOIN pipeline.inbox_consumer USING (consumer)
            WHERE generation IS NULL OR generation < oldest OR generation <= soon.last)
       THEN GREATEST(since, soon.closed_at + $2::interval) END AS since,
       clock_timestamp() AS begun_at, current AS generation,
       (SELECT sum(duplicates)::bigint FROM pipeline.position
         WHERE consumer_group = $4 AND topic = $5 AND partition = ANY ($6)) AS duplicates
  FROM pipeline.inbox_generation
 CROSS JOIN (SELECT max(generation) AS last, max(closed_at) AS closed_at
               FROM pipeline.inbox_closed
              WHERE closed_at < clock_timestamp() - $1::interval) AS soon
"""

_OUTCOME = """
  WITH again AS (
       SELECT * FROM unnest($1::integer[], $2::bigint[], $3::bigint[])
                  AS again (partition, first, beyond))
SELECT (SELECT count(*) FROM pipeline.inbox JOIN again USING (partition)
         WHERE generation >= $7 AND topic = $4 AND "offset" >= first AND "offset" < beyond
           AND created_at >= $6) AS applied,
       (SELECT sum(duplicates)::bigint - $8 FROM pipeline.position
         WHERE consumer_group = $5 AND topic = $4 AND partition = ANY ($1)) AS known,
       count(*) FILTER (WHERE died_at IS NULL) AS waiting,
       count(*) FILTER (WHERE died_at >= $6 AND reason = 'too old') AS buried
  FROM pipeline.backlog JOIN again USING (partition)
 WHERE topic = $4 AND "offset" >= first AND "offset" < beyond
"""

Place = Literal["earliest", "latest"] | int | datetime
"""A new position: the first record that the brokers have, the next one to be written, an offset, or
the first record since a time."""


@dataclass(frozen=True)
class Move:
    """A change of a partition's position; `old` is None if it was never read."""

    slot: Slot
    old: int | None
    new: int
    first: int
    """The first offset that the brokers have."""
    end: int
    """The offset after the last one."""


async def plan_moves(
    connection: asyncpg.Connection,
    invocation: Invocation,
    topic: str,
    partition: int | None,
    to: Place,
) -> list[Move]:
    """Return how positions would change. Raises `Refused` for places outside of the topic."""
    service, settings = invocation.service, invocation.settings
    if topic not in service.handlers.topics:
        known = ", ".join(sorted(service.handlers.topics)) or "none"
        raise Refused(f"the service does not read topic {topic}; it reads {known}")
    described = (await topics.describe(settings, [topic])).get(topic)
    if described is None:
        raise Refused(f"there is no topic {topic}: create it, or run `service topics create`")
    first, end = described.first, described.end
    if partition is None and isinstance(to, int) and len(end) > 1:
        raise Refused(f"{topic} has {len(end)} partitions: name one by --partition")
    if partition is not None and partition not in end:
        raise Refused(f"{topic} has the partitions {min(end)} to {max(end)}")
    if isinstance(to, datetime):
        places: Mapping[int, int] = await offsets_since(settings, topic, end, to)
    elif isinstance(to, int):
        places = dict.fromkeys(end, to)
    else:
        places = {"earliest": first, "latest": end}[to]
    found = []
    for one in sorted(end) if partition is None else [partition]:
        new = places[one]
        if not first[one] <= new <= end[one]:
            raise Refused(f"{topic}/{one} has the offsets {first[one]} to {end[one]}: not {new}")
        slot = Slot(service.name, topic, one)
        stored = await positions.position(connection, slot)
        old = stored.next_offset if stored else None
        found.append(Move(slot, old, new, first[one], end[one]))
    return found


async def offsets_since(
    settings: Settings, topic: str, end: Mapping[int, int], time: datetime
) -> dict[int, int]:
    """Return the offsets of the first records since a time; the end, if all are older."""
    found = await topics.first_since(settings, {(topic, one): time for one in end})
    return {one: found.get((topic, one), (beyond, time))[0] for one, beyond in end.items()}


@dataclass(frozen=True)
class Replay:
    """Partitions that are to be read again."""

    moves: Sequence[Move]
    memory: asyncpg.Record
    """State of the inbox when the replay began, by the database's clock."""
    since: datetime | None
    """Markers of older records may be deleted, or soon will be; None: none that a consumer of the
    topic has written."""
    forgotten: int
    """Offsets of records from before `since`."""

    @property
    def records(self) -> int:
        """Offsets that are to be read again; some may have no record."""
        return sum((one.old or 0) - one.new for one in self.moves)


async def plan_replay(
    connection: asyncpg.Connection,
    invocation: Invocation,
    topic: str,
    partition: int | None,
    to: Place,
) -> Replay:
    """Return what would be read again. Raises `Refused` if there is nothing to read."""
    service, settings = invocation.service, invocation.settings
    found = await plan_moves(connection, invocation, topic, partition, to)
    back = [one for one in found if one.old is not None and one.new < one.old]
    if not back:
        raise Refused(
            f"nothing of {topic} was read after {to}: to go forward, `service topics seek`"
        )
    kept = timedelta(seconds=settings.inbox_age * (1 - _MARGIN))
    its = (one for one in service.handlers if one.topic == topic and not one.takes_old)
    readers, numbers = {one.consumer for one in its}, [one.slot.partition for one in back]
    arguments = kept, CLOCK_MARGIN, sorted(readers), service.name, topic, numbers
    memory = await connection.fetchrow(_MEMORY, *arguments)
    since, forgotten = memory["since"], 0
    if since is not None:
        # Rounded up to a second, as messages name it: given as `--from`, it must be late enough.
        since = since.replace(microsecond=0) + timedelta(seconds=bool(since.microsecond))
        ends = {one.slot.partition: one.end for one in back}
        first = await offsets_since(settings, topic, ends, since)
        for one in back:
            forgotten += max(0, min(first[one.slot.partition], one.old or 0) - one.new)
    return Replay(back, memory, since, forgotten)


async def follow(connection: asyncpg.Connection, replay: Replay) -> AsyncIterator[int]:
    """Yield the number of offsets that are read again, after each change, until all are.

    Without a change the number is repeated every 30 seconds.
    """
    done, yielded_at = -1, monotonic()
    while done < replay.records:
        now = 0
        for one in replay.moves:
            stored = await positions.position(connection, one.slot)
            at = stored.next_offset if stored else one.new
            now += min(max(at, one.new), one.old or 0) - one.new
        if now > done or monotonic() > yielded_at + _STALLED_SECONDS:
            done, yielded_at = max(now, done), monotonic()
            yield done
        if done < replay.records:
            await asyncio.sleep(_LOOK_SECONDS)


async def outcome(connection: asyncpg.Connection, replay: Replay) -> asyncpg.Record:
    """Count what became of the messages that were read again.

    `applied`: took effect now; `known`: duplicates; `waiting`: in the backlog, to take effect
    later; `buried`: became dead letters, as too old.
    """
    slot, memory = replay.moves[0].slot, replay.memory
    again = ((one.slot.partition, one.new, one.old) for one in replay.moves)
    return await connection.fetchrow(
        _OUTCOME,
        *map(list, zip(*again, strict=True)),
        *(slot.topic, slot.group, memory["begun_at"], memory["generation"], memory["duplicates"]),
        timeout=_COUNT_SECONDS,
    )
