"""Checks of what is registered as a handler: its options and its function."""

import sys
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, iscoroutinefunction, signature, unwrap
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from onceward.events.event import Event, check_event, check_name, reader

from .aggregate import Declared, Loads, declared


def check_options(
    event: type[Event], *, consumer: str, loads: Declared, timeout: float
) -> Sequence[Loads[Any]]:
    """Return `loads` as a sequence. Raises `TypeError` or `ValueError` for an invalid option."""
    check_event(event)
    check_name("a consumer", consumer)
    if event.__pydantic_complete__:  # otherwise it refers to classes that are defined later
        reader(event)
    rows = declared(loads, event)
    if not timeout > 0:
        raise ValueError(f"timeout is in seconds, not {timeout}")
    return rows


def check_function(function: Callable[..., object], **takes: Any) -> None:
    """Raise `TypeError` for a function that can't take arguments of these types, in this order.

    Its annotations are checked as far as they can be evaluated. Further parameters that have one
    take resources, which are checked when the service starts.
    """
    if not iscoroutinefunction(function):
        raise TypeError(f"{function} must be a coroutine function: write `async def`")
    name = getattr(function, "__name__", "handle")
    parameters = ", ".join(f"{name}: {_text(given)}" for name, given in takes.items())
    advice = f"write `async def {name}({parameters})`"
    try:
        # Not the signature of a wrapped function, which may differ.
        own = signature(function, follow_wrapped=False)
        bound = own.bind_partial(*takes.values())
        further = further_parameters(own, len(takes))
        own.bind(*takes.values(), **dict.fromkeys(further))
    except TypeError as error:
        raise TypeError(f"{name} can't be called as a handler is ({error}): {advice}") from None
    try:
        hints = get_type_hints(function)
    except Exception:  # names that only a type checker knows, or that are defined later
        return
    for parameter, given in bound.arguments.items():
        hint = hints.get(parameter, Any)
        if not isinstance(given, tuple) and not fits(given, hint):
            raise TypeError(
                f"{name} takes {_text(hint)} as {parameter}, where it is given"
                f" {_text(given)}: {advice}"
            )


def further_parameters(parameters: Signature, given: int) -> list[str]:
    """Return the parameters, with an annotation and without a default, that the first `given`
    arguments leave. Raises `TypeError` if these are too many."""
    taken = parameters.bind_partial(*[None] * given).arguments
    return [
        name
        for name, one in parameters.parameters.items()
        if name not in taken
        and one.annotation is not Parameter.empty
        and one.default is Parameter.empty
        and one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]


def fits(given: Any, hint: Any) -> bool:
    """Return whether a value of the type `given` can be what is annotated so, as far as it is known
    without the value."""
    if get_origin(hint) is Annotated:
        return fits(given, get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return any(fits(given, one) for one in get_args(hint))
    kind, wanted = get_origin(given) or given, get_origin(hint) or hint
    is_known = isinstance(wanted, type) and not getattr(wanted, "_is_protocol", False)
    if Any in (kind, wanted) or not is_known:
        return True
    return issubclass(kind, wanted) and all(map(fits, get_args(given), get_args(hint)))


def _text(given: Any) -> str:
    name: str = getattr(given, "__name__", str(given))
    inner = ", ".join(map(_text, get_args(given)))
    return f"{name}[{inner}]" if inner else name


def is_wrapped_since(function: Callable[..., object]) -> bool:
    """Whether a decorator in its module has replaced the function by one that calls it."""
    name = getattr(function, "__qualname__", "")
    found = getattr(sys.modules.get(function.__module__), name, function)
    if found is function or not callable(found):
        return False
    cells = getattr(found, "__closure__", None) or ()
    return unwrap(found, stop=lambda one: one is function) is function or any(
        cell.cell_contents is function for cell in cells
    )
