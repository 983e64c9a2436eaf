"""Both runs of the same messages, and what differs."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from difflib import unified_diff
from math import ceil
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any
from uuid import uuid4

import asyncpg
from aiokafka import TopicPartition
from pydantic import SecretStr
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from onceward.events.message import headers_as_json
from onceward.handlers.staging import REQUESTS
from onceward.operators.statements import SET_POSITION
from onceward.servers import clients, topics
from onceward.servers.database import autocommitting, create_engine
from onceward.service import Service
from onceward.settings import Settings
from onceward.testing import stored
from onceward.testing.records import KafkaRecord

from . import evidence, faults, statements
from .evidence import Evidence
from .faults import FAULTS, TOGETHER, Count
from .member import noting
from .processes import FOREVER, Gates, Processes, noted
from .proof import CanNotProve, Proof, interleaved, key_of

_PARTITIONS = 4
"""Of topics that do not exist yet."""
_HOLDS = 2
"""How often transactions are held before each fault."""
_DRAIN_SECONDS = 120.0
_PUBLISH_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_YEAR = timedelta(days=365)
_RELATED = 5
"""Messages that are named for a difference."""


@dataclass(frozen=True)
class Difference:
    """What came out otherwise under faults."""

    kind: str
    """Such as a table."""
    about: str
    """Such as a primary key."""
    one_by_one: Any
    """None: it is not there."""
    under_faults: Any
    messages: Sequence[str] = ()
    """Some that name it, in the order of the commits."""

    def lines(self) -> Iterator[str]:
        """Yield it as a diff."""
        yield f"{self.kind}, {self.about}:"
        here, there = (
            [] if one is None else json.dumps(one, indent=1, sort_keys=True).splitlines()
            for one in (self.one_by_one, self.under_faults)
        )
        yield from unified_diff(here, there, "one by one", "under faults", lineterm="", n=1)
        yield from (f"  message: {one}" for one in self.messages)


@dataclass
class Result:
    """What a run under faults and one without have come to."""

    messages: int = 0
    sent: int = 0
    """Records, including repeated ones."""
    faults: dict[str, Count] = field(default_factory=dict)
    applied: dict[str, int] = field(default_factory=dict)
    """Messages by consumer and type."""
    dead: int = 0
    """Messages that are dead letters."""
    postgresql: str = ""
    """Version of the server."""
    lacking: list[str] = field(default_factory=list)
    """Consumers and types of which no message was applied."""
    wrong: list[str] = field(default_factory=list)
    """Invariants that did not hold, and work that did not end."""
    differences: list[Difference] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def unmet(self) -> list[str]:
        """Faults that have hit no open transaction, and kinds of messages that none was of."""
        missed = [name for name, one in self.faults.items() if not one.hit]
        return [
            *(f"{one}: no open transaction was hit" for one in missed),
            *(f"{one}: no message was applied" for one in self.lacking),
        ]

    @property
    def verdict(self) -> str:
        """Return `proved`, `differs`, or `no verdict`."""
        if self.differences or self.wrong:
            return "differs"
        return "no verdict" if self.unmet else "proved"


@dataclass
class _Faulty:
    """The run under faults, in a separate database."""

    proof: Proof
    service: Service
    settings: Settings
    engine: AsyncEngine
    processes: Processes
    result: Result
    starts: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Where the topics ended before."""

    async def run(self, records: Sequence[KafkaRecord], chance: Random) -> None:
        """Send the records, cause the faults, and wait until all is done."""
        self.starts = await self._ends(self.service.topics)
        async with autocommitting(self.engine) as driver:
            self.result.postgresql = await driver.fetchval("SHOW server_version")
            await driver.execute(statements.WATCH)
            for place, end in self.starts.items():
                if place.topic in self.service.handlers.topics:
                    await driver.execute(SET_POSITION, self.service.name, *place, end)
        order = interleaved(records, chance)
        self.result.sent = len(order)
        has_stack = self.processes.stack is not None
        names = [name for name, one in FAULTS.items() if has_stack or not one.needs_stack]
        size = ceil(len(order) / (len(names) * (_HOLDS + 1)))
        portions = iter([order[at : at + size] for at in range(0, len(order), size)])
        options = clients.connection_options(self.settings)
        producer = clients.KafkaProducer(**options, enable_idempotence=True)
        await producer.start()

        async def send() -> int:
            sent = [
                await producer.send(
                    one.topic,
                    one.value,
                    one.key,
                    timestamp_ms=one.timestamp,
                    headers=[*one.headers],
                )
                for one in next(portions, ())
            ]
            await asyncio.gather(*sent)
            return len(sent)

        try:
            for role in ("consume", "consume", "relay", "relay"):
                await self.processes.serve(role)
            await self._cause_faults(send, chance.sample(names, len(names)))
            while await send():
                pass
            async with autocommitting(self.engine) as driver:
                await self._drain(driver)
            await self._check("at the end")
        finally:
            await self.processes.stop()
            await producer.stop()

    async def _cause_faults(self, send: faults.Send, names: Sequence[str]) -> None:
        gates, counts = Gates(self.engine, self.processes), self.result.faults
        counts.update({name: Count() for name in (*names, TOGETHER)})
        for name in names:
            for _ in range(_HOLDS):
                await faults.hold(gates, send, counts[TOGETHER])
            await faults.cause(FAULTS[name], gates, self.processes, send, counts[name])
            await self._check(f"after {name}")

    async def _check(self, when: str) -> None:
        """Call the invariants, each with its own snapshot."""
        snapshots = self.engine.execution_options(isolation_level="REPEATABLE READ")
        for invariant in self.proof.invariants:
            try:
                async with AsyncSession(snapshots) as session:
                    await invariant(session)
            except Exception as error:
                name = getattr(invariant, "__name__", "invariant")
                self.result.wrong.append(f"{name} {when}: {type(error).__name__}: {error}")

    async def _ends(self, names: frozenset[str]) -> dict[TopicPartition, int]:
        described = await topics.describe(self.settings, names)
        return {
            TopicPartition(topic.name, number): end
            for topic in described.values()
            for number, end in topic.end.items()
        }

    async def _drain(self, driver: asyncpg.Connection) -> None:
        """Wait until every message is applied or dead; times of retries pass at once."""
        until = monotonic() + _DRAIN_SECONDS
        while True:
            self.processes.check()
            rows = await driver.fetch(statements.POSITIONS, self.service.name)
            at = {TopicPartition(topic, number): offset for topic, number, offset in rows}
            ends = await self._ends(self.service.handlers.topics)
            behind = sum(max(0, end - at.get(place, 0)) for place, end in ends.items())
            left = await driver.fetchrow(statements.LEFT)
            if not behind and not left["due"]:
                if not left["later"] and not left["scheduled"]:
                    return
                await stored.pass_time(driver, _YEAR, timedelta(), self.settings)
            if monotonic() > until:
                counts = f"{behind} records are unread, in the backlog are {dict(left)}"
                self.result.wrong.append(f"after {_DRAIN_SECONDS:g} s work is left: {counts}")
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def given(self, driver: asyncpg.Connection) -> dict[str, Any]:
        """Return the records, and for which consumers they took effect, in which order."""
        known = [*noted(self.processes.notes, "call")]
        places = {tuple(one): number for number, one in enumerate(known)}

        def place(row: asyncpg.Record) -> tuple[int, int, int]:
            called = places.get((row["consumer"], row["source"], row["id"]), -1)
            return row["n"] or 0, called, row["offset"]

        rows = sorted(await driver.fetch(statements.COMMITTED), key=place)
        kinds = (f"{row['consumer']}: {row['type']}" for row in rows if row["type"])
        self.result.applied = dict(Counter(kinds))
        self.result.dead = sum(not row["type"] for row in rows)
        for one in self.service.handlers.takers:
            types = one.event.__event_type__, *one.event.__event_upcasters__
            wanted = {f"{one.consumer}: {type}" for type in types}
            if one.topic != REQUESTS and not wanted & self.result.applied.keys():
                self.result.lacking.append(f"{one.consumer}: {types[0]}")
        records = [
            (
                *(one.topic, one.partition, one.offset, one.timestamp),
                *(None if part is None else part.hex() for part in (one.key, one.value)),
                headers_as_json(one.headers),
            )
            async for one in self._sent_to(self.service.handlers.topics)
        ]
        columns = "consumer", "topic", "partition", "offset"
        return {"records": records, "order": [[row[name] for name in columns] for row in rows]}

    async def _sent_to(self, names: frozenset[str]) -> AsyncIterator[KafkaRecord]:
        ends = await self._ends(names)
        spans = {place: (self.starts.get(place, 0), end) for place, end in ends.items()}
        async for one in evidence.read(self.settings, spans):
            yield one

    async def published(self, driver: asyncpg.Connection) -> list[dict[str, Any]]:
        """Return the events of the topics, when all of the outbox are there or it is too late."""
        until = monotonic() + _PUBLISH_SECONDS
        handlers, may_differ = self.service.handlers, self.proof.may_differ
        committed = await evidence.outbox(driver, self.service.encryption)
        names = frozenset(one.topic for one in committed)
        ids = {one["id"] for one in await evidence.published(committed, handlers, may_differ)}
        while True:
            records = [one async for one in self._sent_to(names)]
            # An event may also be a message that was sent, in a topic that the service also reads.
            found = await evidence.published(records, handlers, may_differ)
            own = [one for one in found if one["id"] in ids or self._has_published(one)]
            if ids <= {one["id"] for one in own} or monotonic() > until:
                return own
            await asyncio.sleep(_LOOK_SECONDS)

    def _has_published(self, event: Mapping[str, Any]) -> bool:
        return event["source"] in (None, self.service.source)


