"""What the engine calls: payloads are encrypted before they are stored, and decrypted afterwards.

See `onceward.apply.encryption`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache

import asyncpg
from pydantic import ValidationError

from onceward.apply.encryption import Encryption, Rows
from onceward.apply.item import Item, Row, StoredRecord
from onceward.events.cloudevents import sent_headers
from onceward.events.codec import CLOUD_EVENTS
from onceward.events.event import Event, declared_events, upcasted
from onceward.handlers.policy import Decision
from onceward.handlers.staged import StagedEvent
from onceward.handlers.staging import Outbox
from onceward.redaction import HIDDEN
from onceward.service import Misconfigured
from onceward.settings import mistakes as wrong_settings

from .keys import THE_SERVICE, Changed, DataKey, DataKeys, MasterKeys, SettingsKeys
from .marks import Shape, Subject, mistakes, shape_of
from .settings import PersonalSettings
from .spans import Span, Unfit, spans
from .stored import PREFIX, Stored, encrypt_values, encrypt_whole

_FORGOTTEN = (
    "the key of its personal data is deleted, because its subject was forgotten (`service personal"
    " forgotten`): discard it"
)
_SHORTEST, _LONGEST = 2, 4_000
"""Characters of values that are removed from texts; a stored error has no more."""
_MOST = 1_000
"""Values of a message that are removed from texts, the longest first."""

shape_of_model = cache(shape_of)


class Plan:
    """How a payload is stored."""

    def __init__(
        self, value: bytes, subjects: Sequence[Subject], text: str, found: list[Span]
    ) -> None:
        """Without a `text`, with its personal values `found`, it is encrypted as a whole."""
        self._value = value
        self.subjects = subjects
        self._text = text
        self._found = found

    @classmethod
    def of(cls, value: bytes, data: bytes | None, shape: Shape) -> "Plan | None":
        """Return the plan for a record's value, whose event has the JSON `data`; None: as it is."""
        if not shape.is_personal:
            return cls.as_a_whole(value) if value.startswith(PREFIX) else None
        try:
            text = (data or b"").decode()
            found = spans(text, shape)
        except (Unfit, UnicodeDecodeError):
            return cls.as_a_whole(value)
        subjects = list(dict.fromkeys(one.subject for one in found))
        if not subjects:
            return None
        return cls(value, subjects, text if data == value else "", found)

    @classmethod
    def as_a_whole(cls, value: bytes) -> "Plan":
        """Return the plan for a payload whose subject is not known."""
        return cls(value, [THE_SERVICE], "", [])

    def stored(self, keys: Mapping[Subject, DataKey]) -> bytes:
        """Return what is stored."""
        if self._text:
            return bytes(encrypt_values(self._text, self._found, keys))
        return bytes(encrypt_whole(self._value, [keys[one] for one in self.subjects]))


