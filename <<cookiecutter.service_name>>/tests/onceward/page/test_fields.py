"""Fields of a form, made from the schema of an event, and the payload that they make."""

from decimal import Decimal
from enum import StrEnum
from typing import Literal

import pytest
from pydantic import AwareDatetime, BaseModel, Field, SecretStr, ValidationError

from onceward import Event
from onceward.cli.errors import Refused
from onceward.contracts.examples import generate
from onceward.contracts.schemas import schema_of
from onceward.events.event import Tombstone, reader
from onceward.page.fields import fields_of, payload_of


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Part(BaseModel):
    name: str
    number: int | None


class Ordered(Event, type="ordered"):
    """An event with a property of each kind."""

    name: str
    number: int
    price: Decimal
    ratio: float
    is_gift: bool
    colour: Colour
    at: AwareDatetime
    wish: str | None
    size: Literal["S", "M", 44] | None = "M"
    discount: int | None = None
    note: str = Field("none", alias='a "note"')
    parts: list[Part]
    labels: dict[str, str] = Field(default_factory=dict)
    first: Part | None = None


SCHEMA = schema_of(Ordered, "validation")
FIELDS = {one.name: one for one in fields_of(SCHEMA, generate(SCHEMA))}
EXAMPLE = {one.key: one.example for one in FIELDS.values()}


def read(**changed: str) -> Ordered:
    """Return the event of a form with the example, except for some fields."""
    form = EXAMPLE | {FIELDS[name].key: text for name, text in changed.items()}
    payload = payload_of([*FIELDS.values()], form)
    assert payload is not None
    event = reader(Ordered)(payload)
    assert isinstance(event, Ordered)
    return event


def test_the_example_fills_every_field_and_is_an_event() -> None:
    assert [*FIELDS] == [*SCHEMA["properties"]], "in their order"
    assert all(EXAMPLE.values())
    event = read()
    assert event == reader(Ordered)(event.__pydantic_serializer__.to_json(event, by_alias=True))
    assert EXAMPLE["payload.parts"] == '[\n  {\n    "name": "text",\n    "number": 1\n  }\n]'
    assert EXAMPLE["payload.colour"] == '"red"'
    assert EXAMPLE["payload.name"] == "text", "without quotes"


def test_each_property_has_the_field_of_its_kind() -> None:
    listed = {name: one.choices for name, one in FIELDS.items() if one.choices is not None}
    assert listed == {
        "is_gift": ["true", "false"],
        "colour": ['"red"', '"blue"'],
        "size": ['"S"', '"M"', "44"],
    }
    assert {name for name, one in FIELDS.items() if one.is_json} == {"parts", "labels", "first"}
    numbers = {name for name, one in FIELDS.items() if one.takes_numbers}
    assert numbers == {"number", "price", "ratio", "discount"}
    empty = {name: one.empty for name, one in FIELDS.items() if one.empty is not None}
    assert empty == {
        "name": '""',
        **dict.fromkeys(("wish", "size", "discount", "first"), "null"),
    }
    assert FIELDS["at"].note == "date-time; empty: it is left out"


def test_an_empty_field_is_null_or_left_out_or_an_empty_text() -> None:
    event = read(name="", wish="", size="", discount=" ", labels="", **{'a "note"': ""}, first=" ")
    assert (event.name, event.wish, event.size, event.note) == ("", None, None, "none")
    assert (event.discount, event.labels, event.first) == (None, {}, None)


def test_a_value_is_sent_as_it_is_written() -> None:
    price = "0.10000000000000000000001"
    assert read(price=price).price == Decimal(price)
    assert read(name="12").name == "12", "a text"
    assert read(name='" \\ \u202e').name == '" \\ \u202e'
    assert read(size="44").size == 44
    assert read(is_gift="false").is_gift is False
    assert read(parts='[{"name": "a",\r\n "number": null}]').parts == [Part(name="a", number=None)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("number", "many"),
        ("number", ""),
        ("price", "NaN"),
        ("is_gift", ""),
        ("colour", '"green"'),
        ("at", "2026-11-20T08:00:00"),
        ("parts", '[{"name": "a"}]'),
    ],
)
def test_the_error_of_a_value_that_the_event_does_not_take_names_the_field(
    name: str, text: str
) -> None:
    with pytest.raises(ValidationError) as wrong:
        read(**{name: text})
    assert {error["loc"][0] for error in wrong.value.errors()} == {name}


@pytest.mark.parametrize("text", ["[", '{"a": 1, "a": 2}', "x", "[" * 5_000])
def test_what_is_to_be_json_and_is_not_is_refused_with_the_name_of_the_field(text: str) -> None:
    with pytest.raises(Refused, match=r"^parts: it is not JSON"):
        read(parts=text)


def test_a_schema_without_properties_has_one_field_or_none() -> None:
    (whole,) = fields_of({"type": "array", "items": {"type": "integer"}}, [1])
    assert (whole.name, whole.is_json, whole.example) == ("", True, "[\n  1\n]")
    assert payload_of([whole], {whole.key: "[2, 3]"}) == b"[2, 3]"
    nothing = schema_of(Tombstone, "validation")
    assert fields_of(nothing, generate(nothing)) == []
    assert payload_of([], {}) is None


def test_an_event_that_contains_itself_has_fields() -> None:
    class Node(Event, type="node"):
        name: str
        next: "Node | None" = None

    schema = schema_of(Node, "validation")
    fields = fields_of(schema, generate(schema))
    assert [(one.name, one.is_json) for one in fields] == [("name", False), ("next", True)]


def test_a_secret_is_not_filled_in() -> None:
    class Registered(Event, type="registered"):
        name: str
        pass_phrase: SecretStr

    schema = schema_of(Registered, "validation")
    assert [one.example for one in fields_of(schema, generate(schema))] == ["text", ""]


def test_a_pattern_is_noted() -> None:
    class Paid(Event, type="paid"):
        customer: str = Field(pattern="^customer:")

    (field,) = fields_of(schema_of(Paid, "validation"), {})
    assert field.note == "string like ^customer:; empty: an empty text"
