"""Compares the schemas of numbers and strings."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from math import ceil, floor, inf
from typing import Any, Literal

from .findings import Finding
from .schemas import LIMITS

_NOT_ENFORCED = {"password"}
_ANY_TEXT = {None, "binary", "password"}
"""Formats that every string has."""
_DISTINCT = {
    "date",
    "date-time",
    "decimal",
    "duration",
    "email",
    "base64url",
    "hex",
    "ipv4",
    "ipv6",
    "time",
    "uri",
    "uuid",
}
"""Formats that exclude each other: no string that a producer writes has two of them."""
_DIGITS = {"maxDigits", "decimalPlaces"}
_STRIPS = "strip_whitespace"
CONVERTED = "that may be converted"
NAMES = {
    "array": "a list",
    "boolean": "a boolean",
    "integer": "an integer",
    "null": "null",
    "number": "a number",
    "object": "an object",
    "string": "a string",
}


def type_of(value: object) -> str:
    """Return the JSON Schema type of a value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def listed(values: Sequence[object]) -> str:
    """Return values as JSON, separated by commas."""
    texts = {True: "true", False: "false", None: "null"}
    return ", ".join(
        texts[one] if one is None or isinstance(one, bool) else repr(one).replace("'", '"')
        for one in values
    )


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


def is_lax(writer: Mapping[str, Any], kinds: Sequence[str], reader: Mapping[str, Any]) -> bool:
    """Whether Pydantic may convert between the types.

    Schemas contain the strictness of types, but not that of a whole union.
    """
    kind, given, format = writer.get("type"), writer.get("format"), reader.get("format")
    if reader.get(LIMITS, {}).get("strict"):
        return False
    if "string" in kinds:
        is_time = format in ("date", "date-time", "duration", "time")
        return is_time and kind in ("integer", "number")
    to_number = {"integer", "number"} & {*kinds}
    return bool(to_number and kind == "boolean") or ("number" in kinds and given == "decimal")


def numbers(
    writer: Mapping[str, Any], reader: Mapping[str, Any], path: str, *, is_integer: bool
) -> Iterator[Finding]:
    """Compare limits of numbers."""
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
    yield from _digits(writer, reader, path, is_integer=is_integer)
    yield from limits(writer, reader, path)


def _digits(
    writer: Mapping[str, Any], reader: Mapping[str, Any], path: str, *, is_integer: bool
) -> Iterator[Finding]:
    """Compare limits of digits: of all, and of those before and after the decimal point."""
    wanted = reader.get(LIMITS, {})
    most, places = wanted.get("maxDigits"), wanted.get("decimalPlaces")
    if most is None and places is None:
        return
    given = writer.get(LIMITS, {})
    all_written = float(given.get("maxDigits", inf))
    after = 0 if is_integer else min(float(given.get("decimalPlaces", inf)), all_written)
    before = all_written - after if {"maxDigits", "decimalPlaces"} <= given.keys() else all_written
    ends = [_lower({**writer, **given}, is_integer=is_integer, sign=sign) for sign in (1, -1)]
    if None not in ends:
        largest = max(
            ceil(abs(end[0])) - 1 if end[1] else floor(abs(end[0])) for end in ends if end
        )
        before = min(before, len(str(max(largest, 0))))
    if places is not None and after > int(places):
        yield Finding("value", path, f"of more than {places} decimal places")
    if most is not None and places is not None:
        if before > int(most) - int(places):
            least = int(most) - int(places)
            yield Finding("value", path, f"of more than {least} digits before the point")
    elif most is not None and min(all_written, before + after) > int(most):
        yield Finding("value", path, f"of more than {most} digits")


def limits(writer: Mapping[str, Any], reader: Mapping[str, Any], path: str) -> Iterator[Finding]:
    """Compare limits that JSON Schema has no keyword for."""
    given, wanted = writer.get(LIMITS, {}), reader.get(LIMITS, {})
    different = {name for name in wanted if wanted[name] != given.get(name)}
    different -= {"maxDigits", "decimalPlaces", "schemes", _STRIPS}
    size = "minLength" if _STRIPS in wanted else "maxLength"
    if (_STRIPS in wanted) != (_STRIPS in given) and reader.keys() & {size, "pattern"}:
        different.add(_STRIPS)
    if reader.get("format") == "decimal" and writer.get("format") == "decimal":
        digits = {LIMITS: {name: given[name] for name in given if name in _DIGITS}}
        wanted = wanted | {LIMITS: {name: wanted[name] for name in wanted if name in _DIGITS}}
        yield from numbers({**given, **digits}, wanted, path, is_integer=False)
    elif different:
        yield Finding("undecided", path, ", ".join(sorted(different)))
    if "schemes" in wanted and writer.get("format") == "uri":
        others = sorted({*given.get("schemes", "other").split()} - {*wanted["schemes"].split()})
        if others:
            yield Finding("value", path, f"a URL with the scheme {', '.join(others)}")


def strings(writer: Mapping[str, Any], reader: Mapping[str, Any], path: str) -> Iterator[Finding]:
    """Compare length, pattern and format of strings."""
    pattern, format = reader.get("pattern"), reader.get("format")
    is_plain = "pattern" not in writer and writer.get("format") in _ANY_TEXT
    found = [*sizes(writer, reader, path, "Length", "characters")]
    yield from found if is_plain else (Finding("undecided", path, "length") for _ in found)
    if pattern not in (None, writer.get("pattern")):
        yield Finding(*_unlike(path, f"a text that does not match {pattern}", is_sure=is_plain))
    if format not in (None, writer.get("format"), *_NOT_ENFORCED):
        is_date = (writer.get("format"), format) == ("date", "date-time")  # read as its midnight
        is_distinct = is_plain or writer.get("format") in _DISTINCT
        is_sure = format in _DISTINCT and is_distinct and not is_date
        kind = f"of the format {writer['format']}" if "format" in writer else "any text"
        yield Finding(*_unlike(path, f"{kind} instead of {format}", is_sure=is_sure))
    yield from limits(writer, reader, path)


def _unlike(
    path: str, detail: str, *, is_sure: bool
) -> tuple[Literal["value", "undecided"], str, str]:
    return "value" if is_sure else "undecided", path, detail


def text(value: str, reader: Mapping[str, Any], path: str) -> Iterator[Finding]:
    """Return the findings of one string."""
    size = {"minLength": len(value), "maxLength": len(value)}
    if [*sizes(size, reader, path, "Length", "characters")]:
        yield Finding("value", path, listed([value]))
    is_match = None
    with suppress(re.error):
        is_match = re.search(reader.get("pattern", ""), value) is not None
    if is_match is False:
        yield Finding("value", path, listed([value]))
    if is_match is None or reader.get("format") not in (None, *_NOT_ENFORCED):
        yield Finding("undecided", path, f"{listed([value])} as {reader.get('format', 'pattern')}")


def sizes(
    writer: Mapping[str, Any], reader: Mapping[str, Any], path: str, of: str, unit: str
) -> Iterator[Finding]:
    """Compare the limits of a length."""
    least, most = reader.get(f"min{of}", 0), reader.get(f"max{of}")
    if writer.get(f"min{of}", 0) < least:
        yield Finding("value", path, f"of less than {least} {unit}")
    if most is not None and (writer.get(f"max{of}") is None or writer[f"max{of}"] > most):
        yield Finding("value", path, f"of more than {most} {unit}")
