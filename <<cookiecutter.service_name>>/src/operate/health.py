"""Checks of a service's status: for each, its threshold and the sentence for what it finds.

`service doctor` and the operations page report them. A threshold that an alert has, too, bears the
alert's name in `deploy/prometheus/alerts.yaml`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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


Cases = Iterable[Mapping[str, Any]]
"""What is not as it should be: values for a check's texts, and the `level` where it varies."""


@dataclass(frozen=True)
class Check:
    """What is looked for, and the sentences for it."""

    name: str
    level: Level
    found: str
    advice: str

    def findings(self, cases: Cases) -> list[Finding]:
        """Return a finding for each case; one that is `ok` if there is none."""
        found = [
            Finding(
                one.get("level", self.level),
                self.found.format(**one),
                self.advice.format(**one),
                check=self.name,
            )
            for one in cases
        ]
        return found or [Finding("ok", "as it should be", check=self.name)]


@dataclass(frozen=True)
class StatusCheck(Check):
    """A check of a service's status."""

    part: str
    """The part of the status that it needs."""
    cases: Callable[[Status], Cases]


def judge(status: Status) -> Iterator[Finding]:
    """Yield what every check finds; of a part that is not known only that, once."""
    for part in dict.fromkeys(one.part for one in CHECKS):
        if why := status.unknown.get(part):
            yield Finding("warning", f"not known: {why}", "correct what it names", check=part)
    for check in CHECKS:
        if check.part not in status.unknown:
            yield from check.findings(check.cases(status))


def _count(number: int) -> str:
    return format_count(number, AT_MOST)


def _late_outbox(status: Status) -> Cases:
    if status.outbox_seconds > OUTBOX_LAG:
        yield {
            "count": _count(status.outbox_events),
            "seconds": status.outbox_seconds,
            "shards": status.shards_without_relay,
            "level": "wrong" if status.shards_without_relay else "warning",
        }


def _rejected(status: Status) -> Cases:
    for one in status.rejected:
        if one.oldest > EVENTS_REJECTED:
            yield vars(one) | {"count": _count(one.count)}


def _dead(number: int) -> Cases:
    return [{"count": _count(number)}] if number else []


def _waiting(status: Status, applies: Callable[[str, Backlog], bool]) -> Cases:
    """Return the consumers for which messages wait, and to which something applies."""
    for name, one in status.backlog.items():
        if one.waiting and applies(name, one):
            yield vars(one) | {"name": name or "(none)", "count": _count(one.waiting)}


def _not_ahead(status: Status) -> Cases:
    until = status.ahead_until
    if until is None or (until - status.at.date()).days < NO_PARTITION_AHEAD:
        yield vars(status)


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
        "wrong",
        "the outbox is another database cluster's, and nothing is published",
        "run `service relay reset`",
        "outbox",
        lambda status: [] if status.is_this_cluster else [{}],
    ),
    StatusCheck(
        "outbox",
        "warning",
        "{count} events wait, one for {seconds:,.0f} seconds; {shards} shards have no relay",
        "start `service relay`, or `service run`; if every shard has a relay, see its"
        " `/health/ready` (NoRelayOwner and OutboxLag in the runbook)",
        "outbox",
        _late_outbox,
    ),
    StatusCheck(
        "rejected events",
        "wrong",
        "Kafka takes no events for topic {topic} ({reasons}): {count} wait, one for"
        " {oldest:,.0f} seconds",
        "see `service dead events list --waiting --summary`, and correct what it names: they are"
        " published then (EventsRejected in the runbook)",
        "rejected",
        _rejected,
    ),
    StatusCheck(
        "dead letters",
        "warning",
        "dead messages need a decision: {count}",
        "see `service dead list`, correct the cause, and redrive or discard them",
        "backlog",
        lambda status: _dead(sum(one.dead for one in status.backlog.values())),
    ),
    StatusCheck(
        "dead events",
        "warning",
        "dead events need a decision: {count}",
        "see `service dead events list`, correct the cause, and redrive or discard them",
        "rejected",
        lambda status: _dead(status.dead_events),
    ),
    StatusCheck(
        "backlog",
        "warning",
        "messages wait for consumer {name}: {count}, one for {oldest:,.0f} seconds",
        "see `service dead list --waiting --summary` (BacklogAge in the runbook)",
        "backlog",
        lambda status: _waiting(status, lambda _, one: one.oldest > BACKLOG_AGE),
    ),
    StatusCheck(
        "consumers",
        "warning",
        "no handler here is consumer {name}, for which messages wait: {count}",
        "deploy it again; to discard them, as one that ignores them",
        "backlog",
        lambda status: _waiting(status, lambda name, _: name not in {*status.consumers, ""}),
    ),
    StatusCheck(
        "partitions ahead",
        "wrong",
        "the outbox has partitions until {ahead_until}",
        "run `service retention run`, and see why no running service does",
        "memory",
        _not_ahead,
    ),
    StatusCheck(
        "held partitions",
        "warning",
        "{name} is due to go: {why}",
        "see `service retention status`",
        "retention",
        lambda status: [{"name": name, "why": why} for name, why in status.held.items()],
    ),
    StatusCheck(
        "partitions",
        "warning",
        "{topic} has partitions that were never read: {numbers}",
        "start `service run`; if they were added, keys have moved there, and what is in their old"
        " partitions may be handled after it",
        "positions",
        _never_read,
    ),
    StatusCheck(
        "positions",
        "wrong",
        "{topic}/{partition} stands at offset {position}, and the brokers have {first} to {end}"
        " (PartitionStuck in the runbook)",
        "see what was lost, then `service topics seek {topic} --partition {partition} --to"
        " earliest`, first with --dry-run",
        "positions",
        lambda status: [vars(one) for one in status.readings if one.is_out_of_range],
    ),
    StatusCheck(
        "readers",
        "wrong",
        "{topic}/{partition} has no reader, and has not moved for over a minute, {lag:,} offsets"
        " before the end",
        "start `service run`, or `service consume` (NoConsumer in the runbook)",
        "positions",
        lambda status: _stalled(status, "no reader"),
    ),
    StatusCheck(
        "open transactions",
        "warning",
        "a producer's transaction is open in {topic}/{partition} at offset {open_transaction}:"
        " {lag:,} offsets are not read before it ends",
        "its producer ends it, or the brokers do after the producer's transaction.timeout.ms, by"
        " default a minute. If it stays: `kafka-transactions.sh describe-producers --topic {topic}"
        " --partition {partition}` names its producer, by CurrentTransactionStartOffset"
        " {open_transaction}, and `kafka-transactions.sh abort --topic {topic} --partition"
        " {partition} --start-offset {open_transaction}` aborts it: its records are never read",
        "positions",
        lambda status: _stalled(status, "transaction"),
    ),
    StatusCheck(
        "lag",
        "warning",
        "{topic}/{partition} has not moved for over a minute, {lag:,} offsets before the end",
        "see `/health/ready` of the service",
        "positions",
        lambda status: _stalled(status, "unknown"),
    ),
)
