"""What decode, the hash, the marker key and the headers promise, example by example."""

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import NamedTuple

import pytest

from onceward.events.cloudevents import event_headers, names_of
from onceward.events.codec import CloudEvents
from onceward.events.message import (
    Message,
    Reason,
    Reference,
    Undecodable,
    marker_key,
    printable,
)
from onceward.events.payload import payload_hash
from onceward.plain import Header, PayloadFields, Plain, Position

EVENT = {
    "ce_specversion": b"1.0",
    "ce_id": b"41",
    "ce_source": b"/orders",
    "ce_type": b"order.placed",
    "content-type": b"application/json",
}
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b9c7c989f97918e1-01"
OTHER_TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
STRUCTURED = "application/cloudevents+json"


class Record(NamedTuple):
    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


def record(
    headers: Mapping[str, bytes | None] | Sequence[tuple[str, bytes | None]],
    value: bytes | None = b"{}",
) -> Record:
    pairs = tuple(headers.items() if isinstance(headers, Mapping) else headers)
    return Record("orders", 3, 17, 1_700_000_000_123, b"k", value, pairs)


def test_every_attribute_is_read_into_the_field_of_its_name() -> None:
    """They are handed on by place, and most neighbours are of one type."""
    names = ("id", "source", "type", "subject", "sequence", "dataschema")
    headers = {f"ce_{name}": name.encode() for name in names} | {
        "ce_specversion": b"1.0",
        "ce_time": b"2026-01-02T03:04:05Z",
        "content-type": b"content_type",
        "traceparent": TRACEPARENT.encode(),
        "tracestate": b"tracestate=1",
        "baggage": b"baggage=1",
    }
    message = decode(Record("topic", 1, 2, 3, b"key", b"data", list(headers.items())))
    assert message._asdict() == {
        **{name: name for name in names},
        "topic": "topic",
        "partition": 1,
        "offset": 2,
        "timestamp": 3,
        "key": b"key",
        "time": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "content_type": "content_type",
        "data": b"data",
        "traceparent": TRACEPARENT,
        "tracestate": "tracestate=1",
        "baggage": "baggage=1",
        "hash": payload_hash("type", "content_type", b"data"),
        "reference": None,
    }


def binary(value: bytes | None = b"{}", **headers: bytes | None) -> Message:
    named = {name.replace("content_type", "content-type"): v for name, v in headers.items()}
    return decode(record({**EVENT, **named}, value))


def structured(
    envelope: object, headers: dict[str, bytes] | None = None, content_type: str = STRUCTURED
) -> Message:
    value = envelope if isinstance(envelope, bytes) else json.dumps(envelope).encode()
    return decode(record({**(headers or {}), "content-type": content_type.encode()}, value))


def envelope(**members: object) -> dict[str, object]:
    return {"specversion": "1.0", "id": "41", "source": "/o", "type": "order.placed", **members}


SAYS_WHERE = {"dataref": "s3://bucket/a", "datalength": 7, "datachecksum": "ab"}


def test_an_event_without_data_may_say_where_it_is() -> None:
    headers = {f"ce_{name}": str(value).encode() for name, value in SAYS_WHERE.items()}
    in_binary = decode(record({**EVENT, **headers}, b""))
    without_value = decode(record({**EVENT, **headers}, None))
    in_structure = structured(envelope(**SAYS_WHERE))
    for message in (in_binary, without_value, in_structure):
        assert message.reference == Reference("s3://bucket/a", 7, "ab")
        assert (message.data, message.hash) == (b"", b"")


def test_what_comes_with_data_needs_no_other() -> None:
    assert binary(b"{}", ce_dataref=b"s3://bucket/a").reference is None
    assert structured(envelope(data={}, **SAYS_WHERE)).reference is None


def test_the_length_and_the_checksum_may_be_left_out() -> None:
    assert binary(b"", ce_dataref=b"/a").reference == Reference("/a")


@pytest.mark.parametrize("length", [b"-1", b"7.0", b"1e3", b"seven", b"9" * 19, "٧".encode()])
def test_a_length_is_a_number_of_bytes(length: bytes) -> None:
    told = refusal(record({**EVENT, "ce_dataref": b"/a", "ce_datalength": length}, b""))
    assert (told.reason, "datalength" in str(told)) == ("invalid attribute", True)


