"""Transactions at random, one step at a time, and what the outbox owes to Kafka because of them."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import asyncpg

from onceward.handlers import staging

from .outgoing import event

KEYS = [f"key-{number}" for number in range(8)]
IdsOfKeys = dict[bytes | None, list[str]]


@dataclass
class _Level:
    """What a transaction, or a savepoint in it, has done."""

    transaction: asyncpg.transaction.Transaction
    keys: set[str] = field(default_factory=set)
    staged: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class _Open:
    """A transaction under way, and its savepoints."""

    connection: asyncpg.Connection
    levels: list[_Level]


class Writers:
    """Transactions that stage events side by side, interleaved as the seed says.

    Long and short ones, with savepoints, some of them taken back. A transaction locks a key before
    it stages events of it, as it would lock an aggregate, so the order of a key is that of the
    commits. No step waits for another's lock: one seed is one schedule.
    """

    def __init__(
        self, topic: str, connections: Sequence[asyncpg.Connection], chance: random.Random
    ) -> None:
        self._topic = topic
        self._chance = chance
        self._idle = list(connections)
        self._open: list[_Open] = []
        self._staged = 0
        self.committed: IdsOfKeys = {key.encode(): [] for key in KEYS}
        """The ids of each key, in the order in which they must appear."""
        self.taken_back: set[str] = set()
        """The ids of what was rolled back, with its transaction or alone."""

    @staticmethod
    async def prepare(db: asyncpg.Connection) -> None:
        """Make the rows that the keys are locked by."""
        await db.execute("CREATE TABLE aggregate (key text PRIMARY KEY)")
        await db.execute("INSERT INTO aggregate SELECT unnest($1::text[])", KEYS)

    @property
    def ids(self) -> list[str]:
        """The ids of all that is committed."""
        return [id for ids in self.committed.values() for id in ids]

    async def step(self) -> None:
        """Do something in one of the transactions."""
        chance = self._chance
        if self._idle and (not self._open or chance.random() < 0.3):
            await self._begin()
        elif chance.random() < 0.45:
            await self._stage(chance.choice(self._open))
        elif chance.random() < 0.4:
            await self._nest(chance.choice(self._open))
        else:
            # The oldest one is seldom chosen: it is long.
            one = chance.choice(self._open[1:] or self._open)
            if chance.random() < 0.1:
                one = self._open[0]
            await self._end(one, commit=chance.random() < 0.75)

    async def finish(self) -> None:
        """Commit whatever is still under way."""
        while self._open:
            await self._end(self._chance.choice(self._open), commit=True)

    async def _begin(self) -> None:
        connection = self._idle.pop()
        one = _Open(connection, [])
        await self._deeper(one)
        if self._chance.random() < 0.5:
            # An id of its own long before its first event: what is changed first is not an event.
            await connection.execute("SELECT pg_current_xact_id()")
        self._open.append(one)

    async def _deeper(self, one: _Open) -> None:
        transaction = one.connection.transaction()
        await transaction.start()
        one.levels.append(_Level(transaction))

    async def _nest(self, one: _Open) -> None:
        deep = len(one.levels)
        if deep == 1 or (deep < 4 and self._chance.random() < 0.3):
            await self._deeper(one)
        else:
            await self._leave(one, keep=self._chance.random() < 0.5)

    async def _leave(self, one: _Open, *, keep: bool) -> None:
        """Release the savepoint, or roll back to it."""
        level = one.levels.pop()
        if keep:
            await level.transaction.commit()
            one.levels[-1].keys |= level.keys
            one.levels[-1].staged += level.staged
        else:
            # Its locks are given back too.
            await level.transaction.rollback()
            self.taken_back |= {id for _, id in level.staged}

    async def _stage(self, one: _Open) -> None:
        own = {key for level in one.levels for key in level.keys}
        locked = {key for other in self._open for level in other.levels for key in level.keys}
        key = self._chance.choice(KEYS)
        if key in locked - own:
            return
        await one.connection.execute("SELECT FROM aggregate WHERE key = $1 FOR UPDATE NOWAIT", key)
        ids = [str(self._staged + n) for n in range(self._chance.choice([1, 1, 2, 3, 12]))]
        self._staged += len(ids)
        await staging.append(
            one.connection, [event(self._topic, id, key, _payload(id)) for id in ids]
        )
        if key not in own:
            one.levels[-1].keys.add(key)
        one.levels[-1].staged += [(key, id) for id in ids]

    async def _end(self, one: _Open, *, commit: bool) -> None:
        while len(one.levels) > 1:
            await self._leave(one, keep=self._chance.random() < 0.5)
        (level,) = one.levels
        self._open.remove(one)
        self._idle.append(one.connection)
        if commit:
            await level.transaction.commit()
            for key, id in level.staged:
                self.committed[key.encode()].append(id)
        else:
            await level.transaction.rollback()
            self.taken_back |= {id for _, id in level.staged}


def _payload(id: str) -> bytes:
    """Return something of the id's own; it is large for one of ten."""
    return f"payload of {id}".ljust(2_000 if id.endswith("7") else 0).encode()


def faults(owed: IdsOfKeys, found: Iterable[tuple[bytes | None, str]]) -> set[str]:
    """Compare what is owed with what has come, in the order in which it came."""
    found = list(found)
    first: dict[bytes | None, dict[str, None]] = defaultdict(dict)
    for key, id in found:
        first[key][id] = None
    come, expected = {id for _, id in found}, {id for ids in owed.values() for id in ids}
    in_order = all(
        list(ids) == [id for id in owed.get(key, ()) if id in ids] for key, ids in first.items()
    )
    return {
        name
        for name, so in {
            "lost": bool(expected - come),
            "never committed": bool(come - expected),
            "out of order": not in_order and come <= expected,
            "repeated": max(Counter(found).values(), default=0) > 1,
        }.items()
        if so
    }
