"""Scenarios in which the same messages may come: their order, duplicates, a failure."""

import random
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import factorial, prod
from typing import Any

from onceward.apply.batch import prepare
from onceward.events.message import Message
from onceward.handlers.policy import Park
from onceward.handlers.registry import Handler, Handlers

from .records import KafkaRecord

_SEED = 1
"""Scenarios that are chosen from too many are the same ones in every run."""


@dataclass(frozen=True)
class Scenario:
    """One way in which messages come."""

    order: tuple[int, ...]
    """Places of the messages in the list that the test has given."""
    repeats: bool = False
    """Whether each is sent twice in a row, and all are sent again at the end."""
    is_batch: bool = False
    """Whether they come in one batch for each partition."""
    fails: int | None = None
    """Place of the message whose first call fails, after its handler has returned."""
    dies_after: int | None = None
    """Number of the statement after which the process dies; what it has not committed is lost."""

    def __str__(self) -> str:
        how = f"messages in the order {', '.join(map(str, self.order))}"
        how += ", each sent twice and all again" if self.repeats else ""
        how += ", in one batch" if self.is_batch else ""
        if self.dies_after is not None:
            how += f"; the process dies after statement {self.dies_after + 1}"
        return how if self.fails is None else f"{how}; the first call for {self.fails} fails"

    @property
    def sent(self) -> list[int]:
        """Places of the messages as they are sent, repeated ones too."""
        if not self.repeats:
            return [*self.order]
        return [place for place in self.order for _ in range(2)] + [*self.order]


Count = Callable[[Scenario], Awaitable[int]]


async def scenarios(
    keys: Sequence[Hashable], at_most: int, count: Count | None = None
) -> list[Scenario]:
    """Return scenarios for messages with these order keys: all, or `at_most` random ones.

    Messages of one key keep their order. The process dies after each statement of a scenario; their
    number is what `count` returns.
    """
    places: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    orders = factorial(len(keys)) // prod(factorial(len(one)) for one in places.values())
    chooser, found = random.Random(_SEED), dict[Scenario, None]()
    if orders <= at_most:
        every = [one for order in _orders(places) for one in await _of_order(order, count)]
        return every if len(every) <= at_most else chooser.sample(every, at_most)
    while len(found) < at_most:
        shuffled = chooser.sample(keys, len(keys))
        left = {key: iter(of_key) for key, of_key in places.items()}
        order = tuple(next(left[key]) for key in shuffled)
        found[chooser.choice(await _of_order(order, count))] = None
    return [*found]


async def _of_order(order: tuple[int, ...], count: Count | None) -> list[Scenario]:
    """Return the scenarios of one order."""
    found = [Scenario(order), Scenario(order, repeats=True), Scenario(order, is_batch=True)]
    for one in (found[0], found[2]):
        number = await count(one) if count else 0
        found += [replace(one, dies_after=place) for place in range(number)]
    for fails in order:
        found += (Scenario(order, fails=fails), Scenario(order, is_batch=True, fails=fails))
    return found


def _orders(left: Mapping[Hashable, list[int]]) -> Iterator[tuple[int, ...]]:
    """Yield every order of the places in which those of one key keep theirs."""
    if not any(left.values()):
        yield ()
    for key, (first, *others) in ((key, places) for key, places in left.items() if places):
        for order in _orders({**left, key: others}):
            yield (first, *order)


def keys_of(records: Sequence[KafkaRecord]) -> list[Hashable]:
    """Return the order keys of records: one without a key has no order."""
    return [
        (one.topic, one.partition, place if one.key is None else one.key)
        for place, one in enumerate(records)
    ]


async def failing_once(handlers: Handlers, record: KafkaRecord) -> Handlers:
    """Return handlers whose first call for the record's message fails when it has returned.

    It is parked, so that it spends no attempt and is tried again after a second.
    """
    await prepare(handlers, [record])
    message = handlers.codec(record.topic).decode(record)
    failed: set[tuple[str, str]] = set()

    def change(handler: Handler) -> Handler:
        async def fails(*arguments: Any) -> object:
            result = await handler.function(*arguments)
            calls = [*arguments[0]] if handler.takes_batches else [arguments[:2]]
            name = handler.consumer, handler.topic
            if name not in failed and any(_is(tx.message, message) for _, tx in calls):
                failed.add(name)
                raise Park("a failure that explore has injected", after=1)
            return result

        return replace(handler, function=fails) if handler.mode != "call" else handler

    return handlers.changed(change)


def _is(handled: Message, wanted: Message) -> bool:
    # An id that is the position differs each time: there equal events are the same.
    is_named = wanted.id != f"{wanted.partition}-{wanted.offset}"
    return handled.id == wanted.id if is_named else handled.hash == wanted.hash
