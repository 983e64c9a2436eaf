"""Records that no producer should send, and some do: every value with every kind of headers."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from aiokafka import ConsumerRecord

from onceward import Handlers
from onceward.apply.batch import read
from onceward.apply.positions import Anchor
from onceward.errors import describe_error
from onceward.events.message import Message, Reason

REASONS = {*Reason, "invalid payload"}
UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")
"""What PostgreSQL's text does not hold."""
TEXT_LIMIT = 10_000
"""Characters of an error's text, at most: nobody reads on."""

MEBIBYTE = 2**20
DEPTH = 100_000
"""Levels of nested JSON, far beyond what any parser of ours follows."""

Headers = list[tuple[str, bytes | None]]


class Nasty(NamedTuple):
    """What of a record its producer decides."""

    headers: Headers
    value: bytes | None
    key: bytes | None = b"key"
    timestamp: int = 1_700_000_000_000


def binary(*more: tuple[str, bytes | None], type: str = "shape") -> Headers:
    """Return the headers of a good event in binary mode, and `more` behind them."""
    return [
        ("ce_specversion", b"1.0"),
        ("ce_id", b"1"),
        ("ce_source", b"/"),
        ("ce_type", type.encode()),
        *more,
    ]


STRUCTURED = ("content-type", b"application/cloudevents+json")


def envelope(**members: object) -> bytes:
    """Return a good event in structured mode, with `members` changed or added."""
    event = {"specversion": "1.0", "id": "1", "source": "/", "type": "shape", "data": {}}
    return json.dumps(event | members).encode()


VALUES: dict[str, bytes | None] = {
    "a tombstone": None,
    "nothing": b"",
    "good": b'{"number": 1}',
    "null": b"null",
    "no JSON": b"\x00\x01\x02\xff",
    "no UTF-8": b'{"text": "\xff\xfe"}',
    "an encoded surrogate": b'{"text": "\xed\xa0\x80"}',
    "half a surrogate pair": b'{"text": "\\ud800", "names": {"\\udfff": 1}}',
    "NUL": b'{"text": "\\u0000", "names": {"a\\u0000": "x"}, "\\u0000": 1}',
    "raw NUL": b'{"text": "\x00"}',
    "a byte order mark": b'\xef\xbb\xbf{"number": 1}',
    "UTF-16": '{"number": 1}'.encode("utf-16"),
    "deep lists": b"[" * DEPTH + b"]" * DEPTH,
    "deep objects": b'{"any":' * DEPTH + b"1" + b"}" * DEPTH,
    "a deep tree": b'{"tree":' * DEPTH + b"null" + b"}" * DEPTH,
    "deep and open": b'{"tree":[' * DEPTH,
    "a long number": b'{"number": ' + b"9" * 500_000 + b"}",
    "a long fraction": b'{"real": 0.' + b"3" * 500_000 + b', "exact": 1e-999999999}',
    "a huge exponent": b'{"real": 1e999999999, "exact": 1e999999999, "number": 1e400}',
    "NaN": b'{"real": NaN, "exact": "NaN", "number": Infinity}',
    "a key twice": b'{"number": 1, "number": "x"}',
    "a mebibyte of text": b'{"text": "' + b"x" * (MEBIBYTE - 2_000) + b'"}',
    "many wrong members": b'{"numbers": [' + b'"x",' * 20_000 + b"1]}",
    "many wrong names": json.dumps(
        {"names": {"\0" + "n" * 90 + str(n): 0 for n in range(5_000)}}
    ).encode(),
    "times beyond time": b'{"time": 1e300, "span": 1e300, "day": "9999999-01-01"}',
    "an envelope": envelope(),
    "an envelope within": envelope(data=json.loads(envelope(data_base64="%"))),
    "an envelope of lists": envelope(id=[1], source={}, type=None, data=[]),
    "an envelope of numbers": envelope(id=10**400, time=1, sequence=-1),
    "an envelope with NUL": envelope(id="\0", type="\ud800", source="/\0"),
    "bad base 64": envelope(data=None, data_base64="\u00e9=?"),
}
"""Values by what is wrong with them."""


