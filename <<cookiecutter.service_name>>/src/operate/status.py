"""What a person on call wants to know first, each by a small question of its own.

Large tables are not counted through: a count ends at `AT_MOST`, and no question takes longer than
five seconds. What can't be told is said, and the rest is told all the same.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime

import asyncpg
from aiokafka.errors import KafkaError

from pipeline.errors import describe_error
from pipeline.retention import maintenance, partitions
from pipeline.retention.partitions import State
from pipeline.servers import cluster, topics
from pipeline.service import Service
from pipeline.settings import Settings

AT_MOST = 10_000
"""A count that is larger was cut off: there are more."""

_SECONDS = 5.0

_POSITIONS = """
SELECT topic, partition, next_offset, moved_at, duplicates FROM pipeline.position
 WHERE consumer_group = $1 ORDER BY topic, partition
"""

WAITING = """
SELECT consumer, count(*) AS count,
       extract(epoch FROM clock_timestamp() - min(received_at))::float AS oldest
  FROM (SELECT consumer, received_at FROM pipeline.backlog WHERE died_at IS NULL LIMIT $1) AS few
 GROUP BY consumer ORDER BY consumer
"""

_DEAD = """
SELECT consumer, count(*) AS count
  FROM (SELECT consumer FROM pipeline.backlog
         WHERE died_at IS NOT NULL AND discarded_at IS NULL LIMIT $1) AS few
 GROUP BY consumer ORDER BY consumer
"""

# What a relay has sent since it last wrote its cursor still counts: a quarter of a second's worth.
OUTBOX = """
SELECT count(*) AS count,
       COALESCE(extract(epoch FROM clock_timestamp() - min(created_at)), 0)::float AS oldest
  FROM (SELECT created_at
          FROM pipeline.outbox JOIN pipeline.outbox_cursor USING (shard)
         WHERE xid >= (SELECT pg_snapshot_xmin(seen) FROM pipeline.outbox_cursor
                        ORDER BY pg_snapshot_xmin(seen) LIMIT 1)
           AND NOT pg_visible_in_snapshot(xid, seen)
           AND (target IS NULL OR id > last_id OR NOT pg_visible_in_snapshot(xid, target))
         ORDER BY xid LIMIT $1) AS unsent
"""

RELAYS = """
SELECT owner, array_agg(shard ORDER BY shard) AS shards,
       COALESCE(published, 0) AS published, relay.lease_until
  FROM (SELECT shard, CASE WHEN lease_until > clock_timestamp() THEN owner END AS owner
          FROM pipeline.outbox_cursor) AS cursor
  LEFT JOIN pipeline.outbox_relay AS relay USING (owner)
 GROUP BY owner, published, relay.lease_until ORDER BY owner NULLS FIRST
"""

_UNSENT = """
SELECT (SELECT count(*) FROM (SELECT FROM pipeline.outbox_rejected
                               WHERE died_at IS NULL LIMIT $1) AS few) AS waiting,
       (SELECT count(*) FROM (SELECT FROM pipeline.outbox_rejected
                               WHERE died_at IS NOT NULL AND discarded_at IS NULL
                               LIMIT $1) AS few) AS dead
"""

_SCHEDULED = """
SELECT (SELECT count(*) FROM (SELECT FROM pipeline.scheduled LIMIT $1) AS few) AS count,
       (SELECT min(due_at) FROM pipeline.scheduled) AS next_due
"""

_MEMORY = "SELECT current, oldest, since FROM pipeline.inbox_generation"


@dataclass
class Reading:
    """How far a partition is read. Without Kafka its end is not known."""

    topic: str
    partition: int
    position: int | None
    """The offset that it goes on from; None if it was never read."""
    end: int | None
    lag: int | None
    """Offsets from the position to the end of the topic; None also if it lies beyond the end."""
    moved_at: datetime | None
    duplicates: int = 0
    """Messages that came here and had come before, ever since."""
    open_transaction: int | None = None
    """The offset at which a producer's transaction is open, where that is why it does not go on."""
    reader: str | None = None
    """Who reads it: the host, and the end of the name in the group; None: nobody does."""


@dataclass
class Backlog:
    """What the backlog holds for a consumer; the empty name: what is nobody's yet."""

    waiting: int = 0
    dead: int = 0
    oldest: float = 0.0
    """Seconds since the oldest that waits was received."""


