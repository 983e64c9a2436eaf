"""Metrics: every instrument of the engine, on OpenTelemetry's API, and the functions that record.

Names of messaging and database metrics are the semantic conventions'. Without the SDK, which
`exporters` sets up, recording costs next to nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from opentelemetry import metrics
from opentelemetry.metrics import Observation
from opentelemetry.semconv._incubating.attributes import cloudevents_attributes as cloudevents
from opentelemetry.semconv._incubating.attributes import messaging_attributes as names
from opentelemetry.semconv._incubating.metrics import messaging_metrics as metric_names
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.util.types import AttributeValue

from .buffer import record
from .computed import Computed, OfOutbox

Attributes = dict[str, AttributeValue]

CONSUMER = "pipeline.consumer"
MODE = "pipeline.mode"
REASON = "pipeline.reason"
OUTCOME = "pipeline.outcome"
KIND = "pipeline.kind"
SUBJECT = "pipeline.subject"
TYPE = cloudevents.CLOUDEVENTS_EVENT_TYPE
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
_rolled_back = _meter.create_counter(
    "pipeline.transactions.rolled_back", "{transaction}", "Applied again in parts, by reason."
)
retention_failures = _meter.create_counter(
    "pipeline.retention.failures", "{round}", "Rounds of retention that were not finished."
)
upcasts = _meter.create_counter("pipeline.upcasts", "{message}", "Converted, by older type.")
_sent = metric_names.create_messaging_client_sent_messages(_meter)
_consumed = metric_names.create_messaging_client_consumed_messages(_meter)

_batch_size = _meter.create_histogram(
    "pipeline.batch.size",
    "{message}",
    "Messages of a batch that has committed.",
    explicit_bucket_boundaries_advisory=_SIZES,
)
_handler_duration = _meter.create_histogram(
    "pipeline.handler.duration",
    "s",
    # Recording every call would cost more than most handlers do.
    "Duration of the longest call in each transaction, committed or not.",
    explicit_bucket_boundaries_advisory=[0.0001, 0.0005, 0.001, *_SECONDS],
)
_process_duration = _meter.create_histogram(
    metric_names.MESSAGING_PROCESS_DURATION,
    "s",
    "Duration of a batch that has committed.",
    explicit_bucket_boundaries_advisory=_SECONDS,
)
_operation_duration = _meter.create_histogram(
    metric_names.MESSAGING_CLIENT_OPERATION_DURATION,
    "s",
    "Duration of sending events of a partition, and of a poll with its wait for records.",
    explicit_bucket_boundaries_advisory=_SECONDS,
)
_call_duration = _meter.create_histogram(
    "pipeline.call.duration",
    "s",
    "Duration of a call to another service, by outcome.",
    explicit_bucket_boundaries_advisory=[0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0],
)
_calls = _meter.create_up_down_counter(
    "pipeline.calls.under_way", "{call}", "Calls to other services that this process makes now."
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
_blocked = _meter.create_gauge(
    "pipeline.partitions.blocked", "{partition}", "1 while the partition is blocked."
)
_lag = _meter.create_gauge(
    "pipeline.consumer.lag", "{message}", "Records before the end, or an open transaction."
)
_delay = _meter.create_gauge(
    "pipeline.consumer.delay", "s", "Age of the first of them; 0 while it is paused."
)
_breaker = _meter.create_gauge("pipeline.breaker.open", "{consumer}", "1 while it is open.")
_backlog = _meter.create_gauge("pipeline.backlog.waiting", "{message}", "Stored for later.")
_dead = _meter.create_gauge("pipeline.backlog.dead", "{message}", "Dead letters to decide on.")
_backlog_age = _meter.create_gauge("pipeline.backlog.age", "s", "Age of the oldest message.")
relay_shards = _meter.create_gauge("pipeline.relay.shards", "{shard}", "Shards this relay holds.")
_held = _meter.create_gauge(
    "pipeline.retention.held", "{partition}", "Due to be dropped, and still needed."
)

_log_dropped = Computed(
    "pipeline.log.dropped",
    "{line}",
    "Log lines lost, as nothing reads standard error in time.",
    counts=True,
)
_ready = Computed("pipeline.ready", "{process}", "1 while every part can do its work.")
_throttle_rate = Computed(
    "pipeline.throttle.rate", "{message}", "Taken of a subject in a second; 0: it is paused."
)
_throttle_age = Computed(
    "pipeline.throttle.age", "s", "Time since it was asked for, if it has no end."
)
_lag_events = OfOutbox("pipeline.outbox.lag.events", "{event}", "Events not yet sent.")
_lag_duration = OfOutbox(
    "pipeline.outbox.lag.duration", "s", "Age of the oldest event not yet sent."
)
_outbox_delay = OfOutbox(
    "pipeline.outbox.delay", "s", "Age of a topic's oldest event among those that are sent next."
)
_outbox_topics: set[str] = set()
"""Topics for which events have waited since the process was started."""
_rejected = OfOutbox("pipeline.outbox.rejected", "{event}", "Rejected by Kafka, by state.")
_ahead = Computed("pipeline.outbox.ahead", "s", "Time until there is no partition for new events.")
_coverage = Computed(
    "pipeline.inbox.coverage",
    "s",
    "How far back the inbox remembers every message, once it has forgotten some.",
)
_retention_age = Computed(
    "pipeline.retention.age", "s", "Time since a round of retention was finished, by any process."
)


def _since(moment: datetime) -> float:
    return (datetime.now(UTC) - moment).total_seconds()


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
    if error is None or isinstance(error, Exception):
        record(_operation_duration.record, seconds, _with_error(attributes, error))


def _with_error(attributes: Attributes, error: Exception | None) -> Attributes:
    if error is None:
        return attributes
    return {**attributes, error_attributes.ERROR_TYPE: type(error).__qualname__}


def processed(topic: str, consumer: str, outcome: str, count: int, group: str) -> None:
    """Count messages; `outcome` is `applied`, `duplicate`, `superseded`, `skipped`, `parked`,
    `dead`, `identity mismatch` (dead: the same id came before with another payload) or `blocked`.
    """
    attributes = {
        names.MESSAGING_DESTINATION_NAME: topic,
        names.MESSAGING_CONSUMER_GROUP_NAME: group,
        CONSUMER: consumer,
        OUTCOME: outcome,
    }
    record(_messages.add, count, attributes)


def rolled_back(reason: str) -> None:
    """Count a consume transaction that failed: `failed` is a call, `transaction failed` a statement
    of the engine, the flush or the COMMIT; `locked out`, `connection lost`, `takes too long`."""
    record(_rolled_back.add, 1, {REASON: reason})


def received(topic: str, group: str, count: int) -> None:
    """Count records that were read, before they are decoded."""
    record(_consumed.add, count, polled(topic, group))


def batch_applied(topic: str, group: str, size: int, seconds: float) -> None:
    """Record a transaction that has committed."""
    attributes = {**operation(PROCESS, topic), names.MESSAGING_CONSUMER_GROUP_NAME: group}
    record(_batch_size.record, size, attributes)
    record(_process_duration.record, seconds, attributes)


def handled(longest: Mapping[tuple[str, str], float]) -> None:
    """Record the longest call of a handler in a transaction, by consumer and type of event."""
    for (consumer, event_type), seconds in longest.items():
        attributes = {CONSUMER: consumer, TYPE: event_type}
        record(_handler_duration.record, seconds, attributes)


def call_began(consumer: str) -> None:
    """Count a call to another service that is under way."""
    _calls.add(1, {CONSUMER: consumer})


def call_ended(consumer: str, outcome: str | None, seconds: float) -> None:
    """Record the end of a call: `done` (answered), `failed` or `late`; None: it was cancelled."""
    _calls.add(-1, {CONSUMER: consumer})
    if outcome is not None:
        record(_call_duration.record, seconds, {CONSUMER: consumer, OUTCOME: outcome})


def published(topic: str, count: int, error: Exception | None = None) -> None:
    """Count events that were sent and acknowledged, or were not, with the error."""
    record(_sent.add, count, _with_error(operation(SEND, topic), error))


def observe_ready(is_ready: Callable[[], bool]) -> None:
    """Set the function that says whether the process is ready; it is called in any thread."""
    _ready.read = lambda: int(is_ready())


def observe_log(dropped: Callable[[], int]) -> None:
    """Set the function that returns how many log lines were lost; it is called in any thread."""
    _log_dropped.read = dropped


def _place(topic: str, partition: int) -> Attributes:
    return {
        names.MESSAGING_DESTINATION_NAME: topic,
        names.MESSAGING_DESTINATION_PARTITION_ID: str(partition),
    }


def set_blocked(topic: str, partition: int, *, is_blocked: bool) -> None:
    """Set whether the partition is blocked; one that this process gave up is not blocked here."""
    _blocked.set(int(is_blocked), _place(topic, partition))


def observe_lag(topic: str, partition: int, lag: int, delay: float) -> None:
    """Set how many records of a partition are not applied, and the age of the first in seconds; one
    that this process gave up is not behind here."""
    _lag.set(lag, _place(topic, partition))
    _delay.set(delay, _place(topic, partition))


def set_breaker(consumer: str, *, is_open: bool) -> None:
    """Set whether the consumer's breaker is open in this process."""
    _breaker.set(int(is_open), {CONSUMER: consumer})


