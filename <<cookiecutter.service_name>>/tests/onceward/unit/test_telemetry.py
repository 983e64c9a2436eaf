import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as otel
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes as names
from opentelemetry.semconv._incubating.metrics import messaging_metrics as metric_names
from opentelemetry.semconv.attributes import error_attributes, service_attributes
from prometheus_client.parser import text_string_to_metric_families

from onceward.events.message import Message
from onceward.observe import exporters, metrics, statements, traces

from tests.servers.waiting import PATIENCE

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{SPAN}-01"
UNSAMPLED = f"00-{TRACE}-{SPAN}-00"


def message(traceparent: str | None = None, **fields: Any) -> Message:
    plain = Message(
        topic="scans",
        partition=3,
        offset=42,
        timestamp=0,
        key=b"parcel-1",
        source="/gate",
        id="m-1",
        type="parcel.scanned.v1",
        time=None,
        subject=None,
        sequence=None,
        dataschema=None,
        content_type=None,
        data=b"{}",
        traceparent=traceparent,
        tracestate=None,
        baggage=None,
        hash=b"",
    )
    return plain._replace(**fields)


def process(message: Message) -> Any:
    return traces.ProcessSpans("parcel-tracker").of(message, "track")


class Spans:
    """What the SDK has recorded; `ratio` is the share of new traces that it records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._exporter = InMemorySpanExporter()
        self.record(ratio=1)

    def record(self, *, ratio: float) -> None:
        provider = TracerProvider(
            sampling.ParentBased(exporters._LinkedOrRatio(ratio)), shutdown_on_exit=False
        )
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._monkeypatch.setattr(traces, "_tracer", provider.get_tracer("test"))

    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def one(self) -> ReadableSpan:
        (span,) = self.all()
        return span


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    return Spans(monkeypatch)


def trace_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return trace.format_trace_id(span.context.trace_id)


def test_a_recorded_message_gets_a_consumer_span_with_the_conventions_names(spans: Spans) -> None:
    with process(message(SAMPLED)):
        pass
    span = spans.one()
    assert span.name == "process scans"
    assert span.kind is trace.SpanKind.CONSUMER
    assert dict(span.attributes or {}) == {
        names.MESSAGING_SYSTEM: names.MessagingSystemValues.KAFKA.value,
        names.MESSAGING_OPERATION_NAME: "process",
        names.MESSAGING_OPERATION_TYPE: names.MessagingOperationTypeValues.PROCESS.value,
        names.MESSAGING_DESTINATION_NAME: "scans",
        names.MESSAGING_DESTINATION_PARTITION_ID: "3",
        names.MESSAGING_KAFKA_OFFSET: 42,
        names.MESSAGING_KAFKA_MESSAGE_KEY: "parcel-1",
        names.MESSAGING_MESSAGE_ID: "m-1",
        names.MESSAGING_CONSUMER_GROUP_NAME: "parcel-tracker",
        metrics.CONSUMER: "track",
        metrics.TYPE: "parcel.scanned.v1",
    }


def test_a_recorded_message_continues_the_trace_of_its_sender(spans: Spans) -> None:
    with process(message(SAMPLED, tracestate="vendor=1", baggage="tenant=acme")):
        traceparent, tracestate, carried = traces.creation_context()
    span = spans.one()
    assert trace_of(span) == TRACE
    assert span.parent is not None
    assert trace.format_span_id(span.parent.span_id) == SPAN
    assert span.context is not None
    assert traceparent == f"00-{TRACE}-{trace.format_span_id(span.context.span_id)}-01"
    assert (tracestate, carried) == ("vendor=1", "tenant=acme")


@pytest.mark.parametrize("tracestate", [None, "vendor=1"])
@pytest.mark.parametrize("baggage", [None, "tenant=acme"])
def test_an_unsampled_message_makes_no_span_and_passes_its_context_on(
    spans: Spans, tracestate: str | None, baggage: str | None
) -> None:
    with process(message(UNSAMPLED, tracestate=tracestate, baggage=baggage)):
        assert not trace.get_current_span().is_recording()
        assert traces.creation_context() == (UNSAMPLED, tracestate, baggage)
    assert spans.all() == ()


def test_changes_of_a_handler_to_an_unsampled_context_are_passed_on(spans: Spans) -> None:
    with process(message(UNSAMPLED)):
        token = otel.attach(baggage.set_baggage("tenant", "acme"))
        assert traces.creation_context() == (UNSAMPLED, None, "tenant=acme")
        otel.detach(token)
        assert traces.creation_context() == (UNSAMPLED, None, None)
        with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(int(TRACE, 16), 7, False))):
            assert traces.creation_context() == (f"00-{TRACE}-{7:016x}-00", None, None)


@pytest.mark.parametrize("traceparent", [SAMPLED, UNSAMPLED])
def test_without_an_sdk_the_context_still_travels(traceparent: str) -> None:
    with process(message(traceparent)):
        assert traces.creation_context() == (traceparent, None, None)
    with process(message()):
        assert traces.creation_context() == (None, None, None)


def test_a_message_without_context_starts_a_trace_of_its_own(spans: Spans) -> None:
    surrounding = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=False))
    with trace.use_span(surrounding), process(message()):
        traceparent, _, _ = traces.creation_context()
    span = spans.one()
    assert span.parent is None
    assert traceparent is not None
    assert traceparent[3:35] == trace_of(span)


def test_a_new_unsampled_trace_still_has_an_id_for_later_services(spans: Spans) -> None:
    spans.record(ratio=0)
    with process(message()):
        traceparent, _, _ = traces.creation_context()
    assert spans.all() == ()
    assert traceparent is not None
    assert int(traceparent[-2:], 16) & trace.TraceFlags.SAMPLED == 0


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "nonsense",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-extra",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0\u0661",
    ],
)
def test_an_invalid_traceparent_counts_as_absent(spans: Spans, traceparent: str) -> None:
    with process(message(traceparent)):
        pass
    assert spans.one().parent is None


def test_the_known_part_of_a_future_traceparent_version_is_read(spans: Spans) -> None:
    with process(message(f"cc-{TRACE}-{SPAN}-01-what-the-future-brings")):
        pass
    assert trace_of(spans.one()) == TRACE


def test_baggage_travels_without_a_trace(spans: Spans) -> None:
    with process(message(baggage="tenant=acme")):
        assert baggage.get_baggage("tenant") == "acme"
        assert traces.creation_context()[2] == "tenant=acme"
    assert traces.creation_context() == (None, None, None)


def test_an_error_marks_the_span_with_its_type_and_without_its_text(spans: Spans) -> None:
    with pytest.raises(LookupError), process(message(SAMPLED)):
        raise LookupError("card 4111 1111 1111 1111")
    span = spans.one()
    assert span.status.status_code is trace.StatusCode.ERROR
    assert (span.attributes or {})[error_attributes.ERROR_TYPE] == "LookupError"
    assert "4111 1111" not in span.to_json()


def test_a_cancelled_attempt_ends_its_span_and_is_no_error(spans: Spans) -> None:
    with pytest.raises(asyncio.CancelledError), process(message(SAMPLED)):
        raise asyncio.CancelledError
    assert spans.one().status.status_code is trace.StatusCode.UNSET


def test_keys_that_are_absent_or_not_text_are_left_out(spans: Spans) -> None:
    for key in (b"\xff\xfe", None):
        with process(message(SAMPLED, key=key)):
            pass
    for span in spans.all():
        assert names.MESSAGING_KAFKA_MESSAGE_KEY not in (span.attributes or {})


def test_a_tombstone_is_marked(spans: Spans) -> None:
    with process(message(SAMPLED, data=None)):
        pass
    assert (spans.one().attributes or {})[names.MESSAGING_KAFKA_MESSAGE_TOMBSTONE] is True


def test_messages_that_are_handled_at_once_keep_their_traces_apart() -> None:
    async def handle(traceparent: str, both_inside: asyncio.Barrier) -> None:
        with process(message(traceparent)):
            await both_inside.wait()
            assert traces.creation_context()[0] == traceparent

    async def both() -> None:
        barrier = asyncio.Barrier(2)
        other = UNSAMPLED.replace(TRACE, "1" * 32)
        await asyncio.gather(handle(UNSAMPLED, barrier), handle(other, barrier))

    asyncio.run(both())


def test_sending_links_to_the_recorded_traces_of_the_batch(spans: Spans) -> None:
    spans.record(ratio=0)
    other = SAMPLED.replace(SPAN, "00f067aa0ba902b7")
    with traces.sending("routes", 1, 5, [None, SAMPLED, UNSAMPLED, SAMPLED, other]):
        pass
    span = spans.one()
    assert span.name == "send routes"
    assert span.kind is trace.SpanKind.PRODUCER
    assert span.parent is None
    assert [trace.format_span_id(link.context.span_id) for link in span.links] == [
        SPAN,
        other[36:52],
    ]
    assert dict(span.attributes or {}) == {
        names.MESSAGING_SYSTEM: names.MessagingSystemValues.KAFKA.value,
        names.MESSAGING_OPERATION_NAME: "send",
        names.MESSAGING_OPERATION_TYPE: names.MessagingOperationTypeValues.SEND.value,
        names.MESSAGING_DESTINATION_NAME: "routes",
        names.MESSAGING_DESTINATION_PARTITION_ID: "1",
        names.MESSAGING_BATCH_MESSAGE_COUNT: 5,
    }


def test_a_handled_refusal_is_recorded_as_the_error_of_its_sending(spans: Spans) -> None:
    with traces.sending("routes", 1, 5, [SAMPLED]) as operation:
        operation.failed(LookupError("4111 1111"))
    span = spans.one()
    assert span.status.status_code is trace.StatusCode.ERROR
    assert (span.attributes or {})[error_attributes.ERROR_TYPE] == "LookupError"
    assert "4111 1111" not in span.to_json()


@pytest.mark.parametrize("traceparents", [[], [None], [UNSAMPLED, None], ["nonsense1"]])
def test_sending_what_is_not_recorded_makes_no_span(
    spans: Spans, traceparents: list[str | None]
) -> None:
    with traces.sending("routes", None, len(traceparents), traceparents):
        pass
    assert spans.all() == ()


def test_the_links_of_a_large_batch_are_bounded(spans: Spans) -> None:
    many = [f"00-{TRACE}-{number:016x}-01" for number in range(1, 500)]
    with traces.sending("routes", None, len(many), many):
        pass
    assert len(spans.one().links) == 128
    assert spans.one().dropped_links == 0


# What follows runs in processes of its own: providers are set once in the life of a process.


class Collector:
    """An OTLP receiver that keeps what it gets, or never answers."""

    def __init__(self) -> None:
        self.received: list[tuple[str, bytes]] = []
        self.silent_until = threading.Event()
        self.silent_until.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.silent_until.wait(2 * PATIENCE)
                collector.received.append((self.path, body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.silent_until.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        env=os.environ | {"PYTHONPATH": str(Path(traces.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )


METRICS = """
from time import monotonic
from prometheus_client import generate_latest
from onceward.observe import exporters, metrics, statements, traces