@dataclass
class Relay:
    """A relay that lives."""

    shards: list[int]
    published: int = 0
    """Events that Kafka has taken from it since it was started, as it says three times a lease."""
    lease_until: datetime | None = None
    """The end of the lease that it took when it said so last."""


@dataclass
class Status:
    """What PostgreSQL and Kafka tell of a service. Counts above `AT_MOST` mean more."""

    service: str
    at: datetime
    unknown: dict[str, str] = field(default_factory=dict)
    """What could not be told, and why."""
    readings: list[Reading] = field(default_factory=list)
    are_readers_known: bool = False
    backlog: dict[str, Backlog] = field(default_factory=dict)
    is_waiting_cut_off: bool = False
    """Whether more wait than are counted, of whichever consumers."""
    is_dead_cut_off: bool = False
    """Whether more are dead than are counted, of whichever consumers."""
    outbox_events: int = 0
    """Events that are not published."""
    outbox_seconds: float = 0.0
    """The age of the oldest of them."""
    is_this_cluster: bool = True
    """Whether the outbox is this database cluster's; otherwise nothing is published."""
    relays: dict[str, Relay] = field(default_factory=dict)
    """By owner of shards."""
    shards_without_relay: int = 0
    unsent: int = 0
    unsent_dead: int = 0
    scheduled: int = 0
    next_due: datetime | None = None
    remembered_since: datetime | None = None
    """What is older may be forgotten; None: nothing is."""
    generations: int = 0
    ahead_until: date | None = None
    """The last day for which the outbox has a partition."""
    held: dict[str, str] = field(default_factory=dict)
    """Partitions that are due to go, and what holds them back."""


async def look(connection: asyncpg.Connection, service: Service, settings: Settings) -> Status:
    """Ask PostgreSQL and Kafka. Raises what PostgreSQL fails with when it can't be used at all."""
    async with asyncio.timeout(_SECONDS):
        found = Status(service.name, await connection.fetchval("SELECT clock_timestamp()"))
    ask = _Ask(connection, service, settings, found)
    for part, question in (
        ("positions", ask.positions),
        ("backlog", ask.backlog),
        ("outbox", ask.outbox),
        ("relays", ask.relays),
        ("unsent", ask.unsent),
        ("scheduled", ask.scheduled),
        ("memory", ask.memory),
        ("retention", ask.retention),
    ):
        await _unless_unknown(found, part, question)
    for part, question in (("topics", ask.topics), ("readers", ask.readers)):
        try:
            await question()
        except (KafkaError, OSError, TimeoutError) as error:
            found.unknown[part] = f"{settings.kafka}: {describe_error(error)}"
            break  # it would not answer the next one either
    return found


async def _unless_unknown(
    found: Status, part: str, question: Callable[[], Awaitable[None]]
) -> None:
    try:
        async with asyncio.timeout(_SECONDS):
            await question()
    except TimeoutError:
        found.unknown[part] = f"PostgreSQL has not answered in {_SECONDS:.0f} s"
    except (asyncpg.InsufficientPrivilegeError, asyncpg.QueryCanceledError) as error:
        found.unknown[part] = describe_error(error)


