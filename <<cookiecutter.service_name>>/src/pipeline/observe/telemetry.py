"""Traces and metrics: every name and every instrument, on OpenTelemetry's API.

Without the SDK, which `exporters` sets up, all of this costs next to nothing, and trace context
still travels from message to event. Names are the messaging conventions'.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from time import monotonic, perf_counter

from opentelemetry import baggage, metrics, trace
from opentelemetry import context as otel
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.semconv._incubating.attributes import cloudevents_attributes as cloudevents
from opentelemetry.semconv._incubating.attributes import messaging_attributes as names
from opentelemetry.semconv._incubating.metrics import messaging_metrics as metric_names
from opentelemetry.semconv.attributes import db_attributes, error_attributes
from opentelemetry.semconv.metrics import db_metrics
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from pipeline.events.message import Message

# Else instrumentations of libraries, which are loaded later, use names that are deprecated.
os.environ.setdefault("OTEL_SEMCONV_STABILITY_OPT_IN", "http")

CONSUMER = "pipeline.consumer"
OUTCOME = "pipeline.outcome"

_MAX_LINKS = 128  # what the SDK keeps of a span's links
_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
_SIZES = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0]
_KAFKA = names.MessagingSystemValues.KAFKA.value
_PROCESS = names.MessagingOperationTypeValues.PROCESS.value
_SEND = names.MessagingOperationTypeValues.SEND.value
_RECEIVE = names.MessagingOperationTypeValues.RECEIVE.value
_POLL = "poll"  # what the conventions for Kafka call to receive
_POSTGRESQL = db_attributes.DbSystemNameValues.POSTGRESQL.value
_STATEMENT = re.compile(
    r"(?:\s|--.*|/\*(?s:.*?)\*/)*"
    r"(BEGIN|COMMIT|COPY|DELETE|INSERT|LOCK|MERGE|ROLLBACK|SAVEPOINT|SELECT|UPDATE|WITH)\b",
    re.IGNORECASE,
)
"""The first word of those that are told apart; others are rare."""
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_RECORDED = frozenset("13579bdf")
"""Last digits of a `traceparent` whose trace is recorded."""
_FLAGS = [trace.TraceFlags(flags) for flags in range(256)]
_TRACE_CONTEXT = TraceContextTextMapPropagator()
_BAGGAGE = W3CBaggagePropagator()
_NO_PARENT = otel.Context()

# Proxies, which come to life when the providers are set.
_tracer = trace.get_tracer("pipeline", schema_url=Schemas.V1_44_0.value)
_meter = metrics.get_meter("pipeline")
_messages = _meter.create_counter("pipeline.messages", "{message}", "By consumer and outcome.")
_batch_size = _meter.create_histogram(
    "pipeline.batch.size", "{message}", explicit_bucket_boundaries_advisory=_SIZES
)
_handler_duration = _meter.create_histogram(
    "pipeline.handler.duration",
    "s",
    # To record every call would cost more than most handlers do.
    "Of a call; the longest of each transaction, be it rolled back or not.",
    explicit_bucket_boundaries_advisory=[0.0001, 0.0005, 0.001, *_SECONDS],
)
_duration = _meter.create_histogram(
    metric_names.MESSAGING_PROCESS_DURATION, "s", explicit_bucket_boundaries_advisory=_SECONDS
)
_statement_duration = _meter.create_histogram(
    db_metrics.DB_CLIENT_OPERATION_DURATION,
    "s",
    "Of a statement, by its first word.",
    # The convention's own.
    explicit_bucket_boundaries_advisory=[0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0],
)
_operation_duration = _meter.create_histogram(
    metric_names.MESSAGING_CLIENT_OPERATION_DURATION,
    "s",
    "Of sending events of a partition, and of a poll with its wait for records.",
    explicit_bucket_boundaries_advisory=_SECONDS,
)
_sent = metric_names.create_messaging_client_sent_messages(_meter)
_consumed = metric_names.create_messaging_client_consumed_messages(_meter)
_is_ready: list[Callable[[], bool]] = []
"""How to find out; empty until the process begins."""


def _ready(_: CallbackOptions) -> Iterable[Observation]:
    """Ask when somebody asks: an event loop that hangs would not tell."""
    for is_ready in _is_ready:
        yield Observation(int(is_ready()))


_meter.create_observable_gauge(
    "pipeline.ready", [_ready], "{process}", "1 while every part can do its work."
)
_assigned = _meter.create_gauge(
    "pipeline.partitions.assigned", "{partition}", "Partitions that this process reads."
)
_stuck = _meter.create_gauge("pipeline.partitions.stuck", "{partition}", "1 while it stands still.")
_conflicts = _meter.create_counter(
    "pipeline.conflicts", "{conflict}", "Writers that found a row changed by another one."
)
_breaker = _meter.create_gauge("pipeline.breaker.open", "{consumer}", "1 while it is open.")
_backlog = _meter.create_gauge("pipeline.backlog.waiting", "{message}", "Stored for later.")
_dead = _meter.create_gauge("pipeline.backlog.dead", "{message}", "For a person to decide on.")
_backlog_age = _meter.create_gauge("pipeline.backlog.age", "s", "Since the oldest was stored.")
_backlog_duration = _meter.create_histogram(
    "pipeline.backlog.duration",
    "s",
    "From received to applied; the oldest message of each transaction.",
    explicit_bucket_boundaries_advisory=[0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3_600.0, 86_400.0],
)
_shards = _meter.create_gauge("pipeline.relay.shards", "{shard}", "Shards this relay holds.")
_leased_until: list[float] = []
"""Until when, by the monotonic clock, no other relay has taken its shards; empty without a relay.

