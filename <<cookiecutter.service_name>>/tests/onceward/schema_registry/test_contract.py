"""What `service schema check` finds when arguments of the codec `Confluent` change."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema

from onceward import Event
from onceward.contracts.check import Mode, verdicts
from onceward.plain import PayloadFields
from onceward.schema_registry import Confluent, Framing, Strategy

PUBLISHED, TAKEN = ("published",), ("taken",)


class Sold(Event, type="sold.v1"):
    """Something was sold."""


SCHEMA = Schema('{"type": "record", "name": "shop.Sold", "fields": []}', "AVRO")


def exported(codec: Confluent, sides: tuple[str, ...]) -> Mapping[str, Any]:
    described = {"codec": "Confluent", **json.loads(json.dumps(codec.contract()))}
    return {"codecs": {"sales": described}, "taken": {}, "published": {}} | {
        side: {"sales": {}} for side in sides
    }


def found(
    before: Confluent, now: Confluent, sides: tuple[str, ...] = TAKEN, mode: Mode = Mode.FULL
) -> Iterator[tuple[str, bool, str]]:
    for one in verdicts(exported(before, sides), exported(now, sides), mode):
        assert one.topic == "sales"
        yield one.type, one.is_break, one.text


@pytest.mark.parametrize("identity", [None, PayloadFields("id")])
def test_another_type_for_a_name_is_a_warning(identity: PayloadFields | None) -> None:
    before = Confluent(identity=identity, types={"shop.Sold": Sold})
    text = "cannot be decided: such a record is now of the type shop.Sold, and was of sold.v1"
    assert [*found(before, Confluent(identity=identity))] == [("shop.Sold", False, text)]
    assert not [*found(before, before)]


def test_a_reader_of_prefixes_does_not_read_a_header() -> None:
    prefix, header = Confluent(), Confluent(framing=Framing.HEADER)
    text = (
        "a consumer that has not been updated rejects events whose schema a header names, unless"
        " its deserializer reads that header"
    )
    for mode in (Mode.FORWARD, Mode.FULL):
        assert [*found(prefix, header, PUBLISHED, mode)] == [("all types", True, text)]
    assert not [*found(prefix, header, PUBLISHED, Mode.BACKWARD)]
    assert not [*found(prefix, header, TAKEN)], "both are read"
    text = 'cannot be decided: the codec\'s framing is "prefix", and was "header"'
    assert [*found(header, prefix, PUBLISHED)] == [("all types", False, text)]


def test_another_subject_or_own_schema_is_a_warning() -> None:
    before, now = Confluent(), Confluent(strategy=Strategy.RECORD)
    text = "cannot be decided: the codec's strategy is "
    ((type, is_break, found_text),) = found(before, now, PUBLISHED)
    assert (type, is_break, found_text.startswith(text)) == ("all types", False, True)
    own = Confluent(types={"shop.Sold": Sold}, schemas={Sold: SCHEMA})
    text = """cannot be decided: the codec's schemas is ["sold.v1"], and was []"""
    assert [*found(Confluent(types={"shop.Sold": Sold}), own)] == [("all types", False, text)]


def test_an_export_of_1_0_0_has_no_arguments_to_compare() -> None:
    old = {"codecs": {"sales": {"codec": "Confluent"}}, "taken": {"sales": {}}, "published": {}}
    now = Confluent(types={"shop.Sold": Sold}, framing=Framing.HEADER)
    assert not [*verdicts(old, exported(now, TAKEN), Mode.FULL)]
