"""Inbox, handlers, outbox and relay between Kafka and PostgreSQL. The rooms are in README.md.

Import from here and from `pipeline.testing`: other modules may change in any release.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from pipeline.apply.writer import Conflict, Versioned, Writer, Writing
from pipeline.errors import OncewardError, StoreUnavailable
from pipeline.events.codec import CloudEvents, Codec, Encoded, Outgoing
from pipeline.events.event import Event, Tombstone, Unpublishable
from pipeline.events.message import Message, Reason, Record, Undecodable
from pipeline.events.payload import payload_hash
from pipeline.handlers.aggregate import Aggregate, Loads
from pipeline.handlers.applied import Applied, AppliedEvent
from pipeline.handlers.ordering import Gaps, Sequenced, Timed
from pipeline.handlers.policy import Park, Policy, Reject, Retry
from pipeline.handlers.registry import Handlers
from pipeline.handlers.transaction import EventBatch, Transaction
from pipeline.servers.cluster import NotAdopted
from pipeline.servers.guard import HandlerFault
from pipeline.servers.revisions import WrongDatabase

from .service import Misconfigured, Service

__all__ = [
    "Aggregate",
    "Applied",
    "AppliedEvent",
    "CloudEvents",
    "Codec",
    "Conflict",
    "Encoded",
    "Event",
    "EventBatch",
    "Gaps",
    "HandlerFault",
    "Handlers",
    "Loads",
    "Message",
    "Misconfigured",
    "NotAdopted",
    "OncewardError",
    "Outgoing",
    "Park",
    "Policy",
    "Reason",
    "Record",
    "Reject",
    "Retry",
    "Sequenced",
    "Service",
    "StoreUnavailable",
    "Timed",
    "Tombstone",
    "Transaction",
    "Undecodable",
    "Unpublishable",
    "Versioned",
    "Writer",
    "Writing",
    "WrongDatabase",
    "payload_hash",
]

_MOVED = dict.fromkeys(("Header", "PayloadFields", "Plain", "Position"), "plain")
"""Where the names are that were here before version 2.0."""

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> object:
        """Return a name that was moved. Version 3.0 will refuse it."""
        if name not in _MOVED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        text = f"import {name} from {_MOVED[name]}, not from {__name__}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(import_module(_MOVED[name]), name)