Afterwards nothing is told of them: a relay that is cut off from PostgreSQL does not know what has
been sent in its place.
"""
_lag_events: list[int] = []
_oldest_unpublished: list[datetime | None] = []
"""Since when the oldest event waits, None if none does; empty until a relay has looked."""
_rejected: dict[str, int] = {}
"""Events that Kafka rejects, by what has become of them."""


def _is_leased() -> bool:
    return any(monotonic() < until for until in _leased_until)


def _lag(_: CallbackOptions) -> Iterable[Observation]:
    if _is_leased():
        yield from map(Observation, _lag_events)


def _lag_seconds(_: CallbackOptions) -> Iterable[Observation]:
    """Tell its age when somebody asks: the relay may be waiting for Kafka, and not look again."""
    if _is_leased():
        for since in _oldest_unpublished:
            age = (datetime.now(UTC) - since).total_seconds() if since else 0.0
            yield Observation(max(0.0, age))


def _rejected_events(_: CallbackOptions) -> Iterable[Observation]:
    if _is_leased():
        for outcome, count in tuple(_rejected.items()):
            yield Observation(count, {OUTCOME: outcome})


_meter.create_observable_gauge(
    "pipeline.outbox.lag.events", [_lag], "{event}", "Events not yet sent."
)
_meter.create_observable_gauge(
    "pipeline.outbox.lag.duration", [_lag_seconds], "s", "Age of the oldest."
)
_meter.create_observable_gauge(
    "pipeline.outbox.rejected", [_rejected_events], "{event}", "Rejected by Kafka, by state."
)
_outbox_until: list[datetime] = []
"""When the last day of the outbox that is made ahead ends; empty until housekeeping has looked."""
_remembered_since: list[datetime] = []
"""What happened before may be forgotten; empty while nothing is."""


def _ahead(_: CallbackOptions) -> Iterable[Observation]:
    """Tell it when somebody asks: where housekeeping fails it shrinks all the same."""
    for until in _outbox_until:
        yield Observation((until - datetime.now(UTC)).total_seconds())


def _horizon(_: CallbackOptions) -> Iterable[Observation]:
    for since in _remembered_since:
        yield Observation((datetime.now(UTC) - since).total_seconds())


_meter.create_observable_gauge(
    "pipeline.outbox.ahead", [_ahead], "s", "Until there is no partition for new events."
)
_meter.create_observable_gauge(
    "pipeline.inbox.horizon",
    [_horizon],
    "s",
    "How far back all is remembered, once some is not.",
)
_tidied_at: list[datetime] = []
"""When a round of retention was finished, by whomever; empty until housekeeping has looked."""


def _untidy(_: CallbackOptions) -> Iterable[Observation]:
    for at in _tidied_at:
        yield Observation((datetime.now(UTC) - at).total_seconds())


_meter.create_observable_gauge(
    "pipeline.retention.age", [_untidy], "s", "Since a round of tidying up was finished."
)
_held = _meter.create_gauge(
    "pipeline.retention.held", "{partition}", "Due to be dropped, and still needed by somebody."
)
_retention_failures = _meter.create_counter(
    "pipeline.retention.failures", "{round}", "Rounds of tidying up that were not finished."
)
_without_filter = _meter.create_gauge(
    "pipeline.inbox.unfiltered",
    "{generation}",
    "Closed, and without a filter here: looked up for every message.",
)


class ProcessSpans:
    """Makes the spans `process <topic>` of the messages of a transaction."""

    def __init__(self, group: str) -> None:
        self._group = group
        # Asked once: the API looks into the environment each time.
        self._is_off = _is_off()

    def of(self, message: Message, consumer: str, stored: str | None = None) -> "Current":
        """Make the message's trace current, with a span in it if it is recorded.

        Of a trace that its sender does not record no span is made: its context alone becomes
        current, so that what the handler publishes still belongs to it.

        `stored` is the `traceparent` of the message's first attempt, if this is another: the span
        links to that one, and is its child where the sender has begun no trace.
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
    """Whether nobody has set up the SDK: then no trace can begin here."""
    return isinstance(_tracer, trace.ProxyTracer) and isinstance(
        trace.get_tracer_provider(), trace.ProxyTracerProvider
    )


