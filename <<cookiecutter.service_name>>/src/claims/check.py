"""The claim check: hands payloads in and out, and knows which are whose."""

import asyncio
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import blake2b, sha256
from uuid import uuid4

import asyncpg
from pydantic import ValidationError

from pipeline.events.references import (
    DataChanged,
    DataElsewhere,
    DataMissing,
    DataTooLarge,
    Kept,
    Reference,
)
from pipeline.service import Misconfigured
from pipeline.settings import Settings, mistakes

from .settings import ClaimSettings
from .store import Missing, Store, together
from .sweeping import Sweep

_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._=-]*"
"""Of a name, so that none leads out of the store's folder."""
_NAME = re.compile(rf"{_SEGMENT}(/{_SEGMENT})*")


class TooMuchAtOnce(Exception):
    """A transaction is to keep more than a process has the memory for."""


def open_claims(service: str, settings: Settings) -> "Claims | None":
    """Return the claim check of a service; None if the environment names no place for it.

    Raises `Misconfigured`.
    """
    ours = _read_settings()
    if ours.url is None:
        return None
    _check(ours, settings)
    return Claims(service, ours)


def _read_settings() -> ClaimSettings:
    try:
        return ClaimSettings()
    except ValidationError as error:
        raise Misconfigured("; ".join(mistakes(error, ClaimSettings))) from None


def _check(ours: ClaimSettings, settings: Settings) -> None:
    """Raise `Misconfigured` if they don't fit the engine's."""
    if not ours.limit < settings.max_event_bytes:
        raise Misconfigured(
            f"PIPELINE_CLAIM_LIMIT is {ours.limit:,}: let it be less than PIPELINE_MAX_EVENT_BYTES"
            f" ({settings.max_event_bytes:,}), because larger events are never sent"
        )
    if not ours.timeout <= settings.transaction_timeout / 2:
        raise Misconfigured(
            f"PIPELINE_CLAIM_TIMEOUT is {ours.timeout} s: let it be at most half of"
            f" PIPELINE_TRANSACTION_TIMEOUT ({settings.transaction_timeout} s)"
        )
    if not ours.age > settings.outbox_age:
        raise Misconfigured(
            f"PIPELINE_CLAIM_AGE is {ours.age} s: let it be longer than PIPELINE_OUTBOX_AGE"
            f" ({settings.outbox_age} s), and than topics keep their records"
        )


class Claims:
    """Keeps and fetches payloads, see `pipeline.references.Claims`."""

    def __init__(self, service: str, settings: ClaimSettings) -> None:
        """Raises `Misconfigured` for a place that can't be used."""
        if not _NAME.fullmatch(service) or "/" in service:
            raise Misconfigured(f"a service of the name {service!r} can't have an object store")
        assert settings.url is not None
        self._folder = f"{service}/claims"
        self.limit = settings.limit
        self.memory = settings.memory
        self.store = Store(settings.url, timeout=settings.timeout, concurrency=settings.concurrency)
        self.sweeper = Sweep(self.store, self._folder, grace=settings.grace, age=settings.age)

    async def keep(self, payloads: Mapping[str, bytes]) -> Mapping[str, Kept]:
        """Store payloads, by event id. Raises `StoreUnavailable` and `TooMuchAtOnce`.

        What it leaves behind when it fails is an orphan. Every attempt has names of its own, so
        that a sweep can't take from one what it has found of another.
        """
        total = sum(map(len, payloads.values()))
        if total > self.memory:
            raise TooMuchAtOnce(
                f"{len(payloads)} payloads have {total:,} bytes together, and {self.memory:,} are"
                " allowed: publish less at once, or raise PIPELINE_CLAIM_MEMORY"
            )
        day = datetime.now(UTC).date()
        names = {id: f"{self._folder}/{day}/{_hash_of(id)}-{uuid4().hex}" for id in payloads}
        checksums = await together(map(_checksum, payloads.values()))
        await self.store.put({names[id]: payload for id, payload in payloads.items()})
        return {
            id: Kept(names[id], Reference(f"{self.store.url}/{names[id]}", len(payload), checksum))
            for (id, payload), checksum in zip(payloads.items(), checksums, strict=True)
        }

    async def fetch(self, reference: Reference) -> bytes:
        """Return the data. Raises `Unresolved` if it was changed, and `StoreUnavailable`."""
        uri, length, checksum = reference
        name = self._name_of(uri)
        self._refuse_what_is_too_large(uri, length)
        try:
            async with self.store.get(name) as found:
                size = found.meta["size"]
                if length not in (None, size):
                    raise DataChanged(f"{uri} has {size} bytes, and {length} were sent")
                self._refuse_what_is_too_large(uri, size)
                data = bytes(await found.bytes_async())
        except Missing:
            raise DataMissing(
                f"nothing is at {uri}: put it back, or ask the producer for another event"
            ) from None
        if checksum is not None and (there := await _checksum(data)) != checksum.lower():
            raise DataChanged(f"{uri} has the SHA-256 {there}, and {checksum[:64]} was sent")
        return data

    async def sweep(self, connection: asyncpg.Connection) -> None:
        """Delete what no event needs, in a round of bounded work. Raises `StoreUnavailable`."""
        await self.sweeper.round(connection)

    def _name_of(self, uri: str) -> str:
        """Return the name of an object of this store; nothing else that a producer names is
        fetched."""
        name = uri.removeprefix(f"{self.store.url}/")
        if name == uri or not _NAME.fullmatch(name):
            raise DataElsewhere(
                f"the data is at {uri[:300]!r}, and this service reads only below {self.store.url}"
                " (PIPELINE_CLAIM_URL)"
            )
        return name

    def _refuse_what_is_too_large(self, uri: str, length: int | None) -> None:
        if length is not None and length > self.memory:
            raise DataTooLarge(
                f"{uri} has {length:,} bytes, and {self.memory:,} are allowed: raise"
                " PIPELINE_CLAIM_MEMORY, and give the process as much memory"
            )


async def _checksum(data: bytes) -> str:
    return await asyncio.to_thread(lambda: sha256(data).hexdigest())


def _hash_of(event_id: str) -> str:
    return blake2b(event_id.encode(), digest_size=16).hexdigest()