shutdown = exporters.configure(service_name="parcel-tracker", otlp_endpoint=None, sample_ratio=1)
metrics.processed("scans", "track", "applied", 5, "parcel-tracker")
metrics.processed("scans", "track", "applied", 2, "parcel-tracker")
metrics.processed("scans", "track", "duplicate", 1, "parcel-tracker")
metrics.batch_applied("scans", "parcel-tracker", 8, 0.03)
metrics.handled({("track", "parcel.scanned.v1"): 0.002, ("bill", "parcel.scanned.v1"): 3.0})
metrics.published("routes", 4)
metrics.published("routes", 3, LookupError())
metrics.received("scans", "parcel-tracker", 9)
metrics.set_blocked("scans", 3, is_blocked=True)
metrics.set_blocked("scans", 4, is_blocked=True)
metrics.set_blocked("scans", 4, is_blocked=False)
metrics.observe_lag("scans", 3, 12, 61.5)
metrics.set_breaker("track", is_open=True)
metrics.set_breaker("bill", is_open=True)
metrics.set_breaker("bill", is_open=False)
metrics.observe_backlog("track", 12, 3, {"scans": 61.5}, has_calls=False)
metrics.backlog_applied("track", 59.0)
metrics.call_began("pay")
metrics.call_ended("pay", "failed", 0.5)
metrics.relay_shards.set(16)
metrics.lease_extended(until=monotonic() + 60)
metrics.observe_outbox(100, {})
metrics.observe_rejected(waiting=7, dead=2)
print(generate_latest().decode())
shutdown(5)
print("after shutdown:", "pipeline_messages" in generate_latest().decode())
"""


def prometheus(name: str) -> str:
    return name.replace(".", "_")


def samples(text: str) -> dict[str, float]:
    """Return Prometheus samples by name and labels, without those of the scope."""
    found = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            shown = sorted(
                f"{key}={label}"
                for key, label in labels.items()
                if not key.startswith("otel_scope")
            )
            found[" ".join([name, *shown])] = value
    return found


def test_metrics_have_the_conventions_names_and_bounded_labels() -> None:
    text, _, after = run(METRICS).stdout.partition("after shutdown:")
    found = samples(text)
    scans = "messaging_destination_name=scans"
    group = "messaging_consumer_group_name=parcel-tracker"
    labels = f"{group} {scans} pipeline_consumer=track"
    assert found[f"pipeline_messages_total {labels} pipeline_outcome=applied"] == 7
    assert found[f"pipeline_messages_total {labels} pipeline_outcome=duplicate"] == 1
    scan = f"{group} {scans} messaging_operation_name=process messaging_system=kafka"
    duration = f"{prometheus(metric_names.MESSAGING_PROCESS_DURATION)}_seconds"
    assert found[f"{duration}_sum {scan}"] == pytest.approx(0.03)
    assert found[f"{duration}_bucket le=0.025 {scan}"] == 0
    assert found[f"{duration}_bucket le=0.05 {scan}"] == 1
    assert found[f"pipeline_batch_size_bucket le=5.0 {scan}"] == 0
    assert found[f"pipeline_batch_size_bucket le=10.0 {scan}"] == 1
    handler = "pipeline_handler_duration_seconds_bucket cloudevents_event_type=parcel.scanned.v1"
    assert found[f"{handler} le=0.001 pipeline_consumer=track"] == 0
    assert found[f"{handler} le=0.005 pipeline_consumer=track"] == 1
    assert found[f"{handler} le=2.5 pipeline_consumer=bill"] == 0
    assert found[f"{handler} le=5.0 pipeline_consumer=bill"] == 1
    sent = f"{prometheus(metric_names.MESSAGING_CLIENT_SENT_MESSAGES)}_total"
    routes = "messaging_destination_name=routes messaging_operation_name=send"
    assert found[f"{sent} error_type= {routes} messaging_system=kafka"] == 4
    assert found[f"{sent} error_type=LookupError {routes} messaging_system=kafka"] == 3
    consumed = f"{prometheus(metric_names.MESSAGING_CLIENT_CONSUMED_MESSAGES)}_total"
    polled = f"{group} {scans} messaging_operation_name=poll messaging_system=kafka"
    assert found[f"{consumed} {polled}"] == 9
    blocked = "pipeline_partitions_blocked messaging_destination_name=scans"
    assert found[f"{blocked} messaging_destination_partition_id=3"] == 1
    assert found[f"{blocked} messaging_destination_partition_id=4"] == 0
    place = "messaging_destination_name=scans messaging_destination_partition_id=3"
    assert found[f"pipeline_consumer_lag {place}"] == 12
    assert found[f"pipeline_consumer_delay_seconds {place}"] == 61.5
    assert found["pipeline_breaker_open pipeline_consumer=track"] == 1
    assert found["pipeline_breaker_open pipeline_consumer=bill"] == 0
    track = "pipeline_consumer=track pipeline_mode=message"
    assert found[f"pipeline_backlog_waiting {track}"] == 12
    assert found[f"pipeline_backlog_dead {track}"] == 3
    assert found[f"pipeline_backlog_age_seconds {scans} {track}"] == 61.5
    waited = "pipeline_backlog_duration_seconds_bucket"
    assert found[f"{waited} le=10.0 pipeline_consumer=track"] == 0
    assert found[f"{waited} le=60.0 pipeline_consumer=track"] == 1
    assert found["pipeline_calls_under_way pipeline_consumer=pay"] == 0
    call = "pipeline_consumer=pay pipeline_outcome=failed"
    assert found[f"pipeline_call_duration_seconds_count {call}"] == 1
    assert found["pipeline_relay_shards"] == 16
    assert found["pipeline_outbox_lag_events"] == 100
    assert found["pipeline_outbox_lag_duration_seconds"] == 0
    assert found["pipeline_outbox_rejected pipeline_outcome=waiting"] == 7
    assert found["pipeline_outbox_rejected pipeline_outcome=dead"] == 2
    assert any("service_name=parcel-tracker" in name for name in found if "target_info" in name)
    assert after.strip() == "False"


LAG = """
from datetime import UTC, datetime, timedelta
from time import monotonic
from prometheus_client import generate_latest
from onceward.observe import exporters, metrics, statements, traces

