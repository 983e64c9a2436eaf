"""Upcasters: data of older types is converted before it is validated."""

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Generic, TypeVar

import pytest

from onceward import Event, Handlers, Transaction
from onceward.apply.batch import items_of
from onceward.apply.item import Item, Undecoded
from onceward.events.event import upcasted
from onceward.events.payload import payload_hash
from onceward.handlers.registry import Handler
from onceward.observe import metrics
from onceward.testing.records import KafkaRecord, record

Data = dict[str, Any]
T = TypeVar("T")


class Weighed(Event, type="weighed.v3"):
    """A parcel was weighed."""

    parcel: str
    grams: Decimal
    place: str


@Weighed.upcast("weighed.v2")
def _(data: Data) -> Data:
    return data | {"place": "unknown"}


@Weighed.upcast("weighed.v1", to="weighed.v2")
def _(data: Data) -> Data:
    return {"parcel": data["id"], "grams": data["kilograms"] * 1000}


@Weighed.upcast("weighed.v0")
def _(data: Data) -> Data:
    raise LookupError(data["parcel"])


class Old(Event, type="weighed.v1"):
    """What a parcel weighed, before."""

    id: str


class Plain(Event, type="plain"):
    """Has no older type."""


async def note(event: Event, tx: Transaction) -> None:
    """Take an event."""


def taking(*events: type[Event], topic: str = "weights") -> Handlers:
    handlers = Handlers()
    for event in events:
        handlers.on(event, topic=topic, consumer=f"note-{event.__name__}")(note)
    return handlers


def sent(type: str, data: bytes | Mapping[str, object]) -> KafkaRecord:
    headers = {"ce_specversion": "1.0", "ce_id": "1", "ce_source": "/scales", "ce_type": type}
    value = data if isinstance(data, bytes) else json.dumps(data).encode()
    return record("weights", value, key=b"p", headers=headers, partition=0)


def read(type: str, data: bytes | Mapping[str, object]) -> Item:
    found = items_of(taking(Weighed), sent(type, data), validates=True)
    assert isinstance(found, list)
    (item,) = found
    return item


def test_data_of_an_older_type_is_converted_before_it_is_validated() -> None:
    item = read("weighed.v2", {"parcel": "p", "grams": "1.5"})
    assert item.event == Weighed(parcel="p", grams=Decimal("1.5"), place="unknown")


def test_an_older_type_goes_through_all_types_that_came_after_it() -> None:
    item = read("weighed.v1", b'{"id": "p", "kilograms": 1.50}')
    assert item.event == Weighed(parcel="p", grams=Decimal(1500), place="unknown")


def test_identity_type_and_hash_are_those_of_what_was_received() -> None:
    data = b'{"parcel": "p", "grams": 2}'
    message = read("weighed.v2", data).message
    assert (message.id, message.source, message.type) == ("1", "/scales", "weighed.v2")
    assert message.data == data
    assert message.hash == payload_hash("weighed.v2", None, data)


@pytest.mark.parametrize(
    "number",
    ["0.1234567890123456789012345678901234567890", "1.10", "1E-30", "12345678901234567890123", "7"],
)
def test_a_number_keeps_its_digits(number: str) -> None:
    event = read("weighed.v2", b'{"parcel": "p", "grams": %b}' % number.encode()).event
    assert isinstance(event, Weighed)
    assert event.grams.as_tuple() == Decimal(number).as_tuple()


def test_an_integer_is_an_int_and_a_fraction_a_decimal() -> None:
    class Counted(Event, type="counted.v2"):
        """Something was counted."""

    given: list[Data] = []

    @Counted.upcast("counted.v1")
    def _(data: Data) -> Data:
        given.append(dict(data))
        return data

    written = upcasted(Counted, "counted.v1", b'{"a": 1, "b": 2.50, "c": [1e400, NaN], "d": null}')
    assert repr(given) == repr(
        [{"a": 1, "b": Decimal("2.50"), "c": [Decimal("1E+400"), Decimal("NaN")], "d": None}]
    )
    assert written == b'{"a":1,"b":2.50,"c":[1E+400,NaN],"d":null}'


def test_a_large_integer_is_an_int_and_keeps_its_digits() -> None:
    class Timed(Event, type="timed.v2"):
        """Has integers of any size."""

    kinds: list[type] = []

    @Timed.upcast("timed.v1")
    def _(data: Data) -> Data:
        kinds.extend(map(type, data["a"]))
        return data

    text = b'{"a":[1764124800000000000,-9223372036854775809,123456789012345678901234567890]}'
    assert upcasted(Timed, "timed.v1", text) == text
    assert kinds == [int, int, int]


def test_an_upcaster_without_return_is_described() -> None:
    class Forgetful(Event, type="forgetful.v2"):
        """Its upcaster returns nothing."""

    Forgetful.upcast("forgetful.v1")(lambda data: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"returned <class 'NoneType'>: return the data"):
        upcasted(Forgetful, "forgetful.v1", b"{}")


