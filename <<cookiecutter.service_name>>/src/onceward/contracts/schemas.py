"""The JSON Schema of an event, with limits and aliases that Pydantic's own leaves out."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from onceward.cli.errors import Refused
from onceward.events.event import Event, Tombstone

Schema = dict[str, Any]
Mode = Literal["validation", "serialization"]

KEYS = "x-keys"
"""Schema of an object's keys, if they are not arbitrary strings."""
LIMITS = "x-limits"
"""Limits that JSON Schema has no keyword for."""
ALIASES = "x-aliases"
"""An object's members with aliases: their other names, by the name in `properties`."""
PATHS = "x-paths"
"""An object's members that are read from inside of others, with their paths."""

_DIGITS = {"max_digits": "maxDigits", "decimal_places": "decimalPlaces"}
_LIMITS_OF_DECIMALS = {
    **_DIGITS,
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
_Field = core_schema.ModelField | core_schema.DataclassField | core_schema.TypedDictField
_LIMITS_OF_TIMES = {one: one for one in ("ge", "gt", "le", "lt", "now_op", "tz_constraint")}
_OPTIONS = {
    "strict": "strict",
    "allow_inf_nan": "allow_inf_nan",
    "strip_whitespace": "str_strip_whitespace",
}
"""Options of types by which a reader rejects more, and their names in `model_config`."""


class _Generator(GenerateJsonSchema):
    """Generates JSON Schema with the limits and aliases of each model."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012
    _takes_names: Any = False

    def field_is_required(
        self,
        field: _Field,
        total: bool,
    ) -> bool:
        """Whether the field is always present; in written payloads, also one with a default."""
        if self.mode == "serialization" and field["type"] != "typed-dict-field":
            return field.get("serialization_exclude_if") is None
        return super().field_is_required(field, total)

    def model_schema(self, schema: core_schema.ModelSchema) -> Schema:
        """Return a schema with aliases if the model itself is configured to use them."""
        config = schema["cls"].model_config
        with self._aliases_of(config):
            return super().model_schema(schema)

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> Schema:
        """Return a schema with aliases if the dataclass itself is configured to use them."""
        config = getattr(schema["cls"], "__pydantic_config__", {})
        with self._aliases_of(config):
            return super().dataclass_schema(schema)

    @contextmanager
    def _aliases_of(self, config: Any) -> Iterator[None]:
        before = self.by_alias, self._takes_names
        if self.mode == "validation":
            self.by_alias = config.get("validate_by_alias") is not False
        else:
            self.by_alias = config.get("serialize_by_alias") is True
        self._takes_names = any(map(config.get, ("validate_by_name", "populate_by_name")))
        try:
            yield
        finally:
            self.by_alias, self._takes_names = before

    def model_fields_schema(self, schema: core_schema.ModelFieldsSchema) -> Schema:
        """Return a schema with all names under which members are read."""
        return super().model_fields_schema(schema) | self._names(schema["fields"].items())

    def dataclass_args_schema(self, schema: core_schema.DataclassArgsSchema) -> Schema:
        """Return a schema with all names under which members are read."""
        fields = [(one["name"], one) for one in schema["fields"]]
        return super().dataclass_args_schema(schema) | self._names(fields)

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> Schema:
        """Return a schema with all names under which members are read."""
        return super().typed_dict_schema(schema) | self._names(schema["fields"].items())

    def _names(self, fields: Iterable[tuple[str, _Field]]) -> Schema:
        aliases: dict[str, list[str]] = {}
        paths: dict[str, str] = {}
        for name, field in fields if self.mode == "validation" and self.by_alias else ():
            given: Any = field.get("validation_alias", name)
            given = [given] if isinstance(given, str) else given
            choices = given if isinstance(given[0], list) else [given]
            known = [one[0] for one in choices if len(one) == 1]
            shown = known[0] if known else name
            others = known[1:] + [name] * (self._takes_names and name not in known)
            if others and others != [shown]:
                aliases[shown] = others
            nested = [".".join(map(str, one)) for one in choices if len(one) > 1]
            if nested:
                paths[shown] = ", ".join(nested)
        return {key: found for key, found in ((ALIASES, aliases), (PATHS, paths)) if found}

    def bool_schema(self, schema: core_schema.BoolSchema) -> Schema:
        """Return a schema with its strictness."""
        return super().bool_schema(schema) | self._limits(schema, "strict")

    def int_schema(self, schema: core_schema.IntSchema) -> Schema:
        """Return a schema with its strictness."""
        return super().int_schema(schema) | self._limits(schema, "strict")

    def float_schema(self, schema: core_schema.FloatSchema) -> Schema:
        """Return a schema with its strictness, and whether it excludes infinity."""
        return super().float_schema(schema) | self._limits(schema, "strict", "allow_inf_nan")

    def str_schema(self, schema: core_schema.StringSchema) -> Schema:
        """Return a schema that says whether white space is stripped."""
        return super().str_schema(schema) | self._limits(schema, "strip_whitespace")

    def complex_schema(self, schema: core_schema.ComplexSchema) -> Schema:
        """Return a schema with a format."""
        return super().complex_schema(schema) | {"format": "complex"}

    def bytes_schema(self, schema: core_schema.BytesSchema) -> Schema:
        """Return a schema whose format is that of the text in JSON."""
        config = self._config
        encoding = config.val_json_bytes if self.mode == "validation" else config.ser_json_bytes
        formats = {"base64": "base64url", "hex": "hex"}
        return super().bytes_schema(schema) | {"format": formats.get(encoding, "binary")}

    def url_schema(self, schema: core_schema.UrlSchema) -> Schema:
        """Return a schema with the schemes that are allowed."""
        schemes = " ".join(sorted(schema.get("allowed_schemes") or ()))
        return super().url_schema(schema) | ({LIMITS: {"schemes": schemes}} if schemes else {})

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> Schema:
        """Return a schema whose strings have the format `decimal`."""
        made = super().decimal_schema(schema)
        for one in made.get("anyOf", [made]):
            names = _LIMITS_OF_DECIMALS if one["type"] == "string" else _DIGITS
            one.pop(LIMITS, None)  # options of floats and strings
            one.update(self._limits(schema, names=names))
            if one["type"] == "string":
                one.pop("pattern", None)  # replaced by the format and the limits
                one["format"] = "decimal"
        return made

    def datetime_schema(self, schema: core_schema.DatetimeSchema) -> Schema:
        """Return a schema with the limits of times."""
        return super().datetime_schema(schema) | self._times(schema)

    def date_schema(self, schema: core_schema.DateSchema) -> Schema:
        """Return a schema with the limits of dates."""
        return super().date_schema(schema) | self._times(schema)

    def time_schema(self, schema: core_schema.TimeSchema) -> Schema:
        """Return a schema with the limits of times of day."""
        return super().time_schema(schema) | self._times(schema)

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> Schema:
        """Return a schema with the limits of durations."""
        return super().timedelta_schema(schema) | self._times(schema)

    def _times(self, schema: Any) -> Schema:
        return self._limits(schema, "strict", names=_LIMITS_OF_TIMES)

    def _limits(self, schema: Any, *options: str, names: Mapping[str, str] = {}) -> Schema:
        found: Schema = {
            names[name]: str(schema[name]) for name in names if schema.get(name) is not None
        }
        for name in options:
            value = schema.get(name)
            value = getattr(self._config, _OPTIONS[name]) if value is None else value
            if value is (name != "allow_inf_nan"):
                found[name] = value
        return {LIMITS: found} if found else {}

    def dict_schema(self, schema: core_schema.DictSchema) -> Schema:
        """Return a schema with the schema of its keys."""
        made = super().dict_schema(schema)
        keys = self.generate_inner(schema["keys_schema"]) if "keys_schema" in schema else {}
        keys.pop("title", None)
        if keys in ({}, {"type": "string"}):
            return made
        for values in made.pop("patternProperties", {}).values():
            made["additionalProperties"] = values
            made["propertyNames"] = {"pattern": keys["pattern"]}
        return {**made, KEYS: keys}


def schema_of(event: type[Event], mode: Mode) -> Schema:
    """Return the JSON Schema of the payload, as it is consumed ("validation") or published.

    Raises `Refused` if the type of a field has none.
    """
    if event is Tombstone:
        return {"title": "Tombstone", "type": "null"}
    try:
        return event.model_json_schema(schema_generator=_Generator, mode=mode)
    except PydanticUserError as error:
        raise Refused(
            f"{event.__name__} has no JSON Schema ({error.message}): declare the schema of the"
            " field's type with Annotated[…, WithJsonSchema({…})]"
        ) from error
