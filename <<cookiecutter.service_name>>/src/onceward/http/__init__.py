"""Requests that handlers answer, once for each idempotency key; and an HTTP API of them.

`open_receiver` is for any protocol. `app` is FastAPI's, and is imported by the service's `api.py`.
"""

from .receiver import Answer, Receiver, Unavailable, open_receiver
from .source import InvalidKey, KeyReused, UnderWay

__all__ = [
    "Answer",
    "InvalidKey",
    "KeyReused",
    "Receiver",
    "Unavailable",
    "UnderWay",
    "open_receiver",
]
