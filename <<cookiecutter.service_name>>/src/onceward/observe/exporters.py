"""Exporters: the one place that sets up OpenTelemetry's SDK, which sends traces and metrics."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any
from uuid import uuid4

from opentelemetry import context as otel
from opentelemetry import metrics, trace
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider, sampling
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.semconv.attributes import service_attributes
from opentelemetry.util.types import Attributes

from onceward.redaction import redact_error

log = logging.getLogger(__name__)


def configure(
    *, service_name: str, otlp_endpoint: str | None, sample_ratio: float, release: str = ""
) -> Callable[[float], None]:
    """Set the process's providers, which OpenTelemetry allows once; return their shutdown.

    Metrics always go to `prometheus_client.REGISTRY`. `otlp_endpoint` is the base URL of an
    OTLP/HTTP receiver, which gets traces and metrics. Without it the service records no spans, and
    hands on the context that it receives. `release` is the version of the service, if it is named.

    The shutdown sends what is buffered, and blocks for at most as many seconds as it is given.
    """
    instance = Resource({service_attributes.SERVICE_INSTANCE_ID: str(uuid4())})
    names = {service_attributes.SERVICE_NAME: service_name}
    if release:
        names[service_attributes.SERVICE_VERSION] = release
    resource = instance.merge(Resource.create(names))
    sampler = sampling.ParentBased(_LinkedOrRatio(sample_ratio))
    tracing = TracerProvider(sampler, resource, shutdown_on_exit=False)
    readers: list[MetricReader] = [PrometheusMetricReader()]
    exemplars = AlwaysOffExemplarFilter() if otlp_endpoint is None else None  # nobody gets them
    if otlp_endpoint is not None:
        # Imported only here: protobuf and requests cost every start 0.3 s.
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        url = otlp_endpoint.rstrip("/")
        sending = Redacting(OTLPSpanExporter(f"{url}/v1/traces"))
        tracing.add_span_processor(BatchSpanProcessor(sending))
        trace.set_tracer_provider(tracing)
        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter(f"{url}/v1/metrics")))
    metering = MeterProvider(readers, resource, exemplars, shutdown_on_exit=False)
    metrics.set_meter_provider(metering)
    return partial(_shutdown, [tracing, metering])


def _shutdown(providers: Sequence[TracerProvider | MeterProvider], seconds: float) -> None:
    # In threads, because the SDK's own time-out is 30 s each, and fixed for spans.
    threads = [threading.Thread(target=each.shutdown, daemon=True) for each in providers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds / len(threads))
    if any(thread.is_alive() for thread in threads):
        log.warning("telemetry that was not sent in time is lost")


class Redacting(SpanExporter):
    """Exports spans without secrets: those of libraries may have URLs and errors."""

    def __init__(self, sender: SpanExporter) -> None:
        self._sender = sender

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans."""
        return self._sender.export([_redacted(span) for span in spans])

    def shutdown(self) -> None:
        """Shut the exporter down."""
        self._sender.shutdown()


def _redacted(span: ReadableSpan) -> ReadableSpan:
    found = copy(span)
    found._name = redact_error(span.name)
    found._attributes = _without_secrets(span.attributes)
    found._events = [
        Event(redact_error(one.name), _without_secrets(one.attributes), one.timestamp)
        for one in span.events
    ]
    why = span.status.description
    found._status = trace.Status(span.status.status_code, why and redact_error(why))
    return found


def _without_secrets(value: Any) -> Any:
    if isinstance(value, str):
        return redact_error(value)
    if isinstance(value, Mapping):
        return {name: _without_secrets(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_without_secrets(one) for one in value]
    return value


class _LinkedOrRatio(sampling.TraceIdRatioBased):
    """Also samples a root span that links to a sampled one: the relay's, which has no parent."""

    def should_sample(
        self,
        parent_context: otel.Context | None,
        trace_id: int,
        name: str,
        kind: trace.SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[trace.Link] | None = None,
        trace_state: trace.TraceState | None = None,
    ) -> sampling.SamplingResult:
        linked = any(link.context.trace_flags.sampled for link in links or ())
        decide = sampling.ALWAYS_ON.should_sample if linked else super().should_sample
        return decide(parent_context, trace_id, name, kind, attributes, links, trace_state)
