"""The service as an AsyncAPI 3.0 document: its topics, events and consumers.

See https://www.asyncapi.com/docs/reference/specification/v3.0.0. Schemas are of JSON Schema's
draft 7.
"""

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from onceward import Service
from onceward.events.codec import CloudEvents, Codec
from onceward.events.event import Event, Tombstone
from onceward.handlers.registry import Handler

from .examples import example_of
from .export import published, taken, written
from .schemas import ALIASES, KEYS, LIMITS, PATHS, Mode, schema_of

_TEXT = {"type": "string"}
_TRACE = {"traceparent": _TEXT, "tracestate": _TEXT, "baggage": _TEXT}
"""W3C Trace Context."""
_HEADERS = "CloudEventsHeaders"
_COMMON = {
    "type": "object",
    "description": "Attributes of CloudEvents 1.0 in binary mode, and W3C Trace Context.",
    "properties": {
        "ce_specversion": {"type": "string", "const": "1.0"},
        "ce_id": {"type": "string", "description": "Identifies the event, with its source."},
        "ce_source": {"type": "string", "description": "The producer."},
        "ce_time": {"type": "string", "format": "date-time", "description": "When it happened."},
        "ce_subject": _TEXT,
        "ce_sequence": {
            "type": "string",
            "description": "Its number among the events of its key, as text of equal length.",
        },
        "content-type": {"type": "string", "const": "application/json"},
        **_TRACE,
    },
    "required": ["ce_specversion", "ce_id", "ce_source"],
}
_EXAMPLE = {
    "ce_specversion": "1.0",
    "ce_id": "00000000-0000-4000-8000-000000000001",
    "ce_source": "/example",
}


def described(service: Service) -> dict[str, Any]:
    """Return the AsyncAPI document. Raises `Refused` if an event has no JSON Schema."""
    return _Document(service).made


