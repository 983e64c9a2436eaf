"""The schemas that records name: fetched from the registry, parsed, and kept in memory."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from cachetools import LRUCache
from confluent_kafka.schema_registry import Schema

from onceward.apply.item import StoredRecord
from onceward.errors import StoreUnavailable, describe_error
from onceward.events.message import Reason, Record, Undecodable

from .avro import Avro
from .client import Incomplete, Registry, Session, Unknown
from .formats import Format, JsonSchema
from .framing import SchemaKey, Unframed, key_of
from .protobuf import Protobuf

_UNKNOWN_AT_MOST = 10_000
"""Ids without a schema that a codec keeps in memory."""
_IN_USE = 60.0
"""Seconds for which a schema is kept in any case: a batch is decoded after it was prepared."""


class _Missing(NamedTuple):
    """There is no schema that can be used for an id."""

    text: str
    since: float


class Schemas:
    """The schemas of one codec, by their ids."""

    def __init__(self, connect: Callable[[], Registry], readers: Mapping[str, Avro]) -> None:
        """`readers` are the schemas as which records in Avro are read, by full names."""
        self._connect = connect
        self._readers = readers
        self._formats: dict[SchemaKey, Format] = {}
        self._used: dict[SchemaKey, float] = {}
        """When each was last used, the oldest first."""
        self._missing: LRUCache[SchemaKey, _Missing] = LRUCache(_UNKNOWN_AT_MOST)

    async def prepare(self, records: Sequence[Record]) -> None:
        """Fetch the schemas that the records name. Raises `StoreUnavailable`."""
        registry = self._connect()
        young = time.monotonic() - registry.settings.unknown_age
        keys, wanted = set[SchemaKey](), set[SchemaKey]()
        for record in records:
            try:
                key = key_of(record)
            except Unframed:
                continue
            keys.add(key)
            missing = self._missing.get(key)
            # Records of the backlog may have been redriven because of a new schema.
            is_due = isinstance(record, StoredRecord) or missing is None or missing.since < young
            if key not in self._formats and is_due:
                wanted.add(key)
        self._use(keys)
        if wanted:
            async with registry.session() as session:
                await self._fetch_all(session, wanted)
            self._use(keys)
            self._evict(registry.settings.schemas)

    def format(self, key: SchemaKey) -> Format:
        """Return a schema. Raises `Undecodable`, and `StoreUnavailable` without `prepare`."""
        format = self._formats.get(key)
        if format is not None:
            return format
        missing = self._missing.get(key)
        if missing is None:
            raise StoreUnavailable(
                f"the schema {key} is not in memory: it has not been fetched, or others have"
                " displaced it (PIPELINE_SCHEMA_REGISTRY_SCHEMAS)"
            )
        raise Undecodable(Reason.UNKNOWN_SCHEMA, missing.text)

    def _use(self, keys: Collection[SchemaKey]) -> None:
        now = time.monotonic()
        for key in self._formats.keys() & keys:
            self._used.pop(key, None)
            self._used[key] = now

    def _evict(self, at_most: int) -> None:
        old = time.monotonic() - _IN_USE
        for key in [*self._used][: max(0, len(self._formats) - at_most)]:
            if self._used[key] <= old:
                del self._used[key], self._formats[key]

    async def _fetch_all(self, session: Session, keys: Collection[SchemaKey]) -> None:
        """Fetch schemas until one is unavailable. Raises `StoreUnavailable`."""
        try:
            async with asyncio.TaskGroup() as group:
                for key in keys:
                    group.create_task(self._fetch(session, key))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _fetch(self, session: Session, key: SchemaKey) -> None:
        try:
            schema, references = await session.schema(key)
            format = parsed(schema, references, self._readers)
        except StoreUnavailable:
            raise
        except (MemoryError, OSError) as error:  # of this host, and not of the schema
            raise StoreUnavailable(unparsable(key, error)) from error
        except Unknown:
            text = (
                f"the schema registry has no schema {key}: register it, or let the producer use the"
                " registry of PIPELINE_SCHEMA_REGISTRY_URL"
            )
        except Incomplete as error:
            text = f"the schema {key} can't be used: {error}. Register it there"
        except Exception as error:  # of any of the libraries
            text = (
                f"the schema {key} can't be used: {describe_error(error)}. Let the producer write"
                " by another schema, and discard the record or send it again"
            )
        else:
            self._formats[key] = format
            self._use({key})
            self._missing.pop(key, None)
            return
        self._missing[key] = _Missing(text, time.monotonic())


def unparsable(schema: object, error: BaseException) -> str:
    """Return the message that this host can't parse a schema now."""
    return (
        f"the schema {schema} can't be parsed on this host: {describe_error(error)}. Schemas of"
        " Protobuf need a folder for temporary files, such as /tmp or that of TMPDIR"
    )


def parsed(
    schema: Schema, references: Mapping[str, Schema], readers: Mapping[str, Avro] = {}
) -> Format:
    """Return the parsed schema. Raises errors of any type for an invalid one."""
    match schema.schema_type or "AVRO":
        case "AVRO":
            return Avro(schema, references, readers.get)
        case "PROTOBUF":
            return Protobuf(schema, references)
        case "JSON":
            return JsonSchema(schema, references)
        case other:
            raise ValueError(f"the format {other!r} is none of AVRO, PROTOBUF and JSON")
