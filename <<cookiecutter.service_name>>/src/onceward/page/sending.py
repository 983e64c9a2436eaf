"""A form that sends messages to the service, for development; see `PIPELINE_PAGE_SEND`."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import NamedTuple
from uuid import uuid4

from aiokafka.errors import KafkaError
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.requests import Request
from starlette.responses import Response

from onceward import Service
from onceward.apply.batch import items_of, prepare, validated
from onceward.apply.item import Item, StoredRecord, Undecoded
from onceward.cli.errors import Refused
from onceward.contracts.examples import generate
from onceward.contracts.export import taken
from onceward.contracts.schemas import schema_of
from onceward.errors import describe_error
from onceward.events.event import Event, Tombstone
from onceward.events.message import Message
from onceward.handlers.staged import StagedEvent
from onceward.observe import traces
from onceward.operators import audit
from onceward.relay.brokers import NotSent, look_up_topics, partitions_of
from onceward.servers.clients import KafkaProducer, connection_options
from onceward.servers.database import autocommitting
from onceward.settings import Settings

from . import parameters
from .actions import logged
from .auth import Change, View
from .fields import Field, fields_of, payload_of
from .rendering import Templates
from .sessions import Operator

NAMES = {"/send": "Send"}

_SOURCE = "/operations-page"
_SECONDS = 10.0
"""Longest time in which Kafka has to acknowledge a message."""
_STOP_SECONDS = 1.0


class _Chosen(NamedTuple):
    topic: str
    event: type[Event]
    fields: Sequence[Field]


class _Sent(NamedTuple):
    message: Message
    key: str


class Views:
    """The form, with a field for each property of an event that the service takes."""

    def __init__(
        self, service: Service, settings: Settings, engine: AsyncEngine, templates: Templates
    ) -> None:
        self._service = service
        self._settings = settings
        self._engine = engine
        self._templates = templates
        self.views: Mapping[str, View] = {"/send": self.show}
        self.changes: Mapping[str, Change] = {"/send/message": self.send}

    async def show(self, request: Request, operator: Operator) -> Response:
        """Show the form of the event that is chosen, with an example."""
        return self._page(operator, parameters.searched(request.query_params, "what"))

    async def send(self, request: Request, operator: Operator, form: Mapping[str, str]) -> Response:
        """Send the form's message; the form stays as it is filled in."""
        what = form.get("what", "")
        chosen = self._chosen(what)
        try:
            sent = await self._send(operator, chosen, form)
        except Refused as error:
            return self._page(operator, what, form, wrong=str(error))
        return self._page(operator, what, form, sent=sent)

    def _page(
        self,
        operator: Operator,
        what: str,
        form: Mapping[str, str] | None = None,
        *,
        wrong: str = "",
        sent: _Sent | None = None,
    ) -> Response:
        fields = self._chosen(what).fields if what else None
        return self._templates.page(
            "send.html",
            operator,
            HTTPStatus.CONFLICT if wrong else HTTPStatus.OK,
            choices=[
                f"{topic} {type}"
                for topic, by_type in sorted(taken(self._service).items())
                for type in sorted(by_type)
            ],
            what=what,
            fields=fields,
            form={one.key: one.example for one in fields or ()} if form is None else form,
            wrong=wrong,
            sent=sent,
        )

    def _chosen(self, what: str) -> _Chosen:
        topic, _, type = what.partition(" ")
        try:
            event = taken(self._service)[topic][type][0].event
        except KeyError:
            raise Refused(f"no handler takes {what!r}: choose an event") from None
        schema = schema_of(event, "validation")
        return _Chosen(topic, event, fields_of(schema, generate(schema)))

    async def _send(self, operator: Operator, chosen: _Chosen, form: Mapping[str, str]) -> _Sent:
        topic, event, fields = chosen
        id, key = str(uuid4()), form.get("key", "")
        names = (id, _SOURCE, event.__event_type__, key or None, None, "application/json")
        payload, trace = payload_of(fields, form), traces.creation_context()
        staged = StagedEvent(topic, key.encode() or None, payload, *names, *trace)
        record = await self._record(staged, event)
        for error in (await prepare(self._service.handlers, [record])).values():
            raise Refused(f"the record can't be decoded at present: {describe_error(error)}")
        item = validated(self._item(record))
        if item.event is None:
            why = "" if item.fault is None else describe_error(item.fault)
            raise Refused(f"the payload is invalid: {why}")
        if event is Tombstone and not key:
            raise Refused("a record without a value needs a key")
        key = key or self._service.handlers.record_key(topic, item.event) or ""
        record = record._replace(key=key.encode() or None)
        with logged("send", operator, f"{id} to {topic}"):
            async with autocommitting(self._engine) as connection:
                by = audit.Change(operator.name, "send")
                await audit.note(connection, by, f"event {id} to topic {topic}")
            record = await self._acknowledged(record)
        return _Sent(self._item(record).message, key)

    async def _record(self, staged: StagedEvent, event: type[Event]) -> StoredRecord:
        """Return the event's record, as its topic's codec writes it."""
        codec, now = self._service.handlers.codec(staged.topic), datetime.now(UTC)
        try:
            await codec.open(staged.topic, [event])
            value, headers = staged.encoded(codec, now)
        except Exception as error:  # of the codec, or of a library that it uses
            what = f"{type(codec).__name__} can't write the event"
            raise Refused(f"{what}: {describe_error(error)}") from error
        milliseconds = int(now.timestamp() * 1_000)
        return StoredRecord(staged.topic, 0, 0, milliseconds, staged.key, value, headers, 0.0)

    def _item(self, record: StoredRecord) -> Item:
        """Return the record as the service decodes it, for the first of its handlers."""
        found = items_of(self._service.handlers, record, validates=False, holds=False)
        if isinstance(found, Undecoded):
            raise Refused(f"the record can't be decoded: {describe_error(found.error)}")
        if not found:
            raise Refused("the codec of the topic writes another type, which no handler takes")
        return found[0]

    async def _acknowledged(self, record: StoredRecord) -> StoredRecord:
        """Send the record, and return it with its partition and its offset."""
        settings, topic = self._settings, record.topic
        producer = KafkaProducer(
            **connection_options(settings),
            client_id=f"{self._service.name}-page",
            acks="all",
            max_request_size=2 * settings.max_event_bytes,
        )
        try:
            async with asyncio.timeout(_SECONDS):
                await producer.start()
                await look_up_topics(producer, [topic])
                partitions_of(producer, topic)
                sent = await producer.send_and_wait(
                    topic, record.value, key=record.key, headers=[*record.headers]
                )
        except (KafkaError, NotSent, OSError) as error:
            raise Refused(
                f"{settings.kafka} has not acknowledged the message: {describe_error(error)}"
            ) from error
        finally:
            await producer.stop(_STOP_SECONDS)
        return record._replace(partition=sent.partition, offset=sent.offset)
