"""The clock of `layers`: what each part has spent, without the parts that it calls."""

import gc
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import iscoroutinefunction
from statistics import median
from time import perf_counter, process_time
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord  # type: ignore[import-untyped]

WARM_UP = 0.05
"""The first batches, this share of all, don't count."""

Function = Callable[..., Any]


@dataclass
class Clock:
    """What each layer has spent, without the layers that it calls."""

    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of this batch."""
    batches: list[dict[str, float]] = field(default_factory=list)
    """Microseconds a message, of the batches before."""
    layers: dict[str, None] = field(default_factory=dict)
    """Their names, in the order in which they were noted."""
    _inner: list[float] = field(default_factory=list)

    def note(
        self, owner: Any, name: str, layer: str, *, for_each: bool = False, waits: bool = False
    ) -> None:
        """Watch a function of a module or a class.

        A coroutine function may wait unless it runs `for_each` message, another one if it `waits`.
        """
        self.layers[layer] = None
        function = getattr(owner, name)
        if iscoroutinefunction(function):
            watched = self.awaited(layer, function, perf_counter if for_each else process_time)
        else:
            watched = self.called(layer, function, process_time if waits else perf_counter)
        setattr(owner, name, watched)

    def called(self, layer: str, function: Function, now: Callable[[], float]) -> Function:
        """Watch a function; `perf_counter` costs little where that is called for each message."""

        @wraps(function)
        def watched(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            begun = now()
            try:
                return function(*args, **options)
            finally:
                self._end(layer, now() - begun)

        return watched

    def awaited(
        self, layer: str, function: Callable[..., Awaitable[Any]], now: Callable[[], float]
    ) -> Callable[..., Awaitable[Any]]:
        """Watch a coroutine function; while it waits, `process_time` stands still."""

        @wraps(function)
        async def watched(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            begun = now()
            try:
                return await function(*args, **options)
            finally:
                self._end(layer, now() - begun)

        return watched

    def _end(self, layer: str, took: float) -> None:
        self.spent[layer] += took - self._inner.pop()
        if self._inner:
            self._inner[-1] += took

    def turn(self, messages: int) -> None:
        """Begin with the next batch."""
        self.batches.append({layer: spent / messages * 1e6 for layer, spent in self.spent.items()})
        self.spent.clear()

    def medians(self) -> dict[str, float]:
        """Return what each layer takes of a message, in microseconds."""
        counting = self.batches[int(WARM_UP * len(self.batches)) :]
        return {
            layer: round(median(one.get(layer, 0.0) for one in counting), 2)
            for layer in self.layers
        }


async def fetched(
    consumer: AIOKafkaConsumer, at_most: int
) -> tuple[float, list[Sequence[ConsumerRecord]]]:
    """Fetch all that there is by a consumer that was not started, `at_most` records at a time.

    Return what that took of a message, in microseconds, and the batches of single partitions.
    """
    await consumer.start()
    try:
        begun, count = process_time(), 0
        async for records in _fetching(consumer, at_most):
            count += len(records)
        took = process_time() - begun
        # Once more, to keep them: while the time was taken none was held, as in a service.
        await consumer.seek_to_beginning()
        batches = [records async for records in _fetching(consumer, at_most)]
    finally:
        await consumer.stop()
    gc.freeze()  # or the collector would look at all of them, again and again
    return took / count * 1e6, batches


async def _fetching(
    consumer: AIOKafkaConsumer, at_most: int
) -> AsyncIterator[Sequence[ConsumerRecord]]:
    ends = await consumer.end_offsets(consumer.assignment())
    left = sum(ends.values())
    while left > 0:
        found = await consumer.getmany(timeout_ms=1_000, max_records=at_most)
        for records in found.values():
            left -= len(records)
            yield records
