"""The outcome of a transaction for its messages, and its report to the log and to metrics."""

import logging
from collections import Counter
from dataclasses import dataclass, field

from pipeline.events.cloudevents import names_of
from pipeline.events.message import Record
from pipeline.handlers.policy import GAP, PARKED, Decision, dead
from pipeline.observe import metrics, traces
from pipeline.observe.logs import LONGEST_KEY

from .backlog import Row
from .item import IdentityMismatch, Item

log = logging.getLogger(__name__)


@dataclass
class BatchOutcome:
    """The outcome of a transaction for its messages."""

    applied: list[Item] = field(default_factory=list)
    duplicates: list[Item] = field(default_factory=list)
    superseded: list[tuple[Item, str]] = field(default_factory=list)
    """Messages of which a later one in their sequence was applied, with its name; no handler was
    called."""
    mismatched: list[tuple[Item, IdentityMismatch]] = field(default_factory=list)
    decided: list[tuple[Item, Decision]] = field(default_factory=list)
    """Messages that are not applied now: parked, or dead."""
    undecoded: list[Row] = field(default_factory=list)
    """Records that can't be given to a handler."""

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

    def report(self, group: str) -> None:
        """Count and log the outcome, after the commit."""
        successes = (("new", self.applied), ("duplicate", self.duplicates))
        counts: Counter[tuple[str, str, str]] = Counter(
            (item.record.topic, item.consumer, outcome)
            for outcome, items in successes
            for item in items
        )
        if log.isEnabledFor(logging.DEBUG):
            for outcome, items in successes:
                for item in items:
                    _log_success(item, outcome)

        def count(item: Item, outcome: str) -> None:
            counts[item.record.topic, item.consumer, outcome] += 1

        for item, by in self.superseded:
            count(item, "superseded")
            _log_superseded(item, by)
        for item, decision in self.decided:
            if decision.is_assumed:
                continue
            count(item, "dead" if decision.is_dead else "parked")
            if decision.is_decided:
                _log_decision(item, decision)
        for item, error in self.mismatched:
            count(item, "mismatch")
            _log_decision(item, dead(item.handler.policy, "identity mismatch", error))
        for row in self.undecoded:
            outcome = "dead" if row.decision.is_dead else "parked"
            counts[row.record.topic, row.consumer, outcome] += 1
            _log_undecoded(row.record, row.decision)
        for (topic, consumer, outcome), number in counts.items():
            metrics.processed(topic, consumer, outcome, number, group)


def _log_undecoded(record: Record, decision: Decision) -> None:
    id, traceparent = names_of(record)
    with traces.within(traceparent):
        log.log(
            logging.ERROR if decision.is_dead else logging.WARNING,
            "%s: %s/%s at offset %s: %s: %s",
            "dead" if decision.is_dead else "tried again later",
            record.topic,
            record.partition,
            record.offset,
            decision.reason,
            decision.error,
            extra=_place(record) | {"reason": decision.reason} | ({"message_id": id} if id else {}),
        )


def _log_success(item: Item, outcome: str) -> None:
    with traces.within(item.trace or item.message.traceparent):
        log.debug("%s: %s", _what(item), outcome, extra=_names(item) | {"reason": outcome})


def _log_superseded(item: Item, by: str) -> None:
    with traces.within(item.trace or item.message.traceparent):
        log.info(
            "%s of sequence %s is superseded: %s was applied",
            _what(item),
            item.sequence,
            by,
            extra=_names(item) | {"reason": "superseded"},
        )


def _log_decision(item: Item, decision: Decision) -> None:
    message = item.message
    policy = item.handler.policy
    # A message with another one's identity has a row of its own, whose key is not the marker's.
    key = item.row or (b"" if decision.reason == "identity mismatch" else item.key)
    letter = key.hex()[:16]
    if decision.is_dead:
        level, then = logging.ERROR, f"is dead ({decision.reason}, attempt {decision.attempts})"
        then += f", letter {letter}" if letter else ""
    elif decision.reason in (PARKED, GAP):
        # Not a failure, and possibly the outcome of every message for hours: metrics count them.
        level, then = logging.DEBUG, f"{decision.reason}, again in {decision.due_in:.0f} s"
    else:
        attempt = f"attempt {decision.attempts} of {policy.attempts}"
        level, then = (
            logging.WARNING,
            f"{decision.reason} ({attempt}), again in {decision.due_in:.0f} s",
        )
    with traces.within(decision.trace or item.trace or message.traceparent):
        log.log(
            level,
            "%s %s: %s",
            _what(item),
            then,
            decision.error,
            extra=_names(item)
            | {"reason": decision.reason}
            | ({"letter": letter} if letter else {}),
        )


def _what(item: Item) -> str:
    message = item.message
    return f"{item.consumer}: {message.type} {message.id!r}"


def _names(item: Item) -> dict[str, object]:
    message = item.message
    return _place(item.record) | {
        "consumer": item.consumer,
        "message_id": message.id,
        "message_type": message.type,
    }


def _place(record: Record) -> dict[str, object]:
    place: dict[str, object] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
    }
    return place | ({"key": record.key[:LONGEST_KEY]} if record.key else {})
