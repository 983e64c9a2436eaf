"""The pipeline: inbox, handlers, outbox and relay between Kafka and PostgreSQL.

Read it along the way of a message:
`consumer` -> `reader` -> `batch` -> `consume` (`inbox` -> your handler -> `outbox` -> commit)
-> `relay` (`window` -> `publisher`; `unsent`: what Kafka refuses).
"""

from .aggregate import Aggregate
from .events import Event, Tombstone
from .handlers import Handlers
from .message import Header, Message, PayloadFields, Plain, Position
from .service import Service
from .transaction import Transaction

__all__ = [
    "Aggregate",
    "Event",
    "Handlers",
    "Header",
    "Message",
    "PayloadFields",
    "Plain",
    "Position",
    "Service",
    "Tombstone",
    "Transaction",
]
