"""What of a record names its event, and which records of a plain topic are refused."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest

from pipeline.events.message import Message, Reason, Undecodable
from pipeline.events.payload import payload_hash
from plain_topics import Header, PayloadFields, Plain, Position

EVENT = {
    "ce_specversion": b"1.0",
    "ce_id": b"41",
    "ce_source": b"/orders",
    "ce_type": b"order.placed",
    "content-type": b"application/json",
}
ENVELOPE = {"specversion": "1.0", "id": "41", "source": "/o", "type": "order.placed"}
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b9c7c989f97918e1-01"
STRUCTURED = "application/cloudevents+json"


class Record(NamedTuple):
    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


def record(headers: Mapping[str, bytes | None], value: bytes | None = b"{}") -> Record:
    return Record("orders", 3, 17, 1_700_000_000_123, b"k", value, tuple(headers.items()))


def decode(record: Record, plain: Plain) -> Message:
    return plain.decode(record)


def refusal(record: Record, plain: Plain) -> Undecodable:
    with pytest.raises(Undecodable) as caught:
        decode(record, plain)
    return caught.value


class TestPlainTopics:
    @pytest.mark.parametrize("identity", [Header("x"), PayloadFields("x"), Position()])
    def test_cloudevents_win_over_the_description(
        self, identity: Header | PayloadFields | Position
    ) -> None:
        plain = Plain("other", identity)

        assert decode(record(EVENT), plain).type == "order.placed"
        value = json.dumps(ENVELOPE).encode()
        assert decode(record({"content-type": STRUCTURED.encode()}, value), plain).id == "41"

    def test_half_of_cloudevents_is_an_error_and_no_plain_record(self) -> None:
        error = refusal(record({"ce_id": b"41"}), Plain("order.placed", Position()))

        assert error.reason is Reason.MISSING_ATTRIBUTE

    def test_an_envelope_without_attributes_is_an_error_and_no_plain_record(self) -> None:
        structured = record({"content-type": STRUCTURED.encode()})

        error = refusal(structured, Plain("order.placed", Position()))

        assert error.reason is Reason.MISSING_ATTRIBUTE

    def test_a_plain_record_keeps_content_type_payload_and_trace_context(self) -> None:
        message = decode(
            record(
                {"Content-Type": b"text/json", "traceparent": TRACEPARENT.encode()}, b'{"n": 1}'
            ),
            Plain("order.placed", Position()),
        )

        assert (message.source, message.id) == ("kafka:orders", "3-17")
        assert message.type == "order.placed"
        assert message.content_type == "text/json"
        assert message.data == b'{"n": 1}'
        assert message.hash == payload_hash("order.placed", "text/json", b'{"n":1}')
        assert message.traceparent == TRACEPARENT
        assert message.time is None

    @pytest.mark.parametrize("name", ["message-id", "Message-ID"])
    def test_a_header_names_the_event_together_with_its_type(self, name: str) -> None:
        plain = Plain("order.placed", Header(name))

        message = decode(record({"Message-Id": b"7", "other": b"\xff"}), plain)

        assert message.id == '["order.placed","7"]'
        assert message.source == "kafka:orders"

    def test_two_types_with_one_header_value_are_two_events(self) -> None:
        headers: dict[str, bytes | None] = {"message-id": b"7"}
        ids = {
            decode(record(headers), Plain(type, Header("message-id"))).id
            for type in ("order.placed", "order.paid")
        }

        assert len(ids) == 2

    def test_a_tombstone_has_a_header_too(self) -> None:
        plain = Plain("order.placed", Header("message-id"))

        assert decode(record({"message-id": b"7"}, None), plain).id == '["order.placed","7"]'

    @pytest.mark.parametrize(
        "headers", [{}, {"message-id": None}, {"message-id": b""}, {"message-id": b"\xff"}]
    )
    def test_a_header_that_is_missing_or_no_text_is_refused(
        self, headers: dict[str, bytes | None]
    ) -> None:
        error = refusal(record(headers), Plain("order.placed", Header("message-id")))

        assert error.reason is Reason.MISSING_IDENTITY
        assert "message-id" in str(error)

    @pytest.mark.parametrize(
        ("payload", "id"),
        [
            ('{"n": 7, "region": "eu"}', '["order.placed",7,"eu"]'),
            ('{"region": "eu", "x": 1, "n": 7}', '["order.placed",7,"eu"]'),
            ('{"n": 7.0, "region": "eu"}', '["order.placed",7.0,"eu"]'),
            ('{"n": "7", "region": "eu"}', '["order.placed","7","eu"]'),
            ('{"n": true, "region": "\\u0000"}', r'["order.placed",true,"\u0000"]'),
            ('{"n": 12345678901234567890123, "region": "ö"}',
             '["order.placed",12345678901234567890123,"ö"]'),
            ('{"n": "7\\",\\"eu", "region": "x"}', r'["order.placed","7\",\"eu","x"]'),
        ],
    )  # fmt: skip
    def test_payload_fields_name_the_event_as_they_are_written(self, payload: str, id: str) -> None:
        plain = Plain("order.placed", PayloadFields("n", "region"))

        assert decode(record({}, payload.encode()), plain).id == id

    @pytest.mark.parametrize(
        "payload",
        [
            b"{}",
            b"[]",
            b"7",
            b"null",
            b'{"n": null}',
            b'{"n": ""}',
            b'{"n": []}',
            b'{"n": {}}',
            rb'{"n": "\ud800"}',
        ],
    )
    def test_a_payload_field_that_is_missing_or_no_plain_value_is_refused(
        self, payload: bytes
    ) -> None:
        error = refusal(record({}, payload), Plain("order.placed", PayloadFields("n")))

        assert error.reason is Reason.MISSING_IDENTITY
        assert "'n'" in str(error)
        assert len(str(error)) < 400

    @pytest.mark.parametrize(
        "payload",
        [
            b"",
            b'"n"',
            b"no json",
            b"\xff",
            b'{"n": NaN}',
            b'{"n": 1, "n": 2}',
            b'{"n": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        ],
    )
    def test_a_payload_that_is_not_json_is_refused_where_its_fields_are_needed(
        self, payload: bytes
    ) -> None:
        error = refusal(record({}, payload), Plain("order.placed", PayloadFields("n")))

        assert error.reason is Reason.INVALID_ENVELOPE
        assert "the payload is to be JSON" in str(error)
        assert len(str(error)) < 400

    def test_a_tombstone_has_no_payload_fields_and_is_named_by_its_position(self) -> None:
        plain = Plain("order.placed", PayloadFields("n"))

        assert decode(record({}, None), plain).id == "3-17"

    def test_payload_fields_need_a_field(self) -> None:
        with pytest.raises(ValueError, match="at least one field"):
            PayloadFields()

    @pytest.mark.parametrize("type", ["", "a\x00", "\ud800"])
    def test_a_plain_topic_needs_a_type(self, type: str) -> None:
        with pytest.raises(ValueError, match="type"):
            Plain(type, Position())
