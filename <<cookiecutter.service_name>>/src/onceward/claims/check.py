"""The claim check: stores payloads and fetches them, see `onceward.apply.claim_check`."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import blake2b, sha256
from typing import NamedTuple
from uuid import uuid4

import asyncpg
from pydantic import ValidationError

from onceward.apply.claim_check import DataUnavailable
from onceward.apply.item import Item
from onceward.errors import OncewardError
from onceward.events.event import Unpublishable
from onceward.events.message import Reference
from onceward.handlers.staged import StagedEvent
from onceward.handlers.staging import Outbox
from onceward.object_store import Missing, Store
from onceward.object_store.store import together
from onceward.service import Misconfigured
from onceward.settings import Settings, mistakes

from . import fetching
from .settings import ClaimSettings
from .sweeping import Sweep

_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._=-]*"
"""Of a name, so that none leads out of the store's folder."""
_NAME = re.compile(rf"{_SEGMENT}(/{_SEGMENT})*")

_REFERENCE_AT_MOST = 1_500
"""Bytes of the headers that refer to a payload."""

_INSERT = """
INSERT INTO pipeline.claim (name, event_id) SELECT * FROM unnest($1::text[], $2::text[])
"""


class TooMuchAtOnce(OncewardError):
    """A transaction would store more than a process has the memory for."""


class Stored(NamedTuple):
    """A payload in the store: its name there, and the event's reference to it."""

    name: str
    reference: Reference


def open_claims(service: str, settings: Settings) -> "Claims | None":
    """Return the claim check of a service; None if `PIPELINE_CLAIM_URL` is not set.

    Raises `Misconfigured`.
    """
    try:
        own = ClaimSettings()
    except ValidationError as error:
        raise Misconfigured("; ".join(mistakes(error, ClaimSettings))) from None
    if own.url is None:
        return None
    _check(own, settings)
    return Claims(service, own)


def _check(own: ClaimSettings, settings: Settings) -> None:
    """Raise `Misconfigured` if the settings contradict those of the engine."""
    if not own.limit_bytes < settings.max_event_bytes:
        raise Misconfigured(
            f"PIPELINE_CLAIM_LIMIT_BYTES is {own.limit_bytes:,}: let it be less than"
            f" PIPELINE_MAX_EVENT_BYTES ({settings.max_event_bytes:,}), because larger events are"
            " never sent"
        )
    if not own.timeout <= settings.transaction_timeout / 2:
        raise Misconfigured(
            f"PIPELINE_CLAIM_TIMEOUT is {own.timeout} s: let it be at most half of"
            f" PIPELINE_TRANSACTION_TIMEOUT ({settings.transaction_timeout} s)"
        )
    if not own.age > settings.outbox_age:
        raise Misconfigured(
            f"PIPELINE_CLAIM_AGE is {own.age} s: let it be longer than PIPELINE_OUTBOX_AGE"
            f" ({settings.outbox_age} s), and than topics keep their records"
        )