@pytest.mark.parametrize("name", ["ce_dataref", "ce_datachecksum"])
def test_a_reference_is_text(name: str) -> None:
    headers = {**EVENT, "ce_dataref": b"/a", name: b"\xff"}
    assert refusal(record(headers, b"")).reason == "invalid attribute"


def decode(record: Record, plain: Plain | None = None) -> Message:
    return (plain or CloudEvents()).decode(record)


def refusal(record: Record, plain: Plain | None = None) -> Undecodable:
    with pytest.raises(Undecodable) as caught:
        decode(record, plain)
    return caught.value


class TestBinaryMode:
    def test_attributes_come_from_the_headers_and_the_payload_from_the_value(self) -> None:
        message = binary(
            b'{"n": 1}',
            ce_time=b"2026-01-31T23:59:59.5Z",
            ce_subject=b"order-7",
            ce_sequence=b"00000000000000000007",
            ce_dataschema=b"https://example.com/order.json",
            traceparent=TRACEPARENT.encode(),
            tracestate=b"rojo=1",
            baggage=b"tenant=7",
        )

        assert message == Message(
            topic="orders",
            partition=3,
            offset=17,
            timestamp=1_700_000_000_123,
            key=b"k",
            source="/orders",
            id="41",
            type="order.placed",
            time=datetime(2026, 1, 31, 23, 59, 59, 500_000, UTC),
            subject="order-7",
            sequence="00000000000000000007",
            dataschema="https://example.com/order.json",
            content_type="application/json",
            data=b'{"n": 1}',
            traceparent=TRACEPARENT,
            tracestate="rojo=1",
            baggage="tenant=7",
            hash=payload_hash("order.placed", "application/json", b'{"n": 1}'),
        )

    def test_what_is_not_sent_is_none(self) -> None:
        message = binary()

        assert message.time is None
        assert message.subject is None
        assert message.sequence is None
        assert message.dataschema is None
        assert message.traceparent is None
        assert message.tracestate is None
        assert message.baggage is None

    def test_a_message_is_immutable_and_keeps_its_payload_out_of_logs(self) -> None:
        message = binary(b'{"secret":7}')

        with pytest.raises(AttributeError):
            message.id = "42"  # type: ignore[misc]
        assert message.id in repr(message)
        assert "secret" not in f"{message} {message!r}"

    def test_a_payload_is_not_shown_when_a_message_is_printed(self) -> None:
        assert "secret" not in repr(binary(b'"secret"'))

    def test_a_record_without_a_value_is_a_tombstone(self) -> None:
        message = binary(None)

        assert message.data is None
        assert message.hash == payload_hash("order.placed", None, None)

    def test_header_names_count_in_any_case(self) -> None:
        message = decode(record({name.upper(): value for name, value in EVENT.items()}))

        assert (message.id, message.content_type) == ("41", "application/json")

    @pytest.mark.parametrize("value", [b"{}", b"", None])
    @pytest.mark.parametrize(
        "name", [*EVENT, "ce_time", "ce_subject", "ce_sequence", "ce_dataschema", "ce_dataref"]
    )
    def test_an_attribute_with_two_values_is_refused_by_name(
        self, name: str, value: bytes | None
    ) -> None:
        event = [*{**EVENT, name: EVENT.get(name, b"/a")}.items()]
        for other in (b"42", b"\xff"):
            for headers in ([*event, (name.upper(), other)], [(name, other), *event]):
                error = refusal(record(headers, value))

                assert error.reason is Reason.INVALID_ATTRIBUTE
                assert str(error).startswith(f"{name} ")
                assert "several values" in str(error)
                assert str(error).isprintable()

    @pytest.mark.parametrize(
        ("values", "shown"),
        [
            ((b"1", b"2"), b"1, 2"),
            ((b"1", b"2", b"3"), b"1, 2, 3"),
            ((b"1\xff", b"\xfe"), b"1\xff, \xfe"),
            ((b"\xff2",), b"\xff2"),
            ((b"\x002\n",), b"\x002\n"),
        ],
    )
    def test_values_that_are_refused_are_shown_with_their_bytes_escaped(
        self, values: Sequence[bytes], shown: bytes
    ) -> None:
        event = [one for one in EVENT.items() if one[0] != "ce_id"]

        error = refusal(record([*event, *(("ce_id", one) for one in values)]))
        assert f": {shown!r};" in str(error)
        assert printable("ü\udcff") == r"ü\xff"

    def test_any_number_of_values_is_refused_in_few_words(self) -> None:
        headers = [("ce_id", b"%d" % number * 100) for number in range(10_000)]
        assert len(str(refusal(record([*EVENT.items(), *headers])))) < 400

    def test_equal_values_of_one_name_and_empty_ones_are_one_value(self) -> None:
        headers: list[tuple[str, bytes | None]] = [("CE_ID", b"41"), *EVENT.items()]
        headers += [("ce_id", b""), ("ce_id", None)]

        assert decode(record(headers)).id == "41"

    def test_an_undecodable_record_has_no_id_if_it_has_two(self) -> None:
        headers = [*EVENT.items(), ("ce_id", b"42"), ("traceparent", TRACEPARENT.encode())]

        assert names_of(record(headers)) == (None, TRACEPARENT)

    @pytest.mark.parametrize(
        ("media_type", "event", "id"),
        [
            (STRUCTURED, envelope(time="yesterday"), "41"),
            (STRUCTURED, envelope(id=7, time="yesterday"), "7"),
            (STRUCTURED, envelope(id="\0"), None),
            (STRUCTURED, envelope(id={}), None),
            (STRUCTURED, [], None),
            ("application/cloudevents-batch+json", [envelope()], None),
            ("text/plain", envelope(), "another"),
        ],
    )
    def test_an_undecodable_record_is_named_only_from_its_own_content_mode(
        self, media_type: str, event: object, id: str | None
    ) -> None:
        headers = {"content-type": media_type.encode(), "ce_id": b"another"}
        headers["traceparent"] = TRACEPARENT.encode()
        undecodable = record(headers, json.dumps(event).encode())

        refusal(undecodable)
        assert names_of(undecodable) == (id, TRACEPARENT)

    def test_of_trace_context_the_last_value_is_used(self) -> None:
        parents = [("traceparent", one.encode()) for one in (OTHER_TRACEPARENT, TRACEPARENT)]

        assert decode(record([*EVENT.items(), *parents])).traceparent == TRACEPARENT

    def test_headers_of_others_may_have_several_values(self) -> None:
        assert decode(record([*EVENT.items(), ("x", b"1"), ("x", b"2")])).id == "41"

    @pytest.mark.parametrize("empty", [b"", None])
    def test_an_empty_optional_attribute_is_unset(self, empty: bytes | None) -> None:
        message = binary(ce_subject=empty, ce_time=empty, ce_sequence=empty, content_type=empty)

        assert message.subject is None
        assert message.time is None
        assert message.sequence is None
        assert message.content_type is None

    @pytest.mark.parametrize("empty", [b"", None])
    @pytest.mark.parametrize("name", ["ce_specversion", "ce_id", "ce_source", "ce_type"])
    def test_a_required_attribute_that_is_empty_is_refused_by_name(
        self, name: str, empty: bytes | None
    ) -> None:
        error = refusal(record({**EVENT, name: empty}))

        assert error.reason is Reason.MISSING_ATTRIBUTE
        assert name in str(error)

    @pytest.mark.parametrize("name", ["ce_specversion", "ce_id", "ce_source", "ce_type"])
    def test_a_required_attribute_that_is_absent_is_refused_by_name(self, name: str) -> None:
        error = refusal(record({n: value for n, value in EVENT.items() if n != name}))

        assert error.reason is Reason.MISSING_ATTRIBUTE
        assert name in str(error)

    @pytest.mark.parametrize("version", [b"0.3", b"1", b"1.0.2", b"2.0", b" 1.0"])
    def test_another_version_is_refused(self, version: bytes) -> None:
        error = refusal(record({**EVENT, "ce_specversion": version}))

        assert error.reason is Reason.UNSUPPORTED_SPECVERSION
        assert repr(version.decode()) in str(error)

    @pytest.mark.parametrize("value", [b"a\x00b", b"\xff", b"\xed\xa0\x80"])
    @pytest.mark.parametrize(
        "name", [*EVENT, "ce_time", "ce_subject", "ce_sequence", "ce_dataschema"]
    )
    def test_an_attribute_that_the_database_cannot_store_is_refused(
        self, name: str, value: bytes
    ) -> None:
        error = refusal(record({**EVENT, name: value}))

        assert error.reason is Reason.INVALID_ATTRIBUTE
        assert name in str(error)

    def test_headers_of_others_may_hold_any_bytes(self) -> None:
        assert binary(spring_json_header_types=b"\x00\xff").id == "41"

    def test_attributes_are_any_text(self) -> None:
        assert binary(ce_id="Grüße %20 \N{PARTY POPPER}".encode()).id == "Grüße %20 🎉"

    def test_the_content_type_may_come_as_datacontenttype(self) -> None:
        message = binary(content_type=None, ce_datacontenttype=b"text/plain")

        assert message.content_type == "text/plain"


