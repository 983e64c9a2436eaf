"""What has come of the messages: rows, events, dead letters and calls, in a form to be compared."""

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import asyncpg
from aiokafka import TopicPartition

from onceward.apply.encryption import Encryption, Rows
from onceward.apply.item import StoredRecord
from onceward.events.cloudevents import event_headers
from onceward.events.message import Record, Undecodable, headers_of
from onceward.handlers.registry import Handlers
from onceward.servers import clients
from onceward.settings import Settings
from onceward.testing.records import KafkaRecord

from . import statements
from .proof import Proof

Evidence = dict[str, dict[str, Any]]
"""By kind, such as a table, and by what it is about, such as a primary key: values of JSON."""
_FETCH_MS = 500
_PLACE = "topic", "key", "source"


async def stored(driver: asyncpg.Connection, proof: Proof) -> Evidence:
    """Return the rows of the service's tables, and what is dead or waits."""
    found: Evidence = {}
    for table in await driver.fetch(statements.TABLES):
        is_public = table["nspname"] == "public"
        names = {table["relname"], table["name"]} if is_public else {table["name"]}
        without = {*table["filled"]}.union(*(proof.may_differ.get(one, ()) for one in names))
        rows = found[f"table {table['relname'] if is_public else table['name']}"] = {}
        for (text,) in await driver.fetch(
            f"SELECT to_jsonb(one)::text FROM {table['name']} AS one"
        ):
            row = json.loads(text, parse_float=str)
            # A key that may differ identifies nothing.
            key = [f"{one}={row[one]}" for one in table["key"] if one not in without]
            row = {name: value for name, value in row.items() if name not in without}
            _put(rows, ", ".join(key) or json.dumps(row), row)
    waiting = found["dead letters"] = {}
    for row in await driver.fetch(statements.LETTERS):
        at = row["id"] or f"{row['partition']}/{row['offset']}"
        is_dead, error = row["is_dead"], (row["error"] or "").partition(":")[0]
        what = {"reason": row["reason"], "error": error} if is_dead else "waits behind another one"
        _put(waiting, f"{at} of {row['topic']} for {row['consumer'] or 'all'}", what)
    return found


def _put(found: dict[str, Any], name: str, value: Any) -> None:
    """Add a value by a name that others may also have."""
    number, unique = 1, name
    while unique in found:
        number += 1
        unique = f"{name} ({number})"
    found[unique] = value


async def outbox(driver: asyncpg.Connection, encryption: Encryption | None) -> list[Record]:
    """Return the events that are, or will be, published, as records in the order of their ids."""
    rows: Rows = await driver.fetch(statements.OUTBOX)
    if encryption is not None:
        rows = await encryption.decrypt(driver, rows, "payload")
    return [
        StoredRecord(
            *(row["topic"], 0, 0, 0, row["key"], row["payload"]),
            event_headers(row) if row["headers"] is None else headers_of(row["headers"]),
            0.0,
        )
        for row in rows
    ]


async def published(
    records: Iterable[Record], handlers: Handlers, may_differ: Mapping[str, Collection[str]]
) -> list[dict[str, Any]]:
    """Return each event once, where it appears first."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        codec = handlers.codec(record.topic)
        await codec.prepare([record])
        try:
            event = codec.decode(record)
        except Undecodable as error:
            unknown = {"topic": record.topic, "key": None, "source": None, "id": str(error)}
            found[f"{error} {len(found)}"] = unknown
            continue
        data: Any = event.data and event.data.decode("utf-8", "backslashreplace")
        with suppress(TypeError, ValueError):
            data = json.loads(data, parse_float=str)
        if isinstance(data, dict):
            for name in may_differ.get(event.type, ()):
                data.pop(name, None)
        key = None if record.key is None else record.key.decode("utf-8", "backslashreplace")
        place = {"topic": record.topic, "key": key, "source": event.source}
        value = {"type": event.type, "id": event.id, "sequence": event.sequence, "data": data}
        # Only what is repeated with other bytes counts twice.
        if found.setdefault(event.id, place | value) != place | value:
            found[f"{event.id} {len(found)}"] = place | value
    return [*found.values()]


def as_evidence(events: Iterable[dict[str, Any]], unordered: Collection[str]) -> Evidence:
    """Return the events of each key in their order; those without a key, and those whose ids are
    `unordered` because a time decides, each by itself."""
    found: Evidence = defaultdict(dict)
    for one in events:
        topic, key, id = one["topic"], one["key"], one["id"]
        value = {name: part for name, part in one.items() if name not in _PLACE}
        if key is None or id in unordered:
            _put(found[f"events of {topic}"], id, value)
        else:
            found[f"events of {topic}"].setdefault(f"key {key}", []).append(value)
    return found


async def read(
    settings: Settings, spans: Mapping[TopicPartition, tuple[int, int]]
) -> AsyncIterator[KafkaRecord]:
    """Yield the records of partitions, each from an offset on and before another one."""
    async with clients.offsets_client(settings) as client:
        for place, (start, beyond) in spans.items():
            client.assign([place])
            client.seek(place, start)
            while await client.position(place) < beyond:
                for record in (await client.getmany(place, timeout_ms=_FETCH_MS)).get(place, ()):
                    if record.offset < beyond:
                        yield record
