"""Decimals: the digits that a number of a payload has, its event has, and what is published."""

from collections import deque
from collections.abc import Sequence
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

import orjson
import pytest
from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict

from onceward import Event, Handlers, Transaction
from onceward.events.event import reader
from onceward.handlers.staging import Outbox

LONG = "12345678901234567.89"
"""A float has 12345678901234568 of it."""


class Part(BaseModel):
    """What is made of parts."""

    kind: Literal["part"] = "part"
    price: Decimal
    parts: list["Part"] = []


class Note(BaseModel):
    """What has no price."""

    kind: Literal["note"] = "note"
    price: str


@dataclass
class Tax:
    """A dataclass."""

    rate: Decimal


class Fee(TypedDict):
    """A dictionary."""

    rate: Decimal


class Point(NamedTuple):
    """A tuple with names."""

    x: Decimal
    y: float


class Everything(Event, type="everything", topic="everything"):
    """A decimal wherever one can be."""

    model_config = ConfigDict(validate_by_name=True)

    bare: Decimal
    optional: Decimal | None = None
    bounded: Annotated[Decimal, Field(max_digits=40, lt=10**20)]
    strict: Annotated[str, Field(strict=True)] = ""
    by_alias: Decimal = Field(validation_alias="byAlias")
    by_path: Decimal = Field(validation_alias=AliasChoices("absent", AliasPath("path", 1, "in")))
    checked: Annotated[Decimal, BeforeValidator(lambda value: value)]
    part: Part
    either: Annotated[Part | Note, Field(discriminator="kind")]
    tax: Tax
    fee: Fee
    point: Point
    listed: list[Decimal]
    pair: tuple[str, Decimal]
    many: tuple[Decimal, ...]
    once: set[Decimal]
    by_name: dict[str, list[Decimal]]
    decimal_or_text: Annotated[Decimal | str, Field(union_mode="left_to_right")]


def everything(number: str) -> bytes:
    part = f'{{"kind": "part", "price": {number}, "parts": []}}'
    return f"""{{
        "bare": {number}, "optional": {number}, "bounded": {number}, "strict": "x",
        "byAlias": {number}, "path": [0, {{"in": {number}}}], "checked": {number},
        "part": {{"price": {number}, "parts": [{part}, {part}]}}, "either": {part},
        "tax": {{"rate": {number}}}, "fee": {{"rate": {number}}}, "point": [{number}, 0.5],
        "listed": [{number},{number}], "pair": ["x", {number}], "many": [{number}, {number}],
        "once": [{number}], "by_name": {{"k": [{number}]}}, "decimal_or_text": {number}
    }}""".encode()


def decimals_in(value: Any) -> list[Decimal]:
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple | set):
        return [one for inner in value for one in decimals_in(inner)]
    return [value] if isinstance(value, Decimal) else []


@pytest.mark.parametrize("number", [LONG, "1.50", "-0.1000000000000000000000000001", "1.5E-30"])
def test_a_decimal_keeps_its_digits_wherever_it_stands(number: str) -> None:
    data = everything(number)
    event = reader(Everything)(data)
    found = decimals_in(event.model_dump())
    assert {*map(str, found)} == {str(Decimal(number))}
    assert len(found) == data.count(number.encode())


def test_what_was_read_is_published_with_all_digits() -> None:
    outbox = Outbox("/bank", 10_000)

    class Paid(Event, type="paid", topic="paid"):
        amount: Decimal

    outbox.stage(reader(Paid)(f'{{"amount":{LONG}}}'.encode()), id="1", key=None, sequence=None)
    assert outbox._staged[0].payload == f'{{"amount":"{LONG}"}}'.encode()


class Beside(Event, type="beside"):
    """Numbers that are no decimals, beside one that is."""

    exact: Decimal
    real: float
    strict: Annotated[float, Field(strict=True)] = 0.0
    whatever: Any = None
    text: str = ""
    either: Annotated[float | Decimal, Field(union_mode="left_to_right")] = 0.0
    one_of: list[Annotated[str | int | list[Part], Field(union_mode="left_to_right")]] | None = None
    note: Part | Note | None = Field(None, discriminator="kind")


def test_numbers_beside_a_decimal_are_what_they_were() -> None:
    data = f"""{{
        "exact": {LONG}, "real": {LONG}, "strict": {LONG}, "whatever": [{LONG}, {{"a": 1.50}}],
        "text": "is: {LONG}, or 1.50 ", "either": {LONG}, "unknown": {LONG}
    }}"""
    assert reader(Beside)(data.encode()) == Beside(
        exact=Decimal(LONG),
        real=float(LONG),
        strict=float(LONG),
        whatever=[float(LONG), {"a": 1.5}],
        text=f"is: {LONG}, or 1.50 ",
        either=float(LONG),
    )


def test_a_number_in_the_place_of_a_text_is_no_text() -> None:
    data = f'{{"exact": {LONG}, "real": 1, "note": {{"kind": "note", "price": {LONG}}}}}'
    with pytest.raises(ValidationError, match="valid string"):
        reader(Beside)(data.encode())


@pytest.mark.parametrize(
    "data",
    [
        f'{{"exact": {LONG}, "real": ',
        f'{{"exact": {LONG}, "real": "\\ud800"}}',
        f'{{"exact": [{LONG}], "real": 1}}',
        f'[{{"exact": {LONG}}}]',
        '{"exact": NaN, "real": 1.50}',
        '{"exact": "x", "real": 1.50}',
        f'{{"exact": {"[" * 100_000} {LONG}}}',
    ],
)
def test_what_fits_no_model_is_an_error_of_validation(data: str) -> None:
    with pytest.raises(ValidationError):
        reader(Beside)(data.encode())


