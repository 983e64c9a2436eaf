"""The timeline of a key: what the tables and Kafka have of it, in the order of time.

It has parts that are read one after the other. One that can't be read is named, with the reason,
and the others are shown.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta

import asyncpg
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.partitioner import DefaultPartitioner

from onceward.apply import positions
from onceward.apply.positions import Slot
from onceward.errors import describe_error
from onceward.events.message import time_of
from onceward.observe.traces import trace_id
from onceward.redaction import redact
from onceward.servers import topics
from onceward.servers.topics import Topic
from onceward.service import Service
from onceward.settings import Settings

from .entries import READ, Entry, Place, Range, Search, Timeline, gaps
from .records import Records, reading, runs
from .stored import Stored

SECONDS = 10.0
"""Time limit of what is read from Kafka, unless another is given."""
SINCE = timedelta(hours=6)
"""How far to look back, unless it is said."""
_PART_SECONDS = 5.0
"""Time limit of each part that is read from PostgreSQL."""
_LONG = 1.0
"""Seconds of the shortest wait that is worth a mark."""
_FIRST_MILLISECOND = 100_000_000_000
"""The least timestamp that is one in milliseconds, of 1973, and not one in seconds."""
_WAITING = ("applied", "called", "waits", "dead", "discarded", "not read")
"""What messages have waited for, or wait for."""
_DENIED = asyncpg.InsufficientPrivilegeError, asyncpg.QueryCanceledError


async def look(
    connection: asyncpg.Connection,
    service: Service,
    settings: Settings,
    key: bytes,
    since: datetime,
    *,
    limit: int = 200,
    seconds: float = SECONDS,
) -> Timeline:
    """Return the newest entries of a key, at most `limit`.

    What waits or is dead is found whatever its age. Kafka is read for at most so many seconds.
    """
    timeline = Timeline()
    stored = Stored(connection, service.handlers, timeline, key, since, limit)
    parts: tuple[Callable[[], Awaitable[None]], ...] = (
        *(stored.inbox, stored.outbox, stored.causes, stored.scheduled, stored.backlog),
        *(stored.rejected, stored.releases, stored.audit),
    )
    for part in parts:
        name = getattr(part, "__name__", "")
        try:
            async with asyncio.timeout(_PART_SECONDS):
                await part()
        except TimeoutError:
            timeline.unknown[name] = f"PostgreSQL has not answered in {_PART_SECONDS:.0f} s"
        except _DENIED as error:
            timeline.unknown[name] = describe_error(error)
    try:
        async with asyncio.timeout(seconds):
            await _Arrivals(connection, service, settings, timeline, key).read()
    except TimeoutError:
        if not timeline.searches:
            timeline.unknown["kafka"] = f"{settings.kafka} has not answered in {seconds:g} s"
    except (KafkaError, OSError, ValueError, *_DENIED) as error:
        timeline.unknown["kafka"] = f"{settings.kafka}: {describe_error(error)}"
    timeline.entries.sort(key=lambda one: one.at)
    _measure(timeline.entries, datetime.now(UTC))
    del timeline.entries[:-limit]
    return timeline


class _Arrivals:
    """Reads the part that is in Kafka."""

    def __init__(
        self,
        connection: asyncpg.Connection,
        service: Service,
        settings: Settings,
        timeline: Timeline,
        key: bytes,
    ) -> None:
        self._connection = connection
        self._service = service
        self._settings = settings
        self._timeline = timeline
        self._key = key

    async def read(self) -> None:
        """Read the records of the newest messages, then those of the key that are not read yet.

        Requires the other parts of the timeline: a key's partition is that of its messages, or else
        that which Kafka's own clients choose.
        """
        places = self._timeline.places
        described = await topics.describe(self._settings, self._service.handlers.topics)
        wanted: dict[TopicPartition, set[int]] = {}
        for name, number, offset in places[:READ]:
            its = described.get(name)
            if its and its.first.get(number, 0) <= offset < its.stable.get(number, 0):
                wanted.setdefault(TopicPartition(name, number), set()).add(offset)
        searches = {
            partition: Search(end, end, [*runs(wanted[partition])])
            for partition in wanted
            for end in [described[partition.topic].stable[partition.partition]]
        }
        parts = [(partition, one) for partition in searches for one in searches[partition].planned]
        parts += [await self._plan(one, places, searches) for one in described.values()]
        self._timeline.searches = searches
        async with reading(self._settings) as records:
            try:
                for partition, planned in parts:
                    for start, beyond in [*gaps(planned, searches[partition].read)]:
                        await self._read(records, partition, start, beyond)
            finally:
                self._timeline.unreadable += map(str, records.unreadable)

    async def _plan(
        self, topic: Topic, places: Sequence[Place], searches: dict[TopicPartition, Search]
    ) -> tuple[TopicPartition, Range]:
        """Plan to read the key's partition of a topic from its position on, too; return it."""
        numbers = sorted(topic.end)
        known = (one for name, one, _ in places if name == topic.name and one in topic.end)
        number = next(known, None)
        if number is None:
            number = DefaultPartitioner()(self._key, numbers, numbers)
        stored = await positions.position(
            self._connection, Slot(self._service.name, topic.name, number)
        )
        start = max(topic.first[number], stored.next_offset if stored else 0)
        partition, end = TopicPartition(topic.name, number), topic.stable[number]
        search = searches.setdefault(partition, Search(end, end))
        search.position = start
        search.planned.append((start, end))
        return partition, (start, end)

    async def _read(
        self, records: Records, partition: TopicPartition, start: int, beyond: int
    ) -> None:
        """Add all records of the key from offset `start` on, and before `beyond`."""
        search = self._timeline.searches[partition]
        search.read.append((start, start))
        async for record in records.between(partition, start, beyond):
            if record.key == self._key:
                before = record.offset - search.position
                await self._add(record, before if before >= 0 else None)
            search.read[-1] = start, record.offset + 1
        search.read[-1] = start, beyond

    async def _add(self, record: ConsumerRecord, before: int | None = None) -> None:
        """Add a record; of one that is not read yet so many offsets are `before` it."""
        codec, event, trace, more = self._service.handlers.codec(record.topic), "", None, ""
        try:
            await codec.prepare([record])
            message = codec.decode(record)
            event, trace = f"{message.type} {message.id}", message.traceparent
        except Exception as error:  # of a codec, or of a library that it uses
            more = describe_error(error)
        what = "arrived"
        if before is not None:
            what, more = "not read", f"{before:,} offsets are before it {more}".rstrip()
        is_known = record.timestamp >= _FIRST_MILLISECOND
        if not is_known and before is None:
            return
        at = time_of(record.timestamp) if is_known else datetime.now(UTC)
        where = f"{record.topic}/{record.partition} at {record.offset}"
        place = record.topic, record.partition, record.offset
        entry = Entry(at, what, where, event, more, None, trace_id(trace), place, since=at)
        self._timeline.entries.append(entry)


def _measure(entries: Sequence[Entry], now: datetime) -> None:
    """Set how long messages have waited, and mark the longest; of equal ones the latest."""
    arrived: dict[Place | None, datetime] = {
        one.place: one.at for one in entries if one.what == "arrived"
    }
    for one in entries:
        one.more = redact(one.more)
        since = arrived.get(one.place) or one.since
        if one.what in _WAITING and since is not None:
            one.waited = max(0.0, ((one.until or now) - since).total_seconds())
    longest = max(entries, key=lambda one: (one.waited or 0.0, one.at), default=None)
    if longest is not None and (longest.waited or 0.0) >= _LONG:
        longest.is_longest = True
