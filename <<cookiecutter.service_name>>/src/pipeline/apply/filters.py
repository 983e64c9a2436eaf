"""Bloom filters of closed inbox generations: most new events need no query of these.

A closed generation never changes. Retention adds its keys to the newest filter, or to a new one
when that is full; processes load the filters and query the database only for keys that a filter
has, and for generations without a filter. A generation that is too large for the memory has an
empty row instead of a filter. `docs/protocol.md` says why the result is exact.
"""

import asyncio
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version
from typing import NamedTuple
from uuid import UUID

import asyncpg
from rbloom import Bloom
from sqlalchemy.ext.asyncio import AsyncEngine

from pipeline.errors import describe_error, is_infrastructure, is_of_the_database
from pipeline.observe import metrics
from pipeline.servers.database import autocommitting

log = logging.getLogger(__name__)

FILTER_LOCK = 0x1B0C7
"""Advisory lock: one process builds filters at a time."""

FORMAT = f"1, rbloom {version('rbloom')}"
"""Determines which bits a key sets. A filter of another format is built again."""

_ROOM = 16
"""Capacity of a filter, as a multiple of the keys of its first generation. A look-up in one filter
of ten generations takes 0.3 µs an event; in ten filters of one generation each, 3 µs; a query of
the database takes 40 µs of its CPU."""
_AT_LEAST = 65_536
"""Capacity of the smallest filter, in keys."""
_RATE = 0.001
"""Rate of false positives of a full filter: one in a batch. 0.01 would save a third of the memory,
and nearly every batch would need a query."""
_KEY_BYTES = -math.log(_RATE) / math.log(2) ** 2 / 8
"""Bytes of a filter for each key of its capacity: 1.8."""
_PORTION = 2_000
"""Keys that are fetched at a time: they block the event loop for a millisecond or two."""
_SECONDS = 86_400.0
"""Time limit of statements on a generation: a large one takes longer than other statements may."""
_PAUSE = 1.0
"""Seconds between attempts to load filters, while transactions lack some."""

_FORGET = """
DELETE FROM pipeline.inbox_filter USING pipeline.inbox_generation
 WHERE last_generation < oldest OR format <> $1
    OR capacity = 0 AND GREATEST(keys, 1) <= $2
"""

_LOCK = "SELECT pg_try_advisory_xact_lock($1)"

_NEXT_WITHOUT_FILTER = """
SELECT number
  FROM pipeline.inbox_generation, generate_series(GREATEST(oldest, $1 + 1), current - 1) AS number
 WHERE NOT EXISTS (SELECT FROM pipeline.inbox_filter
                    WHERE number BETWEEN first_generation AND last_generation)
 ORDER BY number LIMIT 1
"""

_COUNT = "SELECT count(*) FROM pipeline.inbox WHERE generation = $1"

_WITH_ROOM = """
SELECT first_generation, last_generation, keys, capacity, digest, bits
  FROM pipeline.inbox_filter
 WHERE last_generation = $1 - 1 AND keys + $2 <= capacity AND capacity BETWEEN 1 AND $3
"""

_FETCH = f"FETCH {_PORTION} FROM closed"

_STORE = """
INSERT INTO pipeline.inbox_filter
       (first_generation, last_generation, keys, capacity, digest, format, bits)
VALUES ($1, $2, $3, $4, $5, $6, $7)
    ON CONFLICT (first_generation) DO UPDATE
   SET last_generation = excluded.last_generation, keys = excluded.keys,
       capacity = excluded.capacity, digest = excluded.digest, format = excluded.format,
       bits = excluded.bits
"""

_GENERATIONS = "SELECT oldest, current, opening FROM pipeline.inbox_generation"

_STORED = """
SELECT first_generation, last_generation, keys, capacity, digest
  FROM pipeline.inbox_filter
 WHERE format = $1
 ORDER BY first_generation DESC
"""

_BITS = "SELECT bits FROM pipeline.inbox_filter WHERE first_generation = $1"

_DISCARD = "DELETE FROM pipeline.inbox_filter WHERE first_generation = $1"


def _hash(key: bytes) -> int:
    """Return the key itself: it is a hash."""
    return int.from_bytes(key, "big", signed=True)


