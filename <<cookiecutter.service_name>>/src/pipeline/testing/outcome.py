"""The outcome of a step of a test: what took effect, what was published, what has failed."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, NamedTuple

import pydantic_core

from pipeline.apply.backlog import Row, mismatch_key
from pipeline.apply.item import Item
from pipeline.apply.outcome import BatchOutcome
from pipeline.events.event import Event
from pipeline.handlers.policy import Decision, Policy, dead


class Published(NamedTuple):
    """An event in the outbox, with its record's topic and key."""

    event: Event
    topic: str
    key: str | None
    sequence: int | None
    """Its number among the events of the row that it was published `of`."""


class Scheduled(NamedTuple):
    """An event that is published later, unless it is cancelled by its name."""

    event: Event
    name: str
    after: float
    """Seconds from its transaction until it is due."""
    due_at: datetime


@dataclass(frozen=True)
class Failure:
    """A message that a consumer has not applied."""

    consumer: str
    """Empty for a record that no handler could be given."""
    error: str
    """Type and text, such as `ValueError: no place`."""
    decision: Literal["parked", "dead", "rejected"]
    """`parked`: tried again after `due_in`. `dead`: a dead letter. `rejected`: one for which the
    handler has raised `Reject`."""
    reason: str
    """As in `docs/operating-errors.md`: `failed`, `attempts used up`, `identity mismatch`, …"""
    attempts: int
    due_in: float | None
    """Seconds until the next attempt, which vary by 10 %; None: there is none."""
    id: str | None
    """The CloudEvents id of the message."""


@dataclass(frozen=True)
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

    @property
    def published(self) -> list[Event]:
        """The events of `records`."""
        return [one.event for one in self.records]

    @property
    def is_duplicate(self) -> bool:
        """Whether there was nothing but duplicates."""
        others = (self.applied, self.failures, self.waiting, self.superseded, self.skipped)
        return self.duplicates > 0 and not any(others)


@dataclass
class Handled:
    """What has become of messages, by the outcomes of their transactions."""

    applied: list[str] = field(default_factory=list)
    results: list[object] = field(default_factory=list)
    failures: dict[bytes, Failure] = field(default_factory=dict)
    waiting: dict[bytes, str] = field(default_factory=dict)
    duplicates: int = 0
    superseded: int = 0

    @classmethod
    def of(cls, outcomes: Iterable[BatchOutcome]) -> "Handled":
        """Return the latest of what the outcomes say of each message."""
        handled = cls()
        for one in outcomes:
            handled._add(one)
        return handled

    def _add(self, one: BatchOutcome) -> None:
        for item in one.applied:
            self._settle(item)
            self.applied.append(item.consumer)
            text = one.returned.get(item.key)
            self.results.append(None if text is None else pydantic_core.from_json(text))
        for item in (*one.duplicates, *(item for item, _ in one.superseded)):
            self._settle(item)
        self.duplicates += len(one.duplicates)
        self.superseded += len(one.superseded)
        for item, decision in one.decided:
            if decision.is_assumed:
                continue
            self._settle(item)
            if decision.is_decided:
                failure = _failure(item.consumer, decision, item.message.id)
                self.failures[item.key] = failure
            else:
                self.waiting[item.key] = item.message.id
        for item, error in one.mismatched:
            decision = dead(Policy(), "identity mismatch", error)
            failure = _failure(item.consumer, decision, item.message.id)
            self.failures[mismatch_key(item)] = failure
        for row in one.undecoded:
            self.failures[row.key] = _of_row(row)

    def _settle(self, item: Item) -> None:
        self.failures.pop(item.key, None)
        self.waiting.pop(item.key, None)


def _of_row(row: Row) -> Failure:
    return _failure(row.consumer, row.decision, row.item.message.id if row.item else None)


def _failure(consumer: str, decision: Decision, id: str | None) -> Failure:
    is_rejected = decision.reason == "rejected"
    return Failure(
        consumer,
        decision.error or "",
        ("rejected" if is_rejected else "dead") if decision.is_dead else "parked",
        decision.reason,
        decision.attempts,
        decision.due_in,
        id,
    )
