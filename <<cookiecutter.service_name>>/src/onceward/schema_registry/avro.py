"""Avro: payloads become JSON and are made of it by fastavro, as `docs/schema-registry.md` says."""

import base64
import io
import json
import math
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import fastavro
import orjson
from confluent_kafka.schema_registry import Schema
from fastavro import _read_py as careful  # in Python, and with its limit of recursion

from .avro_shape import Shape
from .formats import Misfit, text_of

_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""As in JSON of Protobuf; Pydantic reads these strings, too."""


def _uuid_of(data: bytes, *schemas: object) -> UUID:
    return UUID(bytes=data)


def _decimal_of(data: bytes, schema: dict[Any, Any] | None, *schemas: object) -> Decimal:
    # Of a text, since arithmetic rounds; the limit of Python to digits of such a text remains.
    return Decimal(f"{int.from_bytes(data, signed=True)}E{-(schema or {}).get('scale', 0)}")


# The newer of the two types of a UUID, which fastavro does not know, and decimals, which it rounds
# to the schema's precision.
for _readers in (fastavro.read.LOGICAL_READERS, vars(careful)["LOGICAL_READERS"]):
    _readers["fixed-uuid"] = _uuid_of
    _readers["bytes-decimal"] = _readers["fixed-decimal"] = _decimal_of


class Avro:
    """A record, or a union of up to 64 records, by the writer's schema, read as the reader's."""

    kind = "AVRO"
    content_type = "application/avro"

    def __init__(
        self,
        schema: Schema,
        references: Mapping[str, Schema],
        reader_of: Callable[[str], "Avro | None"] = lambda name: None,
    ) -> None:
        """`reader_of` returns the schema as which a record of a name is to be read.

        Raises errors of any type for an invalid schema.
        """
        self._named: dict[str, Any] = {}
        for one in references.values():
            fastavro.parse_schema(json.loads(text_of(one)), named_schemas=self._named)
        parsed = fastavro.parse_schema(json.loads(text_of(schema)), named_schemas=self._named)
        self._is_union = isinstance(parsed, list)
        records = [self._record(one) for one in (parsed if self._is_union else [parsed])]
        if len(records) > 64:
            raise ValueError(f"a union of {len(records)} records: at most 64 are read")
        self._records = {one["name"]: one for one in records}
        self.names: Mapping[str, None] = dict.fromkeys(self._records)
        definitions = json.dumps(self._named)
        self._has_floats = '"float"' in definitions or '"double"' in definitions
        # fastavro's compiled reader has no limit, and ends the process in a deep recursion.
        shape = Shape(self._named)
        for definition in records:
            shape.takes_bytes(definition)
        compiled = fastavro.schemaless_reader
        self._reader = careful.schemaless_reader if shape.is_recursive else compiled
        self._readers: dict[str, dict[str, Any] | None] = {}
        for name in self.names:
            other = reader_of(name)
            own = None if other is None else other._records
            self._readers[name] = own and own.get(name, next(iter(own.values())))

    def _record(self, schema: Any) -> dict[str, Any]:
        """Return the definition of a record, complete in itself."""
        name = schema if isinstance(schema, str) else schema.get("name")
        found = self._named.get(name, {})
        if found.get("type") != "record":
            raise ValueError("events are records, or unions of records")
        return {**found, "__fastavro_parsed": True, "__named_schemas": self._named}

    def read(self, body: bytes, indexes: list[int] | None) -> tuple[str | None, bytes]:
        """Return the name of the record and its value as JSON. Raises `Misfit`."""
        name, body = self._branch_of(body)
        return name, self._json(name, body, self._readers[name])

    def as_written(self, body: bytes, data: bytes) -> bytes:
        """Return the value as JSON by the writer's schema alone. Raises `Misfit`.

        `data` is the JSON that `read` has returned.
        """
        name, body = self._branch_of(body)
        return data if self._readers[name] is None else self._json(name, body, None)

    def _branch_of(self, body: bytes) -> tuple[str, bytes]:
        """Return the name of a payload's record, and what is behind its number in a union."""
        names = list(self.names)
        if not self._is_union:
            return names[0], body
        if not body or body[0] % 2 or body[0] // 2 >= len(names):
            raise Misfit("the payload begins with no branch of the union")
        return names[body[0] // 2], body[1:]

    def _json(self, name: str, body: bytes, reader: dict[str, Any] | None) -> bytes:
        stream = io.BytesIO(body)
        try:
            value = self._reader(stream, self._records[name], reader)
            if stream.tell() < len(body):
                raise Misfit(f"{len(body) - stream.tell()} bytes are left behind the record")
            if self._has_floats:
                value = _without_nan(value)
            return orjson.dumps(value, default=_as_json, option=orjson.OPT_UTC_Z)
        except Misfit:
            raise
        except (EOFError, IndexError):
            raise Misfit("the payload ends too early") from None
        except Exception as error:  # of fastavro, which has no class for them; texts have values
            raise Misfit(f"it can't be read ({type(error).__name__})") from None

    def write(self, name: str, payload: bytes) -> bytes:
        """Return a record made of JSON. Raises `Misfit`."""
        stream = io.BytesIO()
        if self._is_union:
            stream.write(bytes([2 * list(self.names).index(name)]))
        schema = self._records[name]
        try:
            value = self._value(schema, json.loads(payload, parse_float=Decimal), "payload")
            fastavro.schemaless_writer(stream, schema, value, strict_allow_default=True)
        except Misfit:
            raise
        except Exception as error:
            raise Misfit(f"it can't be written ({type(error).__name__})") from None
        return stream.getvalue()

    def _value(self, schema: Any, value: Any, path: str) -> Any:
        """Return what fastavro writes for a value of JSON. Raises `Misfit`."""
        if isinstance(schema, str) and schema in self._named:
            schema = self._named[schema]
        if isinstance(schema, list):
            return self._branch(schema, value, path)
        kind = schema if isinstance(schema, str) else schema["type"]
        if isinstance(kind, list | dict):
            return self._value(kind, value, path)
        match kind, value:
            case "record", dict():
                return self._fields(schema, value, path)
            case "array", list():
                return [
                    self._value(schema["items"], one, f"{path}/{place}")
                    for place, one in enumerate(value)
                ]
            case "map", dict():
                return {
                    key: self._value(schema["values"], one, f"{path}/…")
                    for key, one in value.items()
                }
            case "enum", str() if value in schema["symbols"]:
                return value
        try:
            return _leaf(kind, schema if isinstance(schema, dict) else {}, value)
        except (TypeError, ValueError, ArithmeticError):
            logical = schema.get("logicalType", kind) if isinstance(schema, dict) else kind
            raise Misfit(f"{path}: the value is no {logical}") from None

    def _branch(self, branches: list[Any], value: Any, path: str) -> tuple[str, Any]:
        """Return the name of the one branch that fits, and the value; of a number the first."""
        fitting = []
        for branch in branches:
            try:
                fitting.append((_branch_name(branch), self._value(branch, value, path)))
            except Misfit as error:
                misfit = error
        if not fitting:
            raise misfit
        if len(fitting) > 1 and type(value) not in (int, Decimal):
            names = ", ".join(name for name, _ in fitting)
            raise Misfit(f"{path}: the value fits several branches of the union: {names}")
        return fitting[0]

    def _fields(self, schema: Any, value: dict[str, Any], path: str) -> dict[str, Any]:
        fields = {field["name"]: field for field in schema["fields"]}
        if extra := sorted(value.keys() - fields.keys()):
            raise Misfit(f"{path}: the schema has no field {extra[0]!r}")
        for name, field in fields.items():
            if name not in value and "default" not in field:
                raise Misfit(f"{path}: the field {name!r} is missing")
        return {
            name: self._value(fields[name]["type"], one, f"{path}/{name}")
            for name, one in value.items()
        }


def _leaf(kind: str, schema: Mapping[str, Any], value: Any) -> Any:
    """Return the value of a type without parts. Raises errors of several types for a misfit."""
    logical = schema.get("logicalType")
    match kind:
        case "null" if value is None:
            return None
        case "boolean" if isinstance(value, bool):
            return value
        case "int" | "long":
            if logical is not None and isinstance(value, str):
                return _moment(logical, value)
            limit = 2 ** (31 if kind == "int" else 63)
            if type(value) is int and -limit <= value < limit:
                return value
        case "float" | "double":
            if value in _FLOATS or type(value) in (int, Decimal):
                return _FLOATS[value] if value in _FLOATS else float(value)
        case "string" if isinstance(value, str):
            return value
        case "bytes" | "fixed" if logical == "decimal":
            if type(value) in (int, str, Decimal) and (number := Decimal(value)).is_finite():
                return number
        case "bytes" | "fixed" if isinstance(value, str):
            if logical == "uuid":
                return UUID(value).bytes
            return base64.b64decode(value.replace("-", "+").replace("_", "/"), validate=True)
    raise ValueError


def _branch_name(branch: Any) -> str:
    """Return the name by which fastavro's writer finds a branch."""
    if isinstance(branch, str):
        return branch
    name: str = branch.get("name", branch["type"])
    return name


def _moment(logical: str, value: str) -> date | time | datetime:
    if logical == "date":
        return date.fromisoformat(value)
    if logical.startswith("time-"):
        return time.fromisoformat(value)
    moment = datetime.fromisoformat(value)
    if (moment.tzinfo is None) != logical.startswith("local-"):
        raise ValueError
    return moment


def _as_json(value: object) -> str:
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError


def _without_nan(value: Any) -> Any:
    """Return the value with strings for the numbers that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return next(name for name, one in _FLOATS.items() if one == value or value != value)
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
    return value
