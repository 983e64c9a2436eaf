"""The consume transaction: messages of partitions or of the backlog take effect as a whole.

Read `ConsumeTransactions` from top to bottom: `apply` says what happens when a transaction fails,
`transact` when it is committed or rolled back, `_execute` what is written, in which order. Then
`runs.py`: how the message that fails is found.
"""

import asyncio
import logging
import math
import traceback
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import copy
from time import monotonic
from typing import Self

from sqlalchemy.ext.asyncio import AsyncEngine

from onceward.errors import Paused, Repeat, SourceLost, describe_error
from onceward.handlers.catalog import Catalog
from onceward.handlers.policy import UNDECIDED, Decision, undecided
from onceward.handlers.registry import Handlers
from onceward.handlers.staging import Outbox
from onceward.handlers.statements import AT_WORK, END_GUARD
from onceward.observe import metrics
from onceward.observe.traces import ProcessSpans
from onceward.servers.database import driver_of
from onceward.servers.guard import CURRENT_GUARD, HandlerFault
from onceward.servers.probe import Probe
from onceward.servers.retrying import Retrying
from onceward.settings import Settings

from . import backlog, inbox, limits, statements
from .attempt import Attempt, Findings
from .breaker import Breaker
from .claim_check import ClaimCheck
from .encryption import Encryption
from .failures import (
    NeedsOwnSession,
    RolledBack,
    decide_alone,
    failure_of,
    observed,
    rolled_back_by,
)
from .inbox import look_up, to_handle, too_old
from .item import Item
from .ladder import BATCH, LADDER, PIECES, RUNS, SINGLES, Rung
from .limits import ConcurrencyLimit
from .outcome import BatchOutcome
from .runs import apply_run, apply_runs, write_staged
from .source import Source, without_decision
from .turns import Turns

log = logging.getLogger(__name__)

_CAREFUL_SECONDS = 10.0
"""How long batches begin with runs after a failure."""
_OWN_SECONDS = 60.0
"""How long messages of a consumer have sessions of their own after one has needed it."""
_EARLY = 0.01
"""Seconds; uvloop rounds its timers, and one that fires early would look like an outage."""


