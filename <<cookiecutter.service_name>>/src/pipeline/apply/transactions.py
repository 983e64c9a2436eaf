"""The consume transaction: messages of a partition or of the backlog take effect as a whole.

Read `ConsumeTransactions` from top to bottom: `apply` says what happens when a transaction fails,
`_transact` when it is committed or rolled back, and `_execute` what is written, in which order.
"""

import asyncio
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import copy

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pipeline.apply import limits
from pipeline.errors import is_contention
from pipeline.handlers.policy import Decision
from pipeline.handlers.registry import Handlers
from pipeline.handlers.rows import Rows
from pipeline.handlers.sessions import AT_WORK, SharedSession, clean, new_session
from pipeline.handlers.staging import Outbox
from pipeline.observe import metrics, traces
from pipeline.observe.traces import ProcessSpans
from pipeline.observe.watchdog import CALLS
from pipeline.servers.database import driver_of
from pipeline.servers.guard import CURRENT_GUARD, GUARD
from pipeline.servers.retrying import Attempts
from pipeline.settings import Settings

from . import backlog, inbox
from .attempt import Attempt, Memory
from .breaker import Breaker, BreakerOpen
from .calls import FailedCalls, call_handlers
from .claim_check import ClaimCheck
from .failure import CulpritUnknown, Failure, MessagesFailed, NeedsOwnSession, TransactionProgress
from .filters import Filters
from .inbox import SourceLost
from .item import Item
from .lookup import look_up, to_handle, too_old
from .outcome import BatchOutcome
from .source import Source, is_single
from .verdict import blame, judge

