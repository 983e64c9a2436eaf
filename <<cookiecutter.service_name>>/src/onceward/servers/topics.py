"""Topics as the brokers describe them: whether they exist, their settings, and where they end."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

from aiokafka import TopicPartition
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.errors import (
    RebalanceInProgressError,
    RequestTimedOutError,
    TopicAuthorizationFailedError,
    for_code,
)
from aiokafka.protocol.metadata import MetadataRequest

from onceward.errors import missing_acl
from onceward.events.message import time_of
from onceward.settings import Settings

from . import clients

_ANSWER_SECONDS = 5.0
_REBALANCING = ("PreparingRebalance", "CompletingRebalance")
"""States of a group whose members have no partitions."""


MAY_NOT_DESCRIBE = (
    f"may not be described, whether it exists or not: {missing_acl(TopicAuthorizationFailedError)}"
)


class Topics(dict[str, "Topic"]):
    """The topics that exist, by name."""

    hidden: frozenset[str] = frozenset()
    """Those that the user may not describe, whether they exist or not."""


@dataclass(frozen=True)
class Topic:
    """A topic that exists."""

    name: str
    first: Mapping[int, int]
    """The first offset that each partition still has."""
    end: Mapping[int, int]
    """The offset after each partition's last record."""
    stable: Mapping[int, int]
    """The offset of each partition up to which `read_committed` reads: the end, unless a producer's
    transaction is open."""
    configs: Mapping[str, str]
    unreadable: str | None
    """Why the brokers don't return its configuration; None: they do."""

    def blocked_at(self, partition: int, position: int) -> int | None:
        """Return where a producer's open transaction keeps a reader from going on, if it does."""
        stable = self.stable[partition]
        return stable if stable <= position < self.end[partition] else None


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """Raise `RequestTimedOutError` if the brokers don't answer in 10 seconds."""
    try:
        async with asyncio.timeout(2 * _ANSWER_SECONDS):
            yield
    except TimeoutError as error:
        raise RequestTimedOutError(f"no answer in {2 * _ANSWER_SECONDS:.0f} s") from error


async def first_since(
    settings: Settings, times: Mapping[tuple[str, int], datetime]
) -> dict[tuple[str, int], tuple[int, datetime]]:
    """Return offset and time of the first record of each topic and partition with that time or a
    later one, if any.

    Raises `KafkaError` or `OSError` if the brokers don't answer, or not in 10 seconds.
    """
    if not times:
        return {}
    wanted = {
        TopicPartition(*place): max(0, int(time.timestamp() * 1_000))
        for place, time in times.items()
    }
    async with _in_time(), clients.offsets_client(settings) as client:
        found = await client.offsets_for_times(wanted)
    return {place: (one.offset, time_of(one.timestamp)) for place, one in found.items() if one}


async def describe(settings: Settings, names: Iterable[str]) -> Topics:
    """Return those of the topics that exist, by name.

    Raises `KafkaError` or `OSError` if the brokers don't answer, or not in 10 seconds.
    """
    async with _in_time():
        async with clients.admin_client(settings, answer_within=_ANSWER_SECONDS) as admin:
            # Without the second argument a broker may create those that don't exist.
            answer = await admin._send_request(MetadataRequest(sorted({*names}), False))
            found, partitions = Topics(), list[TopicPartition]()
            for code, topic, _, its, *_ in answer.topics:
                partitions += [TopicPartition(topic, number) for _, number, *_ in its]
                if for_code(code) is TopicAuthorizationFailedError:
                    found.hidden |= {topic}
            if not partitions:
                return found
            there = sorted({one.topic for one in partitions})
            answers = await admin.describe_configs(
                [ConfigResource(ConfigResourceType.TOPIC, name) for name in there]
            )
        async with clients.offsets_client(settings) as client:
            first = await client.offsets("first", partitions)
            end = await client.offsets("end", partitions)
            # Queried last, so that records written meanwhile don't look like an open transaction.
            stable = await client.offsets("stable", partitions)
    resources = [one for answer in answers for one in answer.resources]
    configs = {name: {entry[0]: entry[1] for entry in entries} for *_, name, entries in resources}
    unreadable = {name: for_code(code).__name__ for code, _, _, name, _ in resources if code}
    for name in there:
        offsets = (_of(name, first), _of(name, end), _of(name, stable))
        found[name] = Topic(name, *offsets, configs.get(name, {}), unreadable.get(name))
    return found


def _of(topic: str, offsets: Mapping[TopicPartition, int]) -> dict[int, int]:
    return {one.partition: offset for one, offset in offsets.items() if one.topic == topic}


async def readers(settings: Settings, group: str) -> dict[TopicPartition, tuple[str, str | None]]:
    """Return the member of a consumer group that reads each partition: host and part of its id; and
    client id and host if it is another program than the service with the group's name.

    Raises `KafkaError` or `OSError` if the brokers don't answer, or not in 10 seconds, or
    the group is in a rebalance; `ValueError` if a program has assigned what can't be read.
    """
    async with (
        _in_time(),
        clients.admin_client(settings, answer_within=_ANSWER_SECONDS) as admin,
    ):
        (answer,) = await admin.describe_consumer_groups([group])
    ((code, _, state, _, _, members, *_),) = answer.groups
    if code:
        raise for_code(code)(f"the brokers don't describe the group {group}")
    if state in _REBALANCING:
        raise RebalanceInProgressError(f"the group {group} is in a rebalance")
    return {
        one: (
            f"{host.removeprefix('/')} {member[-8:]}",
            None if client == group else f"client {client!r} at {host.removeprefix('/')}",
        )
        for member, *_, client, host, _, assignment in members
        if assignment  # a member may have none
        for one in ConsumerProtocolMemberAssignment.decode(assignment).partitions()
    }
