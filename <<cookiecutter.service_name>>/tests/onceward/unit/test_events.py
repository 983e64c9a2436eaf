"""The base of events: what a class statement must say, and what an instance is."""

from typing import Generic, TypeVar

import pytest
from pydantic import BaseModel, ValidationError

from onceward import Event, Handlers, Tombstone, Transaction
from onceward.handlers.staging import Outbox

T = TypeVar("T")


class Moved(Event, type="moved", topic="moves"):
    """A parcel moved."""

    place: str


def test_the_class_statement_says_type_and_topic() -> None:
    assert (Moved.__event_type__, Moved.__event_topic__) == ("moved", "moves")


def test_a_topic_is_needed_only_to_publish() -> None:
    class Read(Event, type="read"):
        pass

    assert Read.__event_topic__ is None


def test_an_event_without_a_type_is_refused_with_an_example() -> None:
    with pytest.raises(TypeError, match='class Empty\\(Event, type="…"\\)'):

        class Empty(Event, type=""):
            pass

    with pytest.raises(TypeError, match=r'class Missing\(Moved, type="…"\)'):

        class Missing(Moved):
            pass


@pytest.mark.parametrize("type", ["a\x00b", "a\n", " a", "\ud800"])
def test_a_type_that_could_not_be_stored_or_read_is_refused(type: str) -> None:
    with pytest.raises(ValueError, match="the type of Odd is a name"):

        class Odd(Event, type=type):
            pass


def test_a_subclass_has_its_parents_topic_unless_it_gives_one() -> None:
    class Lost(Moved, type="lost"):
        pass

    class Found(Moved, type="found", topic="finds"):
        pass

    assert (Lost.__event_type__, Lost.__event_topic__) == ("lost", "moves")
    assert (Found.__event_type__, Found.__event_topic__) == ("found", "finds")


def test_a_generic_event_keeps_type_and_topic_whatever_its_parameters_are() -> None:
    class Changed(Event, Generic[T], type="changed", topic="changes"):
        value: T

    class Counted(Changed[int], type="counted"):
        pass

    assert (Changed[int].__event_type__, Changed[int].__event_topic__) == ("changed", "changes")
    assert Changed[int].model_validate_json('{"value": 1}').value == 1
    assert (Counted.__event_type__, Counted.__event_topic__) == ("counted", "changes")


@pytest.mark.parametrize("topic", ["", ".", "..", "a b", "ä", "a/b", "x" * 250, "a\n", "a\x00"])
def test_a_topic_that_kafka_can_not_have_is_refused(topic: str) -> None:
    with pytest.raises(ValueError, match="1 to 249 letters"):

        class Sent(Event, type="sent", topic=topic):
            pass


@pytest.mark.parametrize("topic", ["a", "A-b_c.9", "x" * 249, "..."])
def test_a_topic_that_kafka_can_have_is_taken(topic: str) -> None:
    class Sent(Event, type="sent", topic=topic):
        pass

    assert Sent.__event_topic__ == topic


def test_an_event_can_not_be_changed() -> None:
    moved = Moved(place="Ulm")
    with pytest.raises(ValidationError, match="frozen"):
        moved.place = "Bonn"  # type: ignore[misc]


def test_a_field_that_a_newer_producer_sends_is_ignored() -> None:
    assert Moved.model_validate_json(b'{"place": "Ulm", "since": 1}') == Moved(place="Ulm")


def test_an_error_does_not_quote_the_payload() -> None:
    with pytest.raises(ValidationError) as error:
        Moved.model_validate_json(b'{"place": ["secret"]}')
    assert "place" in str(error.value)
    assert "secret" not in str(error.value)


def test_type_and_topic_are_no_part_of_the_payload() -> None:
    assert Moved(place="Ulm").model_dump_json() == '{"place":"Ulm"}'


def test_a_tombstone_has_the_records_key() -> None:
    assert Tombstone(key="42").key == "42"
    assert Tombstone.__event_topic__ is None


def test_a_field_of_any_name_does_not_choose_type_or_topic() -> None:
    class Logged(Event, type="logged", topic="logs"):
        event_type: str
        event_topic: str
        event_upcasters: str

    with pytest.raises(ValidationError, match="3 validation errors"):
        Logged.model_validate_json("{}")
    logged = Logged(event_type="other", event_topic="others", event_upcasters="none")
    outbox = Outbox("/test", 1_000)
    outbox.stage(logged, id="1", key=None, sequence=None)
    (staged,) = outbox.events
    assert (staged.type, staged.topic) == ("logged", "logs")
    assert staged.payload == logged.model_dump_json().encode()

    handlers = Handlers()

    @handlers.on(Logged, topic="logs", consumer="test")
    async def handle(event: Logged, tx: Transaction) -> None:
        """Take it."""

    assert handlers.topics == {"logs"}


@pytest.mark.filterwarnings("ignore:Field name .* shadows an attribute")
def test_a_field_that_would_have_a_method_as_its_default_is_refused() -> None:
    class Mixin(BaseModel):
        upcast: str

    with pytest.raises(TypeError, match="'upcast' can't be a field of Raised, whose"):

        class Raised(Event, type="raised"):
            upcast: str  # type: ignore[assignment]

    with pytest.raises(TypeError, match="'upcast' can't be a field of Mixed, whose"):

        class Mixed(Event, Mixin, type="mixed"):
            pass

    with pytest.raises(TypeError, match="'mro' can't be a field of Ordered, whose"):

        class Ordered(Event, Generic[T], type="ordered"):
            mro: T
