"""The resources that a test gives in place of those that a service opens."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from onceward.handlers.checks import fits
from onceward.handlers.resources import Function, ResourceTypes, name_of, text_of
from onceward.service import Service

from .errors import HarnessMisused


class Resources:
    """What functions take. The kit opens nothing: they are looked up when a function is called."""

    def __init__(self, service: Service) -> None:
        self._types = ResourceTypes.of(service.resources)
        self._given: dict[str, Any] = {}
        self._misused: HarnessMisused | None = None

    def give(self, members: Mapping[str, Any]) -> None:
        """Let functions take these. Raises `HarnessMisused` for a name or a type that is wrong."""
        fields = self._types.fields
        for name, value in members.items():
            if name not in fields:
                have = ", ".join(fields) or "none"
                raise HarnessMisused(f"{name!r} is no resource of the service; it has: {have}")
            kind = value.__class__  # of a mock with `spec`, that class
            if not fits(kind, fields[name]):
                raise HarnessMisused(
                    f"the resource {name!r} is {text_of(fields[name])}, not {text_of(kind)}: derive"
                    " the class of a stand-in from that of the resource"
                )
        self._given |= members

    def bound(self, service: Service) -> Service:
        """Return the service whose functions take them."""
        if not self._types.name:
            return service
        handlers = service.handlers.changed(lambda one: one.bound(self.bind))
        return replace(service, handlers=handlers, resources=None)

    def bind(self, function: Function, arguments: int = 2) -> Function:
        """Return the function with the resources that it takes; itself if it takes none."""
        taken = self._types.taken_by(function, arguments) if self._types.name else {}
        return partial(self._call, function, taken) if taken else function

    def raise_misuse(self) -> None:
        """Raise `HarnessMisused` if a function was called without what it takes."""
        misused, self._misused = self._misused, None
        if misused is not None:
            raise misused

    def _call(self, function: Function, taken: Mapping[str, str], *arguments: Any) -> Any:
        if missing := [name for name in taken.values() if name not in self._given]:
            given = ", ".join(f"{name}=…" for name in missing)
            self._misused = HarnessMisused(
                f"{name_of(function)} takes resources, and tests open none: call"
                f" harness.with_resources({given}) before"
            )
            raise self._misused
        return function(*arguments, **{one: self._given[name] for one, name in taken.items()})
