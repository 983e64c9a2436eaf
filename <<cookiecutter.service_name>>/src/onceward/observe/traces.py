"""Traces: the spans of messages, and the trace context that travels from message to event.

Context is propagated without the SDK, too, which `exporters` sets up. Names are the messaging
conventions'.
"""

import os
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from itertools import islice
from time import perf_counter
from typing import Self

from opentelemetry import baggage, trace
from opentelemetry import context as otel
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.semconv._incubating.attributes import messaging_attributes as names
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from onceward.events.message import Message

from . import metrics
from .metrics import CONSUMER, PROCESS, RECEIVE, SEND, TYPE, Attributes

# Instrumentations of libraries, which are loaded later, use deprecated names by default.
os.environ.setdefault("OTEL_SEMCONV_STABILITY_OPT_IN", "http")

TraceHeaders = tuple[str | None, str | None, str | None]
"""`traceparent`, `tracestate` and `baggage`."""

_MAX_LINKS = 128
"""The SDK keeps no more links of a span."""
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_TRACE_ID = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-")
_RECORDED = frozenset("13579bdf")
"""Last digits of a `traceparent` whose trace is recorded."""
_FLAGS = [trace.TraceFlags(flags) for flags in range(256)]
_TRACE_CONTEXT = TraceContextTextMapPropagator()
_BAGGAGE = W3CBaggagePropagator()
_NO_PARENT = otel.Context()

# A proxy, whose spans are recorded when a provider is set.
_tracer = trace.get_tracer("pipeline", schema_url=Schemas.V1_44_0.value)


def start_span(name: str, kind: trace.SpanKind, attributes: Attributes) -> trace.Span:
    """Return a new span below the current one."""
    return _tracer.start_span(name, None, kind, attributes)


class Current:
    """A context that is current inside `with`, where its span ends.

    A generator-based context manager costs 1 µs more for each message.
    """

    __slots__ = ("_span", "_token", "context")

    def __init__(self, context: otel.Context, span: trace.Span = trace.INVALID_SPAN) -> None:
        self.context = context
        self._span = span

    def __enter__(self) -> Self:
        self._token = otel.attach(self.context)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        otel.detach(self._token)
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """End the span, with the error if there is one."""
        if isinstance(error, Exception):
            # Without its text, which may quote a payload: the log has it, with this trace's id.
            self._span.set_attribute(error_attributes.ERROR_TYPE, type(error).__qualname__)
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()


class ProcessSpans:
    """Makes the spans `process <topic>` of the messages of a transaction."""

    def __init__(self, group: str) -> None:
        self._group = group
        # Once for all messages: the API reads the environment each time.
        self._is_off = _is_off()

    def of(self, message: Message, consumer: str, stored: str | None = None) -> Current:
        """Return the message's trace context, with a new span in it if the trace is recorded.

        If its sender does not record the trace no span is made: the sender's context is current,
        and what the handler publishes still belongs to the trace.

        `stored` is the `traceparent` of the message's first attempt, if this is another one: the
        span links to it, and is its child if the sender has begun no trace.
        """
        sender, parent = _sender(message)
        links = None
        if stored is not None and stored != message.traceparent and (first := _parse(stored)):
            links = [trace.Link(first)]
            if sender is trace.INVALID_SPAN:
                sender = trace.NonRecordingSpan(first)
                parent = trace.set_span_in_context(sender, parent)
        if parent is _NO_PARENT and self._is_off:
            return Current(parent, sender)
        if sender is not trace.INVALID_SPAN and not _is_recorded(sender):
            return Current(parent, sender)
        name, attributes = _process(message.topic, message.partition, consumer, self._group)
        span = _tracer.start_span(name, parent, trace.SpanKind.CONSUMER, attributes, links)
        if span.is_recording():
            span.set_attributes(_attributes_of(message))
        return Current(trace.set_span_in_context(span, parent), span)


def _is_off() -> bool:
    """Whether the SDK is not set up, so that no trace can begin in this process."""
    return isinstance(_tracer, trace.ProxyTracer) and isinstance(
        trace.get_tracer_provider(), trace.ProxyTracerProvider
    )


@lru_cache(maxsize=1_024)
def _process(topic: str, partition: int, consumer: str, group: str) -> tuple[str, Attributes]:
    """Return the name of a span, and the attributes that a sampler can decide by."""
    return f"{PROCESS} {topic}", {
        **metrics.operation(PROCESS, topic),
        names.MESSAGING_OPERATION_TYPE: PROCESS,
        names.MESSAGING_CONSUMER_GROUP_NAME: group,
        CONSUMER: consumer,
        names.MESSAGING_DESTINATION_PARTITION_ID: str(partition),
    }


def _attributes_of(message: Message) -> Attributes:
    attributes: Attributes = {
        names.MESSAGING_KAFKA_OFFSET: message.offset,
        names.MESSAGING_MESSAGE_ID: message.id,
        TYPE: message.type,
    }
    if message.data is None:
        attributes[names.MESSAGING_KAFKA_MESSAGE_TOMBSTONE] = True
    if message.key is not None:
        with suppress(UnicodeDecodeError):
            attributes[names.MESSAGING_KAFKA_MESSAGE_KEY] = message.key.decode()
    return attributes


