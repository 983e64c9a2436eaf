"""The harness: a service's handlers in their real transactions, without Kafka."""

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any, Self, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from pipeline.apply.batch import prepare, read
from pipeline.apply.breaker import Breaker
from pipeline.apply.filters import Filters
from pipeline.apply.outcome import BatchOutcome
from pipeline.apply.positions import Slot
from pipeline.apply.source import Source
from pipeline.apply.transactions import ConsumeTransactions, Signals
from pipeline.consume.partition_source import PartitionSource
from pipeline.events.event import Event
from pipeline.handlers.registry import Handlers
from pipeline.observe.health import Health
from pipeline.retry.workers import BacklogWorkers
from pipeline.servers.database import autocommitting, create_engine
from pipeline.servers.retrying import Attempts
from pipeline.service import Service

from . import stored
from .databases import ResettableDatabase
from .errors import HarnessMisused
from .explore import failing_once, scenarios
from .outcome import Outcome, outcome_of
from .records import Headers, KafkaRecord, Sent, check_topic, record
from .stored import DeadLetter

R = TypeVar("R")
StandIn = Callable[[Any, Any], Awaitable[object]]
"""Takes the place of an effect's function: it gets the event and the `Call`."""

_OUTAGES = 5
"""Attempts after which a step raises the error of the database."""
_ROUNDS = 200
"""Rounds of retries in a step after which it ends with an error."""
_HANGS = 3_600.0


class _Recording(ConsumeTransactions):
    """The transactions of the engine; the outcomes of all that were committed are kept."""

    outcomes: list[BatchOutcome]

    async def apply(self, source: Source, retrying: Attempts) -> Sequence[BatchOutcome]:
        found = await super().apply(source, retrying)
        self.outcomes += found
        return found


