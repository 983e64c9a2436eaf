"""The interface of a format, and JSON Schema, the simplest one."""

import json
from collections.abc import Mapping
from decimal import Decimal, localcontext
from typing import Any, Protocol

from confluent_kafka.schema_registry import Schema
from jsonschema import TypeChecker
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7, specification_with

from onceward.errors import OncewardError

_DIGITS = 5_000
"""More than a whole number of JSON has here: Python parses 4,300."""


class Misfit(OncewardError, ValueError):
    """A payload does not fit its schema; the text has the place in it, and none of its values."""


class Format(Protocol):
    """A schema that is parsed: it reads and writes the payloads of records."""

    kind: str
    """The registry's name of the format: AVRO, PROTOBUF or JSON."""
    content_type: str

    @property
    def names(self) -> Mapping[str, list[int] | None]:
        """Full names of the records that it describes, each with its message indexes in Protobuf:
        the place of each message in the one around it."""
        ...

    def read(self, body: bytes, indexes: list[int] | None) -> tuple[str | None, bytes]:
        """Return the full name of the record and the payload as JSON. Raises `Misfit`."""
        ...

    def write(self, name: str, payload: bytes) -> bytes:
        """Return a payload that is JSON in this format, as a record of this name. Raises
        `Misfit`."""
        ...


def text_of(schema: Schema) -> str:
    """Return the text of a schema."""
    if not schema.schema_str:
        raise ValueError("the schema is empty")
    return schema.schema_str


class JsonSchema:
    """Payloads are JSON, and valid by a JSON Schema; its title is the name of the record."""

    kind = "JSON"
    content_type = "application/octet-stream"
    """With the id in front of it, it is no JSON."""

    def __init__(self, schema: Schema, references: Mapping[str, Schema]) -> None:
        """Raises errors of any type for an invalid schema."""
        text = text_of(schema)
        contents = json.loads(text)
        kind = validator_for(contents)
        kind.check_schema(contents)
        # Without a way to retrieve others: what is not referenced in the registry is an error.
        resources: Registry[Any] = Registry().with_resources(
            (name, _resource(text_of(one))) for name, one in references.items()
        )
        exact = extend(kind, type_checker=_types(kind.TYPE_CHECKER))
        self._validator: Validator = exact(_exact(text), registry=resources)
        title = contents.get("title") if isinstance(contents, dict) else None
        self.names: Mapping[str, None] = {str(title): None} if title else {}

    def read(self, body: bytes, indexes: list[int] | None) -> tuple[str | None, bytes]:
        """Return the title of the schema, and the payload as it is. Raises `Misfit`."""
        self._check(body)
        return next(iter(self.names), None), body

    def write(self, name: str, payload: bytes) -> bytes:
        """Return the payload as it is. Raises `Misfit`."""
        self._check(payload)
        return payload

    def _check(self, payload: bytes) -> None:
        try:
            value = json.loads(payload, parse_float=Decimal)
            with localcontext(prec=_DIGITS):
                error = next(self._validator.iter_errors(value), None)
        except RecursionError:
            raise Misfit("it is nested too deeply") from None
        except ValueError as wrong:
            raise Misfit(f"it is not JSON ({type(wrong).__name__})") from None
        except Exception as wrong:  # a reference that can't be resolved, of no public class
            raise Misfit(f"it can't be checked by its schema ({type(wrong).__name__})") from None
        if error is not None:
            place = "/".join(map(str, error.absolute_path)) or "payload"
            raise Misfit(f"{place}: the schema's {error.validator!r} is not fulfilled")


def _exact(text: str) -> Any:
    """Return a schema whose numbers keep their digits.

    Without its `$schema`, by which jsonschema would choose a validator that knows no decimals.
    """
    contents = json.loads(text, parse_float=Decimal)
    if isinstance(contents, dict):
        contents.pop("$schema", None)
    return contents


def _resource(text: str) -> Resource[Any]:
    contents = json.loads(text)
    dialect = contents.get("$schema") if isinstance(contents, dict) else None
    specification = specification_with(dialect or "", default=DRAFT7)
    return specification.create_resource(_exact(text))


def _types(checker: TypeChecker) -> TypeChecker:
    """Return the types of a draft, in which a `Decimal` is a number, too."""
    has_integral_floats = checker.is_type(1.0, "integer")

    def is_number(_: object, value: object) -> bool:
        return isinstance(value, Decimal) or bool(checker.is_type(value, "number"))

    def is_integer(_: object, value: object) -> bool:
        if isinstance(value, Decimal):
            return has_integral_floats and bool(value == value.to_integral_value())
        return bool(checker.is_type(value, "integer"))

    return checker.redefine_many({"number": is_number, "integer": is_integer})
