"""Compares two JSON Schemas: does the reader's accept every payload of the writer's?

The subset of JSON Schema that Pydantic generates is supported. Other keywords, and cases that would
need a search, are reported as undecided. Without a finding, the reader accepts every payload that
the writer's schema describes, unless a validator rejects it. Schemas do not describe what Pydantic
converts, such as "5" to an integer: a reader that becomes strict is undecided, but a reader whose
other type rejects only what the writer's type converts has no finding.
"""

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from .findings import Finding
from .scalars import (
    CONVERTED,
    NAMES,
    is_lax,
    limits,
    listed,
    numbers,
    sizes,
    strings,
    text,
    type_of,
)
from .schemas import ALIASES, KEYS, LIMITS, PATHS

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


def compare(
    writer: Mapping[str, Any], reader: Mapping[str, Any], *, is_open: bool = False
) -> list[Finding]:
    """Return the payloads of the writer's schema that the reader's schema may reject.

    A writer sends members that its schema does not name only if `additionalProperties` allows them.
    With `is_open`, the writer's schema is that of an earlier reader: its producers may also send
    the members that it ignored, which a reader that forbids them rejects.
    """
    found = _Comparison(writer, reader, is_open=is_open).nodes(writer, reader, "")
    return list(dict.fromkeys(found))


