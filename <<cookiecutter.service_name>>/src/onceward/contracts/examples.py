"""Examples of payloads, generated from their schemas."""

from collections.abc import Mapping
from math import inf
from typing import Any

from onceward.events.event import Event, reader
from onceward.redaction import HIDDEN

from .compare import Node, target_of
from .export import written

_TEXTS = {
    "date": "2030-01-31",
    "date-time": "2030-01-31T12:00:00Z",
    "decimal": "1.50",
    "duration": "PT1H",
    "email": "ada@example.org",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "time": "12:00:00",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000001",
}
_MAX_DEPTH = 4
"""Deepest level with optional members."""


def example_of(event: type[Event], schema: Mapping[str, Any]) -> Any | None:
    """Return the first example that the model declares, or one generated from its schema.

    Returns None if the model rejects the example.
    """
    try:
        made = generate(schema)
        reader(event)(written(made).encode())
    except Exception:  # a validator of the model may raise anything
        return None
    return made


def generate(schema: Mapping[str, Any]) -> Any:
    """Return an example of a schema, which a pattern or a validator of the model may reject."""
    return _example(schema, schema, 0)


def _example(root: Mapping[str, Any], node: Node, depth: int) -> Any:
    if isinstance(node, bool):
        return "text"
    for name in ("examples", "enum"):
        if node.get(name):
            return node[name][0]
    for name in ("example", "const"):
        if name in node:
            return node[name]
    if "$ref" in node:
        return _example(root, target_of(root, node), depth)
    if union := node.get("anyOf") or node.get("oneOf") or node.get("allOf"):
        chosen = [one for one in union if one != {"type": "null"}] or union
        if depth > 1 and "allOf" not in node:
            chosen.sort(key=lambda one: _height(root, one, frozenset()))
        return None if depth > _MAX_DEPTH and chosen != union else _example(root, chosen[0], depth)
    match node.get("type"):
        case "object":
            return _object(root, node, depth)
        case "array":
            first = [_example(root, one, depth + 1) for one in node.get("prefixItems", ())]
            count = max(node.get("minItems", 0), depth <= _MAX_DEPTH) - len(first)
            most = node.get("maxItems", count)
            rest = _example(root, node.get("items", True), depth + 1) if count > 0 else None
            return first + [rest] * min(count, most)
        case "integer" | "number":
            return _number(node)
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return _text(node)


def _height(root: Mapping[str, Any], node: Node, seen: frozenset[str]) -> float:
    """Return the least depth of a payload of a schema; infinite if the schema requires itself."""
    if isinstance(node, bool):
        return 0
    if "$ref" in node:
        name = node["$ref"]
        return inf if name in seen else _height(root, target_of(root, node), seen | {name})
    if union := node.get("anyOf") or node.get("oneOf"):
        return min(_height(root, one, seen) for one in union)
    properties = node.get("properties", {})
    parts = [properties[name] for name in node.get("required", ()) if name in properties]
    parts += node.get("prefixItems", ())
    parts += [node.get("items", True)] if node.get("minItems") else []
    return 1 + max((_height(root, one, seen) for one in parts), default=0)


def _object(root: Mapping[str, Any], node: Mapping[str, Any], depth: int) -> dict[str, Any]:
    required = node.get("required", ())
    return {
        name: _example(root, one, depth + 1)
        for name, one in node.get("properties", {}).items()
        if name in required or depth < _MAX_DEPTH
    }


def _number(node: Mapping[str, Any]) -> int | float:
    step = node.get("multipleOf", 1)
    if "minimum" in node:
        least: float = -(-node["minimum"] // step) * step
    elif "exclusiveMinimum" in node:
        least = (node["exclusiveMinimum"] // step + 1) * step
    else:
        most = node.get("maximum", node.get("exclusiveMaximum", step + 1))
        least = min(step, (most // step - ("exclusiveMaximum" in node)) * step)
    return int(least) if node["type"] == "integer" else least


def _text(node: Mapping[str, Any]) -> str:
    if node.get("writeOnly"):
        return HIDDEN
    text = _TEXTS.get(node.get("format", ""), "text")
    if "format" not in node:
        text = text.ljust(node.get("minLength", 0), "x")[: node.get("maxLength", len(text))]
    return text
