"""Decimals: all digits of the numbers of JSON, of which Pydantic keeps those that a float holds.

It reads every number with a fraction or an exponent as a float, also where a field is a `Decimal`,
and takes a text there as it is. So texts take the place of such numbers, where they stand for
decimals by the schema that Pydantic has made of the model.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

Schema = Mapping[str, Any]

_NUMBER = re.compile(rb"[:,\[\s](-?\d+(?:\.\d+(?:[eE][+-]?\d+)?|[eE][+-]?\d+))(?=[,}\]\s])")
"""Those that Pydantic reads as floats; and some of a text, to which nothing is done."""
_APART = {"computed_fields", "config", "default", "metadata", "serialization"}
"""Members of a schema that say nothing of what is read."""
_OBJECTS = ("model-fields", "typed-dict", "dataclass-args")
_INNER = ("schema", "json_schema", "lax_schema", "steps")


class _Number(str):
    """A number as it is written."""

    @property
    def would_lose(self) -> bool:
        """Whether it is not what Python writes for a float: 1.50 would be 1.5."""
        is_fraction = self[-1].isdigit() and not self.lstrip("-").isdigit()
        return is_fraction and repr(float(self)) != self


def _as_written(number: _Number) -> orjson.Fragment:
    return orjson.Fragment(str(number))


_JSON = json.JSONDecoder(
    parse_int=_Number, parse_float=_Number, parse_constant=_Number, strict=False
)


def keeping_digits(schema: Schema) -> Callable[[bytes], bytes] | None:
    """Return what prepares JSON for the model of this schema; None: it has no decimals.

    Raises `TypeError` for a union that would take a decimal for a text.
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
            return data  # it is no JSON, as Pydantic will say

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
    """Return the types that a union takes."""
    return [_bare(one)["type"] for one in _choices(schema)] if schema["type"] == "union" else []


def _bare(schema: Schema) -> Schema:
    while isinstance(inner := schema.get("schema"), dict):
        schema = inner
    return schema


def _choices(schema: Schema, value: object = None) -> list[Schema]:
    """Return what a union takes: where it is tagged, what it takes the value for."""
    choices: Any = schema["choices"]
    tag = schema.get("discriminator")
    if isinstance(choices, list):
        return [one[0] if isinstance(one, tuple) else one for one in choices]
    if isinstance(value, dict) and isinstance(tag, str) and isinstance(value.get(tag), str):
        return [choices[value[tag]]] if value[tag] in choices else []
    return list(choices.values())


def _exact(value: Any, schema: Schema, named: dict[str, Schema]) -> Any:
    """Return the value with texts in the place of numbers that stand for decimals."""
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
        for *way, last in [*(alias if isinstance(alias, list) else [[alias]]), [name]]:
            holder: Any = value
            try:
                for step in way:
                    holder = holder[step]
                found = holder[last]
            except (LookupError, TypeError):  # it is not there
                continue
            if isinstance(holder, dict | list):
                holder[last] = _exact(found, field["schema"], named)


def _items(schema: Schema, count: int) -> list[Schema]:
    """Return what each of so many elements is to be."""
    if schema["type"] == "named-tuple":
        return [field["schema"] for field in schema["fields"]]
    items = schema.get("items_schema", [])
    if "variadic_item_index" in schema:
        items = items[0]
    return [items] * count if isinstance(items, dict) else items