def observe_backlog(
    consumer: str, waiting: int, dead: int, oldest: Mapping[str, float], *, has_calls: bool
) -> None:
    """Set what the backlog holds for a consumer: messages, or calls; `oldest` is the age of the
    first that waits, in seconds by topic."""
    attributes = {CONSUMER: consumer, MODE: "call" if has_calls else "message"}
    _backlog.set(waiting, attributes)
    _dead.set(dead, attributes)
    for topic, seconds in oldest.items():  # a paused key is in the future
        _backlog_age.set(max(0.0, seconds), {**attributes, names.MESSAGING_DESTINATION_NAME: topic})


def backlog_applied(consumer: str, seconds: float) -> None:
    """Record how long the oldest message of a transaction waited before it took effect."""
    record(_backlog_duration.record, seconds, {CONSUMER: consumer})


def lease_extended(until: float) -> None:
    """Set until when, by the monotonic clock, what is observed of the outbox stays true."""
    OfOutbox.leased_until = until


def observe_outbox(lag_events: int, oldest: Mapping[str, datetime], *, is_all: bool = True) -> None:
    """Set how many events wait to be published, and since when the oldest one of each topic does.

    Without `is_all` these are the topics of the events that are sent next, and others wait behind
    them: the delay of other topics is not known, and not reported. Otherwise it is 0.
    """
    _outbox_topics.update(oldest)
    topics = [*(_outbox_topics if is_all else oldest)]

    def seconds(*moments: datetime) -> float:  # the database's clock may be ahead
        return max([0.0, *map(_since, moments)])

    def by_topic() -> list[Observation]:
        waited = {topic: seconds(moment) for topic, moment in oldest.items()}
        return [
            Observation(waited.get(topic, 0.0), {names.MESSAGING_DESTINATION_NAME: topic})
            for topic in topics
        ]

    _lag_events.read = lambda: lag_events
    _lag_duration.read = lambda: seconds(*oldest.values())
    _outbox_delay.read = by_topic


