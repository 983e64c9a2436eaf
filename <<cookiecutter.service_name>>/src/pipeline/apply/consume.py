"""The consume transaction: a batch of a partition or of the backlog takes effect as a whole."""

import asyncio
import logging
import math
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from datetime import datetime
from time import perf_counter

import asyncpg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pipeline.errors import StoreSlow, is_contention, is_infrastructure
from pipeline.events.message import Message
from pipeline.events.payload import HASH_VERSION
from pipeline.events.references import Claims, Unresolved
from pipeline.handlers.policy import (
    FOLLOWER,
    NOT_DONE,
    Decision,
    Park,
    Reject,
    after_failure,
    dead,
    undecided,
    unknown,
)
from pipeline.handlers.registry import Handlers
from pipeline.handlers.rows import Rows
from pipeline.handlers.sessions import AT_WORK, SharedSession, clean, new_session
from pipeline.handlers.staging import Outbox
from pipeline.observe import metrics, traces
from pipeline.observe.traces import ProcessSpans
from pipeline.servers.database import driver_of
from pipeline.servers.guard import CALL, GUARD, Guard
from pipeline.servers.retrying import Attempts
from pipeline.settings import Settings

from . import backlog, inbox
from .backlog import LaneLost
from .batch import Item, in_sequence
from .breaker import Breaker, BreakerOpen, Failure
from .calls import Attempt, BatchFailed, Handled, Memory, NeedsOwnSession, handle_all
from .filters import Filters
from .inbox import Generations, IdentityMismatch, Known, PositionMoved, time_of
from .outcome import Results
from .source import Work

log = logging.getLogger(__name__)

_EARLY = 0.01
"""Seconds; uvloop rounds its timers, and one that fires early would look like an outage."""
_CONTENTIONS = 3
"""Deadlocks and lock time-outs in a row after which they are the batch's doing."""


_SECONDS_AS_MILLISECONDS = range(1_000_000_000, 5_000_000_000)
"""From 2001 to 2128, where a producer gives seconds for milliseconds: January, February 1970."""


class TooOld(Exception):
    """The message is older than the inbox remembers: nobody can tell whether it is a repeat."""

    def __init__(self, message: Message, since: datetime | None) -> None:
        at = message.timestamp
        text = f"its record is of {time_of(at)}, " if at >= 0 else ""
        text += f"its event of {message.time}, " if message.time is not None else ""
        text += (
            f"and the inbox remembers since {since}: whether it was applied before is not known."
            " Redrive it by its id if it was not; register the handler with takes_old=True to"
            " apply all such messages"
        )
        if at in _SECONDS_AS_MILLISECONDS:
            text += (
                f". The record's timestamp, {at}, looks like seconds, and has to be milliseconds:"
                f" for {time_of(1_000 * at)} let its producer send {1_000 * at}"
            )
        super().__init__(text)


class CulpritUnknown(Exception):
    """The batch failed as a whole, and any of its records may be at fault."""

    def __init__(
        self,
        reason: str,
        error: BaseException,
        *,
        is_cut_off: bool = False,
        storing: Mapping[str, bytes] | None = None,
    ) -> None:
        super().__init__()
        self.reason = reason
        self.error = error
        self.is_cut_off = is_cut_off
        self.storing = storing
        """What the object store was keeping when the time was up."""
        self.trace: str | None = None
        """`traceparent` of the latest call of a handler."""


class MessagesFailed(Exception):
    """Some messages have failed; what becomes of them is known, and the others go on."""

    def __init__(
        self, fates: dict[bytes, Decision], *, late: bytes | None, is_cut_off: bool
    ) -> None:
        super().__init__(f"{len(fates)} messages failed")
        self.fates = fates
        self.late = late
        """The one that took too long, by marker key."""
        self.is_cut_off = is_cut_off
        """Whether the connection is not usable any more."""


_IN_ORDER = (BreakerOpen, LaneLost, PositionMoved, NeedsOwnSession, MessagesFailed, CulpritUnknown)
"""Raised in order: the transaction is rolled back, its connection is as good as before."""


