"""Gathering: one transaction takes what is ready, of however many partitions.

A transaction costs nearly the same for one message as for fifty. At ordinary rates a few messages
are ready at a time, each in another partition; so a transaction takes all that have arrived since
the previous one began. At full load a partition has a full batch, which is a transaction by itself.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from pipeline.apply.outcome import BatchOutcome
from pipeline.apply.positions import Slot
from pipeline.apply.transactions import ConsumeTransactions
from pipeline.servers.retrying import Attempts

from .partition_source import PartitionBatch, PartitionSource

Outcomes = Sequence[BatchOutcome]

_GAP_SECONDS = 0.008
"""Shortest time between the beginnings of two transactions, unless a full batch is ready."""
_PATIENCE_SECONDS = 0.025
"""How long a batch waits for the end of a transaction before another begins beside it."""
_EXPECTED_SECONDS = 0.1
"""Expected duration up to which batches share a transaction. Slow handlers have their own."""


@dataclass(eq=False)
class _Ready:
    """A batch that is to be applied."""

    part: PartitionBatch
    attempts: Attempts
    is_alone: bool
    since: float
    done: asyncio.Future[Outcomes] = field(default_factory=asyncio.Future)
    task: asyncio.Task[None] | None = None
    """The task of its transaction, while that runs."""

    @property
    def size(self) -> int:
        return len(self.part.batch.items)


class Gatherer:
    """Applies the batches of a process's partitions, several in one transaction where possible."""

    def __init__(self, consume: ConsumeTransactions) -> None:
        self._consume = consume
        self._settings = consume.settings
        self._ready: list[_Ready] = []
        self._running = 0
        self._timer: asyncio.TimerHandle | None = None
        self._began_at = 0.0
        self._seconds: dict[Slot, float] = {}
        """Duration of a partition's latest transaction, divided by the messages in it."""

    async def apply(self, part: PartitionBatch, attempts: Attempts, *, is_alone: bool) -> Outcomes:
        """Apply a batch; returns the outcomes of its transactions, which may hold others as well.

        `is_alone`: in transactions of its own, because its records may kill the process. Raises
        what `ConsumeTransactions.apply` raises. If it is cancelled its transaction is rolled back.
        """
        ready = _Ready(part, attempts, is_alone, asyncio.get_running_loop().time())
        self._ready.append(ready)
        self._begin()
        try:
            return await ready.done
        except asyncio.CancelledError:
            if ready in self._ready:
                self._ready.remove(ready)
            if ready.task is not None:
                ready.task.cancel()
                await asyncio.wait({ready.task})
            raise

    def _begin(self) -> None:
        """Begin the transactions that are due, and set the timer for the next one."""
        now = asyncio.get_running_loop().time()
        if self._timer is not None:
            self._timer.cancel()
        while self._ready and self._running < self._settings.concurrency:
            if (due := self._due()) > now:
                self._timer = asyncio.get_running_loop().call_at(due, self._begin)
                return
            self._began_at = now
            self._running += 1
            taken = self._take()
            task = asyncio.create_task(self._apply(taken))
            for one in taken:
                one.task = task

    def _due(self) -> float:
        first = self._ready[0]
        size = sum(one.size for one in self._ready)
        if first.is_alone or size >= self._settings.batch_size:
            return 0.0
        waits = first.since + _PATIENCE_SECONDS if self._running else 0.0
        return max(self._began_at + _GAP_SECONDS, waits)

    def _take(self) -> Sequence[_Ready]:
        """Return the batch that has waited longest, with others that may share its transaction."""
        size, seconds = 0, 0.0
        taken: list[_Ready] = []
        while self._ready and not (taken and (taken[0].is_alone or self._ready[0].is_alone)):
            first = self._ready[0]
            size += first.size
            seconds += first.size * self._seconds.get(first.part.slot, 0.0)
            if taken and (size > self._settings.batch_size or seconds > _EXPECTED_SECONDS):
                break
            taken.append(self._ready.pop(0))
        return taken

    async def _apply(self, taken: Sequence[_Ready]) -> None:
        began_at = perf_counter()
        try:
            source = PartitionSource([one.part for one in taken])
            outcomes = await self._consume.apply(source, _attempts(taken))
        except BaseException as error:
            left = [one for one in taken if not one.done.done()]
            if len(taken) > 1:
                # Nothing is committed. Each batch has transactions of its own.
                for one in left:
                    one.is_alone = True
                self._ready[:0] = left
            elif isinstance(error, Exception):
                for one in left:
                    one.done.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            for one in taken:
                if not one.done.done():
                    one.done.set_result(outcomes)
        finally:
            self._running -= 1
            messages = sum(one.size for one in taken)
            for one in taken:
                one.task = None
                self._seconds[one.part.slot] = (perf_counter() - began_at) / max(1, messages)
            self._begin()


def _attempts(taken: Sequence[_Ready]) -> Attempts:
    if len(taken) == 1:
        return taken[0].attempts

    def report(reason: str) -> None:
        for one in taken:
            one.attempts.report(reason)

    return replace(taken[0].attempts, what="the consume transaction", report=report)
