"""Codecs: how the events of a topic are written in its records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import NamedTuple, Protocol

from .cloudevents import REQUIRED, STRUCTURED, Named, decode
from .event import Event, Tombstone
from .message import Message, Reason, Record, Undecodable
from .payload import not_json, parse


class Outgoing(Protocol):
    """The attributes of an event that is published, as of a row of the outbox."""

    @property
    def topic(self) -> str: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def payload(self) -> bytes | None: ...  # JSON
    @property
    def event_id(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def subject(self) -> str | None: ...
    @property
    def sequence(self) -> int | None: ...
    @property
    def traceparent(self) -> str | None: ...
    @property
    def tracestate(self) -> str | None: ...
    @property
    def baggage(self) -> str | None: ...


class Encoded(NamedTuple):
    """What a codec writes of an event."""

    payload: bytes | None
    content_type: str
    headers: Sequence[tuple[str, bytes]] | None = None
    """All headers of the record; None: those of CloudEvents in binary mode."""


class Codec(Protocol):
    """How the events of a topic are written in its records. One instance may serve many topics.

    `decode` and `encode` are called for every event in the event loop: they wait for nothing.
    Retries decode the stored bytes and headers again, perhaps in another process.

    A method `contract()` may return, as JSON, the arguments that decide what is read and written:
    `service schema check` warns if they change. Names that the codecs of the template use mean the
    same here.
    """

    async def open(self, topic: str, events: Sequence[type[Event]]) -> None:
        """Check that these events can be written, and fetch what `encode` needs for them.

        It is called before the first event of a process is published; `events` are all classes that
        the service declares for the topic. Raises `Unpublishable` for one that can't be written,
        and `StoreUnavailable`, after which it is called again.
        """
        return

    async def prepare(self, records: Sequence[Record]) -> None:
        """Fetch what decoding these records of one topic needs, such as schemas, and keep it.

        It is called once for each batch. Raises `StoreUnavailable`: then the records wait, which
        spends no attempt. What is wrong with a record is an error of `decode`.
        """
        return

    def decode(self, record: Record, *, hash: bytes | None = None) -> Message:
        """Return the event. `Message.data` is JSON, whatever the record contains.

        `hash` is that of the payload, if it is known already. Raises `Undecodable`, and
        `StoreUnavailable` if what `prepare` has fetched for the record is not there.
        """
        ...

    def encode(self, event: Outgoing) -> Encoded:
        """Return the record's payload and headers. Raises `Unpublishable`."""
        ...


@dataclass(frozen=True, slots=True)
class CloudEvents(Codec):
    """The codec of topics that are declared by no other one. Events are written in binary mode."""

    structured: bool = False
    """Whether records without CloudEvents headers are read in structured mode, in spite of their
    content type. Records of the content type of that mode always are."""

    def decode(self, record: Record, *, hash: bytes | None = None) -> Message:
        """Decode a record in binary or structured mode.

        A tombstone without CloudEvents headers, as in compacted topics, has its position as its id.
        """
        return decode(record, _not_cloudevents, structured=self.structured, hash=hash)

    def encode(self, event: Outgoing) -> Encoded:
        """Return the event's payload: the relay writes the headers."""
        return Encoded(event.payload, "application/json")

    def contract(self) -> Mapping[str, object]:
        """Return whether structured events are read without their content type."""
        return {"structured": self.structured}


CLOUD_EVENTS = CloudEvents()


def check_codec(codec: Codec) -> None:
    """Raise `TypeError` for a class, a lack of methods, and `async def decode` or `encode`."""
    if isinstance(codec, type):
        raise TypeError(f"codec= takes an object: write codec={codec.__name__}(…)")
    kind = type(codec).__name__
    names = ("prepare", "decode")  # a codec that only reads needs no others
    if missing := [name for name in names if not callable(getattr(codec, name, None))]:
        raise TypeError(
            f"{kind} has no method {' and no '.join(missing)}: write `class {kind}(Codec)`, with"
            " `decode`, and `encode` if events are published"
        )
    for name in ("decode", "encode"):
        if iscoroutinefunction(getattr(codec, name, None)):
            raise TypeError(
                f"{kind}.{name} is called in the event loop and waits for nothing: write"
                " `def`, and fetch what it needs in `prepare` or `open`"
            )


def _not_cloudevents(record: Record, headers: Mapping[str, str]) -> Named:
    """Return the identity of a tombstone; raises `Undecodable` for other records."""
    if record.value is None:
        position = f"{record.partition}-{record.offset}"
        kind = Tombstone.__event_type__
        return Named(position, kind, kind, headers.get("content-type"), None)
    topic = record.topic
    try:
        payload = parse(record.value)
    except ValueError:
        payload = None
    if isinstance(payload, dict) and payload.keys() >= {name[3:] for name in REQUIRED}:
        given = headers.get("content-type")
        content_type = f"its content-type is {given[:80]!r}" if given else "it has no content-type"
        text = (
            f"the value looks like a structured CloudEvent; {content_type}: let the producer send"
            f" {STRUCTURED}, or declare"
            f" handlers.topic({topic!r}, codec=CloudEvents(structured=True))"
        )
    else:
        text = (
            f"the headers {', '.join(REQUIRED)} are missing: let the producer send CloudEvents, or"
            f" declare how events of {topic!r} are written, with the package plain:"
            f" handlers.topic({topic!r}, codec=Plain(type=…, identity=Header(…) or"
            " PayloadFields(…) or Position()))"
        )
    raise Undecodable(Reason.NOT_CLOUDEVENTS, f"{not_json(record.value) or text}")