@lru_cache(maxsize=1_024)
def _process(
    topic: str, partition: int, consumer: str, group: str
) -> tuple[str, dict[str, AttributeValue]]:
    """Return the name of a span, and the attributes that a sampler can decide by."""
    return f"{_PROCESS} {topic}", {
        **_operation(_PROCESS, topic),
        names.MESSAGING_OPERATION_TYPE: _PROCESS,
        names.MESSAGING_CONSUMER_GROUP_NAME: group,
        CONSUMER: consumer,
        names.MESSAGING_DESTINATION_PARTITION_ID: str(partition),
    }


def _attributes_of(message: Message) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        names.MESSAGING_KAFKA_OFFSET: message.offset,
        names.MESSAGING_MESSAGE_ID: message.id,
    }
    if message.data is None:
        attributes[names.MESSAGING_KAFKA_MESSAGE_TOMBSTONE] = True
    if message.key is not None:
        with suppress(UnicodeDecodeError):  # a key that is no text has no name to show
            attributes[names.MESSAGING_KAFKA_MESSAGE_KEY] = message.key.decode()
    return attributes


class Operation:
    """An operation of a Kafka client, timed from here to the end of `with`, and its span."""

    __slots__ = ("_attributes", "_begun", "_current", "_refusal")

    def __init__(
        self, attributes: dict[str, AttributeValue], current: "Current | None" = None
    ) -> None:
        self._attributes = attributes
        self._current = current
        self._refusal: Exception | None = None
        self._begun = perf_counter()

    def refused(self, error: Exception) -> None:
        """Note what it has failed with, where that is handled inside."""
        self._refusal = error

    def __enter__(self) -> "Operation":
        if self._current is not None:
            self._current.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        error = error or self._refusal
        if self._current is not None:
            self._current.__exit__(kind, error, traceback)
        if isinstance(error, Exception):
            self._attributes[error_attributes.ERROR_TYPE] = type(error).__qualname__
        if error is None or isinstance(error, Exception):  # else it has not come to its end
            _operation_duration.record(perf_counter() - self._begun, self._attributes)


