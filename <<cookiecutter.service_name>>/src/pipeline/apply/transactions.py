"""The consume transaction: messages of partitions or of the backlog take effect as a whole.

Read `ConsumeTransactions` from top to bottom: `apply` says what happens when a transaction fails,
`_transact` when it is committed or rolled back, and `_execute` what is written, in which order.
"""

import asyncio
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import copy
from time import perf_counter

from sqlalchemy.ext.asyncio import AsyncEngine

from pipeline.handlers.policy import Decision
from pipeline.handlers.registry import Handlers
from pipeline.handlers.sessions import AT_WORK
from pipeline.handlers.staging import Outbox
from pipeline.observe import metrics
from pipeline.observe.traces import ProcessSpans
from pipeline.observe.watchdog import CALLS
from pipeline.servers.database import driver_of
from pipeline.servers.guard import CURRENT_GUARD, GUARD
from pipeline.servers.retrying import Attempts
from pipeline.settings import Settings

from . import backlog, guilt, inbox, limits
from .attempt import Attempt, Memory
from .breaker import Breaker, BreakerOpen
from .calls import call_handlers
from .claim_check import ClaimCheck
from .encryption import Encryption
from .filters import Filters
from .guilt import CulpritUnknown, FailedCalls, Failure, MessagesFailed, NeedsOwnSession
from .inbox import look_up, to_handle, too_old
from .item import Item
from .outcome import BatchOutcome
from .positions import SourceLost
from .source import Source, is_single
from .turns import Turns

_EARLY = 0.01
"""Seconds; uvloop rounds its timers, and one that fires early would look like an outage."""


class Signals:
    """Notifies other parts of the process of committed transactions; this class does nothing."""

    async def wait_for_relay(self) -> None:
        """Return when the outbox has room for more events."""

    def events_staged(self, number: int) -> None:
        """React to new events in the outbox."""

    def rows_due(self) -> None:
        """React to rows of the backlog that are due at once."""

    def calls_staged(self) -> None:
        """React to new rows of effects, whose handlers are called outside of a transaction."""


