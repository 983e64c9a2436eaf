"""Checks of a service's status: for each, its threshold and the sentence for what it finds.

`service doctor` and the operations page report them. A threshold that an alert has, too, bears the
alert's name in `deploy/prometheus/alerts.yaml`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .output import format_count
from .status import AT_MOST, Backlog, Status

Level = Literal["ok", "warning", "wrong"]

OUTBOX_LAG: float = 300.0
"""Seconds that an event may wait for its relay (OutboxLag)."""
BACKLOG_AGE: float = 3_600.0
"""Seconds that a message may wait in the backlog (BacklogAge)."""
EVENTS_REJECTED: float = 900.0
"""Seconds that an event may wait for its topic to take it (EventsRejected)."""
NO_PARTITION_AHEAD: int = 2
"""Days for which the outbox must have partitions (NoPartitionAhead)."""
STALLED = 60.0
"""Seconds that a partition with records to read may stand still."""


@dataclass(frozen=True)
class Finding:
    """What a check has found: what happened, what it means, and what to do."""

    level: Level
    found: str
    advice: str = ""
    check: str = field(default="", kw_only=True)


Findings = Iterator[Finding]
Cases = Iterable[Mapping[str, object]]


@dataclass(frozen=True)
class StatusCheck:
    """A check of a service's status."""

    name: str
    part: str
    """The part of the status that it needs."""
    level: Level
    cases: Callable[[Status], Cases]
    """Returns what is not as it should be: values for the texts."""
    found: str
    advice: str


def judge(status: Status) -> Findings:
    """Yield what every check finds; one that finds nothing is `ok`."""
    for check in CHECKS:
        if why := status.unknown.get(check.part):
            advice = "correct what it names"
            yield Finding("warning", f"not known: {why}", advice, check=check.name)
            continue
        cases = [*check.cases(status)]
        for case in cases:
            found, advice = check.found.format(**case), check.advice.format(**case)
            yield Finding(check.level, found, advice, check=check.name)
        if not cases:
            yield Finding("ok", "as it should be", check=check.name)


def _count(number: int) -> str:
    return format_count(number, AT_MOST)


def _late_outbox(status: Status, *, has_relays: bool) -> Cases:
    is_late = status.outbox_seconds > OUTBOX_LAG
    if is_late and has_relays == (status.shards_without_relay == 0):
        yield {
            "count": _count(status.outbox_events),
            "seconds": status.outbox_seconds,
            "shards": status.shards_without_relay,
        }


def _waiting(status: Status) -> Iterator[tuple[Mapping[str, object], Backlog]]:
    for name, one in status.backlog.items():
        if one.waiting:
            count = _count(one.waiting)
            yield {"name": name or "(none)", "count": count, "seconds": one.oldest}, one


def _dead(number: int) -> Cases:
    return [{"count": _count(number)}] if number else []


def _never_read(status: Status) -> Cases:
    begun = {one.topic for one in status.readings if one.position is not None}
    unread: dict[str, list[str]] = {}
    for one in status.readings:
        has_records = one.end != one.first
        if one.position is None and one.end is not None and (one.topic in begun or has_records):
            unread.setdefault(one.topic, []).append(str(one.partition))
    return [{"topic": topic, "numbers": ", ".join(some)} for topic, some in unread.items()]


def _stalled(status: Status, cause: Literal["no reader", "transaction", "unknown"]) -> Cases:
    """Return partitions that have records to read and have not moved, by the cause."""
    for one in status.readings:
        since = (status.at - one.moved_at).total_seconds() if one.moved_at else 0.0
        if one.position is None or not one.lag or since <= STALLED:
            continue
        if status.are_readers_known and one.reader is None:
            found = "no reader"
        else:
            found = "unknown" if one.open_transaction is None else "transaction"
        if found == cause:
            yield vars(one)


