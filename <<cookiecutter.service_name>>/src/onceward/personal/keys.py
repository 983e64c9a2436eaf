"""Keys: one for each subject, in a table, encrypted by a master key.

Which keys exist is read for every batch in one query, so that a deleted one is not used from then
on. What is kept in memory is the decrypted form of keys that the query has found.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from time import monotonic
from typing import Any, Protocol

import asyncpg
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from onceward.errors import OncewardError, StoreUnavailable

from .marks import Subject

THE_SERVICE = Subject("")
"""The subject of payloads whose own subject is not known."""
_NONCE = 12
_NAME = 4
"""Bytes of a master key's name, which precede what it has encrypted."""

# The oldest first: several transactions at once may make a key for a new subject.
_OF_SUBJECTS = """
SELECT DISTINCT ON (stored.subject, stored.kind) stored.subject, stored.kind, id, wrapped
  FROM pipeline.personal_key AS stored
  JOIN unnest($1::text[], $2::text[]) AS wanted (subject, kind)
    ON stored.subject = wanted.subject AND stored.kind IS NOT DISTINCT FROM wanted.kind
 WHERE stored.subject = ANY ($1) ORDER BY stored.subject, stored.kind, created_at, id
"""

_OF_IDS = "SELECT id, subject, wrapped FROM pipeline.personal_key WHERE id = ANY ($1)"

_ADD = """
INSERT INTO pipeline.personal_key (id, subject, kind, wrapped)
SELECT * FROM unnest($1::bytea[], $2::text[], $3::text[], $4::bytea[])
"""

_ALL = """
SELECT id, subject, wrapped FROM pipeline.personal_key WHERE id > $1 ORDER BY id LIMIT $2
"""

_REPLACE = "UPDATE pipeline.personal_key SET wrapped = $3 WHERE id = $1 AND wrapped = $2"

_PAGE = 1_000


class Changed(OncewardError):
    """A ciphertext is not what was stored."""


class MasterKeys(Protocol):
    """Encrypts the keys of subjects: the settings' own keys, or a key management service.

    `context` belongs to the key and must be the same again. Methods raise `StoreUnavailable`.
    """

    async def wrap(self, key: bytes, context: bytes) -> bytes:
        """Return the key encrypted."""
        ...

    async def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        """Return the key that `wrap` has encrypted."""
        ...

    def is_current(self, wrapped: bytes) -> bool:
        """Whether `wrap` would use the same master key now."""
        ...


