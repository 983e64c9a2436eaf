"""Refusals: what Kafka does not take, for a reason that lies in an event or in its topic.

All other errors are outages: they are waited for, and no event is blamed for them. Kafka answers
for a batch; whose fault it is, is found by halving.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import asyncpg
from aiokafka import errors
from aiokafka.errors import BrokerResponseError, KafkaError

_AT_MOST = 20
"""Refusals of one partition in a page, before its topic waits as a whole: each costs a producer."""

Reason = Literal[
    "topic missing", "topic not allowed", "topic not writable", "too large", "not valid"
]


@dataclass(frozen=True)
class Refusal:
    """Why Kafka does not take an event."""

    reason: Reason
    text: str
    """What is wrong, in which topic, and what helps."""
    of_topic: bool
    """Whether the topic takes no event at all."""


Refused = dict[int, Refusal | None]
"""Events that were not sent, by their ids in the outbox; None: one before it, of its key, is."""


class InvalidRecordError(BrokerResponseError):  # type: ignore[misc]
    """The broker's INVALID_RECORD, which aiokafka does not know."""

    errno = 87
    message = "INVALID_RECORD"
    description = "The broker does not take this record."


errors.kafka_errors.setdefault(InvalidRecordError.errno, InvalidRecordError)


class _Kind(NamedTuple):
    reason: Reason
    of_topic: bool
    text: str


_TOO_LARGE = _Kind(
    "too large",
    False,
    "event {id} is larger than topic {topic} allows: raise the topic's max.message.bytes",
)
_KINDS: Mapping[type[KafkaError], _Kind] = {
    errors.UnknownTopicOrPartitionError: _Kind(
        "topic missing",
        True,
        "topic {topic} is not known to the brokers: create it, or run `service topics create`",
    ),
    errors.TopicAuthorizationFailedError: _Kind(
        "topic not allowed",
        True,
        "topic {topic} may not be written: allow this service's user to Describe and Write it",
    ),
    errors.InvalidTopicError: _Kind(
        "topic not writable", True, "topic {topic} is one that nobody may write, to the brokers"
    ),
    errors.MessageSizeTooLargeError: _TOO_LARGE,
    errors.RecordListTooLargeError: _TOO_LARGE,
    InvalidRecordError: _Kind(
        "not valid",
        False,
        "event {id} is none that topic {topic} takes; a compacted topic takes none without a key",
    ),
}


def refusal_of(error: KafkaError, event: asyncpg.Record) -> Refusal | None:
    """Return the refusal that the error is, if it is about this event; None for an outage."""
    kind = _KINDS.get(type(error))
    if kind is None:
        return None
    text = kind.text.format(topic=event["topic"], id=event["event_id"])
    return Refusal(kind.reason, text, kind.of_topic)


@dataclass
class Chain:
    """Events of one Kafka partition that are still to be sent, in order."""

    topic: str
    partition: int
    runs: list[list[asyncpg.Record]]
    """A batch never holds events of two of them: what was refused is tried again in halves."""
    taken: list[list[asyncpg.Record]] = field(default_factory=list)
    """What Kafka has acknowledged in this round."""
    refusals: int = 0

    def events(self) -> Iterable[asyncpg.Record]:
        """Return all that is still to be sent."""
        return (event for run in self.runs for event in run)

    def take(self, count: int) -> None:
        """Note that the first events are acknowledged."""
        self._cut(count)
        self.taken.append(self.runs.pop(0))

    def take_back(self) -> None:
        """Note that nothing of this round counts: its transaction was not committed."""
        self.runs[:0] = self.taken
        self.taken = []

    def halve(self, count: int) -> None:
        """Let the first events, which were refused together, go in two batches."""
        self._cut(count)
        self._cut(count // 2)

    def _cut(self, count: int) -> None:
        run = self.runs.pop(0)
        self.runs[:0] = [part for part in (run[:count], run[count:]) if part]

    def leave_out(self, refusal: Refusal) -> Refused:
        """Return the first event, and the later ones of its key: they are not to be sent."""
        first = self.runs[0][0]
        behind = [one["id"] for one in self.events() if one["key"] == first["key"] is not None]
        refused: Refused = dict.fromkeys(behind) | {first["id"]: refusal}
        runs = [[one for one in run if one["id"] not in refused] for run in self.runs]
        self.runs = [run for run in runs if run]
        return refused


@dataclass
class Page:
    """What has been found out about a page of events."""

    refused: Refused = field(default_factory=dict)
    _closed: dict[str, Refusal] = field(default_factory=dict)
    """Topics that take nothing now."""
    _limits: dict[str, int] = field(default_factory=dict)
    """Size of the smallest batch that was too large for a topic."""
    is_void: bool = False
    """Whether a refusal has spoilt the transaction that the events are sent in."""

    def is_too_large(self, topic: str, size: int) -> bool:
        """Whether no smaller batch than this was found too large already."""
        return topic in self._limits and size >= self._limits[topic]

    def blame(self, chain: Chain, refusal: Refusal, count: int, size: int) -> None:
        """Draw the consequences of a refused batch: for its topic, its halves, or its event."""
        is_news = not self.is_too_large(chain.topic, size)
        if refusal.reason == "too large" and is_news:
            self._limits[chain.topic] = size
        chain.refusals += is_news
        if refusal.of_topic:
            self._closed[chain.topic] = refusal
        elif count > 1:
            chain.halve(count)
        else:
            self.refused |= chain.leave_out(refusal)
        if chain.refusals >= _AT_MOST:
            text = f"topic {chain.topic} has refused {_AT_MOST} events of a page: {refusal.reason}"
            self._closed[chain.topic] = replace(refusal, of_topic=True, text=text)

    def left(self, chains: Sequence[Chain]) -> list[Chain]:
        """Return the chains with something to send, and leave out what a topic does not take."""
        for chain in chains:
            if refusal := self._closed.get(chain.topic):
                self.refused |= {event["id"]: refusal for event in chain.events()}
                chain.runs = []
        return [chain for chain in chains if chain.runs]
