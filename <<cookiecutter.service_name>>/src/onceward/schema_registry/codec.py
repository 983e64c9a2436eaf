"""The codec `Confluent`: records in Confluent's wire format become events, and events records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import NoReturn

from confluent_kafka.schema_registry import Schema
from confluent_kafka.schema_registry.serde import SchemaId

from onceward.apply.item import StoredRecord
from onceward.errors import StoreUnavailable, describe_error
from onceward.events.cloudevents import decode, event_headers, refers
from onceward.events.codec import CloudEvents, Codec, Encoded, Outgoing
from onceward.events.event import Event, Unpublishable
from onceward.events.message import Message, Reason, Record, Undecodable
from onceward.handlers.staged import StagedEvent
from onceward.plain.codec import Header, Identity, Plain, Position

from .avro import Avro
from .client import Registry, Session, Unknown
from .formats import Format, Misfit
from .framing import HEADER, Unframed, key_of, parse
from .schemas import Schemas, parsed, unparsable

_NAME = "__schema_name"
"""Header in which `Plain` finds the full name of the record's schema."""
_REPLACED = {"content-type", "ce_datacontenttype", HEADER, _NAME}
"""Headers that describe the bytes of the record, which `Message.data` does not have."""
_BINARY = CloudEvents()


class Strategy(Enum):
    """Which subject of the registry has the schemas of published events, as Confluent names it."""

    TOPIC = "TopicNameStrategy"
    """`<topic>-value`."""
    RECORD = "RecordNameStrategy"
    """`<full name>`."""
    TOPIC_RECORD = "TopicRecordNameStrategy"
    """`<topic>-<full name>`."""

    def subject(self, topic: str, name: str) -> str:
        """Return the subject of a record of this full name."""
        return {
            Strategy.TOPIC: f"{topic}-value",
            Strategy.RECORD: name,
            Strategy.TOPIC_RECORD: f"{topic}-{name}",
        }[self]


class Framing(Enum):
    """Where a published record names its schema."""

    PREFIX = "prefix"
    """In front of its payload, by the schema's id in the registry."""
    HEADER = "header"
    """In the header `__value_schema_id`, by its GUID, as Confluent's `HeaderSchemaIdSerializer`
    does: the payload is then in the plain format."""


@dataclass(frozen=True, slots=True)
class _Writer:
    """How events of a class are written."""

    event: type[Event]
    name: str
    format: Format
    frame: bytes
    framing: Framing

    def write(self, payload: bytes) -> bytes:
        """Return the record's payload. Raises `Misfit`."""
        body = self.format.write(self.name, payload)
        _, again = self.format.read(body, self.format.names.get(self.name))
        read = self.event.__pydantic_validator__.validate_json
        try:
            is_same = read(again) == read(payload)
        except ValueError:
            raise Misfit("it can't be read again from what the schema keeps of it") from None
        if not is_same:
            raise Misfit("it is another event when it is read again from what the schema keeps")
        return body if self.framing is Framing.HEADER else self.frame + body


