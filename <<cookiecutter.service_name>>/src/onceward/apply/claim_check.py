"""The interface of a claim check, for payloads that are too large to be sent in their events.

The engine itself stores nothing outside of PostgreSQL and Kafka; the package `claims` implements
the interface.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Literal, Protocol

import asyncpg

from onceward.errors import OncewardError
from onceward.handlers.staged import StagedEvent
from onceward.handlers.staging import Outbox

from .batch import Batch, validated
from .item import Item

Unavailability = Literal["data missing", "data changed", "data elsewhere", "data too large"]


class DataUnavailable(OncewardError):
    """The data of an event is unavailable, also to a retry; the text says what to do."""

    def __init__(self, reason: Unavailability, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class ClaimCheck(Protocol):
    """Stores payloads that are too large for a record, and fetches those that events refer to."""

    def sent_size(self, event: StagedEvent, allowed: int) -> int:
        """Return the size of the event's record in bytes: small, if the payload is to be stored.

        `allowed` is the largest size of a record. Raises `Unpublishable` for a payload that can
        neither be sent nor stored.
        """

    async def store(
        self,
        connection: asyncpg.Connection,
        outbox: Outbox,
        reserve: Callable[[float], None] = ...,
    ) -> None:
        """Store payloads that are too large, and replace their events by events that refer to them.

        It runs in the transaction, just before the outbox is written. `reserve` is called before
        anything is stored, with the longest time in seconds that this takes. Raises
        `StoreUnavailable`.
        """

    async def resolve(self, items: Sequence[Item], memory: float) -> Sequence[Item]:
        """Return items with the data that they refer to, or with `DataUnavailable` as their fault.

        If the data of an item does not fit into so many bytes, or can't be fetched now, only the
        items before it are returned. Raises `StoreUnavailable` if the first can't be fetched now.
        """

    async def sweep(self, connection: asyncpg.Connection) -> None:
        """Delete stored payloads that no event needs. Raises `StoreUnavailable`."""


async def resolve_batch(batch: Batch, claims: ClaimCheck | None, memory: float = inf) -> Batch:
    """Return the batch with the data that it refers to, or the first part, maybe an empty one.

    Raises `StoreUnavailable`.
    """
    # As in `batch.read`: messages that are handled later are validated then.
    items = await resolve(batch.items, claims, lambda one: one.handler.mode == "immediate", memory)
    if len(items) < len(batch.items):
        batch = batch.between(batch.start, batch.items[len(items)].message.offset)
    return replace(batch, items=items)


async def resolve(
    items: Sequence[Item],
    claims: ClaimCheck | None,
    validates: Callable[[Item], bool],
    memory: float = inf,
) -> Sequence[Item]:
    """Return items with the data that they refer to, validated; perhaps only the first ones.

    Raises `StoreUnavailable` if the data of the first can't be fetched now.
    """
    if all(item.message.reference is None for item in items):
        return items
    if claims is None:
        fault = DataUnavailable(
            "data elsewhere",
            "the event refers to data, and the service has no object store to fetch it from: set"
            " PIPELINE_CLAIM_URL to the one that the event's producer uses",
        )
        return [item._replace(fault=fault) if item.message.reference else item for item in items]
    found = await claims.resolve(items, memory)
    return [
        validated(item) if before.message.reference and validates(item) else item
        for before, item in zip(items, found, strict=False)
    ]
