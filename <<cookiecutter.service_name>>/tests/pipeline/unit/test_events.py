"""The base of events: what a class statement must say, and what an instance is."""

import pytest
from pydantic import ValidationError

from pipeline import Event, Tombstone


class Moved(Event, type="moved", topic="moves"):
    """A parcel moved."""

    place: str


def test_the_class_statement_says_type_and_topic() -> None:
    assert (Moved.event_type, Moved.event_topic) == ("moved", "moves")


def test_a_topic_is_needed_only_to_publish() -> None:
    class Read(Event, type="read"):
        pass

    assert Read.event_topic is None


def test_an_event_without_a_type_is_refused_with_an_example() -> None:
    with pytest.raises(TypeError, match='class Empty\\(Event, type="…"\\)'):

        class Empty(Event, type=""):
            pass

    with pytest.raises(TypeError, match="type"):

        class Missing(Event):
            pass


def test_a_subclass_does_not_inherit_the_topic() -> None:
    class Lost(Moved, type="lost"):
        pass

    assert (Lost.event_type, Lost.event_topic) == ("lost", None)


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
    assert Tombstone.event_topic is None
