"""Stand-ins: functions of a test in place of those that call the outside."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
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
    return with_functions(
        handlers,
        lambda one: (
            partial(_call, stand_ins[one.consumer]) if one.consumer in stand_ins else one.function
        ),
    )


def with_functions(
    handlers: Handlers, function_of: Callable[[Handler], Callable[..., Awaitable[object]]]
) -> Handlers:
    """Return the same handlers with the functions that `function_of` returns for them."""
    return handlers.changed(lambda one: replace(one, function=function_of(one)))


async def _call(function: StandIn, *arguments: Any) -> object:
    result = function(*arguments)
    return await result if isawaitable(result) else result
