"""Rejections: which errors of Kafka are the fault of an event or its topic, and which an outage.

An event that is itself at fault is dead at once. All else that brokers say of a batch or its
partition is up to the topic, whatever the error. So is a batch that is not acknowledged for long.
While the brokers say nothing, no event is rejected.
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple

import asyncpg
from aiokafka import errors
from aiokafka.errors import KafkaError

from onceward.servers.patches import InvalidRecordError

RejectionReason = Literal[
    "topic missing",
    "topic not allowed",
    "topic rejects many",
    "topic refuses",
    "topic not writable",
    "too large",
    "not valid",
    "subject forgotten",
]


class Rejection(NamedTuple):
    """Why Kafka does not accept an event."""

    reason: RejectionReason
    text: str
    """What is wrong, in which topic, and what to do."""
    of_topic: bool = False
    """Whether the topic accepts no event at all."""
    waits: bool = False
    """Whether the event waits for its topic; otherwise it is dead."""


Rejections = Mapping[int, Rejection]
"""Rejections by the ids of the events in the outbox."""


_waiting = partial(Rejection, of_topic=True, waits=True)

_TOO_LARGE = Rejection(
    "too large",
    "event {id} is larger than topic {topic} allows: raise the topic's max.message.bytes",
)
_REFUSES = _waiting(
    "topic refuses",
    "topic {topic} does not take events ({error}): check its settings and its replicas",
)
_KINDS: Mapping[type[KafkaError], Rejection | None] = {
    errors.UnknownTopicOrPartitionError: _waiting(
        "topic missing",
        "topic {topic} is not known to the brokers: create it, or run `service topics create`",
    ),
    errors.TopicAuthorizationFailedError: _waiting(
        "topic not allowed",
        "topic {topic} may not be written: allow this service's user to Describe and Write it",
    ),
    errors.InvalidTopicError: Rejection(
        "topic not writable",
        "topic {topic} is one of the brokers' own: no client may write it",
        of_topic=True,
    ),
    errors.MessageSizeTooLargeError: _TOO_LARGE,
    errors.RecordListTooLargeError: _TOO_LARGE,
    InvalidRecordError: Rejection(
        "not valid",
        "topic {topic} does not take event {id}; a compacted topic takes none without a key",
    ),
    # All other errors that brokers answer; the second is the client's name for one of them.
    errors.BrokerResponseError: _REFUSES,
    errors.ProducerFenced: _REFUSES,
    errors.KafkaTimeoutError: _REFUSES,
    # In a transaction, the fault of another topic of it.
    errors.InvalidTxnState: None,
    # The client's name for silence. What a broker answers by it is tried again.
    errors.RequestTimedOutError: None,
}


def rejection_of(error: KafkaError, event: asyncpg.Record) -> Rejection | None:
    """Return the rejection that the error means; None for an outage."""
    kind = next((_KINDS[one] for one in type(error).mro() if one in _KINDS), None)
    if kind is None:
        return None
    what = getattr(error, "message", error)
    text = kind.text.format(topic=event["topic"], id=event["event_id"], error=what)
    return kind._replace(text=text)