def test_a_parametrized_class_has_upcasters_of_its_own() -> None:
    class Generic_(Event, Generic[T], type="generic.v2"):
        """Has a parameter."""

        one: T

    Generic_.upcast("generic.v1")(dict)
    number, text = Generic_[int], Generic_[str]
    number.upcast("generic.v0")(dict)
    assert {*number.__event_upcasters__} == {"generic.v0", "generic.v1"}
    assert {*text.__event_upcasters__} == {*Generic_.__event_upcasters__} == {"generic.v1"}
    taking(number)
    with pytest.raises(TypeError, match="the upcasters of Generic_ before handlers"):
        Generic_.upcast("generic.v-1")(dict)


def test_the_error_of_an_upcaster_is_that_of_its_message() -> None:
    item = read("weighed.v0", {"parcel": "p"})
    assert item.event is None
    assert isinstance(item.fault, LookupError)


CONVERTED = '{"parcel": "p"}'.encode("utf-16")
"""An upcaster reads it, and hands on UTF-8."""


@pytest.mark.parametrize(
    "data", [b"{", b"[]", b'"text"', b"{\xff", b"{} {}", b'{"parcel": "p"}', b"", CONVERTED]
)
def test_data_that_no_upcaster_can_convert_is_described_by_its_reader(data: bytes) -> None:
    fault = read("weighed.v2", data).fault
    assert "Weighed" in str(fault)


def test_what_json_does_not_have_is_the_error_of_the_message() -> None:
    class Bad(Event, type="bad.v2"):
        """Its upcaster returns a set."""

    Bad.upcast("bad.v1")(lambda data: {"a": {1}})
    with pytest.raises(TypeError):
        upcasted(Bad, "bad.v1", b"{}")


def test_a_type_that_has_no_upcaster_is_unknown_as_before() -> None:
    handlers = taking(Weighed)
    assert items_of(handlers, sent("weighed.v9", {}), validates=True) == []
    handlers.topic("weights", demands_types=True)
    assert isinstance(items_of(handlers, sent("weighed.v9", {}), validates=True), Undecoded)
    assert isinstance(items_of(handlers, sent("weighed.v1", {}), validates=True), list)


def test_older_types_are_known_in_each_topic_and_handlers_listed_once() -> None:
    handlers = taking(Weighed)
    handlers.on(Weighed, topic="others", consumer="other")(note)
    assert len(list(handlers)) == 2
    for topic in ("weights", "others"):
        (handler,) = handlers.of(topic, "weighed.v1")
        assert isinstance(handler, Handler)
        assert (handler.event, handler.topic) == (Weighed, topic)
    renamed = handlers.with_topics(str.upper)
    assert [one.topic for one in renamed.of("OTHERS", "weighed.v2")] == ["OTHERS"]


@pytest.mark.parametrize("events", [(Weighed, Old), (Old, Weighed)])
def test_an_older_type_with_a_handler_of_its_own_is_refused(events: list[type[Event]]) -> None:
    with pytest.raises(TypeError, match=r"both have the type 'weighed.v1', or an upcaster of it"):
        taking(*events)


def test_an_older_type_may_have_a_handler_in_another_topic() -> None:
    handlers = taking(Weighed)
    handlers.on(Old, topic="others", consumer="other")(note)
    assert [one.event for one in handlers.of("others", "weighed.v1")] == [Old]


def test_an_upcaster_comes_before_the_handlers_of_its_class() -> None:
    class Late(Event, type="late.v2"):
        """Gets an upcaster too late."""

    taking(Late)
    with pytest.raises(TypeError, match="the upcasters of Late before handlers"):
        Late.upcast("late.v1")(dict)


def test_wrong_upcasters_are_refused() -> None:
    class New(Event, type="new.v3"):
        """Has upcasters that are refused."""

    async def convert(data: Data) -> Data:
        return data

    New.upcast("new.v2")(dict)
    for old in ("new.v3", "new.v2"):
        with pytest.raises(
            TypeError, match=f"^New takes '{old}' already: write one upcaster for each older type$"
        ):
            New.upcast(old)(dict)
    advice = "^New does not take 'new.v1' yet: write its upcaster first, above that of 'new.v0'$"
    with pytest.raises(TypeError, match=advice):
        New.upcast("new.v0", to="new.v1")(dict)
    with pytest.raises(TypeError, match=r"^'new.v3' is the type of New itself: leave out to=$"):
        New.upcast("new.v1", to="new.v3")(dict)
    with pytest.raises(TypeError, match="write `def`"):
        New.upcast("new.v1")(convert)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="an older type is a name"):
        New.upcast("")


def test_a_subclass_has_none_of_its_parents_upcasters() -> None:
    class Heavy(Weighed, type="heavy.v1"):
        """A parcel that is heavy."""

    assert Heavy.__event_upcasters__ == {}
    assert Plain.__event_upcasters__ == {}


def test_conversions_are_counted_by_their_older_type(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counter:
        """Keeps what is added."""

        added: list[tuple[int, dict[str, str]]] = []  # noqa: RUF012

        def add(self, count: int, attributes: dict[str, str]) -> None:
            self.added.append((count, attributes))

    monkeypatch.setattr(metrics, "upcasts", Counter())
    read("weighed.v2", {"parcel": "p", "grams": 1})
    read("weighed.v3", {"parcel": "p", "grams": 1, "place": "x"})
    read("weighed.v2", b"[]")
    read("weighed.v2", b"{")
    assert Counter.added == [(1, {"cloudevents.event_type": "weighed.v2"})]
