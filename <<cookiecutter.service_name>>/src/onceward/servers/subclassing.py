"""Functions of aiokafka that create the engine's classes where aiokafka's module names its own."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast


def using(function: Callable[..., Any], **names: Any) -> Any:
    """Return a copy of a function that finds these values under names of its module.

    aiokafka has no parameter for the classes of the objects that it creates. With the copy a
    subclass creates other subclasses, and aiokafka's own clients in the process stay as they are.
    Raises `TypeError` if the function uses one of the names no longer.
    """
    original = cast(FunctionType, function)
    if unused := names.keys() - {*original.__code__.co_names}:
        raise TypeError(f"{original.__qualname__} of aiokafka no longer uses {sorted(unused)}")
    copied = FunctionType(
        original.__code__,
        original.__globals__ | names,
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    copied.__kwdefaults__ = original.__kwdefaults__
    return copied
