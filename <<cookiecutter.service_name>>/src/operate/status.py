"""The status of a service, in parts that are measured by small statements of their own.

A count of a large table stops above `AT_MOST`, and a statement after five seconds. A part that
can't be measured is named with the reason, and the others are still measured.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta

import asyncpg
from aiokafka.errors import KafkaError

from pipeline.apply import backlog, positions
from pipeline.errors import describe_error
from pipeline.relay import cursor, rejected, scheduled, window
from pipeline.retention import maintenance, partitions
from pipeline.retention.partitions import State
from pipeline.retry import lanes
from pipeline.servers import cluster, topics
from pipeline.service import Service
from pipeline.settings import Settings

AT_MOST = 10_000
"""The largest exact count; a larger one means that there are more."""

STALLED = 60.0
"""Seconds for which the position of a partition with records to read may stay the same."""
UNSERVED = 300.0
"""Seconds for which a due row of the backlog may wait while no worker holds a lane."""

_SECONDS = 5.0

_MEMORY = "SELECT since FROM pipeline.inbox_generation"


@dataclass
class Reading:
    """The position of a partition, and where it ends in Kafka."""

    topic: str
    partition: int
    position: int | None = None
    """The next offset to read; None if it was never read."""
    first: int | None = None
    """The first offset that the brokers have."""
    end: int | None = None
    lag: int | None = None
    """Offsets from the position to the end of the topic; None also if it lies beyond the end."""
    moved_at: datetime | None = None
    behind_since: datetime | None = None
    """When it moved, or when the first record since was written, by the record's timestamp."""
    duplicates: int = 0
    """Duplicates since the partition was first read."""
    open_transaction: int | None = None
    """The offset of a producer's open transaction that prevents reading beyond it."""
    reader: str | None = None
    """The member that reads it: its host, and the end of its member id; None: no member."""
    stranger: str | None = None
    """Client id and host of the member, if it is another program."""

    @property
    def is_out_of_range(self) -> bool:
        """Whether the brokers do not have the position."""
        if self.position is None or self.first is None or self.end is None:
            return False
        return not self.first <= self.position <= self.end


@dataclass
class Backlog:
    """The backlog of a consumer; the empty name stands for records that no handler has seen."""

    waiting: int = 0
    dead: int = 0
    oldest: float = 0.0
    """Seconds since the oldest waiting message was received."""
    is_full: bool = False
    """Whether partitions wait before they store another message to be tried alone."""
    unserved: float = 0.0
    """Seconds for which a row is due, if no worker has held a lane for `UNSERVED` seconds."""
    has_calls: bool = False


@dataclass
class Rejected:
    """Events that wait until their topic accepts them."""

    topic: str
    reasons: str | None
    count: int
    oldest: float
    """Seconds for which the oldest has waited."""


@dataclass
class Relay:
    """A running relay."""

    shards: list[int]
    published: int = 0
    """Events that it has published since its start, updated three times in a lease."""
    lease_until: datetime | None = None
    """The end of its lease at the last update."""


@dataclass
class Status:
    """What is known of a service from PostgreSQL and Kafka. Counts above `AT_MOST` mean more."""

    service: str
    at: datetime
    """By the database's clock, in UTC."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Parts that could not be measured, and why."""
    readings: list[Reading] = field(default_factory=list)
    are_readers_known: bool = False
    consumers: frozenset[str] = frozenset()
    """Those that have a handler in this service."""
    backlog: dict[str, Backlog] = field(default_factory=dict)
    """By consumer."""
    outbox_events: int = 0
    """Events that are not published yet."""
    outbox_seconds: float = 0.0
    """The age of the oldest of them."""
    is_this_cluster: bool = True
    """Whether the database was filled where it is; otherwise it has to be adopted."""
    relays: dict[str, Relay] = field(default_factory=dict)
    """By owner of shards."""
    shards_without_relay: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    dead_events: int = 0
    scheduled: int = 0
    next_due: datetime | None = None
    remembered_since: datetime | None = None
    """Inbox markers from before may be deleted; None: none is."""
    ahead_until: date | None = None
    """The last day for which the outbox has a partition."""
    held: dict[str, str] = field(default_factory=dict)
    """Partitions that are due to be dropped, and why they are kept."""

    @property
    def is_waiting_cut_off(self) -> bool:
        """Whether more messages wait than are counted, of all consumers together."""
        return sum(one.waiting for one in self.backlog.values()) > AT_MOST

    @property
    def waiting_events(self) -> int:
        """Events that wait until their topics accept them."""
        return sum(one.count for one in self.rejected)


def format_count(number: int) -> str:
    """Return a count of a status as text, with a plus sign if there are more."""
    return f"{min(number, AT_MOST):,}{'+' if number > AT_MOST else ''}"


