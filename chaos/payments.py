"""Payments: a second service under the same faults, what it is fed, and what must come of that.

The commands are those of the measure `ledger`, and so is the ledger that they must make.
"""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import asyncpg  # type: ignore[import-untyped]

from benchmarks import payments
from benchmarks.payments import Command, Ledger, Payments
from chaos.backlog import Backlog, look
from chaos.fates import Finding
from demo import witness
from demo.evidence import Record

MODULE = "chaos.paid"
MEMBERS = ("run-payments-1", "run-payments-2")
DATABASE = "payments"
TOPIC, EVENTS = "payments", "payment-events"
REPEATS = 0.05
"""Share of the commands that come again, any time later."""
MARKERS = "SELECT id FROM pipeline.inbox WHERE consumer = 'ledger'"
BACKLOG = "SELECT id, reason FROM pipeline.backlog"


class Order(NamedTuple):
    """A record to be sent."""

    command: Command
    partition: None = None

    @property
    def identity(self) -> tuple[str, int]:
        """What its copies have in common."""
        return TOPIC, self.command.number

    def record(self) -> tuple[bytes, bytes, list[tuple[str, bytes]]]:
        """Return key, value and headers."""
        key, value, headers = self.command.record()
        return key, value, [one for one in headers if one[0] != "ce_time"]  # else it is too old


def orders(load: Payments, seed: int) -> list[Order]:
    """Return what is to be sent: all commands in their order, and copies of some."""
    chance, count = random.Random(f"payments {seed}"), len(load.commands)
    sends = [(float(place), one) for place, one in enumerate(load.commands)]
    sends += [
        (place + count ** chance.random(), one) for place, one in sends if chance.random() < REPEATS
    ]
    return [Order(one) for _, one in sorted(sends)]


@dataclass(frozen=True)
class Books:
    """All that can be known from outside."""

    tables: Ledger
    """Without events."""
    entries: Sequence[Mapping[str, Any]]
    markers: Sequence[str]
    """Id of each command that is marked."""
    backlog: Sequence[tuple[str, str]]
    """Id and reason of each message that waits or is dead."""
    output: Sequence[Record]
    """Each partition in its order."""


class Auditor:
    """Looks at the service from outside."""

    def __init__(self, kafka: str, database: str, count: int, seed: int) -> None:
        self._kafka = kafka
        self._database = database
        self._load = payments.make(count, seed=seed)

    async def look(self, published: Collection[str]) -> Backlog:
        """Return what is left to do; `published` are the events seen by now."""
        connection = await asyncpg.connect(self._database)
        try:
            return await look(self._kafka, connection, TOPIC, published)
        finally:
            await connection.close()

    async def judge(self) -> tuple[list[Finding], dict[str, int]]:
        """Read everything, and return all that is wrong, and how much there is."""
        output = await witness.read_topic(self._kafka, EVENTS)
        connection = await asyncpg.connect(self._database)
        try:
            tables, entries = await payments.read(connection)
            markers = [row["id"] for row in await connection.fetch(MARKERS)]
            backlog = [tuple(row) for row in await connection.fetch(BACKLOG)]
        finally:
            await connection.close()
        events = {record.headers.get("ce_id") for record in output}
        counts = {
            "commands": len(markers),
            "entries": len(entries),
            "events": len(events),
            "repeats": len(output) - len(events),
        }
        return judge(self._load, Books(tables, entries, markers, backlog, output)), counts


def judge(load: Payments, books: Books) -> list[Finding]:
    """Find all that is wrong with what the service has made of the commands."""
    must = load.ledger
    wrong = [f"{id} is in the backlog: {reason}" for id, reason in books.backlog]
    wrong += payments.unlike(replace(must, events={}), books.tables)
    wrong += payments.unbalanced(books.tables.balances, books.entries)
    return [
        *_marked(Counter(str(one.number) for one in load.commands), Counter(books.markers)),
        *_published(must.events, books.output),
        *(Finding("misjudged", text) for text in wrong),
    ]


def _marked(must: Counter[str], found: Counter[str]) -> Iterator[Finding]:
    yield from (Finding("lost", f"command {id} is not marked") for id in must - found)
    yield from (Finding("doubled", f"a marker too many for command {id}") for id in found - must)


def _published(
    must: Mapping[str, Sequence[tuple[str, int]]], output: Sequence[Record]
) -> Iterator[Finding]:
    """Find events that are missing, that nobody asked for, or that are out of their order."""
    known: dict[bytes, Record] = {}
    found: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    sequences: defaultdict[str, list[int]] = defaultdict(list)
    partitions: defaultdict[str, set[int]] = defaultdict(set)
    for record in output:
        try:
            id, type = record.headers["ce_id"], record.headers["ce_type"].decode()
            event, sequence = json.loads(record.value or b""), int(record.headers["ce_sequence"])
            amount, key = event["amount"], event["payment_id"]
        except (KeyError, ValueError) as problem:
            yield Finding("lost", f"an event that nobody can read: {problem!r} in {record}")
            continue
        if id not in known:
            known[id] = record
            found[key].append((type, amount))
            sequences[key].append(sequence)
            partitions[key].add(record.partition)
        elif record != known[id]:
            yield Finding("doubled", f"{type} of {key} was repeated with other bytes")
    for key in sorted(must.keys() | found.keys()):
        asked, there = Counter(must.get(key, ())), Counter(found[key])
        yield from (Finding("lost", f"{key} has no {one}") for one in asked - there)
        yield from (Finding("doubled", f"{key} has a {one} too many") for one in there - asked)
        rises = all(one < next_ for one, next_ in pairwise(sequences[key]))
        as_sent = asked != there or found[key] == [*must[key]]
        if not rises or not as_sent or len(partitions[key]) > 1:
            yield Finding("reordered", f"the events of {key} are out of their order: {found[key]}")
