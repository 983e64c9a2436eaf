"""The outcome of a step of a test: what took effect, what was published, what has failed."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, NamedTuple

import pydantic_core

from onceward.apply.outcome import BatchOutcome
from onceward.events.event import Event
from onceward.handlers.policy import Decision

from .observed import Increment, Observed

log = logging.getLogger(__name__)


class Published(NamedTuple):
    """An event in the outbox, with its record's topic and key."""

    event: Event
    topic: str
    key: str | None
    sequence: int | None
    """Its number among the events of the row that it was published `of`."""
    headers: Mapping[str, bytes | None]
    """All headers of its record, as they are sent."""


class Scheduled(NamedTuple):
    """An event that is published later, unless it is cancelled by its name."""

    event: Event
    name: str
    after: float
    """Seconds from its transaction until it is due."""
    due_at: datetime


@dataclass(frozen=True)
class Failure:
    """A message that a consumer has not applied: it failed, was parked or rejected, or is dead."""

    consumer: str
    """Empty for a record that no handler could be given."""
    error: str
    """Type and text, such as `ValueError: no place`."""
    decision: Literal["parked", "dead"]
    """`parked`: tried again after `due_in`. `dead`: a dead letter."""
    reason: str
    """As in `docs/reasons.md`: `failed`, `rejected`, `identity mismatch`, …"""
    attempts: int
    due_in: float | None
    """Seconds until the next attempt, which vary by 10 %; None: there is none."""
    id: str | None
    """The CloudEvents id of the message."""
    traceback: str | None = field(default=None, repr=False, compare=False)
    """That of the error; a handler's is also logged, so that pytest prints it if the test fails."""


@dataclass
class Outcome:
    """The outcome of a step for all messages that it has handled."""

    applied: list[str] = field(default_factory=list)
    """The consumer of each message that took effect, in their order."""
    results: list[object] = field(default_factory=list)
    """What the functions of `applied` have returned, as JSON has it, None for nothing."""
    records: list[Published] = field(default_factory=list)
    """Events that were put into the outbox, in their order."""
    calls: list[Event] = field(default_factory=list)
    """Events that were staged by `tx.call`, in their order, and are not called yet."""
    scheduled: list[Scheduled] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    """Ids of messages that wait behind another one of their key, which has failed."""
    duplicates: int = 0
    """Messages that took effect before, or are stored already."""
    superseded: int = 0
    """Messages skipped because a later one of their sequence was applied."""
    skipped: int = 0
    """Records of a type that no handler takes."""
    logs: list[logging.LogRecord] = field(default_factory=list, repr=False)
    """What the engine and the service have logged, from INFO on, and others from WARNING on."""
    metrics: list[Increment] = field(default_factory=list, repr=False)
    """Counters that have grown, those of the service's own code, too."""

    @property
    def published(self) -> list[Event]:
        """The events of `records`."""
        return [one.event for one in self.records]

    @property
    def is_duplicate(self) -> bool:
        """Whether there was nothing but duplicates."""
        others = (self.applied, self.failures, self.waiting, self.superseded, self.skipped)
        return self.duplicates > 0 and not any(others)


def outcome_of(
    batches: Iterable[BatchOutcome],
    *,
    records: list[Published],
    calls: list[Event],
    scheduled: list[Scheduled],
    skipped: int,
    observed: Observed,
) -> Outcome:
    """Return the outcome of a step: the latest of what its transactions say of each message."""
    outcome = Outcome(
        records=records, calls=calls, scheduled=scheduled, skipped=skipped, **observed._asdict()
    )
    failures: dict[bytes, Failure] = {}
    waiting: dict[bytes, str] = {}
    for one in batches:
        superseded = [item for item, _ in one.superseded]
        decided = [pair for pair in one.decided if not pair[1].is_assumed]
        outcome.duplicates += len(one.duplicates)
        outcome.superseded += len(superseded)
        settled = (*one.applied, *one.duplicates, *superseded, *(item for item, _ in decided))
        for item in settled:
            failures.pop(item.key, None)
            waiting.pop(item.key, None)
        for item in one.applied:
            text = one.returned.get(item.key)
            outcome.applied.append(item.consumer)
            outcome.results.append(None if text is None else pydantic_core.from_json(text))
        for item, decision in decided:
            if decision.is_decided:
                failures[item.key] = _failure(item.consumer, decision, item.message.id)
            else:
                waiting[item.key] = item.message.id
        for row in one.letters:
            id = row.item.message.id if row.item else None
            failures[row.key] = _failure(row.consumer, row.decision, id)
    outcome.failures += failures.values()
    outcome.waiting += waiting.values()
    return outcome


def _failure(consumer: str, decision: Decision, id: str | None) -> Failure:
    if decision.traceback and decision.attempts and decision.reason != "rejected":
        log.warning("%s has failed:\n%s", consumer, decision.traceback)
    return Failure(
        consumer,
        decision.error or "",
        "dead" if decision.is_dead else "parked",
        decision.reason,
        decision.attempts,
        decision.due_in,
        id,
        decision.traceback,
    )
