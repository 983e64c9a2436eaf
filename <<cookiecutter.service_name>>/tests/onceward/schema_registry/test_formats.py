"""Formats without a registry: what becomes of values, and of payloads that do not fit."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema

from onceward.schema_registry.avro import Avro
from onceward.schema_registry.formats import Format, JsonSchema, Misfit
from onceward.schema_registry.framing import HEADER, Unframed, key_of, parse
from onceward.schema_registry.protobuf import Protobuf

from .shop import NAME, ORDER, SCHEMAS, OrderPlaced, avro, kafka_record, record

PARSERS: dict[str, type[Any]] = {"AVRO": Avro, "PROTOBUF": Protobuf, "JSON": JsonSchema}
KINDS = pytest.mark.parametrize("kind", PARSERS)


def parsed(schema: Schema, references: dict[str, Schema] | None = None) -> Format:
    """Return the schema as a codec has it."""
    format: Format = PARSERS[schema.schema_type or ""](schema, references or {})
    return format


def field(type: object, **more: object) -> Format:
    """Return a record with one field `it`."""
    return parsed(record("R", {"name": "it", "type": type, **more}))


def read(format: Format, body: bytes) -> Any:
    """Return the field `it` of a record."""
    return json.loads(format.read(body, None)[1])["it"]


def written(format: Format, value: object) -> Any:
    """Return what is read of the field `it` that was written."""
    return read(format, format.write("R", json.dumps({"it": value}).encode()))


@KINDS
def test_an_event_survives_a_schema_with_all_its_digits(kind: str) -> None:
    format = parsed(SCHEMAS[kind])
    body = format.write(NAME, ORDER.model_dump_json().encode())
    name, data = format.read(body, format.names[NAME])
    assert name == NAME
    assert OrderPlaced.model_validate_json(data) == ORDER
    assert str(OrderPlaced.model_validate_json(data).price) == str(ORDER.price)


@pytest.mark.parametrize(
    ("type", "value", "found"),
    [
        ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, 1.5, "1.50"),
        (
            {
                "type": "fixed",
                "name": "F",
                "size": 8,
                "logicalType": "decimal",
                "precision": 9,
                "scale": 2,
            },
            "-0.01",
            "-0.01",
        ),
        ({"type": "int", "logicalType": "date"}, "2026-01-31", "2026-01-31"),
        ({"type": "int", "logicalType": "time-millis"}, "01:02:03.004", "01:02:03.004000"),
        (
            {"type": "long", "logicalType": "timestamp-millis"},
            "2026-01-01T01:00:00.123+01:00",
            "2026-01-01T00:00:00.123000Z",
        ),
        (
            {"type": "long", "logicalType": "local-timestamp-micros"},
            "2026-01-01T00:00:00",
            "2026-01-01T00:00:00",
        ),
        (
            {"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"},
            "8ffd705c-c55a-4ce3-9bc0-4b2647519b3e",
            "8ffd705c-c55a-4ce3-9bc0-4b2647519b3e",
        ),
        ("bytes", "_-8=", "/+8="),
        ("double", "NaN", "NaN"),
        ({"type": "array", "items": "float"}, ["-Infinity", 1], ["-Infinity", 1.0]),
        ("long", 2**63 - 1, 2**63 - 1),
        ({"type": "map", "values": "boolean"}, {"a": True}, {"a": True}),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", "B"),
        (["null", "string", "int"], 5, 5),
        (["null", "string", "int"], None, None),
    ],
)
def test_values_of_avro_become_what_pydantic_reads(type: object, value: Any, found: Any) -> None:
    assert written(field(type), value) == found


@pytest.mark.parametrize(
    ("type", "value"),
    [
        ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, "NaN"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, "1.234"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 2}, "123.45"),
        ({"type": "long", "logicalType": "timestamp-millis"}, "2026-01-01T00:00:00"),
        ({"type": "long", "logicalType": "local-timestamp-millis"}, "2026-01-01T00:00:00Z"),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "C"),
        ("int", 2**31),
        ("int", True),
        ("int", 1.0),
        ("long", "1"),
        ("boolean", 1),
        ("bytes", "é"),
        ("double", "1"),
        ("string", None),
        (["null", "int"], "x"),
        ({"type": "array", "items": "int"}, {"a": 1}),
    ],
)
def test_values_that_do_not_fit_avro_are_refused(type: object, value: Any) -> None:
    with pytest.raises(Misfit) as caught:
        written(field(type), value)
    assert str(value) not in str(caught.value).removeprefix("payload/it")


def test_fields_that_a_schema_lacks_or_requires_are_named() -> None:
    format = field("int")
    with pytest.raises(Misfit, match="no field 'other'"):
        format.write("R", b'{"it": 1, "other": 2}')
    with pytest.raises(Misfit, match="'it' is missing"):
        format.write("R", b"{}")
    assert written(field("int", default=7), 3) == 3
    assert read(field("int", default=7), field("int", default=7).write("R", b"{}")) == 7


@KINDS
@pytest.mark.parametrize("harm", ["short", "garbage"])
def test_payloads_that_do_not_fit_their_schema_are_misfits(kind: str, harm: str) -> None:
    format = parsed(SCHEMAS[kind])
    body = format.write(NAME, ORDER.model_dump_json().encode())
    broken = {"short": body[:-1], "garbage": b"\xff" * 40}[harm]
    with pytest.raises(Misfit):
        format.read(broken, format.names[NAME])


@pytest.mark.parametrize("kind", ["AVRO", "JSON"])
def test_an_empty_payload_is_a_misfit(kind: str) -> None:
    with pytest.raises(Misfit):
        parsed(SCHEMAS[kind]).read(b"", None)


def test_an_empty_message_of_protobuf_has_the_defaults_of_all_its_fields() -> None:
    format = parsed(SCHEMAS["PROTOBUF"])
    data = json.loads(format.read(b"", format.names[NAME])[1])
    assert (data["order_id"], data["weight"], data["lines"]) == ("", 0.0, [])


FIXED = {"type": "fixed", "name": "F", "size": 8}
MONEY = {"logicalType": "decimal", "precision": 6, "scale": 2}
LIST = {"name": "next", "type": ["null", "L"]}


@pytest.mark.parametrize("more", [[], [LIST]], ids=["compiled", "careful"])
@pytest.mark.parametrize(
    ("number", "found"),
    [(123456789, "1234567.89"), (-(2**63), "-92233720368547758.08"), (5, "0.05")],
)
def test_decimals_beyond_the_precision_of_the_schema_keep_all_digits(
    more: list[dict[str, Any]], number: int, found: str
) -> None:
    raw, end = number.to_bytes(8, signed=True), b"\0" * len(more)
    for type, body in (({"type": "bytes"}, b"\x10" + raw), (FIXED, raw)):
        format = parsed(record("L", {"name": "it", "type": {**type, **MONEY}}, *more))
        assert read(format, body + end) == found


@pytest.mark.parametrize(
    "items",
    [
        "null",
        {"type": "null"},
        {"type": "record", "name": "E", "fields": []},
        {"type": "record", "name": "E", "fields": [{"name": "n", "type": "null"}]},
        {"type": "fixed", "name": "E", "size": 0},
    ],
)
def test_an_array_whose_items_take_no_bytes_is_refused(items: object) -> None:
    array = {"type": "array", "items": items}
    for type in (array, ["null", array], {"type": "map", "values": array}):
        with pytest.raises(ValueError, match="array whose items take no bytes"):
            field(type)


def test_a_schema_is_parsed_in_the_time_that_its_size_takes() -> None:
    text: object = {"type": "record", "name": "R200", "fields": [{"name": "x", "type": "int"}]}
    refers: dict[str, Schema] = {"R200": avro(text)}
    for number in range(199, -1, -1):
        both = [{"name": name, "type": ["null", f"R{number + 1}"]} for name in "ab"]
        refers[f"R{number}"] = record(f"R{number}", *both)
    main = refers.pop("R0")
    with seconds(30):  # two to the power of 200 steps would not end
        format = parsed(main, refers)
    assert format.read(b"\0\0", None)[1] == b'{"a":null,"b":null}'


@contextmanager
def seconds(limit: int) -> Iterator[None]:
    """Fail if a block takes longer."""

    def late(*_: object) -> None:
        raise AssertionError(f"it takes longer than {limit} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_union_is_written_by_the_only_branch_that_fits() -> None:
    one = {"type": "record", "name": "A", "fields": [{"name": "a", "type": "int", "default": 1}]}
    two = {**one, "name": "B", "fields": [*one["fields"], {"name": "b", "type": "int"}]}
    assert written(field([one, two]), {"a": 3, "b": 4}) == {"a": 3, "b": 4}
    assert written(field(["bytes", "string"]), "no base64!") == "no base64!"
    assert written(field(["int", "double"]), 5) == 5
    for type, value in ((["bytes", "string"], "abcd"), ([{**two, "fields": []}, one], {})):
        with pytest.raises(Misfit, match="payload/it: the value fits several branches"):
            written(field(type), value)


def test_bytes_behind_a_record_of_avro_are_a_misfit() -> None:
    format = field("int")
    with pytest.raises(Misfit, match="1 bytes are left"):
        format.read(format.write("R", b'{"it": 1}') + b"\0", None)


def test_a_payload_that_is_nested_deeply_does_not_end_the_process() -> None:
    format = parsed(record("L", {"name": "next", "type": ["null", "L"]}))
    assert json.loads(format.read(b"\x02\x00", None)[1]) == {"next": {"next": None}}
    with pytest.raises(Misfit, match="RecursionError"):
        format.read(b"\x02" * 500_000 + b"\x00", None)
    with pytest.raises(Misfit, match="nested"):
        parsed(Schema('{"type": "array"}', "JSON")).read(b"[" * 500_000, None)


def test_a_union_of_records_tells_its_branches_apart() -> None:
    other = record("shop.A", {"name": "it", "type": "int"})
    union = ["shop.A", {"type": "record", "name": "shop.B", "fields": [*_a_and_b()]}]
    format = parsed(avro(union), {"shop.A": other})
    assert list(format.names) == ["shop.A", "shop.B"]
    for name, payload in (("shop.A", b'{"it":1}'), ("shop.B", b'{"a":{"it":1}}')):
        assert format.read(format.write(name, payload), None) == (name, payload)
    with pytest.raises(Misfit, match="no branch"):
        format.read(b"\x04\x02", None)


def _a_and_b() -> list[dict[str, str]]:
    return [{"name": "a", "type": "shop.A"}]


@pytest.mark.parametrize(
    "schema", ['"string"', '["null", "int"]', '{"type":"enum","name":"E","symbols":["A"]}', "what"]
)
def test_a_schema_of_avro_that_describes_no_record_is_refused(schema: str) -> None:
    with pytest.raises(ValueError, match=r"events are records|line 1"):
        parsed(Schema(schema, "AVRO"))


def test_messages_of_protobuf_are_found_by_their_indexes() -> None:
    imported = Schema('syntax = "proto3"; package x; message R { double it = 1; }', "PROTOBUF")
    format = parsed(
        Schema(
            'syntax = "proto3"; package shop; import "x/r.proto";'
            ' import "confluent/type/decimal.proto";'
            " message A { string a = 1; message N { x.R r = 1; confluent.type.Decimal d = 2; } }",
            "PROTOBUF",
        ),
        {"x/r.proto": imported},
    )
    assert format.names == {"shop.A": [0], "shop.A.N": [0, 0]}
    body = format.write("shop.A.N", b'{"r": {"it": "NaN"}}')
    assert format.read(body, [0, 0]) == ("shop.A.N", b'{"r": {"it": "NaN"}}')
    with pytest.raises(Misfit, match=r"no message at the indexes \[3\]"):
        format.read(body, [3])
    with pytest.raises(Misfit) as caught:
        format.write("shop.A.N", b'{"r": {"it": "a secret"}}')
    assert "secret" not in str(caught.value)


def test_a_file_that_protobuf_imports_stays_in_its_folder() -> None:
    for name in NO_FILES:
        with pytest.raises(ValueError, match="no name of a file"):
            Protobuf(SCHEMAS["PROTOBUF"], {name: SCHEMAS["PROTOBUF"]})
    with pytest.raises(ValueError, match="a file and of a folder"):
        Protobuf(SCHEMAS["PROTOBUF"], dict.fromkeys(["x.proto", "x.proto/y.proto"], FILE))


FILE = Schema('syntax = "proto3";', "PROTOBUF")
NO_FILES = [
    *("../../x.proto", "--x", "--x.proto", "@x", "@x.proto", "/x.proto", "", "x", "a b.proto"),
    *("x.proto\n", "x\0.proto", "--plugin=protoc-gen-x=/tmp/x.proto", "x" * 250 + ".proto"),
]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "multipleOf": 0.01},
        {"$schema": "http://json-schema.org/draft-04/schema#", "multipleOf": 0.01},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$ref": "#/$defs/a"}
        | {"$defs": {"a": {"type": "number", "multipleOf": 0.01}}},
        {"$ref": "a.json"},
    ],
)
def test_numbers_of_json_are_checked_with_all_their_digits(schema: dict[str, Any]) -> None:
    draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
    text = json.dumps({**draft, "type": "number", "multipleOf": 0.01})
    it = json.dumps({"properties": {"it": schema}, **_dialect(schema)})
    format = parsed(Schema(it, "JSON"), {"a.json": Schema(text, "JSON")})
    for number in ("0.07", "0.14", "1.1", "5", "1e30", "9" * 40 + ".01", "-0.29"):
        assert format.read(f'{{"it": {number}}}'.encode(), None)[0] is None
    for number in ("0.071", "9" * 40 + ".001", "1e-3"):
        with pytest.raises(Misfit, match="'multipleOf'"):
            format.read(f'{{"it": {number}}}'.encode(), None)


def _dialect(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: schema.pop(name) for name in ("$schema", "$defs") if name in schema}


def test_json_numbers_with_a_point_are_integers_if_the_draft_says_so() -> None:
    for draft, fits in (("draft-04", False), ("draft-07", True)):
        dialect = {"$schema": f"http://json-schema.org/{draft}/schema#"}
        schema = json.dumps({**dialect, "properties": {"it": {"type": "integer"}}})
        format = parsed(Schema(schema, "JSON"))
        with nullcontext() if fits else pytest.raises(Misfit):
            format.read(b'{"it": 1.0}', None)
        with pytest.raises(Misfit):
            format.read(b'{"it": 1.5}', None)


def test_json_is_checked_and_its_errors_quote_no_value() -> None:
    format = parsed(SCHEMAS["JSON"])
    with pytest.raises(Misfit, match=r"order_id: the schema's 'type'") as caught:
        format.read(b'{"order_id": 4711, "price": 1}', None)
    assert "4711" not in str(caught.value)
    with pytest.raises(Misfit, match="'required'"):
        format.write(NAME, b'{"order_id": "o"}')


def test_references_of_json_schema_are_those_of_the_registry_and_no_others() -> None:
    schema = Schema('{"properties": {"a": {"$ref": "a.json"}}}', "JSON")
    format = parsed(schema, {"a.json": Schema('{"type": "integer"}', "JSON")})
    assert format.read(b'{"a": 1}', None) == (None, b'{"a": 1}')
    with pytest.raises(Misfit):
        format.read(b'{"a": "1"}', None)
    with pytest.raises(Misfit, match="can't be checked by its schema"):
        parsed(schema).read(b'{"a": 1}', None)


GUID = bytes(range(16))


def test_the_schema_is_named_by_prefix_or_header_by_id_or_guid() -> None:
    assert parse(kafka_record(b"\0\0\0\1\0x"), "AVRO") == (256, None, b"x")
    assert parse(kafka_record(b"\1" + GUID + b"x"), "JSON")[2] == b"x"
    frame = parse(kafka_record(b"x", [(HEADER, b"\1" + GUID)]), "AVRO")
    assert (getattr(frame.key, "bytes", None), frame.body) == (GUID, b"x")
    assert parse(kafka_record(b"\0\0\0\0\7\0x"), "PROTOBUF") == (7, [0], b"x")
    assert parse(kafka_record(b"\0\0\0\0\7\4\2\4x"), "PROTOBUF") == (7, [1, 2], b"x")
    frame = parse(kafka_record(b"x", [(HEADER, b"\1" + GUID + b"\2\2")]), "PROTOBUF")
    assert frame[1:] == ([1], b"x")


@pytest.mark.parametrize(
    "value", [b"", b"\0", b"\0\0\0\0", b'{"a": 1}', b"\1" + GUID[:15], b"\xff" * 90]
)
def test_records_that_name_no_schema_are_unframed(value: bytes) -> None:
    with pytest.raises(Unframed, match="the payload does not begin with the id of a schema"):
        key_of(kafka_record(value))
    with pytest.raises(Unframed, match=HEADER):
        key_of(kafka_record(b"x", [(HEADER, value or b"\0")]))


def test_record_indexes_are_parsed_only_up_to_the_longest_frame() -> None:
    indexes = b"\x02" * 120  # as many as there are: -1, in zigzag
    assert (
        parse(kafka_record(b"\0\0\0\0\7\xf0\1" + indexes + b"x"), "PROTOBUF").indexes == [1] * 120
    )
    with pytest.raises(Unframed):  # 100,000 of them, all there
        parse(kafka_record(b"\0\0\0\0\7\xc0\x9a\x0c" + b"\x02" * 100_001), "PROTOBUF")
