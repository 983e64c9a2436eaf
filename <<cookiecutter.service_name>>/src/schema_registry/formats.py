"""The interface of a format, and JSON Schema, the simplest one."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from confluent_kafka.schema_registry import Schema
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7


class Misfit(ValueError):
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
        contents = json.loads(text_of(schema))
        # Without a way to retrieve others: what is not referenced in the registry is an error.
        resources: Registry[Any] = Registry().with_resources(
            (name, Resource.from_contents(json.loads(text_of(one)), DRAFT7))
            for name, one in references.items()
        )
        kind = validator_for(contents)
        kind.check_schema(contents)
        self._validator: Validator = kind(contents, registry=resources)
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
            error = next(self._validator.iter_errors(json.loads(payload)), None)
        except RecursionError:
            raise Misfit("it is nested too deeply") from None
        except ValueError as wrong:
            raise Misfit(f"it is no JSON ({type(wrong).__name__})") from None
        except Exception as wrong:  # a reference that can't be resolved, of no public class
            raise Misfit(f"it can't be checked by its schema ({type(wrong).__name__})") from None
        if error is not None:
            place = "/".join(map(str, error.absolute_path)) or "payload"
            raise Misfit(f"{place}: the schema's {error.validator!r} is not fulfilled")