def sending(
    topic: str, partition: int | None, count: int, traceparents: Iterable[str | None]
) -> Operation:
    """Time the sending of events of a partition: a span `send <topic>` that links to their traces.

    `traceparents` are the events' creation contexts; where none is recorded there is no span.
    """
    common = {**_operation(_SEND, topic), names.MESSAGING_OPERATION_TYPE: _SEND}
    recorded = dict.fromkeys(each for each in traceparents if each and each[-1] in _RECORDED)
    contexts = filter(None, map(_parse, islice(recorded, _MAX_LINKS)))
    links = [trace.Link(context) for context in contexts]
    if not links:
        return Operation(common)
    attributes = dict(common)
    if partition is not None:
        attributes[names.MESSAGING_DESTINATION_PARTITION_ID] = str(partition)
    if count > 1:  # by the convention not on a span of a single message
        attributes[names.MESSAGING_BATCH_MESSAGE_COUNT] = count
    name = f"{_SEND} {topic}"
    span = _tracer.start_span(name, _NO_PARENT, trace.SpanKind.PRODUCER, attributes, links)
    return Operation(common, Current(trace.set_span_in_context(span, _NO_PARENT), span))


def polling(topic: str, group: str) -> Operation:
    """Time a poll of a partition: how long the client waits for its records."""
    return Operation({**_polled(topic, group), names.MESSAGING_OPERATION_TYPE: _RECEIVE})


class Statement:
    """A statement that begins when this is made: tells how long it took when it ends.

    Where a span is current, as in a handler and for no batch, it is a span in it.
    """

    __slots__ = ("_begun", "_is_timed", "_span", "_text")

    def __init__(self, text: str, *, has_values: bool = False, is_timed: bool = True) -> None:
        """`text` is shown if its values are apart from it. `is_timed` if nobody else does that."""
        self._text = text
        self._is_timed = is_timed
        self._span = None
        if trace.get_current_span().is_recording():
            attributes = _statement(text)
            if has_values:
                attributes[db_attributes.DB_QUERY_TEXT] = text
            name = str(attributes[db_attributes.DB_QUERY_SUMMARY])
            self._span = _tracer.start_span(name, None, trace.SpanKind.CLIENT, attributes)
        self._begun = perf_counter()

    def __enter__(self) -> None:
        """Begin already."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """Record it, with its error if there is one."""
        if self._is_timed:
            executed(self._text, perf_counter() - self._begun, error)
        if self._span is not None:
            if isinstance(error, Exception):
                self._span.set_attribute(error_attributes.ERROR_TYPE, _type_of(error))
                self._span.set_status(trace.StatusCode.ERROR)
            self._span.end()


def executed(text: str, seconds: float, error: BaseException | None) -> None:
    """Record how long a statement took."""
    attributes = _statement(text)
    if error is not None:
        attributes[error_attributes.ERROR_TYPE] = _type_of(error)
    _statement_duration.record(seconds, attributes)


def _statement(text: str) -> dict[str, AttributeValue]:
    match = _STATEMENT.match(text)
    return {
        db_attributes.DB_SYSTEM_NAME: _POSTGRESQL,
        db_attributes.DB_QUERY_SUMMARY: match[1].upper() if match else "OTHER",
    }


def _type_of(error: BaseException) -> str:
    """Return the server's code, or the name of what has happened here."""
    return getattr(error, "sqlstate", None) or type(error).__qualname__


TraceHeaders = tuple[str | None, str | None, str | None]
"""`traceparent`, `tracestate` and `baggage`."""


