"""Checks of a service's status: for each, its threshold and the sentence for what it finds.

`service doctor`, `service status` and the operations page report them. A threshold with a name in
parentheses is also that of the alert of this name in `deploy/prometheus/alerts.yaml`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pipeline.servers.cluster import NotAdopted

from .status import STALLED, UNSERVED, Reading, Status, format_count

Level = Literal["ok", "warning", "wrong"]

OUTBOX_LAG: float = 300.0
"""Seconds that an event may wait for its relay (OutboxLag)."""
BACKLOG_AGE: float = 3_600.0
"""Seconds that a message may wait in the backlog (BacklogAge)."""
EVENTS_REJECTED: float = 900.0
"""Seconds that an event may wait until its topic accepts it (EventsRejected)."""
NO_PARTITION_AHEAD: int = 2
"""Days for which the outbox must have partitions (NoPartitionAhead)."""
SCHEDULED_LATE = 60.0
"""Seconds after which a scheduled event that is due must be in the outbox."""


@dataclass(frozen=True)
class Finding:
    """The result of a check: what was found, and what to do about it."""

    level: Level
    found: str
    advice: str = ""
    check: str = field(default="", kw_only=True)


def named(check: str, findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings of a check with its name; one that all is well if there are none."""
    found = [one if one.check else replace(one, check=check) for one in findings]
    return found or [Finding("ok", "as it should be", check=check)]


def judge(status: Status) -> Iterator[Finding]:
    """Yield each part that is unknown, and what checks find; without unknown parts they are ok."""
    for part, why in status.unknown.items():
        advice = "correct the cause, and run `service doctor` again"
        yield Finding("warning", f"not known: {why}", advice, check=part)
    for parts, checks in CHECKS.items():
        for check in checks:
            for one in named(check.__name__.replace("_", " "), check(status)):
                if one.level != "ok" or status.unknown.keys().isdisjoint(parts):
                    yield one


def cluster(status: Status) -> Iterator[Finding]:
    """The database is not a copy."""
    if not status.is_this_cluster:
        yield Finding("wrong", str(NotAdopted()), "run `service adopt` as that page says")


def outbox(status: Status) -> Iterator[Finding]:
    """Events are published soon."""
    if status.outbox_seconds > OUTBOX_LAG:
        is_unknown = "relays" in status.unknown
        shards = is_unknown or status.shards_without_relay
        relays = f"{shards} shards have no relay"
        if is_unknown:
            relays = "it is not known whether they have relays"
        yield Finding(
            "wrong" if shards else "warning",
            f"{format_count(status.outbox_events)} events wait, one for"
            f" {status.outbox_seconds:,.0f} seconds; {relays}",
            "start `service relay`, or `service run` (NoRelayOwner in the runbook)"
            if shards
            else "see `/health/ready` of the relay (OutboxLag in the runbook)",
        )


def scheduled(status: Status) -> Iterator[Finding]:
    """Scheduled events are moved into the outbox when they are due."""
    late = (status.at - status.next_due).total_seconds() if status.next_due else 0.0
    if late > SCHEDULED_LATE:
        found = f"scheduled events are not published: one is due for {late:,.0f} seconds"
        advice = "start `service relay`, or `service run`; if one runs, see its /health/ready"
        yield Finding("wrong", found, advice)


def rejected_events(status: Status) -> Iterator[Finding]:
    """No topic rejects all events for long."""
    for one in status.rejected:
        if one.oldest > EVENTS_REJECTED:
            yield Finding(
                "wrong",
                f"Kafka accepts no events for topic {one.topic} ({one.reasons}):"
                f" {format_count(one.count)} wait, one for {one.oldest:,.0f} seconds",
                "see `service dead events list --waiting --summary`, and correct what it names:"
                " they are published then (EventsRejected in the runbook)",
            )


def dead_events(status: Status) -> Iterator[Finding]:
    """No event needs a person's decision."""
    yield from _undecided("events", status.dead_events, "service dead events list")


def dead_letters(status: Status) -> Iterator[Finding]:
    """No message needs a person's decision."""
    dead = sum(one.dead for one in status.backlog.values())
    yield from _undecided("messages", dead, "service dead list")


def _undecided(what: str, count: int, command: str) -> Iterator[Finding]:
    if count:
        found = f"dead {what} need a decision: {format_count(count)}"
        advice = f"see `{command}`, correct the cause, and redrive or discard them"
        yield Finding("warning", found, advice)


def backlog(status: Status) -> Iterator[Finding]:
    """No message waits for long."""
    for name, one in status.backlog.items():
        if one.waiting and one.oldest > BACKLOG_AGE:
            yield Finding(
                "warning",
                f"messages wait for consumer {name or '(none)'}: {format_count(one.waiting)},"
                f" one for {one.oldest:,.0f} seconds",
                "see `service dead list --waiting --summary` (BacklogAge in the runbook)",
            )
        if one.is_full:
            yield Finding(
                "wrong",
                f"full of due messages of consumer {name}: partitions wait before they store"
                " another one to be tried alone",
                "see `service dead list --waiting --summary` (PartitionBlocked in the runbook)",
            )


