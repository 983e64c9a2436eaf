"""The codec `Plain`: events without CloudEvents, described by where type, id and data are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import orjson

from onceward.errors import UNSTORABLE, describe_error
from onceward.events.cloudevents import SEVERAL, TRACE, Named, decode
from onceward.events.codec import Codec, Encoded, Outgoing
from onceward.events.event import Event, Tombstone, Unpublishable
from onceward.events.message import Message, Reason, Record, Undecodable
from onceward.events.payload import parse

Events = Sequence[type[Event]]


@dataclass(frozen=True, slots=True)
class Header:
    """The value of a header, whose name is case-insensitive, identifies the event.

    Logical duplicates collapse: the same value again, at whatever offset, is the same event. The
    record's name for the type, which `types` does not change, is part of the id, so that two types
    may use one value: the id is `["<name>","<value>"]`, a JSON array.
    """

    name: str

    @property
    def key(self) -> str:
        """The name by which headers are looked up."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, init=False)
class PayloadFields:
    """Fields of the JSON payload identify the event: strings, numbers or booleans.

    A name is a path, in which dots lead into objects and numbers into arrays: `order.lines.0.id`.

    Logical duplicates collapse: the same values again, at whatever offset, are the same event. The
    record's name for the type is part of the id, as with `Header`, which is `["<name>",<value>,…]`,
    a JSON array with the values as they are written, so 7, 7.0 and "7" identify three events. A
    tombstone has no fields: it is identified by its position.
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
class Plain(Codec):
    """The codec of a topic without CloudEvents: where its records have type, identity and data.

    The source of the events is `kafka:<topic>`. A record that has CloudEvents attributes
    nevertheless is decoded by them. Events are published in the form that is read. Raises
    `ValueError` for a type that is empty or can't be stored, and for `types` without a use.
    """

    type: str | Header | PayloadFields
    """The event type of every record, or the header or the one field that names it."""
    identity: Identity
    data: str | None = None
    """Path of the payload's member that is the event's data, as in `PayloadFields`; None: the whole
    payload. JSON in a string of JSON is read, too."""
    types: Mapping[str, str] | Callable[[str], str] = field(default_factory=dict)
    """The event type for a name in the record. Names that a mapping lacks are event types. With a
    function nothing can be published."""
    content_type: str = "application/json"
    """Header of what is published."""

    def __post_init__(self) -> None:
        if isinstance(self.type, str):
            if not self.type or UNSTORABLE.search(self.type):
                raise ValueError(f"the type of a topic's events is a name, not {self.type!r}")
            if self.types:
                raise ValueError(f"all events have the type {self.type!r}: leave out types=")
        elif isinstance(self.type, PayloadFields) and len(self.type.names) > 1:
            raise ValueError(f"one field names the type of an event, not {self.type.names}")
        headers = [one for one in (self.type, self.identity) if isinstance(one, Header)]
        if len({one.key for one in headers}) < len(headers):
            raise ValueError(f"the header {headers[0].name!r} can't have both type and identity")

    async def open(self, topic: str, events: Events) -> None:
        """Raise `Unpublishable` for an event whose type can't be written."""
        for event in events:
            self._name_of(event.__event_type__)

    def decode(self, record: Record, *, hash: bytes | None = None) -> Message:
        """Decode a record by this description, or as CloudEvents."""
        return decode(record, self._named, hash=hash)

    def encode(self, event: Outgoing) -> Encoded:
        """Return payload and headers in which `decode` finds type, id and data."""
        name, payload = self._name_of(event.type), event.payload
        texts: dict[str, str | None] = {"content-type": self.content_type}
        for place, text in ((self.type, name), (self.identity, event.event_id)):
            if isinstance(place, Header):
                texts[place.name] = text
        texts |= {header: getattr(event, header) for header in TRACE}
        if payload is not None and self._looks_into_payload:
            payload = self._enveloped(payload, name, event.event_id)
        headers = [(name, text.encode()) for name, text in texts.items() if text is not None]
        return Encoded(payload, self.content_type, headers)

    def _named(self, record: Record, headers: Mapping[str, str]) -> Named:
        content_type, data, payload = headers.get("content-type"), record.value, None
        is_text = data is not None and data[:1] == b'"'
        if data is not None and (is_text or self._looks_into_payload):
            place = "" if self.data is None else f" with its data at {self.data!r}"
            with _refusing(Reason.INVALID_ENVELOPE, record, f"the payload is to be JSON{place}"):
                payload = _unpacked(parse(data))
                if is_text or self.data is not None:
                    inner = payload if self.data is None else _unpacked(_at(payload, self.data))
                    content_type, data = "application/json", orjson.dumps(inner)
        name, type = self._type(record, payload, headers)
        identity = self.identity
        id = f"{record.partition}-{record.offset}"
        if isinstance(identity, Header) or (isinstance(identity, PayloadFields) and data):
            with _refusing(Reason.MISSING_IDENTITY, record, f"{identity} is to name the event"):
                id = orjson.dumps([name, *_names(identity, payload, headers)]).decode()
        return Named(id, name, type, content_type, data)

    def contract(self) -> Mapping[str, object]:
        """Return where type and data are, and the event types by their names in the records."""
        types = None if callable(self.types) else dict(self.types)
        return {"type": described_place(self.type), "types": types, "data": self.data}

    @property
    def _looks_into_payload(self) -> bool:
        return self.data is not None or PayloadFields in (type(self.type), type(self.identity))

    def _type(self, record: Record, payload: object, headers: Mapping[str, str]) -> tuple[str, str]:
        """Return the record's name for the type, and the type."""
        place, types, found = self.type, self.types, ""
        if isinstance(place, str):
            return place, place
        if record.value is None and not (isinstance(place, Header) and place.key in headers):
            return Tombstone.__event_type__, Tombstone.__event_type__
        with _refusing(Reason.MISSING_TYPE, record, f"{place} is to name the type of the event"):
            (name,) = _names(place, payload, headers)
            found = types(name) if callable(types) else types.get(name, name)
            if type(found) is not str or not found or UNSTORABLE.search(found):
                raise ValueError("the type is empty, no text, or text that can't be stored")
        return name, found

    def _name_of(self, event_type: str) -> str:
        """Return the name that a record has for the type. Raises `Unpublishable`."""
        if callable(self.types):
            raise Unpublishable(
                f"{event_type!r} can't be published: the function types= of its topic's codec has"
                " no inverse, so write a dict"
            )
        name = {one: name for name, one in self.types.items()}.get(event_type, event_type)
        read = self.type if isinstance(self.type, str) else self.types.get(name, name)
        if read != event_type:
            raise Unpublishable(
                f"{event_type!r} can't be published to a topic where it would be read as"
                f" {read!r}: declare another codec for the topic"
            )
        return name

    def _enveloped(self, payload: bytes, name: str, id: str) -> bytes:
        """Return the payload with its envelope, its type and its id, as far as it lacks these."""
        try:
            tree = parse(payload)
            if self.data is not None:
                data, tree = tree, {}
                _put(tree, self.data, data)
            if isinstance(self.type, PayloadFields):
                (path,) = self.type.names
                if _put(tree, path, name) != name:
                    raise ValueError(f"its field {path!r} has another value")
            if isinstance(self.identity, PayloadFields):
                if len(self.identity.names) == 1:
                    _put(tree, self.identity.names[0], id)
                _names(self.identity, tree, {})
            return orjson.dumps(tree)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise Unpublishable(
                f"an event of the type {name!r} can't be written as its topic's codec reads it"
                f" ({describe_error(error)}): change the event or the codec"
            ) from error