class Operation(Current):
    """An operation of a Kafka client, timed from its creation to the end of `with`."""

    __slots__ = ("_attributes", "_begun", "_error")

    def __init__(self, attributes: Attributes, span: trace.Span = trace.INVALID_SPAN) -> None:
        super().__init__(trace.set_span_in_context(span, _NO_PARENT), span)
        self._attributes = attributes
        self._error: Exception | None = None
        self._begun = perf_counter()

    def failed(self, error: Exception) -> None:
        """Note the error of the operation, where it is handled inside the block."""
        self._error = error

    def end(self, error: BaseException | None) -> None:
        """End the span, and record the duration."""
        super().end(error or self._error)
        metrics.operation_ended(
            self._attributes, perf_counter() - self._begun, error or self._error
        )


def sending(
    topic: str, partition: int | None, count: int, traceparents: Iterable[str | None]
) -> Operation:
    """Time the sending of events of a partition: a span `send <topic>` that links to their traces.

    `traceparents` are the events' creation contexts; if none is recorded no span is made.
    """
    common = {**metrics.operation(SEND, topic), names.MESSAGING_OPERATION_TYPE: SEND}
    recorded = dict.fromkeys(each for each in traceparents if each and each[-1] in _RECORDED)
    contexts = filter(None, map(_parse, islice(recorded, _MAX_LINKS)))
    links = [trace.Link(context) for context in contexts]
    if not links:
        return Operation(common)
    attributes = dict(common)
    if partition is not None:
        attributes[names.MESSAGING_DESTINATION_PARTITION_ID] = str(partition)
    if count > 1:  # the convention leaves it out for a single message
        attributes[names.MESSAGING_BATCH_MESSAGE_COUNT] = count
    kind, name = trace.SpanKind.PRODUCER, f"{SEND} {topic}"
    return Operation(common, _tracer.start_span(name, _NO_PARENT, kind, attributes, links))


def polling(topic: str, group: str) -> Operation:
    """Time a poll of a partition, without a span: how long the client waits for its records."""
    return Operation({**metrics.polled(topic, group), names.MESSAGING_OPERATION_TYPE: RECEIVE})


def creation_context(context: otel.Context | None = None) -> TraceHeaders:
    """Return what is stored with an event: the current context unless one is given."""
    span = trace.get_current_span(context)
    if isinstance(span, _Sender) and not baggage.get_all(context):
        return span.traceparent, None, None
    carrier: dict[str, str] = {}
    _TRACE_CONTEXT.inject(carrier, context)
    _BAGGAGE.inject(carrier, context)
    return carrier.get("traceparent"), carrier.get("tracestate"), carrier.get("baggage")


def traceparent(context: otel.Context | None) -> str | None:
    """Return the header that names the context's span; None if there is none."""
    return None if context is None else creation_context(context)[0]


def trace_id(traceparent: str | None) -> str | None:
    """Return the trace's id in a header, which is untrusted; None if there is none in it."""
    found = _TRACE_ID.match(traceparent or "")
    return found[1] if found else None


def within(traceparent: str | None) -> AbstractContextManager[object]:
    """Make a span that has ended, or ends elsewhere, current for the log lines of the block."""
    context = _parse(traceparent) if traceparent else None
    return trace.use_span(trace.NonRecordingSpan(context)) if context else nullcontext()


class _Sender(trace.NonRecordingSpan):
    """The sender's span, of which only the header is kept: it is parsed when it is needed.

    Parsing and formatting it for every message takes 4 µs.
    """

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def get_span_context(self) -> trace.SpanContext:
        return _parse(self.traceparent) or trace.INVALID_SPAN_CONTEXT

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.traceparent!r})"


def _is_recorded(sender: trace.Span) -> bool:
    if isinstance(sender, _Sender):
        return sender.traceparent[-1] in _RECORDED
    return sender.get_span_context().trace_flags.sampled


def _sender(message: Message) -> tuple[trace.Span, otel.Context]:
    """Return the sender's span and context; headers that W3C's rules do not allow are absent."""
    if not message.traceparent and not message.baggage:
        return trace.INVALID_SPAN, _NO_PARENT
    # The usual case, at a fourth of the propagators' cost.
    alone = None if message.tracestate or message.baggage else message.traceparent
    if alone and _TRACEPARENT.fullmatch(alone):
        span = _Sender(alone)
        return span, trace.set_span_in_context(span, _NO_PARENT)
    headers = ("traceparent", "tracestate", "baggage")
    carrier = {name: value for name in headers if (value := getattr(message, name))}
    parent = _BAGGAGE.extract(carrier, _TRACE_CONTEXT.extract(carrier, _NO_PARENT))
    return trace.get_current_span(parent), parent


def _parse(traceparent: str) -> trace.SpanContext | None:
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    trace_id, span_id, flags = match.groups()
    return trace.SpanContext(int(trace_id, 16), int(span_id, 16), True, _FLAGS[int(flags, 16)])
