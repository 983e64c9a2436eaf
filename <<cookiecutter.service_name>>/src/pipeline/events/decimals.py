"""Decimals: keeps all digits of JSON numbers for fields of the type `Decimal`.

Pydantic parses every number with a fraction or an exponent as a float, even for a `Decimal`, but
accepts a string there, digit by digit. So before validation such numbers are replaced by strings
where the schema that Pydantic has built for the model expects a decimal.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

Schema = Mapping[str, Any]

_NUMBER = re.compile(rb"[:,\[\s](-?\d+(?:\.\d+(?:[eE][+-]?\d+)?|[eE][+-]?\d+))(?=[,}\]\s])")
"""Numbers that Pydantic parses as floats. Matches inside of strings too, which are not changed."""
_APART = {"computed_fields", "config", "default", "metadata", "serialization"}
"""Members of a schema that do not affect validation."""
_OBJECTS = ("model-fields", "typed-dict", "dataclass-args")
_INNER = ("schema", "json_schema", "lax_schema", "steps")


class _Number(str):
    """A number as the text in the JSON document."""

    @property
    def would_lose(self) -> bool:
        """Whether a float would change its text: 1.50 would become 1.5."""
        is_fraction = self[-1].isdigit() and not self.lstrip("-").isdigit()
        return is_fraction and repr(float(self)) != self


def _as_written(number: _Number) -> orjson.Fragment:
    return orjson.Fragment(str(number))


_JSON = json.JSONDecoder(
    parse_int=_Number, parse_float=_Number, parse_constant=_Number, strict=False
)


def keeping_digits(schema: Schema) -> Callable[[bytes], bytes] | None:
    """Return a function that prepares JSON for the schema; None if it has no decimals.

    Raises `TypeError` for a union in which a string would match before a decimal.
    """
    nodes = [node for node in _nodes(schema) if isinstance(node.get("type"), str)]
    for node in nodes:
        kinds = _kinds(node)
        if "decimal" in kinds and {"str", "bytes"} & {*kinds[: kinds.index("decimal")]}:
            raise TypeError("name Decimal before str in a union, or numbers would lose digits")
    if all(node["type"] != "decimal" for node in nodes):
        return None
    named = {node["ref"]: node for node in nodes if isinstance(node.get("ref"), str)}

    def prepare(data: bytes) -> bytes:
        if all(repr(float(number)).encode() == number for number in _NUMBER.findall(data)):
            return data
        try:
            value = _exact(_JSON.decode(data.decode()), schema, named)
            option = orjson.OPT_PASSTHROUGH_SUBCLASS
            return orjson.dumps(value, option=option, default=_as_written)
        except (ValueError, RecursionError, orjson.JSONEncodeError):
            return data  # not JSON: Pydantic will report it

    return prepare


def _nodes(schema: object) -> Iterator[Schema]:
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield one
            apart = _APART if isinstance(one.get("type"), str) else ()
            left += [inner for name, inner in one.items() if name not in apart]
        elif isinstance(one, list | tuple):
            left += one


def _kinds(schema: Schema) -> list[str]:
    """Return the types of a union's members."""
    return [_bare(one)["type"] for one in _choices(schema)] if schema["type"] == "union" else []


def _bare(schema: Schema) -> Schema:
    while isinstance(inner := schema.get("schema"), dict):
        schema = inner
    return schema


def _choices(schema: Schema, value: object = None) -> list[Schema]:
    """Return the members of a union; of a tagged one, the member that the value selects."""
    choices: Any = schema["choices"]
    tag = schema.get("discriminator")
    if isinstance(choices, list):
        return [one[0] if isinstance(one, tuple) else one for one in choices]
    if isinstance(value, dict) and isinstance(tag, str) and isinstance(value.get(tag), str):
        return [choices[value[tag]]] if value[tag] in choices else []
    return list(choices.values())


def _exact(value: Any, schema: Schema, named: dict[str, Schema]) -> Any:
    """Return the value with strings instead of the numbers that are decimals by the schema."""
    kind = schema["type"]
    if kind == "decimal":
        return str(value) if isinstance(value, _Number) and value.would_lose else value
    if kind == "definition-ref":
        return _exact(value, named[schema["schema_ref"]], named)
    if kind == "union" and isinstance(value, _Number) and {"float", "any"} & {*_kinds(schema)}:
        return value
    if "choices" in schema:
        for choice in _choices(schema, value):
            value = _exact(value, choice, named)
    elif isinstance(value, dict) and kind in _OBJECTS:
        _in_object(value, schema, named)
    elif isinstance(value, dict) and "values_schema" in schema:
        return {name: _exact(one, schema["values_schema"], named) for name, one in value.items()}
    elif isinstance(value, list) and (items := _items(schema, len(value))):
        return [_exact(one, item, named) for one, item in zip(value, items, strict=False)]
    elif inner := next((schema[name] for name in _INNER if name in schema), None):
        return _exact(value, inner[0] if isinstance(inner, list) else inner, named)
    return value


def _in_object(value: dict[str, Any], schema: Schema, named: dict[str, Schema]) -> None:
    fields = schema["fields"]
    if isinstance(fields, list):
        fields = {field["name"]: field for field in fields}
    if extras := schema.get("extras_schema"):
        for name in value.keys() - fields.keys():
            value[name] = _exact(value[name], extras, named)
    for name, field in fields.items():
        alias = field.get("validation_alias", [])
        for *path, last in [*(alias if isinstance(alias, list) else [[alias]]), [name]]:
            holder: Any = value
            try:
                for step in path:
                    holder = holder[step]
                found = holder[last]
            except (LookupError, TypeError):  # the value has no such field
                continue
            if isinstance(holder, dict | list):
                holder[last] = _exact(found, field["schema"], named)


def _items(schema: Schema, count: int) -> list[Schema]:
    """Return the schemas of the elements of a list with so many of them."""
    if schema["type"] == "named-tuple":
        return [field["schema"] for field in schema["fields"]]
    items = schema.get("items_schema", [])
    if "variadic_item_index" in schema:
        items = items[0]
    return [items] * count if isinstance(items, dict) else items