shutdown = exporters.configure(service_name="parcel-tracker", otlp_endpoint=None, sample_ratio=1)
print(generate_latest().decode() + "===")
metrics.lease_extended(until=monotonic() + 60)
metrics.observe_outbox(100, {"routes": datetime.now(UTC) - timedelta(hours=1)})
metrics.observe_rejected(waiting=7, dead=2)
print(generate_latest().decode() + "===")
print(generate_latest().decode() + "===")
metrics.lease_extended(until=monotonic())
print(generate_latest().decode() + "===")
metrics.lease_extended(until=monotonic() + 60)
metrics.observe_outbox(1, {"routes": datetime.now(UTC) + timedelta(hours=1)})
print(generate_latest().decode() + "===")
metrics.forget_outbox()
print(generate_latest().decode())
shutdown(5)
"""


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("select 1", "SELECT"),
        ("\n  -- why\n /* and\n how */ Insert INTO t VALUES (1)", "INSERT"),
        ("BEGIN;", "BEGIN"),
        ("SELECTED", "OTHER"),
        ("VACUUM t", "OTHER"),
        ("/* select", "OTHER"),
        ("", "OTHER"),
    ],
)
def test_a_statement_is_named_by_its_first_word(spans: Spans, text: str, word: str) -> None:
    with process(message(SAMPLED)):
        statements.Statement(text).end()
    statement, _ = spans.all()
    assert statement.name == word


def test_a_statement_outside_of_a_recorded_span_is_none(spans: Spans) -> None:
    statements.Statement("SELECT 1").end()
    with process(message(UNSAMPLED)):
        statements.Statement("SELECT 1").end()
    assert spans.all() == ()


def test_the_age_of_what_waits_grows_while_the_relay_looks_at_nothing() -> None:
    scrapes = [samples(text) for text in run(LAG).stdout.split("===")]
    before, first, later, over, ahead, forgotten = (
        scrape.get("pipeline_outbox_lag_duration_seconds") for scrape in scrapes
    )
    assert before is None, "who relays nothing knows of no lag"
    assert first is not None
    assert later is not None
    assert 3_600 < first < later < 3_700
    assert over is None, "another one may have sent it"
    assert ahead == 0, "the database's clock goes before ours"
    assert forgotten is None


def test_what_waits_is_told_of_only_as_long_as_the_lease_lasts() -> None:
    names = [
        "pipeline_outbox_delay_seconds messaging_destination_name=routes",
        "pipeline_outbox_lag_duration_seconds",
        "pipeline_outbox_lag_events",
        "pipeline_outbox_rejected pipeline_outcome=dead",
        "pipeline_outbox_rejected pipeline_outcome=waiting",
    ]
    scrapes = [samples(text) for text in run(LAG).stdout.split("===")]
    told = [[name for name in names if name in scrape] for scrape in scrapes]
    assert told == [[], names, names, [], names, []]


DELAYS = """
from datetime import UTC, datetime, timedelta
from time import monotonic
from prometheus_client import generate_latest
from onceward.observe import exporters, metrics, statements, traces

