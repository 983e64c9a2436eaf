"""Checks of a service's status: for each, its threshold and the sentence for what it finds.

`service doctor`, `service status` and the operations page report them. A threshold with a name in
parentheses is also that of the alert of this name in `deploy/prometheus/alerts.yaml`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from onceward.servers.cluster import NotAdopted

from .output import format_span
from .status import STALLED, Kind, Status, format_count

Level = Literal["ok", "warning", "wrong"]

CONSUMER_DELAY: float = 300.0
"""Seconds that a record may wait in Kafka (ConsumerDelay)."""
OUTBOX_LAG: float = 300.0
"""Seconds that an event may wait for its relay (OutboxLag)."""
BACKLOG_AGE: float = 3_600.0
"""Seconds that a message may wait in the backlog (BacklogAge)."""
PAUSED: float = 3_600.0
"""Seconds that a pause without an end may last (Paused)."""
EVENTS_REJECTED: float = 900.0
"""Seconds that an event may wait until its topic accepts it (EventsRejected)."""
NO_PARTITION_AHEAD: int = 2
"""Days for which the outbox must have partitions (NoPartitionAhead)."""


@dataclass(frozen=True)
class Finding:
    """The result of a check: what was found, and what to do about it."""

    level: Level
    found: str
    advice: str = ""
    check: str = field(default="", kw_only=True)


class _Rule(NamedTuple):
    """What is said of work that waits: whose it is, the command that takes it, the seconds that it
    may wait if one does, the alert, and where to look."""

    what: str
    command: str
    limit: float
    alert: str
    look: str
    level: Level = "warning"


_READY = "the /health/ready of the relay"
_LIST = "`service dead list --waiting --summary`"
_EVENTS = "`service dead events list --waiting --summary`, and correct what it names"
_RULES: Mapping[Kind, _Rule] = {
    "reads": _Rule("records of {}", "consume", CONSUMER_DELAY, "ConsumerDelay", "`service status`"),
    "backlog": _Rule("messages of consumer {}", "consume", BACKLOG_AGE, "BacklogAge", _LIST),
    "calls": _Rule("calls of consumer {}", "consume", BACKLOG_AGE, "BacklogAge", _LIST),
    "outbox": _Rule("events of the outbox", "relay", OUTBOX_LAG, "OutboxLag", _READY),
    "rejected": _Rule(
        "events for topic {}", "relay", EVENTS_REJECTED, "EventsRejected", _EVENTS, "wrong"
    ),
    "scheduled": _Rule("scheduled events", "relay", OUTBOX_LAG, "OutboxLag", _READY),
}


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


def paused(status: Status) -> Iterator[Finding]:
    """Nothing is paused or throttled."""
    for one in status.stops:
        found = f"{one.subject} is {one.state} for {format_span(one.seconds)}: {one.who}: {one.why}"
        advice = f"`service resume {one.subject}` lets it go on (Paused in the runbook)"
        yield Finding("warning", found, advice)


def stages(status: Status) -> Iterator[Finding]:
    """No work is due for a minute while no process takes it, and none waits for long."""
    for one in status.stages:
        if status.is_paused(one):
            continue
        rule = _RULES[one.kind]
        what = rule.what.format(one.subject or "(none)") + (f" ({one.why})" if one.why else "")
        advice = f"see {rule.look} ({rule.alert} in the runbook)"
        if one.unserved > STALLED:
            found = f"no process has taken {what} for {one.unserved:,.0f} seconds"
            start = f"start `service {rule.command}`, or `service run`; if one runs, see its"
            yield Finding("wrong", found, f"{start} /health/ready", check=one.kind)
        elif one.waiting and one.oldest > rule.limit:
            found = f"{what} wait: {format_count(one.waiting)}, one for {one.oldest:,.0f} seconds"
            yield Finding(rule.level, found, advice, check=one.kind)
        if one.is_full:
            found = f"full of due {what}: partitions wait before they store another one to be tried"
            yield Finding("wrong", f"{found} alone", advice, check=one.kind)


def dead(status: Status) -> Iterator[Finding]:
    """Nothing needs a person's decision."""
    for what, check, count, command in (
        ("events", "dead events", status.dead("rejected"), "service dead events list"),
        ("messages", "dead letters", status.dead("backlog", "calls"), "service dead list"),
    ):
        if count:
            found = f"dead {what} need a decision: {format_count(count)}"
            advice = f"see `{command}`, correct the cause, and redrive or discard them"
            yield Finding("warning", found, advice, check=check)


def consumers(status: Status) -> Iterator[Finding]:
    """Messages wait only for consumers that the service has."""
    for one in status.of("backlog", "calls"):
        if one.waiting and one.subject not in {*status.consumers, ""}:
            found = f"this service has no consumer {one.subject}, for which messages wait:"
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


def readers(status: Status) -> Iterator[Finding]:
    """No other program reads partitions of the service."""
    for who in sorted({one.stranger for one in status.readings if one.stranger}):
        places = (f"{one.topic}/{one.partition}" for one in status.readings if one.stranger == who)
        found = f"{who} reads {', '.join(places)}, and is no process of the service"
        yield Finding("wrong", found, "end that program, or give it a group of its own")


def lag(status: Status) -> Iterator[Finding]:
    """Every partition that has a reader moves, and no producer's transaction holds it."""
    for one in status.readings:
        is_unread = status.are_readers_known and not one.reader
        is_still = one.age(one.behind_since, status.at) > STALLED
        if is_unread or one.topic in status.paused_topics or not is_still:
            continue
        topic, partition, start = one.topic, one.partition, one.open_transaction
        if start is None:
            found = f"{topic}/{partition} has not moved for over a minute, {one.lag:,} offsets"
            where = f"its reader, {one.reader}" if one.reader else "the service"
            advice = f"see `/health/ready` of {where}; end one that has a copy of the database"
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


def processes(status: Status) -> Iterator[Finding]:
    """A process of each kind that the service needs was started once."""
    is_known = status.are_readers_known and "positions" not in status.unknown
    were_read = any(one.reader or one.position is not None for one in status.readings)
    unseen = ["`service consume`"] if status.readings and is_known and not were_read else []
    unseen += [] if status.was_relayed else ["`service relay`"]
    if unseen:
        found = f"no process of {' or '.join(unseen)} has been seen yet"
        yield Finding("warning", found, f"start {' and '.join(unseen)}, or `service run`")


_WORK = ("positions", "topics", "readers", "backlog", "outbox", "relays", "rejected", "scheduled")

CHECKS: Mapping[Sequence[str], Sequence[Callable[[Status], Iterator[Finding]]]] = {
    ("stops",): (paused,),
    ("outbox",): (cluster,),
    _WORK: (stages,),
    ("backlog", "rejected"): (dead,),
    ("backlog",): (consumers,),
    ("memory",): (partitions_ahead,),
    ("retention",): (held_partitions,),
    ("positions", "topics"): (partitions, positions),
    ("positions", "topics", "readers"): (readers, lag),
    ("positions", "topics", "readers", "relays"): (processes,),
}
"""By the parts of the status that they need to say that all is well."""
