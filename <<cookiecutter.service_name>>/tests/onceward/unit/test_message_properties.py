"""What holds of decode and the hash for any record, found by trying many."""

import base64
import itertools
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, timedelta, timezone
from typing import Any, NamedTuple

import pydantic_core
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from onceward.events.cloudevents import event_headers
from onceward.events.codec import CloudEvents
from onceward.events.message import Message, Reason, Undecodable, marker_key
from onceward.events.payload import payload_hash
from onceward.plain import Header, PayloadFields, Plain, Position

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
name = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
numbers = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(min_value=2**52, max_value=2**70),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)
encodable = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, text),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=4)),
    max_leaves=12,
)
nested = st.builds(
    lambda opening, depth, middle, closing: opening * depth + middle + closing * depth,
    st.sampled_from([b"[", b'{"a":', b"[1,"]),
    st.integers(0, 3000),
    st.sampled_from([b"", b"1", b'"x"']),
    st.sampled_from([b"]", b"}", b""]),
)
json_texts = values.map(lambda value: json.dumps(value).encode())
payloads = st.one_of(st.binary(), json_texts, nested, st.just(b"9" * 10_000))
media_types = st.sampled_from(
    [
        b"application/json",
        b"text/plain",
        b"application/cloudevents+json",
        b"application/cloudevents",
    ]
)
header_names = st.one_of(
    st.text(),
    st.sampled_from(
        [
            "ce_id",
            "ce_source",
            "ce_type",
            "ce_specversion",
            "ce_time",
            "ce_subject",
            "ce_sequence",
            "CE_ID",
            "Content-Type",
            "content-type",
            "ce_datacontenttype",
            "traceparent",
            "tracestate",
            "baggage",
            "x",
        ]
    ),
)
header_values = st.one_of(
    st.none(),
    st.binary(),
    text.map(str.encode),
    media_types,
    st.sampled_from([b"1.0", b"2026-01-31T23:59:59Z", b"00-" + b"1" * 32 + b"-" + b"2" * 16]),
)
complete = st.just(
    [("ce_specversion", b"1.0"), ("ce_id", b"1"), ("ce_source", b"/"), ("ce_type", b"t")]
)
headers = st.builds(
    lambda first, rest: [*first, *rest],
    st.one_of(st.just([]), complete, media_types.map(lambda media: [("content-type", media)])),
    st.lists(st.tuples(header_names, header_values), max_size=8),
)
envelopes = st.builds(
    lambda members, value: json.dumps(
        {"specversion": "1.0", "id": "1", "source": "/", "type": "t", **members, "data": value}
    ).encode(),
    st.dictionaries(
        st.sampled_from(
            [
                "specversion",
                "id",
                "source",
                "type",
                "time",
                "subject",
                "data_base64",
                "datacontenttype",
                "traceparent",
            ]
        ),
        st.one_of(values, text),
    ),
    values,
)
plains = st.one_of(
    st.none(),
    st.builds(
        Plain,
        name,
        st.one_of(
            st.builds(Header, header_names),
            st.builds(PayloadFields, st.text()),
            st.builds(Position),
        ),
    ),
)


thoroughly = settings(max_examples=200, deadline=None)


class Record(NamedTuple):
    headers: Sequence[tuple[str, bytes | None]]
    value: bytes | None
    topic: str = "orders"
    partition: int = 3
    offset: int = 17
    timestamp: int = 1_700_000_000_123
    key: bytes | None = None


def decode(record: Record, plain: Plain | None = None) -> Message:
    return (plain or CloudEvents()).decode(record)


def outcome(record: Record, plain: Plain | None) -> Message | Undecodable:
    try:
        return decode(record, plain)
    except Undecodable as error:
        return error


def assert_it_can_be_stored(message: Message) -> None:
    assert type(message) is Message
    assert message.source
    assert message.id
    assert message.type
    assert len(message.hash) == 16
    assert message.time is None or message.time.tzinfo is UTC
    for field in Message._fields:
        stored = getattr(message, field)
        if isinstance(stored, str):
            assert "\0" not in stored
            assert len(stored.encode()) > 0


@thoroughly
@given(headers, st.one_of(st.none(), payloads, envelopes), plains)
def test_any_record_is_a_message_that_can_be_stored_or_undecodable(
    pairs: list[tuple[str, bytes | None]], value: bytes | None, plain: Plain | None
) -> None:
    message = outcome(Record(pairs, value), plain)

    if isinstance(message, Undecodable):
        assert message.reason in Reason
        assert str(message).isprintable()
    else:
        assert_it_can_be_stored(message)


