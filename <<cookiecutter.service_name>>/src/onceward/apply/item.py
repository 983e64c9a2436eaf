"""An item: one message for one of its handlers, and its state; and its row of the backlog."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, Self

from opentelemetry.context import Context

from onceward.errors import OncewardError
from onceward.events.event import Event
from onceward.events.message import LONGEST_KEPT_KEY, Message, Record
from onceward.events.payload import HASH_VERSION
from onceward.handlers.ordering import sequence_of
from onceward.handlers.policy import ISOLATED, NEW, Decision, History, Reject
from onceward.handlers.registry import Handler


class IdentityMismatch(OncewardError):
    """An event came again with the same source and id, but with another payload."""

    def __init__(self, message: Message, remembered: bytes) -> None:
        super().__init__(
            f"{message.type} {message.id!r} of {message.source!r} came before with payload hash"
            f" {remembered.hex()}, and now comes with {message.hash.hex()}:"
            " its producer must give a changed event a new id"
        )
        self.remembered = remembered


class Known(NamedTuple):
    """The payload hash that the inbox or the backlog has stored for a message."""

    hash: bytes
    hash_version: int

    def mismatch(self, message: Message) -> IdentityMismatch | None:
        """Return an error if the message has another payload."""
        # Hashes of two versions can't be compared: then equal ids are taken for the same event.
        # A message without data has no hash.
        is_comparable = self.hash_version == HASH_VERSION and self.hash and message.hash
        if is_comparable and self.hash != message.hash:
            return IdentityMismatch(message, self.hash)
        return None


class StoredRecord(NamedTuple):
    """A record of the backlog, as it was read from Kafka."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    stored_for: float
    """Seconds that it has been in the backlog."""

    @classmethod
    def copy_of(
        cls, record: Record, value: bytes, headers: Sequence[tuple[str, bytes | None]]
    ) -> Self:
        """Return a record with another value and other headers."""
        place = record.topic, record.partition, record.offset, record.timestamp
        return cls(*place, record.key, value, headers, stored_for=0.0)


class Item(NamedTuple):
    """One message for one of its handlers."""

    handler: Handler
    key: bytes
    """The marker's key: a hash of consumer, source and id."""
    message: Message
    record: Record
    event: Event | None = None
    """None if the payload is not validated yet, or is invalid: then `fault` says why."""
    fault: BaseException | None = None
    history: History = NEW
    """What is known from earlier transactions."""
    row: bytes | None = None
    """Key of its row, if it comes from the backlog."""
    stored: Known | None = None
    """The payload hash in its row, if it comes from the backlog."""
    was_young: bool = False
    """Whether it was not too old when it was stored in the backlog."""
    reason: str = ""
    """Why it is in the backlog, if it comes from there."""
    last_error: str | None = None
    """Type and text of its latest error."""
    trace: str | None = None
    """`traceparent` in its row: that of its first attempt, or else of its sender."""
    called: Context | None = None
    """Trace context of a call that was made before the transaction, and has a span already."""
    undecoded: str = ""
    """Why its record can't be decoded, if `fault` is that. Its key is then a hash of the record,
    and its message has the place and the key of the record alone."""

    @property
    def consumer(self) -> str:
        """Name of the consumer, which is part of the marker's key."""
        return self.handler.consumer

    @property
    def name(self) -> str:
        """Consumer, type and id, for the log; or the place, if nothing else is known."""
        if self.undecoded:
            return f"{self.consumer}: {place_of(self.record)}"
        return f"{self.consumer}: {self.message.type} {self.message.id!r}"

    @property
    def has_failed(self) -> bool:
        """Whether it has failed in an earlier transaction, where the breaker has judged it.

        False if that has spent no attempt, except if the message was isolated in a batch.
        """
        return self.history.attempts > 0 or self.reason == ISOLATED

    @property
    def sequence(self) -> int:
        """CloudEvents' sequence if the handler has `gaps`; 0: the order is that of records."""
        if self.handler.gaps is None:
            return 0
        with suppress(Reject):
            return sequence_of(self.message)
        return 0

    @property
    def order_key(self) -> bytes:
        """Hash of (consumer, topic, key): messages with the same one are handled in order.

        A correction has the place in the order of the consumer that it corrects.
        """
        return order_key(self.handler.queue, self.record)


class Row(NamedTuple):
    """A message or record to be stored, and the decision on it."""

    key: bytes
    """The marker's key if the record has an identity: no message is stored twice."""
    consumer: str
    """Empty for what belongs to none: a record that could not be decoded, and a message that has
    the identity of another one. If it is tried again, all consumers of its topic get it."""
    record: Record
    decision: Decision
    item: Item | None = None
    remembered: bytes | None = None
    """The payload hash of the earlier message of this identity, if it differs."""
    mode: str = "immediate"
    """Mode of the handler that will take it, if there is no item."""

    @property
    def is_new(self) -> bool:
        """Whether it is not in the backlog yet."""
        return self.item is not None and self.item.row is None

    @property
    def first_trace(self) -> str | None:
        """`traceparent` of its first attempt, if this transaction has made it."""
        if self.item is None or self.item.trace != self.item.message.traceparent:
            return None
        return self.decision.trace


@dataclass(frozen=True, slots=True)
class Undecoded:
    """A record that can't be given to any handler."""

    record: Record
    reason: str
    error: Exception


def place_of(record: Record) -> str:
    """Return the place of a record, for people."""
    return f"{record.topic}/{record.partition} at offset {record.offset}"


def order_key(consumer: str, record: Record) -> bytes:
    """Return the 16 bytes of (consumer, topic, key); of the record's place if it has no key."""
    if record.key is None:
        return _digest(consumer, record.topic, f"-{record.partition}:{record.offset}".encode())
    made = _kept_digest if len(record.key) <= LONGEST_KEPT_KEY else _digest
    return made(consumer, record.topic, b"+" + record.key)


def record_digest(name: str, record: Record) -> bytes:
    """Return a hash, in 16 bytes, of a name and of the record's key and value."""
    digest = blake2b(name.encode(), digest_size=16)
    for part in (record.key, record.value):
        digest.update(b"-" if part is None else b"%d:%b" % (len(part), part))
    return digest.digest()


def _digest(consumer: str, topic: str, key: bytes) -> bytes:
    text = f"{len(consumer)}:{len(topic)}:{consumer}{topic}".encode()
    return blake2b(text + key, digest_size=16).digest()


_kept_digest = lru_cache(maxsize=65_536)(_digest)