def creation_context(context: otel.Context | None = None) -> TraceHeaders:
    """Return what is to be stored with an event: the current context unless one is given."""
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


class Current:
    """A context that is current inside `with`, where its span ends. A generator costs 1 µs more."""

    __slots__ = ("_span", "_token", "context")

    def __init__(self, context: otel.Context, span: trace.Span) -> None:
        self.context = context
        self._span = span

    @classmethod
    def without_span(cls, context: otel.Context) -> "Current":
        """Make a context current whose span is somebody else's to end."""
        return cls(context, trace.INVALID_SPAN)

    def __enter__(self) -> trace.Span:
        self._token = otel.attach(self.context)
        return self._span

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        otel.detach(self._token)
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """End the span, with the error if there is one."""
        if isinstance(error, Exception):
            # Not its text, which may quote a payload: the log has that, under this trace's id.
            self._span.set_attribute(error_attributes.ERROR_TYPE, type(error).__qualname__)
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()


class _Sender(trace.NonRecordingSpan):
    """A sender's span by its header: handed on as it came, and read when somebody asks for it.

    To read and write it anew for each message took 4 µs.
    """

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def get_span_context(self) -> trace.SpanContext:
        """Read the header."""
        return _parse(self.traceparent) or trace.INVALID_SPAN_CONTEXT

    def __repr__(self) -> str:
        """Return the header."""
        return f"{type(self).__name__}({self.traceparent!r})"


def _is_recorded(sender: trace.Span) -> bool:
    if isinstance(sender, _Sender):
        return sender.traceparent[-1] in _RECORDED
    return sender.get_span_context().trace_flags.sampled


def _sender(message: Message) -> tuple[trace.Span, otel.Context]:
    """Return the sender's span and context; what W3C's rules do not let us read is absent."""
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


def within(traceparent: str | None) -> AbstractContextManager[object]:
    """Let what is logged meanwhile be of a span that has ended, or is somebody else's."""
    context = _parse(traceparent) if traceparent else None
    return trace.use_span(trace.NonRecordingSpan(context)) if context else nullcontext()


def _parse(traceparent: str) -> trace.SpanContext | None:
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    trace_id, span_id, flags = match.groups()
    return trace.SpanContext(int(trace_id, 16), int(span_id, 16), True, _FLAGS[int(flags, 16)])


def processed(topic: str, consumer: str, outcome: str, count: int, group: str) -> None:
    """Count messages; `outcome` is `new`, `duplicate`, `superseded`, `skipped`, `parked`, `dead`,
    `mismatch` (dead, for its id came before with another payload) or `stuck`.
    """
    attributes = {
        names.MESSAGING_DESTINATION_NAME: topic,
        names.MESSAGING_CONSUMER_GROUP_NAME: group,
        CONSUMER: consumer,
        OUTCOME: outcome,
    }
    _messages.add(count, attributes)


def received(topic: str, group: str, count: int) -> None:
    """Count records that were read, whatever they are."""
    _consumed.add(count, _polled(topic, group))


def batch_applied(topic: str, group: str, size: int, seconds: float) -> None:
    """Record a transaction that has committed."""
    attributes = {
        **_operation(_PROCESS, topic),
        names.MESSAGING_CONSUMER_GROUP_NAME: group,
    }
    _batch_size.record(size, attributes)
    _duration.record(seconds, attributes)


def handled(longest: Mapping[tuple[str, str], float]) -> None:
    """Record how long handlers' calls have taken: the longest by consumer and type of event."""
    for (consumer, event_type), seconds in longest.items():
        attributes = {CONSUMER: consumer, cloudevents.CLOUDEVENTS_EVENT_TYPE: event_type}
        _handler_duration.record(seconds, attributes)


def published(topic: str, count: int) -> None:
    """Count events that the broker has acknowledged."""
    _sent.add(count, _operation(_SEND, topic))


