"""Payloads that travel by reference: what an event says of its data, and who keeps and fetches it.

The engine keeps nothing outside of PostgreSQL and Kafka itself. A service that has an object store
gives it one of these, see `Service`.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

import asyncpg


class Reference(NamedTuple):
    """Where the data of an event is: CloudEvents' `dataref`, and two extensions of ours.

    The other two tell whether what is there is still the data; another producer may leave them out.
    """

    uri: str
    length: int | None = None
    """Bytes; the attribute `datalength`."""
    checksum: str | None = None
    """SHA-256 in hexadecimal digits; the attribute `datachecksum`."""


class Kept(NamedTuple):
    """A payload that is kept: its name in the store, and what its event says of it."""

    name: str
    reference: Reference


class Unavailable(StrEnum):
    """Why data can't be had: few and fixed, to label metrics."""

    MISSING = "data missing"
    """Nothing is there."""
    CHANGED = "data changed"
    """Something else is there, by its length or its checksum."""
    ELSEWHERE = "data elsewhere"
    """It is nowhere that this service reads from."""
    TOO_LARGE = "data too large"
    """It is more than the service takes into its memory."""


class Unresolved(Exception):
    """An event's data can't be had, and to try again does not help; the text says what may."""

    reason: Unavailable


class DataMissing(Unresolved):
    """Nothing is where an event says that its data is."""

    reason = Unavailable.MISSING


class DataChanged(Unresolved):
    """What is there is not what the event was sent with."""

    reason = Unavailable.CHANGED


class DataElsewhere(Unresolved):
    """The data is nowhere that this service reads from: what a producer names is not fetched."""

    reason = Unavailable.ELSEWHERE


class DataTooLarge(Unresolved):
    """The data is more than the service takes into its memory."""

    reason = Unavailable.TOO_LARGE


class Claims(Protocol):
    """Keeps payloads that are too large to travel, and fetches those of others."""

    limit: int
    """Bytes of a payload that still travels with its event."""
    memory: int
    """Bytes of the largest payload that is kept or fetched, and of those of a batch together."""

    async def keep(self, payloads: Mapping[str, bytes]) -> Mapping[str, Kept]:
        """Store payloads, by event id, under names that nobody has had. Raises `StoreUnavailable`.

        What has no row in `pipeline.claim` some time later is deleted.
        """
        ...

    async def fetch(self, reference: Reference) -> bytes:
        """Return the data. Raises `Unresolved`, and `StoreUnavailable`."""
        ...

    async def sweep(self, connection: asyncpg.Connection) -> None:
        """Delete what nobody needs; may be cut off at any point. Raises `StoreUnavailable`."""
        ...
