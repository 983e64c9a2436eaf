"""References: what an event says of data that is kept elsewhere, and the store that keeps it.

The engine keeps nothing outside of PostgreSQL and Kafka itself. A service that has an object store
gives it a `Claims`, see `Service`.
"""

from collections.abc import Mapping
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


class Unresolved(Exception):
    """An event's data can't be had, and trying again does not help; the text says what may."""

    reason: str
    """One of a few, to label metrics."""


class DataMissing(Unresolved):
    """Nothing is where an event says that its data is."""

    reason = "data missing"


class DataChanged(Unresolved):
    """What is there differs in length or checksum from what the event was sent with."""

    reason = "data changed"


class DataElsewhere(Unresolved):
    """The data is nowhere that this service reads from: what a producer names is not fetched."""

    reason = "data elsewhere"


class DataTooLarge(Unresolved):
    """The data is more than the service takes into its memory."""

    reason = "data too large"


class Claims(Protocol):
    """Keeps payloads that are too large to travel, and fetches those that other services keep."""

    limit: int
    """Bytes of a payload that still travels with its event."""
    memory: int
    """Bytes of the largest payload that is kept or fetched, and of those of a batch together."""

    async def keep(self, payloads: Mapping[str, bytes]) -> Mapping[str, Kept]:
        """Store payloads, by event id, under names that are new. Raises `StoreUnavailable`.

        What has no row in `pipeline.claim` some time later is deleted.
        """
        ...

    async def fetch(self, reference: Reference) -> bytes:
        """Return the data. Raises `Unresolved`, and `StoreUnavailable`."""
        ...

    async def sweep(self, connection: asyncpg.Connection) -> None:
        """Delete what is not needed; may stop at any point. Raises `StoreUnavailable`."""
        ...
