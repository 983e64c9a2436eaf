"""The export: JSON Schema of every event that a service consumes and publishes."""

import json
from typing import Any

from onceward import Service
from onceward.events.codec import Codec
from onceward.events.event import Event, declared_events
from onceward.handlers.registry import Handler
from onceward.handlers.staging import CALLS
from onceward.plain.codec import Header, PayloadFields, Position, described_place

from .schemas import schema_of

FORMAT = 1
"""Version of the export's format."""
UPCAST = "upcast"
"""Member of an older type that is still consumed: the type that its data is converted to."""
STEP = "to"
"""Member beside it: the type that the older type's own upcaster returns. 1.0.0 did not write it."""


def taken(service: Service) -> dict[str, dict[str, list[Handler]]]:
    """Return the handlers by topic and type."""
    found: dict[str, dict[str, list[Handler]]] = {}
    topics = service.handlers.topics
    for one in service.handlers.takers:
        if one.topic in topics:
            of_topic = found.setdefault(one.topic, {})
            of_topic.setdefault(one.event.__event_type__, []).append(one)
    return found


def published(service: Service) -> dict[str, dict[str, type[Event]]]:
    """Return the imported event classes that have a topic, by topic and type.

    If several classes have the same topic and type, that of the service's own package is returned.
    """
    found: dict[str, dict[str, type[Event]]] = {}
    own = f"{service.package}."
    for event in sorted(declared_events(), key=lambda one: one.__module__.startswith(own)):
        if (
            event.__event_topic__ is not None
            and not event.__pydantic_generic_metadata__["parameters"]
        ):
            found.setdefault(event.__event_topic__, {})[event.__event_type__] = event
    return found


def exported(service: Service) -> dict[str, Any]:
    """Return the export. Raises `Refused` if an event has no JSON Schema."""
    types: dict[str, dict[str, dict[str, Any]]] = {}
    for topic, by_type in taken(service).items():
        types[topic] = {}
        for name, handlers in by_type.items():
            event = handlers[0].event
            types[topic][name] = {"validation": schema_of(event, "validation")}
            types[topic] |= {old: _upcast(event, old) for old in event.__event_upcasters__}
    topics = types.keys() | published(service).keys()
    calls = {
        name: _both(event) if name == event.__event_type__ else _upcast(event, name)
        for name, event in service.handlers.call_types.items()
    }
    return {
        "format": FORMAT,
        "service": service.name,
        "codecs": {one: _described(service.handlers.codec(one)) for one in topics},
        "calls": {CALLS: calls} if calls else {},
        "taken": types,
        "published": {
            topic: {name: _both(event) for name, event in by_type.items()}
            for topic, by_type in published(service).items()
        },
    }


def _upcast(event: type[Event], old: str) -> dict[str, str]:
    upcasters = event.__event_upcasters__
    after = (name for name, steps in upcasters.items() if steps == upcasters[old][1:])
    return {UPCAST: event.__event_type__, STEP: next(after, event.__event_type__)}


def _described(codec: Codec) -> dict[str, Any]:
    """Return what the codec's records and the ids, types and hashes of their events depend on."""
    contract = getattr(codec, "contract", None)
    found = json.loads(json.dumps(contract())) if callable(contract) else {}
    identity = getattr(codec, "identity", None)
    if isinstance(identity, Header | PayloadFields | Position):
        found["identity"] = described_place(identity)
    return {**found, "codec": type(codec).__name__}


def _both(event: type[Event]) -> dict[str, Any]:
    """Return the schema of written events, and that of their readers if it differs."""
    schemas = {
        "serialization": schema_of(event, "serialization"),
        "validation": schema_of(event, "validation"),
    }
    if schemas["validation"] == schemas["serialization"]:
        del schemas["validation"]
    return schemas


def written(document: object) -> str:
    """Return a document as JSON; equal documents have equal texts."""
    return json.dumps(document, ensure_ascii=False, indent=2, sort_keys=True) + "\n"
