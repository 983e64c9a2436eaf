"""Metrics whose value is computed when they are collected, in any thread."""

from collections.abc import Callable, Iterable, Sequence
from time import monotonic

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from .buffer import flush

_meter = metrics.get_meter("pipeline")


class Computed:
    """A gauge or counter. `read` returns its value; None: there is nothing to report."""

    def __init__(self, name: str, unit: str, description: str, *, counts: bool = False) -> None:
        self.read: Callable[[], float | Sequence[Observation] | None] = lambda: None
        kind = _meter.create_observable_counter if counts else _meter.create_observable_gauge
        kind(name, [self.observe], unit, description)

    def observe(self, _: CallbackOptions) -> Iterable[Observation]:
        """Return what is reported now."""
        flush()  # so that what is collected is complete
        value = self.read()
        if isinstance(value, Sequence):
            return value
        return [] if value is None else [Observation(value)]


class OfOutbox(Computed):
    """One that is reported only while no other relay can have taken this process's shards.

    A relay that is cut off from PostgreSQL does not know what another one has published.
    """

    leased_until = 0.0
    """By the monotonic clock."""

    def observe(self, options: CallbackOptions) -> Iterable[Observation]:
        """Return what is reported now."""
        return super().observe(options) if monotonic() < OfOutbox.leased_until else []