class TestTime:
    @pytest.mark.parametrize(
        ("text", "moment"),
        [
            ("2026-01-31T23:59:59Z", datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)),
            ("2026-01-31t23:59:59z", datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)),
            ("2026-01-31 23:59:59Z", datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)),
            ("2026-01-31T23:59:59+01:30", datetime(2026, 1, 31, 22, 29, 59, tzinfo=UTC)),
            ("2026-01-31T23:59:59-00:00", datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)),
            ("2026-01-31T23:59:59.1Z", datetime(2026, 1, 31, 23, 59, 59, 100_000, UTC)),
            ("2026-01-31T23:59:59.123456789Z", datetime(2026, 1, 31, 23, 59, 59, 123_456, UTC)),
            ("2016-12-31T23:59:60.5Z", datetime(2016, 12, 31, 23, 59, 59, 500_000, UTC)),
            ("0001-01-01T00:00:00Z", datetime(1, 1, 1, tzinfo=UTC)),
        ],
    )
    def test_an_rfc_3339_time_is_read_as_utc(self, text: str, moment: datetime) -> None:
        time = binary(ce_time=text.encode()).time

        assert time == moment
        assert time.tzinfo is UTC

    @pytest.mark.parametrize(
        "text",
        [
            "yesterday",
            "1700000000",
            "2026-01-31",
            "2026-01-31T23:59:59",
            "2026-01-31T23:59Z",
            "2026-W05-6T23:59:59Z",
            "20260131T235959Z",
            "2026-01-31T23:59:59,5Z",
            "2026-01-31T23:59:59+0100",
            "2026-01-31T24:00:00Z",
            "2026-02-30T00:00:00Z",
            "2026-01-31T23:59:59+24:00",
            "0001-01-01T00:00:00+14:00",
            "9999-12-31T23:59:59-01:00",
            "٢٠٢٦-01-31T23:59:59Z",
            "2026-01-31T23:59:59Z\n",
        ],
    )
    def test_any_other_time_is_refused(self, text: str) -> None:
        error = refusal(record({**EVENT, "ce_time": text.encode()}))

        assert error.reason is Reason.INVALID_ATTRIBUTE
        assert repr(text) in str(error)


