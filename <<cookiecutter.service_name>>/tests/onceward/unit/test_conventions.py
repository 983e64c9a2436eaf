"""Names of spans, metrics and attributes, held against OpenTelemetry's conventions as installed.

The constants of `opentelemetry-semantic-conventions` are the conventions here, and their docstrings
say of what is deprecated, and of each metric which instrument and unit it has.
"""

import ast
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opentelemetry import semconv, trace
from opentelemetry.semconv._incubating.attributes import (
    cloudevents_attributes,
    messaging_attributes,
)
from opentelemetry.semconv.attributes import db_attributes, error_attributes
from opentelemetry.semconv.schemas import Schemas

from onceward.observe import statements, traces

from .test_telemetry import SAMPLED, Spans, message, process, run
from tests.onceward import rooms

OURS = "pipeline."
"""What the conventions have no word for is in a namespace of our own."""
OBSERVE = Path(traces.__file__).parent
ENGINE = OBSERVE.parent
NOT_IN_THE_PACKAGE: dict[str, str] = {}
"""Names of the conventions that the package has no constant for, and why they are used: none is."""


class Name(NamedTuple):
    """A constant of the conventions."""

    is_metric: bool
    is_deprecated: bool
    instrument: str | None
    unit: str | None


def conventions() -> dict[str, Name]:
    """Return every name that the package has a constant for."""
    found: dict[str, Name] = {}
    # Files, and not packages: some of its folders are none.
    for path in sorted(Path(semconv.__path__[0]).rglob("*.py")):
        if path.parent.name not in ("attributes", "metrics"):
            continue
        for name, told in _constants(path.read_text()):
            found[name] = Name(
                path.parent.name == "metrics",
                "Deprecated:" in told,
                _told(told, "Instrument"),
                _told(told, "Unit"),
            )
    return found


def _constants(source: str) -> Iterator[tuple[str, str]]:
    """Yield the values of a module's constants, each with the docstring that follows."""
    body = ast.parse(source).body
    for one, following in pairwise([*body, ast.Pass()]):
        match one:
            case ast.AnnAssign(value=ast.Constant(value=str(name))):
                match following:
                    case ast.Expr(value=ast.Constant(value=str(told))):
                        yield name, told
                    case _:
                        yield name, ""


def _told(docstring: str, what: str) -> str | None:
    lines = docstring.splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith(f"{what}: ")), None)


CONVENTIONS = conventions()

METRICS = """
import json
from datetime import UTC, datetime
from time import monotonic
from opentelemetry import metrics as api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

reader = InMemoryMetricReader()
provider = MeterProvider([reader], shutdown_on_exit=False)
api.set_meter_provider(provider)
from onceward.observe import metrics, statements, traces

now = datetime.now(UTC)
metrics.processed("scans", "track", "applied", 5, "parcel-tracker")
metrics.batch_applied("scans", "parcel-tracker", 8, 0.03)
metrics.handled({("track", "parcel.scanned.v1"): 0.002})
metrics.published("routes", 4)
metrics.published("routes", 3, LookupError())
metrics.received("scans", "parcel-tracker", 9)
metrics.rolled_back("failed")
with traces.sending("routes", 1, 5, []):
    pass
with traces.sending("routes", 1, 5, []) as operation:
    operation.failed(LookupError())
with traces.polling("scans", "parcel-tracker"):
    pass
metrics.set_blocked("scans", 3, is_blocked=True)
metrics.observe_lag("scans", 3, 12, 61.5)
metrics.set_breaker("track", is_open=True)
metrics.observe_backlog("track", 12, 3, {"scans": 61.5}, has_calls=False)
metrics.backlog_applied("track", 59.0)
metrics.call_began("pay")
metrics.call_ended("pay", "failed", 0.5)
metrics.observe_ready(lambda: True)
metrics.partitions_assigned.set(4)
metrics.relay_shards.set(16)
metrics.lease_extended(until=monotonic() + 60)
metrics.observe_outbox(100, {"routes": now})
metrics.observe_partitions(now, now)
metrics.observe_retention(3, now)
metrics.observe_rejected(waiting=7, dead=2)
metrics.observe_throttles([("topic", "scans", 0.0, 60.0)])
metrics.retention_failures.add(1)
metrics.conflicts.add(1)
metrics.observe_log(lambda: 1)
metrics.upcasts.add(1, {metrics.TYPE: "parcel.scanned.v0"})
statements.executed("SELECT 1", 0.001, LookupError())
data = reader.get_metrics_data()
print(json.dumps([
    {
        "name": metric.name,
        "unit": metric.unit,
        "instrument": type(metric.data).__name__,
        "is_monotonic": getattr(metric.data, "is_monotonic", None),
        "attributes": sorted({name for one in metric.data.data_points for name in one.attributes}),
        "points": [dict(one.attributes) for one in metric.data.data_points],
    }
    for resource in data.resource_metrics
    for scope in resource.scope_metrics
    for metric in scope.metrics
]))
"""