shutdown = exporters.configure(service_name="parcel-tracker", otlp_endpoint=None, sample_ratio=1)
metrics.lease_extended(until=monotonic() + 60)
ago = lambda hours: datetime.now(UTC) - timedelta(hours=hours)
metrics.observe_outbox(9, {"routes": ago(2), "scans": ago(1)}, is_all=False)
print(generate_latest().decode() + "===")
metrics.observe_outbox(5, {"scans": ago(1)}, is_all=False)
print(generate_latest().decode() + "===")
metrics.observe_outbox(1, {"scans": ago(1)})
print(generate_latest().decode() + "===")
metrics.observe_outbox(0, {})
print(generate_latest().decode())
shutdown(5)
"""


def test_the_delay_of_a_topic_is_reported_if_it_is_known() -> None:
    topics = [
        f"pipeline_outbox_delay_seconds messaging_destination_name={one}"
        for one in ("routes", "scans")
    ]
    scrapes = [samples(text) for text in run(DELAYS).stdout.split("===")]
    delays = [[scrape.get(topic) for topic in topics] for scrape in scrapes]
    hours = [[None if one is None else round(one / 3_600, 1) for one in each] for each in delays]
    assert hours == [[2, 1], [None, 1], [0, 1], [0, 0]]
    lags = [scrape["pipeline_outbox_lag_duration_seconds"] for scrape in scrapes]
    assert [round(one / 3_600, 1) for one in lags] == [2, 1, 1, 0]


EXPORT = """
import sys
from onceward.observe import exporters, metrics, statements, traces