class TestTraceContext:
    @pytest.mark.parametrize(
        "malformed",
        [
            "",
            "garbage",
            TRACEPARENT.upper(),
            TRACEPARENT + "-more",
            TRACEPARENT[:-1],
            "ff" + TRACEPARENT[2:],
            "00-00000000000000000000000000000000-b9c7c989f97918e1-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            TRACEPARENT + "\x00",
            TRACEPARENT + "\n",
            "cc" + TRACEPARENT[2:] + "-\x00",
        ],
    )
    def test_a_malformed_traceparent_is_dropped_with_its_tracestate(self, malformed: str) -> None:
        message = binary(traceparent=malformed.encode(), tracestate=b"rojo=1", baggage=b"a=1")

        assert message.traceparent is None
        assert message.tracestate is None
        assert message.baggage == "a=1"

    def test_a_traceparent_of_a_later_version_may_go_on(self) -> None:
        later = "01" + TRACEPARENT[2:] + "-more"

        assert binary(traceparent=later.encode()).traceparent == later

    def test_trace_context_that_is_not_text_is_dropped(self) -> None:
        message = binary(traceparent=TRACEPARENT.encode(), tracestate=b"a=\xff", baggage=b"b=\x00")

        assert message.traceparent == TRACEPARENT
        assert message.tracestate is None
        assert message.baggage is None

    def test_the_plain_headers_go_before_the_cloudevents_extension(self) -> None:
        message = binary(
            traceparent=TRACEPARENT.encode(),
            ce_traceparent=OTHER_TRACEPARENT.encode(),
            ce_tracestate=b"congo=1",
        )

        assert (message.traceparent, message.tracestate) == (TRACEPARENT, None)

    def test_the_cloudevents_extension_counts_where_there_is_no_plain_header(self) -> None:
        message = binary(ce_traceparent=OTHER_TRACEPARENT.encode(), ce_tracestate=b"congo=1")

        assert (message.traceparent, message.tracestate) == (OTHER_TRACEPARENT, "congo=1")

    def test_a_structured_event_carries_the_extension_in_its_envelope(self) -> None:
        event = envelope(traceparent=OTHER_TRACEPARENT, tracestate="congo=1")

        message = structured(event, {"baggage": b"a=1"})
        assert (message.traceparent, message.tracestate) == (OTHER_TRACEPARENT, "congo=1")
        assert message.baggage == "a=1"

        message = structured(event, {"traceparent": TRACEPARENT.encode()})
        assert (message.traceparent, message.tracestate) == (TRACEPARENT, None)

    def test_an_extension_that_is_no_string_is_dropped(self) -> None:
        assert structured(envelope(traceparent=["x"], tracestate={})).traceparent is None