def not_published(topic: str, count: int, error: Exception) -> None:
    """Count events that were sent in vain: refused, or not acknowledged."""
    attributes = {
        **_operation(_SEND, topic),
        error_attributes.ERROR_TYPE: type(error).__qualname__,
    }
    _sent.add(count, attributes)


def observe_ready(is_ready: Callable[[], bool]) -> None:
    """Tell whether every part of the process can do its work; asked from any thread."""
    _is_ready[:] = [is_ready]


def assigned(partitions: int) -> None:
    """Tell how many partitions this process reads."""
    _assigned.set(partitions)


def set_stuck(topic: str, partition: int, *, is_stuck: bool) -> None:
    """Tell whether the partition stands still; a partition given up is not stuck here."""
    attributes = {
        names.MESSAGING_DESTINATION_NAME: topic,
        names.MESSAGING_DESTINATION_PARTITION_ID: str(partition),
    }
    _stuck.set(int(is_stuck), attributes)


def conflicted() -> None:
    """Count a writer that has found its rows changed by others."""
    _conflicts.add(1)


def set_breaker(consumer: str, *, is_open: bool) -> None:
    """Tell whether the consumer's breaker is open in this process."""
    _breaker.set(int(is_open), {CONSUMER: consumer})


def observe_backlog(consumer: str, waiting: int, dead: int, oldest_seconds: float) -> None:
    """Tell what the backlog holds for a consumer."""
    attributes = {CONSUMER: consumer}
    _backlog.set(waiting, attributes)
    _dead.set(dead, attributes)
    _backlog_age.set(oldest_seconds, attributes)


def backlog_applied(consumer: str, seconds: float) -> None:
    """Record how long the oldest message of a transaction has waited before it took effect."""
    _backlog_duration.record(seconds, {CONSUMER: consumer})


def relay_progress(shards_held: int) -> None:
    """Tell how many outbox shards this process publishes."""
    _shards.set(shards_held)


def lease_extended(until: float) -> None:
    """Tell until when, by the monotonic clock, what is observed of the outbox stays true."""
    _leased_until[:] = [until]


def observe_outbox(lag_events: int, oldest: datetime | None) -> None:
    """Tell how many events wait to be published, and since when the oldest one does."""
    _lag_events[:] = [lag_events]
    _oldest_unpublished[:] = [oldest]


def forget_outbox() -> None:
    """Take back what was told of the outbox: the next lease begins with what is seen in it."""
    _lag_events.clear()
    _oldest_unpublished.clear()
    _rejected.clear()


def observe_partitions(until: datetime, since: datetime | None) -> None:
    """Tell until when there are partitions for new events, and since when all is remembered."""
    _outbox_until[:] = [until]
    _remembered_since[:] = [since] if since else []


def observe_retention(held: int, finished_at: datetime) -> None:
    """Tell how many partitions should have been dropped and are still needed, and as of when."""
    _held.set(held)
    _tidied_at[:] = [finished_at]


def retention_failed() -> None:
    """Count a round of retention that was not finished."""
    _retention_failures.add(1)


def observe_filters(without: int) -> None:
    """Tell in how many closed generations this process looks every message up."""
    _without_filter.set(without)


def observe_rejected(waiting: int, dead: int) -> None:
    """Report how many events in this relay's shards wait for a topic, and how many are dead."""
    _rejected.update(waiting=waiting, dead=dead)


def _polled(topic: str, group: str) -> dict[str, AttributeValue]:
    return {**_operation(_POLL, topic), names.MESSAGING_CONSUMER_GROUP_NAME: group}


def _operation(operation: str, topic: str) -> dict[str, AttributeValue]:
    return {
        names.MESSAGING_SYSTEM: _KAFKA,
        names.MESSAGING_OPERATION_NAME: operation,
        names.MESSAGING_DESTINATION_NAME: topic,
    }