shutdown = exporters.configure(
    service_name="parcel-tracker", otlp_endpoint=sys.argv[1], sample_ratio=1
)
with traces.sending("routes", 0, 1, [sys.argv[2]]):
    pass
metrics.published("routes", 1)
shutdown(5)
"""


def test_spans_and_metrics_reach_the_receiver_before_the_process_ends(collector: Collector) -> None:
    run(EXPORT, f"{collector.url}/", SAMPLED)
    received = dict(collector.received)
    assert set(received) == {"/v1/traces", "/v1/metrics"}
    (resource_spans,) = ExportTraceServiceRequest.FromString(received["/v1/traces"]).resource_spans
    resource = {each.key: each.value.string_value for each in resource_spans.resource.attributes}
    assert resource[service_attributes.SERVICE_NAME] == "parcel-tracker"
    assert resource[service_attributes.SERVICE_INSTANCE_ID]
    (scope_spans,) = resource_spans.scope_spans
    assert [span.name for span in scope_spans.spans] == ["send routes"]
    assert b"messaging.client.sent.messages" in received["/v1/metrics"]


SAMPLING = """
import sys
from onceward.observe import exporters, metrics, statements, traces

nobody, ratio = "http://127.0.0.1:9", float(sys.argv[1])
exporters.configure(service_name="x", otlp_endpoint=nobody, sample_ratio=ratio)
print(traces._tracer.start_span("the first of a trace").is_recording())
"""


@pytest.mark.parametrize(("ratio", "is_recorded"), [("0", "False"), ("1", "True")])
def test_of_traces_that_begin_here_as_many_are_recorded_as_is_chosen(
    ratio: str, is_recorded: str
) -> None:
    assert run(SAMPLING, ratio).stdout.strip() == is_recorded


IMPATIENT = """
import sys
from onceward.observe import exporters, metrics, statements, traces

