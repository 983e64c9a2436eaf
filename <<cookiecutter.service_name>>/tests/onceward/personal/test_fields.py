"""Which fields are personal, where they are in a payload, and what is stored of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar
from uuid import UUID

import pytest
import settings_guide
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AliasChoices, BaseModel, Field

from onceward import Event
from onceward.personal import Personal, PersonalSettings
from onceward.personal.keys import Changed, DataKey
from onceward.personal.marks import Subject, mistakes, shape_of
from onceward.personal.spans import Unfit, spans
from onceward.personal.stored import PREFIX, Stored, encrypt_values, encrypt_whole
from onceward.redaction import redact

T = TypeVar("T")


class Street(BaseModel):
    """A part of an address."""

    name: Annotated[str, Personal(of="customer")]
    number: int


class Tree(BaseModel):
    """Refers to itself."""

    note: Annotated[str | None, Personal(of="customer")] = None
    branches: list["Tree"] = []


@dataclass
class Phone:
    """A data class, with a subject of its own."""

    owner: int
    digits: Annotated[str, Personal(of="owner", kind="driver")]


class Ordered(Event, type="ordered"):
    """All that a model may be made of."""

    customer: UUID
    mail: Annotated[str, Personal(of="customer")] = Field(alias="eMail")
    street: Street | None = None
    home: Annotated[Street | None, Personal(of="customer")] = None
    names: Sequence[Annotated[str, Personal(of="customer")]] = ()
    by_name: Mapping[str, Street] = Field(default_factory=dict)
    tree: Tree | None = None
    phones: tuple[Phone, ...] = ()
    free: Any = None
    amount: float = 1


CUSTOMER = "3f1c6b0e-52a9-4a53-9d3e-0a53b2f5d1aa"


def values(payload: str) -> dict[str, str]:
    """Return the subjects of the personal values in a payload."""
    found = spans(payload, shape_of(Ordered))
    return {payload[s:e]: subject.name for s, e, subject, _ in found}


def payload(**members: object) -> str:
    """Return a payload."""
    return json.dumps({"customer": CUSTOMER, "eMail": "a@b"} | members)


def test_personal_values_are_found_wherever_they_are() -> None:
    assert list(mistakes(Ordered)) == []
    street = {"name": "Long Lane", "number": 7}
    found = values(
        payload(
            street=street,
            home=street,
            names=["Ann", "Bob"],
            by_name={"x": {"name": "Short", "number": 1}},
            tree={"note": None, "branches": [{"note": "deep"}]},
            phones=[{"owner": 9, "digits": "123"}],
            free={"left": "alone"},
        )
    )
    texts = ['"a@b"', '"Long Lane"', json.dumps(street), '"Ann"', '"Bob"', '"Short"', '"deep"']
    assert found == dict.fromkeys(texts, CUSTOMER) | {'"123"': "driver:9"}


def test_members_that_the_model_does_not_declare_are_personal() -> None:
    assert values(payload(fax={"a": 1}))['{"a": 1}'] == CUSTOMER
    inner = payload(street={"name": "n", "number": 1, "floor": [2]})
    assert values(inner)["[2]"] == CUSTOMER


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "null", "7", "[]", '{"eMail": "a"}', '{"customer": null, "eMail": "a"}'),
        *('{"customer": 1.5, "eMail": "a"}', '{"customer": "", "eMail": "a"}', "[" * 100_000),
        *('{"customer": "\\u0000", "eMail": "a"}', '{"customer": "\\ud800", "eMail": "a"}'),
        *(f'{{"customer": "{"c" * 501}", "eMail": "a"}}', '{"customer": ["c"], "eMail": "a"}'),
        *('{"customer": "c", "eMail": "a"} x', '{"customer": true, "eMail": "a"}'),
    ],
)
def test_a_payload_that_names_no_subject_is_unfit_or_has_nothing_personal(text: str) -> None:
    try:
        assert spans(text, shape_of(Ordered)) == []
        assert "eMail" not in text
    except Unfit:
        pass


def test_a_subject_that_can_not_be_found_is_a_mistake_in_words() -> None:
    class Missing(Event, type="missing"):
        mail: Annotated[str, Personal(of="customer")]

    class Optional(Event, type="optional"):
        customer: str | None = None
        mail: Annotated[str, Personal(of="customer")]

    class Hidden(Event, type="hidden"):
        customer: Annotated[str, Personal(of="customer")]

    class Inner(Event, type="inner"):
        street: Street

    class Aliased(Event, type="aliased"):
        customer: str = Field(alias="customerId")
        mail: Annotated[str, Personal(of="customer")]

    class TwoNames(Event, type="two.names"):
        customer: str
        mail: Annotated[str, Personal(of="customer")] = Field(
            validation_alias=AliasChoices("mail", "email")
        )

    texts = [[*mistakes(one)] for one in (Missing, Optional, Hidden, Inner, Aliased, TwoNames)]
    assert [len(one) for one in texts] == [1] * 6
    missing, optional, hidden, inner, aliased, two_names = (one[0] for one in texts)
    for text in (missing, inner, aliased):
        assert "there is no field of this name" in text
    assert missing.startswith("Missing.mail is personal data of 'customer'")
    assert inner.startswith("Inner.street.name is personal data")
    for text in (optional, hidden):
        assert "must be required" in text
    assert "AliasChoices" in two_names


def test_events_without_marks_are_left_alone() -> None:
    class Box(Event, Generic[T], type="box"):
        content: T

    assert list(mistakes(Box[int])) == []
    assert not shape_of(Box[int]).is_personal


def test_a_personal_field_is_hidden_where_payloads_are_displayed() -> None:
    class Written(Event, type="written"):
        writer: str
        pen_name_of_writer: Annotated[str, Personal(of="writer")]

    event = Written(writer="w", pen_name_of_writer="Q. Pseudo")
    for text in (event.model_dump_json(), repr(event), f"wrong: {event!r}"):
        assert "Pseudo" not in redact(text)
        assert "writer" in redact(text)


KEYS = {
    Subject(name): DataKey(name.encode(), bytes([n]) * 32) for n, name in enumerate("abc", start=1)
}
BY_ID = {key.id: key for key in KEYS.values()}

_SPACE = st.sampled_from(["", " ", "\n", "\t "])
_TEXT = st.text().map(json.dumps) | st.text().map(lambda one: json.dumps(one, ensure_ascii=False))
_NUMBER = st.sampled_from(["1.50", "1e3", "-0", "12345678901234567890.1"])


@st.composite
def _payloads(draw: st.DrawFn) -> str:
    members = [
        f'"customer"{draw(_SPACE)}:{draw(_SPACE)}"{draw(st.sampled_from("ab"))}"',
        f'"eMail":{draw(_SPACE)}{draw(_TEXT)}',
        f'"amount":{draw(_NUMBER)}',
        f'"names":[{draw(_SPACE)}{",".join(draw(st.lists(_TEXT, max_size=3)))}{draw(_SPACE)}]',
        f'"phones":[{{"owner":"c","digits":{draw(_TEXT)}}}]',
    ]
    space = draw(_SPACE)
    return space + "{" + f"{space},{space}".join(draw(st.permutations(members))) + "}" + space


@given(_payloads())
@settings(deadline=None)
def test_a_payload_comes_back_to_the_last_byte(text: str) -> None:
    keys = KEYS | {Subject.of("c", "driver"): KEYS[Subject("c")]}
    found = spans(text, shape_of(Ordered))
    stored = encrypt_values(text, found, keys)
    again = Stored.parse(bytes(stored))
    assert again is not None
    assert again.decrypt(BY_ID) == text.encode()
    assert json.loads(again.text)["eMail"] is None
    without = {id: key for id, key in BY_ID.items() if id != b"c"}
    assert not again.is_readable(without), "digits may not be null"


def test_values_that_may_be_null_are_null_without_their_key() -> None:
    text = payload(home={"name": "n", "number": 1})
    found = spans(text, shape_of(Ordered))
    stored = encrypt_values(
        text, [one for one in found if one.allows_null], {Subject(CUSTOMER): KEYS[Subject("a")]}
    )
    assert stored.is_readable(set())
    assert json.loads(stored.decrypt({}))["home"] is None
    assert json.loads(stored.decrypt(BY_ID))["home"] == {"name": "n", "number": 1}


@given(st.binary())
@settings(deadline=None)
def test_bytes_that_are_encrypted_as_a_whole_need_all_keys(data: bytes) -> None:
    stored = Stored.parse(bytes(encrypt_whole(data, [KEYS[Subject("a")], KEYS[Subject("b")]])))
    assert stored is not None
    assert stored.decrypt(BY_ID) == data
    assert not stored.is_readable({b"a"})


@given(st.binary())
@settings(deadline=None)
def test_bytes_of_others_are_no_stored_form(data: bytes) -> None:
    for one in (data, PREFIX + data):
        parsed = Stored.parse(one)
        assert parsed is None or not parsed.values


def test_a_changed_ciphertext_is_recognised() -> None:
    key = KEYS[Subject("a")]
    encrypted = bytearray(key.encrypt(b"text"))
    encrypted[-1] ^= 1
    with pytest.raises(Changed):
        key.decrypt(bytes(encrypted))


def test_the_guide_has_the_settings() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "personal-data.md").read_text("utf-8")
    assert settings_guide.table(PersonalSettings) in guide
