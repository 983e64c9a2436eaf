"""What a person asks of a service from the command line, beside running it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import asyncpg
from aiokafka import AIOKafkaConsumer, TopicPartition
from pydantic_core import from_json

from pipeline.apply import positions
from pipeline.apply.positions import Slot
from pipeline.events.message import marker_key
from pipeline.handlers.staging import event_id
from pipeline.servers import clients
from pipeline.service import Service
from pipeline.settings import Settings

_SECONDS = 86_400.0
"""Without a source all that is remembered has to be looked through."""

_ORDINALS = 1_000
"""Events of one message that are looked for in the outbox."""

_MARKERS = """
SELECT generation, consumer, source, id, type, topic, partition, "offset", created_at, xid,
       traceparent, hash, result::text
  FROM pipeline.inbox
 WHERE generation = ANY (ARRAY(
           SELECT generate_series(oldest, current) FROM pipeline.inbox_generation))
   AND id = $1 AND ($2::bytea[] IS NULL OR key = ANY ($2))
 ORDER BY created_at, consumer
"""

_EVENTS = """
SELECT event_id, type, topic, convert_from(key, 'UTF8') AS key
  FROM pipeline.outbox
 WHERE xid = ANY (ARRAY[$1::xid8, (SELECT reset_xid FROM pipeline.outbox_cluster)])
   AND event_id = ANY ($2)
 ORDER BY id
"""

To = Literal["earliest", "latest"] | int | datetime
"""Where a partition is to go on: what the brokers have first, what comes next, an offset, or the
first record of a time."""


class Refused(Exception):
    """What was asked for can't be done; the text says why and what can."""


@dataclass(frozen=True)
class Remembered:
    """A message that took effect at one consumer."""

    consumer: str
    source: str
    id: str
    type: str
    topic: str
    partition: int
    offset: int
    applied_at: datetime
    """When the transaction began, by the database's clock."""
    transaction: int
    """PostgreSQL's transaction id (xid8)."""
    generation: int
    traceparent: str | None
    payload_hash: str
    result: Any
    """What the handler returned."""
    events: Sequence[Mapping[str, str | None]]
    """What it published, as far as the outbox still holds it."""


async def remembered(
    connection: asyncpg.Connection, service: Service, id: str, source: str | None
) -> list[Remembered]:
    """Find a message by its id, at every consumer; with its source it is found at once."""
    keys = None
    if source is not None:
        keys = [marker_key(consumer, source, id) for consumer in service.handlers.consumers]
    found = []
    for row in await connection.fetch(_MARKERS, id, keys, timeout=_SECONDS):
        key = marker_key(row["consumer"], row["source"], row["id"])
        ids = [event_id(key, row["hash"], ordinal) for ordinal in range(_ORDINALS)]
        found.append(
            Remembered(
                consumer=row["consumer"],
                source=row["source"],
                id=row["id"],
                type=row["type"],
                topic=row["topic"],
                partition=row["partition"],
                offset=row["offset"],
                applied_at=row["created_at"],
                transaction=row["xid"],
                generation=row["generation"],
                traceparent=row["traceparent"],
                payload_hash=row["hash"].hex(),
                result=None if row["result"] is None else from_json(row["result"]),
                events=[dict(one) for one in await connection.fetch(_EVENTS, row["xid"], ids)],
            )
        )
    return found


@dataclass(frozen=True)
class Move:
    """A partition that goes on from another offset; `old` is None if it was never read."""

    slot: Slot
    old: int | None
    new: int
    first: int
    """The first offset that the brokers have."""
    end: int
    """The offset after the last one."""


async def moves(
    connection: asyncpg.Connection,
    settings: Settings,
    service: Service,
    topic: str,
    partition: int | None,
    to: To,
) -> list[Move]:
    """Say how positions would move. Raises `Refused` for what the topic does not have."""
    if topic not in service.handlers.topics:
        known = ", ".join(sorted(service.handlers.topics)) or "none"
        raise Refused(f"the service does not read topic {topic}; it reads {known}")
    numbers = await _partitions(settings, topic)
    if partition is None and isinstance(to, int) and len(numbers) > 1:
        raise Refused(f"{topic} has {len(numbers)} partitions: name one by --partition")
    if partition is not None and partition not in numbers:
        raise Refused(f"{topic} has the partitions {numbers[0]} to {numbers[-1]}")
    chosen = [TopicPartition(topic, n) for n in numbers if partition in (None, n)]
    async with clients.offsets_client(settings) as client:
        first = await client.beginning_offsets(chosen)
        end = await client.end_offsets(chosen)
        if isinstance(to, datetime):
            places: Mapping[TopicPartition, int] = await offsets_since(client, end, to)
        else:
            places = {"earliest": first, "latest": end}.get(str(to), dict.fromkeys(chosen, to))
    found = []
    for one in chosen:
        new = places[one]
        if not first[one] <= new <= end[one]:
            raise Refused(
                f"{topic}/{one.partition} has the offsets {first[one]} to {end[one]}: not {new}"
            )
        slot = Slot(service.name, topic, one.partition)
        stored = await positions.position(connection, slot)
        old = stored.next_offset if stored else None
        found.append(Move(slot, old, new, first[one], end[one]))
    return found


async def offsets_since(
    client: AIOKafkaConsumer, end: Mapping[TopicPartition, int], time: datetime
) -> dict[TopicPartition, int]:
    """Return the offsets of the first records that are not older; where all are, the end."""
    milliseconds = max(0, round(time.timestamp() * 1_000))
    found = await client.offsets_for_times(dict.fromkeys(end, milliseconds))
    return {one: found[one].offset if found[one] else end[one] for one in end}


async def _partitions(settings: Settings, topic: str) -> list[int]:
    async with clients.admin_client(settings) as admin:
        (found,) = await admin.describe_topics([topic])
    if not found["partitions"]:
        raise Refused(f"there is no topic {topic}: create it, or run `service topics create`")
    return sorted(one["partition"] for one in found["partitions"])