class PersonalData(Encryption):
    """Encrypts the personal fields of events in the tables of a service.

    `Service(…, encryption=PersonalData())`; the settings are read at the first use.
    """

    def __init__(self, master: MasterKeys | None = None) -> None:
        """`master` is a key management service in place of `PIPELINE_PERSONAL_KEYS`."""
        self._master = master
        self._opened: DataKeys | None = None
        self._shapes: dict[str, Shape] = {}

    def check(self) -> None:
        """Raise `Misconfigured` for wrong settings, and for marks that can't be followed."""
        _ = self.keys
        if wrong := [text for one in _concrete_events() for text in mistakes(one)]:
            raise Misconfigured("\n".join(wrong))

    @property
    def keys(self) -> DataKeys:
        """The keys of subjects. Raises `Misconfigured`."""
        if self._opened is None:
            try:
                settings = PersonalSettings()
            except ValidationError as error:
                raise Misconfigured("; ".join(wrong_settings(error, PersonalSettings))) from None
            master = self._master
            if master is None:
                if not settings.master_keys:
                    raise Misconfigured(
                        "PIPELINE_PERSONAL_KEYS is not set, and personal data is encrypted: set it"
                        " to what `openssl rand -base64 32` prints, the same in all processes"
                    )
                master = SettingsKeys(settings.master_keys)
            self._opened = DataKeys(master, size=settings.cache, age=settings.cache_age)
        return self._opened

    def redact(self, decided: Sequence[tuple[Item, Decision]]) -> list[tuple[Item, Decision]]:
        """Return the decisions, without personal values in the texts of their errors."""
        return [(item, _redacted(item, decision)) for item, decision in decided]

    async def encrypt(self, connection: asyncpg.Connection, rows: Sequence[Row]) -> list[Row]:
        """Return rows of the backlog as they are to be stored."""
        plans = list(map(_plan_of_row, rows))
        keys = await self._keys_for(connection, plans)
        return [
            row if plan is None else _with_value(row, plan.stored(keys))
            for row, plan in zip(rows, plans, strict=True)
        ]

    async def encrypt_events(self, connection: asyncpg.Connection, outbox: Outbox) -> None:
        """Replace staged events that have personal fields."""
        # Dead letters have no content type, and are made of encrypted rows.
        events = [one for one in outbox.events if one.payload and one.content_type]
        plans = {one.event_id: await self._plan_of_event(one, outbox) for one in events}
        keys = await self._keys_for(connection, list(plans.values()))
        outbox.replace(
            {
                one.event_id: one._replace(payload=plan.stored(keys))
                for one in events
                if (plan := plans[one.event_id])
            }
        )

    async def decrypt(self, connection: asyncpg.Connection, rows: Rows, column: str) -> Rows:
        """Return stored rows with their plain payloads."""
        stored = {n: one for n, row in enumerate(rows) if (one := Stored.parse(row[column] or b""))}
        if not stored:
            return rows
        ids = {id for one in stored.values() for id in one.keys}
        keys = await self.keys.of_ids(connection, ids)
        decrypted = list(rows)
        for n, one in stored.items():
            erased: str | None = _FORGOTTEN
            value = None
            if one.is_readable(keys):
                try:
                    value, erased = one.decrypt(keys), None
                except Changed as error:
                    erased = str(error)
            decrypted[n] = {**rows[n], column: value, "erased": erased}
        return decrypted

    async def _keys_for(
        self, connection: asyncpg.Connection, plans: Sequence[Plan | None]
    ) -> Mapping[Subject, DataKey]:
        subjects = {subject for plan in plans if plan for subject in plan.subjects}
        return await self.keys.of_subjects(connection, subjects) if subjects else {}

    async def _plan_of_event(self, event: StagedEvent, outbox: Outbox) -> Plan | None:
        shape = self._shapes.get(event.type)
        if shape is None:
            alike = [one for one in _concrete_events() if one.__event_type__ == event.type]
            shape = Shape(alternatives=list(map(shape_of_model, alike)))
            self._shapes[event.type] = shape
        if not shape.is_personal or event.payload is None:
            return None
        if outbox.has_cloudevents(event):
            return Plan.of(event.payload, event.payload, shape)
        codec = outbox.codecs.get(event.topic, CLOUD_EVENTS)
        written = event._asdict() | {"created_at": datetime.now(UTC)}
        headers = sent_headers(written)
        record = StoredRecord(event.topic, 0, 0, 0, event.key, event.payload, headers, 0.0)
        await codec.prepare([record])
        return Plan.of(event.payload, codec.decode(record).data, shape)


def _concrete_events() -> list[type[Event]]:
    """Return the event classes of the process, without generic ones that lack parameters."""
    return [
        one
        for one in declared_events()
        if hasattr(one, "__event_type__") and not one.__pydantic_generic_metadata__["parameters"]
    ]


def _plan_of_row(row: Row) -> Plan | None:
    value = row.record.value
    if not value:
        return None
    if row.item is None:
        return Plan.as_a_whole(value)
    return Plan.of(value, _json_of(row.item), shape_of_model(row.item.handler.event))


def _json_of(item: Item) -> bytes | None:
    """Return the event's JSON as its model has it; None if it has none."""
    message, model = item.message, item.handler.event
    if message.data is None or message.type not in model.__event_upcasters__:
        return message.data
    try:
        return upcasted(model, message.type, message.data)
    except Exception:  # of the service's function: the payload is invalid
        return None


def _with_value(row: Row, value: bytes) -> Row:
    return row._replace(record=StoredRecord.copy_of(row.record, value, row.record.headers))


def _redacted(item: Item, decision: Decision) -> Decision:
    if decision.error is None and decision.traceback is None:
        return decision
    shape = shape_of_model(item.handler.event)
    values = sorted(_texts(item, shape), key=len, reverse=True) if shape.is_personal else []
    values = values[:_MOST]
    if not values:
        return decision
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(one)}(?!\w)" for one in values))
    error, traceback = (
        text and pattern.sub(HIDDEN, text) for text in (decision.error, decision.traceback)
    )
    return replace(decision, error=error, traceback=traceback)


def _texts(item: Item, shape: Shape) -> set[str]:
    """Return the personal values of a message as texts may quote them."""
    try:
        text = (_json_of(item) or b"").decode()
        values = [json.loads(text[one.start : one.end]) for one in spans(text, shape)]
    except (Unfit, UnicodeDecodeError):
        try:
            values = [json.loads(item.message.data or b"null")]
        except (ValueError, RecursionError):
            values = []
    found: set[str] = set()
    while values:
        one = values.pop()
        if isinstance(one, dict | list):
            values += one.values() if isinstance(one, dict) else one
        elif isinstance(one, str | int | float) and not isinstance(one, bool):
            text = str(one)
            found |= {text, repr(text)[1:-1], json.dumps(text)[1:-1]}
    return {one for one in found if _SHORTEST <= len(one) <= _LONGEST}


def personal_types() -> list[type[Event]]:
    """Return the event classes with personal fields."""
    return [one for one in _concrete_events() if shape_of_model(one).is_personal]