@pytest.fixture(scope="module")
def metrics() -> list[dict[str, Any]]:
    """Return what each function of the engine's telemetry records, in a process of its own."""
    found: list[dict[str, Any]] = json.loads(run(METRICS).stdout)
    return found


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """Record one span of each kind, with everything that a span can have."""
    spans = Spans(monkeypatch)
    with pytest.raises(LookupError), process(message(SAMPLED, data=None)):
        raise LookupError
    with traces.sending("routes", 1, 5, [SAMPLED]):
        statements.Statement("SELECT $1", has_values=True).end(LookupError())
    return spans


def span_attributes(spans: Spans) -> set[str]:
    return {name for span in spans.all() for name in span.attributes or {}}


def is_known(name: str, *, is_metric: bool) -> bool:
    known = CONVENTIONS.get(name)
    return (
        name.startswith(OURS)
        or name in NOT_IN_THE_PACKAGE
        or (known is not None and known.is_metric is is_metric and not known.is_deprecated)
    )


def test_the_constants_are_found_and_tell_what_is_deprecated() -> None:
    assert CONVENTIONS["messaging.system"] == Name(False, False, None, None)
    assert CONVENTIONS["messaging.kafka.message.offset"].is_deprecated
    assert CONVENTIONS["db.client.operation.duration"] == Name(True, False, "histogram", "s")
    assert CONVENTIONS["messaging.publish.messages"].is_deprecated


def test_the_namespace_for_what_has_no_convention_is_ours() -> None:
    assert [name for name in CONVENTIONS if name.startswith(OURS)] == []


def test_names_without_constants_are_listed_only_while_no_constant_exists() -> None:
    assert [name for name in NOT_IN_THE_PACKAGE if name in CONVENTIONS] == []


BOUNDED = {
    "cloudevents.event_type",
    "db.query.summary",
    "db.system.name",
    "error.type",
    "messaging.consumer.group.name",
    "messaging.destination.name",
    "messaging.destination.partition.id",
    "messaging.operation.name",
    "messaging.operation.type",
    "messaging.system",
    "pipeline.consumer",
    "pipeline.kind",
    "pipeline.mode",
    "pipeline.outcome",
    "pipeline.reason",
    "pipeline.subject",
}
"""Of metrics: named by configuration or by code; no ids, no keys, no offsets."""


def test_the_attributes_of_spans_are_the_conventions(recorded: Spans) -> None:
    unknown = {name for name in span_attributes(recorded) if not is_known(name, is_metric=False)}
    assert unknown == set()


def test_spans_tell_the_schema_whose_names_they_have() -> None:
    tree = ast.parse(Path(traces.__file__).read_text())
    schemas = {one.attr for one in ast.walk(tree) if isinstance(one, ast.Attribute)}
    assert {name for name in schemas if name in Schemas.__members__} == {"V1_44_0"}


def test_a_span_is_named_by_its_operation_and_destination(recorded: Spans) -> None:
    for span in recorded.all():
        attributes = dict(span.attributes or {})
        if span.kind is trace.SpanKind.CLIENT:
            assert span.name == attributes["db.query.summary"]
            continue
        operation = attributes["messaging.operation.name"]
        assert span.name == f"{operation} {attributes['messaging.destination.name']}"
        assert attributes["messaging.operation.type"] in ("process", "send")
    assert {span.kind for span in recorded.all()} == {
        trace.SpanKind.CLIENT,
        trace.SpanKind.CONSUMER,
        trace.SpanKind.PRODUCER,
    }


def test_the_attributes_of_metrics_are_the_conventions(metrics: list[dict[str, Any]]) -> None:
    attributes = {name for metric in metrics for name in metric["attributes"]}
    assert {name for name in attributes if not is_known(name, is_metric=False)} == set()


def test_metrics_have_few_attributes_and_none_that_grows_without_bounds(
    metrics: list[dict[str, Any]],
) -> None:
    assert {name for metric in metrics for name in metric["attributes"]} == BOUNDED


OF_ALL = {"messaging.system", "messaging.operation.name", "messaging.destination.name"}
GROUP, TYPE = {"messaging.consumer.group.name"}, {"messaging.operation.type"}
REQUIRED = {
    ("messaging.client.operation.duration", "send"): OF_ALL | TYPE,
    ("messaging.client.operation.duration", "poll"): OF_ALL | TYPE | GROUP,
    ("messaging.client.sent.messages", "send"): OF_ALL,
    ("messaging.client.consumed.messages", "poll"): OF_ALL | GROUP,
    ("messaging.process.duration", "process"): OF_ALL | GROUP,
}
"""What the conventions (1.44, messaging metrics) require of a producer that sends and of a consumer
that polls and processes, with the conditions that hold here: topics are few, and a consumer has a
group. Which broker a message goes to (`server.address`) only the client knows.
"""


