"""Whether all that one JSON Schema describes is accepted by another.

It knows the subset of JSON Schema that Pydantic generates. The rest, and what would need a search,
is reported as undecided. Without any finding the reader accepts every payload of the writer.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from math import ceil, floor
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from .schemas import KEYS, LIMITS

Node = Mapping[str, Any] | bool

_ANNOTATIONS = {
    *("$comment", "$defs", "$id", "$schema", "default", "deprecated", "description"),
    *("discriminator", "example", "examples", "readOnly", "title", "writeOnly"),
}
_KNOWN = {
    *("$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "exclusiveMaximum"),
    *("exclusiveMinimum", "format", "items", "maxItems", "maxLength", "maximum"),
    *("minItems", "minLength", "minimum", "multipleOf", "oneOf", "pattern"),
    *("prefixItems", "properties", "required", "type", "uniqueItems", KEYS, LIMITS),
}
_NOT_ENFORCED = {"password"}
_DISTINCT = {
    "date",
    "date-time",
    "decimal",
    "duration",
    "email",
    "ipv4",
    "ipv6",
    "time",
    "uri",
    "uuid",
}
"""Formats of which no text has two, as far as producers write them."""
_NAMES = {
    "array": "a list",
    "boolean": "a boolean",
    "integer": "an integer",
    "null": "null",
    "number": "a number",
    "object": "an object",
    "string": "a string",
}


class Finding(NamedTuple):
    """Payloads of the writer that the reader refuses, or that may be refused."""

    kind: Literal["lacks", "has", "type", "value", "undecided"]
    path: str
    """Names of members, with `[]` for the items of a list; empty for the payload itself."""
    detail: str = ""

    @property
    def what(self) -> str:
        """The part of a sentence that describes the payloads, or what cannot be decided."""
        name = f"`{self.path}`" if self.path else "payload"
        match self.kind:
            case "lacks":
                return f"without {name}"
            case "has":
                return f"with {name}"
            case "undecided":
                return f"{name} ({self.detail})"
            case _:
                return f"whose {name} is {self.detail}"


def compare(writer: Mapping[str, Any], reader: Mapping[str, Any]) -> list[Finding]:
    """Return the payloads of the writer's schema that the reader's may refuse.

    Members that the writer's schema does not name are not written, unless it says so by
    `additionalProperties`.
    """
    found = _Comparison(writer, reader).nodes(writer, reader, "")
    return list(dict.fromkeys(found))


class _Comparison:
    def __init__(self, writer: Mapping[str, Any], reader: Mapping[str, Any]) -> None:
        self._writer = writer
        self._reader = reader
        self._under_way: set[tuple[int, int]] = set()
        """Pairs of nodes that are compared: inside of a recursive schema they are taken for
        compatible, which every finite payload justifies."""

    def nodes(self, writer: Node, reader: Node, path: str) -> list[Finding]:
        """Return the findings of a part of both schemas."""
        if writer is False or reader is True:
            return []
        if reader is False:
            return [Finding("has", path)]
        pair = id(writer), id(reader)
        if pair in self._under_way:
            return []
        self._under_way.add(pair)
        try:
            return [*self._parts({} if writer is True else writer, reader, path)]
        finally:
            self._under_way.remove(pair)

    def _parts(
        self, writer: Mapping[str, Any], reader: Mapping[str, Any], path: str
    ) -> Iterator[Finding]:
        """Take schemas apart that consist of others, the writer's first."""
        if "$ref" in writer:
            yield from self.nodes(target_of(self._writer, writer), reader, path)
        elif union := writer.get("anyOf") or writer.get("oneOf"):
            for one in union:
                yield from self.nodes(one, reader, path)
        elif "allOf" in writer:
            # All of them are true of a payload, so that it is enough if one is accepted.
            results = [self.nodes(one, reader, path) for one in writer["allOf"]]
            if all(results):
                is_one = len(results) == 1
                yield from results[0] if is_one else [Finding("undecided", path, "allOf")]
        elif isinstance(writer.get("type"), list):
            for one in writer["type"]:
                yield from self._parts({**writer, "type": one}, reader, path)
        elif (values := _values(writer)) is not None:
            for value in values:
                yield from self._value(value, reader, path)
        elif "$ref" in reader or "allOf" in reader:
            yield from self._all(writer, reader, path)
        elif alternatives := reader.get("anyOf") or reader.get("oneOf"):
            yield from self._any(writer, reader, alternatives, path)
        else:
            yield from self._typed(writer, reader, path)

    def _all(
        self, writer: Mapping[str, Any], reader: Mapping[str, Any], path: str
    ) -> Iterator[Finding]:
        parts = [*reader.get("allOf", ())]
        if "$ref" in reader:
            parts.append(target_of(self._reader, reader))
        parts.append({name: reader[name] for name in reader if name not in ("$ref", "allOf")})
        for part in parts:
            yield from self.nodes(writer, part, path)

    def _any(
        self,
        writer: Mapping[str, Any],
        reader: Mapping[str, Any],
        alternatives: Sequence[Node],
        path: str,
    ) -> Iterator[Finding]:
        """Find an alternative that accepts all of the writer's payloads."""
        rest = {name: reader[name] for name in reader if name not in ("anyOf", "oneOf")}
        yield from self.nodes(writer, rest, path)
        if "oneOf" in reader and "discriminator" not in reader:
            yield Finding("undecided", path, "oneOf")
        results = [self.nodes(writer, one, path) for one in alternatives]
        if not all(results):
            return
        near = [one for one in results if one[0][:2] != ("type", path)]
        if tag := reader.get("discriminator", {}).get("propertyName"):
            name = f"{path}.{tag}" if path else tag
            is_other = [any(one.path == name for one in each) for each in near]
            if near and all(is_other):
                yield from (one for one in near[0] if one.path == name)
                return
            near = [one for one, other in zip(near, is_other, strict=True) if not other]
        if not near:
            yield results[0][0]
        elif len(near) == 1:
            yield from near[0]
        else:
            yield Finding("undecided", path, "none of several alternatives accepts all of it")

    def _typed(
        self, writer: Mapping[str, Any], reader: Mapping[str, Any], path: str
    ) -> Iterator[Finding]:
        yield from _undecided(writer, reader, path)
        kind, kinds = writer.get("type"), reader.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if kind is None:
            if kinds or _KNOWN & reader.keys():
                yield Finding("type", path, "of any type")
            return
        if kinds and kind not in kinds and not (kind == "integer" and "number" in kinds):
            is_fraction = kind == "number" and "integer" in kinds
            detail = "a number with a fraction" if is_fraction else _NAMES[kind]
            yield Finding("type", path, detail)
        elif "enum" in reader or "const" in reader:
            known = reader["enum"] if "enum" in reader else [reader["const"]]
            yield Finding("value", path, f"{_NAMES[kind]} other than {_listed(known)}")
        elif kind in ("integer", "number"):
            yield from _numbers(writer, reader, path, is_integer=kind == "integer")
        elif kind == "string":
            yield from _strings(writer, reader, path)
        elif kind == "array":
            yield from self._arrays(writer, reader, path)
        elif kind == "object":
            yield from self._objects(writer, reader, path)

    def _arrays(
        self, writer: Mapping[str, Any], reader: Mapping[str, Any], path: str
    ) -> Iterator[Finding]:
        yield from _sizes(writer, reader, path, "Items", "items")
        first, second = writer.get("prefixItems", ()), reader.get("prefixItems", ())
        most = writer.get("maxItems")
        length = max(len(first), len(second))
        for place in range(length if most is None else min(length, most)):
            one = first[place] if place < len(first) else writer.get("items", True)
            other = second[place] if place < len(second) else reader.get("items", True)
            yield from self.nodes(one, other, f"{path}[{place}]")
        if most is None or most > length:
            rest = writer.get("items", True), reader.get("items", True)
            yield from self.nodes(*rest, f"{path}[]")

    def _objects(
        self, writer: Mapping[str, Any], reader: Mapping[str, Any], path: str
    ) -> Iterator[Finding]:
        written, read = writer.get("properties", {}), reader.get("properties", {})
        others = writer.get("additionalProperties", not written and "properties" not in writer)
        other_read = reader.get("additionalProperties", True)
        always = writer.get("required", ())
        for name in sorted({*written, *read, *reader.get("required", ())}):
            inner = f"{path}.{name}" if path else name
            one = written.get(name, others)
            if name in reader.get("required", ()) and name not in always:
                yield Finding("lacks", inner)
            if one is not False:
                yield from self.nodes(one, read.get(name, other_read), inner)
        if others is not False:
            yield from self.nodes(others, other_read, f"{path}.*" if path else "*")
        if KEYS in reader and written:
            yield Finding("undecided", path, "names of members")
        elif KEYS in reader:
            keys = writer.get(KEYS, {"type": "string"})
            yield from self.nodes(keys, reader[KEYS], f"{path} (key)".strip())

    def _value(self, value: Any, reader: Node, path: str) -> Iterator[Finding]:
        """Return the findings of one value."""
        if reader is True or reader is False:
            return
        if "$ref" in reader or "allOf" in reader:
            for part in reader.get("allOf", ()):
                yield from self._value(value, part, path)
            if "$ref" in reader:
                yield from self._value(value, target_of(self._reader, reader), path)
        if alternatives := reader.get("anyOf") or reader.get("oneOf"):
            results = [[*self._value(value, one, path)] for one in alternatives]
            if all(results):
                yield min(results, key=lambda one: one[0].kind != "undecided")[0]
        kind, kinds = _type_of(value), reader.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        known = reader["enum"] if "enum" in reader else [reader.get("const", value)]
        if kinds and kind not in kinds and not (kind == "integer" and "number" in kinds):
            yield Finding("type", path, _listed([value]))
        elif not any(_type_of(one) == kind and one == value for one in known):
            yield Finding("value", path, _listed([value]))
        elif kind in ("integer", "number"):
            itself = {"minimum": value, "maximum": value, "multipleOf": value}
            yield from _numbers(itself, reader, path, is_integer=kind == "integer")
        elif kind == "string":
            yield from _text(value, reader, path)
        elif kind in ("array", "object"):
            yield Finding("undecided", path, "a constant list or object")
        yield from _undecided({}, reader, path)