shutdown = exporters.configure(service_name="x", otlp_endpoint=sys.argv[1], sample_ratio=1)
with traces.sending("routes", 0, 1, [sys.argv[2]]):
    pass
shutdown(0.2)
"""


def test_an_unresponsive_receiver_delays_the_shutdown_for_a_bounded_time(
    collector: Collector,
) -> None:
    collector.silent_until.clear()  # until the test ends
    ended = run(IMPATIENT, collector.url, SAMPLED)
    assert collector.received == []
    assert "not sent in time" in ended.stderr


PARTITIONS = """
from datetime import UTC, datetime, timedelta
from prometheus_client import generate_latest
from onceward.observe import exporters, metrics, statements, traces

shutdown = exporters.configure(service_name="parcel-tracker", otlp_endpoint=None, sample_ratio=1)
now = datetime.now(UTC)
metrics.observe_partitions(now + timedelta(hours=1), None)
print(generate_latest().decode() + "===")
metrics.observe_partitions(now - timedelta(hours=1), now - timedelta(days=8))
metrics.observe_retention(3, now - timedelta(hours=7))
metrics.conflicts.add(1)
print(generate_latest().decode())
shutdown(5)
"""


def test_metrics_report_how_long_partitions_last_and_the_inbox_coverage() -> None:
    first, later = (samples(text) for text in run(PARTITIONS).stdout.split("==="))
    assert 3_500 < first["pipeline_outbox_ahead_seconds"] < 3_600
    assert "pipeline_inbox_coverage_seconds" not in first, "all is remembered"
    assert -3_700 < later["pipeline_outbox_ahead_seconds"] < -3_600
    assert 8 * 86_400 < later["pipeline_inbox_coverage_seconds"] < 8 * 86_400 + 100
    assert later["pipeline_retention_held"] == 3
    assert 7 * 3_600 <= later["pipeline_retention_age_seconds"] < 7 * 3_600 + 100
    assert later["pipeline_conflicts_total"] == 1