def observe_rejected(waiting: int, dead: int, paused: int = 0) -> None:
    """Set how many events in this relay's shards wait for a topic, are dead, or are paused."""
    numbers = {"waiting": waiting, "dead": dead, "paused": paused}
    found = [Observation(number, {OUTCOME: state}) for state, number in numbers.items()]
    _rejected.read = lambda: found


def forget_outbox() -> None:
    """Drop what was observed of the outbox, until the relay observes it again."""
    for gauge in (_lag_events, _lag_duration, _outbox_delay, _rejected):
        gauge.read = lambda: None


def observe_partitions(until: datetime, since: datetime | None) -> None:
    """Set until when there are partitions for new events, and since when every message is
    remembered; None: since the beginning."""
    _ahead.read = lambda: -_since(until)
    _coverage.read = lambda: None if since is None else _since(since)


def observe_retention(held: int, finished_at: datetime) -> None:
    """Set how many partitions are due to be dropped and still needed, and as of when."""
    _held.set(held)
    _retention_age.read = lambda: _since(finished_at)


def observe_throttles(asked: Sequence[tuple[str, str, float, float | None]]) -> None:
    """Set what people have asked: kind and name of a subject, what may be taken of it in a second,
    and the seconds since then; None: it ends by itself."""
    found = [({KIND: kind, SUBJECT: name}, rate, age) for kind, name, rate, age in asked]
    _throttle_rate.read = lambda: [Observation(rate, subject) for subject, rate, _ in found]
    _throttle_age.read = lambda: [
        Observation(age, subject) for subject, _, age in found if age is not None
    ]
