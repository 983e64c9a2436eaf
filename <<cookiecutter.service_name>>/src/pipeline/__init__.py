"""The pipeline: inbox, handlers, outbox and relay between Kafka and PostgreSQL.

Read it along the way of a message:
`consumer` -> `reader` -> `batch` -> `consume` (`inbox` -> your handler -> `outbox` -> commit)
-> `relay` (`window` -> `publisher`; `unsent`: what Kafka refuses). What can't be done now takes the
way round: `policy` -> `backlog` -> `lanes` -> `consume`. What is due later waits in `scheduled`.
Calls to the outside, `effects`, are made by the `caller` after the commit.
Who writes without a message, as an HTTP API does, takes `writer`.
"""

from .aggregate import Aggregate
from .effects import Call
from .events import Event, Tombstone
from .handlers import Handlers
from .message import Header, Message, PayloadFields, Plain, Position
from .ordering import Gaps, Sequenced, Timed
from .policy import Park, Policy, Reject, Retry
from .service import Service
from .transaction import EventBatch, Transaction
from .writer import Conflict, Versioned, Writer, Writing

__all__ = [
    "Aggregate",
    "Call",
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
