"""Inbox, handlers, outbox and relay between Kafka and PostgreSQL. The rooms are in README.md.

Import from here and from `onceward.testing`: other modules may change in any release.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from onceward.apply.writer import Conflict, Versioned, Writer, Writing
from onceward.errors import OncewardError, StoreUnavailable
from onceward.events.codec import CloudEvents, Codec, Encoded, Outgoing
from onceward.events.event import Event, Tombstone, Unpublishable
from onceward.events.message import Message, Reason, Record, Undecodable
from onceward.events.payload import payload_hash
from onceward.handlers.aggregate import Aggregate, Loads
from onceward.handlers.applied import Applied, AppliedEvent
from onceward.handlers.ordering import Gaps, Sequenced, Timed
from onceward.handlers.policy import Park, Policy, Reject, Retry
from onceward.handlers.registry import Handlers
from onceward.handlers.transaction import EventBatch, Transaction
from onceward.servers.cluster import NotAdopted
from onceward.servers.guard import HandlerFault
from onceward.servers.revisions import WrongDatabase

from . import aliases
from .service import Misconfigured, Service

aliases.install()

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

_MOVED = dict.fromkeys(("Header", "PayloadFields", "Plain", "Position"), "onceward.plain")
"""Where the names are that were here before version 2.0."""

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> object:
        """Return a name that was moved. Version 3.0 will refuse it."""
        if name not in _MOVED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        text = f"import {name} from {_MOVED[name]}, not from {__name__}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(import_module(_MOVED[name]), name)