def described_place(place: str | Identity) -> Mapping[str, object]:
    """Return as JSON where something of an event is found."""
    match place:
        case Header():
            return {"kind": "header", "names": [place.key]}
        case PayloadFields():
            return {"kind": "payload fields", "names": [*place.names]}
        case Position():
            return {"kind": "position", "names": []}
        case _:
            return {"kind": "constant", "names": [place]}


@contextmanager
def _refusing(reason: Reason, record: Record, rule: str) -> Iterator[None]:
    """Raise `Undecodable` for any error, because `types` may raise any."""
    try:
        yield
    except Exception as error:
        raise Undecodable(
            reason,
            f"by the codec of {record.topic!r} {rule}: {describe_error(error)}. Let the producer"
            " send it, or declare the codec otherwise",
        ) from error


def _names(place: Header | PayloadFields, payload: object, headers: Mapping[str, str]) -> list[Any]:
    """Return the values that name something; raises an error if one is missing or no name."""
    if isinstance(place, Header):
        if headers.get(place.key, SEVERAL).startswith(SEVERAL):
            raise ValueError(f"the header {place.name!r} has no value, several values, or no text")
        return [headers[place.key]]
    values = [_at(payload, path) for path in place.names]
    for path, value in zip(place.names, values, strict=True):
        if value in (None, "") or isinstance(value, dict | list):
            raise ValueError(f"{path!r} is null, empty, a list or an object")
    return values


def _unpacked(value: Any) -> Any:
    """Return a value of JSON, or the one that a string of JSON contains."""
    return parse(value.encode()) if isinstance(value, str) else value


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = _unpacked(value)
        try:
            value = value[int(name)] if isinstance(value, list) else value[name]
        except (LookupError, TypeError, ValueError):
            raise ValueError(f"the payload has no {path!r}") from None
    return value


def _put(tree: Any, path: str, value: object) -> object:
    """Return what is at the path: the value, if nothing was."""
    names = path.split(".")
    for name, following in zip_longest(names, names[1:]):
        new = value if following is None else [] if following.isdigit() else {}
        if not isinstance(tree, list):
            tree = tree.setdefault(name, new)
            continue
        if int(name) == len(tree):
            tree.append(new)
        tree = tree[int(name)]
    return tree
