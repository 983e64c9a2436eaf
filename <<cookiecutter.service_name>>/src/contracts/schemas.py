"""The JSON Schema of an event, with what Pydantic's own leaves out."""

from typing import Any, Literal

from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from operate.errors import Refused
from pipeline.events.event import Event, Tombstone

Schema = dict[str, Any]
Mode = Literal["validation", "serialization"]

KEYS = "x-keys"
"""Schema of the keys of an object, where they are not any text."""
LIMITS = "x-limits"
"""Limits that JSON Schema has no keyword for."""

_DIGITS = {"max_digits": "maxDigits", "decimal_places": "decimalPlaces"}
_LIMITS_OF_DECIMALS = {
    **_DIGITS,
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
_LIMITS_OF_TIMES = ("ge", "gt", "le", "lt", "now_op", "tz_constraint")


class _Generator(GenerateJsonSchema):
    """Generates JSON Schema that also shows the limits of decimals, times and keys."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def field_is_required(
        self,
        field: core_schema.ModelField | core_schema.DataclassField | core_schema.TypedDictField,
        total: bool,
    ) -> bool:
        """Return whether the field is always there: of what is written, also one with a default."""
        if self.mode == "serialization" and field["type"] != "typed-dict-field":
            return field.get("serialization_exclude_if") is None
        return super().field_is_required(field, total)

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> Schema:
        """Return a schema whose strings have the format `decimal`."""
        made = super().decimal_schema(schema)
        for one in made.get("anyOf", [made]):
            names = _LIMITS_OF_DECIMALS if one["type"] == "string" else _DIGITS
            one.update(_limits(schema, names))
            if one["type"] == "string":
                one.pop("pattern", None)  # of digits, which the format and the limits say
                one["format"] = "decimal"
        return made

    def datetime_schema(self, schema: core_schema.DatetimeSchema) -> Schema:
        """Return a schema with the limits of times."""
        return super().datetime_schema(schema) | _limits(schema)

    def date_schema(self, schema: core_schema.DateSchema) -> Schema:
        """Return a schema with the limits of dates."""
        return super().date_schema(schema) | _limits(schema)

    def time_schema(self, schema: core_schema.TimeSchema) -> Schema:
        """Return a schema with the limits of times of day."""
        return super().time_schema(schema) | _limits(schema)

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> Schema:
        """Return a schema with the limits of durations."""
        return super().timedelta_schema(schema) | _limits(schema)

    def dict_schema(self, schema: core_schema.DictSchema) -> Schema:
        """Return a schema with that of the keys."""
        made = super().dict_schema(schema)
        keys = self.generate_inner(schema["keys_schema"]) if "keys_schema" in schema else {}
        keys.pop("title", None)
        if keys in ({}, {"type": "string"}):
            return made
        for values in made.pop("patternProperties", {}).values():
            made["additionalProperties"] = values
            made["propertyNames"] = {"pattern": keys["pattern"]}
        return {**made, KEYS: keys}


def _limits(schema: Any, names: dict[str, str] | None = None) -> Schema:
    names = names or dict(zip(_LIMITS_OF_TIMES, _LIMITS_OF_TIMES, strict=True))
    found = {names[name]: str(schema[name]) for name in names if schema.get(name) is not None}
    return {LIMITS: found} if found else {}


def schema_of(event: type[Event], mode: Mode) -> Schema:
    """Return the JSON Schema of the payload, as it is taken ("validation") or published.

    Raises `Refused` if a type of the event has none.
    """
    if event is Tombstone:
        return {"title": "Tombstone", "type": "null"}
    by_alias = mode == "validation" or event.model_config.get("serialize_by_alias") is True
    try:
        return event.model_json_schema(by_alias, schema_generator=_Generator, mode=mode)
    except PydanticUserError as error:
        raise Refused(
            f"{event.__name__} has no JSON Schema ({error.message}): give the type of the field"
            " one, by Annotated[…, WithJsonSchema({…})]"
        ) from error
