"""The status of a service, in parts that are measured by small statements of their own.

A count of a large table stops above `AT_MOST`, and a statement after five seconds. A part that
can't be measured is named with the reason, and the others are still measured.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Literal

import asyncpg
from aiokafka.errors import KafkaError

from onceward.apply import backlog
from onceward.errors import describe_error
from onceward.operators import offsets, rejected, relays, scheduled, stopping
from onceward.operators.stopping import Stop
from onceward.retention import days, generations, maintenance, partitions
from onceward.retention.partitions import State
from onceward.retry import lanes
from onceward.servers import cluster, topics
from onceward.service import Service
from onceward.settings import Settings

AT_MOST = 10_000
"""The largest exact count; a larger one means that there are more."""

STALLED = 60.0
"""Seconds for which work may be due while no process takes it, and for which the position of a
partition with records to read may stay the same."""

_SECONDS = 5.0


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
    """Offsets from the position to the end; None also if the position lies beyond the end."""
    moved_at: datetime | None = None
    behind_since: datetime | None = None
    """When it moved, or when the first record since was written, by the record's timestamp."""
    written_at: datetime | None = None
    """When the first record to read was written, or the one before it, by the timestamp."""
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

    def age(self, since: datetime | None, now: datetime) -> float:
        """Return the seconds since a time; 0 if no record is behind the position."""
        is_behind = self.lag and self.position is not None
        return max(0.0, (now - since).total_seconds()) if is_behind and since else 0.0


Kind = Literal["reads", "backlog", "calls", "outbox", "rejected", "scheduled"]
"""What waits: records of a topic; messages and calls of a consumer; events that are not published;
those that their topic rejects; those that are not due."""


@dataclass
class Stage:
    """A place where work waits until a process takes it."""

    kind: Kind
    subject: str = ""
    """The topic or consumer; the empty name of a consumer stands for records that no handler has
    seen."""
    waiting: int | None = 0
    """None: not known."""
    dead: int = 0
    """What waits for a person's decision."""
    failing: int = 0
    """Messages or calls among those waiting that have failed before; all events of a topic that
    rejects them."""
    oldest: float = 0.0
    """Seconds for which the oldest has waited: since it was received, stored or rejected."""
    oldest_by_topic: dict[str, float] = field(default_factory=dict)
    """The same by topic, of events that are not published and of messages that wait; 0: none of
    the topic waits. Of many not each topic is known."""
    unserved: float = 0.0
    """Seconds for which some is due, if no process is known to have taken such work since."""
    why: str | None = None
    """What is known of the cause."""
    is_full: bool = False
    """Whether partitions wait before they store another message to be tried alone."""

    @property
    def slowest_topic(self) -> str:
        """The topic whose oldest has waited longest; empty if less than two are known to wait."""
        ages = [(age, topic) for topic, age in self.oldest_by_topic.items() if age]
        return max(ages)[1] if len(ages) > 1 else ""


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
    stages: list[Stage] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    are_readers_known: bool = False
    stops: list[Stop] = field(default_factory=list)
    """What people have paused or throttled, as `stopping.listed` returns it."""
    paused_topics: set[str] = field(default_factory=set)
    """Topics that are paused, or all of whose consumers are."""
    consumers: frozenset[str] = frozenset()
    """Those that have a handler in this service."""
    is_this_cluster: bool = True
    """Whether the database was filled where it is; otherwise it has to be adopted."""
    relays: dict[str, Relay] = field(default_factory=dict)
    """By owner of shards."""
    shards_without_relay: int = 0
    was_relayed: bool = True
    """False: the service publishes, and no relay was ever started."""
    next_due: datetime | None = None
    """When the first scheduled event is due."""
    remembered_since: datetime | None = None
    """Inbox markers from before may be deleted; None: none is."""
    ahead_until: date | None = None
    """The last day for which the outbox has a partition."""
    held: dict[str, str] = field(default_factory=dict)
    """Partitions that are due to be dropped, and why they are kept."""

    def is_paused(self, stage: Stage) -> bool:
        """Whether people have paused all that waits there, or its consumer may rest for minutes."""
        if stage.kind == "rejected":
            return not stage.failing
        stopped = {one.name for one in self.stops if one.kind == "consumer"}
        return stage.subject in (self.paused_topics if stage.kind == "reads" else stopped)

    def of(self, *kinds: Kind) -> list[Stage]:
        """Return the stages of these kinds, those in which most waits first."""
        found = [one for one in self.stages if one.kind in kinds]
        return sorted(found, key=lambda one: -(one.waiting or 0) - one.dead)

    def waiting(self, kind: Kind) -> int | None:
        """Return how much waits in the stages of a kind; None: not known."""
        known = [one.waiting for one in self.of(kind) if one.waiting is not None]
        is_known = kind not in self.unknown and (known or kind != "reads")
        return sum(known) if is_known else None

    def dead(self, *kinds: Kind) -> int | None:
        """Return how much is dead in the stages of these kinds; None: not known."""
        is_known = self.unknown.keys().isdisjoint(kinds)
        return sum(one.dead for one in self.of(*kinds)) if is_known else None

    def oldest(self, kind: Kind) -> float:
        """Return for how many seconds the oldest of a kind has waited."""
        return max((one.oldest for one in self.of(kind)), default=0.0)

    def slowest_topic(self, kind: Kind) -> str:
        """Return that topic of the stage in which the oldest has waited longest."""
        slowest = max(self.of(kind), key=lambda one: one.oldest, default=Stage(kind))
        return slowest.slowest_topic

    @property
    def is_cut_off(self) -> bool:
        """Whether more messages and calls wait than are counted, of all consumers together."""
        return sum(one.waiting or 0 for one in self.of("backlog", "calls")) > AT_MOST