class _Document:
    """Collects the parts of a document."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._channels: dict[str, Any] = {}
        self._operations: dict[str, Any] = {}
        self._messages: dict[str, Any] = {}
        self._schemas: dict[str, Any] = {_HEADERS: _COMMON}
        self._closures: dict[str, str] = {_HEADERS: ""}
        """Each schema with those it refers to, to distinguish schemas of the same name."""
        for topic, by_type in sorted(taken(service).items()):
            for type, handlers in sorted(by_type.items()):
                self._taken(topic, type, handlers)
        for topic, events in sorted(published(service).items()):
            self._published(topic, events)

    @property
    def made(self) -> dict[str, Any]:
        """The document. Its version is a hash of the topics and events."""
        body = {
            "channels": self._channels,
            "components": {"messages": self._messages, "schemas": self._schemas},
        }
        return {
            "asyncapi": "3.0.0",
            "info": {
                "title": self._service.name,
                "version": sha256(written(body).encode()).hexdigest()[:12],
                "description": "Events that the service consumes and publishes. The version is a"
                " hash of its topics and events.",
            },
            "defaultContentType": "application/json",
            "operations": self._operations,
            **body,
        }

    def _taken(self, topic: str, type: str, handlers: list[Handler]) -> None:
        event = handlers[0].event
        is_demanding = topic in self._service.handlers.demanding
        channel = self._channel(topic)
        channel["x-unknown-types"] = "dead letter" if is_demanding else "skipped and counted"
        key = self._message(topic, event, "validation")
        message = self._messages[key]
        old = sorted(event.__event_upcasters__)
        if old:
            message["x-older-types"] = old
            message["description"] += f" Also taken and converted: {', '.join(old)}."
        for one in handlers:
            limits = one.policy
            rows = dict.fromkeys(row.entity.__name__ for row in one.loads)
            self._operations[_named(f"receive.{one.consumer}.{topic}.{type}", self._operations)] = {
                "action": "receive",
                "channel": {"$ref": f"#/channels/{topic}"},
                "messages": [_reference(topic, key)],
                "title": one.consumer,
                "summary": f"The consumer {one.consumer} applies {type}.",
                "description": _decisions(one),
                "bindings": {
                    "kafka": {"groupId": {"type": "string", "enum": [self._service.name]}}
                },
                "x-consumer": {
                    "name": one.consumer,
                    "mode": one.mode,
                    "timeout": one.timeout,
                    "takesOld": one.takes_old,
                    "loads": ", ".join(rows) or None,
                    "gaps": one.gaps and {"wait": one.gaps.wait, "then": one.gaps.then},
                    "policy": {
                        "attempts": limits.attempts,
                        "maxAge": limits.max_age,
                        "schedule": list(limits.schedule),
                        "afterDeath": limits.after_death,
                    },
                },
            }

    def _published(self, topic: str, events: Mapping[str, type[Event]]) -> None:
        self._channel(topic)
        keys = [self._message(topic, one, "serialization") for _, one in sorted(events.items())]
        self._operations[_named(f"send.{topic}", self._operations)] = {
            "action": "send",
            "channel": {"$ref": f"#/channels/{topic}"},
            "messages": [_reference(topic, key) for key in keys],
            "title": topic,
            "summary": f"The relay publishes the events of {topic}.",
            "description": "In order of the key. An event may be repeated, with the same id.",
        }

    def _channel(self, topic: str) -> dict[str, Any]:
        channel: dict[str, Any] = self._channels.setdefault(
            topic,
            {
                "address": topic,
                "title": topic,
                "messages": {},
                "bindings": {"kafka": {"topic": topic}},
            },
        )
        return channel

    def _message(self, topic: str, event: type[Event], mode: Mode) -> str:
        """Add a message to its channel; return its name."""
        type, schema = event.__event_type__, schema_of(event, mode)
        codec, example = self._service.handlers.codec(topic), example_of(event, schema)
        key = _named(f"{topic}.{type}", self._messages)
        text = (event.__doc__ or "").strip().partition("\n")[0] if "__doc__" in vars(event) else ""
        message: dict[str, Any] = {
            "name": type,
            "title": event.__name__,
            "summary": text or type,
            "description": _envelope(event, mode, codec),
            "contentType": "application/json",
            "headers": _headers(event, codec),
            "payload": {"$ref": f"#/components/schemas/{self._schema(schema, event.__name__)}"},
            "bindings": {"kafka": {"key": {**_TEXT, "description": "Orders the events."}}},
        }
        if example is not None:
            has_attributes = isinstance(codec, CloudEvents) and event is not Tombstone
            attributes = {**_EXAMPLE, "ce_type": type} if has_attributes else {}
            message["examples"] = [{"name": type, "headers": attributes, "payload": example}]
        self._messages[key] = message
        self._channels[topic]["messages"][key] = {"$ref": f"#/components/messages/{key}"}
        return key

    def _schema(self, schema: Mapping[str, Any], title: str) -> str:
        """Add a schema and those it refers to; return its name."""
        parts = {**schema.get("$defs", {})}
        if "$ref" in schema:
            root = schema["$ref"].rpartition("/")[2]
        else:
            root = title
            while root in parts:
                root += "_"
            parts[root] = {name: schema[name] for name in schema if name != "$defs"}
        names = {}
        for part in sorted(parts):
            closure = written(_closure(parts, part))
            name, count = _word(part), 1
            while self._closures.get(name, closure) != closure:
                count += 1
                name = f"{_word(part)}-{count}"
            self._closures[name], names[part] = closure, name
        for part, name in names.items():
            self._schemas[name] = _as_draft_7(parts[part], names)
        return names[root]


def _headers(event: type[Event], codec: Codec) -> dict[str, Any]:
    if not isinstance(codec, CloudEvents) or event is Tombstone:
        return {"type": "object", "properties": _TRACE}
    type = {"type": "string", "const": event.__event_type__}
    return {
        "allOf": [
            {"$ref": f"#/components/schemas/{_HEADERS}"},
            {"type": "object", "properties": {"ce_type": type}, "required": ["ce_type"]},
        ]
    }


def _envelope(event: type[Event], mode: Mode, codec: Codec) -> str:
    if event is Tombstone:
        return "A record without a value: the mark of a deletion."
    if not isinstance(codec, CloudEvents):
        identity = getattr(codec, "identity", None)
        by = "" if identity is None else f", identified by {identity}"
        return f"A record in the form of the codec {type(codec).__name__}{by}."
    modes = "binary or structured mode" if mode == "validation" else "binary mode"
    return f"CloudEvents 1.0 in {modes}."


def _decisions(handler: Handler) -> str:
    """Return sentences on retries, dead letters and the order of messages."""
    policy = handler.policy
    schedule = ", ".join(map(_time, policy.schedule))
    limits = f"up to {policy.attempts} attempts in {_time(policy.max_age)}"
    sentences = [
        f"A message whose handler fails is retried after {schedule}, {limits}, then it is dead.",
        "The handler may also park it for that time. Later messages of its key wait.",
        "An invalid or rejected message is dead at once, for an operator to decide on.",
    ]
    if handler.mode == "deferred":
        sentences.insert(0, "Messages are stored first and applied later, in order of the key.")
    if not handler.takes_old:
        sentences.append("So is one that is older than the inbox remembers.")
    if policy.after_death == "hold":
        sentences.append("Later messages of its key wait until it is redriven or discarded.")
    else:
        sentences.append("Later messages of the key of a dead letter go on.")
    return " ".join(sentences)


def _time(seconds: float) -> str:
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit and seconds % unit == 0:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def _reference(topic: str, key: str) -> dict[str, str]:
    return {"$ref": f"#/channels/{topic}/messages/{key}"}


def _word(text: str) -> str:
    """Return a text as a name of a component."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)


def _named(text: str, taken: Mapping[str, object]) -> str:
    name, count = _word(text), 1
    while name in taken:
        count += 1
        name = f"{_word(text)}-{count}"
    return name


def _closure(parts: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Return a schema and those it refers to."""
    found: dict[str, Any] = {}
    left = [root]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = parts[name]
            left += re.findall(r'"#/\$defs/([^"]+)"', written(parts[name]))
    return {"root": root, "parts": found}


def _as_draft_7(node: Any, names: Mapping[str, str]) -> Any:
    """Return a schema in draft 7, with references to the document's components."""
    if isinstance(node, list):
        return [_as_draft_7(one, names) for one in node]
    if not isinstance(node, dict):
        return node
    own = (ALIASES, KEYS, LIMITS, PATHS)
    made = {name: one for name, one in node.items() if name not in own}
    if isinstance(tag := made.get("discriminator"), dict):
        made["discriminator"] = tag["propertyName"]
    if "prefixItems" in made:
        made["additionalItems"] = made.get("items", True)
        made["items"] = made.pop("prefixItems")
    reference = made.pop("$ref", None) if isinstance(made.get("$ref"), str) else None
    made = {name: _as_draft_7(one, names) for name, one in made.items()}
    if reference is None:
        return made
    target = {"$ref": f"#/components/schemas/{names[reference.rpartition('/')[2]]}"}
    return {**made, "allOf": [target]} if made else target
