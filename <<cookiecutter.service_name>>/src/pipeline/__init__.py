"""Inbox, handlers, outbox and relay between Kafka and PostgreSQL. The rooms are in README.md."""

from pipeline.apply.writer import Conflict, Versioned, Writer, Writing
from pipeline.events.codec import CloudEvents, Codec
from pipeline.events.event import Event, Tombstone
from pipeline.events.message import Message
from pipeline.events.plain import Header, PayloadFields, Plain, Position
from pipeline.handlers.aggregate import Aggregate
from pipeline.handlers.ordering import Gaps, Sequenced, Timed
from pipeline.handlers.policy import Park, Policy, Reject, Retry
from pipeline.handlers.registry import Handlers
from pipeline.handlers.transaction import EventBatch, Transaction

from .service import Service

__all__ = [
    "Aggregate",
    "CloudEvents",
    "Codec",
    "Conflict",
    "Event",
    "EventBatch",
    "Gaps",
    "Handlers",
    "Header",
    "Message",
    "Park",
    "PayloadFields",
    "Plain",
    "Policy",
    "Position",
    "Reject",
    "Retry",
    "Sequenced",
    "Service",
    "Timed",
    "Tombstone",
    "Transaction",
    "Versioned",
    "Writer",
    "Writing",
]