def format_count(number: int | None) -> str:
    """Return a count of a status as text, with a plus sign if there are more."""
    return "not known" if number is None else f"{min(number, AT_MOST):,}{'+' * (number > AT_MOST)}"


async def look(connection: asyncpg.Connection, service: Service, settings: Settings) -> Status:
    """Return the status. Raises the error of PostgreSQL if it can't be used at all."""
    async with asyncio.timeout(_SECONDS):
        now = await connection.fetchval("SELECT clock_timestamp()")
    consumers = frozenset(service.handlers.consumers)
    found = Status(service.name, now.astimezone(UTC), consumers=consumers)
    measure = _Measure(connection, service, settings, found)
    of_database = (
        *(measure.stops, measure.positions, measure.backlog, measure.outbox, measure.relays),
        *(measure.rejected, measure.scheduled, measure.memory, measure.retention),
    )
    for part in of_database:
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
    found.stages += topic_stages(found)
    return found


def topic_stages(found: Status) -> Iterator[Stage]:
    """Yield what waits in each topic. While nobody reads any, what comes next has no reader."""
    moved = max((one.moved_at for one in found.readings if one.moved_at), default=found.at)
    nobody = found.are_readers_known and not any(one.reader for one in found.readings)
    idle = (found.at - moved).total_seconds() if nobody else 0.0
    for name in sorted({one.topic for one in found.readings}):
        its = [one for one in found.readings if one.topic == name]
        lags = [one.lag for one in its if one.lag is not None]
        stage = Stage("reads", name, sum(lags) if lags else None)
        stage.oldest = max(one.age(one.written_at or one.behind_since, found.at) for one in its)
        unread = [one for one in its if one.reader is None and (one.lag or nobody)]
        if unread and found.are_readers_known:
            numbers = ", ".join(str(one.partition) for one in unread)
            stage.why = f"no reader of partitions {numbers}"
            stage.unserved = max([idle, *(one.age(one.behind_since, found.at) for one in unread)])
        yield stage


