"""Metrics: every instrument of the engine, on OpenTelemetry's API, and the functions that record.

Names of messaging and database metrics are the semantic conventions'. Without the SDK, which
`exporters` sets up, recording costs next to nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from time import monotonic

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.semconv._incubating.attributes import cloudevents_attributes as cloudevents
from opentelemetry.semconv._incubating.attributes import messaging_attributes as names
from opentelemetry.semconv._incubating.metrics import messaging_metrics as metric_names
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.util.types import AttributeValue

Attributes = dict[str, AttributeValue]
_Value = float | Mapping[str, int] | None
"""A number, or numbers by outcome; None: there is nothing to report."""

CONSUMER = "pipeline.consumer"
OUTCOME = "pipeline.outcome"
PROCESS = names.MessagingOperationTypeValues.PROCESS.value
SEND = names.MessagingOperationTypeValues.SEND.value
RECEIVE = names.MessagingOperationTypeValues.RECEIVE.value
POLL = "poll"
"""The operation of type `receive`, as the conventions for Kafka name it."""

_KAFKA = names.MessagingSystemValues.KAFKA.value
_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
_SIZES = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0]

# A proxy, whose instruments start to record when a provider is set.
_meter = metrics.get_meter("pipeline")

_messages = _meter.create_counter("pipeline.messages", "{message}", "By consumer and outcome.")
conflicts = _meter.create_counter(
    "pipeline.conflicts", "{conflict}", "Writers that found a row changed by another one."
)
retention_failures = _meter.create_counter(
    "pipeline.retention.failures", "{round}", "Rounds of retention that were not finished."
)
_sent = metric_names.create_messaging_client_sent_messages(_meter)
_consumed = metric_names.create_messaging_client_consumed_messages(_meter)

_batch_size = _meter.create_histogram(
    "pipeline.batch.size", "{message}", explicit_bucket_boundaries_advisory=_SIZES
)
_handler_duration = _meter.create_histogram(
    "pipeline.handler.duration",
    "s",
    # Recording every call would cost more than most handlers do.
    "Duration of the longest call in each transaction, committed or not.",
    explicit_bucket_boundaries_advisory=[0.0001, 0.0005, 0.001, *_SECONDS],
)
_process_duration = _meter.create_histogram(
    metric_names.MESSAGING_PROCESS_DURATION, "s", explicit_bucket_boundaries_advisory=_SECONDS
)
_operation_duration = _meter.create_histogram(
    metric_names.MESSAGING_CLIENT_OPERATION_DURATION,
    "s",
    "Duration of sending events of a partition, and of a poll with its wait for records.",
    explicit_bucket_boundaries_advisory=_SECONDS,
)
_backlog_duration = _meter.create_histogram(
    "pipeline.backlog.duration",
    "s",
    "Time from received to applied, of the oldest message of each transaction.",
    explicit_bucket_boundaries_advisory=[0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3_600.0, 86_400.0],
)

partitions_assigned = _meter.create_gauge(
    "pipeline.partitions.assigned", "{partition}", "Partitions that this process reads."
)
_stuck = _meter.create_gauge(
    "pipeline.partitions.stuck", "{partition}", "1 while the partition stands still."
)
_breaker = _meter.create_gauge("pipeline.breaker.open", "{consumer}", "1 while it is open.")
_backlog = _meter.create_gauge("pipeline.backlog.waiting", "{message}", "Stored for later.")
_dead = _meter.create_gauge("pipeline.backlog.dead", "{message}", "Dead letters to decide on.")
_backlog_age = _meter.create_gauge("pipeline.backlog.age", "s", "Age of the oldest message.")
relay_shards = _meter.create_gauge("pipeline.relay.shards", "{shard}", "Shards this relay holds.")
_held = _meter.create_gauge(
    "pipeline.retention.held", "{partition}", "Due to be dropped, and still needed."
)
generations_unfiltered = _meter.create_gauge(
    "pipeline.inbox.unfiltered",
    "{generation}",
    "Closed, and without a filter in this process: looked up for every message.",
)


@dataclass
class _Latest:
    """What was reported last; None: nothing yet, or nothing any more."""

    is_ready: Callable[[], bool] | None = None
    leased_until: float = 0.0
    """Until when, by the monotonic clock, no other relay can have taken this process's shards.

    Afterwards nothing is reported of the outbox: a relay that is cut off from PostgreSQL does not
    know what another one has published.
    """
    lag: int | None = None
    oldest: datetime | None = None
    """When the oldest event that waits was staged; None: none waits."""
    rejected: Mapping[str, int] | None = None
    outbox_until: datetime | None = None
    remembered_since: datetime | None = None
    retention_finished_at: datetime | None = None

    def if_leased(self, value: _Value) -> _Value:
        """Return the value if it is still true of the outbox."""
        return value if monotonic() < self.leased_until else None


_latest = _Latest()


def _since(moment: datetime | None) -> float | None:
    return None if moment is None else (datetime.now(UTC) - moment).total_seconds()


def _until(moment: datetime | None) -> float | None:
    return None if moment is None else (moment - datetime.now(UTC)).total_seconds()


def _lag_seconds() -> float | None:
    # The database's clock may be ahead.
    return None if _latest.lag is None else max(0.0, _since(_latest.oldest) or 0.0)


_COMPUTED: tuple[tuple[str, str, str, Callable[[], _Value]], ...] = (
    (
        "pipeline.ready",
        "{process}",
        "1 while every part can do its work.",
        lambda: None if _latest.is_ready is None else int(_latest.is_ready()),
    ),
    (
        "pipeline.outbox.lag.events",
        "{event}",
        "Events not yet sent.",
        lambda: _latest.if_leased(_latest.lag),
    ),
    (
        "pipeline.outbox.lag.duration",
        "s",
        "Age of the oldest event not yet sent.",
        lambda: _latest.if_leased(_lag_seconds()),
    ),
    (
        "pipeline.outbox.rejected",
        "{event}",
        "Rejected by Kafka, by state.",
        lambda: _latest.if_leased(_latest.rejected),
    ),
    (
        "pipeline.outbox.ahead",
        "s",
        "Time until there is no partition for new events.",
        lambda: _until(_latest.outbox_until),
    ),
    (
        "pipeline.inbox.horizon",
        "s",
        "How far back the inbox remembers every message, once it has forgotten some.",
        lambda: _since(_latest.remembered_since),
    ),
    (
        "pipeline.retention.age",
        "s",
        "Time since a round of retention was finished, by any process.",
        lambda: _since(_latest.retention_finished_at),
    ),
)
"""Gauges computed when metrics are collected, as they change with time: name, unit, description,
and where the value comes from."""


def _observations(read: Callable[[], _Value], _: CallbackOptions) -> Iterable[Observation]:
    value = read()
    if isinstance(value, Mapping):
        return [Observation(count, {OUTCOME: outcome}) for outcome, count in value.items()]
    return [] if value is None else [Observation(value)]


for _name, _unit, _description, _read in _COMPUTED:
    _meter.create_observable_gauge(_name, [partial(_observations, _read)], _unit, _description)


def operation(name: str, topic: str) -> Attributes:
    """Return the attributes of a client operation on a topic."""
    return {
        names.MESSAGING_SYSTEM: _KAFKA,
        names.MESSAGING_OPERATION_NAME: name,
        names.MESSAGING_DESTINATION_NAME: topic,
    }


def polled(topic: str, group: str) -> Attributes:
    """Return the attributes of a poll."""
    return {**operation(POLL, topic), names.MESSAGING_CONSUMER_GROUP_NAME: group}


def operation_ended(attributes: Attributes, seconds: float, error: BaseException | None) -> None:
    """Record how long a client operation took. One that was cancelled is not recorded."""
    if error is None:
        _operation_duration.record(seconds, attributes)
    elif isinstance(error, Exception):
        failed = {**attributes, error_attributes.ERROR_TYPE: type(error).__qualname__}
        _operation_duration.record(seconds, failed)


def processed(topic: str, consumer: str, outcome: str, count: int, group: str) -> None:
    """Count messages; `outcome` is `new`, `duplicate`, `superseded`, `skipped`, `parked`, `dead`,
    `mismatch` (dead: the same id came before with another payload) or `stuck`.
    """
    attributes = {
        names.MESSAGING_DESTINATION_NAME: topic,
        names.MESSAGING_CONSUMER_GROUP_NAME: group,
        CONSUMER: consumer,
        OUTCOME: outcome,
    }
    _messages.add(count, attributes)


def received(topic: str, group: str, count: int) -> None:
    """Count records that were read, before they are decoded."""
    _consumed.add(count, polled(topic, group))


def batch_applied(topic: str, group: str, size: int, seconds: float) -> None:
    """Record a transaction that has committed."""
    attributes = {**operation(PROCESS, topic), names.MESSAGING_CONSUMER_GROUP_NAME: group}
    _batch_size.record(size, attributes)
    _process_duration.record(seconds, attributes)


def handled(longest: Mapping[tuple[str, str], float]) -> None:
    """Record the longest call of a handler in a transaction, by consumer and type of event."""
    for (consumer, event_type), seconds in longest.items():
        attributes = {CONSUMER: consumer, cloudevents.CLOUDEVENTS_EVENT_TYPE: event_type}
        _handler_duration.record(seconds, attributes)


def published(topic: str, count: int) -> None:
    """Count events that the broker has acknowledged."""
    _sent.add(count, operation(SEND, topic))


def not_published(topic: str, count: int, error: Exception) -> None:
    """Count events that were sent and rejected, or not acknowledged."""
    failed = {**operation(SEND, topic), error_attributes.ERROR_TYPE: type(error).__qualname__}
    _sent.add(count, failed)


def observe_ready(is_ready: Callable[[], bool]) -> None:
    """Set the function that says whether the process is ready; it is called in any thread."""
    _latest.is_ready = is_ready


def set_stuck(topic: str, partition: int, *, is_stuck: bool) -> None:
    """Set whether the partition stands still; one that this process gave up is not stuck here."""
    attributes = {
        names.MESSAGING_DESTINATION_NAME: topic,
        names.MESSAGING_DESTINATION_PARTITION_ID: str(partition),
    }
    _stuck.set(int(is_stuck), attributes)


def set_breaker(consumer: str, *, is_open: bool) -> None:
    """Set whether the consumer's breaker is open in this process."""
    _breaker.set(int(is_open), {CONSUMER: consumer})