def test_of_two_members_of_one_name_the_last_one_counts_as_ever() -> None:
    assert reader(Beside)(f'{{"exact": 1, "exact": {LONG}, "real": 1}}'.encode()) == Beside(
        exact=Decimal(LONG), real=1
    )


def test_nothing_is_done_for_a_model_without_decimals() -> None:
    class Plain(Event, type="plain"):
        real: float
        metadata: dict[str, Note]

    assert reader(Plain) == Plain.__pydantic_validator__.validate_json


def test_a_decimal_in_a_field_of_any_name_is_found() -> None:
    class Named(Event, type="named"):
        metadata: dict[str, Part]

    (found,) = decimals_in(
        reader(Named)(f'{{"metadata": {{"a": {{"price": {LONG}}}}}}}'.encode()).model_dump()
    )
    assert str(found) == LONG


async def take(event: Event, tx: Transaction) -> None:
    """Take an event."""


class Strict(Event, type="strict", strict=True):
    """A model that accepts no other types than its own."""

    amount: Decimal


class StrictField(Event, type="strict"):
    """A field that accepts no other types than its own."""

    amount: Annotated[Decimal, Field(strict=True)]


class Union(Event, type="union"):
    """A union that JSON and Python could fill otherwise."""

    amount: Decimal
    id: UUID | str


class UnionOfDecimals(Event, type="union"):
    """A union of which JSON and Python could choose different members."""

    amount: Decimal | str | None


class Card(BaseModel):
    """A way to pay."""

    ref: UUID


class Bill(BaseModel):
    """Another one, which takes any text."""

    ref: str


class UnionOfModels(Event, type="union"):
    """A union whose members JSON and Python could fill otherwise, further inside."""

    amount: Decimal
    by: Card | Bill


class UnionOfLists(Event, type="union"):
    """The same in lists."""

    amount: Decimal
    ids: list[UUID] | list[str]


class Money:
    """A type that is made of a number in JSON, and in Python must be there already."""


class Instance(Event, type="instance"):
    """A field for which Python's objects must have a type that JSON has not."""

    amount: Decimal
    money: InstanceOf[Money]


class Fine(Event, type="fine"):
    """What JSON and Python fill alike."""

    amount: Decimal
    names: Sequence[str] = ()
    queue: deque[int] = Field(default_factory=deque)
    by: Annotated[Card | Bill, Field(union_mode="left_to_right")] | None = None
    either: int | str | None = None


def test_a_model_that_is_filled_alike_may_have_decimals() -> None:
    Handlers().on(Fine, topic="a", consumer="b")(take)
    data = b'{"amount": 1.50, "names": ["a"], "queue": [1], "by": {"ref": "x"}, "either": "1"}'
    assert reader(Fine)(data) == Fine(
        amount=Decimal("1.50"), names=["a"], queue=deque([1]), by=Bill(ref="x"), either="1"
    )


class Extra(Event, type="extra", extra="allow"):
    """What has numbers that no field describes."""

    amount: Decimal
    whatever: dict[str, Any]


class Colour(Enum):
    """A type whose values have attributes of their own."""

    RED = "red"


@dataclass
class Inner:
    """A dataclass with a field of any type."""

    value: Any


class Anything(Event, type="anything"):
    """Fields of any type, wherever they stand."""

    amount: Decimal
    value: Any
    pair: tuple[Any, ...]
    inner: Inner
    colour: Colour


def test_numbers_in_fields_of_any_type_are_plain_floats() -> None:
    data = b"""{"amount": 1.50, "value": 2.50, "pair": [3.50], "inner": {"value": 4.50},
        "colour": "red"}"""
    event = reader(Anything)(data)
    assert (str(event.amount), event.colour) == ("1.50", Colour.RED)
    assert {type(one) for one in (event.value, *event.pair, event.inner.value)} == {float}


def test_numbers_that_no_field_describes_are_plain_floats() -> None:
    data = b'{"amount": 1.50, "whatever": {"a": [2.50, {"b": 3.50}]}, "more": [4.50]}'
    event = reader(Extra)(data)
    assert str(event.amount) == "1.50"
    assert event.__pydantic_extra__ == {"more": [4.5]}
    assert orjson.dumps([event.whatever, event.__pydantic_extra__]) == (
        b'[{"a":[2.5,{"b":3.5}]},{"more":[4.5]}]'
    )


@pytest.mark.parametrize(
    "kind",
    [Strict, StrictField, Union, UnionOfDecimals, UnionOfModels, UnionOfLists, Instance],
)
def test_a_model_that_could_lose_digits_is_refused_when_it_is_registered(kind: type[Event]) -> None:
    with pytest.raises(TypeError, match="has a Decimal, and its numbers could lose digits: leave"):
        Handlers().on(kind, topic="a", consumer="b")(take)


def test_a_model_that_names_a_later_one_keeps_digits_too() -> None:
    class Early(Event, type="early"):
        later: "Later"

    Handlers().on(Early, topic="a", consumer="b")(take)

    class Later(BaseModel):
        amount: Decimal

    Early.model_rebuild()
    event = reader(Early)(f'{{"later": {{"amount": {LONG}}}}}'.encode())
    assert event.later.amount == Decimal(LONG)
