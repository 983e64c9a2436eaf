"""Identity: how events of a topic without CloudEvents get their ids."""

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from pipeline.errors import UNSTORABLE

from .message import Reason, Record, Undecodable
from .payload import parse


@dataclass(frozen=True, slots=True)
class Header:
    """The value of a header, whose name is case-insensitive, identifies the event.

    Logical duplicates collapse: the same value again, at whatever offset, is the same event. The
    type is part of the id, so that two types may use one value: the id is `["<type>","<value>"]`, a
    JSON array.
    """

    name: str


@dataclass(frozen=True, slots=True, init=False)
class PayloadFields:
    """Top-level fields of the JSON payload identify the event: strings, numbers or booleans.

    Logical duplicates collapse: the same values again, at whatever offset, are the same event. The
    type is part of the id, which is `["<type>",<value>,…]`, a JSON array with the values as they
    are written, so 7, 7.0 and "7" identify three events. A tombstone has no fields: it is
    identified by its position.
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        if not names:
            raise ValueError('name at least one field: PayloadFields("order_id")')
        object.__setattr__(self, "names", names)


@dataclass(frozen=True, slots=True)
class Position:
    """The position in the topic identifies the event: the id is `<partition>-<offset>`.

    Logical duplicates don't collapse: a message that a producer sends twice is two events; one that
    the broker delivers twice is one. A topic that is deleted and created anew repeats positions.
    """


Identity = Header | PayloadFields | Position


@dataclass(frozen=True, slots=True)
class Plain:
    """How events of a topic without CloudEvents are identified; their source is `kafka:<topic>`.

    A record that has CloudEvents attributes nevertheless is decoded by them. Raises `ValueError`
    for a type that is empty or can't be stored.
    """

    type: str
    """The event type of every record of the topic."""
    identity: Identity

    def __post_init__(self) -> None:
        if not self.type or UNSTORABLE.search(self.type):
            raise ValueError(f"the type of a topic's events is a name, not {self.type!r}")


def plain_id(record: Record, plain: Plain, headers: Mapping[str, str]) -> str:
    """Return the event's id by the rule of the topic. Raises `Undecodable`."""
    identity = plain.identity
    try:
        if isinstance(identity, Header):
            values = [headers[identity.name.lower()]]
        elif isinstance(identity, PayloadFields) and record.value is not None:
            payload = parse(record.value)
            values = [payload[name] for name in identity.names]
        else:
            return f"{record.partition}-{record.offset}"
        if any(value in (None, "") or isinstance(value, dict | list) for value in values):
            raise ValueError("null, empty, a list or an object")
        return orjson.dumps([plain.type, *values]).decode()
    except (LookupError, TypeError, ValueError) as error:
        raise Undecodable(
            Reason.MISSING_IDENTITY,
            f"{identity} is to name the events of {record.topic!r}, and has no name for this one"
            f" ({type(error).__name__}: {error}): let the producer send it, or name them otherwise",
        ) from error
