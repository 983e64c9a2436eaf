"""Checks that an event is equal to the one that is read from its JSON."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel

from pipeline.errors import summarize_error
from pipeline.events.event import Event

_ADVICE = (
    "publish what the class and JSON keep, which is no NaN, no secret, nothing of exclude=True and"
    " nothing of another type or a subclass; an alias needs serialize_by_alias=True"
)


class Unpublishable(ValueError):
    """An event that can't be sent. It is raised to the handler; nothing was staged."""


def check_readback(event: Event, payload: bytes) -> None:
    """Raise `Unpublishable` if the event's class reads another event from the event's JSON."""
    kind = type(event)
    try:
        read = kind.__pydantic_validator__.validate_json(payload)
    except Exception as error:
        why = f"{kind.__name__} can't be read from its own JSON ({summarize_error(error)})"
        raise Unpublishable(f"{why}: {_ADVICE}") from error
    if read.__dict__ != event.__dict__ or event.__pydantic_extra__:
        before, after = _members(event), _members(read)
        for name in before:
            if not _is_same(before[name], after.get(name)):
                why = f"{kind.__name__}.{name} is another value when it is read from its own JSON"
                raise Unpublishable(f"{why}: {_ADVICE}")


def _members(one: object) -> dict[str, Any]:
    if isinstance(one, BaseModel):
        return {name: getattr(one, name) for name in type(one).model_fields} | (
            one.__pydantic_extra__ or {}
        )
    return getattr(one, "__dict__", {})


def _is_same(one: Any, other: Any) -> bool:
    """Whether values are the same, also for types whose `==` does not compare values."""
    if one == other or type(one) is not type(other):
        return bool(one == other)
    if isinstance(one, datetime):  # in two zones, in the hour that is repeated
        return bool(one.isoformat() == other.isoformat())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    before, after = (
        _members(value) if not isinstance(value, dict) else value for value in (one, other)
    )
    return (
        bool(before)
        and before.keys() == after.keys()
        and all(_is_same(before[name], after[name]) for name in before)
    )