def _largest(mebibytes: int) -> int:
    """Return the largest capacity of a filter in keys: two filters must fit into the memory."""
    return int(mebibytes * 2**20 / 2 / _KEY_BYTES)


def _capacity(keys: int, at_most: int) -> int:
    """Return the capacity of a filter whose first generation has so many keys.

    0 if that generation alone has more than `at_most` keys.
    """
    return min(max(_ROOM * keys, _AT_LEAST), at_most) if max(keys, 1) <= at_most else 0


class _Filter(NamedTuple):
    """A filter as it is stored, without its bits. Equal ones have the same bits.

    A capacity of 0 marks a generation that was too large for a filter.
    """

    first: int
    last: int
    keys: int
    capacity: int
    digest: bytes = b""

    @property
    def generations(self) -> range:
        """Numbers of the generations whose keys it has."""
        return range(self.first, self.last + 1)

    @property
    def size(self) -> float:
        """Bytes of its bits."""
        return self.capacity * _KEY_BYTES

    def digest_with(self, bits: bytes) -> bytes:
        """Return the checksum of metadata and bits."""
        digest = sha256(repr((FORMAT, *self[:-1])).encode())
        digest.update(bits)
        return digest.digest()

    def opened(self, bits: bytes) -> Bloom | None:
        """Return the Bloom filter for look-ups, or None if it is damaged."""
        return Bloom.load_bytes(bits, _hash) if self.digest_with(bits) == self.digest else None


@contextmanager
def _failing_with(warning: str) -> Iterator[None]:
    """Log an error of the database; what the block does is tried again later."""
    try:
        yield
    except Exception as error:
        if not (is_infrastructure(error) or is_of_the_database(error)):
            raise
        log.warning("%s: %s", warning, describe_error(error))


async def build(connection: asyncpg.Connection, *, mebibytes: int) -> None:
    """Build filters for the closed generations that have none, of at most half the memory each.

    It can be repeated and interrupted safely. An error of the database is logged, and the next
    call tries again.
    """
    at_most = _largest(mebibytes)
    with _failing_with("the filter of a closed inbox generation is not built"):
        # A generation that was too large may fit after a change of the setting.
        await connection.execute(_FORGET, FORMAT, at_most)
        number: int | None = 0
        while number is not None:
            number = await _build_next(connection, after=number, at_most=at_most)


async def _build_next(connection: asyncpg.Connection, *, after: int, at_most: int) -> int | None:
    """Add the next generation to a filter; returns its number, or None if none is left.

    No filter has a capacity above `at_most` keys.
    """
    # One transaction, so that keys are read from the server that stores the filter, also when a
    # failover happens meanwhile.
    async with connection.transaction():
        if not await connection.fetchval(_LOCK, FILTER_LOCK):
            return None  # another process builds filters
        generation: int | None = await connection.fetchval(_NEXT_WITHOUT_FILTER, after)
        if generation is None:
            return None
        keys: int = await connection.fetchval(_COUNT, generation, timeout=_SECONDS)
        one = _Filter(generation, generation, keys, _capacity(keys, at_most))
        bloom: Bloom | None = None
        if row := await connection.fetchrow(_WITH_ROOM, generation, keys, at_most):
            *columns, bits = row
            last = _Filter(*columns)
            bloom = await asyncio.to_thread(last.opened, bits)
            if bloom is not None:
                one = _Filter(last.first, generation, last.keys + keys, last.capacity)
        if not one.capacity:
            # Stored, so that its keys are not counted again and processes do not try to load it.
            await connection.execute(_STORE, *one[:-1], b"", FORMAT, b"")
            log.info("inbox generation %s has no filter: %s keys are too many", generation, keys)
            return generation
        if bloom is None:
            bloom = Bloom(one.capacity, _RATE, _hash)
        await connection.execute(
            "DECLARE closed NO SCROLL CURSOR FOR"
            f" SELECT key FROM pipeline.inbox WHERE generation = {generation}"
        )
        while rows := await connection.fetch(_FETCH, timeout=_SECONDS):
            bloom.update([row["key"] for row in rows])
        bits = bloom.save_bytes()
        digest = await asyncio.to_thread(one.digest_with, bits)
        await connection.execute(_STORE, *one[:-1], digest, FORMAT, bits)
    log.info("inbox generation %s has a filter: %s keys", generation, keys)
    return generation


