"""What a step has logged and counted."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from opentelemetry import metrics
from opentelemetry.sdk.metrics import Counter, Histogram, MeterProvider, UpDownCounter
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader, Sum

from onceward.servers.guard import watch_coroutines
from onceward.service import Service
from onceward.settings import Settings

_readers: list[InMemoryMetricReader] = []
"""At most one, of the whole process, because OpenTelemetry has one provider."""


class Increment(NamedTuple):
    """By how much a counter has grown in a step, for one set of attributes."""

    name: str
    """Such as `pipeline.messages`, as the service's metrics have it."""
    attributes: Mapping[str, object]
    value: float


class Observed(NamedTuple):
    """What was logged and counted."""

    logs: list[logging.LogRecord]
    metrics: list[Increment]


class _Collecting(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)


@contextmanager
def observing(service: Service, settings: Settings) -> Iterator[Observed]:
    """Collect what the block logs and counts; the counts are there when it has ended.

    The loggers of the engine and of the service have the level INFO meanwhile, unless a test has
    given them one. Warnings of all others are collected, too.
    """
    reader, observed = _reader(), Observed([], [])
    handler = _Collecting(observed.logs)
    reader.get_metrics_data()  # drops what was counted before
    root = logging.getLogger()
    kinds = (kind.__module__.partition(".")[0] for kind in service.workers)
    names = {"onceward", *kinds}
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        watch_coroutines()
        for name in (*names, *service.loggers(settings)):
            logger = logging.getLogger(name)
            if logger.level == logging.NOTSET:
                logger.setLevel(logging.INFO)
                stack.callback(logger.setLevel, logging.NOTSET)
        root.addHandler(handler)
        stack.callback(root.removeHandler, handler)
        yield observed
    observed.metrics.extend(_increments(reader))


def _reader() -> InMemoryMetricReader:
    if not _readers:
        delta = AggregationTemporality.DELTA
        reader = InMemoryMetricReader({Counter: delta, UpDownCounter: delta, Histogram: delta})
        provider = metrics.get_meter_provider()
        if isinstance(provider, MeterProvider):
            provider.add_metric_reader(reader)
        else:
            metrics.set_meter_provider(MeterProvider([reader], shutdown_on_exit=False))
        _readers.append(reader)
    return _readers[0]


def _increments(reader: InMemoryMetricReader) -> Iterator[Increment]:
    found = reader.get_metrics_data()
    for resource in found.resource_metrics if found else ():
        for scope in resource.scope_metrics:
            for one in scope.metrics:
                # Observable counters do not begin at 0 in a step.
                data = one.data
                if isinstance(data, Sum) and data.aggregation_temporality == 1:
                    for point in data.data_points:
                        if point.value:
                            yield Increment(one.name, dict(point.attributes or {}), point.value)