class _Comparison:
    def __init__(
        self, writer: Mapping[str, Any], reader: Mapping[str, Any], *, is_open: bool
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._is_open = is_open
        self._under_way: set[tuple[int, int]] = set()
        """Pairs of nodes whose comparison has begun. Where a recursive schema repeats a pair, it
        counts as compatible: payloads are finite."""

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
        """Compare the parts of composed schemas, the writer's first."""
        if "$ref" in writer:
            yield from self.nodes(target_of(self._writer, writer), reader, path)
        elif union := writer.get("anyOf") or writer.get("oneOf"):
            for one in union:
                yield from self.nodes(one, reader, path)
        elif "allOf" in writer:
            # A payload matches all of them, so it is enough if the reader accepts one.
            results = [self.nodes(one, reader, path) for one in writer["allOf"]]
            if all(results):
                is_one = len(results) == 1
                yield from results[0] if is_one else [Finding("undecided", path, "allOf")]
        elif isinstance(writer.get("type"), list):
            for one in writer["type"]:
                yield from self._parts({**writer, "type": one}, reader, path)
        elif (values := _values(writer)) is not None:
            for value in values:
                yield from self._value(value, reader, path, writer.get(LIMITS, {}))
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
        near = [one for one in near if not one[0].detail.endswith(CONVERTED)] or near[:1]
        if tag := self._tag(reader, alternatives):
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

    def _tag(self, reader: Mapping[str, Any], alternatives: Sequence[Node]) -> str | None:
        """Return the discriminator, or a member that is a constant in each of the objects."""
        if "discriminator" in reader:
            name: str | None = reader["discriminator"].get("propertyName")
            return name
        tags = []
        for one in alternatives:
            node = target_of(self._reader, one) if isinstance(one, dict) and "$ref" in one else one
            if not isinstance(node, bool) and node.get("type") == "object":
                read = node.get("properties", {})
                tags.append([name for name in read if "const" in read[name]])
        shared = [name for name in tags[0] if all(name in each for each in tags)] if tags else []
        return shared[0] if shared and len(tags) > 1 else None

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
            detail = "a number with a fraction" if is_fraction else NAMES[kind]
            if is_lax(writer, kinds, reader):
                yield Finding("undecided", path, f"{detail} {CONVERTED}")
            else:
                yield Finding("type", path, detail)
        elif "enum" in reader or "const" in reader:
            known = reader["enum"] if "enum" in reader else [reader["const"]]
            yield Finding("value", path, f"{NAMES[kind]} other than {listed(known)}")
        elif kind in ("integer", "number"):
            yield from numbers(writer, reader, path, is_integer=kind == "integer")
        elif kind == "string":
            yield from strings(writer, reader, path)
        elif kind == "array":
            yield from self._arrays(writer, reader, path)
        elif kind == "object":
            yield from self._objects(writer, reader, path)

    def _arrays(
        self, writer: Mapping[str, Any], reader: Mapping[str, Any], path: str
    ) -> Iterator[Finding]:
        yield from sizes(writer, reader, path, "Items", "items")
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
        always = [_names(writer, name) for name in writer.get("required", ())]
        needed, nested = reader.get("required", ()), reader.get(PATHS, {})
        written = {one: written[name] for name in written for one in _names(writer, name)}
        read = {one: read[name] for name in read for one in _names(reader, name)}
        rest = f"{path}.*" if path else "*"
        for name in sorted({*written, *read, *needed}):
            inner = f"{path}.{name}" if path else name
            if name in nested:
                if nested != writer.get(PATHS):
                    yield Finding("undecided", inner, f"also read from {nested[name]}")
            elif name in needed and not any(each <= _names(reader, name) for each in always):
                yield Finding("lacks", inner)
            if name in written:
                yield from self.nodes(written[name], read.get(name, other_read), inner)
            elif others not in (True, {}):
                yield from self.nodes(others, read.get(name, other_read), inner)
            elif name in read and self.nodes(others, read[name], inner):
                yield Finding("undecided", inner, "which may have any type, as a further member")
        if others is not False:
            yield from self.nodes(others, other_read, rest)
        elif self._is_open and "additionalProperties" not in writer and other_read is False:
            yield Finding("has", rest)
        if KEYS in reader and written:
            yield Finding("undecided", path, "names of members")
        elif KEYS in reader:
            keys = writer.get(KEYS, {"type": "string"})
            yield from self.nodes(keys, reader[KEYS], f"{path} (key)".strip())

    def _value(
        self, value: Any, reader: Node, path: str, given: Mapping[str, Any]
    ) -> Iterator[Finding]:
        """Return the findings of one value, whose schema has the given limits."""
        if reader is True or reader is False:
            return
        if "$ref" in reader or "allOf" in reader:
            for part in reader.get("allOf", ()):
                yield from self._value(value, part, path, given)
            if "$ref" in reader:
                yield from self._value(value, target_of(self._reader, reader), path, given)
        if alternatives := reader.get("anyOf") or reader.get("oneOf"):
            results = [[*self._value(value, one, path, given)] for one in alternatives]
            if all(results):
                yield min(results, key=lambda one: one[0].kind != "undecided")[0]
        kind, kinds = type_of(value), reader.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        known = reader["enum"] if "enum" in reader else [reader.get("const", value)]
        if kinds and kind not in kinds and not (kind == "integer" and "number" in kinds):
            is_converted = is_lax({"type": kind}, kinds, reader)
            detail = f"{listed([value])} {CONVERTED}" if is_converted else listed([value])
            yield Finding("undecided" if is_converted else "type", path, detail)
        elif not any(type_of(one) == kind and one == value for one in known):
            yield Finding("value", path, listed([value]))
        elif kind in ("integer", "number"):
            places = max(0, -int(Decimal(str(value)).as_tuple().exponent))
            own = {**given, "decimalPlaces": places}
            itself = {"minimum": value, "maximum": value, "multipleOf": value, LIMITS: own}
            yield from numbers(itself, reader, path, is_integer=kind == "integer")
        elif kind == "boolean":
            yield from limits({LIMITS: given}, reader, path)
        elif kind == "string":
            yield from text(value, reader, path)
        elif kind in ("array", "object"):
            yield Finding("undecided", path, "a constant list or object")
        yield from _undecided({}, reader, path)


def target_of(root: Mapping[str, Any], node: Mapping[str, Any]) -> Node:
    """Return the target of a `$ref` within the same document."""
    found: Any = root
    for part in node["$ref"].removeprefix("#").split("/")[1:]:
        found = found[unquote(part).replace("~1", "/").replace("~0", "~")]
    result: Node = found
    return result


def _names(node: Mapping[str, Any], name: str) -> set[str]:
    """Return the names that a member may have."""
    return {name, *node.get(ALIASES, {}).get(name, ())}


def _values(node: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the values of a constant, enumeration, boolean or null; None for other schemas."""
    if "const" in node:
        return [node["const"]]
    if "enum" in node:
        values: Sequence[Any] = node["enum"]
        return values
    few: dict[str, list[Any]] = {"null": [None], "boolean": [False, True]}
    return few.get(node.get("type", ""))


def _undecided(
    writer: Mapping[str, Any], reader: Mapping[str, Any], path: str
) -> Iterator[Finding]:
    """Yield the reader's unsupported keywords, unless the writer's are equal."""
    unknown = {name for name in reader if name not in _KNOWN and not name.startswith("x-")}
    if KEYS in reader:  # compared by `_objects`
        unknown.discard("propertyNames")
    for name in sorted(unknown - _ANNOTATIONS | {"uniqueItems"} & reader.keys()):
        value = reader[name]
        if value != writer.get(name, False) or "$ref" in str(value):
            yield Finding("undecided", path, name)
