"""The caller: makes the calls to the outside that transactions have staged.

An effect is a row of the backlog whose handler is called before its transaction instead of in it.
What has come out of the call is what the handler seems to do in the transaction, so that the row is
tried again, put off, dead or done like any other.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import asyncpg
import pydantic_core
from aiolimiter import AsyncLimiter
from opentelemetry.context import Context

from pipeline.apply.batch import validated
from pipeline.apply.breaker import BreakerOpen
from pipeline.apply.calls import result_as_json
from pipeline.apply.item import Item
from pipeline.apply.outcome import BatchOutcome
from pipeline.apply.verdict import decision_on
from pipeline.errors import describe_error, is_of_the_database
from pipeline.handlers.effects import Call, Effect
from pipeline.handlers.policy import (
    DIED,
    NOT_DONE,
    UNKNOWN,
    Decision,
    ProcessDied,
    as_decision,
    assumed,
    unknown,
)
from pipeline.handlers.transaction import Transaction
from pipeline.observe import metrics
from pipeline.observe.traces import ProcessSpans
from pipeline.retry import lanes
from pipeline.schema import LANES
from pipeline.servers.guard import InContext
from pipeline.servers.tasks import end, in_background

from .lane_source import LaneSource
from .lanes import Lane, Taken
from .workers import BacklogWorkers, died, unchanged

log = logging.getLogger(__name__)

T = TypeVar("T")

_TURNS = 100
"""Times that calls are begun before a lane is given back, so that others have their turn."""
_GATHERING = 0.01
"""Seconds in which calls that end together are settled together."""
_BURST = 0.1
"""Seconds whose calls an effect with a rate may begin at once."""


class OutcomeUnknown(Exception):
    """A call has begun, and whether it took place is not known."""


class CallFailed(Exception):
    """A call has failed with an error that would be taken for one of the service's database."""


@dataclass(frozen=True, slots=True)
class _Called:
    """What has come out of a call."""

    item: Item
    result: object = None
    kept: object = None
    """What is kept of the result."""
    error: BaseException | None = None
    context: Context | None = None
    """The call's, with its span."""
    is_noted: bool = False
    """Whether it was stored beforehand that the call begins."""
    is_made: bool = False
    """Whether the outside was called, and not only asked, or not even that."""

    @property
    def is_done(self) -> bool:
        """Whether to settle it runs no code of the service, and nothing can fail."""
        return self.error is None and self.item.fault is None and _effect_of(self.item).then is None

    def settling(self) -> Item:
        """Return the message with a handler that does what the call has led to."""
        effect = _effect_of(self.item)

        async def settle(event: Any, tx: Transaction) -> object:
            if self.error is not None:
                raise self.error
            if effect.then is not None:
                try:
                    await effect.then(event, tx, self.result)
                except Exception as error:
                    if effect.is_repeatable or not isinstance(as_decision(error), NOT_DONE):
                        raise
                    # Of a call they say that it did not take place. This one did.
                    raise OutcomeUnknown(
                        f"it took place, but then: {describe_error(error)}"
                    ) from error
            return self.kept

        handler = replace(self.item.handler, function=settle)
        return self.item._replace(handler=handler, called=self.context)


_Calls = dict[bytes, asyncio.Task[_Called | None]]
"""Those of a lane that are under way, by order key."""


