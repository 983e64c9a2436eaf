"""Rejected events: those that are dead, and those that wait for their topic.

A dead event's row is kept for an operator, and later events of its key are sent. The events of a
topic that refuses some wait in order, later ones behind earlier ones, until it accepts them. Which
are dead and which wait is up to the error: see `rejections.py`.

All state is in the rows. Only the owner of a shard adds rows of it, and deletes waiting ones.
"""

import logging
import math
from collections.abc import Sequence
from time import monotonic

import asyncpg

from onceward.apply.throttles import Throttles
from onceward.observe import metrics, traces
from onceward.observe.health import Health
from onceward.settings import Settings

from . import statements
from .rejections import Rejection, Rejections
from .window import PAGE_BYTES

log = logging.getLogger(__name__)

_FIRST_PAGE = 100
"""Enough to test whether a topic accepts events."""
_COUNTED_AT_MOST = 10_000
"""Events of one topic and shard that are counted."""


class Rejected:
    """The topics for which events wait in one relay's shards, and when each is tried again."""

    def __init__(
        self, settings: Settings, health: Health, throttles: Throttles | None = None
    ) -> None:
        self._settings = settings
        self._health = health
        self.throttles = throttles or Throttles()
        """What people have asked of the events for a topic."""
        self._try_at: dict[str, float] = {}
        """When events that wait are tried again, by topic and the monotonic clock."""
        self._accepting: set[str] = set()
        """Those of the topics that have refused no event since they accepted some."""
        self._look_at = 0.0

    @property
    def is_time_to_look(self) -> bool:
        """Whether to look for events that were redriven."""
        return monotonic() >= self._look_at

    async def look(self, connection: asyncpg.Connection, shards: Sequence[int]) -> None:
        """Read which topics events wait for in the shards, and count waiting and dead events.

        Of each topic and shard at most 10,000 are counted, as any number may wait.

        To be called when shards were claimed. That includes the time after an error, when it is
        unknown what was stored.
        """
        begun = monotonic()
        rows = await connection.fetch(statements.COUNT_REJECTED_BY_TOPIC, shards, _COUNTED_AT_MOST)
        topics = {row["topic"] for row in rows if row["waiting"]}
        for topic in self._try_at.keys() - topics:
            self._end(topic)
        self._try_at = dict.fromkeys(topics, 0.0) | self._try_at
        # Without an error all of a topic wait because people want it, or to be tried.
        metrics.observe_rejected(
            waiting=sum(row["waiting"] for row in rows if row["rejects"]),
            dead=sum(row["dead"] for row in rows),
            paused=sum(row["waiting"] for row in rows if not row["rejects"]),
        )
        # Counting many rows takes long: at most a twentieth of the time is spent on it.
        self._look_at = monotonic() + 20 * (monotonic() - begun)

    def is_waiting(self, topic: str) -> bool:
        """Whether it is paused or throttled, or events wait for it: later ones wait behind them."""
        return topic in self._try_at or topic in self.throttles.asked("events")

    def seconds_to_next(self) -> float:
        """Return how long until a topic is tried again; infinite if no events wait."""
        return min(map(self._free_at, self._try_at), default=math.inf) - monotonic()

    async def add(
        self, connection: asyncpg.Connection, events: Sequence[asyncpg.Record], why: Rejections
    ) -> None:
        """Store events that were not sent, in the transaction that moves the cursor past them."""
        self._note(events, why)
        unsent = {event["topic"] for event in events if event["id"] not in why}
        for topic in unsent - self._try_at.keys():  # it is paused
            self._try_at[topic] = 0.0
            self._accepting.add(topic)
        times = [event["created_at"] for event in events]
        await connection.execute(
            statements.ADD_REJECTED, *_columns(events, why), min(times), max(times)
        )

    def next_topic(self, *, accepting: bool) -> str | None:
        """Return the topic that is to be tried first; None: none yet.

        Either of those that accept events again, or of those that refused the last ones.
        """
        topics = [one for one in self._try_at if (one in self._accepting) == accepting]
        topic = min(topics, key=self._free_at, default=None)
        return None if topic is None or self._free_at(topic) > monotonic() else topic

    async def due(
        self, connection: asyncpg.Connection, topic: str, shards: Sequence[int]
    ) -> Sequence[asyncpg.Record]:
        """Return the next events of a topic, in order, which count as taken; none if it rests.

        Send them at once: what is redriven from now on goes behind them.

        When none is left, later events of the topic are sent from the window again. Only the owner
        of the shards adds rows, so none is missed, except redriven ones, which later events have
        overtaken already.
        """
        place = "events", topic
        page = self._settings.relay_batch_events if topic in self._accepting else _FIRST_PAGE
        most = int(min(page, self.throttles.free(*place)))
        if not most:
            return []
        rows: list[asyncpg.Record] = await connection.fetch(
            statements.READ_WAITING_EVENTS, topic, shards, most, PAGE_BYTES
        )
        if rows and topic in self.throttles.limited("events"):
            if self.throttles.left(*place):  # others of this process have taken meanwhile
                return []
            await self.throttles.took({place: len(rows)})
            # Noting that may have taken long, in which an earlier event may have been redriven.
            rows = await connection.fetch(
                statements.READ_WAITING_EVENTS, topic, shards, len(rows), PAGE_BYTES
            )
        if not rows:
            self._end(topic)
        return rows

    async def settle(
        self, connection: asyncpg.Connection, events: Sequence[asyncpg.Record], why: Rejections
    ) -> None:
        """Store the results for events that were due, in the caller's transaction."""
        topic = events[0]["topic"]
        self._try_at[topic] = monotonic()
        self._accepting.add(topic)
        self._note(events, why)
        sent = [event["id"] for event in events if event["id"] not in why]
        await connection.execute(statements.DELETE_SENT_EVENTS, sent)
        if why:
            rejected = [event for event in events if event["id"] in why]
            await connection.execute(statements.UPDATE_REJECTED, *_columns(rejected, why))

    def _free_at(self, topic: str) -> float:
        """Return when events of the topic may be sent again, by the monotonic clock."""
        left = self.throttles.left("events", topic)
        return max(self._try_at[topic], monotonic() + left) if left else self._try_at[topic]

    def _note(self, events: Sequence[asyncpg.Record], why: Rejections) -> None:
        """Postpone topics that reject events, and log new rejections."""
        waiting = {}
        for event in events:
            if rejection := why.get(event["id"]):
                if rejection.waits:
                    waiting[event["topic"]] = rejection
                else:
                    _log_dead(event, rejection)
        for topic, rejection in waiting.items():
            self._accepting.discard(topic)
            self.postpone(topic)
            reason = f"events wait: {rejection.text}"
            if self._health.reasons.get(_part(topic)) != reason:
                extra = {"topic": topic, "reason": rejection.reason}
                log.warning("relay: %s", reason, extra=extra)
            self._health.not_ready(_part(topic), reason)

    def postpone(self, topic: str) -> None:
        """Let the topic alone for a while."""
        self._try_at[topic] = monotonic() + self._settings.relay_topic_pause

    def _end(self, topic: str) -> None:
        del self._try_at[topic]
        self._accepting.discard(topic)
        if _part(topic) in self._health.reasons:
            log.info("relay: no event waits for topic %s any longer", topic)
        self._health.forget(_part(topic))


def _part(topic: str) -> str:
    """Return the part of the relay's health that says whether events wait for the topic."""
    return f"relay to {topic}"


def _log_dead(event: asyncpg.Record, rejection: Rejection) -> None:
    fields = {
        "topic": event["topic"],
        "message_id": event["event_id"],
        "message_type": event["type"],
        "reason": rejection.reason,
    }
    if event["key"]:
        fields["key"] = event["key"]
    text = f"event {event['event_id']} for topic {event['topic']} is a dead letter"
    with traces.within(event["traceparent"]):
        log.error("relay: %s: %s", text, rejection.text, extra=fields)


def _columns(events: Sequence[asyncpg.Record], why: Rejections) -> list[list[object]]:
    """Return the arguments of `unnest`: ids, reasons, texts, and whether the event is dead.

    Without a rejection an event waits behind others of its topic.
    """
    found = [why.get(event["id"]) for event in events]
    return [
        [event["id"] for event in events],
        [one and one.reason for one in found],
        [one and one.text for one in found],
        [one is not None and not one.waits for one in found],
    ]