async def attempt(
    proof: Proof,
    file: Path,
    records: Sequence[KafkaRecord],
    chance: Random,
    folder: Path,
    stack: Path | None = None,
) -> Result:
    """Apply the records under faults and one by one; logs and what was found are in the folder.

    With `stack` its servers are also restarted.

    Raises `CanNotProve`.
    """
    began, result = monotonic(), Result(messages=len(records))
    name = f"{proof.service.name}-prove-{uuid4().hex[:8]}"
    clean_folder = folder / "one-by-one"
    clean_folder.mkdir(parents=True)
    (notes := folder / "notes").touch()
    (clean_notes := clean_folder / "notes").touch()
    service = proof.instrumented(name, noting(folder / "unused"))
    await service.open_codecs()
    async with _databases(proof, name) as (settings, clean_settings):
        member = "onceward.prove.member", str(file), name
        processes = Processes((*member, str(notes)), _url(settings), folder, notes, stack)
        clean = Processes((*member, str(clean_notes)), _url(clean_settings), clean_folder, notes)
        for one, its in ((processes, settings), (clean, clean_settings)):
            await one.run("migrate")
            await _prepare(proof, its, name)
        await processes.run("topics", "create", "--partitions", str(_PARTITIONS))
        engine = create_engine(settings, name=f"{name}-prover", check=None)
        faulty = _Faulty(proof, service, settings, engine, processes, result)
        try:
            await faulty.run(records, chance)
            async with autocommitting(engine) as driver:
                given = await faulty.given(driver)
                (folder / "given.json").write_text(json.dumps(given), "utf-8")
                files = (str(file), name, str(clean_notes), *_paths(folder))
                await replace(clean, words=()).run("onceward.prove.clean", *files)
                found = json.loads((folder / "found.json").read_text("utf-8"))
                here = await evidence.stored(driver, proof), await faulty.published(driver)
        finally:
            await engine.dispose()
    one_by_one, under_faults = (
        {
            **rows,
            **evidence.as_evidence(events, found["scheduled"]),
            "calls": {f"{one[1]} of {one[0]}": one[2] for one in noted(its, "outside")},
        }
        for rows, events, its in (
            (found["stored"], found["published"], clean_notes),
            (*here, notes),
        )
    )
    result.differences += differences(one_by_one, under_faults, given)
    result.seconds = monotonic() - began
    return result