class Consume:
    """Applies batches, each in one transaction, in the order that `docs/protocol.md` fixes."""

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
        room: Callable[[], Awaitable[None]],
        staged: Callable[[int], None],
        parked: Callable[[], None],
        called: Callable[[], None],
        claims: Claims | None = None,
    ) -> None:
        """`room` waits while the outbox has too much in it. `staged`, `parked` and `called` are
        told of new rows there, of what is due at once, and of new effects. `claims` keeps payloads
        that are too large to travel."""
        self._engine = engine
        self._group = group
        self._source = source
        self._settings = settings
        self._breaker = breaker
        self._filters = filters
        self._handlers = handlers
        self._room = room
        self._staged = staged
        self._parked = parked
        self._called = called
        self.claims = claims
        self._turns = asyncio.Semaphore(settings.concurrency)
        self._taking_all = asyncio.Lock()
        self._under_way: set[Attempt] = set()
        self._own = {handler.consumer for handler in handlers if handler.takes_batches}
        """Consumers whose messages have a session of their own: known when one has used it."""

    @asynccontextmanager
    async def alone(self) -> AsyncIterator["Consume"]:
        """Lend a way to apply work while no other transaction of this process runs.

        If it kills the process, nobody else is suspected of that.
        """
        async with self._taking_all, AsyncExitStack() as taken:
            for _ in range(self._settings.concurrency):
                await taken.enter_async_context(self._turns)
            only = copy(self)
            only._turns = asyncio.Semaphore(1)
            yield only

    def ignores_cancellation(
        self, seconds: float
    ) -> tuple[Item, asyncio.Task[object] | None] | None:
        """Return a message whose handler goes on so long after it was cancelled, and its task."""
        for attempt in self._under_way:
            if item := attempt.ignores_cancellation(seconds):
                return item, attempt.task
        return None

    async def apply(self, work: Work, attempts: Attempts) -> Sequence[Results]:
        """Commit the work; returns what became of it when all of it has taken effect or is stored.

        Raises `BreakerOpen` when a consumer fails for whatever comes, and `PositionMoved` or
        `LaneLost` if the work is somebody else's.
        """
        return await self._apply(work, work.fates, attempts, Memory())

    async def _apply(
        self, work: Work, fates: dict[bytes, Decision], attempts: Attempts, memory: Memory
    ) -> Sequence[Results]:
        late: set[bytes] = set()
        while True:
            try:
                return [await self._attempt(work, fates, attempts, memory)]
            except NeedsOwnSession as need:
                _let_go(need)
                self._own.add(need.consumer)
            except MessagesFailed as guilty:
                # Again without them, as often as more of them are found.
                _let_go(guilty)
                fates = fates | guilty.fates
                if guilty.late is not None and guilty.late not in late:
                    # Once more: maybe it has waited for a connection that was dead.
                    late.add(guilty.late)
                    del fates[guilty.late]
            except CulpritUnknown as unclear:
                _let_go(unclear, unclear.error)
                parts = work.halves()
                if len(parts) == 1 and len(parts[0].items) == len(work.items):
                    fates = fates | self._blamed(_suspects(work, fates), unclear)
                else:
                    return [
                        result
                        for one in parts
                        for result in await self._apply(one, fates, attempts, memory)
                    ]

    async def _attempt(
        self, work: Work, fates: dict[bytes, Decision], attempts: Attempts, memory: Memory
    ) -> Results:
        """Commit the work, again and again while infrastructure fails."""
        contentions = 0

        async def commit() -> Results:
            nonlocal contentions
            try:
                return await self._commit(work, fates, memory)
            except CulpritUnknown as unclear:
                if unclear.storing and self.claims and _is_single(work):
                    # The handler has left it little time. If it fails with all of it, that is an
                    # outage, and else the handler is too slow; what is kept now is an orphan.
                    await self.claims.keep(unclear.storing)
                raise
            except Exception as error:
                contentions += is_contention(error)
                if contentions > _CONTENTIONS and _is_doubtful(work, fates):
                    raise CulpritUnknown("locked out", error) from error
                raise

        try:
            return await attempts(commit)
        except CulpritUnknown:
            if not _is_single(work):
                raise
            # Once more: a row that another partition has created meanwhile is found now, and what
            # took so long may have been the way to the server, which is a new one now.
            contentions = 0
            return await attempts(commit)

    def _blamed(self, suspects: Sequence[Item], unclear: CulpritUnknown) -> dict[bytes, Decision]:
        """Return the fates of the messages of one record, one of which must be at fault."""
        self._breaker.observe(
            Failure(item.marker.consumer, item.order_key, unclear.error, item.last_error)
            for item in suspects
        )
        if len(suspects) > 1:
            return {item.marker.key: undecided(unclear.error) for item in suspects}
        (item,) = suspects
        fate = judged(item, unclear.error, unclear.reason)
        return {item.marker.key: replace(fate, trace=unclear.trace)}

    async def _commit(self, work: Work, fates: dict[bytes, Decision], memory: Memory) -> Results:
        limit = self._settings.transaction_timeout
        progress = _Progress()
        CALL.set(None)  # whoever has begun the task
        # A connection is waited for within the turn, and outside the limit: that is not the batch's
        # doing.
        async with self._turns, self._engine.connect() as connection:
            # Within the turn: else all who wait would go on at once.
            await self._room()
            started = perf_counter()
            try:
                transaction = await connection.begin()
                with _classify_errors(work, fates, limit, progress):
                    async with asyncio.timeout(limit + _EARLY):
                        results, outbox = await self._execute(
                            connection, work, fates, progress, memory
                        )
                    await transaction.commit()
            except _IN_ORDER as error:
                if isinstance(error, CulpritUnknown):
                    error.trace = progress.trace
                is_cut_off = isinstance(error, MessagesFailed | CulpritUnknown) and error.is_cut_off
                if is_cut_off or perf_counter() - started > limit:
                    await connection.invalidate()  # it may be in the middle of a statement
                elif progress.is_own:
                    await clean(connection, await driver_of(connection))
                raise
            except BaseException:
                # Lost, cut off or cancelled in the middle: nobody else may get this connection.
                await connection.invalidate()
                raise
        self._breaker.succeeded(results.succeeded)
        if outbox:
            self._staged(len(outbox))
        if outbox.calls:
            self._called()
        if any(fate.due_in == 0.0 for _, fate in results.fates):
            self._parked()
        results.tell(self._group)
        work.count(self._group, results.applied, perf_counter() - started)
        return results

    async def _execute(
        self,
        connection: AsyncConnection,
        work: Work,
        fates: dict[bytes, Decision],
        progress: "_Progress",
        memory: Memory,
    ) -> tuple[Results, Outbox]:
        settings = self._settings
        own = self._own.intersection(item.marker.consumer for item in work.items)
        progress.is_own = bool(own)
        limits = inbox.limits(settings, handler=AT_WORK if own else "")
        await inbox.begin(connection, limits)
        driver = await driver_of(connection)
        generations = await work.open(driver)
        outbox = Outbox(
            self._source,
            settings.max_event_bytes,
            effects=self._handlers.effects,
            claims=self.claims,
        )
        progress.outbox = outbox
        results = Results()
        new, waiting, stored = await _look_up(driver, generations, self._filters, work, results)
        # First: what waits is not asked for its age any more.
        fates = fates | await _too_old(driver, generations, new)
        items = _sort_out(new, waiting, fates, results)
        progress.records_since = perf_counter()
        guard, info = Guard(outbox), (await connection.get_raw_connection()).info
        info[GUARD] = guard
        attempt = Attempt(
            connection,
            driver,
            Rows(new_session(connection, SharedSession)),
            outbox,
            guard,
            ProcessSpans(self._group),
            own=own,
            again=inbox.limiting(connection, limits),
            memory=memory,
        )
        progress.attempt = attempt
        self._under_way.add(attempt)
        try:
            handled = await handle_all(items, attempt)
        finally:
            attempt.deadline.close()
            metrics.handled(attempt.longest)
            self._under_way.discard(attempt)
            info.pop(GUARD, None)
        results.applied, results.returned = handled.applied, handled.returned
        results.superseded = handled.superseded
        results.fates += handled.unfit
        results.seconds = handled.seconds
        self._judge(work, handled, results)
        await attempt.rows.flush()
        attempt.rows.session.sync_session.close()
        if results.returned:
            await inbox.keep_results(driver, generations, results.returned)
        stored.update(item.marker.key for item, _ in results.fates)
        if stored:
            await inbox.unmark(driver, generations, list(stored))
        died = await work.settle(driver, results)
        if settings.dead_letter_topic:
            outbox.add(backlog.dead_letter(row, settings.dead_letter_topic) for row in died)
        if outbox.calls:
            await backlog.add(driver, backlog.called(self._handlers, outbox.calls))
        if not await outbox.write(driver) and results.applied and not results.returned:
            # COMMIT is silent when a handler has swallowed the error of a statement. This is not.
            await driver.execute("SELECT")
        return results, outbox

    def _judge(self, work: Work, handled: Handled, results: Results) -> None:
        """Raise `_Guilty` if any message has failed, or `BreakerOpen` if it is not the messages."""
        readable, failures = work.reading
        results.succeeded = readable | {item.marker.consumer for item in handled.applied}
        failures += [
            Failure(item.marker.consumer, item.order_key, item.fault, item.last_error)
            for item, fate in results.fates
            if item.fault is not None and fate.is_dead
        ]
        failures += [
            Failure(item.marker.consumer, item.order_key, error, item.last_error)
            for item, error in handled.failed
            if not isinstance(error, Park | Reject)  # decisions
        ]
        self._breaker.observe(failures, succeeded=results.succeeded)
        if handled.failed:
            (first, error), *others = handled.failed
            if handled.is_certain:
                fates = {item.marker.key: judged(item, one, "failed") for item, one in others}
            else:
                fates = {item.marker.key: undecided(other) for item, other in others}
            fates[first.marker.key] = judged(first, error, "failed")
            late = handled.late and handled.late.marker.key
            fates = {
                key: replace(fate, trace=handled.traces.get(key)) for key, fate in fates.items()
            }
            raise MessagesFailed(fates, late=late, is_cut_off=handled.is_cut_off)


