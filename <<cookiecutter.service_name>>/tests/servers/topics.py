"""Topics on the tests' Kafka: created, read and deleted."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, ConsumerRecord
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from onceward import Event

from .waiting import eventually


def id_of(record: ConsumerRecord) -> str:
    """Return the CloudEvents id."""
    return str(dict(record.headers)["ce_id"], "utf-8")


@dataclass
class Tail:
    """The records of a topic, as a consumer gets to see them."""

    records: list[ConsumerRecord] = field(default_factory=list)

    @property
    def ids(self) -> list[str]:
        """The ids of all records, repeats too."""
        return [id_of(record) for record in self.records]

    def first_ids(self) -> dict[bytes | None, list[str]]:
        """Return the ids of each key, in the order in which they first appeared."""
        found: dict[bytes | None, dict[str, None]] = defaultdict(dict)
        for record in self.records:
            found[record.key][id_of(record)] = None
        return {key: list(ids) for key, ids in found.items()}

    def of(self, key: str) -> list[ConsumerRecord]:
        """Return the records that have this key."""
        return [record for record in self.records if record.key == key.encode()]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds for what has come, as long as more records come."""
        come = -1

        def has_come() -> bool:
            return len(self.records) > come

        while not condition():
            come = len(self.records)
            await eventually(lambda: has_come() or condition())

    async def until_ids(self, ids: Iterable[object]) -> None:
        """Wait until each of these ids has come, as long as more records come."""
        wanted = {str(id) for id in ids}
        await self.until(lambda: wanted.issubset(self.ids))

    async def has_ids(self, ids: Iterable[object], patience: float) -> bool:
        """Wait for these ids; returns whether all of them have come in time."""
        try:
            async with asyncio.timeout(patience):
                await self.until_ids(ids)
        except TimeoutError:
            return False
        return True


@asynccontextmanager
async def following(kafka: str, topic: str) -> AsyncIterator[Tail]:
    """Read a topic from its beginning, as long as the `with` block lasts."""
    tail = Tail()

    async def read(consumer: AIOKafkaConsumer) -> None:
        async for record in consumer:
            tail.records.append(record)

    async with AIOKafkaConsumer(
        topic,
        bootstrap_servers=kafka,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        fetch_max_wait_ms=50,
    ) as consumer:
        task = asyncio.create_task(read(consumer))
        try:
            yield tail
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def records_in(kafka: str, topic: str) -> list[ConsumerRecord]:
    """Return all records that the topic holds now, in the order of each partition."""
    async with (
        following(kafka, topic) as tail,
        AIOKafkaConsumer(topic, bootstrap_servers=kafka) as consumer,
    ):
        ends = await consumer.end_offsets(list(consumer.assignment()))
        # These topics hold no transactions, so offsets have no gaps.
        await tail.until(lambda: len(tail.records) >= sum(ends.values()))
        return tail.records


async def ids_in(kafka: str, topic: str) -> list[str]:
    """Return the ids of all records that the topic holds now, repeats too."""
    return [id_of(record) for record in await records_in(kafka, topic)]


@asynccontextmanager
async def administrator(kafka: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """Lend a client that may change topics."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def create_topic(kafka: str, topic: str, partitions: int = 1, **configs: str) -> None:
    """Create a topic, also where one of that name is still being deleted.

    It keeps its records: retention goes by the time in a record, and tests send old ones.
    """
    configs = {"retention.ms": "-1"} | configs
    async with administrator(kafka) as admin:

        async def is_there() -> bool:
            answer = await admin.create_topics(
                [NewTopic(topic, partitions, 1, topic_configs=configs)]
            )
            return bool(answer.topic_errors[0][1] == 0)

        async def has_leaders() -> bool:
            (found,) = await admin.describe_topics([topic])
            return [one["leader"] >= 0 for one in found["partitions"]] == [True] * partitions

        await eventually(is_there)
        # A client that subscribes before that looks for its partitions after minutes only.
        await eventually(has_leaders)


async def delete_topic(kafka: str, topic: str) -> None:
    """Delete a topic, and wait until the broker does not know it any more."""
    async with administrator(kafka) as admin:
        await admin.delete_topics([topic])

        async def is_gone() -> bool:
            return topic not in await admin.list_topics()

        await eventually(is_gone)


Rename = Callable[[str], str]


async def own_topics(
    kafka: str,
    topics: Iterable[str],
    events: Iterable[type[Event]],
    used_topics: list[str],
    patch: pytest.MonkeyPatch,
) -> Rename:
    """Create topics that nothing else uses, in the place of those, and of those of the events.

    Returns the function from a topic's name to that of the one in its place. Until the patch is
    undone, the events are published there.
    """
    suffix = uuid4().hex[:12]

    def own(topic: str) -> str:
        return f"{topic}-{suffix}"

    published = {event: topic for event in events if (topic := event.__event_topic__)}
    for event, topic in published.items():
        patch.setattr(event, "__event_topic__", own(topic))
    for topic in {*topics, *published.values()}:
        used_topics.append(own(topic))
        await create_topic(kafka, used_topics[-1])
    return own


async def delete_topics(kafka: str, topics: Iterable[str]) -> None:
    """Delete topics that nothing uses any more; the broker takes its time for it."""
    async with administrator(kafka) as admin:
        await admin.delete_topics(list(topics))