@thoroughly
@given(envelopes, headers)
def test_any_envelope_is_a_message_that_can_be_stored_or_undecodable(
    value: bytes, pairs: list[tuple[str, bytes | None]]
) -> None:
    structured = ("content-type", b"application/cloudevents+json")
    message = outcome(Record([*pairs, structured], value), None)

    if isinstance(message, Undecodable):
        assert message.reason in Reason
        assert str(message).isprintable()
    else:
        assert_it_can_be_stored(message)


@thoroughly
@given(st.one_of(payloads, envelopes), st.one_of(st.none(), st.text()), text)
def test_the_hash_takes_any_bytes(data: bytes, content_type: str | None, type: str) -> None:
    assert len(payload_hash(type, content_type, data)) == 16


@thoroughly
@given(encodable, st.randoms(use_true_random=False))
def test_the_hash_is_that_of_the_value_however_it_is_written(
    value: object, chance: random.Random
) -> None:
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    hash = payload_hash("t", None, compact.encode())

    for other in (
        json.dumps(value),
        json.dumps(value, indent=1),
        json.dumps(shuffled(value, chance), ensure_ascii=False),
        json.dumps(shuffled(value, chance), separators=(",", ":")),
        f" {compact}\n",
    ):
        assert payload_hash("t", "application/json", other.encode()) == hash


def shuffled(value: object, chance: random.Random) -> object:
    """The same value with the members of its objects in another order."""
    if isinstance(value, list):
        return [shuffled(inner, chance) for inner in value]
    if isinstance(value, dict):
        members = [(key, shuffled(inner, chance)) for key, inner in value.items()]
        chance.shuffle(members)
        return dict(members)
    return value


@thoroughly
@given(values, values)
@example(1, "1").via("a number and its text")
@example({"a": {"b": 1}}, {"a": {}, "b": 1}).via("nesting")
def test_two_values_have_two_hashes(one: object, other: object) -> None:
    same = written(one) == written(other)
    hashes = {payload_hash("t", None, json.dumps(value).encode()) for value in (one, other)}

    assert len(hashes) == (1 if same else 2)


def written(value: object) -> object:
    """The value with a number as its text, so that 1, 1.0, True and "1" differ."""
    if isinstance(value, dict):
        return ("object", {key: written(inner) for key, inner in value.items()})
    if isinstance(value, list):
        return ("list", [written(inner) for inner in value])
    return (type(value).__name__, json.dumps(value))


def test_texts_with_one_hash_are_one_value_to_the_parser_of_pydantic() -> None:
    """Tried with every text of few tokens, long enough for an object with a key that is twice."""
    tokens = ["{", "}", "[", "]", ",", '"a":', '"\\u0061":', "1", "1.0", " "]
    texts = itertools.chain(
        (chosen for length in range(5) for chosen in itertools.product(tokens, repeat=length)),
        (
            (first, *middle, last)
            for first, last in ("{}", "[]")
            for length in (3, 4, 5)
            for middle in itertools.product(tokens, repeat=length)
        ),
    )
    by_hash: dict[bytes, set[bytes]] = defaultdict(set)
    for chosen in texts:
        data = "".join(chosen).encode()
        by_hash[payload_hash("t", None, data)].add(data)

    merged = [datas for datas in by_hash.values() if len(datas) > 1]
    assert len(merged) > 50
    for datas in merged:
        assert len({repr(in_order(pydantic_core.from_json(data))) for data in datas}) == 1, datas


def in_order(value: object) -> object:
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value)}
    return [in_order(inner) for inner in value] if isinstance(value, list) else value


@thoroughly
@given(st.binary(), st.binary(), st.sampled_from(["text/plain", None]))
@example(b'{"a":1}', b'{"a":1,"a":1}', None).via("a key that is there twice")
@example(b"\xef\xbb\xbf1", b"1", None).via("a byte order mark")
@example('"a"'.encode("utf-16"), b'"a"', None).via("another encoding")
def test_other_bytes_have_another_hash(one: bytes, other: bytes, content_type: str | None) -> None:
    assume(content_type or one.strip(b" \t\r\n") != other.strip(b" \t\r\n"))
    assume(one != other)

    assert payload_hash("t", content_type, one) != payload_hash("t", content_type, other)