def _paths(folder: Path) -> Iterator[str]:
    yield from (str(folder / name) for name in ("given.json", "found.json"))


def differences(
    one_by_one: Evidence, under_faults: Evidence, given: Mapping[str, Any]
) -> Iterator[Difference]:
    """Yield what is not the same."""
    texts = {
        tuple(place): bytes.fromhex(value or "").decode("utf-8", "backslashreplace")
        for *place, _, _, value, _ in given["records"]
    }
    places = (tuple(place) for _, *place in given["order"])
    order = dict.fromkeys(texts[place] for place in places if place in texts)
    for kind in sorted({*one_by_one, *under_faults}):
        here, there = one_by_one.get(kind, {}), under_faults.get(kind, {})
        for about in sorted({*here, *there}):
            if here.get(about) != there.get(about):
                values = (one.rpartition("=")[2].removeprefix("key ") for one in about.split(", "))
                words = re.findall(r"[\w-]+", " ".join(values))
                scores = {one: sum(word in one for word in words) for one in order}
                best = max([1, *scores.values()])
                named = [one for one, score in scores.items() if score == best]
                yield Difference(kind, about, here.get(about), there.get(about), named[:_RELATED])


@asynccontextmanager
async def _databases(proof: Proof, name: str) -> AsyncIterator[list[Settings]]:
    """Create two databases; they are dropped at the end."""
    server, made = Settings(), list[str]()
    url = make_url(server.database_url.get_secret_value())
    engine = create_engine(server, name=name, check=None)
    try:
        async with autocommitting(engine) as driver:
            made += [f"prove_{uuid4().hex[:12]}" for _ in range(2)]
            for one in made:
                await driver.execute(f"CREATE DATABASE {one}")
        urls = [url.set(database=one).render_as_string(hide_password=False) for one in made]
        forever: dict[str, Any] = {"inbox_age": FOREVER, "inbox_generation_age": FOREVER}
        yield [Settings(database_url=SecretStr(one), **forever) for one in urls]
    finally:
        async with autocommitting(engine) as driver:
            for one in made:
                await driver.execute(f"DROP DATABASE IF EXISTS {one} WITH (FORCE)")
        await engine.dispose()