class EffectWorkers(BacklogWorkers):
    """The workers of the lanes of effects. They mostly wait: each lane may have its own."""

    _name = "effects"
    _counts = False

    def __init__(self, *arguments: Any, group: str, **options: Any) -> None:
        super().__init__(*arguments, workers=LANES, **options)
        self._group = group
        self._limiters: dict[str, AsyncLimiter] = {}
        self._alone = asyncio.Lock()
        self._asking = asyncio.Semaphore(1)
        """They are many, and share one connection."""
        self._under_way: dict[bytes, str] = {}
        """Consumers of the calls that have a place, by marker key."""
        self._calling: dict[asyncio.Task[Any], tuple[Item, float]] = {}
        """Those whose function is called, and until when it may take."""

    def ignoring_cancellation(self, seconds: float) -> tuple[Item, asyncio.Task[Any] | None] | None:
        """Return a message whose call goes on so long after it was cancelled, and its task."""
        now = asyncio.get_running_loop().time()
        for task, (item, until) in self._calling.items():
            if now - until > seconds:
                return item, task
        return None

    @property
    def _consumers(self) -> set[str]:
        """Whose rows are looked for: of those who may call now."""
        left = self._settings.effect_calls - len(self._under_way)
        if left <= 0:
            return set()
        callers = {*self._handlers.callers}
        under_way = {*self._under_way.values()}
        # Slow ones leave a place for each of those that have no call under way.
        full = under_way if left <= len(callers - under_way) else set()
        spent = {name for name, one in self._limiters.items() if not one.has_capacity()}
        # Of those that fail for whatever comes one call at a time tells whether they still do.
        probing = self._breaker.open & under_way
        return callers - self._breaker.resting - spent - probing - full

    async def _serve(self, lane: Lane) -> None:
        """Make the calls that are due in the lane: many at once, those of a key one by one."""
        calls: _Calls = {}
        turns = 0
        async with in_background(self._keep(lane)) as keeper:
            try:
                while True:
                    if turns < _TURNS and not self._stopping.is_set():
                        turns += await self._begin(lane, calls)
                    if not calls:
                        return
                    await asyncio.wait(
                        {keeper, *calls.values()},
                        timeout=self._settings.backlog_poll_max,  # others may have come
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    if keeper.done():
                        keeper.result()
                    await asyncio.sleep(_GATHERING)
                    ended = [calls.pop(key) for key, call in list(calls.items()) if call.done()]
                    failed = [call for call in ended if call.cancelled() or call.exception()]
                    well = [call for call in ended if call not in failed]
                    await self._settle(lane, [one for call in well if (one := call.result())])
                    for call in failed:
                        call.result()  # raises, when what the others led to is stored
            finally:
                await end(*calls.values())

    async def _ask(self, what: str, question: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
        async with self._asking:
            return await super()._ask(what, question)

    async def _keep(self, lane: Lane) -> None:
        """Hold the lane while calls are under way. Raises `LaneLost`."""
        while True:
            await asyncio.sleep(self._settings.backlog_lease / 3)
            await self._hold(lane)

    async def _hold(self, lane: Lane) -> None:
        lease = self._settings.backlog_lease
        await self._ask("holding a lane", lambda driver: lanes.hold(driver, lane, lease))

    async def _begin(self, lane: Lane, calls: _Calls) -> bool:
        """Begin calls that are due; says whether there were any."""
        # Those under way are still due, and read again.
        taken = await self._take(lane, len(calls) + self._settings.effect_calls)
        of_keys: dict[bytes, list[Item]] = {}
        for item in taken.items:
            of_keys.setdefault(item.order_key, []).append(item)
        heads = [items[0] for key, items in of_keys.items() if key not in calls]
        chosen = [item for item in heads if await self._has_room_for(item)]
        try:
            # Also where what stands behind calls that are under way hides what else is due.
            hides = not chosen and any(len(items) > 1 for items in of_keys.values())
            if taken.unhandleable or hides or taken.keys != list(of_keys):
                left = Taken([], {}, taken.unhandleable, taken.keys)
                await self._apply(self._consume, self._work_of(lane, left))
            begun = asyncio.get_running_loop().time()
            may_begin = await self._note_beginnings(lane, chosen) if chosen else {}
        except BaseException:
            for item in chosen:
                del self._under_way[item.key]
            raise
        for item in chosen:
            key = item.key
            if not may_begin.get(key, True):
                del self._under_way[key]
                continue
            call = self._call(lane, item, noted_at=begun if key in may_begin else None)
            task = calls[item.order_key] = asyncio.create_task(call)
            task.add_done_callback(partial(self._leave, key))
        return bool(chosen)

    def _leave(self, key: bytes, _: asyncio.Task[Any]) -> None:
        del self._under_way[key]

    async def _note_beginnings(self, lane: Lane, chosen: Sequence[Item]) -> dict[bytes, bool]:
        """Store that calls begin where that is needed; returns of each of these whether it may."""
        decisions = {
            item.key: decision
            for item in chosen
            if not self._is_risky(lane, item)
            and (decision := self._beforehand(item, is_risky=False))
        }
        if not decisions:
            # Who was stopped for long may not hold the lane any more. To note something tells too.
            await self._hold(lane)
        there = await self._note(lane, chosen, decisions)
        return {key: key in there and not decision.is_dead for key, decision in decisions.items()}

    async def _has_room_for(self, item: Item) -> bool:
        """Take a place for a call, if there is one for this effect."""
        consumer = item.consumer
        if consumer not in self._consumers:
            return False
        rate = _effect_of(item).per_second
        if rate is not None:
            if consumer not in self._limiters:
                burst = max(1.0, rate * _BURST)
                self._limiters[consumer] = AsyncLimiter(burst, burst / rate)
            await self._limiters[consumer].acquire()  # at once: it has room
        self._under_way[item.key] = consumer
        return True

    async def _call(self, lane: Lane, item: Item, *, noted_at: float | None) -> _Called | None:
        """Make the call; returns what has come out of it, None if it must not be made."""
        is_risky = self._is_risky(lane, item)
        # One that may kill the process goes when no other such does.
        async with self._alone if is_risky else nullcontext():
            if is_risky and (decision := self._beforehand(item, is_risky=True)):
                key, noted_at = item.key, asyncio.get_running_loop().time()
                if key not in await self._note(lane, [item], {key: decision}) or decision.is_dead:
                    return None
            if noted_at is not None and self._is_late(noted_at):
                # Held up for longer than the lane was surely ours. Who still has it has made no
                # call, and nobody else has; the others are told here that they have lost it.
                log.warning("effects: %s was held up, and begins anew", item.handler.consumer)
                await self._note(lane, [item], {item.key: _before(item)})
                return None
            # Only now: to validate it may be what kills.
            if item.event is None and item.fault is None:
                item = validated(item)
                # It can't be asked any more what came out of an earlier call.
                if item.fault and (decision := self._beforehand(item, is_risky=False)):
                    await self._note(lane, [item], {item.key: decision})
                    return None
            return replace(await self._called(item), is_noted=noted_at is not None)

    async def _called(self, item: Item) -> _Called:
        handler = item.handler
        if item.fault is not None:
            return _Called(item)
        task = asyncio.current_task()
        assert task is not None
        call = Call(item.message, item.attempts + 1)
        now = asyncio.get_running_loop().time
        self._calling[task] = item, now() + handler.timeout
        limit = asyncio.timeout(handler.timeout)
        current = ProcessSpans(self._group).of(item.message, handler.consumer, item.trace)
        called = _Called(item, context=current.context)
        begun = perf_counter()
        try:
            with current:
                async with limit:
                    if _may_have_happened(item):
                        if await _has_happened(item, call):
                            return called
                        if now() >= (limit.when() or math.inf):  # stopped, and not cancelled yet
                            raise TimeoutError
                    called = replace(called, is_made=True)
                    result = await InContext(handler.function(item.event, call))
            return replace(called, result=result, kept=_kept(result, item))
        except asyncio.CancelledError as error:
            if task.cancelling():
                raise
            return replace(called, error=error)
        except BaseException as error:  # sys.exit() too, and the panic of a library
            told = _told(error, handler.consumer, handler.timeout, limit)
            return replace(called, error=told)
        finally:
            key = handler.consumer, handler.event.event_type
            metrics.handled({key: perf_counter() - begun})
            del self._calling[task]

    def _is_late(self, noted_at: float) -> bool:
        return asyncio.get_running_loop().time() - noted_at > self._settings.backlog_lease

    def _beforehand(self, item: Item, *, is_risky: bool) -> Decision | None:
        """Return what is stored of a row before its call; None: nothing need be.

        That is what becomes of it if the process dies over the call; or its death, if there must be
        none.
        """
        effect, policy = _effect_of(item), item.handler.policy
        attempts, waited = item.attempts, item.waited
        if effect.is_repeatable:
            return died(item) if is_risky else None
        is_stored = _may_have_happened(item)
        if is_stored and (effect.ask is None or item.fault or attempts >= policy.attempts):
            why = item.fault or OutcomeUnknown(item.last_error)
            return unknown(policy, why, attempts=attempts - 1, waited=waited, can_ask=False)
        if item.fault is not None:
            return None
        error = ProcessDied(f"a process began the call (attempt {attempts + 1}) and died")
        decision = assumed(policy, error, attempts=attempts, waited=waited, reason=UNKNOWN)
        # Who has lost the lane over it begins no call that is late, but may be in the middle of
        # one: until that is over there is no answer to ask for.
        longest = self._settings.backlog_lease + item.handler.timeout
        return replace(decision, due_in=max(decision.due_in or 0.0, longest))

    async def _settle(self, lane: Lane, called: Sequence[_Called]) -> None:
        """Store what has come out of calls: of those that may fail again one by one."""
        settled = await self._settle_together(lane, [one for one in called if one.is_done])
        for one in called:
            if one.item.key not in settled:
                await self._settle_together(lane, [one])

    async def _settle_together(self, lane: Lane, called: Sequence[_Called]) -> set[bytes]:
        """Store what has come out of calls; returns the keys of those that are stored."""
        items = [one.settling() for one in called]
        if not items:
            return set()
        taken = Taken(items, {}, [], [item.order_key for item in items])
        try:
            return _stored(await self._apply(self._consume, self._work_of(lane, taken)))
        except BreakerOpen:
            for one in called:
                if one.is_noted and (decision := _in_vain(one)):
                    await self._note(lane, [one.item], {one.item.key: decision})
            return {item.key for item in items}

    async def _note(
        self, lane: Lane, items: Sequence[Item], decisions: Mapping[bytes, Decision]
    ) -> set[bytes]:
        """Store what becomes of rows, and call nobody; returns the keys of those that are there."""
        noted = [item for item in items if item.key in decisions]
        if not noted:
            return set()
        taken = Taken(noted, {}, [], [item.order_key for item in noted])
        results = await self._apply(self._consume, self._work_of(lane, taken, decisions))
        return {item.key for one in results for item, _ in one.decided}

    def _work_of(
        self, lane: Lane, taken: Taken, assumed: Mapping[bytes, Decision] = {}
    ) -> LaneSource:
        return LaneSource(lane, self._settings.backlog_lease, taken, assumed)


def _effect_of(item: Item) -> Effect:
    effect = item.handler.effect
    assert effect is not None
    return effect


def _stored(results: Sequence[BatchOutcome]) -> set[bytes]:
    """Return the marker keys of what was settled for good."""
    return {
        item.key
        for one in results
        for item in (
            *(*one.applied, *one.duplicates, *(item for item, _ in one.mismatched)),
            *(item for item, decision in one.decided if not decision.is_undecided),
        )
    }


def _may_have_happened(item: Item) -> bool:
    return item.reason in (UNKNOWN, DIED) and not _effect_of(item).is_repeatable


async def _has_happened(item: Item, call: Call) -> bool:
    """Ask whether an earlier call took place."""
    ask = _effect_of(item).ask
    assert ask is not None
    try:
        return await ask(item.event, call)
    except Exception as error:
        if not isinstance(as_decision(error), NOT_DONE):
            raise
        # Of a call they say that it did not take place. Who asks can't say that so.
        raise OutcomeUnknown(f"it can't be asked: {describe_error(error)}") from error


def _kept(result: object, item: Item) -> object:
    """Return the JSON that is kept of what a call has returned: whatever it is, it was made."""
    try:
        kept = result_as_json(result)
    except TypeError as error:
        consumer, id = item.consumer, item.message.id
        log.warning("%s: call %r was made, and nothing of it is kept: %s", consumer, id, error)
        return None
    return kept and pydantic_core.from_json(kept)


def _before(item: Item) -> Decision:
    """Return what a row was before it was noted that its call begins."""
    before = unchanged(item)
    return replace(before, reason=UNKNOWN) if _may_have_happened(item) else before


def _in_vain(called: _Called) -> Decision | None:
    """Return what becomes of a row whose call has failed while the breaker stores no failures.

    None: it stays as it was noted.
    """
    item, effect, error = called.item, _effect_of(called.item), called.error
    if effect.is_repeatable or isinstance(error, NOT_DONE):
        return unchanged(item)
    if error is None:  # it took place, and what comes after that has failed
        return None
    if _may_have_happened(item) and not called.is_made:
        return _before(item)
    return decision_on(item, error, UNKNOWN)


def _told(
    error: BaseException, consumer: str, seconds: float, limit: asyncio.Timeout
) -> BaseException:
    """Return the error of a call as one that the transaction takes for its handler's own."""
    told: BaseException
    decision = as_decision(error)
    if limit.expired():
        told = TimeoutError(f"{consumer} takes longer than {seconds} s")
    elif is_of_the_database(decision):
        told = CallFailed(describe_error(error))
    else:
        return decision
    told.__cause__ = error
    return told