_EARLY = 0.01
"""Seconds; uvloop rounds its timers, and one that fires early would look like an outage."""
_CONTENTIONS = 3
"""Deadlocks and lock time-outs in a row after which the messages are at fault."""


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
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._taking_all = asyncio.Lock()
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
            yield only

    async def apply(self, source: Source, retrying: Attempts) -> Sequence[BatchOutcome]:
        """Apply all messages; returns the outcome of each transaction that was needed.

        Every message has then taken effect or is stored. Raises `BreakerOpen` if the breaker is
        open for a consumer, and `SourceLost` if another process owns the source.
        """
        outcomes: list[BatchOutcome] = []
        left: list[tuple[Source, dict[bytes, Decision]]] = [(source, source.decisions)]
        memory, were_late = Memory(), set[bytes]()
        while left:
            part, decisions = left.pop(0)
            result = await self._retry(part, decisions, retrying, memory)
            match result:
                case BatchOutcome():
                    outcomes.append(result)
                    continue
                case NeedsOwnSession(consumer):
                    self._own.add(consumer)
                case MessagesFailed(failed, late):
                    decisions = decisions | failed
                    if late is not None and late not in were_late:
                        # Its handler is called once more: it may have waited for a dead connection.
                        were_late.add(late)
                        del decisions[late]
                case CulpritUnknown():
                    traceback.clear_frames(result.error.__traceback__)  # they refer to the batch
                    parts = part.halves()
                    if len(parts) > 1 or len(parts[0].items) < len(part.items):
                        left[:0] = [(half, decisions) for half in parts]
                        continue
                    decisions = decisions | blame(_suspects(part, decisions), result, self.breaker)
            left.insert(0, (part, decisions))
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
        contentions = 0

        async def transact() -> BatchOutcome | Failure:
            nonlocal contentions
            try:
                return await self._transact(source, decisions, memory)
            except Exception as error:
                contentions += is_contention(error)
                if contentions > _CONTENTIONS and _messages_may_be_cause(source, decisions):
                    return CulpritUnknown("locked out", error)
                raise

        result = await retrying(transact)
        if isinstance(result, CulpritUnknown) and is_single(source):
            # The second attempt finds a row that another partition has created meanwhile, and has
            # another connection if the first one was slow.
            contentions = 0
            result = await retrying(transact)
        return result

    async def _transact(
        self, source: Source, decisions: Mapping[bytes, Decision], memory: Memory
    ) -> BatchOutcome | Failure:
        """Commit the messages in one transaction, or roll it back and return why."""
        limit = self.settings.transaction_timeout
        # Code of the engine runs here, even if a handler's has begun the task.
        CURRENT_GUARD.set(None)
        # The time limit does not include the wait for a connection.
        async with self._slots, self.engine.connect() as connection:
            await self.signals.wait_for_relay()
            progress = TransactionProgress(limit)
            try:
                async with asyncio.timeout(limit + _EARLY):
                    result = await self._execute(connection, source, decisions, memory, progress)
                if isinstance(result, BatchOutcome):
                    await connection.commit()
            except (BreakerOpen, SourceLost):
                await _roll_back(connection, progress)
                raise
            except Exception as error:
                may_be = _messages_may_be_cause(source, decisions)
                failure = progress.classify(source, error, messages_may_be_cause=may_be)
                if failure is None:
                    await connection.invalidate()
                    raise
                result = failure
                traceback.clear_frames(error.__traceback__)
            except BaseException:
                await connection.invalidate()  # it may be in the middle of a statement
                raise
            if not isinstance(result, BatchOutcome):
                is_cut_off = not isinstance(result, NeedsOwnSession) and result.is_cut_off
                await _roll_back(connection, progress, is_cut_off=is_cut_off)
                return result
        self._committed(source, result, progress)
        return result

    async def _execute(
        self,
        connection: AsyncConnection,
        source: Source,
        decisions: Mapping[bytes, Decision],
        memory: Memory,
        progress: TransactionProgress,
    ) -> BatchOutcome | Failure:
        """Execute all statements of the transaction except the commit."""
        outcome = BatchOutcome()
        own = self._own.intersection(item.consumer for item in source.items)
        progress.has_own_sessions = bool(own)
        bounds = limits.of_settings(self.settings, handler=AT_WORK if own else "")
        # Time limits, and the lock that keeps generations from being closed: one statement.
        await limits.begin(connection, bounds)
        driver = await driver_of(connection)
        # Moves the position, or holds the lane; raises if another process owns it.
        generations = await source.begin(driver)
        # Inserts markers: a message that has one already is a duplicate.
        found = await look_up(driver, generations, self._filters, source, outcome)
        decisions = {**decisions, **await too_old(driver, generations, found.new)}
        items = to_handle(found, decisions, outcome)
        # Handlers change rows and stage events.
        outbox = self._outbox()
        attempt = Attempt(
            connection,
            driver,
            Rows(new_session(connection, SharedSession)),
            outbox,
            ProcessSpans(self.group),
            own=own,
            restore_limits=limits.statement(connection, bounds),
            memory=memory,
        )
        progress.handlers_begin()
        failures = await self._call(items, attempt, outcome, progress)
        if failure := judge(source, failures, outcome, self.breaker, progress.trace):
            return failure
        await attempt.rows.flush()
        attempt.rows.session.sync_session.close()
        # Messages that are not applied, parked or dead ones, get rows in the backlog, no markers.
        if outcome.returned:
            await inbox.keep_results(driver, generations, outcome.returned)
        if not_applied := found.in_backlog | {item.key for item, _ in outcome.decided}:
            await inbox.unmark(driver, generations, list(not_applied))
        died = await source.settle(driver, outcome)
        if topic := self.settings.dead_letter_topic:
            outbox.add(backlog.dead_letter(row, topic) for row in died)
        # Calls and events are written after the aggregates are locked: so they have their order.
        await backlog.add_calls(driver, self.handlers, outbox.calls)
        if self.claims is not None:
            await self.claims.store(driver, outbox, progress.reserve)
        if not await outbox.write(driver) and outcome.applied and not outcome.returned:
            # If a handler has suppressed the error of a statement, COMMIT would report success and
            # change nothing. This statement fails.
            await driver.execute("SELECT")
        outcome.events, outcome.has_calls = len(outbox), bool(outbox.calls)
        return outcome

    def _outbox(self) -> Outbox:
        return Outbox(
            self._source,
            self.settings.max_event_bytes,
            call_types=self.handlers.call_types,
            sent_size=self.claims.sent_size if self.claims else None,
        )

    async def _call(
        self,
        items: Sequence[Item],
        attempt: Attempt,
        outcome: BatchOutcome,
        progress: TransactionProgress,
    ) -> FailedCalls:
        info = (await attempt.connection.get_raw_connection()).info
        info[GUARD] = attempt.guard
        task = asyncio.current_task()
        assert task is not None
        CALLS[task] = attempt.ignores_cancellation
        try:
            return await call_handlers(items, attempt, outcome)
        finally:
            progress.trace = traces.traceparent(attempt.context)
            attempt.deadline.close()
            metrics.handled(attempt.longest)
            del CALLS[task]
            info.pop(GUARD, None)

    def _committed(
        self, source: Source, outcome: BatchOutcome, progress: TransactionProgress
    ) -> None:
        self.breaker.succeeded(outcome.succeeded)
        if outcome.events:
            self.signals.events_staged(outcome.events)
        if outcome.has_calls:
            self.signals.calls_staged()
        if any(decision.due_in == 0.0 for _, decision in outcome.decided):
            self.signals.rows_due()
        outcome.report(self.group)
        source.record_metrics(self.group, outcome.applied, progress.seconds)


async def _roll_back(
    connection: AsyncConnection, progress: TransactionProgress, *, is_cut_off: bool = False
) -> None:
    """Roll back as expected: the connection stays usable unless a statement may be under way."""
    if is_cut_off or progress.is_late:
        await connection.invalidate()
    elif progress.has_own_sessions:
        await clean(connection, await driver_of(connection))


def _suspects(source: Source, decisions: Mapping[bytes, Decision]) -> list[Item]:
    """Return the messages that are to be handled, any of which may be at fault for an error."""
    return [item for item in source.items if item.key not in decisions]


def _messages_may_be_cause(source: Source, decisions: Mapping[bytes, Decision]) -> bool:
    """Whether messages may be at fault: there are several records, or a message to handle."""
    return not is_single(source) or bool(_suspects(source, decisions))