@thoroughly
@given(encodable, name, name, name, st.one_of(st.none(), name))
def test_an_event_is_the_same_in_binary_and_in_structured_mode(
    value: object, id: str, source: str, type: str, subject: str | None
) -> None:
    attributes = {"specversion": "1.0", "id": id, "source": source, "type": type}
    if subject is not None:
        attributes["subject"] = subject
    data = json.dumps(value)
    encoded = base64.b64encode(data.encode()).decode()
    content_type = ("content-type", b"application/json")
    binary = decode(
        Record(
            [content_type, *((f"ce_{name}", v.encode()) for name, v in attributes.items())],
            data.encode(),
        )
    )
    for payload in (
        f'"data": {data}',
        f'"datacontenttype": "application/json",\n"data":{json.dumps(value, indent=2)}',
        f'"datacontenttype": "application/json", "data_base64": "{encoded}"',
    ):
        envelope = f"{json.dumps(attributes)[:-1]}, {payload}}}"
        structured = decode(
            Record([("content-type", b"application/cloudevents+json")], envelope.encode())
        )

        assert structured.hash == binary.hash
        assert json.loads(structured.data or b"") == value
        for field in ("id", "source", "type", "subject", "content_type", "time"):
            assert getattr(structured, field) == getattr(binary, field)


offsets = st.integers(-14 * 60, 14 * 60).map(lambda m: timezone(timedelta(minutes=m)))
times = st.datetimes(timezones=offsets).filter(lambda time: 1 < time.year < 9999)
traceparents = st.builds(
    lambda trace, span, flags: f"00-{trace:032x}-{span:016x}-{flags:02x}",
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.integers(0, 255),
)


@thoroughly
@given(
    st.fixed_dictionaries(
        {
            "id": name,
            "source": name,
            "type": name,
            "time": times,
            "subject": st.one_of(st.none(), name),
            "sequence": st.one_of(st.none(), st.integers(0, 2**63 - 1)),
            "content_type": st.sampled_from([None, "application/json", "text/plain"]),
            "traceparent": traceparents,
            "tracestate": st.one_of(st.none(), name),
            "baggage": st.one_of(st.none(), name),
        }
    ),
    st.binary(),
)
def test_what_event_headers_writes_decode_reads(attributes: dict[str, Any], data: bytes) -> None:
    columns = {"id": "event_id", "time": "created_at"}
    row = {columns.get(name, name): value for name, value in attributes.items()}
    none = dict.fromkeys(("dataref", "datalength", "datachecksum"))
    message = decode(Record(event_headers(row | none), data))

    if attributes["sequence"] is not None:
        attributes["sequence"] = f"{attributes['sequence']:020}"  # ordered as text
    assert {name: getattr(message, name) for name in attributes} == attributes
    assert message.data == data


@thoroughly
@given(st.tuples(text, text, text), st.tuples(text, text, text))
@example(("a", "bc", "d"), ("ab", "c", "d")).via("a shifted border")
def test_two_identities_have_two_marker_keys(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    assert (marker_key(*one) == marker_key(*other)) == (one == other)


@thoroughly
@given(st.lists(st.one_of(name, st.integers(), st.booleans()), min_size=2, max_size=2), name, name)
def test_payload_fields_with_other_values_name_other_events(
    pair: list[object], first_type: str, other_type: str
) -> None:
    ids = {
        decode(
            Record([], json.dumps({"n": value}).encode()), Plain(event_type, PayloadFields("n"))
        ).id
        for value in pair
        for event_type in (first_type, other_type)
    }

    distinct_values = {(type(value), value) for value in pair}
    assert len(ids) == len(distinct_values) * len({first_type, other_type})


@thoroughly
@given(st.one_of(st.text(), traceparents, st.from_regex(r"[0-9a-f-]{50,60}")), name)
def test_a_traceparent_is_well_formed_or_dropped(sent: str, state: str) -> None:
    pairs: list[tuple[str, bytes]] = [
        ("ce_specversion", b"1.0"),
        ("ce_id", b"1"),
        ("ce_source", b"/"),
        ("ce_type", b"t"),
        ("traceparent", sent.encode("utf-8", "surrogatepass")),
        ("tracestate", state.encode()),
    ]
    message = decode(Record(pairs, None))

    if message.traceparent is None:
        assert message.tracestate is None
        return
    version, trace, span, flags, *more = message.traceparent.split("-")
    assert [len(version), len(trace), len(span), len(flags)] == [2, 32, 16, 2]
    assert 0 not in (int(trace, 16), int(span, 16))
    assert version != "ff"
    assert version != "00" or not more


@pytest.mark.parametrize("depth", [254, 255, 990, 1_100, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_no_depth_of_json_breaks_the_hash_or_decode(opening: str, depth: int) -> None:
    data = (opening * depth + "1" + {"[": "]", '{"a":': "}"}[opening] * depth).encode()

    assert len(payload_hash("t", None, data)) == 16
    with pytest.raises(Undecodable):
        decode(Record([("content-type", b"application/cloudevents+json")], data))