async def _look_up(
    driver: asyncpg.Connection,
    generations: Generations,
    filters: Filters,
    work: Work,
    results: Results,
) -> tuple[list[Item], set[bytes], set[bytes]]:
    """Mark the messages, and find those that came before.

    Returns the new ones, which order keys have something waiting in the backlog, and the keys of
    those that only the backlog remembers.
    """
    known = await inbox.mark(driver, generations, [item.marker for item in work.items], filters)
    first: dict[bytes, Item] = {}
    for item in work.items:
        if item.marker.key not in known:
            first.setdefault(item.marker.key, item)
    stored, waiting = await work.find(driver, list(first.values())) if first else ({}, set())
    results.known = known = known | stored
    new: list[Item] = []
    for item in work.items:
        key = item.marker.key
        if first.get(key) is item and key not in stored:
            new.append(item)
            continue
        before = known.get(key) or Known(first[key].marker.message.hash, HASH_VERSION)
        try:
            before.check(item.marker.message)
        except IdentityMismatch as error:
            results.impostors.append((item, error))
        else:
            results.duplicates.append(item)
    return new, waiting, set(stored)


def _sort_out(
    new: Sequence[Item],
    waiting: set[bytes],
    fates: Mapping[bytes, Decision],
    results: Results,
) -> list[Item]:
    """Return the messages to handle now; what becomes of the others goes into the results."""
    behind = set(waiting)
    now: list[Item] = []
    for item in in_sequence(new):
        fate = fates.get(item.marker.key)
        if fate is None and behind and item.order_key in behind:
            fate = FOLLOWER
        if fate is None and item.fault is not None:
            fate = dead(
                item.handler.policy,
                item.fault.reason if isinstance(item.fault, Unresolved) else "invalid payload",
                item.fault,
                attempts=item.attempts,
            )
        if fate is None:
            now.append(item)
            continue
        results.fates.append((item, fate))
        if not fate.is_dead or fate.holds:
            behind.add(item.order_key)
    return now