class Claims:
    """The claim check of a service, with a folder of its own in the store."""

    def __init__(self, service: str, settings: ClaimSettings) -> None:
        """Raises `Misconfigured` for a place that can't be used."""
        if not _NAME.fullmatch(service) or "/" in service:
            raise Misconfigured(f"a service of the name {service!r} can't have an object store")
        assert settings.url is not None
        self._folder = f"{service}/claims"
        self._limit = settings.limit_bytes
        self._memory = settings.memory_bytes
        self._timeout = settings.timeout
        self.object_store = Store(
            settings.url,
            setting="PIPELINE_CLAIM_URL",
            timeout=settings.timeout,
            request_timeout=settings.timeout,
            retries=1,  # the transaction or the batch is retried as a whole
            concurrency=settings.concurrency,
        )
        self.sweeper = Sweep(
            self.object_store, self._folder, grace=settings.grace, age=settings.age
        )

    def sent_size(self, event: StagedEvent, allowed: int) -> int:
        """Return the bytes of the record that is sent. Raises `Unpublishable`."""
        payload = len(event.payload or b"")
        if self._is_large(event, allowed):
            return event.size - payload + _REFERENCE_AT_MOST
        if event.size > allowed:
            raise Unpublishable(
                f"the payload of {event.type!r} has {payload:,} bytes, and {self._memory:,} can be"
                " stored: publish a smaller event, or raise PIPELINE_CLAIM_MEMORY_BYTES"
            )
        return event.size

    def _is_large(self, event: StagedEvent, allowed: int) -> bool:
        """Whether the payload of an event is to be stored."""
        payload = len(event.payload or b"")
        is_large = payload > self._limit or event.size > allowed
        return is_large and payload <= self._memory

    async def store(
        self,
        connection: asyncpg.Connection,
        outbox: Outbox,
        reserve: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Store what is too large to travel, see `ClaimCheck.store`.

        The rows of `pipeline.claim` are committed with the events. Raises `StoreUnavailable` and
        `TooMuchAtOnce`.
        """
        large = {
            event.event_id: event
            for event in outbox.events
            if self._is_large(event, outbox.max_event_bytes) and outbox.has_cloudevents(event)
        }
        if not large:
            return
        reserve(self._timeout)
        stored = await self.put({id: event.payload or b"" for id, event in large.items()})
        await connection.execute(_INSERT, [one.name for one in stored.values()], list(stored))
        outbox.replace({id: _referring(event, stored[id]) for id, event in large.items()})

    async def put(self, payloads: Mapping[str, bytes]) -> Mapping[str, Stored]:
        """Store payloads, by event id. Raises `StoreUnavailable` and `TooMuchAtOnce`.

        What a failed attempt leaves behind is an orphan. Every attempt has names of its own, so
        that a sweep can't delete for one attempt what another one refers to.
        """
        total = sum(map(len, payloads.values()))
        if total > self._memory:
            raise TooMuchAtOnce(
                f"{len(payloads)} payloads have {total:,} bytes together, and {self._memory:,} are"
                " allowed: publish less at once, or raise PIPELINE_CLAIM_MEMORY_BYTES"
            )
        day = datetime.now(UTC).date()
        names = {id: f"{self._folder}/{day}/{_hash_of(id)}-{uuid4().hex}" for id in payloads}
        checksums = await together(map(_checksum, payloads.values()))
        await self.object_store.put({names[id]: payload for id, payload in payloads.items()})
        url = self.object_store.url
        return {
            id: Stored(names[id], Reference(f"{url}/{names[id]}", len(payload), checksum))
            for (id, payload), checksum in zip(payloads.items(), checksums, strict=True)
        }

    async def resolve(self, items: Sequence[Item], memory: float) -> Sequence[Item]:
        """Return items with their data, see `ClaimCheck.resolve`. Raises `StoreUnavailable`."""
        return await fetching.resolve(items, self.fetch, self._memory, memory)

    async def fetch(self, reference: Reference) -> bytes:
        """Return the data. Raises `DataUnavailable`, and `StoreUnavailable`."""
        uri, length, checksum = reference
        name = self._name_of(uri)

        def check(size: int) -> None:
            if length not in (None, size):
                text = f"{uri} has {size} bytes, and {length} were sent"
                raise DataUnavailable("data changed", text)
            self._refuse_what_is_too_large(uri, size)

        self._refuse_what_is_too_large(uri, length or 0)
        try:
            data = await self.object_store.get(name, check)
        except Missing:
            await self.object_store.require_content()
            text = f"nothing is at {uri}: put it back, or ask the producer for another event"
            raise DataUnavailable("data missing", text) from None
        if checksum is not None and (there := await _checksum(data)) != checksum.lower():
            text = f"{uri} has the SHA-256 {there}, and {checksum[:64]} was sent"
            raise DataUnavailable("data changed", text)
        return data

    async def sweep(self, connection: asyncpg.Connection) -> None:
        """Delete what no event needs, in a round of bounded work. Raises `StoreUnavailable`."""
        await self.sweeper.round(connection)

    def _name_of(self, uri: str) -> str:
        """Return the name of an object in this store: no other URL of a producer is fetched."""
        url = self.object_store.url
        name = uri.removeprefix(f"{url}/")
        if name == uri or not _NAME.fullmatch(name):
            raise DataUnavailable(
                "data elsewhere",
                f"the data is at {uri[:300]!r}, and this service reads only below {url}"
                " (PIPELINE_CLAIM_URL)",
            )
        return name

    def _refuse_what_is_too_large(self, uri: str, size: int) -> None:
        if size > self._memory:
            raise DataUnavailable(
                "data too large",
                f"{uri} has {size:,} bytes, and {self._memory:,} are allowed: raise"
                " PIPELINE_CLAIM_MEMORY_BYTES, and give the process as much memory",
            )


def _referring(event: StagedEvent, stored: Stored) -> StagedEvent:
    uri, length, checksum = stored.reference
    # Empty, and not null: a record without a value would be deleted from a compacted topic.
    return event._replace(payload=b"", dataref=uri, datalength=length, datachecksum=checksum)


async def _checksum(data: bytes) -> str:
    return await asyncio.to_thread(lambda: sha256(data).hexdigest())


def _hash_of(event_id: str) -> str:
    return blake2b(event_id.encode(), digest_size=16).hexdigest()
