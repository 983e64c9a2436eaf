"""The guide to the settings: `python dev/settings_guide.py > docs/settings.md` writes it.

The settings of an optional package are a table in its guide: `python dev/settings_guide.py
onceward.page.settings.PageSettings` prints one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from onceward.settings import SECONDS, Settings

HEAD = """\
# Settings

Environment variables, read at the start. Wrong values, and unknown names with the prefix
`PIPELINE_`, are errors. `s` means seconds; numbers are greater than 0 unless a limit is given;
certificates and keys are PEM files. The guides of optional packages have their settings.
`dev/settings_guide.py` writes this page.
"""
_NAMES = {
    bool: "`true` or `false`",
    Path: "file",
    SecretStr: "secret",
    frozenset[IPv4Address | IPv6Address]: "addresses",
}
"""Names for values of types that the default does not show."""
_LIMITS = {"gt": ">", "ge": "≥", "le": "≤"}


def page() -> str:
    """Return the guide to the engine's settings."""
    return f"{HEAD}\n{table(Settings)}"


def table(settings: type[BaseSettings]) -> str:
    """Return a table of the settings with their defaults, values and meanings."""
    rows = [("variable", "default, values", "meaning")]
    rows += [
        (
            f"`{settings.model_config['env_prefix']}{name.upper()}`",
            _values(field),
            " ".join((field.description or "").split()),
        )
        for name, field in settings.model_fields.items()
    ]
    rows.insert(1, ("-", "-", "-"))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _values(field: FieldInfo) -> str:
    """Return the default with its unit, and the other valid values."""
    (kind,) = [one for one in _kinds(field.annotation) if one is not NoneType]
    default = _default(field) + (" s" if SECONDS in field.metadata else "")
    if get_origin(kind) is Literal:
        others = (f"`{one}`" for one in get_args(kind) if one != field.default)
        return f"{default}; or {', '.join(others)}"
    limits = {
        sign: f"{sign} {limit:,}"
        for one in field.metadata
        for attribute, sign in _LIMITS.items()
        if (limit := getattr(one, attribute, None)) is not None
    }
    if {"≥", "≤"} <= limits.keys():
        low, high = (limits[sign].removeprefix(f"{sign} ") for sign in ("≥", "≤"))
        limits = {"": f"{low} to {high}"}
    # The head of the page says that numbers are greater than 0.
    shown = (one for one in limits.values() if one != "> 0" and (kind, one) != (int, "≥ 1"))
    named = [_NAMES[kind]] if kind in _NAMES and not isinstance(field.default, bool) else []
    return ", ".join((default, *named, *shown))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value in (None, "", frozenset()):
        return "unset"
    if isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, float):
        value = f"{value:.10g}"
    return f"`{value}`"


def _kinds(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in {Union, UnionType}:
        for one in get_args(annotation):
            yield from _kinds(one)
    else:
        yield annotation


if __name__ == "__main__":
    print(table(resolve_name(sys.argv[1])) if sys.argv[1:] else page(), end="")