def workers(status: Status) -> Iterator[Finding]:
    """Workers take what is due."""
    for name, one in status.backlog.items():
        if one.unserved > UNSERVED and name in {*status.consumers, ""}:
            what = "calls" if one.has_calls else "messages"
            found = f"no worker takes {what} of consumer {name or '(none)'}: one is due for"
            advice = "start `service run` or `service consume`; if one runs, see its /health/ready"
            yield Finding("wrong", f"{found} {one.unserved:,.0f} seconds", advice)


def consumers(status: Status) -> Iterator[Finding]:
    """Messages wait only for consumers that the service has."""
    for name, one in status.backlog.items():
        if one.waiting and name not in {*status.consumers, ""}:
            found = f"this service has no consumer {name}, for which messages wait:"
            advice = "deploy it again; to drop them, with a handler that ignores them"
            yield Finding("warning", f"{found} {format_count(one.waiting)}", advice)


def partitions_ahead(status: Status) -> Iterator[Finding]:
    """The outbox has partitions for the next days."""
    until = status.ahead_until
    is_near = until is None or (until - status.at.date()).days < NO_PARTITION_AHEAD
    if is_near and "memory" not in status.unknown:
        advice = "run `service retention run`, and see why no running service does"
        yield Finding("wrong", f"the outbox has partitions until {until}", advice)


def held_partitions(status: Status) -> Iterator[Finding]:
    """Partitions that are due to be dropped are dropped."""
    for name, why in status.held.items():
        yield Finding("warning", f"{name} is overdue: {why}", "see `service retention status`")


def partitions(status: Status) -> Iterator[Finding]:
    """Every partition that has records is read."""
    if "positions" in status.unknown:
        return
    begun = {one.topic for one in status.readings if one.position is not None}
    unread: dict[str, list[str]] = {}
    for one in status.readings:
        has_records = one.end != one.first
        if one.position is None and one.end is not None and (one.topic in begun or has_records):
            unread.setdefault(one.topic, []).append(str(one.partition))
    for topic, numbers in unread.items():
        yield Finding(
            "warning",
            f"{topic} has partitions that were never read: {', '.join(numbers)}",
            "start `service run`. If partitions were added, keys have moved to them, and their"
            " messages there may be handled before those in their old partitions",
        )


def positions(status: Status) -> Iterator[Finding]:
    """The brokers have every position."""
    for one in status.readings:
        if one.is_out_of_range:
            yield Finding(
                "wrong",
                f"{one.topic}/{one.partition} is at offset {one.position}, and the brokers have"
                f" {one.first} to {one.end} (PartitionBlocked in the runbook)",
                f"find out what was lost, then `service topics seek {one.topic} --partition"
                f" {one.partition} --to earliest`, first with --dry-run",
            )


def _stalled(status: Status, *, has_reader: bool) -> Iterator[Reading]:
    for one in status.readings:
        is_without = status.are_readers_known and one.reader is None
        since = (status.at - one.behind_since).total_seconds() if one.behind_since else 0.0
        if one.position is not None and one.lag and since > STALLED and has_reader != is_without:
            yield one


def readers(status: Status) -> Iterator[Finding]:
    """Every partition that has records to read has a reader, which is the service."""
    for who in sorted({one.stranger for one in status.readings if one.stranger}):
        places = (f"{one.topic}/{one.partition}" for one in status.readings if one.stranger == who)
        found = f"{who} reads {', '.join(places)}, and is no process of the service"
        yield Finding("wrong", found, "end that program, or give it a group of its own")
    for one in _stalled(status, has_reader=False):
        found = f"{one.topic}/{one.partition} has no reader, and has not moved for over a minute"
        advice = "start `service run`, or `service consume` (NoConsumer in the runbook)"
        yield Finding("wrong", f"{found}, {one.lag:,} offsets before the end", advice)


def lag(status: Status) -> Iterator[Finding]:
    """Every partition that has records to read moves, and no producer's transaction holds it."""
    for one in _stalled(status, has_reader=True):
        topic, partition, start = one.topic, one.partition, one.open_transaction
        if start is None:
            found = f"{topic}/{partition} has not moved for over a minute, {one.lag:,} offsets"
            advice = "see `/health/ready` of the service"
            yield Finding("warning", f"{found} before the end", advice)
            continue
        yield Finding(
            "warning",
            f"a producer's transaction is open in {topic}/{partition} at offset {start}:"
            f" {one.lag:,} offsets are not read until it ends",
            "its producer ends it, or the brokers after the producer's transaction.timeout.ms, by"
            " default a minute. If it stays open: `kafka-transactions.sh describe-producers --topic"
            f" {topic} --partition {partition}` names its producer, by"
            f" CurrentTransactionStartOffset {start}, and `kafka-transactions.sh abort --topic"
            f" {topic} --partition {partition} --start-offset {start}` aborts it: its records are"
            " never read",
            check="open transactions",
        )


CHECKS: Mapping[Sequence[str], Sequence[Callable[[Status], Iterator[Finding]]]] = {
    ("outbox",): (cluster,),
    ("outbox", "relays"): (outbox,),
    ("scheduled",): (scheduled,),
    ("rejected",): (rejected_events, dead_events),
    ("backlog",): (dead_letters, backlog, workers, consumers),
    ("memory",): (partitions_ahead,),
    ("retention",): (held_partitions,),
    ("positions", "topics"): (partitions, positions),
    ("positions", "topics", "readers"): (readers, lag),
}
"""By the parts of the status that they need to say that all is well."""
