"""The outcome of a transaction for its messages, and its report to the log and to metrics."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from onceward.events.cloudevents import names_of
from onceward.events.message import Record
from onceward.handlers.policy import GAP, PARKED, Decision
from onceward.observe import metrics, traces

from .backlog import first_with
from .encryption import Encryption
from .item import Item, Row, place_of

log = logging.getLogger(__name__)

_QUIET_SECONDS = 60.0
"""Time between two lines on failed calls of a consumer. Each that is dead has a line of its own."""
_left_out: dict[str, tuple[float, int]] = {}
"""By consumer: until when lines on failed calls are left out, and how many were."""


@dataclass
class BatchOutcome:
    """The outcome of a transaction for its messages."""

    applied: list[Item] = field(default_factory=list)
    duplicates: list[Item] = field(default_factory=list)
    superseded: list[tuple[Item, str]] = field(default_factory=list)
    """Messages of which a later one in their sequence was applied, with its name; no handler was
    called."""
    letters: list[Row] = field(default_factory=list)
    """What can't be given to a handler: records that can't be decoded, or have no event, and
    messages with the identity of another one."""
    decided: list[tuple[Item, Decision]] = field(default_factory=list)
    """Messages that are not applied now: parked, or dead."""
    failed: list[tuple[Item, BaseException]] = field(default_factory=list)
    """Those of them whose handler, or flush, has failed."""
    counted: Counter[str] = field(default_factory=Counter)
    """Number of those that the breaker observes, by consumer."""
    behind: set[bytes] = field(default_factory=set)
    """Order keys of messages that later ones of the key wait for."""

    returned: dict[bytes, str] = field(default_factory=dict)
    """Results of handlers, as JSON, by marker key."""
    seconds: float = 0.0
    """Duration of the handlers' calls."""
    succeeded: set[str] = field(default_factory=set)
    """Consumers that have applied a message, and the decoder if it could decode a record."""

    events: int = 0
    """Events that were written to the outbox."""
    has_calls: bool = False
    """Whether calls were written to the backlog."""

    encryption: Encryption | None = None
    """How what is not applied is stored."""

    @property
    def has_due(self) -> bool:
        """Whether rows of the backlog are due at once."""
        return any(decision.due_in == 0.0 for _, decision in self.decided)

    def decide(self, item: Item, decision: Decision) -> None:
        """Add a decision on a message, which later ones of its key may have to wait for."""
        self.decided.append((item, decision))
        if not decision.is_dead or decision.holds:
            self.behind.add(item.order_key)

    def add(self, run: "BatchOutcome") -> None:
        """Add the outcome of a run of the transaction's messages."""
        self.applied += run.applied
        self.superseded += run.superseded
        self.decided += run.decided
        self.failed += run.failed
        self.counted += run.counted
        self.behind |= run.behind
        self.returned |= run.returned
        self.seconds += run.seconds
        self.events += run.events
        self.has_calls |= run.has_calls

    def keep_letters(self, stored: Sequence[Row]) -> None:
        """Keep the letters that this transaction has stored.

        Others were stored and reported before, or are those of an event's other consumers.
        """
        self.letters = first_with({row.key for row in stored}, self.letters)

    def report(self, group: str) -> None:
        """Count and log the outcome, after the commit."""
        counts: Counter[tuple[str, str, str]] = Counter()
        for outcome, items in (("applied", self.applied), ("duplicate", self.duplicates)):
            counts.update((item.record.topic, item.consumer, outcome) for item in items)
            if log.isEnabledFor(logging.DEBUG):
                for item in items:
                    _log(logging.DEBUG, item, f": {outcome}", outcome)
        for item, by in self.superseded:
            counts[item.record.topic, item.consumer, "superseded"] += 1
            then = f" of sequence {item.sequence} is superseded: {by} was applied"
            _log(logging.INFO, item, then, "superseded")
        for item, decision in self.decided:
            if not decision.is_assumed:
                outcome = "dead" if decision.is_dead else "parked"
                counts[item.record.topic, item.consumer, outcome] += 1
                if decision.is_decided:
                    _log_decision(item, decision, item.row or item.key)
        for row in self.letters:
            outcome = "dead" if row.decision.is_dead else "parked"
            if row.item is None:
                _log_undecoded(row)
            else:
                outcome = "identity mismatch"
                _log_decision(row.item, row.decision, row.key)
            counts[row.record.topic, row.consumer, outcome] += 1
        for (topic, consumer, outcome), number in counts.items():
            metrics.processed(topic, consumer, outcome, number, group)


def _log_undecoded(row: Row) -> None:
    record, decision = row.record, row.decision
    id, traceparent = names_of(record)
    level = logging.ERROR if decision.is_dead else logging.WARNING
    then = "dead" if decision.is_dead else "tried again later"
    place = place_of(record)
    text = f"{then}: {place}: {decision.reason}: {decision.error}"
    names: dict[str, object] = {"reason": decision.reason, "letter": row.key.hex()[:16]}
    names |= {"consumer": row.consumer, "message_id": id, "key": record.key}
    _write(level, text, record, traceparent, names)


def _log_decision(item: Item, decision: Decision, key: bytes) -> None:
    letter = key.hex()[:16]
    level = logging.WARNING
    if decision.is_dead:
        level = logging.ERROR
        then = f"is dead ({decision.reason}, attempt {decision.attempts}), letter {letter}"
    elif decision.reason in (PARKED, GAP):
        # Not a failure, and possibly the outcome of every message for hours: metrics count them.
        level = logging.DEBUG
        then = f"{decision.reason}, again in {decision.due_in:.0f} s"
    else:
        attempt = f"attempt {decision.attempts} of {item.handler.policy.attempts}"
        then = f"{decision.reason} ({attempt}), again in {decision.due_in:.0f} s"
        if item.handler.mode == "call":
            level, more = _quiet(item.consumer)
            then += more
    text = f" {then}: {decision.error}"
    _log(level, item, text, decision.reason, trace=decision.trace, letter=letter)


def _quiet(consumer: str) -> tuple[int, str]:
    """Return the level of the line on a failed call, and how many were left out before it.

    While the called service is away, each call fails, of which metrics tell.
    """
    until, left_out = _left_out.get(consumer, (0.0, 0))
    if monotonic() < until:
        _left_out[consumer] = until, left_out + 1
        return logging.DEBUG, ""
    _left_out[consumer] = monotonic() + _QUIET_SECONDS, 0
    more = f"; {left_out:,} more have failed since the last line" if left_out else ""
    return logging.WARNING, more


def _log(
    level: int, item: Item, then: str, reason: str, *, trace: str | None = None, letter: str = ""
) -> None:
    message = item.message
    names: dict[str, object] = {"message_id": message.id, "message_type": message.type}
    names |= {"consumer": item.consumer, "key": item.record.key, "reason": reason, "letter": letter}
    trace = trace or item.trace or message.traceparent
    _write(level, f"{item.name}{then}", item.record, trace, names)


def _write(
    level: int, text: str, record: Record, trace: str | None, names: Mapping[str, object]
) -> None:
    """Log a text in the trace of a message; `names` that are empty are left out."""
    extra = {name: value for name, value in names.items() if value}
    extra |= {"topic": record.topic, "partition": record.partition, "offset": record.offset}
    with traces.within(trace):
        log.log(level, "%s", text, extra=extra)