async def look(connection: asyncpg.Connection, service: Service, settings: Settings) -> Status:
    """Return the status. Raises the error of PostgreSQL if it can't be used at all."""
    async with asyncio.timeout(_SECONDS):
        now = await connection.fetchval("SELECT clock_timestamp()")
    consumers = frozenset(service.handlers.consumers)
    found = Status(service.name, now.astimezone(UTC), consumers=consumers)
    measure = _Measure(connection, service, settings, found)
    for part in (
        measure.positions,
        measure.backlog,
        measure.outbox,
        measure.relays,
        measure.rejected,
        measure.scheduled,
        measure.memory,
        measure.retention,
    ):
        try:
            async with asyncio.timeout(_SECONDS):
                await part()
        except TimeoutError:
            found.unknown[part.__name__] = f"PostgreSQL has not answered in {_SECONDS:.0f} s"
        except (asyncpg.InsufficientPrivilegeError, asyncpg.QueryCanceledError) as error:
            found.unknown[part.__name__] = describe_error(error)
    for part in (measure.topics, measure.readers):
        try:
            await part()
        except (KafkaError, OSError, ValueError) as error:
            found.unknown[part.__name__] = f"{settings.kafka}: {describe_error(error)}"
            break  # without brokers the next part would only wait for its time limit
    return found


@dataclass
class _Measure:
    """Measures the parts of a status, each in the method with its name."""

    connection: asyncpg.Connection
    service: Service
    settings: Settings
    found: Status

    async def positions(self) -> None:
        rows = await positions.of_group(self.connection, self.service.name)
        self.found.readings = [
            Reading(**row, behind_since=row["moved_at"])
            for row in rows
            if row["topic"] in self.service.handlers.topics
        ]

    async def backlog(self) -> None:
        names = sorted(self.service.handlers.consumers)
        rows = await lanes.count_some(self.connection, AT_MOST + 1, names)
        self.found.backlog = {name: Backlog() for name in names}
        self.found.backlog |= {name: Backlog(*counts) for name, *counts in rows}
        for row in await lanes.count_due(self.connection, UNSERVED):
            one = self.found.backlog.setdefault(row["consumer"], Backlog())
            one.waiting = max(one.waiting, row["waiting"])
            one.oldest = max(one.oldest, row["oldest"])
            one.unserved, one.has_calls = row["unserved"], row["has_calls"]
        for name in names if self.found.is_waiting_cut_off else ():
            self.found.backlog[name].is_full = await backlog.is_full(self.connection, [name])

    async def outbox(self) -> None:
        self.found.is_this_cluster = await cluster.is_ours(self.connection)
        counted = await window.count(self.connection, AT_MOST + 1)
        self.found.outbox_events, self.found.outbox_seconds = counted

    async def relays(self) -> None:
        for owner, *relay in await cursor.relays(self.connection):
            if owner is None:
                self.found.shards_without_relay = len(relay[0])
            else:
                self.found.relays[owner] = Relay(*relay)

    async def rejected(self) -> None:
        rows, self.found.dead_events = await rejected.count(self.connection, AT_MOST + 1)
        self.found.rejected = [Rejected(**row) for row in rows]

    async def scheduled(self) -> None:
        counted = await scheduled.count(self.connection, AT_MOST + 1)
        self.found.scheduled, self.found.next_due = counted

    async def memory(self) -> None:
        self.found.remembered_since = await self.connection.fetchval(_MEMORY)
        days = [
            one.name.removeprefix("outbox_p")
            for one in await partitions.like(self.connection, "outbox_p[0-9]{8}")
            if one.state is State.ATTACHED
        ]
        self.found.ahead_until = date.fromisoformat(max(days)) if days else None

    async def retention(self) -> None:
        async for one in maintenance.list_partitions(self.connection, self.settings):
            if one.is_due and one.needed_by:
                self.found.held[one.name] = one.needed_by

    async def topics(self) -> None:
        """Requires the positions."""
        described = await topics.describe(self.settings, self.service.handlers.topics)
        known = {(one.topic, one.partition): one for one in self.found.readings}
        for topic in described.values():
            for partition, end in topic.end.items():
                one = known.setdefault((topic.name, partition), Reading(topic.name, partition))
                one.first, one.end = topic.first[partition], end
                begins = one.first if one.position is None else one.position
                one.open_transaction = topic.blocked_at(partition, begins)
                one.lag = None if begins > end else end - begins
        self.found.readings = [known[place] for place in sorted(known)]
        since = timedelta(seconds=STALLED)
        idle = {
            place: one.moved_at
            for place, one in known.items()
            if one.lag and one.moved_at and one.moved_at < self.found.at - since
        }
        if missing := self.service.handlers.topics.difference(described):
            names = ", ".join(sorted(missing))
            self.found.unknown["topics"] = f"no such topic: {names} (`service topics create`)"
        with suppress(KafkaError, OSError):  # the lag is known without it
            for place, (offset, time) in (await topics.first_since(self.settings, idle)).items():
                # One that was read before the position moved has the time of a wrong clock.
                if offset >= (known[place].position or 0) and time < self.found.at + since:
                    known[place].behind_since = time

    async def readers(self) -> None:
        """Requires the topics."""
        readers = await topics.readers(self.settings, self.service.name)
        self.found.are_readers_known = True
        for one in self.found.readings:
            place = one.topic, one.partition
            one.reader, one.stranger = readers.get(place, (None, None))