@pytest.mark.parametrize(("metric", "operation"), REQUIRED)
def test_what_the_conventions_require_of_producers_and_consumers_is_told(
    metrics: list[dict[str, Any]], metric: str, operation: str
) -> None:
    assert CONVENTIONS[metric].is_metric
    points = [
        set(point)
        for one in metrics
        if one["name"] == metric
        for point in one["points"]
        if point["messaging.operation.name"] == operation
    ]
    required = REQUIRED[metric, operation]
    assert required in points
    # And the error of what has failed, and nothing else.
    assert {name for point in points for name in point ^ required} <= {"error.type"}


@pytest.mark.parametrize(
    "metric", ["messaging.client.operation.duration", "messaging.client.sent.messages"]
)
def test_what_was_sent_in_vain_has_its_error(metrics: list[dict[str, Any]], metric: str) -> None:
    (errors,) = (
        [point["error.type"] for point in one["points"] if "error.type" in point]
        for one in metrics
        if one["name"] == metric
    )
    assert errors == ["LookupError"]


def test_what_the_conventions_require_of_spans_is_told(recorded: Spans) -> None:
    required = {
        trace.SpanKind.PRODUCER: OF_ALL | TYPE | {"messaging.batch.message_count"},
        trace.SpanKind.CONSUMER: OF_ALL | TYPE | GROUP | {"error.type"},
    }
    for span in recorded.all():
        assert required.get(span.kind, set()) <= set(span.attributes or {})


def test_the_names_of_metrics_are_the_conventions(metrics: list[dict[str, Any]]) -> None:
    names = {metric["name"] for metric in metrics}
    assert {name for name in names if not is_known(name, is_metric=True)} == set()


def test_a_metric_of_the_conventions_has_their_instrument_and_unit(
    metrics: list[dict[str, Any]],
) -> None:
    of_the_conventions = [metric for metric in metrics if not metric["name"].startswith(OURS)]
    assert of_the_conventions
    for metric in of_the_conventions:
        known = CONVENTIONS[metric["name"]]
        instrument = {"Histogram": "histogram", "Gauge": "gauge", "Sum": "counter"}
        assert instrument[metric["instrument"]] == known.instrument, metric
        assert metric["unit"] == known.unit, metric


INSTRUMENTS = """
import json
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider

provider = MeterProvider(shutdown_on_exit=False)
metrics.set_meter_provider(provider)
import onceward.observe.statements
(meter,) = provider._meters.values()
print(json.dumps([one.partition(",")[0] for one in meter._instrument_id_instrument]))
"""


def test_every_instrument_of_the_engine_is_among_those_looked_at(
    metrics: list[dict[str, Any]],
) -> None:
    assert sorted(json.loads(run(INSTRUMENTS).stdout)) == sorted(one["name"] for one in metrics)


def test_every_constant_that_the_engine_names_is_among_those_looked_at(
    recorded: Spans, metrics: list[dict[str, Any]]
) -> None:
    looked_at = span_attributes(recorded) | {
        name for metric in metrics for name in metric["attributes"]
    }
    modules = {
        "names": messaging_attributes,
        "cloudevents": cloudevents_attributes,
        "db_attributes": db_attributes,
        "error_attributes": error_attributes,
    }
    used: set[str] = set()
    for one in (
        one for path in OBSERVE.glob("*.py") for one in ast.walk(ast.parse(path.read_text()))
    ):
        match one:
            case ast.Attribute(value=ast.Name(id=module), attr=attr) if module in modules:
                value = getattr(modules[module], attr)
                if isinstance(value, str):
                    used.add(value)
    assert used
    assert used <= looked_at


def test_one_module_alone_needs_the_sdk() -> None:
    """The others know the API, and work without, but the test kit, which reads metrics."""
    needing = {
        path.relative_to(ENGINE).name
        for path in rooms.files()
        if ENGINE / "testing" not in path.parents
        for one in ast.walk(ast.parse(path.read_text()))
        if isinstance(one, ast.ImportFrom)
        if re.match(r"opentelemetry\.(sdk|exporter|instrumentation)\b", one.module or "")
    }
    assert needing == {"exporters.py"}


def test_no_module_writes_a_name_of_the_conventions_by_hand() -> None:
    namespaces = {"cloudevents", "db", "error", "messaging", "server", "service"}
    by_hand = {
        (path.name, one.value)
        for path in rooms.files()
        for one in ast.walk(ast.parse(path.read_text()))
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
        if one.value.partition(".")[0] in namespaces and one.value in CONVENTIONS
    }
    assert by_hand == set()