class Name(str):
    """The name of a header as another language's client may send it: any bytes."""

    def encode(self, *_: str) -> bytes:
        """Return the bytes that `surrogateescape` made it of."""
        return super().encode("utf-8", "surrogateescape")


HEADERS: dict[str, Headers] = {
    "names that are not UTF-8": binary((Name("\udcff\udc80"), b"x"), (Name("ce_\udcfftime"), None)),
    "none": [],
    "good": binary(),
    "another type": binary(type="nobody.takes.it"),
    "structured": [STRUCTURED],
    "structured, in capitals": [("Content-Type", b"APPLICATION/CLOUDEVENTS+JSON; charset=x")],
    "a batch": [("content-type", b"application/cloudevents-batch+json")],
    "without values": [(name, None) for name, _ in binary()],
    "twice": binary(("CE_ID", b"\xff"), ("ce_id", b"2")),
    "no UTF-8": binary(("ce_subject", b"\xff"), ("traceparent", b"\xff"), ("x", b"\xff")),
    "NUL": binary(("ce_source", b"\0"), ("baggage", b"\0")),
    "odd names": binary(("", b""), ("\0", b"\0"), ("\U0001f980" * 100, b"x"), ("x" * 9_000, None)),
    "a bad time": binary(("ce_time", b"0000-00-00T99:99:99+99:99")),
    "long": binary(("ce_id", b"i" * 100_000), ("ce_subject", b"s" * 100_000)),
}
"""Headers by what is wrong with them."""

_LARGE = 50_000
NASTY = [
    *(
        Nasty(headers, value)
        for name, headers in HEADERS.items()
        for value in VALUES.values()
        if len(value or b"") < _LARGE or name in ("good", "structured")
    ),
    *(
        Nasty(binary(), b"{}", key=key, timestamp=timestamp)
        for key in (None, b"", b"\xff\0", b"k" * 10_000)
        for timestamp in (0, 1, 253_402_300_800_000, 2**63 - 1)
    ),
]


def kafka_record(nasty: Nasty, offset: int, topic: str) -> ConsumerRecord[bytes, bytes]:
    """Return it as the client would."""
    head = tuple(nasty.headers)
    return ConsumerRecord(
        topic, 0, offset, nasty.timestamp, 0, nasty.key, nasty.value, None, 0, 0, head
    )


async def decisions(
    handlers: Handlers, topic: str, records: Sequence[ConsumerRecord[bytes, bytes]]
) -> Counter[str]:
    """Read them all, and return how many became what.

    Fails the test for a record that became nothing, or what can't be stored.
    """
    batch = await read(handlers, 0, records)
    assert batch.end == len(records)
    assert batch.anchor == (Anchor.of(records[-1]) if records else None)
    found: dict[int, str] = dict.fromkeys(batch.skipped, "skipped")
    for item in batch.items:
        message = item.message
        assert_it_can_be_stored(message)
        found[message.offset] = "taken" if item.fault is None else "invalid payload"
        if item.fault is not None:  # and nothing but the payload
            handlers.codec(topic).decode(records[message.offset])
            assert_it_can_be_told("invalid payload", item.fault)
    for one in batch.undecoded:
        assert one.record.offset not in found
        assert_it_can_be_told(one.reason, one.error)
        found[one.record.offset] = one.reason
    assert sorted(found) == list(range(len(records)))
    return Counter(found.values())


def assert_it_can_be_stored(message: Message) -> None:
    """Fail the test if PostgreSQL would refuse some text of the message."""
    for field in Message._fields:
        stored = getattr(message, field)
        if isinstance(stored, str):
            assert not UNSTORABLE.search(stored), field
    assert message.source
    assert message.id
    assert message.type
    assert len(message.hash) == 16


def assert_it_can_be_told(reason: str, error: BaseException) -> None:
    """Fail the test if the reason is a new one, or the text can't be stored or has no end."""
    assert reason in REASONS
    assert not UNSTORABLE.search(describe_error(error))
    assert len(describe_error(error)) <= TEXT_LIMIT
