"""Stand-ins: functions of a test in place of those that call the outside."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from inspect import isawaitable
from typing import Any

from onceward.handlers.registry import Handler, Handlers

from .errors import HarnessMisused

StandIn = Callable[..., object]
"""Takes the place of an effect's function, with or without `async`: it gets the event, the `Call`,
and resources."""


def check_known(stand_ins: Mapping[str, StandIn], handlers: Handlers) -> None:
    """Raise `HarnessMisused` for a consumer that is no effect."""
    if unknown := stand_ins.keys() - handlers.callers:
        effects = ", ".join(sorted(handlers.callers)) or "none"
        raise HarnessMisused(f"{min(unknown)!r} is no effect; effects: {effects}")


def check_complete(stand_ins: Mapping[str, StandIn], due: Iterable[str]) -> None:
    """Raise `HarnessMisused` for a consumer whose call is due, and has no stand-in."""
    if missing := set(due) - stand_ins.keys():
        name = min(missing)
        raise HarnessMisused(
            f"a call of {name!r} is due, and tests call nothing outside: write"
            f" run_calls({{{name!r}: function}}), with a `def function(event, call)`"
        )


def replaced(handlers: Handlers, stand_ins: Mapping[str, StandIn]) -> Handlers:
    """Return the handlers with stand-ins for the functions of effects."""

    def change(one: Handler) -> Handler:
        stand_in = stand_ins.get(one.consumer)
        return replace(one, function=partial(called, stand_in)) if stand_in else one

    return handlers.changed(change)


async def called(function: StandIn, *arguments: Any) -> object:
    """Call a stand-in, with or without `async`."""
    result = function(*arguments)
    return await result if isawaitable(result) else result
