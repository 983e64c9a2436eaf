"""Gathering: one transaction takes what is ready, of however many partitions.

A transaction costs nearly the same for one message as for fifty. At ordinary rates a few messages
are ready at a time, each in another partition, so they share a transaction. Sharing is optimistic:
if the fault of one message is not certain, or a server is away, each batch is applied by itself, as
a full batch always is.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from onceward.apply.attempt import Findings
from onceward.apply.ladder import BATCH
from onceward.apply.outcome import BatchOutcome
from onceward.apply.positions import Slot
from onceward.apply.transactions import ConsumeTransactions

from .partition_source import PartitionBatch, PartitionSource

_PATIENCE_SECONDS = 0.025
"""How long a batch waits for the end of a shared transaction before another begins beside it."""
_EXPECTED_SECONDS = 0.1
"""Expected duration of the handlers up to which batches share a transaction. Slow ones have their
own."""
_TIME_SHARE = 1 / 16
"""Share of the time limit of a transaction that one with several partitions has: the records of one
partition wait no longer for the handlers of another."""


@dataclass(eq=False)
class _Ready:
    """A batch that is to be applied."""

    batch: PartitionBatch
    findings: Findings
    since: float
    applied: asyncio.Future[bool]
    task: asyncio.Task[bool] | None = None
    """The task of its transaction, once that has begun."""

    @property
    def size(self) -> int:
        return len(self.batch.batch.items)


class Gatherer:
    """Applies batches of a process's partitions that are ready at the same time together."""

    def __init__(self, consume: ConsumeTransactions) -> None:
        self._consume = consume
        self._settings = consume.settings
        self._time_limit = _TIME_SHARE * consume.settings.transaction_timeout
        self._ready: list[_Ready] = []
        self._running: set[asyncio.Task[bool]] = set()
        self._timer: asyncio.Handle | None = None
        self._seconds: dict[Slot, float] = {}
        """Duration of the handlers in a partition's latest transaction by itself, for each of its
        messages."""

    def learn(self, batch: PartitionBatch, outcomes: Sequence[BatchOutcome]) -> None:
        """Note how long the handlers took to apply a batch by itself."""
        seconds = sum(one.seconds for one in outcomes)
        self._seconds[batch.slot] = seconds / max(1, len(batch.batch.items))

    async def apply(self, batch: PartitionBatch, findings: Findings) -> bool:
        """Apply the batch together with others; returns False if it must be applied by itself.

        After a failed attempt `findings.handed` has the events that were handed to handlers in it.
        If this is cancelled the transaction is rolled back.
        """
        loop = asyncio.get_running_loop()
        alone = PartitionSource([batch])
        if self._consume.first_rung(alone) > BATCH or self._consume.turns.are_needed(alone.items):
            return False  # those of other consumers must not wait for a turn
        ready = _Ready(batch, findings, loop.time(), loop.create_future())
        self._ready.append(ready)
        self._begin_at()
        try:
            return await ready.applied
        finally:
            if ready in self._ready:
                self._ready.remove(ready)
            if ready.task is not None and not ready.task.done():
                ready.task.cancel()
                await asyncio.wait({ready.task})

    def _begin_at(self, time: float = 0.0) -> None:
        """Call `_begin` then, or when every batch that is ready by now has been handed over."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        is_due = time <= loop.time()
        self._timer = loop.call_soon(self._begin) if is_due else loop.call_at(time, self._begin)

    def _begin(self) -> None:
        """Begin the transactions that are due, and set the timer for the next one."""
        now = asyncio.get_running_loop().time()
        while self._ready and len(self._running) < self._settings.concurrency:
            if self._running and (due := self._ready[0].since + _PATIENCE_SECONDS) > now:
                self._begin_at(due)
                return
            taken = self._take()
            if len(taken) == 1:
                _resolve(taken, is_applied=False)
            else:
                self._start(taken)

    def _take(self) -> Sequence[_Ready]:
        """Return the batch that has waited longest, with others that may share its transaction."""
        size, seconds = 0, 0.0
        taken: list[_Ready] = []
        for one in self._ready:
            size += one.size
            seconds += one.size * self._seconds.get(one.batch.slot, 0.0)
            if taken and (size > self._settings.batch_size or seconds > _EXPECTED_SECONDS):
                break
            taken.append(one)
        del self._ready[: len(taken)]
        return taken

    def _start(self, taken: Sequence[_Ready]) -> None:
        findings = Findings()
        task = asyncio.create_task(self._apply(taken, findings))
        self._running.add(task)
        for one in taken:
            one.task = task

        def end(task: asyncio.Task[bool]) -> None:
            self._running.discard(task)
            is_applied = not task.cancelled() and task.exception() is None and task.result()
            if not is_applied:
                # Nothing is committed, or the answer was lost, which the position shows.
                for one in taken:
                    one.findings.handed |= findings.handed
            _resolve(taken, is_applied=is_applied)
            self._begin_at()

        task.add_done_callback(end)

    async def _apply(self, taken: Sequence[_Ready], findings: Findings) -> bool:
        async with asyncio.timeout(None) as limit:

            def begin() -> None:
                limit.reschedule(asyncio.get_running_loop().time() + self._time_limit)

            source = PartitionSource([one.batch for one in taken], begin)
            result = await self._consume.transact(source, BATCH, findings)
            return isinstance(result, BatchOutcome)


def _resolve(taken: Sequence[_Ready], *, is_applied: bool) -> None:
    for one in taken:
        if not one.applied.done():
            one.applied.set_result(is_applied)
