"""Effects: calls to the outside, made after the commit of the transaction that has staged them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pipeline.events.message import Message


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt at an effect."""

    message: Message
    """Envelope of the event: identity, key, trace."""
    attempt: int
    """1 for the first one, and again for the first after a redrive."""

    @property
    def id(self) -> str:
        """The idempotency key: the same at every attempt, and nobody else's."""
        return self.message.id


@dataclass(frozen=True)
class Effect:
    """What is particular to the handler of an effect."""

    then: Callable[..., Awaitable[object]] | None = None
    per_second: float | None = None
    is_repeatable: bool = True
    """False: where the outcome of a call is not known, it is not made again."""
    ask: Callable[..., Awaitable[bool]] | None = None

    def __post_init__(self) -> None:
        if self.per_second is not None and not self.per_second > 0:
            raise ValueError(f"per_second is a number of calls, not {self.per_second!r}")
        if self.ask is not None and self.is_repeatable:
            raise TypeError("ask= is for what may not be repeated: give repeatable=False, too")