@dataclass
class _Measure:
    """Measures the parts of a status, each in the method with its name."""

    connection: asyncpg.Connection
    service: Service
    settings: Settings
    found: Status

    async def stops(self) -> None:
        self.found.stops = stops = await stopping.listed(self.connection)
        self.found.paused_topics = stopping.paused_topics(self.service.handlers, stops)

    async def positions(self) -> None:
        rows = await offsets.of_group(self.connection, self.service.name)
        own = (row for row in rows if row["topic"] in self.service.handlers.topics)
        self.found.readings = [Reading(**row, behind_since=row["moved_at"]) for row in own]

    async def backlog(self) -> None:
        handlers = self.service.handlers
        rows = await lanes.waiting(self.connection, AT_MOST + 1, STALLED)
        found = {(one.has_calls, one.consumer): one for one in rows}
        own = {(name in handlers.callers, name) for name in handlers.consumers}
        for has_calls, name in sorted({*found, *own}):
            stage = Stage("calls" if has_calls else "backlog", name)
            if one := found.get((has_calls, name)):
                stage.waiting, stage.dead, stage.failing, stage.oldest = one[2:6]
                stage.oldest_by_topic = one.oldest_by_topic
                stage.unserved = one.unserved if name in {*handlers.consumers, ""} else 0.0
            self.found.stages.append(stage)
        for stage in self.found.of("backlog") if self.found.is_cut_off else ():
            if stage.subject in handlers.consumers:
                stage.is_full = await backlog.is_full(self.connection, [stage.subject])

    async def outbox(self) -> None:
        self.found.is_this_cluster = await cluster.is_ours(self.connection)
        count, oldest = await relays.count(self.connection, AT_MOST + 1)
        why = "it is not known whether they have relays"
        age = max(oldest.values(), default=0.0)
        stage = Stage("outbox", "", count, oldest=age, unserved=age, why=why)
        stage.oldest_by_topic = oldest
        self.found.stages.append(stage)

    async def relays(self) -> None:
        """Requires the outbox."""
        for owner, *relay in await relays.listed(self.connection):
            if owner is None:
                self.found.shards_without_relay = len(relay[0])
            else:
                self.found.relays[owner] = Relay(*relay)
        shards = self.found.shards_without_relay
        for one in self.found.of("outbox"):
            one.unserved = one.oldest if shards else 0.0
            one.why = f"{shards} shards have no relay" if shards else None
        if self.service.declared_topics:
            self.found.was_relayed = await relays.has_begun(self.connection)

    async def rejected(self) -> None:
        rows, dead = await rejected.count(self.connection, AT_MOST + 1)
        self.found.stages.append(Stage("rejected", dead=dead))
        self.found.stages += [
            Stage("rejected", topic, count, failing=count * rejects, oldest=oldest, why=reasons)
            for topic, reasons, count, oldest, rejects in rows
        ]

    async def scheduled(self) -> None:
        count, next_due = await scheduled.count(self.connection, AT_MOST + 1)
        late = max(0.0, (self.found.at - next_due).total_seconds()) if next_due else 0.0
        self.found.stages.append(Stage("scheduled", "", count, oldest=late, unserved=late))
        self.found.next_due = next_due

    async def memory(self) -> None:
        self.found.remembered_since = (await generations.read(self.connection))["since"]
        found = await partitions.like(self.connection, days.PATTERN)
        attached = [day for one in found if one.state is State.ATTACHED and (day := days.of(one))]
        self.found.ahead_until = max(attached, default=None)

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
                is_known = begins <= end and "positions" not in self.found.unknown
                one.lag = end - begins if is_known else None
        self.found.readings = [known[place] for place in sorted(known)]
        idle = {
            place: one.moved_at
            for place, one in known.items()
            if one.moved_at and one.age(one.moved_at, self.found.at) > STALLED
        }
        latest = self.found.at + timedelta(seconds=STALLED)
        if missing := self.service.handlers.topics.difference(described):
            names = ", ".join(sorted(missing))
            self.found.unknown["topics"] = f"no such topic: {names} (`service topics create`)"
        with suppress(KafkaError, OSError):  # the lag is known without it
            for place, (offset, time) in (await topics.first_since(self.settings, idle)).items():
                # One that was read before the position moved has the time of a wrong clock.
                if offset >= (known[place].position or 0) and time < latest:
                    known[place].behind_since = time
                    if offset == known[place].position:
                        known[place].written_at = time

    async def readers(self) -> None:
        """Requires the topics."""
        readers = await topics.readers(self.settings, self.service.name)
        self.found.are_readers_known = True
        for one in self.found.readings:
            one.reader, one.stranger = readers.get((one.topic, one.partition), (None, None))
