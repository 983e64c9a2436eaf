"""Replay: a topic is read again from an earlier place, by moving the positions back.

The inbox makes that safe: what took effect is known and skipped. What it has forgotten would be a
dead letter for its age, so somebody who reads again from before that is told.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic

import asyncpg
from aiokafka import TopicPartition

from pipeline.apply import positions
from pipeline.servers import clients
from pipeline.service import Service
from pipeline.settings import CLOCK_MARGIN, Settings

from .operations import Move, Refused, To, moves, offsets_since

_LOOK_SECONDS = 1.0
_STANDS_SECONDS = 30.0
_COUNT_SECONDS = 600.0
"""The markers of a day have no index by time."""

_LEAD = 1 / 8
"""Of the time for which the inbox remembers: for a replay that takes long, what is forgotten so
soon counts as forgotten."""

# Nothing is too old for consumers that have begun since the last generation that counts.
_MEMORY = """
SELECT CASE WHEN EXISTS (
           SELECT FROM unnest($3::text[]) AS reader (consumer)
             LEFT JOIN pipeline.inbox_consumer USING (consumer)
            WHERE generation IS NULL OR generation < oldest OR generation <= soon.last)
       THEN GREATEST(since, soon.closed_at + $2::interval) END AS since,
       clock_timestamp() AS now, current
  FROM pipeline.inbox_generation
 CROSS JOIN (SELECT max(generation) AS last, max(closed_at) AS closed_at
               FROM pipeline.inbox_closed
              WHERE closed_at < clock_timestamp() - $1::interval) AS soon
"""

_APPLIED = """
SELECT count(*)
  FROM pipeline.inbox
  JOIN unnest($1::integer[], $2::bigint[], $3::bigint[]) AS again (partition, first, beyond)
 USING (partition)
 WHERE generation >= $6 AND topic = $4 AND "offset" >= first AND "offset" < beyond
   AND created_at >= $5
"""

_DUPLICATES = """
SELECT sum(duplicates)::bigint
  FROM pipeline.position
 WHERE consumer_group = $1 AND topic = $2 AND partition = ANY ($3)
"""

_PUT_OFF = """
SELECT count(*) FILTER (WHERE died_at IS NULL) AS waiting,
       count(*) FILTER (WHERE died_at >= $5 AND reason = 'too old') AS buried
  FROM pipeline.backlog
  JOIN unnest($1::integer[], $2::bigint[], $3::bigint[]) AS again (partition, first, beyond)
 USING (partition)
 WHERE topic = $4 AND "offset" >= first AND "offset" < beyond
"""


@dataclass(frozen=True)
class Replay:
    """What is to be read again."""

    moves: Sequence[Move]
    since: datetime | None
    """What is older may have been forgotten, or will be within an eighth of the time for which the
    inbox remembers; None: nothing was that a consumer of the topic has taken."""
    forgotten: int
    """Offsets that are older than that."""
    begun_at: datetime
    """By the database's clock."""
    generation: int
    """The one that took new markers then."""
    duplicates: int
    """Messages that had come to these partitions again before."""

    @property
    def records(self) -> int:
        """Offsets that are to be read again; fewer records, where some are missing."""
        return sum((one.old or 0) - one.new for one in self.moves)


@dataclass(frozen=True)
class Progress:
    """How far it is."""

    done: int
    """Offsets."""
    stands: bool
    """Whether nothing has moved for a while."""


async def plan(
    connection: asyncpg.Connection,
    settings: Settings,
    service: Service,
    topic: str,
    partition: int | None,
    to: To,
) -> Replay:
    """Say what would be read again. Raises `Refused` if that is nothing."""
    found = await moves(connection, settings, service, topic, partition, to)
    back = [one for one in found if one.old is not None and one.new < one.old]
    if not back:
        raise Refused(
            f"nothing of {topic} was read after {to}: to go forward, `service topics seek`"
        )
    soon = timedelta(seconds=settings.inbox_age * (1 - _LEAD))
    consumers = service.handlers.refusing_old(topic)
    since, now, generation = await connection.fetchrow(
        _MEMORY, soon, CLOCK_MARGIN, sorted(consumers)
    )
    forgotten = 0
    if since is not None:
        # People are told a whole second, and to begin with it has to be enough.
        since = since.replace(microsecond=0) + timedelta(seconds=bool(since.microsecond))
        places = {TopicPartition(topic, one.slot.partition): one for one in back}
        async with clients.offsets_client(settings) as client:
            ends = {place: one.end for place, one in places.items()}
            remembered = await offsets_since(client, ends, since)
        forgotten = sum(
            max(0, min(remembered[place], one.old or 0) - one.new) for place, one in places.items()
        )
    return Replay(back, since, forgotten, now, generation, await _duplicates(connection, back))


async def follow(connection: asyncpg.Connection, replay: Replay) -> AsyncIterator[Progress]:
    """Yield how far it is each time that it has moved, until all is read again."""
    done, moved_at = -1, monotonic()
    while done < replay.records:
        now = 0
        for one in replay.moves:
            stored = await positions.position(connection, one.slot)
            at = stored.next_offset if stored else one.new
            now += min(max(at, one.new), one.old or 0) - one.new
        if now > done:
            done, moved_at = now, monotonic()
            yield Progress(done, stands=False)
        elif monotonic() > moved_at + _STANDS_SECONDS:
            moved_at = monotonic()
            yield Progress(done, stands=True)
        if done < replay.records:
            await asyncio.sleep(_LOOK_SECONDS)


@dataclass(frozen=True)
class Outcome:
    """What has become of the messages that were read again."""

    applied: int
    """Have taken effect only now."""
    known: int
    """Had come before."""
    waiting: int
    """Are in the backlog, and take effect later."""
    buried: int
    """Are dead letters now, as too old."""


async def outcome(connection: asyncpg.Connection, replay: Replay) -> Outcome:
    """Count what has become of what was read again."""
    found = replay.moves
    places = [
        [one.slot.partition for one in found],
        [one.new for one in found],
        [one.old for one in found],
        found[0].slot.topic,
        replay.begun_at,
    ]
    applied = await connection.fetchval(
        _APPLIED, *places, replay.generation, timeout=_COUNT_SECONDS
    )
    put_off = await connection.fetchrow(_PUT_OFF, *places, timeout=_COUNT_SECONDS)
    known = await _duplicates(connection, found) - replay.duplicates
    return Outcome(applied, known, put_off["waiting"], put_off["buried"])


async def _duplicates(connection: asyncpg.Connection, found: Sequence[Move]) -> int:
    slot = found[0].slot
    places = [one.slot.partition for one in found]
    return int(await connection.fetchval(_DUPLICATES, slot.group, slot.topic, places))
