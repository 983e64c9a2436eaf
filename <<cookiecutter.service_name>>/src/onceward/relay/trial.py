"""A trial: a topic that has refused events is looked up, then sent some, beside the others."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Self

import asyncpg

from .rejections import Rejections


class Trial(NamedTuple):
    """A step of the trial of a topic, which goes on beside the steps of the relay."""

    topic: str
    work: asyncio.Task[Rejections | None]
    sent: Sequence[asyncpg.Record] | None
    """The events; None while the topic is looked up, as they are read after all that takes long."""

    @classmethod
    def begin(
        cls,
        topic: str,
        work: Coroutine[Any, Any, Rejections | None],
        sent: Sequence[asyncpg.Record] | None = None,
        *,
        then: Callable[[], None],
    ) -> Self:
        """Begin a step, at whose end `then` is called."""
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: then())
        return cls(topic, task, sent)