class Signals:
    """Notifies other parts of the process of committed transactions; this class does nothing."""

    async def wait_for_relay(self) -> None:
        """Return when the outbox has room for more events."""

    def committed(self, outcome: BatchOutcome) -> None:
        """React to new events, calls, and rows of the backlog that are due at once."""


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
        self.handlers = handlers
        self.signals = signals
        self.claims = claims
        self.encryption = encryption
        self.throttles = breaker.throttles
        self._slots = ConcurrencyLimit(
            readers=settings.concurrency, workers=settings.backlog_workers
        )
        self.turns = Turns(engine, settings.transaction_timeout)
        self._own_until = {one.queue: math.inf for one in handlers if one.takes_batches}
        """Until when the messages of a queue have sessions of their own."""
        self._apart = {one.consumer for one in handlers if one.own_transaction}
        """Consumers of which a transaction has one record."""
        self._careful_until = {False: 0.0, True: 0.0}
        """Until when transactions begin with short runs; True: those of lanes."""
        self._catalog = Catalog()
        self._probe = Probe(settings, engine, name=f"{group}-probe")
        self._lost: set[bytes] = set()
        """Marker keys of messages over which, alone, a connection was lost since another one was
        applied."""

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[Self]:
        """Return transactions while this process runs no others.

        If the process dies, the message that they apply is the only suspect.
        """
        async with self._slots.all():
            only = copy(self)
            only._slots = ConcurrencyLimit(readers=1, workers=0)
            # Others that wait for a slot may have their turn.
            only.turns = Turns(self.engine, self.settings.transaction_timeout)
            yield only

    async def apply(
        self, source: Source, retrying: Retrying, findings: Findings | None = None
    ) -> Sequence[BatchOutcome]:
        """Apply all messages; returns the outcome of each transaction that was needed.

        `findings` is that of an earlier attempt at the same messages.

        Every message has then taken effect or is stored. Raises `Paused` if they have to wait, and
        `SourceLost` if another process owns the source.
        """
        outcomes: list[BatchOutcome] = []
        findings = findings or Findings()
        left = self._divided(source, self.first_rung(source))
        while left:
            piece, rung = left.pop()
            result = await retrying(self.transact, piece, rung, findings)
            match result:
                case BatchOutcome():
                    outcomes.append(result)
                case NeedsOwnSession():
                    left.append((piece, rung))
                case Repeat():
                    left += self._divided(piece, rung + 1)
                case RolledBack():
                    was_outage = await self._was_outage(result, retrying)
                    # What it waits for may be what prevents others from writing.
                    result.is_lost |= was_outage and result.has_timed_out
                    if was_outage and not result.is_lost:
                        left.append((piece, rung))  # nothing counts
                    elif item := self._alone(piece, findings, result):
                        result.is_of_outage = was_outage and item.key in self._lost
                        if result.is_lost:
                            self._lost.add(item.key)
                        findings.decisions[item.key] = decide_alone(item, result)
                        self.breaker.observe(observed([(item, result.error)]))
                        left.append((piece, rung))  # no handler is called any more
                    else:
                        findings.suspects |= {item.key for item in result.items}
                        if result.has_timed_out and not was_outage and len(result.items) == 1:
                            [item] = result.items
                            findings.decisions[item.key] = undecided(result.error, item.history)
                        left += self._divided(piece, rung + 1)
        return outcomes

    def _alone(self, piece: Source, findings: Findings, failure: RolledBack) -> Item | None:
        """Return the message that was alone in the transaction, if its failure counts."""
        called = without_decision(piece, piece.decisions | findings.decisions)
        counts = piece.is_alone or failure.is_certain
        return called[0] if len(called) == 1 and counts else None

    def first_rung(self, source: Source) -> int:
        """Return the rung on which a source begins, by what its messages need or has failed."""
        if source.is_alone:
            return BATCH
        if self._apart and any(
            item.consumer in self._apart for item in without_decision(source, source.decisions)
        ):
            return SINGLES
        is_open = self.breaker.open
        if is_open and any(item.consumer in is_open for item in source.items):
            return PIECES  # the first of them is the probe
        own = self._own(item.handler.queue for item in source.items if item.history.attempts)
        return RUNS if own or self._is_careful(source) else BATCH

    def _own(self, queues: Iterable[str]) -> Collection[str]:
        """Return those of the queues whose messages have a session of their own each."""
        now = monotonic()
        own = {one for one, until in self._own_until.items() if until > now}
        return own and own.intersection(queues)

    def _is_careful(self, source: Source) -> bool:
        """Return whether transactions like this one have failed lately."""
        return monotonic() < self._careful_until[source.has_lease]

    async def _was_outage(self, failure: RolledBack, retrying: Retrying) -> bool:
        """Return whether an outage was the cause, and wait for its end."""
        if not failure.may_be_outage:
            return False
        if failure.is_lost:
            retrying.report(f"{retrying.server}: {describe_error(failure.error)}")
        asked = 0

        async def ask() -> None:
            nonlocal asked
            asked += 1
            await self._probe.write()

        await retrying(ask)
        return asked > 1

    def _divided(self, source: Source, rung: int) -> list[tuple[Source, int]]:
        """Return the pieces that a rung applies in a transaction each, the last one first.

        Below the last rung is none: what fails there is an outage, which is raised.
        """
        return [(one, rung) for one in reversed(source.pieces(LADDER[rung].records))]

    async def transact(
        self, source: Source, rung: int, findings: Findings
    ) -> BatchOutcome | Repeat | RolledBack:
        """Commit the messages in one transaction, or roll it back and return why.

        Raises errors of the servers that no handler can have caused, and what `apply` raises.
        """
        own = self._own(item.handler.queue for item in source.items)
        decisions = source.decisions | findings.decisions
        # Code of the engine runs here, even if a handler's has begun the task.
        CURRENT_GUARD.set(None)
        # The time limit does not include the wait for a connection.
        turn, slot = self.turns.take(source, decisions), self._slots.one(waits=not source.has_lease)
        async with turn, slot, self.engine.connect() as connection:
            await self.signals.wait_for_relay()
            driver = await driver_of(connection)
            try:
                # All that it has waited for may have taken long.
                await source.check(driver)
            except (Paused, SourceLost):
                raise
            except BaseException:
                await connection.invalidate()  # a statement may be under way
                raise
            attempt = Attempt(
                connection,
                driver,
                self._new_outbox(),
                ProcessSpans(self.group),
                own,
                statements.set_limits(connection, self.settings, handler=AT_WORK if own else ""),
                self.settings.transaction_timeout,
                findings,
                self.handlers,
                self._catalog,
                self.claims,
                self.encryption,
            )
            try:
                async with asyncio.timeout(attempt.time_limit + _EARLY):
                    result = await self._execute(attempt, source, decisions, LADDER[rung])
                    attempt.is_committing = True
                    await connection.commit()
            except (Paused, SourceLost):
                await attempt.roll_back()
                raise
            except Repeat as error:
                if isinstance(error, NeedsOwnSession):
                    self._own_until[error.queue] = monotonic() + _OWN_SECONDS
                await attempt.roll_back()
                return error.with_traceback(None)  # it refers to the batch
            except Exception as error:
                failed = failure_of(error)
                cause = failed.error
                failure = rolled_back_by(error, attempt, source)
                blamed = failure.error if failure else cause
                self.turns.learn(blamed, source, decisions, failed.items, attempt.places())
                if failure is None:
                    await connection.invalidate()
                    raise cause  # noqa: B904  # it is the error, or wrapped in it
                is_shown = isinstance(cause, HandlerFault) or not attempt.has_begun_calls
                level = logging.WARNING if is_shown else logging.DEBUG
                log.log(level, "a transaction was rolled back: %s", describe_error(failure.error))
                metrics.rolled_back(failure.why)
                if attempt.has_begun_calls:
                    self._careful_until[source.has_lease] = monotonic() + _CAREFUL_SECONDS
                await attempt.roll_back(discards=failure.may_be_outage)
                traceback.clear_frames(error.__traceback__)
                return failure.with_traceback(None)
            except BaseException:
                await connection.invalidate()  # it may be in the middle of a statement
                raise
        if result.applied:
            self._lost.clear()
        self.breaker.succeeded(result.succeeded)
        self.signals.committed(result)
        result.report(self.group)
        source.record_metrics(self.group, result.applied, attempt.seconds)
        return result

    async def _execute(
        self, attempt: Attempt, source: Source, decisions: Mapping[bytes, Decision], rung: Rung
    ) -> BatchOutcome:
        """Execute all statements of the transaction except the commit."""
        driver, outbox = attempt.driver, attempt.outbox
        outcome = BatchOutcome(encryption=self.encryption)
        # Time limits, and the lock that keeps generations from being closed.
        await limits.begin(attempt.connection, attempt.limits)
        # Moves the position, or holds the lane; raises if another process owns it.
        generations = await source.begin(driver)
        # Inserts markers: a message that has one already is a duplicate.
        found = await look_up(driver, generations, source, outcome)
        decisions = {**decisions, **await too_old(driver, generations, found.new)}
        if not rung.calls:
            none = {
                one.key: Decision(UNDECIDED, one.history, error=one.last_error) for one in found.new
            }
            decisions = none | decisions
        items = to_handle(found, decisions, outcome)
        if items:
            if source.is_alone and attempt.seconds > attempt.time_limit / 2:
                # What is left would be too little, and the message's failure.
                raise TimeoutError("the database took half of the time limit before the call")
            attempt.has_begun_calls = True
            if rung.run is None:
                await apply_run(items, attempt, generations, outcome)
            else:
                if not self._is_careful(source):
                    rung = rung._replace(run=len(items))
                await apply_runs(items, attempt, generations, outcome, rung)
        if attempt.own:
            await driver.execute(END_GUARD)
        # The breaker judges before anything is stored. It raises `BreakerOpen`.
        readable, undecodable = source.decoded
        outcome.succeeded = readable | {item.consumer for item in outcome.applied}
        invalid = [
            (item, item.fault)
            for item, decision in outcome.decided
            if item.fault is not None and decision.is_dead
        ]
        failures = [*undecodable, *observed([*invalid, *outcome.failed])]
        self.breaker.observe(failures, succeeded=outcome.succeeded)
        outcome.failed.clear()  # their tracebacks refer to the transaction
        # Messages that are not applied, parked or dead ones, get rows in the backlog, no markers.
        if not_applied := found.in_backlog | {item.key for item, _ in outcome.decided}:
            await inbox.unmark(driver, generations, list(not_applied))
        if self.encryption is not None:
            outcome.decided = self.encryption.redact(outcome.decided)
        died = await source.settle(driver, outcome)
        if died and (topic := self.settings.dead_letter_topic):
            outbox.add(backlog.dead_letter(row, topic) for row in died)
            await write_staged(attempt, outcome)
        return outcome

    def _new_outbox(self) -> Outbox:
        return Outbox(
            self._source,
            self.settings.max_event_bytes,
            call_types=self.handlers.call_types,
            codecs=self.handlers.codecs,
            closed=self.handlers.closed,
            sent_size=self.claims.sent_size if self.claims else None,
            memory=self.settings.share(self.settings.concurrency),
        )