class Harness:
    """Handles messages as the service does: in its transactions, on a real PostgreSQL.

    Each method that handles messages returns the `Outcome` of this step. What is due at once, such
    as a message of a deferred handler, is handled in the same step. What is due later waits for
    `advance`, and calls to the outside for `run_calls`. The breaker never opens. Payloads are not
    stored in an object store. Errors of the database are raised after a few attempts.
    """

    def __init__(self, service: Service, engine: AsyncEngine, database: ResettableDatabase) -> None:
        self.service = service
        self.engine = engine
        """The pool of connections to the test's database."""
        self._database = database
        settings = database.settings()
        self._health = Health(stall_after=_HANGS)
        self._outcomes: list[BatchOutcome] = []
        self._consume = _Recording(
            engine,
            group=service.name,
            source=service.source,
            settings=settings,
            breaker=Breaker(
                keys=settings.breaker_keys, pause=settings.retry_pause, health=self._health
            ),
            filters=Filters(mebibytes=settings.inbox_filter_mebibytes),
            handlers=service.handlers,
            signals=Signals(),
        )
        self._consume.outcomes = self._outcomes
        self._use(service.handlers)
        self._positions: dict[Slot, int] = {}
        self._rounds = self._skipped = 0

    async def handle(
        self,
        event: Event,
        *,
        key: str | None = None,
        topic: str | None = None,
        id: str | None = None,
        source: str = "/tests",
        headers: Headers | None = None,
        partition: int = 0,
    ) -> Outcome:
        """Handle one event. The arguments are the fields of `Sent`, with the same defaults.

        An equal event is a duplicate, unless `id` is given. Raises `HarnessMisused` if no handler
        takes the event, or handlers take it from several topics and `topic` is not given.
        """
        sent = Sent(event, key, topic, id, source, headers or {}, partition)
        return await self.handle_batch([sent])

    async def handle_batch(self, messages: Sequence[Event | Sent]) -> Outcome:
        """Handle events as one batch of each partition, in one transaction if none fails.

        Raises `HarnessMisused` as `handle` does.
        """
        return await self._handle([self._record(one) for one in messages])

    async def handle_record(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers | None = None,
        partition: int = 0,
    ) -> Outcome:
        """Handle a record as it is, which need not be a valid event. None is a tombstone.

        Raises `HarnessMisused` for a topic that no handler reads.
        """
        check_topic(self.service.handlers, topic)
        made = record(topic, value, key=key, headers=headers or {}, partition=partition)
        return await self._handle([made])

    async def advance(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
    ) -> Outcome:
        """Let time pass: retries, scheduled events and gaps that become due, one after the other.

        Stored due times are moved back instead of waiting. The clock of the database stays, and so
        do the ages of inbox markers. Calls to the outside become due, and wait for `run_calls`.
        """

        async def work() -> None:
            left = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
            while left:
                left = await self._query(stored.pass_time, left)
                await self._query(stored.publish_due)
                await self._work_off(self._backlog)

        return await self._step(work)

    async def run_calls(self, stand_ins: Mapping[str, StandIn] | None = None) -> Outcome:
        """Make the calls to the outside that are due, by stand-ins for the effects' functions.

        `stand_ins` are coroutine functions by consumer; each takes the event and the `Call`, and
        raises what the outside may raise. Results are those of the calls. Raises `HarnessMisused`
        for a call without a stand-in, and for a consumer that is no effect.
        """
        functions = dict(stand_ins or {})
        callers = self.service.handlers.callers
        if unknown := functions.keys() - callers:
            raise HarnessMisused(
                f"{min(unknown)!r} is no effect; effects: {', '.join(sorted(callers)) or 'none'}"
            )
        consume = copy(self._consume)
        consume.handlers = self.service.handlers.with_functions(
            lambda one: functions.get(one.consumer, one.function)
        )
        workers = [kind(consume, self._health) for kind in self.service.workers]

        async def work() -> None:
            while due := await self._query(stored.consumers_of_due_calls):
                if missing := set(due) - functions.keys():
                    raise HarnessMisused(
                        f"a call of {min(missing)!r} is due, and tests call nothing outside: write"
                        f" run_calls({{{min(missing)!r}: function}}), with an `async def"
                        " function(event, call)`"
                    )
                for one in workers:
                    await self._work_off(one)

        return await self._step(work)

    async def explore(
        self,
        messages: Sequence[Event | Sent],
        *,
        invariant: Callable[[Self], Awaitable[None]],
        at_most: int = 500,
    ) -> int:
        """Check an invariant after the messages came in every order that keeps order per key.

        In each order they also come twice, in one batch, and with a failure of each message's first
        call. Every scenario begins with a reset database, and a day passes before the `invariant`
        is called with the harness; it raises `AssertionError`, with a note that has the scenario.
        Returns the number of scenarios; of more than `at_most` that number is chosen, always the
        same. One takes about 10 ms a message. Raises `HarnessMisused` as `handle` does.
        """
        records = [self._record(one) for one in messages]
        handlers = self.service.handlers
        # A message without a key has no order.
        keys = [
            (one.topic, one.partition, place if one.key is None else one.key)
            for place, one in enumerate(records)
        ]
        found = scenarios(keys, at_most)
        await prepare(handlers, records)
        decoded = [handlers.codec(one.topic).decode(one) for one in records]
        try:
            for number, one in enumerate(found, 1):
                await self._database.reset(self.engine)
                self._positions.clear()
                at_fault = None if one.fails is None else decoded[one.fails]
                self._use(failing_once(handlers, at_fault) if at_fault else handlers)
                sent = [replace(records[place]) for place in one.sent]
                for batch in [sent] if one.is_batch else [[each] for each in sent]:
                    await self._handle(batch)
                await self.advance(days=1)
                try:
                    await invariant(self)
                except AssertionError as error:
                    error.add_note(f"scenario {number} of {len(found)}: {one}")
                    raise
        finally:
            self._use(handlers)
        return len(found)

    async def dead_letters(self) -> list[DeadLetter]:
        """Return the dead letters, the oldest first."""
        return await self._query(stored.dead_letters)

    async def redrive(self, *letters: DeadLetter) -> Outcome:
        """Try dead letters again, all of them by default. Calls then wait for `run_calls`.

        Raises `HarnessMisused` for a letter that is not there any more.
        """

        async def work() -> None:
            await self._query(stored.redrive, letters or await self.dead_letters())
            await self._work_off(self._backlog)

        return await self._step(work)

    async def get(self, entity: type[R], *key: object) -> R:
        """Return the row with this primary key as it is committed.

        Raises SQLAlchemy's `NoResultFound` if there is none.
        """
        async with self.session() as session:
            return await session.get_one(entity, key[0] if len(key) == 1 else key)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """Yield a session, to prepare rows or to read them; it is committed at the end."""
        async with AsyncSession(self.engine, expire_on_commit=False) as session:
            yield session
            await session.commit()

    def _use(self, handlers: Handlers) -> None:
        """Handle messages by these handlers from now on."""
        self._consume = copy(self._consume)
        self._consume.handlers = handlers
        self._backlog = BacklogWorkers(self._consume, self._health)

    def _record(self, message: Event | Sent) -> KafkaRecord:
        sent = message if isinstance(message, Sent) else Sent(message)
        return sent.record(self.service.handlers)

    async def _handle(self, records: Sequence[KafkaRecord]) -> Outcome:
        batches: dict[Slot, list[KafkaRecord]] = defaultdict(list)
        for one in records:
            batches[Slot(self.service.name, one.topic, one.partition)].append(one)

        async def work() -> None:
            for slot, batch in batches.items():
                await self._apply(slot, batch)
            decided = (pair for one in self._outcomes for pair in one.decided)
            if any(decision.due_in == 0.0 for _, decision in decided):
                await self._work_off(self._backlog)

        return await self._step(work)

    async def _apply(self, slot: Slot, records: Sequence[KafkaRecord]) -> None:
        """Apply records of a partition, from its position on."""
        # After an error the position may be anywhere in the batch: it is read again.
        start = self._positions.pop(slot, None)
        if start is None:
            start = await self._query(stored.position, slot)
        for place, one in enumerate(records):
            one.offset = start + place
        batch = await read(self._consume.handlers, start, records)
        failures = count(1)
        attempts = Attempts(
            "the harness",
            "PostgreSQL",
            unless=lambda: next(failures) >= _OUTAGES,
            report=lambda reason: None,
        )
        await self._consume.apply(PartitionSource(slot, batch), attempts)
        self._skipped += len(batch.skipped)
        self._positions[slot] = batch.end

    async def _work_off(self, workers: BacklogWorkers) -> None:
        """Handle what is due. Raises `HarnessMisused` in a step without an end."""
        is_working = True
        while is_working:
            is_working = await workers.work_off()
            self._rounds += 1
            if self._rounds > _ROUNDS:
                raise HarnessMisused(
                    f"after {_ROUNDS} rounds of retries there are more: raise Park or Retry with a"
                    " longer after=, or advance by less time"
                )

    async def _step(self, work: Callable[[], Awaitable[None]]) -> Outcome:
        """Do the work, and return what has become of messages and what is stored since."""
        self._outcomes.clear()
        self._rounds = self._skipped = 0
        before = await self._query(stored.mark)
        await work()
        service = self.service
        found = await self._query(stored.since, before, service.handlers, service.package)
        return outcome_of(self._outcomes, **found._asdict(), skipped=self._skipped)

    async def _query(
        self,
        statement: Callable[..., Awaitable[R]],
        *arguments: object,
    ) -> R:
        async with autocommitting(self.engine) as driver:
            return await statement(driver, *arguments)


@asynccontextmanager
async def open_harness(service: Service, database: ResettableDatabase) -> AsyncIterator[Harness]:
    """Reset the database and yield a harness of the service on it."""
    engine = create_engine(database.settings(), name=service.name)
    try:
        await database.reset(engine)
        await service.open_codecs()
        yield Harness(service, engine, database)
    finally:
        await engine.dispose()
