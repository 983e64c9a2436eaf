"""Trap 14: whatever a record holds, it is taken, skipped or set aside, and never lost."""

import datetime as dt
import json
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address
from typing import Annotated, Any, Literal, Self
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import AnyUrl, BaseModel, Field, Json, JsonValue, field_validator, model_validator

from onceward import Event, Handlers, Tombstone, Transaction
from onceward.events.message import Reason
from onceward.plain import Header, PayloadFields, Plain, Position

from .test_message_properties import envelopes, headers, payloads
from tests.onceward.nasty import (
    HEADERS,
    NASTY,
    STRUCTURED,
    VALUES,
    Nasty,
    binary,
    decisions,
    kafka_record,
)

TOPIC = "shapes"


class Tree(BaseModel):
    tree: 'Annotated[Tree | list[Tree], Field(union_mode="left_to_right")] | None' = None


class Circle(BaseModel, extra="forbid"):
    kind: Literal["circle"]
    radius: Annotated[float, Field(gt=0)]


class Square(BaseModel, extra="forbid"):
    kind: Literal["square"]
    sides: tuple[int, int]


class Colour(Enum):
    RED = "red"
    NUMBER = 1


class Shape(Event, type="shape"):
    """An event with a field of every type that parses something."""

    number: int = 0
    real: float = 0
    exact: Decimal = Decimal(0)
    flag: bool = False
    text: str = ""
    code: Annotated[str, Field(pattern=r"^(a+)+$", max_length=8)] = "a"
    raw: bytes = b""
    time: dt.datetime | None = None
    day: dt.date | None = None
    clock: dt.time | None = None
    span: dt.timedelta | None = None
    uuid: UUID | None = None
    address: IPv4Address | None = None
    url: AnyUrl | None = None
    colour: Colour | None = None
    numbers: list[int] = Field(default_factory=list)
    distinct: frozenset[str] = frozenset()
    names: dict[str, int] = Field(default_factory=dict)
    tree: Tree | None = None
    figure: Annotated[Circle | Square, Field(discriminator="kind")] | None = None
    inner: Json[Any] | None = None
    any: Any = None
    json_value: JsonValue = None


class Strict(Event, type="strict", extra="forbid", strict=True):
    """An event that takes no member that it does not know."""

    number: int = 0


class Fragile(Event, type="fragile"):
    """An event whose validators break in ways of their own."""

    number: int = 0
    any: Any = None

    @field_validator("number")
    @classmethod
    def _breaks(cls, value: int) -> int:
        return {1: value}[value]

    @model_validator(mode="after")
    def _says_what_it_got(self) -> Self:
        if isinstance(self.any, str):
            raise ValueError(self.any)
        if isinstance(self.any, list):
            raise Unspeakable
        if isinstance(self.any, dict):
            raise RecursionError
        return self


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("an error that can't be told")


async def take(event: Event, tx: Transaction) -> None:
    """Take an event."""


def registry(plain: Plain | None) -> Handlers:
    handlers = Handlers()
    for event in (Shape, Strict, Fragile, Tombstone):
        handlers.on(event, topic=TOPIC, consumer="one")(take)
        handlers.on(event, topic=TOPIC, consumer="other")(take)
    if plain:
        handlers.topic(TOPIC, codec=plain)
    return handlers


CLOUD_EVENTS = registry(None)
REGISTRIES = {
    "CloudEvents": CLOUD_EVENTS,
    "named by position": registry(Plain("shape", Position())),
    "named by a field": registry(Plain("strict", PayloadFields("number"))),
    "named by a header": registry(Plain("fragile", Header("X"))),
}


field_names = st.sampled_from([*Shape.model_fields, "kind", "a\0", "\ud800", ""])
odd_texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["\0", "NaN", "1e400", "9" * 5_000, "2026-13-01", "http://[", "a" * 40 + "!"]),
)
odd_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(2**62, 2**70),
        st.floats(),
        odd_texts,
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(field_names | odd_texts, inner, max_size=4)
    ),
    max_leaves=10,
)
shapes = st.dictionaries(field_names, odd_values, max_size=6).map(
    lambda value: json.dumps(value).encode()
)
nasty_records = st.builds(
    Nasty,
    st.one_of(
        headers,
        st.builds(
            lambda type, rest: [*rest, *binary(type=type)],
            st.sampled_from(["shape", "strict", "fragile", "tombstone", "other"]),
            headers,
        ),
        st.sampled_from(list(HEADERS.values())),
    ),
    st.one_of(st.none(), payloads, envelopes, shapes, shapes),
    st.one_of(st.none(), st.binary()),
    st.one_of(st.just(-1), st.integers(-(2**63), 2**63 - 1)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(nasty_records, min_size=1, max_size=6), st.sampled_from(list(REGISTRIES.values())))
@example([Nasty(binary(type="fragile"), b'{"any": "\\u0000"}')], CLOUD_EVENTS).via(
    "a validator that tells a NUL"
)
@example([Nasty(binary(type="fragile"), b'{"any": []}')], CLOUD_EVENTS).via(
    "an error that can't be told"
)
@example([Nasty(binary(type="fragile"), b'{"any": {}}')], CLOUD_EVENTS).via(
    "a validator that goes too deep"
)
@example([Nasty(binary(type="strict"), b'{"a\\u0000": 1}')], CLOUD_EVENTS).via(
    "a NUL in a name that the error tells"
)
async def test_any_records_are_taken_skipped_or_set_aside_for_a_reason(
    records: list[Nasty], handlers: Handlers
) -> None:
    found = await decisions(
        handlers, TOPIC, [kafka_record(it, n, TOPIC) for n, it in enumerate(records)]
    )

    assert found.total() == len(records)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["shape", "strict", "fragile"]), shapes)
async def test_any_payload_is_an_event_or_set_aside_for_a_reason(type: str, value: bytes) -> None:
    record = kafka_record(Nasty(binary(type=type), value), 0, TOPIC)

    found = await decisions(CLOUD_EVENTS, TOPIC, [record])

    assert +found in ({"taken": 1}, {"invalid payload": 1})


@pytest.mark.parametrize("handlers", REGISTRIES.values(), ids=list(REGISTRIES))
async def test_none_of_the_known_nasty_records_vanishes(handlers: Handlers) -> None:
    found = await decisions(
        handlers, TOPIC, [kafka_record(it, n, TOPIC) for n, it in enumerate(NASTY)]
    )

    assert found.total() == len(NASTY)
    assert found.keys() >= {"taken", "skipped", "invalid payload", Reason.INVALID_ENVELOPE}


@pytest.mark.parametrize("type", ["shape", "strict", "fragile"])
@pytest.mark.parametrize("name", VALUES)
async def test_no_value_breaks_any_kind_of_event(name: str, type: str) -> None:
    direct = Nasty(binary(type=type), VALUES[name])
    wrapped = b'{"specversion":"1.0","id":"1","source":"/","type":"%b","data":%b}'
    within = Nasty([STRUCTURED], wrapped % (type.encode(), VALUES[name] or b"null"))

    found = await decisions(
        CLOUD_EVENTS, TOPIC, [kafka_record(direct, 0, TOPIC), kafka_record(within, 1, TOPIC)]
    )

    assert found.total() == 2