def target_of(root: Mapping[str, Any], node: Mapping[str, Any]) -> Node:
    """Return what a `$ref` refers to, in the same document."""
    found: Any = root
    for part in node["$ref"].removeprefix("#").split("/")[1:]:
        found = found[unquote(part).replace("~1", "/").replace("~0", "~")]
    result: Node = found
    return result


def _values(node: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the values of a schema that has few."""
    if "const" in node:
        return [node["const"]]
    if "enum" in node:
        values: Sequence[Any] = node["enum"]
        return values
    few: dict[str, list[Any]] = {"null": [None], "boolean": [False, True]}
    return few.get(node.get("type", ""))


def _type_of(value: object) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def _listed(values: Sequence[object]) -> str:
    texts = {True: "true", False: "false", None: "null"}
    return ", ".join(
        texts[one] if one is None or isinstance(one, bool) else repr(one).replace("'", '"')
        for one in values
    )


def _undecided(
    writer: Mapping[str, Any], reader: Mapping[str, Any], path: str
) -> Iterator[Finding]:
    """Yield the reader's keywords that are not understood, unless the writer's are equal."""
    unknown = {name for name in reader if name not in _KNOWN and not name.startswith("x-")}
    if KEYS in reader:  # which are compared themselves
        unknown.discard("propertyNames")
    for name in sorted(unknown - _ANNOTATIONS | {"uniqueItems"} & reader.keys()):
        value = reader[name]
        if value != writer.get(name, False) or "$ref" in str(value):
            yield Finding("undecided", path, name)


def _lower(
    node: Mapping[str, Any], *, is_integer: bool, sign: int = 1
) -> tuple[Decimal, bool] | None:
    """Return the lowest number and whether it is excluded; for sign=-1 the highest, negated."""
    names = ("minimum", "exclusiveMinimum") if sign > 0 else ("maximum", "exclusiveMaximum")
    found = [
        (sign * Decimal(str(node[name])), is_excluded)
        for name, is_excluded in zip(names, (False, True), strict=True)
        if node.get(name) is not None
    ]
    if not found:
        return None
    limit, is_excluded = max(found)
    if is_integer:
        return Decimal(floor(limit) + 1 if is_excluded else ceil(limit)), False
    return limit, is_excluded


def _numbers(
    writer: Mapping[str, Any], reader: Mapping[str, Any], path: str, *, is_integer: bool
) -> Iterator[Finding]:
    for sign, less, beyond in ((1, "less", "less than"), (-1, "more", "more than")):
        limit = _lower(reader, is_integer=False, sign=sign)
        lowest = _lower(writer, is_integer=is_integer, sign=sign)
        if limit is not None and (lowest is None or lowest < limit):
            number = sign * limit[0]
            yield Finding(
                "value", path, f"{number} or {less}" if limit[1] else f"{beyond} {number}"
            )
    step = reader.get("multipleOf")
    if step is not None and not (is_integer and step == 1):
        unit = writer.get("multipleOf")
        if unit is None or Decimal(str(unit)) % Decimal(str(step)):
            yield Finding("value", path, f"no multiple of {step}")
    yield from _limits(writer, reader, path)


def _limits(writer: Mapping[str, Any], reader: Mapping[str, Any], path: str) -> Iterator[Finding]:
    """Compare what JSON Schema has no keywords for."""
    given, wanted = writer.get(LIMITS, {}), reader.get(LIMITS, {})
    digits = {name for name in wanted if wanted[name] != given.get(name)}
    if reader.get("format") == "decimal" and writer.get("format") == "decimal":
        digits &= {"maxDigits", "decimalPlaces"}
        bare = {name: given[name] for name in given}
        limits = {name: wanted[name] for name in wanted if not name.endswith(("Digits", "Places"))}
        yield from _numbers(bare, limits, path, is_integer=False)
    if digits:
        yield Finding("undecided", path, ", ".join(sorted(digits)))


def _strings(writer: Mapping[str, Any], reader: Mapping[str, Any], path: str) -> Iterator[Finding]:
    pattern, format = reader.get("pattern"), reader.get("format")
    is_plain = not {"pattern", "format"} & writer.keys()
    found = [*_sizes(writer, reader, path, "Length", "characters")]
    yield from found if is_plain else (Finding("undecided", path, "length") for _ in found)
    if pattern not in (None, writer.get("pattern")):
        yield Finding(*_unlike(path, f"a text that does not match {pattern}", is_sure=is_plain))
    if format not in (None, writer.get("format"), *_NOT_ENFORCED):
        is_sure = format in _DISTINCT and (is_plain or writer.get("format") in _DISTINCT)
        kind = f"of the format {writer['format']}" if "format" in writer else "any text"
        yield Finding(*_unlike(path, f"{kind} instead of {format}", is_sure=is_sure))
    yield from _limits(writer, reader, path)


def _unlike(
    path: str, detail: str, *, is_sure: bool
) -> tuple[Literal["value", "undecided"], str, str]:
    return "value" if is_sure else "undecided", path, detail


def _text(value: str, reader: Mapping[str, Any], path: str) -> Iterator[Finding]:
    """Return the findings of one text."""
    size = {"minLength": len(value), "maxLength": len(value)}
    if [*_sizes(size, reader, path, "Length", "characters")]:
        yield Finding("value", path, _listed([value]))
    is_match = None
    with suppress(re.error):
        is_match = re.search(reader.get("pattern", ""), value) is not None
    if is_match is False:
        yield Finding("value", path, _listed([value]))
    if is_match is None or reader.get("format") not in (None, *_NOT_ENFORCED):
        yield Finding("undecided", path, f"{_listed([value])} as {reader.get('format', 'pattern')}")


def _sizes(
    writer: Mapping[str, Any], reader: Mapping[str, Any], path: str, of: str, unit: str
) -> Iterator[Finding]:
    least, most = reader.get(f"min{of}", 0), reader.get(f"max{of}")
    if writer.get(f"min{of}", 0) < least:
        yield Finding("value", path, f"of less than {least} {unit}")
    if most is not None and (writer.get(f"max{of}") is None or writer[f"max{of}"] > most):
        yield Finding("value", path, f"of more than {most} {unit}")
