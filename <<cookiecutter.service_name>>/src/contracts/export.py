"""The export: JSON Schema of every event that a service consumes and publishes."""

import json
from typing import Any

from pipeline import Service
from pipeline.events.codec import Codec
from pipeline.events.event import Event, declared_events
from pipeline.handlers.registry import Handler
from pipeline.handlers.staging import CALLS

from .schemas import schema_of

UPCAST = "upcast"
"""Member of an older type that is still consumed: the type that its data is converted to."""


def taken(service: Service) -> dict[str, dict[str, list[Handler]]]:
    """Return the handlers by topic and type."""
    found: dict[str, dict[str, list[Handler]]] = {}
    topics = service.handlers.topics
    for one in service.handlers:
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
            types[topic] |= {old: {UPCAST: name} for old in event.__event_upcasters__}
    topics = types.keys() | published(service).keys()
    calls = {
        name: _both(event) if name == event.__event_type__ else {UPCAST: event.__event_type__}
        for name, event in service.handlers.call_types.items()
    }
    return {
        "service": service.name,
        "codecs": {one: name_of(service.handlers.codec(one)) for one in topics},
        "calls": {CALLS: calls} if calls else {},
        "taken": types,
        "published": {
            topic: {name: _both(event) for name, event in by_type.items()}
            for topic, by_type in published(service).items()
        },
    }


def name_of(codec: Codec) -> str:
    """Return the codec's name with its source of event ids, which must not change either."""
    identity = getattr(codec, "identity", None)
    name = type(codec).__name__
    return name if identity is None else f"{name}, identified by {identity}"


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
