"""What a reader may take of its topic, as people have asked of the topic and its consumers."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Set

from onceward.apply.batch import Batch
from onceward.apply.throttles import LOOK_SECONDS, Place, Resting, Throttles
from onceward.handlers.registry import Handler


class TopicLimits:
    """The throttles of a topic and of the consumers that take its records.

    While the topic or all its consumers are paused, the records stay in Kafka. If only some
    consumers rest, others take the same records, and the messages of those are stored. What is
    stored is not taken of its consumer: the worker takes it.
    """

    def __init__(self, throttles: Throttles, takers: Iterable[Handler], topic: str) -> None:
        self._throttles = throttles
        self._topic = topic
        own = [one for one in takers if one.topic == topic]
        self._consumers = {one.consumer for one in own}
        self._called = {one.consumer for one in own if one.mode == "immediate"}
        """Those whose handlers the reader calls."""

    async def are_paused(self) -> bool:
        """Return what `is_paused` is as of a look that has just begun."""
        await self._throttles.fresh()
        return self.is_paused

    @property
    def is_paused(self) -> bool:
        """Whether nothing of the topic is to be taken until somebody resumes it."""
        is_paused = self._throttles.left("topic", self._topic) == math.inf
        return is_paused or self._paused == self._consumers

    async def check(self, known: Set[str] | None = None) -> None:
        """Raise `Resting` if it is paused, or consumers are that are not among those known."""
        if await self.are_paused() or (known is not None and self._paused - known):
            raise Resting

    async def wait(self, *, others_wait: bool = False) -> None:
        """Wait until the rates allow more.

        Raises `Resting` if it is paused, or would have to wait while `others_wait`.
        """
        await self.check()
        while (left := max((self._throttles.left(*one) for one in self._rates), default=0.0)) > 0:
            if others_wait:
                raise Resting
            await asyncio.sleep(min(left, LOOK_SECONDS))
            await self.check()

    @property
    def stored(self) -> Set[str]:
        """Consumers whose messages are stored, as others take the same records: those that are
        paused, and those that are throttled if any other is not."""
        limited = self._consumers & self._throttles.limited("consumer")
        are_others = limited | self._paused != self._consumers
        return self._paused | (limited if are_others else set())

    @property
    def most(self) -> float:
        """How many records may be taken at once."""
        return min((self._throttles.most(*one) for one in self._rates), default=math.inf)

    async def take(self, batch: Batch, *, others_wait: bool = False) -> None:
        """Wait as `wait` does, until the rates allow a batch, which counts as taken then."""
        await self.wait(others_wait=others_wait)
        rates = self._rates
        if not rates:
            return
        called = [one for one in batch.items if one.handler.mode == "immediate"]
        taken = Counter(("consumer", one.consumer) for one in called)
        taken["topic", self._topic] = len(batch.records)
        await self._throttles.took({one: taken[one] for one in rates})

    @property
    def _paused(self) -> Set[str]:
        return self._consumers & self._throttles.paused("consumer")

    @property
    def _rates(self) -> list[Place]:
        """The kinds and names of what is throttled, and not stored."""
        topics = {self._topic} & self._throttles.limited("topic")
        consumers = (self._called - self.stored) & self._throttles.limited("consumer")
        return [*(("topic", one) for one in topics), *(("consumer", one) for one in consumers)]