class SettingsKeys(MasterKeys):
    """The master keys of `PIPELINE_PERSONAL_KEYS`."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """The first encrypts, all decrypt."""
        self._ciphers = {sha256(key).digest()[:_NAME]: AESGCM(key) for key in keys}
        self._first = next(iter(self._ciphers))

    async def wrap(self, key: bytes, context: bytes) -> bytes:
        """Return the key encrypted by the first master key."""
        return self._first + _encrypt(self._ciphers[self._first], key, context)

    async def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        """Return the key. Raises `StoreUnavailable` if none of the master keys has encrypted it."""
        name = wrapped[:_NAME]
        if name not in self._ciphers:
            raise StoreUnavailable(
                f"keys of personal data are encrypted by the master key {name.hex()}, which is not"
                " in PIPELINE_PERSONAL_KEYS: add it behind the others"
            )
        return _decrypt(self._ciphers[name], wrapped[_NAME:], context)

    def is_current(self, wrapped: bytes) -> bool:
        """Whether the first master key has encrypted it."""
        return wrapped[:_NAME] == self._first


class DataKey:
    """The key of a subject."""

    def __init__(self, id: bytes, key: bytes) -> None:
        self.id = id
        self._cipher = AESGCM(key)

    def encrypt(self, data: bytes) -> bytes:
        """Return nonce and ciphertext."""
        return _encrypt(self._cipher, data, self.id)

    def decrypt(self, data: bytes) -> bytes:
        """Return what was encrypted. Raises `Changed`."""
        return _decrypt(self._cipher, data, self.id)


class DataKeys:
    """The keys of subjects, by the table and by a cache of `size` keys for `age` seconds."""

    def __init__(self, master: MasterKeys, *, size: int, age: float) -> None:
        self._master = master
        self._size = size
        self._age = age
        self._kept: OrderedDict[bytes, tuple[float, DataKey]] = OrderedDict()

    async def of_subjects(
        self, connection: asyncpg.Connection, subjects: Collection[Subject]
    ) -> Mapping[Subject, DataKey]:
        """Return a key for each subject, in a transaction; those without one get one."""
        rows: list[Any] = await connection.fetch(
            _OF_SUBJECTS, *map(list, zip(*subjects, strict=True))
        )
        lacking = sorted({*subjects}.difference(map(_subject, rows)))
        new = await asyncio.gather(*map(self._new, lacking))
        if new:
            columns = ([row[name] for row in new] for name in ("id", "subject", "kind", "wrapped"))
            await connection.execute(_ADD, *columns)
        keys = await self._unwrapped([*rows, *new])
        return {_subject(row): keys[row["id"]] for row in (*rows, *new)}

    async def of_ids(
        self, connection: asyncpg.Connection, ids: Collection[bytes]
    ) -> Mapping[bytes, DataKey]:
        """Return the keys that exist, by their ids."""
        return await self._unwrapped(await connection.fetch(_OF_IDS, list(ids)) if ids else ())

    async def rewrap(self, connection: asyncpg.Connection) -> int:
        """Encrypt all keys by the first master key; return how many another one had encrypted."""
        last, count = b"", 0
        while rows := await connection.fetch(_ALL, last, _PAGE):
            last = rows[-1]["id"]
            for row in rows:
                if not self._master.is_current(row["wrapped"]):
                    context = _context(row)
                    key = await self._master.unwrap(row["wrapped"], context)
                    wrapped = await self._master.wrap(key, context)
                    await connection.execute(_REPLACE, row["id"], row["wrapped"], wrapped)
                    count += 1
        return count

    async def _new(self, subject: Subject) -> Mapping[str, Any]:
        row = {"id": secrets.token_bytes(16), "subject": subject.name, "kind": subject.kind}
        key = AESGCM.generate_key(256)
        return {**row, "wrapped": await self._master.wrap(key, _context(row))}

    async def _unwrapped(self, rows: Iterable[Any]) -> Mapping[bytes, DataKey]:
        now = monotonic()
        found: dict[bytes, DataKey] = {}
        lacking = []
        for row in rows:
            until, key = self._kept.get(row["id"], (0.0, None))
            if key is not None and now < until:
                found[row["id"]] = key
            else:
                lacking.append(row)
        unwrapped = [self._master.unwrap(row["wrapped"], _context(row)) for row in lacking]
        for row, secret in zip(lacking, await asyncio.gather(*unwrapped), strict=True):
            found[row["id"]] = key = DataKey(row["id"], secret)
            self._kept[row["id"]] = now + self._age, key
            self._kept.move_to_end(row["id"])
        # The front is the oldest: all stay for the same time.
        while self._kept and (
            len(self._kept) > self._size or next(iter(self._kept.values()))[0] <= now
        ):
            self._kept.popitem(last=False)
        return found


def _subject(row: Mapping[str, Any]) -> Subject:
    return Subject(row["subject"], row["kind"])


def _context(row: Mapping[str, Any]) -> bytes:
    return b"%b%b" % (row["id"], row["subject"].encode())


def _encrypt(cipher: AESGCM, data: bytes, context: bytes) -> bytes:
    nonce = secrets.token_bytes(_NONCE)
    return nonce + cipher.encrypt(nonce, data, context)


def _decrypt(cipher: AESGCM, data: bytes, context: bytes) -> bytes:
    try:
        plain: bytes = cipher.decrypt(data[:_NONCE], data[_NONCE:], context)
    except (InvalidTag, ValueError):
        raise Changed("what is stored encrypted was changed, or moved to another place") from None
    return plain