def observe_backlog(consumer: str, waiting: int, dead: int, oldest_seconds: float) -> None:
    """Set what the backlog holds for a consumer."""
    attributes = {CONSUMER: consumer}
    _backlog.set(waiting, attributes)
    _dead.set(dead, attributes)
    _backlog_age.set(oldest_seconds, attributes)


def backlog_applied(consumer: str, seconds: float) -> None:
    """Record how long the oldest message of a transaction waited before it took effect."""
    _backlog_duration.record(seconds, {CONSUMER: consumer})


def lease_extended(until: float) -> None:
    """Set until when, by the monotonic clock, what is observed of the outbox stays true."""
    _latest.leased_until = until


def observe_outbox(lag_events: int, oldest: datetime | None) -> None:
    """Set how many events wait to be published, and since when the oldest one does."""
    _latest.lag, _latest.oldest = lag_events, oldest


def observe_rejected(waiting: int, dead: int) -> None:
    """Set how many events in this relay's shards wait for a topic, and how many are dead."""
    _latest.rejected = {"waiting": waiting, "dead": dead}


def forget_outbox() -> None:
    """Drop what was observed of the outbox, until the relay observes it again."""
    _latest.lag = _latest.oldest = _latest.rejected = None


def observe_partitions(until: datetime, since: datetime | None) -> None:
    """Set until when there are partitions for new events, and since when every message is
    remembered; None: since the beginning."""
    _latest.outbox_until, _latest.remembered_since = until, since


def observe_retention(held: int, finished_at: datetime) -> None:
    """Set how many partitions are due to be dropped and still needed, and as of when."""
    _held.set(held)
    _latest.retention_finished_at = finished_at
