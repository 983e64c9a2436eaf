"""Fields of a form for a payload: one for each property of its JSON Schema."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onceward.cli.errors import Refused
from onceward.contracts.compare import Node, target_of
from onceward.events.payload import parse
from onceward.redaction import HIDDEN

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
"""A number in JSON. Its text is sent, so that it keeps all of its digits."""


@dataclass(frozen=True, slots=True)
class Field:
    """A property, or the whole payload if that is not an object with properties."""

    name: str
    """Name of the property; empty for the whole payload."""
    note: str
    """What it takes, and what an empty field means."""
    example: str
    """A value as the form has it."""
    choices: Sequence[str] | None
    """Its values, as JSON; None if others are possible."""
    is_json: bool
    """Whether the field has JSON, as of an object or an array."""
    takes_numbers: bool
    """Whether a number in the field is one of JSON, and no text."""
    empty: str | None
    """What an empty field means, as JSON; None: the property is left out."""

    @property
    def key(self) -> str:
        """The field's name in the form, which no other field of the page has."""
        return f"payload.{self.name}"

    def written(self, form: Mapping[str, str]) -> str | None:
        """Return the value of a form as JSON, and None if the property is left out.

        A text where a number is required is JSON as well: the event's class rejects it. Raises
        `Refused` for what is to be JSON and is not.
        """
        text = form.get(self.key, "")
        if not text.strip() and (not text or self.is_json or self.takes_numbers):
            return self.empty
        if self.is_json or self.choices is not None:
            try:
                parse(text.encode())
            except ValueError as error:
                raise Refused(f"{self.name or 'payload'}: it is not JSON: {error}") from error
            return text
        number = text.strip()
        return number if self.takes_numbers and _NUMBER.fullmatch(number) else json.dumps(text)


def fields_of(schema: Mapping[str, Any], example: Any) -> Sequence[Field]:
    """Return the fields for a payload of this schema, in the order of its properties.

    They contain the example, which has at most the properties of the schema. A schema of the type
    null, as of a tombstone, has none.
    """
    root = target_of(schema, schema) if "$ref" in schema else schema
    if not isinstance(root, Mapping) or root.get("type") == "null":
        return []
    properties = root.get("properties")
    if not properties:
        return [_field(schema, "", True, example, is_required=True)]
    required = root.get("required", ())
    return [
        _field(schema, name, node, example.get(name), is_required=name in required)
        for name, node in properties.items()
    ]


def payload_of(fields: Sequence[Field], form: Mapping[str, str]) -> bytes | None:
    """Return the payload of a form, as JSON; None without fields. Raises `Refused`."""
    if not fields:
        return None
    texts = {one.name: one.written(form) for one in fields}
    if [*texts] == [""]:
        return (texts[""] or "").encode()
    members = [f"{json.dumps(name)}: {text}" for name, text in texts.items() if text is not None]
    return f"{{{', '.join(members)}}}".encode()


def _field(
    schema: Mapping[str, Any], name: str, node: Node, example: Any, *, is_required: bool
) -> Field:
    leaves = [*_leaves(schema, node, frozenset())]
    others = [one for one in leaves if one.get("type") != "null"]
    listed = [_values(one) for one in others]
    types = {str(one.get("type", "")) for one in others}
    choices = [json.dumps(value) for some in listed for value in some or ()]
    is_one_of = bool(listed) and None not in listed
    is_json = not is_one_of and not types <= {"string", "integer", "number", "boolean"}
    is_text = types == {"string"} and not any("format" in one for one in others) and not is_one_of
    empty = "null" if len(others) < len(leaves) else '""' if is_required and is_text else None
    meaning = {None: "it is left out", "null": "null", '""': "an empty text"}[empty]
    notes = dict.fromkeys(note for one in others if (note := _note(one)))
    shown = is_json or is_one_of or not isinstance(example, str)
    text = json.dumps(example, ensure_ascii=False, indent=2 if is_json else None)
    return Field(
        name,
        f"{', '.join(notes)}; empty: {meaning}".removeprefix("; "),
        "" if example in (None, HIDDEN) else text if shown else example,
        choices if is_one_of else None,
        is_json,
        bool(types & {"integer", "number"}),
        empty,
    )


def _leaves(
    schema: Mapping[str, Any], node: Node, seen: frozenset[str]
) -> Iterator[Mapping[str, Any]]:
    """Yield the alternatives of a part of a schema; of any JSON, one without a type."""
    if isinstance(node, bool):
        yield {}
    elif "$ref" in node:
        name = node["$ref"]
        if name not in seen:
            yield from _leaves(schema, target_of(schema, node), seen | {name})
    elif parts := node.get("anyOf") or node.get("oneOf") or node.get("allOf"):
        for one in parts:
            yield from _leaves(schema, one, seen)
    else:
        yield node


def _values(node: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the values that a part of a schema lists; None if it lists none."""
    if "const" in node:
        return [node["const"]]
    if node.get("type") == "boolean":
        return [True, False]
    found: Sequence[Any] | None = node.get("enum")
    return found


def _note(node: Mapping[str, Any]) -> str:
    kind = str(node.get("format") or node.get("type") or "JSON")
    return f"{kind} like {node['pattern']}" if "pattern" in node else kind
