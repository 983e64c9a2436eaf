"""Records as a producer sends them, made from events; wrong ones are refused with advice."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from time import time
from typing import TypeAlias

from aiokafka import ConsumerRecord

from onceward.events.event import Event, Tombstone, payload_of
from onceward.events.payload import payload_hash
from onceward.handlers.registry import Handler, Handlers
from onceward.handlers.staged import StagedEvent

from .errors import HarnessMisused

KafkaRecord: TypeAlias = "ConsumerRecord[bytes, bytes]"
Headers = Mapping[str, str | bytes | None]
"""Headers by their names, text as UTF-8."""


@dataclass(frozen=True)
class Sent:
    """An event as a producer sends it; its fields are the arguments of `Harness.handle`."""

    event: Event
    key: str | bytes | None = None
    """The record's key, text as UTF-8. None: the primary key of the row that the handler's `loads=`
    names, and no key if there is no `loads=`."""
    topic: str | None = None
    """None: the topic from which handlers take the event, if there is only one."""
    id: str | None = None
    """The id that its topic's codec writes, by default the CloudEvents id. None: a hash of the
    event, so that an equal event is a duplicate."""
    source: str = "/tests"
    """The CloudEvents source, which identifies the event together with the id."""
    headers: Headers = field(default_factory=dict)
    """More headers, such as `ce_sequence`; they replace those of the kit."""
    partition: int = 0
    age: timedelta = timedelta()
    """How long ago it was sent."""

    def record(self, handlers: Handlers) -> KafkaRecord:
        """Return it as a relay sends it, in the form of its topic's codec.

        Raises `HarnessMisused` if no handler takes it, and `Unpublishable` if the codec can't write
        it.
        """
        if not isinstance(self.event, Event):
            raise HarnessMisused(
                f"a message is an event or Sent(event, …), and several are a list of them; this is"
                f" {self.event!r:.200}. `handle_record` accepts any record"
            )
        takers = _takers(handlers, self.event, self.topic)
        payload: bytes | None = payload_of(self.event)
        kind, topic = self.event.__event_type__, takers[0].topic
        id = self.id or payload_hash(kind, None, payload).hex()
        key = handlers.record_key(topic, self.event) if self.key is None else self.key
        if isinstance(self.event, Tombstone):
            payload, key = None, key or self.event.key
        subject = key if key and isinstance(key, str) else None
        names = (id, self.source, kind, subject, None, "application/json", None, None, None)
        staged = StagedEvent(topic, _bytes_of("key", key), payload, *names)
        value, headers = staged.encoded(handlers.codec(topic), datetime.now(UTC) - self.age)
        made = record(
            topic,
            value,
            key=staged.key,
            headers={**dict(headers), **self.headers},
            partition=self.partition,
        )
        made.timestamp -= round(1_000 * self.age.total_seconds())
        return made


def record(
    topic: str,
    value: str | bytes | None,
    *,
    key: str | bytes | None,
    headers: Headers,
    partition: int,
) -> KafkaRecord:
    """Return a record of now, without an offset. Raises `HarnessMisused` for what is no bytes."""
    value, key = _bytes_of("value", value), _bytes_of("key", key)
    encoded = {name: _bytes_of(f"header {name!r}", text) for name, text in headers.items()}
    return ConsumerRecord(
        topic=topic,
        partition=partition,
        offset=-1,
        timestamp=int(time() * 1_000),
        timestamp_type=0,
        key=key,
        value=value,
        checksum=None,
        serialized_key_size=len(key or b""),
        serialized_value_size=len(value or b""),
        headers=tuple(encoded.items()),
    )


def _bytes_of(what: str, given: object) -> bytes | None:
    if given is None or isinstance(given, bytes):
        return given
    if isinstance(given, str):
        return given.encode()
    raise HarnessMisused(f"the {what} of a record is bytes, text or None, not {given!r:.200}")


def check_topic(handlers: Handlers, topic: str) -> None:
    """Raise `HarnessMisused` for a topic that no handler reads."""
    if topic not in handlers.topics:
        read = ", ".join(sorted(handlers.topics)) or "none"
        raise HarnessMisused(f"no handler reads the topic {topic!r}; topics with handlers: {read}")


def _takers(handlers: Handlers, event: Event, topic: str | None) -> list[Handler]:
    """Return the handlers that take the event, all from one topic."""
    name, read = type(event).__name__, handlers.topics
    takers = [one for one in handlers.takers if one.event is type(event) and one.topic in read]
    topics = sorted({one.topic for one in takers})
    if topic is not None:
        check_topic(handlers, topic)
        takers = [one for one in takers if one.topic == topic]
    if not takers and type(event) in handlers.call_types.values():
        raise HarnessMisused(
            f"{name} is a call to the outside: handle an event whose handler makes it by tx.call,"
            " and use run_calls"
        )
    if not takers:
        place = f"of the topic {topic!r} " if topic else ""
        where = f" It is taken from: {', '.join(topics)}." if topics else ""
        raise HarnessMisused(
            f"no handler {place}takes {name}: register one by @handlers.on({name}, topic=…), in a"
            f" module that the service imports.{where} `handle_record` accepts any record"
        )
    if topic is None and len(topics) > 1:
        raise HarnessMisused(
            f"handlers take {name} from several topics ({', '.join(topics)}): write"
            f" handle(…, topic={topics[0]!r})"
        )
    return takers
