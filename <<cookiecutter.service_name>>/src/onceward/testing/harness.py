"""The harness: a service's handlers in their real transactions, without Kafka."""

import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, Self, TypeVar

from sqlalchemy.exc import NoResultFound
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from onceward.apply.batch import prepare
from onceward.apply.positions import Slot
from onceward.events.event import Event
from onceward.events.message import Record
from onceward.handlers.applied import Applied
from onceward.handlers.registry import Handlers
from onceward.operators import corrections
from onceward.servers.database import autocommitting
from onceward.service import Service

from . import stored
from .crashes import Crash, MortalEngine, crashes_of, name_of
from .databases import ResettableDatabase, new_session
from .errors import HarnessMisused
from .explore import Scenario, failing_once, keys_of, scenarios
from .files import records_of
from .observed import observing
from .outcome import Outcome, Published, outcome_of
from .process import Process, Step, open_claims
from .records import Headers, KafkaRecord, Sent, check_topic, record
from .resources import Resources
from .stand_ins import StandIn, check_complete, check_known
from .stored import DeadLetter, Mark, Stored

log = logging.getLogger(__name__)
R = TypeVar("R")
_Check = Callable[[Any], Awaitable[None]]


class Harness:
    """Handles messages as the service does: in its transactions, on a real PostgreSQL.

    Each method that handles messages returns the `Outcome` of this step. What is due at once, such
    as a message of a deferred handler, is handled in the same step. What is due later waits for
    `advance`, and calls to the outside for `run_calls`. The breaker never opens. Errors of the
    database are raised after a few attempts.
    """

    def __init__(
        self, service: Service, engine: AsyncEngine, database: ResettableDatabase, folder: Path
    ) -> None:
        self._resources = Resources(service)
        self.service = service = self._resources.bound(service)
        self.engine = engine
        """The pool of connections to the test's database."""
        self.object_store = folder
        """The folder in place of the object store of a service with `claims`."""
        self._database = database
        self._settings = database.settings()
        self._claims = open_claims(service, self._settings, folder)
        self._did = Step()
        self._crashing: MortalEngine | None = None
        self._mortal: MortalEngine | None = None  # the same, while its process does the work
        self._start(service.handlers)

    def with_resources(self, **members: object) -> Self:
        """Let functions take these resources of the service from now on, by their names.

        The kit never opens `Service.resources`: give what the functions take that the test calls. A
        function that takes another one raises `HarnessMisused` out of the step that calls it.
        Returns the same harness. Raises `HarnessMisused` for a name that the dataclass does not
        have, and for a value of another type.
        """
        self._resources.give(members)
        return self

    async def handle(
        self,
        event: Event,
        *,
        key: str | bytes | None = None,
        topic: str | None = None,
        id: str | None = None,
        source: str = "/tests",
        headers: Headers | None = None,
        partition: int = 0,
        age: timedelta = timedelta(),
    ) -> Outcome:
        """Handle one event. The arguments are the fields of `Sent`, with the same defaults.

        An equal event is a duplicate: pass `id` to handle it as a new one. Raises `HarnessMisused`
        if no handler takes the event, or handlers take it from several topics and `topic` is not
        given.
        """
        sent = Sent(event, key, topic, id, source, headers or {}, partition, age)
        return await self.handle_batch([sent])

    async def handle_batch(self, messages: Sequence[Event | Sent]) -> Outcome:
        """Handle events as one batch of each partition, in one transaction each if none fails.

        Raises `HarnessMisused` as `handle` does.
        """
        return await self._handle([self._record(one) for one in messages])

    async def handle_record(
        self,
        topic: str,
        value: str | bytes | None,
        *,
        key: str | bytes | None = None,
        headers: Headers | None = None,
        partition: int = 0,
    ) -> Outcome:
        """Handle a record as it is, which may be no valid event. A value of None is a tombstone.

        Raises `HarnessMisused` for a topic that no handler reads.
        """
        check_topic(self.service.handlers, topic)
        made = record(topic, value, key=key, headers=headers or {}, partition=partition)
        return await self._handle([made])

    async def handle_file(self, path: str | Path, *, keeps_times: bool = False) -> Outcome:
        """Handle the records of a file, of each partition as one batch.

        Each line is a record as `service dead show ID --json` writes it; a path is relative to the
        working directory. Records are of now, or with `keeps_times` of the file's timestamps.
        The command hides secrets, so a payload with one is not that of production. Raises
        `HarnessMisused` for a line without a record, and `OSError`.
        """
        handlers = self.service.handlers
        return await self._handle([*records_of(Path(path), handlers, keeps_times=keeps_times)])

    async def advance(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
    ) -> Outcome:
        """Let time pass: retries, scheduled events and gaps that become due, one after the other.

        The engine's stored times are moved back instead of waiting; clocks and the service's tables
        stay as they are. Inbox markers age, too, and are forgotten after `PIPELINE_INBOX_AGE`.
        Calls become due, and wait for `run_calls`. After a hundred pauses, what is due comes late
        by a tenth of the time passed. Raises `HarnessMisused` if it has no end or is negative.
        """
        time = left = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        if left < timedelta():
            raise HarnessMisused(f"time does not pass backwards, as by {left}")

        async def work() -> None:
            nonlocal left
            while left:
                before, late = left, self._did.lateness(time - left)
                left = await self._query(stored.pass_time, before, late, self._settings)
                self._did.pause(before - left)
                await self._query(stored.publish_due)
                await self._process.work_off()

        return await self._step(work)

    async def run_calls(self, stand_ins: Mapping[str, StandIn] | None = None) -> Outcome:
        """Make the calls to the outside that are due, by stand-ins for the effects' functions.

        `stand_ins` are functions by consumer, with or without `async`; each takes the event, the
        `Call` and resources, as the effect's own function does, which may be given, too. It raises
        what the outside may raise. Results are those of the calls. Raises `HarnessMisused` for a
        call without a stand-in, and for a consumer that is no effect.
        """
        functions = {name: self._resources.bind(one) for name, one in (stand_ins or {}).items()}
        check_known(functions, self.service.handlers)

        async def work() -> None:
            while due := await self._query(stored.consumers_of_due_calls):
                check_complete(functions, due)
                await self._process.call(functions)

        return await self._step(work)

    async def correct(self, consumer: str, *messages: Event | Sent) -> Outcome:
        """Hand messages to a correction, as `service correct` does: events, or `Applied`.

        Raises `HarnessMisused` if it is no correction, or does not take one of them.
        """
        handlers, encryption = self.service.handlers, self.service.encryption
        records: list[Record] = [
            corrections.record_of(one, (one.key or "").encode() or None)
            if isinstance(one, Applied)
            else self._record(one)
            for one in messages
        ]
        await prepare(handlers, records)
        items = [corrections.item_of(handlers, consumer, one) for one in records]
        taken = [one for one in items if one is not None]
        if consumer not in handlers.corrections or len(taken) < len(items):
            known = ", ".join(sorted(handlers.corrections)) or "none"
            raise HarnessMisused(
                f"{consumer!r} does not take all of these messages; corrections: {known}"
            )

        async def work() -> None:
            await self._query(corrections.hand, taken, 0.0, encryption)
            await self._process.work_off()

        return await self._step(work)

    async def explore(
        self,
        messages: Sequence[Event | Sent],
        *,
        invariant: Callable[[Self], Awaitable[None]],
        crashes: bool = False,
        at_most: int = 500,
    ) -> int:
        """Check an invariant after the messages came in every order that keeps order per key.

        In each order they also come twice, in one batch, and with a failure of each message's first
        call; with `crashes`, the process also dies after each statement. Every scenario begins with
        a reset database, and a day passes before the `invariant` is called with the harness. What
        it raises gets a note that has the scenario. Returns the number of scenarios; of more than
        `at_most` that number is chosen, always the same. One takes about 10 ms a message, and more
        with a crash. Raises `HarnessMisused` as `handle` does, and if `at_most` is less than 1.
        """
        if not iscoroutinefunction(invariant):
            raise HarnessMisused("write the invariant as an `async def function(harness)`")
        if at_most < 1:
            raise HarnessMisused(f"at_most is 1 or more, not {at_most}: else nothing is checked")
        records = [self._record(one) for one in messages]
        play = partial(self._play, records, invariant, crashes)
        found = await scenarios(keys_of(records), at_most, play if crashes else None)
        for one in found:
            await play(one)
        return len(found)

    async def each_crash(self) -> AsyncIterator[str]:
        """Run the block of an `async for` again and again, each time with another crash.

        First there is none. Then the process dies after each statement that it executes in a step:
        its connections end, and another process does what is left of the step. The crash is
        simulated within one Python process: the engine's state is lost, but the state of your
        modules stays, such as a cache or a counter, and may hide what a real crash would lose.
        Also only the answer to a statement that commits is lost, or the connection before `COMMIT`.
        Yields what happens. Each time begins with a reset database. `Outcome` may lack what a
        process has applied before it died.
        """
        counting = self._prepare_crash()
        async with self._fresh(self.service.handlers, counting):
            yield "no crash"
        for crash, text in [*crashes_of(counting)]:
            async with self._fresh(self.service.handlers, self._prepare_crash(crash)):
                yield text

    async def records(self) -> list[Published]:
        """Return the events in the outbox, of all steps, in their order."""
        return (await self._stored(stored.BEGINNING)).records

    async def dead_letters(self) -> list[DeadLetter]:
        """Return the dead letters, the oldest first."""
        return await self._query(stored.dead_letters, self.service.encryption)

    async def redrive(self, *letters: DeadLetter) -> Outcome:
        """Try dead letters again, all of them by default. Calls then wait for `run_calls`.

        Raises `HarnessMisused` for a letter that is not there any more.
        """
        left = [letters or await self.dead_letters()]

        async def work() -> None:
            if left:
                await self._query(stored.redrive, left.pop())
            await self._process.work_off()

        return await self._step(work)

    async def get(self, entity: type[R], *key: object) -> R:
        """Return the row with this primary key as it is committed.

        Raises SQLAlchemy's `NoResultFound` if there is none.
        """
        async with self.session() as session:
            try:
                return await session.get_one(entity, key[0] if len(key) == 1 else key)
            except NoResultFound as error:
                error.add_note(f"{entity.__name__} has no row {key}: see the failures of outcomes")
                raise

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """Yield a session, to prepare rows or to read them; it is committed at the end."""
        async with new_session(self.engine) as session:
            yield session
            await session.commit()

    def _start(self, handlers: Handlers) -> None:
        """Let another process of the service, with these handlers, do the work from now on."""
        engine = self._mortal.engine if self._mortal else self.engine
        own = self._settings, handlers, self._claims, self._did
        self._process = Process(self.service, engine, *own)
        self._handlers = handlers

    async def close(self) -> None:
        """Close the connections of processes that were to die."""
        if self._crashing:
            await self._crashing.engine.dispose()

    def _prepare_crash(self, crash: Crash | None = None) -> MortalEngine:
        name = self.service.name
        self._crashing = self._crashing or MortalEngine(self._settings, self.engine, name=name)
        self._crashing.begin(crash)
        return self._crashing

    @asynccontextmanager
    async def _fresh(self, handlers: Handlers, mortal: MortalEngine | None) -> AsyncIterator[None]:
        """Reset the database, and let another process do the work of the block."""
        await self._database.reset()
        self._mortal = mortal
        self._start(handlers)
        try:
            yield
        finally:
            self._mortal = None
            self._start(self.service.handlers)

    async def _play(
        self, records: Sequence[KafkaRecord], invariant: _Check, crashes: bool, scenario: Scenario
    ) -> int:
        """Handle the records as the scenario says; return the number of counted statements."""
        crash = None if scenario.dies_after is None else Crash(scenario.dies_after)
        mortal = self._prepare_crash(crash) if crashes else None
        handlers = self.service.handlers
        if scenario.fails is not None:
            handlers = await failing_once(handlers, records[scenario.fails])
        try:
            async with self._fresh(handlers, mortal):
                sent = [replace(records[place]) for place in scenario.sent]
                for batch in [sent] if scenario.is_batch else [[each] for each in sent]:
                    await self._handle(batch)
                await self.advance(days=1)
            await invariant(self)
        except Exception as error:
            error.add_note(f"scenario: {scenario}")
            raise
        return len(mortal.statements) if mortal else 0

    def _record(self, message: Event | Sent) -> KafkaRecord:
        sent = message if isinstance(message, Sent) else Sent(message)
        return sent.record(self.service.handlers)

    async def _handle(self, records: Sequence[KafkaRecord]) -> Outcome:
        batches: dict[Slot, list[KafkaRecord]] = defaultdict(list)
        for one in records:
            batches[Slot(self.service.name, one.topic, one.partition)].append(one)

        async def work() -> None:
            for slot, batch in batches.items():
                await self._process.apply(slot, batch)
            decided = (pair for one in self._did.outcomes for pair in one.decided)
            if any(decision.due_in == 0.0 for _, decision in decided):
                await self._process.work_off()

        return await self._step(work)

    async def _step(self, work: Callable[[], Awaitable[None]]) -> Outcome:
        """Do the work, and return what has become of messages and what is stored since."""
        with (did := self._did).begun():
            before = await self._query(stored.mark)
            with observing(self.service, self._settings) as observed:
                try:
                    await self._survive(work)
                finally:
                    self._resources.raise_misuse()
            found = (await self._stored(before))._asdict()
            return outcome_of(did.outcomes, **found, skipped=did.skipped, observed=observed)

    async def _stored(self, since: Mark) -> Stored:
        source = self.service.handlers, self.service.package, self.service.encryption
        return await self._query(stored.since, since, *source)

    async def _survive(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work; if the process dies over it, another one does what is left."""
        if (mortal := self._mortal) is None:
            await work()
            return

        async def all_work() -> None:
            await work()
            await self._process.work_off()  # an outcome that is lost would have said what is due

        if not await mortal.run(all_work):
            log.warning("the process has died after: %s", name_of(mortal.statements[-1]))
            self._mortal = None
            await self._query(stored.end_leases)
            self._start(self._handlers)
            await all_work()

    async def _query(self, statement: Callable[..., Awaitable[R]], *arguments: object) -> R:
        async with autocommitting(self.engine) as driver:
            return await statement(driver, *arguments)
