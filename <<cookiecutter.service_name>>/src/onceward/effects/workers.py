"""The workers of effects: they serve the lanes of the backlog that hold calls.

A call is made outside of any transaction, while its lane is held; its result is stored by a
transaction like that of any other row.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import asyncpg

from onceward.apply.batch import validated
from onceward.apply.breaker import BreakerOpen
from onceward.apply.item import Item
from onceward.apply.outcome import BatchOutcome
from onceward.apply.transactions import ConsumeTransactions
from onceward.handlers.policy import (
    NOT_DONE,
    PARKED,
    UNKNOWN,
    Decision,
    assumed,
    dead,
    unchanged,
)
from onceward.observe.health import Health
from onceward.retry import lanes
from onceward.retry.lane_source import LaneSource
from onceward.retry.lanes import Lease
from onceward.retry.workers import BacklogWorkers
from onceward.schema import LANES
from onceward.servers.tasks import end, in_background

from .calls import Caller, CallResult, OutcomeUnknown, may_have_happened
from .registration import Effect
from .settings import EffectSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

_TURNS = 100
"""Times that calls are begun before a lane is released, so that other workers can take it."""
_GATHERING = 0.01
"""Seconds in which calls that end together are settled together."""
_STORING = 2
"""Times that the result of a call is stored by itself before the call is decided on without it."""
_BURST = 0.1
"""Seconds whose calls an effect with a rate may begin at once."""

_Calls = dict[bytes, asyncio.Task[CallResult | None]]
"""Those of a lane that are under way, by order key."""


class EffectWorkers(BacklogWorkers):
    """The workers of the lanes of effects. They mostly wait: each lane may have its own."""

    name = "effects"
    counts = False

    def __init__(self, consume: ConsumeTransactions, health: Health) -> None:
        super().__init__(consume, health)
        self.number = LANES
        self._most = EffectSettings().calls
        self._caller = Caller(consume.group)
        self._alone = asyncio.Lock()
        self._connection = asyncio.Semaphore(1)
        """Held for each query: there are as many workers as lanes, and they share a connection."""
        self._under_way: dict[bytes, str] = {}
        """Consumers of the calls that have begun, or are about to, by marker key."""
        for one in consume.handlers:
            if isinstance(one, Effect) and one.per_second is not None:
                self._throttles.limit("consumer", one.consumer, one.per_second)

    @property
    def consumers(self) -> set[str]:
        """Consumers whose rows are queried: those that may make calls now."""
        left = self._most - len(self._under_way)
        if left <= 0:
            return set()
        callers = {*self._handlers.callers}
        under_way = {*self._under_way.values()}
        # Slow ones leave a place for each of those that have no call under way.
        full = under_way if left <= len(callers - under_way) else set()
        # Where the breaker is open, one call at a time probes.
        probing = self._breaker.open & under_way
        return callers - self._throttles.resting("consumer") - probing - full

    async def serve(self, lease: Lease) -> int:
        """Make the calls that are due in the lane: many at once, those of a key one by one."""
        calls: _Calls = {}
        turns = 0
        async with in_background(self._keep(lease)) as keeper:
            try:
                while True:
                    if turns < _TURNS and not self._stopping.is_set():
                        turns += await self._begin(lease, calls)
                    if not calls:
                        return 1
                    await asyncio.wait(
                        {keeper, *calls.values()},
                        # More rows may be due by then, or more calls allowed.
                        timeout=min(
                            self._settings.backlog_poll_max, self._throttles.soonest("consumer")
                        ),
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    await asyncio.sleep(_GATHERING)
                    ended = [calls.pop(key) for key, call in list(calls.items()) if call.done()]
                    failed = [call for call in ended if call.cancelled() or call.exception()]
                    succeeded = [call for call in ended if call not in failed]
                    await self._settle(lease, [one for call in succeeded if (one := call.result())])
                    if keeper.done():  # not before: what has taken place is stored if it can be
                        keeper.result()
                    for call in failed:
                        call.result()  # raises, when the results of the others are stored
            finally:
                await end(*calls.values())

    async def _query(self, what: str, statement: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
        async with asyncio.timeout_at(self._ends_at), self._connection:
            return await super()._query(what, statement)

    async def _keep(self, lease: Lease) -> None:
        """Hold the lane while calls are under way. Raises `LaneLost`."""
        while True:
            await asyncio.sleep(self._settings.backlog_lease / 3)
            await self._hold(lease)

    async def _hold(self, lease: Lease) -> None:
        await self._query("holding a lane", lambda driver: lanes.extend(driver, lease))

    async def _begin(self, lease: Lease, calls: _Calls) -> bool:
        """Begin calls that are due; return whether there were any."""
        # Those under way are still due, and read again.
        rows = await self._due(lease, len(calls) + self._most)
        source = await self._read(lease, rows, validates=False)
        items = [one if self._is_risky(lease, one) else validated(one) for one in source.items]
        source = replace(source, items=items)
        of_keys: dict[bytes, list[Item]] = {}
        for item in source.items:
            of_keys.setdefault(item.order_key, []).append(item)
        heads = [items[0] for key, items in of_keys.items() if key not in calls]
        begun_now = Counter[str]()
        chosen = [item for item in heads if self._has_room_for(item, begun_now)]
        try:
            taken = {("consumer", one): number for one, number in begun_now.items()}
            await self._throttles.took(taken)
            # Or rows behind calls that are under way fill the page, and hide others that are due.
            hides = not chosen and any(len(items) > 1 for items in of_keys.values())
            if source.unhandleable or hides or source.keys != list(of_keys):
                await self._apply(self._consume, replace(source, items=[]))
            begun = asyncio.get_running_loop().time()
            may_begin = await self._note_beginnings(lease, chosen) if chosen else {}
        except BaseException:
            for item in chosen:
                del self._under_way[item.key]
            raise
        for item in chosen:
            key = item.key
            if not may_begin.get(key, True):
                del self._under_way[key]
                continue
            call = self._call(lease, item, noted_at=begun if key in may_begin else None)
            task = calls[item.order_key] = asyncio.create_task(call)
            task.add_done_callback(partial(self._leave, key))
        return bool(chosen)

    def _leave(self, key: bytes, _: asyncio.Task[Any]) -> None:
        del self._under_way[key]

    async def _note_beginnings(self, lease: Lease, chosen: Sequence[Item]) -> dict[bytes, bool]:
        """Store that calls begin where that is needed; return for each of these whether it may."""
        decisions = {
            item.key: decision
            for item in chosen
            if not self._is_risky(lease, item)
            and (decision := self._beforehand(item, is_risky=False))
        }
        if not decisions:
            # After a long stop the lane may be another worker's. Storing a decision checks it, too.
            await self._hold(lease)
        there = await self._note(lease, chosen, decisions, compares=True)
        return {key: key in there and not decision.is_dead for key, decision in decisions.items()}

    def _has_room_for(self, item: Item, begun: Counter[str]) -> bool:
        """Take a place for a call, if there is one for this effect; count it as begun."""
        consumer = item.consumer
        at_once = max(1.0, _BURST * self._throttles.most("consumer", consumer))
        if consumer not in self.consumers or begun[consumer] >= at_once:
            return False
        self._under_way[item.key] = consumer
        begun[consumer] += 1
        return True

    def _is_risky(self, lease: Lease, item: Item) -> bool:
        """Whether a process may have died over the call."""
        return item.history.deaths > 0 or lease.starts > 1

    async def _call(self, lease: Lease, item: Item, *, noted_at: float | None) -> CallResult | None:
        """Make the call and return its result; None if it must not be made."""
        is_risky = self._is_risky(lease, item)
        # Those that may kill the process are called one at a time.
        async with self._alone if is_risky else nullcontext():
            if is_risky:
                # Not `Resting`, which would end the lane's other calls.
                await self._throttles.fresh()
                if item.consumer in self._throttles.paused("consumer"):
                    return None
            if is_risky and (decision := self._beforehand(item, is_risky=True)):
                key, noted_at = item.key, asyncio.get_running_loop().time()
                there = await self._note(lease, [item], {key: decision}, compares=True)
                if key not in there or decision.is_dead:
                    return None
            if noted_at is not None and self._is_late(noted_at):
                # It was delayed for longer than the lane's lease. If the lane is ours still, no
                # other worker has made the call; otherwise this raises `LaneLost`.
                log.warning(
                    "effects: %s was delayed past its lease; restarting", item.handler.consumer
                )
                await self._note(lease, [item], {item.key: _unchanged(item)})
                return None
            # Not before: validation may be what kills the process.
            if item.event is None and item.fault is None:
                item = validated(item)
                # Without its event, `ask` can't be called about an earlier call.
                if item.fault and (decision := self._beforehand(item, is_risky=False)):
                    await self._note(lease, [item], {item.key: decision})
                    return None
            return replace(await self._caller.call(item), is_noted=noted_at is not None)

    def _is_late(self, noted_at: float) -> bool:
        return asyncio.get_running_loop().time() - noted_at > self._settings.backlog_lease

    def _beforehand(self, item: Item, *, is_risky: bool) -> Decision | None:
        """Return the decision to store before the call of a row; None if none is needed.

        It is what becomes of the row if the process dies over the call; a dead one if the call must
        not be made.
        """
        effect, policy, history = Effect.of(item), item.handler.policy, item.history
        if effect.is_repeatable:
            return assumed(policy, history) if is_risky else None
        is_stored, is_last = may_have_happened(item), history.attempts >= policy.attempts
        if is_stored and (effect.ask is None or item.fault or is_last):
            return dead(policy, UNKNOWN, item.fault or OutcomeUnknown(item.last_error), history)
        if item.fault is not None:
            return None
        decision = assumed(policy, history)
        # A worker that lost the lane begins no call that is late, but may be in the middle of one:
        # until that is over `ask` has no final answer.
        longest = self._settings.backlog_lease + item.handler.timeout
        # It is no suspect: most processes die of something else.
        history = decision.history._replace(deaths=history.deaths + is_risky)
        due_in = max(decision.due_in or 0.0, longest)
        return replace(decision, reason=UNKNOWN, history=history, due_in=due_in)

    async def _settle(self, lease: Lease, called: Sequence[CallResult]) -> None:
        """Store the results of calls: one by one where storing may run code that fails."""
        settled = await self._settle_together(lease, [one for one in called if one.is_done])
        for one in called:
            for _ in range(_STORING):
                if one.item.key not in settled:
                    settled |= await self._settle_together(lease, [one])

    async def _settle_together(self, lease: Lease, called: Sequence[CallResult]) -> set[bytes]:
        """Store the results of calls; return the keys of those that are stored."""
        items = [one.settling() for one in called]
        if not items:
            return set()
        try:
            return _stored(await self._apply(self._consume, LaneSource.of(lease, items)))
        except BreakerOpen:
            for one in called:
                if one.is_noted and (decision := _failed_with_open_breaker(one)):
                    await self._note(lease, [one.item], {one.item.key: decision})
            return {item.key for item in items}

    async def _note(
        self,
        lease: Lease,
        items: Sequence[Item],
        decisions: Mapping[bytes, Decision],
        *,
        compares: bool = False,
    ) -> set[bytes]:
        """Store decisions without a call; return the keys of the rows that are there.

        With `compares`, of those that are as they were read, and still due.
        """
        noted = [item for item in items if item.key in decisions]
        if not noted:
            return set()
        source = replace(LaneSource.of(lease, noted, decisions), compares=compares)
        results = await self._apply(self._consume, source)
        return {item.key for one in results for item, _ in one.decided}


def _stored(results: Sequence[BatchOutcome]) -> set[bytes]:
    """Return the marker keys of what was settled for good."""
    return {
        item.key
        for one in results
        for item in (
            *(*one.applied, *one.duplicates, *(row.item for row in one.letters if row.item)),
            *(item for item, decision in one.decided if _is_final(item, decision)),
        )
    }


def _is_final(item: Item, decision: Decision) -> bool:
    """Whether the decision results from the call, and not from locks or servers."""
    has_counted = decision.attempts > item.history.attempts
    return has_counted or decision.is_dead or decision.reason == PARKED


def _unchanged(item: Item) -> Decision:
    """Return the decision that no call was made."""
    return unchanged(item.reason, item.history, item.last_error)


def _failed_with_open_breaker(called: CallResult) -> Decision | None:
    """Return the decision on a row whose call has failed while the breaker is open.

    Failures are not stored then. None: the row keeps the decision that was stored before.
    """
    item, effect, error = called.item, Effect.of(called.item), called.error
    if effect.is_repeatable or isinstance(error, NOT_DONE):
        return _unchanged(item)
    if error is None:  # it took place, and `then` has failed
        return None
    if may_have_happened(item) and not called.is_made:
        return _unchanged(item)
    return item.handler.policy.after_failure(error, item.history, reason=UNKNOWN)