def _let_go(*errors: BaseException) -> None:
    """Leave nothing of a batch for the collector, which comes seldom: it is in what was called."""
    for error in errors:
        traceback.clear_frames(error.__traceback__)


def judged(item: Item, error: BaseException, reason: str) -> Decision:
    """Return what becomes of a message whose handling has failed with an error of its own."""
    policy, effect = item.handler.policy, item.handler.effect
    attempts, waited = item.attempts, item.waited
    if effect and not effect.is_repeatable and not isinstance(error, NOT_DONE):
        can_ask = effect.ask is not None
        return unknown(policy, error, attempts=attempts, waited=waited, can_ask=can_ask)
    return after_failure(policy, error, attempts=attempts, waited=waited, reason=reason)


async def _too_old(
    driver: asyncpg.Connection, generations: Generations, new: Sequence[Item]
) -> dict[bytes, Decision]:
    """Return the fates of messages that may have been applied and forgotten, by marker key."""
    old = [
        item
        for item in new
        if generations.forgot(item.marker.message)
        and not (item.was_young or item.handler.takes_old)
    ]
    if not old:
        return {}
    consumers = {item.marker.consumer for item in old}
    remembering = await inbox.remembers_all(driver, generations, consumers)
    return {
        item.marker.key: dead(
            item.handler.policy, "too old", TooOld(item.marker.message, generations.since)
        )
        for item in old
        if item.marker.consumer not in remembering
    }


