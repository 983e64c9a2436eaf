"""The pipeline: inbox, handlers, outbox and relay between Kafka and PostgreSQL.

Read it along the way of a message:
`consumer` -> `reader` -> `batch` -> `consume` (`inbox` -> your handler -> `outbox` -> commit)
-> `relay` (`window` -> `publisher`; `unsent`: what Kafka refuses). What can't be done now takes the
way round: `policy` -> `backlog` -> `lanes` -> `consume`.
"""

from .aggregate import Aggregate
from .events import Event, Tombstone
from .handlers import Handlers
from .message import Header, Message, PayloadFields, Plain, Position
from .policy import Park, Policy, Reject, Retry
from .service import Service
from .transaction import EventBatch, Transaction

__all__ = [
    "Aggregate",
    "Event",
    "EventBatch",
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
    "Service",
    "Tombstone",
    "Transaction",
]