class TestStructuredMode:
    def test_the_envelope_alone_names_the_event(self) -> None:
        headers = {"ce_id": b"42", "ce_source": b"/other", "ce_type": b"order.paid"}
        message = structured(envelope(), headers)

        assert (message.id, message.source, message.type) == ("41", "/o", "order.placed")

    def test_attributes_and_payload_come_from_the_envelope(self) -> None:
        message = structured(
            envelope(
                time="2026-01-31T23:59:59Z",
                subject="order-7",
                sequence="00000000000000000007",
                dataschema="https://example.com/order.json",
                datacontenttype="application/vnd.order+json",
                data={"n": 1},
            ),
            {"ce_id": b"ignored"},
        )

        assert message == Message(
            topic="orders",
            partition=3,
            offset=17,
            timestamp=1_700_000_000_123,
            key=b"k",
            source="/o",
            id="41",
            type="order.placed",
            time=datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC),
            subject="order-7",
            sequence="00000000000000000007",
            dataschema="https://example.com/order.json",
            content_type="application/vnd.order+json",
            data=b'{"n":1}',
            traceparent=None,
            tracestate=None,
            baggage=None,
            hash=payload_hash("order.placed", "application/vnd.order+json", b'{"n":1}'),
        )

    @pytest.mark.parametrize(
        "content_type", ["Application/CloudEvents+JSON; charset=UTF-8", STRUCTURED + ";x=y"]
    )
    def test_the_media_type_counts_in_any_case_and_with_parameters(self, content_type: str) -> None:
        assert structured(envelope(data=1), content_type=content_type).data == b"1"

    def test_data_without_a_content_type_is_json(self) -> None:
        message = structured(envelope(data="text"))

        assert message.content_type == "application/json"
        assert message.data == b'"text"'

    @pytest.mark.parametrize(
        "literal",
        ["1", "1.0", "1.00", "-0", "1e2", "1E2", "1e999", "0.1000000000000000055", "9" * 5000],
    )
    def test_numbers_keep_their_text_and_the_hash_is_that_of_binary_mode(
        self, literal: str
    ) -> None:
        payload = f'{{"b": [{literal}], "a": null}}'.encode()
        envelope = b'{"data": %b, "specversion":"1.0","id":"41","source":"/orders","type":"t"}'

        message = structured(envelope % payload)

        assert message.data == payload.replace(b" ", b"")
        assert message.hash == binary(payload, ce_type=b"t").hash

    def test_a_null_payload_is_json_null_and_no_tombstone(self) -> None:
        assert structured(envelope(data=None)).data == b"null"

    def test_an_event_without_data_is_no_tombstone_either(self) -> None:
        assert structured(envelope()).data == b""

    def test_text_of_another_content_type_is_the_payload_itself(self) -> None:
        message = structured(envelope(datacontenttype="application/xml", data="<ö/>"))

        assert message.data == "<ö/>".encode()
        assert message.hash == payload_hash("order.placed", "application/xml", "<ö/>".encode())

    @pytest.mark.parametrize("data", [b"", b"\x00\xff", b'{"n": 1}'])
    def test_data_in_base64_is_decoded(self, data: bytes) -> None:
        message = structured(
            envelope(
                datacontenttype="application/json", data_base64=base64.b64encode(data).decode()
            )
        )

        assert message.data == data
        assert message.hash == payload_hash("order.placed", "application/json", data)

    def test_null_attributes_are_unset(self) -> None:
        message = structured(envelope(subject=None, time=None, datacontenttype=None, data=1))

        assert (message.subject, message.time) == (None, None)
        assert message.content_type == "application/json"

    def test_an_integer_attribute_is_read_as_in_binary_mode(self) -> None:
        assert structured(envelope(sequence=7)).sequence == "7"

    @pytest.mark.parametrize("name", ["specversion", "id", "source", "type"])
    @pytest.mark.parametrize("empty", ["", None])
    def test_a_required_attribute_that_is_missing_is_refused(
        self, name: str, empty: str | None
    ) -> None:
        value = json.dumps(envelope(**{name: empty})).encode()
        plain = Plain("order.placed", Position())

        error = refusal(record({"content-type": STRUCTURED.encode()}, value), plain)

        assert error.reason is Reason.MISSING_ATTRIBUTE
        assert name in str(error)

    @pytest.mark.parametrize("value", [True, [], {}, ["41"]])
    def test_an_attribute_of_another_type_is_refused(self, value: object) -> None:
        value = json.dumps(envelope(id=value)).encode()

        error = refusal(record({"content-type": STRUCTURED.encode()}, value))

        assert error.reason is Reason.INVALID_ATTRIBUTE
        assert "id" in str(error)

    @pytest.mark.parametrize("text", ["a\x00b", "\ud800"])
    def test_an_attribute_that_the_database_cannot_store_is_refused(self, text: str) -> None:
        value = json.dumps(envelope(subject=text)).encode()

        error = refusal(record({"content-type": STRUCTURED.encode()}, value))

        assert error.reason is Reason.INVALID_ATTRIBUTE

    @pytest.mark.parametrize(
        "value",
        [
            None,
            b"",
            b"{",
            b"[]",
            b"1",
            b"\xff",
            b"\xef\xbb\xbf{}",
            b'{"id": "1", "id": "2"}',
            b'{"data": NaN}',
            b"[" * 100_000,
            b'{"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            b'{"data":' + b"[" * 300 + b"]" * 300 + b"}",
            rb'{"data": "\ud800"}',
            b'{"data": 1, "data_base64": ""}',
            b'{"data_base64": 1}',
            b'{"data_base64": []}',
            b'{"data_base64": "*"}',
            '{"data_base64": "ö"}'.encode(),
            b'{"data_base64": "YQ"}',
            b'{"datacontenttype": "text/plain", "data": {}}',
            b'{"datacontenttype": "text/plain", "data": 1}',
        ],
    )
    def test_what_is_not_one_event_in_the_json_format_is_refused(self, value: bytes | None) -> None:
        error = refusal(record({**EVENT, "content-type": STRUCTURED.encode()}, value))

        assert error.reason is Reason.INVALID_ENVELOPE
        assert len(str(error)) < 400

    @pytest.mark.parametrize(
        "content_type",
        [
            "application/cloudevents",
            "application/cloudevents-batch+json",
            "application/cloudevents+avro",
            "application/cloudevents+protobuf; x=y",
        ],
    )
    def test_batches_and_other_formats_are_refused_with_what_to_send_instead(
        self, content_type: str
    ) -> None:
        error = refusal(record({**EVENT, "content-type": content_type.encode()}, b"[]"))

        assert error.reason is Reason.INVALID_ENVELOPE
        assert repr(content_type) in str(error)
        assert STRUCTURED in str(error)


class TestPlainTopics:
    def test_without_a_description_the_error_says_how_to_give_one(self) -> None:
        error = refusal(record({"content-type": b"application/json"}))

        assert error.reason is Reason.NOT_CLOUDEVENTS
        assert "Plain(" in str(error)
        assert "'orders'" in str(error)

    @pytest.mark.parametrize("identity", [Header("x"), PayloadFields("x"), Position()])
    def test_cloudevents_win_over_the_description(
        self, identity: Header | PayloadFields | Position
    ) -> None:
        plain = Plain("other", identity)

        assert decode(record(EVENT), plain).type == "order.placed"
        value = json.dumps(envelope()).encode()
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
        ("plain", "reason"),
        [
            (Plain("order.placed", Header("name")), Reason.MISSING_IDENTITY),
            (Plain(Header("name"), Position()), Reason.MISSING_TYPE),
        ],
    )
    def test_a_header_with_two_values_names_nothing(self, plain: Plain, reason: Reason) -> None:
        error = refusal(record([("name", b"7"), ("Name", b"8")]), plain)

        assert error.reason is reason
        assert "several values" in str(error)

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
    def test_payloads_that_are_not_json_are_refused_if_fields_are_needed(
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


def of_json(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return payload_hash("t", "application/json", data)


class TestPayloadHash:
    def test_it_is_the_one_that_is_stored(self) -> None:
        # A change here forgets every payload that an inbox remembers: raise HASH_VERSION.
        assert of_json('{"b": [1.50, "x"], "a": null}').hex() == "180702c79e8ba3e1857b4e9581ae8f79"
        assert payload_hash("t", "text/plain", b"x").hex() == "3cdfde5aff2c9efc03478cbaf4393ace"
        assert payload_hash("t", None, None).hex() == "2b5e014cb3fdda0b614567f1452bc52a"

    @pytest.mark.parametrize(
        "same",
        [
            '{"b":[1.50,{"d":"ö","c":true}],"a":null}',
            '{"a":null,"b":[1.50,{"c":true,"d":"ö"}]}',
            ' { "a" : null,\t"b" :\r\n[ 1.50, {"c": true, "d": "\\u00f6"} ] } ',
        ],
    )
    def test_key_order_white_space_and_escapes_do_not_matter(self, same: str) -> None:
        assert of_json(same) == of_json('{"a":null,"b":[1.50,{"c":true,"d":"ö"}]}')

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("1", "1.0"),
            ("1.0", "1.00"),
            ("1", '"1"'),
            ("0", "-0"),
            ("0.0", "-0.0"),
            ("100", "1e2"),
            ("1e2", "1E2"),
            ("1e-7", "1E-7"),
            ("9007199254740993.0", "9007199254740992.0"),
            ("0.1", "0.1000000000000000055"),
            ("18446744073709551616", "18446744073709551617"),
            ("1e999", "2e999"),
            ("1" * 5000, "1" * 5001),
            ("null", '"null"'),
            ("true", "1"),
            ("[]", "{}"),
            ("[[1],2]", "[1,[2]]"),
            ("[1,2]", "[2,1]"),
            ("[12]", "[1,2]"),
            ('{"a":1}', '{"a":"1"}'),
            ('{"a":{"b":1}}', '{"a":{},"b":1}'),
            ('{"a":1}', '["a",1]'),
            ('"a"', '"A"'),
            ('"\\u00e9"', '"e\\u0301"'),
            ('"a"', '"a "'),
            ('"\\\\u0061"', '"a"'),
        ],
    )
    def test_other_values_have_another_hash(self, one: str, other: str) -> None:
        for around in ("%s", '{"k": [%s]}', '{"k":[%s]}'):
            assert of_json(around.replace("%s", one)) != of_json(around.replace("%s", other))

    @pytest.mark.parametrize("spaced", [False, True])
    @pytest.mark.parametrize(
        "text",
        [
            '{"a":1,"a":1}',
            '{"a":1,"a":2}',
            '{"k":[{"a":"x","a":2}]}',
            '{"a":1,"\\u0061":2}',
            "NaN",
            "[-Infinity]",
            '"\\ud800"',
            '{"\\udc00":1}',
            "\ufeff{}",
            "01",
            "1.",
            "+1",
            "'a'",
            "{} {}",
            "[1,]",
            '"\t"',
            "\x0c{}",
            "\u00a01",
            "٣",
            "[" * 255 + "]" * 255,
            "[" * 100_000 + "]" * 100_000,
            '{"a":' * 255 + "1" + "}" * 255,
        ],
    )
    def test_what_parsers_refuse_or_read_differently_counts_as_bytes(
        self, text: str, spaced: bool
    ) -> None:
        data = (" " * spaced + text).encode("utf-8", "surrogatepass")

        assert of_json(data) == payload_hash_of_bytes(data)

    @pytest.mark.parametrize("data", [b"", b"\xff", b'"\xff"', '"a"'.encode("utf-16"), b"\x00"])
    def test_what_is_not_utf_8_json_counts_as_bytes(self, data: bytes) -> None:
        assert of_json(data) == payload_hash_of_bytes(data)

    @pytest.mark.parametrize("depth", [1, 100, 254])
    def test_json_of_a_depth_that_anyone_reads_is_canonical(self, depth: int) -> None:
        assert of_json("[" * depth + "]" * depth) == of_json("[ " * depth + "]" * depth)

    @pytest.mark.parametrize(
        "content_type",
        [None, "application/json", "Application/JSON; charset=utf-8", "a/b+json", "text/json"],
    )
    def test_json_is_recognised_by_its_content_type_or_by_parsing(
        self, content_type: str | None
    ) -> None:
        assert payload_hash("t", content_type, b'{"a": 1}') == of_json('{"a":1}')

    @pytest.mark.parametrize("content_type", ["text/plain", "application/jsonl", "json", ""])
    def test_other_content_types_count_as_bytes(self, content_type: str) -> None:
        assert payload_hash("t", content_type, b"{}") != payload_hash("t", content_type, b"{ }")

    def test_kinds_and_types_do_not_mix(self) -> None:
        hashes = {
            payload_hash("t", None, None),
            payload_hash("t", None, b""),
            payload_hash("t", None, b"null"),
            payload_hash("t", "text/plain", b"null"),
            payload_hash("t", "text/plain", b"none"),
            payload_hash("tx", "text/plain", b""),
            payload_hash("t", "text/plain", b"x"),
            payload_hash("", "text/plain", b"tx"),
            payload_hash("1:t", "text/plain", b"x"),
        }

        assert len(hashes) == 9
        assert {len(hash) for hash in hashes} == {16}