@dataclass
class _Ask:
    connection: asyncpg.Connection
    service: Service
    settings: Settings
    found: Status

    async def positions(self) -> None:
        rows = await self.connection.fetch(_POSITIONS, self.service.name)
        self.found.readings = [
            Reading(
                topic=row["topic"],
                partition=row["partition"],
                position=row["next_offset"],
                end=None,
                lag=None,
                moved_at=row["moved_at"],
                duplicates=row["duplicates"],
            )
            for row in rows
            if row["topic"] in self.service.handlers.topics
        ]

    async def backlog(self) -> None:
        backlog = {name: Backlog() for name in sorted(self.service.handlers.consumers)}
        waiting = await self.connection.fetch(WAITING, AT_MOST + 1)
        for row in waiting:
            one = backlog.setdefault(row["consumer"], Backlog())
            one.waiting, one.oldest = row["count"], row["oldest"]
        dead = await self.connection.fetch(_DEAD, AT_MOST + 1)
        for row in dead:
            backlog.setdefault(row["consumer"], Backlog()).dead = row["count"]
        self.found.backlog = backlog
        self.found.is_waiting_cut_off = sum(row["count"] for row in waiting) > AT_MOST
        self.found.is_dead_cut_off = sum(row["count"] for row in dead) > AT_MOST

    async def outbox(self) -> None:
        self.found.is_this_cluster = await cluster.is_ours(self.connection)
        row = await self.connection.fetchrow(OUTBOX, AT_MOST + 1)
        self.found.outbox_events, self.found.outbox_seconds = row["count"], row["oldest"]

    async def relays(self) -> None:
        for row in await self.connection.fetch(RELAYS):
            if row["owner"] is None:
                self.found.shards_without_relay = len(row["shards"])
            else:
                self.found.relays[row["owner"]] = Relay(
                    row["shards"], row["published"], row["lease_until"]
                )

    async def unsent(self) -> None:
        row = await self.connection.fetchrow(_UNSENT, AT_MOST + 1)
        self.found.unsent, self.found.unsent_dead = row["waiting"], row["dead"]

    async def scheduled(self) -> None:
        row = await self.connection.fetchrow(_SCHEDULED, AT_MOST + 1)
        self.found.scheduled, self.found.next_due = row["count"], row["next_due"]

    async def memory(self) -> None:
        row = await self.connection.fetchrow(_MEMORY)
        self.found.remembered_since = row["since"]
        self.found.generations = row["current"] - row["oldest"] + 1
        self.found.ahead_until = await ahead_until(self.connection)

    async def topics(self) -> None:
        """Needs the positions."""
        described = await topics.describe(self.settings, self.service.handlers.topics)
        self.found.readings = _compared(self.found.readings, described)
        if missing := self.service.handlers.topics.difference(described):
            names = ", ".join(sorted(missing))
            self.found.unknown["topics"] = f"no such topic: {names} (`service topics create`)"
        for one in self.found.readings:
            if one.position is not None and one.end is not None and one.position > one.end:
                self.found.unknown[f"{one.topic}/{one.partition}"] = (
                    f"offset {one.position} is beyond the end, {one.end} (PartitionStuck)"
                )

    async def readers(self) -> None:
        """Needs the topics."""
        readers = await topics.readers(self.settings, self.service.name)
        self.found.are_readers_known = True
        for one in self.found.readings:
            one.reader = readers.get((one.topic, one.partition))

    async def retention(self) -> None:
        async for one in maintenance.list_partitions(self.connection, self.settings):
            if one.is_due and one.needed_by:
                self.found.held[one.name] = one.needed_by


async def ahead_until(connection: asyncpg.Connection) -> date | None:
    """Return the last day for which the outbox has a partition."""
    days = [
        one.name.removeprefix("outbox_p")
        for one in await partitions.like(connection, "outbox_p[0-9]{8}")
        if one.state is State.ATTACHED
    ]
    return date.fromisoformat(max(days)) if days else None


def _compared(readings: list[Reading], described: dict[str, topics.Topic]) -> list[Reading]:
    """Add where partitions end, and those that were never read."""
    known = {(one.topic, one.partition): one for one in readings}
    for topic in described.values():
        for partition, end in topic.end.items():
            one = known.setdefault(
                (topic.name, partition), Reading(topic.name, partition, None, None, None, None)
            )
            one.end = end
            begins = topic.first[partition] if one.position is None else one.position
            one.open_transaction = topic.blocked_at(partition, begins)
            one.lag = None if begins > end else end - begins
    return [known[place] for place in sorted(known)]


