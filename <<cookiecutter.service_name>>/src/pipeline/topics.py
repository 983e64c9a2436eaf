"""Topics as the brokers describe them: whether they exist, their settings, and where they end."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

_ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Topic:
    """A topic that exists."""

    name: str
    first: Mapping[int, int]
    """The first offset that each partition still has."""
    end: Mapping[int, int]
    """The offset after each partition's last record."""
    configs: Mapping[str, str]


async def describe(bootstrap_servers: str, names: Iterable[str]) -> dict[str, Topic]:
    """Return those of the topics that exist; creates none.

    Raises `KafkaError`, `OSError` or `TimeoutError` when the brokers don't answer in 10 seconds.
    """
    async with asyncio.timeout(2 * _ANSWER_SECONDS):
        return await _describe(bootstrap_servers, set(names))


async def _describe(bootstrap_servers: str, names: set[str]) -> dict[str, Topic]:
    milliseconds = round(_ANSWER_SECONDS * 1_000)
    admin = AIOKafkaAdminClient(
        bootstrap_servers=bootstrap_servers, request_timeout_ms=milliseconds
    )
    try:
        await admin.start()
        # First: a broker may create a topic of which it is asked.
        there = sorted(names.intersection(await admin.list_topics()))
        if not there:
            return {}
        described = await admin.describe_topics(there)
        answers = await admin.describe_configs(
            [ConfigResource(ConfigResourceType.TOPIC, name) for name in there]
        )
    finally:
        await admin.close()
    partitions = [
        TopicPartition(one["topic"], part["partition"])
        for one in described
        for part in one["partitions"]
    ]
    client = AIOKafkaConsumer(bootstrap_servers=bootstrap_servers, request_timeout_ms=milliseconds)
    try:
        await client.start()
        first = await client.beginning_offsets(partitions)
        end = await client.end_offsets(partitions)
    finally:
        await client.stop()
    configs = {
        name: {entry[0]: entry[1] for entry in entries}
        for answer in answers
        for _, _, _, name, entries in answer.resources
    }
    return {
        name: Topic(
            name,
            {one.partition: offset for one, offset in first.items() if one.topic == name},
            {one.partition: offset for one, offset in end.items() if one.topic == name},
            configs.get(name, {}),
        )
        for name in there
    }
