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

from pipeline.apply.throttles import Throttles
from pipeline.observe import metrics, traces
from pipeline.observe.health import Health
from pipeline.settings import Settings

from .rejections import Rejection, Rejections
from .window import COLUMNS, PAGE_BYTES, filled

log = logging.getLogger(__name__)

_FIRST_PAGE = 100
"""Enough to test whether a topic accepts events."""

_COUNT = """
SELECT topic, count(*) AS waiting, 0 AS dead, bool_or(error IS NOT NULL) AS rejects
  FROM pipeline.outbox_rejected
 WHERE shard = ANY ($1) AND died_at IS NULL
 GROUP BY topic
UNION ALL
SELECT NULL, 0, count(*), true
  FROM pipeline.outbox_rejected
 WHERE shard = ANY ($1) AND died_at IS NOT NULL AND discarded_at IS NULL
"""

# The first event of a topic is the one that is tried.
_COUNT_WAITING = """
SELECT topic, string_agg(DISTINCT reason, ', ') AS reasons, count(*) AS count,
       extract(epoch FROM clock_timestamp() - min(parked_at))::float AS oldest,
       (SELECT error IS NOT NULL FROM pipeline.outbox_rejected AS first
         WHERE first.topic BETWEEN few.topic AND few.topic AND died_at IS NULL
         ORDER BY first.topic, id LIMIT 1) AS rejects
  FROM (SELECT topic, reason, parked_at FROM pipeline.outbox_rejected
         WHERE died_at IS NULL LIMIT $1) AS few
 GROUP BY topic ORDER BY topic
"""

_COUNT_DEAD = """
SELECT count(*) FROM (SELECT FROM pipeline.outbox_rejected
                       WHERE died_at IS NOT NULL AND discarded_at IS NULL LIMIT $1) AS few
"""

_HOLD_SHARD = "SELECT FROM pipeline.outbox_cursor WHERE shard = $1 FOR UPDATE"

_REDRIVE = """
UPDATE pipeline.outbox_rejected
   SET died_at = NULL, parked_at = clock_timestamp(), reason = 'redriven', error = NULL
 WHERE id = ANY ($1)
"""

_DISCARD = """
UPDATE pipeline.outbox_rejected
   SET died_at = COALESCE(died_at, clock_timestamp()), discarded_at = clock_timestamp(),
       discarded_by = $2, discarded_why = $3
 WHERE id = ANY ($1)
"""

# After a reset, or if an older cursor was restored, an event may be stored already.
# Each event by its id: the times only tell which days to look at.
_ADD = f"""
INSERT INTO pipeline.outbox_rejected ({COLUMNS}, release, reason, error, died_at)
SELECT {COLUMNS}, release, reason, error, CASE WHEN is_dead THEN clock_timestamp() END
  FROM unnest($1::bigint[], $2::text[], $3::text[], $4::boolean[])
       AS rejected (event, reason, error, is_dead),
       LATERAL (SELECT * FROM pipeline.outbox
                 WHERE id = event AND created_at BETWEEN $5 AND $6 LIMIT 1) AS stored
    ON CONFLICT (id) DO NOTHING
"""

# With `topic = $1` the planner may scan the primary key, through the events of all topics.
_DUE = filled(
    f"""
SELECT {COLUMNS}, shard
  FROM pipeline.outbox_rejected
 WHERE topic BETWEEN $1 AND $1 AND shard = ANY ($2) AND died_at IS NULL
 ORDER BY topic, id
 LIMIT $3""",
    columns=f"{COLUMNS}, shard",
    place="id",
    at_most="$4",
)

_DELETE = "DELETE FROM pipeline.outbox_rejected WHERE id = ANY ($1)"

# The last condition avoids updates while a topic still rejects events for the same reason.
_SET = """
UPDATE pipeline.outbox_rejected AS stored
   SET reason = rejected.reason, error = rejected.error,
       died_at = CASE WHEN is_dead THEN clock_timestamp() END
  FROM unnest($1::bigint[], $2::text[], $3::text[], $4::boolean[])
       AS rejected (id, reason, error, is_dead)
 WHERE stored.id = rejected.id AND died_at IS NULL
   AND (is_dead OR (stored.reason, stored.error)
                   IS DISTINCT FROM (rejected.reason, rejected.error))
"""


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

        To be called when shards were claimed. That includes the time after an error, when it is
        unknown what was stored.
        """
        begun = monotonic()
        rows = await connection.fetch(_COUNT, shards)
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
        await connection.execute(_ADD, *_columns(events, why), min(times), max(times))

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
        rows: list[asyncpg.Record] = await connection.fetch(_DUE, topic, shards, most, PAGE_BYTES)
        if rows and topic in self.throttles.limited("events"):
            if self.throttles.left(*place):  # others of this process have taken meanwhile
                return []
            await self.throttles.took({place: len(rows)})
            # Noting that may have taken long, in which an earlier event may have been redriven.
            rows = await connection.fetch(_DUE, topic, shards, len(rows), PAGE_BYTES)
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
        await connection.execute(_DELETE, sent)
        if why:
            rejected = [event for event in events if event["id"] in why]
            await connection.execute(_SET, *_columns(rejected, why))

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


async def hold_shard(connection: asyncpg.Connection, shard: int) -> None:
    """Lock the shard to the end of the transaction: its relay stores no rejected event."""
    await connection.execute(_HOLD_SHARD, shard)


async def redrive(connection: asyncpg.Connection, ids: Sequence[int]) -> None:
    """Make dead events wait to be tried again. Call `hold_shard` before."""
    await connection.execute(_REDRIVE, ids)


async def discard(
    connection: asyncpg.Connection, ids: Sequence[int], *, operator: str, why: str
) -> None:
    """Close events, whose rows are kept for a while. Call `hold_shard` before."""
    await connection.execute(_DISCARD, ids, operator, why)


async def count(connection: asyncpg.Connection, most: int) -> tuple[list[asyncpg.Record], int]:
    """Return by topic why events wait, how many, for how many seconds, and whether it rejects them,
    or they wait because people want it; and the number of dead events.

    At most so many of each are counted.
    """
    waiting: list[asyncpg.Record] = await connection.fetch(_COUNT_WAITING, most)
    return waiting, await connection.fetchval(_COUNT_DEAD, most)


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