def told(status: Status) -> list[str]:
    """Return lines for a screen of 80 columns and 24 lines."""
    lines = [f"{status.service}  {status.at.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z", ""]
    by_topic: dict[str, list[Reading]] = {}
    for one in status.readings:
        by_topic.setdefault(one.topic, []).append(one)
    # What is behind comes first: a screen holds five of each.
    behind = sorted(by_topic, key=lambda topic: -max(one.lag or 0 for one in by_topic[topic]))
    lines += _some([_of_topic(status, topic, by_topic[topic]) for topic in behind], 5)
    busy = sorted(status.backlog.items(), key=lambda one: -(one[1].waiting + one[1].dead))
    lines += _some([_of_consumer(status, name) for name, _ in busy], 5)
    for name, part, text in (
        ("outbox", "outbox", _of_outbox(status)),
        ("relays", "relays", _of_relays(status)),
        ("refused", "unsent", _of_unsent(status)),
        ("scheduled", "scheduled", _of_scheduled(status)),
        ("remembers", "memory", _of_memory(status)),
        ("ahead", "memory", f"partitions until {status.ahead_until}"),
    ):
        lines.append(_line(name, "not known, see below" if part in status.unknown else text))
    held = [
        f"{one.topic}/{one.partition}: a producer's transaction is open at {one.open_transaction}"
        for one in status.readings
        if one.open_transaction is not None
    ]
    held += [f"{name}: {why}" for name, why in status.held.items()]
    lines += _some([_line("held", text) for text in held], 2)
    lines += _some([_line("unknown", f"{part}: {why}") for part, why in status.unknown.items()], 3)
    return [line if len(line) <= 80 else f"{line[:79]}…" for line in lines]


def _some(lines: list[str], at_most: int) -> list[str]:
    if len(lines) <= at_most:
        return lines
    return [*lines[: at_most - 1], f"{'':10} and {len(lines) - at_most + 1} more: see --json"]


def _line(name: str, text: str) -> str:
    return f"{name:10} {text}"


def _of_topic(status: Status, topic: str, readings: list[Reading]) -> str:
    lags = [one.lag for one in readings if one.lag is not None]
    moved = max((one.moved_at for one in readings if one.moved_at), default=None)
    ago = f"moved {_span((status.at - moved).total_seconds())} ago" if moved else "never read"
    if not lags:
        return _line("reads", f"{topic}  {len(readings)} partitions, lag not known, {ago}")
    worst = max(readings, key=lambda one: one.lag or 0)
    where = f" (partition {worst.partition}: {worst.lag:,})" if worst.lag and len(lags) > 1 else ""
    by = f", {_readers(readings)}" if status.are_readers_known else ""
    return _line("reads", f"{topic}  lag {sum(lags):,}{where}, {ago}{by}")


def _readers(readings: list[Reading]) -> str:
    readers = {one.reader for one in readings}
    if readers == {None}:
        return "no reader"
    alone = sum(one.reader is None for one in readings)
    count = len(readers - {None})
    return f"{count} reader{'s' * (count > 1)}" + (f", {alone} without one" if alone else "")


def _of_consumer(status: Status, name: str) -> str:
    one = status.backlog[name]
    waiting = _number(one.waiting, is_cut_off=status.is_waiting_cut_off)
    dead = _number(one.dead, is_cut_off=status.is_dead_cut_off)
    least = "at least " if status.is_waiting_cut_off else ""  # it is of some of them
    age = f", oldest {least}{_span(one.oldest)}" if one.waiting else ""
    return _line("backlog", f"{name or 'nobody'}  {waiting} waiting, {dead} dead{age}")


def _of_unsent(status: Status) -> str:
    return f"{_number(status.unsent)} waiting, {_number(status.unsent_dead)} dead"


def _of_scheduled(status: Status) -> str:
    due = status.next_due
    return _number(status.scheduled) + (
        f", next {due.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z" if due else ""
    )


def _of_memory(status: Status) -> str:
    since = status.remembered_since
    memory = f"all since {since.astimezone(UTC):%Y-%m-%d %H:%M}Z" if since else "everything"
    count = status.generations
    return f"{memory}, in {count} {'generation' if count == 1 else 'generations'}"


def _of_outbox(status: Status) -> str:
    if not status.is_this_cluster:
        return "another cluster's, nothing is sent: `service relay reset`"
    age = f", oldest {_span(status.outbox_seconds)}" if status.outbox_events else ""
    return f"{_number(status.outbox_events)} to publish{age}"


def _of_relays(status: Status) -> str:
    if not status.relays:
        return "none: run `service relay`"
    alone = status.shards_without_relay
    nobodys = f", {alone} shards without one" if alone else ""
    shards = sum(len(one.shards) for one in status.relays.values())
    return f"{len(status.relays)} with {shards} shards{nobodys}"


def _number(count: int, *, is_cut_off: bool = False) -> str:
    return f"{min(count, AT_MOST):,}{'+' if is_cut_off or count > AT_MOST else ''}"


def _span(seconds: float) -> str:
    """Tell a time in its largest unit."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{max(0.0, seconds):,.0f} s"