class Confluent(Codec):
    """The codec of topics in Confluent's wire format, in Avro, Protobuf or JSON Schema.

    The type of an event is that of its CloudEvents headers, else the full name of its schema.
    `Message.data` is JSON, see `docs/schema-registry.md`. The registry is named by
    `PIPELINE_SCHEMA_REGISTRY_URL`.
    """

    def __init__(
        self,
        *,
        identity: Identity | None = None,
        types: Mapping[str, type[Event]] = {},
        schemas: Mapping[type[Event], Schema] = {},
        strategy: Strategy = Strategy.TOPIC,
        framing: Framing = Framing.PREFIX,
    ) -> None:
        """`identity` tells how records without CloudEvents headers are identified.

        `types` has the event classes by the full names of their records or messages, or the titles
        of their JSON Schemas; a name that it lacks is the event's type itself. Ids and hashes have
        the names, so that other `types` change none. `schemas` are the service's own, without
        references: records in Avro are read as these, and published events are written by these, so
        they must be registered. By default an event is written by the latest schema of its subject,
        which the `strategy` names. `framing` is that of published events; all are read.

        Raises `ValueError` for an own schema that is invalid.
        """
        self._types = dict(types)
        self._strategy = strategy
        self._framing = framing
        self.schemas = dict(schemas)
        self._readers: dict[str, Avro] = {}
        for event, schema in schemas.items():
            self._add_own(event, schema)
        self.identity = identity
        by_name = Header(_NAME)
        names = self._event_types
        self._plain = None if identity is None else Plain(by_name, identity, types=names)
        self._hashed = Plain(by_name, Position())
        self._registry: Registry | None = None
        self._schemas = Schemas(self._connect, self._readers)
        self._writers: dict[tuple[str, str], _Writer] = {}

    @property
    def _event_types(self) -> Mapping[str, str]:
        return {name: event.__event_type__ for name, event in self._types.items()}

    def contract(self) -> Mapping[str, object]:
        """Return how types are named, how events are written, and which have own schemas.

        `service registry check` compares the schemas themselves.
        """
        return {
            "types": self._event_types,
            "framing": self._framing.value,
            "strategy": self._strategy.value,
            "schemas": sorted(event.__event_type__ for event in self.schemas),
        }

    def _add_own(self, event: type[Event], schema: Schema) -> None:
        try:
            format = parsed(schema, {})
        except Exception as error:  # of any of the libraries
            raise ValueError(
                f"the schema of {event.__name__} is invalid: {describe_error(error)}"
            ) from error
        named = [name for name, one in self._types.items() if one is event]
        if not named and len(format.names) == 1:
            named = list(format.names)
            self._types[named[0]] = event
        if isinstance(format, Avro):
            self._readers |= dict.fromkeys([*named, *format.names], format)

    def _connect(self) -> Registry:
        """Return the registry. Raises `Misconfigured`."""
        if self._registry is None:
            self._registry = Registry.of_environment()
        return self._registry

    async def open(self, topic: str, events: Sequence[type[Event]]) -> None:
        """Fetch the schemas of published events. It may be called again for others.

        Events of other topics, which tests write, are written by the latest schema of the subject.
        Raises `Unpublishable`, `StoreUnavailable`, and `Misconfigured`.
        """
        async with self._connect().session() as session:
            for event in events:
                own = self.schemas.get(event) if event.__event_topic__ == topic else None
                writer = await self._writer(session, topic, event, own)
                self._writers[topic, event.__event_type__] = writer

    def subject(self, topic: str, event: type[Event]) -> tuple[str, str]:
        """Return the subject of an event in a topic, and the full name of its records."""
        names = (name for name, one in self._types.items() if one is event)
        name = next(names, event.__event_type__)
        return self._strategy.subject(topic, name), name

    async def _writer(
        self, session: Session, topic: str, event: type[Event], own: Schema | None
    ) -> _Writer:
        subject, name = self.subject(topic, event)
        try:
            if own is None:
                registered = await session.latest(subject)
            else:
                registered = await session.registered(subject, own)
            format = parsed(registered.schema, await session.references(registered.schema))
        except Unknown as error:
            what = "has no schema" if own is None else "does not have the schema of the code"
            raise Unpublishable(
                f"{event.__name__} can't be written: the subject {subject!r} {what}."
                f" {str(error) or 'Register it'}, or, in development, set"
                " PIPELINE_SCHEMA_REGISTRY_AUTO_REGISTER=true for schemas of Confluent(schemas=…)"
            ) from None
        except StoreUnavailable:
            raise
        except (MemoryError, OSError) as error:  # of this host, and not of the schema
            raise StoreUnavailable(unparsable(f"of {subject!r}", error)) from error
        except Exception as error:  # of any of the libraries
            raise Unpublishable(
                f"{event.__name__} can't be written: the schema of {subject!r} can't be used:"
                f" {describe_error(error)}"
            ) from error
        if format.names and name not in format.names:
            found = ", ".join(map(repr, format.names))
            raise Unpublishable(
                f"{event.__name__} can't be written: the schema of {subject!r} has {found}, and no"
                f" {name!r}. Declare Confluent(types={{{next(iter(format.names))!r}:"
                f" {event.__name__}}})"
            )
        id, guid, is_header = registered.schema_id, registered.guid, self._framing is Framing.HEADER
        if is_header and not guid:
            raise Unpublishable(
                f"{event.__name__} can't be written: the registry has no GUID for the schema of"
                f" {subject!r}, which Framing.HEADER needs. Declare Confluent without framing="
            )
        written = SchemaId(format.kind, id, guid, format.names.get(name))
        frame = written.guid_to_bytes() if is_header else written.id_to_bytes()
        return _Writer(event, name, format, frame, self._framing)

    def encode(self, event: Outgoing) -> Encoded:
        """Return the payload in the format of its schema. Raises `Unpublishable`."""
        if event.payload is None:
            return Encoded(None, "application/json")
        writer = self._writers.get((event.topic, event.type))
        if writer is None:
            raise Unpublishable(
                f"the topic {event.topic!r} had no schema for {event.type!r} when the service was"
                " started: register one, and see the types= of its codec"
            )
        try:
            payload, content_type = writer.write(event.payload), writer.format.content_type
        except Misfit as error:
            raise Unpublishable(
                f"{writer.event.__name__} does not fit the schema {writer.name!r}: {error}. Change"
                " the event, or register a schema for it and start the service again"
            ) from None
        if writer.framing is Framing.PREFIX:
            return Encoded(payload, content_type)
        row = {name: getattr(event, name, None) for name in StagedEvent._fields}
        row |= {"content_type": content_type, "created_at": datetime.now(UTC)}
        return Encoded(payload, content_type, [*event_headers(row), (HEADER, writer.frame)])

    async def prepare(self, records: Sequence[Record]) -> None:
        """Fetch the schemas that the records name. Raises `StoreUnavailable`."""
        await self._schemas.prepare(records)

    def decode(self, record: Record, *, hash: bytes | None = None) -> Message:
        """Decode a record. Raises `Undecodable`, and `StoreUnavailable` without `prepare`."""
        if record.value is None and self._plain is not None:
            return self._plain.decode(record, hash=hash)
        if record.value is None or (not record.value and refers(record)):
            return _BINARY.decode(record, hash=hash)
        try:
            key = key_of(record)
            format = self._schemas.format(key)
            frame = parse(record, format.kind)
            name, data = format.read(frame.body, frame.indexes)
            written = data
            if hash is None and isinstance(format, Avro):
                written = format.as_written(frame.body, data)
        except Unframed as error:
            raise Undecodable(
                Reason.INVALID_ENVELOPE,
                f"{error}: let the producer write with a serializer for a schema registry, or"
                f" declare {record.topic!r} with another codec",
            ) from None
        except Misfit as error:
            raise Undecodable(
                Reason.INVALID_ENVELOPE,
                f"the payload does not fit the schema {key}, which the record names: {error}. Let"
                " the producer send it again",
            ) from None
        if written is not data:
            # That of the service's own schema would change with it, and redeliveries would be
            # others.
            hash = self._hashed.decode(_in_json(record, name, written)).hash
        return self._named(_in_json(record, name, data), name, hash)

    def _named(self, record: Record, name: str | None, hash: bytes | None) -> Message:
        """Return the event of a record with JSON, by its headers or by the name of its schema."""
        if name and self._plain is not None:
            return self._plain.decode(record, hash=hash)

        def refuse(record: Record, headers: Mapping[str, str]) -> NoReturn:
            if not name:
                raise Undecodable(
                    Reason.MISSING_TYPE,
                    "the record's JSON Schema has no title to name the event's type, and the record"
                    " no CloudEvents headers: let the producer send one or the other",
                )
            raise Undecodable(
                Reason.MISSING_IDENTITY,
                f"the record has no CloudEvents headers: declare how events of {record.topic!r} are"
                " identified, by Confluent(identity=Header(…) or PayloadFields(…) or Position())",
            )

        return decode(record, refuse, hash=hash)


def _in_json(record: Record, name: str | None, data: bytes) -> Record:
    """Return the record with data in JSON, and the name of its schema in a header."""
    headers = [each for each in record.headers if each[0].lower() not in _REPLACED]
    headers.append(("content-type", b"application/json"))
    if name:
        headers.append((_NAME, name.encode()))
    return StoredRecord.copy_of(record, data, headers)
