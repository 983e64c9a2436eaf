"""What is proved: a service, its messages, and what may differ."""

import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from random import Random
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from onceward.errors import OncewardError
from onceward.events.event import Event
from onceward.handlers.registry import Handler
from onceward.service import Service
from onceward.testing.files import records_of
from onceward.testing.records import KafkaRecord, Sent
from onceward.testing.stand_ins import StandIn, called

Note = Callable[..., None]
"""Notes what a process does: a word, and what belongs to it as JSON."""
_REPEATED = 0.1
"""Share of the messages that are sent once more, any time later."""


class CanNotProve(OncewardError):
    """There is no verdict; the text says why, and what to do."""


@dataclass(frozen=True)
class Proof:
    """A service whose handlers are proved, as `tests/prove.py` declares it by the name `proof`."""

    service: Service
    messages: Callable[[Random], Iterable[Event | Sent]] | None = None
    """Makes messages, in an order that keeps the order of each key. With the same random numbers
    they are the same. None: they come from a recording."""
    prepare: Callable[[AsyncSession], Awaitable[None]] | None = None
    """Writes rows that are there before the first message."""
    invariants: Sequence[Callable[[AsyncSession], Awaitable[None]]] = ()
    """Each raises an error if what is committed must not be. They are called after each fault and
    at the end."""
    may_differ: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Columns of tables, and fields of events by the type, whose values may differ, as times do.
    Columns that a sequence fills may differ anyway, and those that refer to them."""
    stand_ins: Mapping[str, StandIn] = field(default_factory=dict)
    """Functions in place of those that call other services, by consumer; they return what these
    would, for the same call always the same. Without one a call is noted, and returns None."""

    def records(self, chance: Random, recording: Path | None) -> list[KafkaRecord]:
        """Return the records to send. Raises `CanNotProve` if there are none."""
        handlers = self.service.handlers
        if recording is not None:
            found = [*records_of(recording, handlers, keeps_times=False)]
        elif self.messages is not None:
            given = (one if isinstance(one, Sent) else Sent(one) for one in self.messages(chance))
            found = [one.record(handlers) for one in given]
        else:
            raise CanNotProve("give a recording, or write Proof(…, messages=…)")
        if not found:
            raise CanNotProve("there are no messages")
        return found

    def instrumented(self, name: str, note: Note) -> Service:
        """Return the service with another name, whose handlers note their calls.

        What calls other services is replaced. Questions whether a call took place are answered by
        no.
        """

        def change(handler: Handler) -> Handler:
            @wraps(handler.function)
            async def noted(*arguments: Any, **resources: Any) -> object:
                result = await handler.function(*arguments, **resources)
                for _, tx in [*arguments[0]] if handler.takes_batches else [arguments]:
                    note("call", handler.consumer, tx.message.source, tx.message.id)
                return result

            async def outside(event: Event, call: Any) -> object:
                note("outside", handler.consumer, call.id, event.model_dump(mode="json"))
                stand_in = self.stand_ins.get(handler.consumer)
                return await called(stand_in, event, call) if stand_in else None

            async def ask(event: Event, call: Any) -> bool:
                return False

            noted.__signature__ = signature(handler.function)  # type: ignore[attr-defined]
            if handler.mode != "call":
                return replace(handler, function=noted)
            asks: dict[str, Any] = {"ask": ask} if getattr(handler, "ask", None) else {}
            return replace(handler, function=outside, **asks)

        handlers = self.service.handlers.changed(change)
        return replace(self.service, name=name, handlers=handlers)


def load(path: Path) -> Proof:
    """Return the proof that a file declares. Raises `CanNotProve`."""
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise CanNotProve(f"{path} can't be read as Python: write it, as docs/testing.md shows")
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    if not isinstance(proof := getattr(module, "proof", None), Proof):
        raise CanNotProve(f"{path} declares no proof: write `proof = Proof(service, …)`")
    return proof


def key_of(record: KafkaRecord) -> Hashable:
    """Return what has an order among the records that are sent; one without a key has none."""
    return (record.topic, id(record) if record.key is None else record.key)


def interleaved(records: Sequence[KafkaRecord], chance: Random) -> list[KafkaRecord]:
    """Return the records in a random order that keeps each key's, and some of them twice."""
    of_key: defaultdict[Hashable, list[KafkaRecord]] = defaultdict(list)
    for one in records:
        of_key[key_of(one)].append(one)
    left = {key: iter(its) for key, its in of_key.items()}
    order = [next(left[key_of(one)]) for one in chance.sample(records, len(records))]
    for one in chance.sample(order, round(_REPEATED * len(order))):
        first = next(place for place, other in enumerate(order) if other is one)
        order.insert(chance.randint(first + 1, len(order)), one)
    return order
