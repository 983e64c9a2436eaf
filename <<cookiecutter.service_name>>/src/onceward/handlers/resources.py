"""Resources: what functions of the service take next to events, open while a process runs.

A parameter takes the field of the service's dataclass that has the same annotation. Which one that
is depends on annotations alone, so it is known before anything is opened.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, is_dataclass
from dataclasses import fields as fields_of
from functools import partial
from inspect import isasyncgenfunction, signature
from typing import Any, get_args, get_type_hints

from .checks import further_parameters
from .registry import Handler

Function = Callable[..., Any]
OpenResources = Callable[[], AbstractAsyncContextManager[Any]]

_WRITE = (
    "resources= takes a function without arguments: write `@asynccontextmanager` and `async def"
    " open_resources() -> AsyncIterator[Resources]`, where Resources is a dataclass"
)


@dataclass(frozen=True)
class ResourceTypes:
    """The resources of a service, by their annotations."""

    name: str = ""
    """Name of their dataclass."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Annotations of its fields."""

    @classmethod
    def of(cls, open_resources: OpenResources | None) -> "ResourceTypes":
        """Return those that a function opens, by its annotation; None opens none.

        Raises `TypeError` if the annotation has no dataclass.
        """
        if open_resources is None:
            return cls()
        try:
            kind, *_ = get_args(get_type_hints(open_resources)["return"])
            hints = get_type_hints(kind, include_extras=True)
        except Exception as error:  # names that only a type checker knows, or no annotation
            raise TypeError(f"{_WRITE} ({error!r})") from error
        if (
            not isinstance(kind, type)
            or not is_dataclass(kind)
            or isasyncgenfunction(open_resources)
        ):
            raise TypeError(_WRITE)
        return cls(kind.__name__, {one.name: hints[one.name] for one in fields_of(kind)})

    def taken_by(self, function: Function, arguments: int) -> dict[str, str]:
        """Return the field that each parameter after the first `arguments` takes, by its name.

        Raises `TypeError` if it is not exactly one.
        """
        further = further_parameters(signature(function, follow_wrapped=False), arguments)
        if not further:
            return {}
        try:
            hints = get_type_hints(function, include_extras=True)
        except Exception as error:  # names that only a type checker knows
            name, kinds = name_of(function), ", ".join(further)
            raise TypeError(
                f"{name} takes {kinds}, and its annotations can't be evaluated ({error!r}): import"
                " their names at run time"
            ) from error
        return {one: self._field(function, one, hints[one]) for one in further}

    def _field(self, function: Function, parameter: str, hint: Any) -> str:
        found = [name for name, its in self.fields.items() if its == hint]
        if len(found) == 1:
            return found[0]
        takes = f"{name_of(function)} takes {parameter}: {text_of(hint)}"
        if not self.name:
            raise TypeError(f"{takes}, and the service has no resources: Service(…, resources=…)")
        have = ", ".join(f"{name}: {text_of(its)}" for name, its in self.fields.items())
        number = "more than one field" if found else "no field"
        raise TypeError(f"{takes}, and {number} of {self.name} has this type; it has {have}")

    def mismatches(self, handlers: Iterable[Handler]) -> Iterator[str]:
        """Yield what is wrong with parameters that take resources."""
        for one in handlers:
            for function, arguments in one.functions.values():
                try:
                    self.taken_by(function, arguments)
                except TypeError as error:
                    yield f"consumer {one.consumer!r}: {error}"

    def bind(self, resources: object, function: Function, arguments: int) -> Function:
        """Return the function with the resources that it takes; itself if it takes none."""
        taken = self.taken_by(function, arguments)
        given = {parameter: getattr(resources, name) for parameter, name in taken.items()}
        return partial(function, **given) if given else function


def name_of(function: Function) -> str:
    """Return the function's name, as messages have it."""
    return getattr(function, "__name__", str(function))


def text_of(hint: Any) -> str:
    """Return an annotation, as messages have it."""
    return f"{hint.__module__}.{hint.__qualname__}" if isinstance(hint, type) else str(hint)