def _suspects(work: Work, fates: Mapping[bytes, Decision]) -> list[Item]:
    """Return the messages that are to be handled, any of which may be at fault for an error."""
    return [item for item in work.items if item.marker.key not in fates]


def _is_single(work: Work) -> bool:
    places = {(item.record.topic, item.record.partition, item.record.offset) for item in work.items}
    return len(places) <= 1


def _is_doubtful(work: Work, fates: Mapping[bytes, Decision]) -> bool:
    """Whether an error may be the work's doing: it is too much at once, or somebody is at fault."""
    return not _is_single(work) or bool(_suspects(work, fates))


@dataclass
class _Progress:
    """How far a transaction has come."""

    records_since: float = math.inf
    """When it had done what is the engine's, and turned to what the records ask for."""
    outbox: Outbox | None = None
    is_own: bool = False
    """Whether handlers may have left something on the connection."""
    attempt: Attempt | None = None
    """What its handlers share, if it has come to them."""

    @property
    def trace(self) -> str | None:
        """`traceparent` of the latest call of a handler."""
        return traces.traceparent(self.attempt.context) if self.attempt else None


@contextmanager
def _classify_errors(
    work: Work, fates: Mapping[bytes, Decision], limit: float, progress: _Progress
) -> Iterator[None]:
    """Turn an error that any record of the batch may have caused into the question which.

    So is an outage, unless the batch has taken more seconds than the limit: then it was cut off.
    But a database that needs most of them for what the engine asks of a single record is slow.
    """
    started = perf_counter()
    try:
        yield
    except _IN_ORDER:
        raise
    except BatchFailed as failed:
        raise CulpritUnknown("failed", failed.error, is_cut_off=failed.is_cut_off) from failed.error
    except Exception as error:
        in_time = perf_counter() - started < limit
        is_slow = len(work.items) == 1 and progress.records_since - started > limit / 2
        is_outage = is_infrastructure(error) and (in_time or is_slow)
        is_too_much = isinstance(error, StoreSlow) and not _is_single(work)
        if (is_outage and not is_too_much) or not _is_doubtful(work, fates):
            raise
        if is_too_much:
            raise CulpritUnknown("takes too long", error) from error
        if in_time:
            raise CulpritUnknown("transaction failed", error) from error
        late = TimeoutError(f"the transaction takes longer than {limit} s")
        late.__cause__ = error
        storing = progress.outbox.storing if progress.outbox else None
        raise CulpritUnknown("takes too long", late, storing=storing) from error