class ConsumeTransactions:
    """Applies messages in transactions, in the order of `docs/protocol.md`."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        group: str,
        source: str,
        settings: Settings,
        breaker: Breaker,
        filters: Filters,
        handlers: Handlers,
        signals: Signals,
        claims: ClaimCheck | None = None,
        encryption: Encryption | None = None,
    ) -> None:
        """`source` is that of published events; `claims` stores payloads too large for a record."""
        self.engine = engine
        self.group = group
        self._source = source
        self.settings = settings
        self.breaker = breaker
        self._filters = filters
        self.handlers = handlers
        self.signals = signals
        self.claims = claims
        self.encryption = encryption
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._taking_all = asyncio.Lock()
        self.turns = Turns(engine)
        self._own = {handler.consumer for handler in handlers if handler.takes_batches}
        """Consumers whose messages have sessions of their own: added when a handler uses one."""

    @asynccontextmanager
    async def alone(self) -> AsyncIterator["ConsumeTransactions"]:
        """Return transactions while this process runs no others.

        If the process dies, the message that they apply is the only suspect.
        """
        async with self._taking_all, AsyncExitStack() as taken:
            for _ in range(self.settings.concurrency):
                await taken.enter_async_context(self._slots)
            only = copy(self)
            only._slots = asyncio.Semaphore(1)
            only.turns = Turns(self.engine)  # others that wait for a slot may have their turn
            yield only

    async def apply(
        self, source: Source, retrying: Attempts, memory: Memory | None = None
    ) -> Sequence[BatchOutcome]:
        """Apply all messages; returns the outcome of each transaction that was needed.

        `memory` is that of an earlier attempt at the same messages.

        Every message has then taken effect or is stored. Raises `BreakerOpen` if the breaker is
        open for a consumer, `SourceLost` if another process owns the source, and `NotShared` if
        the batches of a shared transaction must be applied one by one.
        """
        outcomes: list[BatchOutcome] = []
        left: list[tuple[Source, dict[bytes, Decision]]] = [(source, source.decisions)]
        memory = memory or Memory()
        while left:
            part, decisions = left.pop(0)
            parts: Sequence[Source] = [part]
            result = await self._retry(part, decisions, retrying, memory)
            match result:
                case BatchOutcome():
                    outcomes.append(result)
                    continue
                case NeedsOwnSession():
                    self._own.add(result.consumer)
                case MessagesFailed():
                    decisions = decisions | result.decisions
                case CulpritUnknown():
                    traceback.clear_frames(result.error.__traceback__)  # they refer to the batch
                    parts = part.halves()
                    if len(parts) == 1 and len(parts[0].items) == len(part.items):
                        guilty = guilt.blame(part, decisions, result, self.breaker)
                        decisions = decisions | guilty
            left[:0] = [(one, decisions) for one in parts]
        return outcomes

    async def _retry(
        self,
        source: Source,
        decisions: Mapping[bytes, Decision],
        retrying: Attempts,
        memory: Memory,
    ) -> BatchOutcome | Failure:
        """Try a transaction until it is committed or its messages are at fault.

        A failure of the infrastructure is retried, and is no message's fault.
        """
        memory.contentions = 0
        result = await retrying(self._transact, source, decisions, memory)
        if isinstance(result, CulpritUnknown) and is_single(source):
            # The second attempt finds a row that another partition has created meanwhile, and has
            # another connection if the first one was slow.
            memory.contentions = 0
            result = await retrying(self._transact, source, decisions, memory)
        return result

    async def _transact(
        self, source: Source, decisions: Mapping[bytes, Decision], memory: Memory
    ) -> BatchOutcome | Failure:
        """Commit the messages in one transaction, or roll it back and return why."""
        own = self._own.intersection(item.consumer for item in source.items)
        # Code of the engine runs here, even if a handler's has begun the task.
        CURRENT_GUARD.set(None)
        # The time limit does not include the wait for a connection.
        turn = self.turns.take(source, decisions)
        async with turn, self._slots, self.engine.connect() as connection:
            await self.signals.wait_for_relay()
            attempt = Attempt(
                connection,
                await driver_of(connection),
                self._new_outbox(),
                ProcessSpans(self.group),
                own,
                limits.statement(connection, self.settings, handler=AT_WORK if own else ""),
                self.settings.transaction_timeout,
                memory,
            )
            try:
                async with asyncio.timeout(attempt.time_limit + _EARLY):
                    result = await self._execute(attempt, source, decisions)
                if isinstance(result, BatchOutcome):
                    await connection.commit()
            except (BreakerOpen, SourceLost):
                await attempt.roll_back()
                raise
            except Exception as error:
                self.turns.learn(error, source, decisions)
                failure = guilt.of_transaction(error, attempt, source, decisions)
                if failure is None:
                    await connection.invalidate()
                    raise
                result = failure
                traceback.clear_frames(error.__traceback__)
            except BaseException:
                await connection.invalidate()  # it may be in the middle of a statement
                raise
            if not isinstance(result, BatchOutcome):
                await attempt.roll_back()
                return result
        self.breaker.succeeded(result.succeeded)
        self._signal(result)
        result.report(self.group)
        source.record_metrics(self.group, result.applied, attempt.seconds)
        return result

    async def _execute(
        self, attempt: Attempt, source: Source, decisions: Mapping[bytes, Decision]
    ) -> BatchOutcome | Failure:
        """Execute all statements of the transaction except the commit."""
        driver, outbox = attempt.driver, attempt.outbox
        outcome = BatchOutcome(encryption=self.encryption)
        # Time limits, and the lock that keeps generations from being closed.
        await limits.begin(attempt.connection, attempt.limits)
        # Moves the position, or holds the lane; raises if another process owns it.
        generations = await source.begin(driver)
        # Inserts markers: a message that has one already is a duplicate.
        found = await look_up(driver, generations, self._filters, source, outcome)
        decisions = {**decisions, **await too_old(driver, generations, found.new)}
        items = to_handle(found, decisions, outcome)
        # Handlers change rows and stage events.
        failures = await self._call(items, attempt, outcome)
        if failure := guilt.judge(source, failures, outcome, self.breaker, attempt):
            return failure
        await attempt.rows.flush()
        attempt.rows.session.sync_session.close()
        # Messages that are not applied, parked or dead ones, get rows in the backlog, no markers.
        if outcome.returned:
            await inbox.keep_results(driver, generations, outcome.returned)
        if not_applied := found.in_backlog | {item.key for item, _ in outcome.decided}:
            await inbox.unmark(driver, generations, list(not_applied))
        if self.encryption is not None:
            outcome.decided = self.encryption.redact(outcome.decided)
        died = await source.settle(driver, outcome)
        if topic := self.settings.dead_letter_topic:
            outbox.add(backlog.dead_letter(row, topic) for row in died)
        # Calls and events are written after the aggregates are locked: so they have their order.
        await backlog.add_calls(driver, self.handlers, outbox.calls, self.encryption)
        if self.claims is not None:
            await self.claims.store(driver, outbox, attempt.reserve)
        if self.encryption is not None:
            await self.encryption.encrypt_events(driver, outbox)
        if not await outbox.write(driver) and outcome.applied and not outcome.returned:
            # If a handler has suppressed the error of a statement, COMMIT would report success and
            # change nothing. This statement fails.
            await driver.execute("SELECT")
        outcome.events, outcome.has_calls = len(outbox), bool(outbox.calls)
        return outcome

    def _new_outbox(self) -> Outbox:
        return Outbox(
            self._source,
            self.settings.max_event_bytes,
            call_types=self.handlers.call_types,
            codecs=self.handlers.codecs,
            closed=self.handlers.closed,
            sent_size=self.claims.sent_size if self.claims else None,
        )

    async def _call(
        self, items: Sequence[Item], attempt: Attempt, outcome: BatchOutcome
    ) -> FailedCalls:
        info = (await attempt.connection.get_raw_connection()).info
        info[GUARD] = attempt.guard
        assert attempt.task is not None
        CALLS[attempt.task] = attempt.ignores_cancellation
        attempt.handlers_began_at = perf_counter()
        try:
            return await call_handlers(items, attempt, outcome)
        finally:
            attempt.deadline.close()
            metrics.handled(attempt.longest)
            del CALLS[attempt.task]
            info.pop(GUARD, None)

    def _signal(self, outcome: BatchOutcome) -> None:
        if outcome.events:
            self.signals.events_staged(outcome.events)
        if outcome.has_calls:
            self.signals.calls_staged()
        if any(decision.due_in == 0.0 for _, decision in outcome.decided):
            self.signals.rows_due()
