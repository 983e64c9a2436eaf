"""What has become of messages: told to the caller, to the log and to metrics."""

import logging
from collections import Counter
from dataclasses import dataclass, field

from pipeline.events.cloudevents import names_of
from pipeline.events.message import Record
from pipeline.handlers.policy import GAP, PARKED, Decision, dead
from pipeline.observe import telemetry

from .batch import Item
from .inbox import IdentityMismatch, Known

log = logging.getLogger(__name__)

LONGEST_KEY = 100
"""Bytes of a key that the log shows."""


@dataclass
class Results:
    """What a transaction has made of its messages."""

    applied: list[Item] = field(default_factory=list)
    duplicates: list[Item] = field(default_factory=list)
    superseded: list[tuple[Item, str]] = field(default_factory=list)
    """What a later one of its sequence has overtaken, and which; no handler was called."""
    impostors: list[tuple[Item, IdentityMismatch]] = field(default_factory=list)
    fates: list[tuple[Item, Decision]] = field(default_factory=list)
    """What is not applied now."""
    unread: list[tuple[str, Record, Decision]] = field(default_factory=list)
    """Records that can't be given to a handler, and whose they are; empty: nobody's."""

    known: dict[bytes, Known] = field(default_factory=dict)
    """What was remembered of those that came before, by marker key."""
    returned: dict[bytes, str] = field(default_factory=dict)
    """What handlers have returned, as JSON, by marker key."""
    seconds: float = 0.0
    """How long the handlers have taken."""
    succeeded: set[str] = field(default_factory=set)
    """Consumers that have handled something, and the decoder if it could read something."""

    def tell(self, group: str) -> None:
        """Count and log what has been committed."""
        fine = (("new", self.applied), ("duplicate", self.duplicates))
        counts: Counter[tuple[str, str, str]] = Counter(
            (item.record.topic, item.marker.consumer, outcome)
            for outcome, items in fine
            for item in items
        )
        if log.isEnabledFor(logging.DEBUG):
            for outcome, items in fine:
                for item in items:
                    _log_fine(item, outcome)

        def count(item: Item, outcome: str) -> None:
            counts[item.record.topic, item.marker.consumer, outcome] += 1

        for item, by in self.superseded:
            count(item, "superseded")
            _log_superseded(item, by)
        for item, fate in self.fates:
            if fate.is_assumed:
                continue
            count(item, "dead" if fate.is_dead else "parked")
            if fate.is_judged:
                _log_fate(item, fate)
        for item, error in self.impostors:
            count(item, "mismatch")
            _log_fate(item, dead(item.handler.policy, "identity mismatch", error))
        for consumer, record, fate in self.unread:
            counts[record.topic, consumer, "dead" if fate.is_dead else "parked"] += 1
            _log_unread(record, fate)
        for (topic, consumer, outcome), number in counts.items():
            telemetry.processed(topic, consumer, outcome, number, group)


def _log_unread(record: Record, fate: Decision) -> None:
    id, traceparent = names_of(record)
    with telemetry.within(traceparent):
        log.log(
            logging.ERROR if fate.is_dead else logging.WARNING,
            "%s: %s/%s at offset %s: %s: %s",
            "dead" if fate.is_dead else "tried again later",
            record.topic,
            record.partition,
            record.offset,
            fate.reason,
            fate.error,
            extra=_place(record) | {"reason": fate.reason} | ({"message_id": id} if id else {}),
        )


def _log_fine(item: Item, outcome: str) -> None:
    with telemetry.within(item.trace or item.marker.message.traceparent):
        log.debug("%s: %s", _what(item), outcome, extra=_names(item) | {"reason": outcome})


def _log_superseded(item: Item, by: str) -> None:
    with telemetry.within(item.trace or item.marker.message.traceparent):
        log.info(
            "%s of sequence %s is superseded: %s was applied",
            _what(item),
            item.sequence,
            by,
            extra=_names(item) | {"reason": "superseded"},
        )


def _log_fate(item: Item, fate: Decision) -> None:
    message = item.marker.message
    policy = item.handler.policy
    # Where an impostor's letter lies is the backlog's business.
    key = item.row or (b"" if fate.reason == "identity mismatch" else item.marker.key)
    letter = key.hex()[:16]
    if fate.is_dead:
        level, then = logging.ERROR, f"is dead ({fate.reason}, attempt {fate.attempts})"
        then += f", letter {letter}" if letter else ""
    elif fate.reason in (PARKED, GAP):
        # No failure, and maybe of every message for hours: the metrics count them.
        level, then = logging.DEBUG, f"{fate.reason}, again in {fate.due_in:.0f} s"
    else:
        attempt = f"attempt {fate.attempts} of {policy.attempts}"
        level, then = logging.WARNING, f"{fate.reason} ({attempt}), again in {fate.due_in:.0f} s"
    with telemetry.within(fate.trace or item.trace or message.traceparent):
        log.log(
            level,
            "%s %s: %s",
            _what(item),
            then,
            fate.error,
            extra=_names(item) | {"reason": fate.reason} | ({"letter": letter} if letter else {}),
        )


def _what(item: Item) -> str:
    message = item.marker.message
    return f"{item.marker.consumer}: {message.type} {message.id!r}"


def _names(item: Item) -> dict[str, object]:
    message = item.marker.message
    return _place(item.record) | {
        "consumer": item.marker.consumer,
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