class Filters:
    """The filters in memory: they say which keys are certainly not in closed generations."""

    def __init__(self, *, mebibytes: int) -> None:
        """`mebibytes` limits their memory; loading a filter takes twice its size in addition."""
        self.lacking = asyncio.Event()
        """Set when a transaction has queried the database because a filter is not loaded."""
        self._mebibytes = mebibytes
        self._blooms: Mapping[_Filter, Bloom] = {}
        self._generations: frozenset[int] = frozenset()
        self._too_large: frozenset[int] = frozenset()
        """Generations whose filters do not fit into the memory."""
        self._loaded_at: tuple[int, UUID] | None = None
        """The current generation and its opening at the time when the filters were loaded."""

    def sift(
        self, closed: range, opening: UUID, keys: Sequence[bytes]
    ) -> tuple[list[bytes], range]:
        """Return the keys that a filter may have, and the range of generations without a filter.

        `opening` is that of the generation after the closed ones, as read by the transaction.
        """
        # After a rotation, a restore or a failover the same numbers may be other generations.
        if self._loaded_at != (closed.stop, opening):
            self.lacking.set()
            return [], closed
        found: set[bytes] = set()
        for bloom in self._blooms.values():
            found.update([key for key in keys if key in bloom])
        without = [number for number in closed if number not in self._generations]
        if not without:
            return list(found), range(0)
        if not self._too_large.issuperset(without):
            self.lacking.set()
        return list(found), range(without[0], without[-1] + 1)

    async def keep_loading(self, engine: AsyncEngine) -> None:
        """Load filters when transactions lack some, until cancelled. Transactions do not wait."""
        while True:
            await self.lacking.wait()
            self.lacking.clear()
            with _failing_with("filters of closed inbox generations are not loaded"):
                async with autocommitting(engine) as connection:
                    await self.load(connection)
            await asyncio.sleep(_PAUSE)

    async def load(self, connection: asyncpg.Connection) -> None:
        """Load stored filters that are not in memory, newest first, until the memory is full."""
        too_large: list[int] = []
        # One snapshot, so that the filters are those of the generations read here.
        async with connection.transaction(isolation="repeatable_read"):
            oldest, current, opening = await connection.fetchrow(_GENERATIONS)
            blooms: dict[_Filter, Bloom] = {}
            for row in await connection.fetch(_STORED, FORMAT):
                one = _Filter(*row)
                if one in self._blooms:
                    blooms[one] = self._blooms[one]
                elif not self._has_room(one, blooms):
                    too_large += one.generations
                elif one.capacity:
                    await _load(connection, one, blooms)
        if self._mebibytes and set(too_large) - self._too_large:
            log.warning(
                "every message is looked up in the inbox generations %s: their filters don't fit"
                " into PIPELINE_INBOX_FILTER_MEBIBYTES=%s, of which one may take half",
                sorted(too_large),
                self._mebibytes,
            )
        self._blooms = blooms
        self._generations = frozenset(n for one in blooms for n in one.generations)
        self._too_large = frozenset(too_large)
        self._loaded_at = current, opening
        metrics.generations_unfiltered.set(len(set(range(oldest, current)) - self._generations))

    def _has_room(self, one: _Filter, beside: Iterable[_Filter]) -> bool:
        """Whether the memory has room for it, or for one that was too large to be built."""
        if not one.capacity:
            return _capacity(one.keys, _largest(self._mebibytes)) > 0
        return one.size + sum(other.size for other in beside) <= self._mebibytes * 2**20


async def _load(connection: asyncpg.Connection, one: _Filter, blooms: dict[_Filter, Bloom]) -> None:
    bits = await connection.fetchval(_BITS, one.first)
    bloom = await asyncio.to_thread(one.opened, bits)
    if bloom is None:
        log.warning(
            "the filter of inbox generations %s to %s is damaged: it will be built anew",
            one.first,
            one.last,
        )
        await connection.execute(_DISCARD, one.first)
    else:
        blooms[one] = bloom