async def _prepare(proof: Proof, settings: Settings, name: str) -> None:
    if proof.prepare is not None:
        engine = create_engine(settings, name=name, check=None)
        async with AsyncSession(engine) as session:
            await proof.prepare(session)
            await session.commit()
        await engine.dispose()


def _url(settings: Settings) -> str:
    return settings.database_url.get_secret_value()


async def check_topics(service: Service) -> None:
    """Raise `CanNotProve` if a topic of the service has records: others may read it."""
    settings = Settings()
    for topic in (await topics.describe(settings, service.topics)).values():
        if topic.first != topic.end:
            raise CanNotProve(
                f"{topic.name} has records in {settings.kafka}, and its readers would get the"
                " messages: unset PIPELINE_KAFKA_BOOTSTRAP_SERVERS and PIPELINE_DATABASE_URL, or"
                " use topics that are empty"
            )


async def shrunk(
    proof: Proof,
    file: Path,
    records: Sequence[KafkaRecord],
    chance: Random,
    folder: Path,
    stack: Path | None,
    seconds: float,
) -> Result:
    """Run it, and after a difference again with the messages of fewer keys, as long as it differs.

    No new run begins after `seconds`. Raises `CanNotProve`.
    """
    until = monotonic() + seconds
    result = await attempt(proof, file, records, chance, folder / "1", stack)
    number, keys = 1, list(dict.fromkeys(map(key_of, records)))
    halves: list[list[Hashable]] = []
    while result.verdict == "differs" and len(keys) > 1 and monotonic() < until:
        halves = halves or [keys[: len(keys) // 2], keys[len(keys) // 2 :]]
        half, number = halves.pop(0), number + 1
        some = [one for one in records if key_of(one) in half]
        found = await attempt(proof, file, some, chance, folder / str(number), stack)
        if found.verdict == "differs":
            result, records, keys, halves = found, some, half, []
        elif not halves:
            break
    return result