def payload_hash_of_bytes(data: bytes) -> bytes:
    return payload_hash("t", "application/octet-stream", data)


class TestMarkerKey:
    def test_it_is_the_one_that_is_stored(self) -> None:
        # A change here makes every inbox forget what it has seen.
        assert marker_key("billing", "/orders", "41").hex() == "216f39b10c9cf0a2f361032f992a6a75"

    def test_consumer_source_and_id_do_not_run_into_each_other(self) -> None:
        keys = {
            marker_key("ab", "c", "d"),
            marker_key("a", "bc", "d"),
            marker_key("a", "b", "cd"),
            marker_key("", "ab", "cd"),
            marker_key("1:1:", "b", "c"),
            marker_key("", "", "1:1:bc"),
        }

        assert len(keys) == 6
        assert {len(key) for key in keys} == {16}


class TestEventHeaders:
    def test_they_are_those_of_binary_mode(self) -> None:
        headers = headers_of_event(
            source="/orders",
            type="order.placed",
            created_at=datetime(2026, 1, 31, 23, 59, 59, 5, UTC),
            subject="Grüße %",
            sequence=7,
            content_type="application/json",
            traceparent=TRACEPARENT,
            tracestate="rojo=1",
            baggage="tenant=7",
            dataref="s3://claims/41",
            datalength=9,
        )

        assert headers == [
            ("ce_specversion", b"1.0"),
            ("ce_source", b"/orders"),
            ("ce_type", b"order.placed"),
            ("content-type", b"application/json"),
            ("ce_id", b"41"),
            ("ce_time", b"2026-01-31T23:59:59.000005+00:00"),
            ("ce_sequence", b"00000000000000000007"),
            ("ce_subject", "Grüße %".encode()),
            ("traceparent", TRACEPARENT.encode()),
            ("tracestate", b"rojo=1"),
            ("baggage", b"tenant=7"),
            ("ce_dataref", b"s3://claims/41"),
            ("ce_datalength", b"9"),
        ]

    def test_what_is_none_has_no_header_and_time_is_utc(self) -> None:
        time = datetime(2026, 2, 1, tzinfo=timezone(timedelta(hours=1, seconds=30)))
        assert headers_of_event(created_at=time) == [
            ("ce_specversion", b"1.0"),
            ("ce_source", b"/o"),
            ("ce_type", b"t"),
            ("ce_id", b"41"),
            ("ce_time", b"2026-01-31T22:59:30+00:00"),
        ]

    def test_a_naive_time_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no time zone"):
            headers_of_event(created_at=datetime(2026, 2, 1, tzinfo=UTC).replace(tzinfo=None))


BARE = dict.fromkeys(
    (
        *("subject", "sequence", "content_type", "traceparent", "tracestate", "baggage"),
        *("dataref", "datalength", "datachecksum"),
    )
) | {"event_id": "41", "source": "/o", "type": "t"}
"""A row of the outbox that has only what is required."""


def headers_of_event(**columns: object) -> list[tuple[str, bytes]]:
    return event_headers(BARE | columns)