CHECKS = (
    StatusCheck(
        "cluster",
        "outbox",
        "wrong",
        lambda status: [] if status.is_this_cluster else [{}],
        "the outbox is another database cluster's, and nothing is published",
        "run `service relay reset`",
    ),
    StatusCheck(
        "relays",
        "outbox",
        "wrong",
        lambda status: _late_outbox(status, has_relays=False),
        "{count} events wait, one for {seconds:,.0f} seconds, and {shards} shards have no relay",
        "start `service relay`, or `service run` (NoRelayOwner in the runbook)",
    ),
    StatusCheck(
        "outbox",
        "outbox",
        "warning",
        lambda status: _late_outbox(status, has_relays=True),
        "{count} events wait, one for {seconds:,.0f} seconds",
        "see `/health/ready` of the relay (OutboxLag in the runbook)",
    ),
    StatusCheck(
        "rejected events",
        "rejected",
        "wrong",
        lambda status: [
            {**vars(one), "count": _count(one.count)}
            for one in status.rejected
            if one.oldest > EVENTS_REJECTED
        ],
        "Kafka takes no events for topic {topic} ({reasons}): {count} wait, one for"
        " {oldest:,.0f} seconds",
        "see `service dead events list --waiting --summary`, and correct what it names: they are"
        " published then (EventsRejected in the runbook)",
    ),
    StatusCheck(
        "dead letters",
        "backlog",
        "warning",
        lambda status: _dead(sum(one.dead for one in status.backlog.values())),
        "dead messages need a decision: {count}",
        "see `service dead list`, correct the cause, and redrive or discard them",
    ),
    StatusCheck(
        "dead events",
        "rejected",
        "warning",
        lambda status: _dead(status.dead_events),
        "dead events need a decision: {count}",
        "see `service dead events list`, correct the cause, and redrive or discard them",
    ),
    StatusCheck(
        "backlog",
        "backlog",
        "warning",
        lambda status: [case for case, one in _waiting(status) if one.oldest > BACKLOG_AGE],
        "messages wait for consumer {name}: {count}, one for {seconds:,.0f} seconds",
        "see `service dead list --waiting --summary` (BacklogAge in the runbook)",
    ),
    StatusCheck(
        "consumers",
        "backlog",
        "warning",
        lambda status: [
            case
            for case, _ in _waiting(status)
            if case["name"] not in {*status.consumers, "(none)"}
        ],
        "no handler here is consumer {name}, for which messages wait: {count}",
        "deploy it again; to discard them, as one that ignores them",
    ),
    StatusCheck(
        "partitions ahead",
        "memory",
        "wrong",
        lambda status: [vars(status)] if days_ahead(status) < NO_PARTITION_AHEAD else [],
        "the outbox has partitions until {ahead_until}",
        "run `service retention run`, and see why no running service does",
    ),
    StatusCheck(
        "held partitions",
        "retention",
        "warning",
        lambda status: [{"name": name, "why": why} for name, why in status.held.items()],
        "{name} is due to go: {why}",
        "see `service retention status`",
    ),
    StatusCheck(
        "partitions",
        "positions",
        "warning",
        _never_read,
        "{topic} has partitions that were never read: {numbers}",
        "start `service run`; if they were added, keys have moved there, and what is in their old"
        " partitions may be handled after it",
    ),
    StatusCheck(
        "positions",
        "positions",
        "wrong",
        lambda status: [vars(one) for one in status.readings if one.is_out_of_range],
        "{topic}/{partition} stands at offset {position}, and the brokers have {first} to {end}"
        " (PartitionStuck in the runbook)",
        "see what was lost, then `service topics seek {topic} --partition {partition} --to"
        " earliest`, first with --dry-run",
    ),
    StatusCheck(
        "readers",
        "positions",
        "wrong",
        lambda status: _stalled(status, "no reader"),
        "{topic}/{partition} has no reader, and has not moved for over a minute, {lag:,} offsets"
        " before the end",
        "start `service run`, or `service consume` (NoConsumer in the runbook)",
    ),
    StatusCheck(
        "open transactions",
        "positions",
        "warning",
        lambda status: _stalled(status, "transaction"),
        "a producer's transaction is open in {topic}/{partition} at offset {open_transaction}:"
        " {lag:,} offsets are not read before it ends",
        "its producer ends it, or the brokers do after the producer's transaction.timeout.ms, by"
        " default a minute. If it stays: `kafka-transactions.sh describe-producers --topic {topic}"
        " --partition {partition}` names its producer, by CurrentTransactionStartOffset"
        " {open_transaction}, and `kafka-transactions.sh abort --topic {topic} --partition"
        " {partition} --start-offset {open_transaction}` aborts it: its records are never read",
    ),
    StatusCheck(
        "lag",
        "positions",
        "warning",
        lambda status: _stalled(status, "unknown"),
        "{topic}/{partition} has not moved for over a minute, {lag:,} offsets before the end",
        "see `/health/ready` of the service",
    ),
)


def days_ahead(status: Status) -> int:
    """Return the number of days after today for which the outbox has partitions."""
    return -1 if status.ahead_until is None else (status.ahead_until - status.at.date()).days
