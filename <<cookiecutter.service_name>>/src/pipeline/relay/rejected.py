"""The outbound backlog: events that Kafka refuses, and those that wait behind them.

The rows are the state. They wait in queues: one of a topic as a whole where the topic is refused,
else one of each key; events without a key that are refused wait for nobody, and share one. Whoever
owns a shard is the only one who puts rows of it there, and what is due is sent in the order of id.
When all of a queue is sent, its events go by the window again.
"""

import logging
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from time import monotonic
from typing import NamedTuple

import asyncpg

from pipeline.apply.outcome import LONGEST_KEY
from pipeline.observe import metrics, traces
from pipeline.settings import Settings

from .rejection import Refusal, Refused
from .window import COLUMNS, PAGE_BYTES, fitting

log = logging.getLogger(__name__)

_FIRST_PAGE = 100
_QUEUES_AT_ONCE = 50
_LONGEST_PAUSE = 12
"""How many times the first pause the longest is."""

_LOOK = """
SELECT topic, queue, count(*) AS waiting, 0 AS dead
  FROM pipeline.outbox_unsent
 WHERE shard = ANY ($1) AND died_at IS NULL
 GROUP BY topic, queue
UNION ALL
SELECT NULL, NULL, 0, count(*)
  FROM pipeline.outbox_unsent
 WHERE shard = ANY ($1) AND died_at IS NOT NULL AND discarded_at IS NULL
"""

# An event that comes again, after a reset or because the cursor went back, is there already.
# Of its key one may wait that was redriven since the last look: then it waits behind that one.
_SET_ASIDE = f"""
INSERT INTO pipeline.outbox_unsent
       ({COLUMNS}, queue, attempts, reason, error, died_at)
SELECT {COLUMNS},
       COALESCE((SELECT waiting.queue FROM pipeline.outbox_unsent AS waiting
                  WHERE waiting.topic = outbox.topic AND waiting.queue = sha256(outbox.key)
                    AND waiting.died_at IS NULL
                  LIMIT 1), aside.queue),
       attempts, reason, error, CASE WHEN is_dead THEN clock_timestamp() END
  FROM unnest($1::bigint[], $2::bytea[], $3::integer[], $4::text[], $5::text[], $6::boolean[])
       AS aside (id, queue, attempts, reason, error, is_dead)
  JOIN pipeline.outbox USING (id)
 WHERE created_at BETWEEN $7 AND $8
    ON CONFLICT (id) DO NOTHING
RETURNING topic, queue, died_at IS NOT NULL AS is_dead
"""

# Of each queue one at least: one of which nothing comes would count as empty.
_DUE = f"""
SELECT waiting.*
  FROM unnest($1::text[], $2::bytea[]) AS due (topic, queue)
 CROSS JOIN LATERAL (
       SELECT *, sum(octet_length(payload)) OVER (
                     ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
         FROM (SELECT {COLUMNS}, shard, queue, attempts, reason,
                      extract(epoch FROM clock_timestamp() - parked_at)::float AS waited
                 FROM pipeline.outbox_unsent AS unsent
                WHERE unsent.topic = due.topic AND unsent.queue = due.queue AND died_at IS NULL
                  AND shard = ANY ($3)
                ORDER BY id
                LIMIT $4) AS next) AS waiting
 WHERE before IS NULL OR before < $5
 ORDER BY id
"""

_SENT = "DELETE FROM pipeline.outbox_unsent WHERE id = ANY ($1)"

_REFUSED = """
UPDATE pipeline.outbox_unsent AS unsent
   SET queue = refused.queue, attempts = refused.attempts, reason = refused.reason,
       error = refused.error, died_at = CASE WHEN is_dead THEN clock_timestamp() END
  FROM unnest($1::bigint[], $2::bytea[], $3::integer[], $4::text[], $5::text[], $6::boolean[])
       AS refused (id, queue, attempts, reason, error, is_dead)
 WHERE unsent.id = refused.id
"""

_FOLLOW = """
UPDATE pipeline.outbox_unsent AS unsent
   SET queue = head.queue
  FROM unnest($1::text[], $2::bytea[], $3::bytea[]) AS head (topic, key, queue)
 WHERE unsent.topic = head.topic AND unsent.queue = '' AND unsent.key = head.key
   AND died_at IS NULL
"""


class Queue(NamedTuple):
    """Events of a topic that wait for each other."""

    topic: str
    name: bytes
    """Empty: all of the topic. Else a hash of the key, which is short enough for an index."""


@dataclass
class _Pause:
    """When a queue is tried again: at once, if this relay has not tried it yet."""

    until: float = 0.0
    """By the monotonic clock."""
    tries: int = 0
    told: str | None = None
    """What the log says of it."""


@dataclass(frozen=True)
class _Verdict:
    """What becomes of an event that was not sent."""

    event: asyncpg.Record
    queue: Queue
    reason: str | None = None
    """None: it waits behind another."""
    error: str | None = None
    attempts: int = 0
    is_dead: bool = False

    @property
    def is_news(self) -> bool:
        """Whether it says anything that is not stored of an event that was due."""
        stored = self.event["reason"], self.event["attempts"]
        return self.is_dead or (self.reason, self.attempts) != stored


class Unsent:
    """The queues in one relay's shards, and when each is tried again."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._queues: dict[Queue, _Pause] = {}
        self._page = _FIRST_PAGE

    async def look(self, connection: asyncpg.Connection, shards: Sequence[int]) -> None:
        """Learn what waits in the shards: what another has left there, and what was redriven.

        To be done when shards are claimed, and also after an error, which leaves in doubt what was
        stored.
        """
        rows = await connection.fetch(_LOOK, shards)
        waiting = [Queue(row["topic"], row["queue"]) for row in rows if row["waiting"]]
        self._queues = {queue: self._queues.get(queue) or _Pause() for queue in waiting}
        metrics.observe_rejected(
            waiting=sum(row["waiting"] for row in rows), dead=sum(row["dead"] for row in rows)
        )

    def holds(self, event: asyncpg.Record) -> bool:
        """Whether the event has to wait behind others."""
        return bool(self._queues) and (
            _of_topic(event) in self._queues or self._is_of_a_key_that_waits(event)
        )

    def _is_of_a_key_that_waits(self, event: asyncpg.Record) -> bool:
        return event["key"] is not None and _of_key(event) in self._queues

    def seconds_to_next(self) -> float:
        """Return when something is due; infinite if nothing waits."""
        return min((one.until for one in self._queues.values()), default=math.inf) - monotonic()

    async def park(
        self, connection: asyncpg.Connection, events: Sequence[asyncpg.Record], refused: Refused
    ) -> None:
        """Store events that were not sent, in the transaction that moves the cursor past them."""
        verdicts = self._judged(events, refused)
        self._note(verdicts)
        for event in events:
            if not refused.get(event["id"]):
                by_key = self._is_of_a_key_that_waits(event)
                verdicts.append(_Verdict(event, _of_key(event) if by_key else _of_topic(event)))
        times = [event["created_at"] for event in events]
        rows = await connection.fetch(_SET_ASIDE, *_rows(verdicts), min(times), max(times))
        for row in rows:
            if not row["is_dead"]:
                self._queues.setdefault(Queue(row["topic"], row["queue"]), _Pause())

    async def due(
        self, connection: asyncpg.Connection, shards: Sequence[int]
    ) -> Sequence[asyncpg.Record]:
        """Return the next events of the queues that are due, in order; a queue that is empty ends.

        Its events go by the window again from now on: nobody else adds any but what is redriven,
        and that has been overtaken before.
        """
        now = monotonic()
        due = [queue for queue, pause in self._queues.items() if pause.until <= now]
        due = due[:_QUEUES_AT_ONCE]
        if not due:
            return []
        limit = max(1, self._page // len(due))
        at_most = PAGE_BYTES // len(due)
        rows: list[asyncpg.Record] = await connection.fetch(
            _DUE, *_columns(due), shards, limit, at_most
        )
        for queue in set(due) - {Queue(row["topic"], row["queue"]) for row in rows}:
            if self._queues.pop(queue).told:
                log.info("relay: nothing waits any longer for what was refused by %s", queue.topic)
        if rows:
            self._page = fitting(rows, self._settings.relay_page)
        return rows

    async def settle(
        self, connection: asyncpg.Connection, rows: Sequence[asyncpg.Record], refused: Refused
    ) -> None:
        """Store what has become of events that were due, in a transaction."""
        sent = [row for row in rows if row["id"] not in refused]
        for row in sent:
            self._queues[Queue(row["topic"], row["queue"])].tries = 0
        verdicts = self._judged(rows, refused)
        self._note(verdicts)
        await connection.execute(_SENT, [row["id"] for row in sent])
        # A topic that is still refused changes nothing.
        if changed := [one for one in verdicts if one.is_news]:
            await connection.execute(_REFUSED, *_rows(changed))
        # Behind an event that its topic has been waiting for, and that is now refused itself.
        if heads := [
            (one.event["topic"], one.event["key"], one.queue.name)
            for one in verdicts
            if one.queue.name != one.event["queue"] and not one.is_dead
        ]:
            await connection.execute(_FOLLOW, *_columns(heads))

    def _judged(self, events: Sequence[asyncpg.Record], refused: Refused) -> list[_Verdict]:
        """Say what becomes of those events that were refused themselves."""
        return [
            self._judge(event, refusal) for event in events if (refusal := refused.get(event["id"]))
        ]

    def _judge(self, event: asyncpg.Record, refusal: Refusal) -> _Verdict:
        # What comes from the window waits in no queue yet.
        queue = Queue(event["topic"], event.get("queue", b""))
        attempts = event.get("attempts", 0)
        is_dead = event.get("waited", 0) > self._settings.unsent_age
        if not refusal.of_topic:
            queue, attempts = _of_key(event), attempts + 1
            is_dead = is_dead or attempts >= self._settings.unsent_attempts
        return _Verdict(event, queue, refusal.reason, refusal.text, attempts, is_dead)

    def _note(self, verdicts: Sequence[_Verdict]) -> None:
        """Let queues wait whose events are refused, and say so where it is news."""
        refused = {}
        for one in verdicts:
            if one.is_dead:
                id, topic = one.event["event_id"], one.queue.topic
                text = f"event {id} for topic {topic} is a dead letter"
                _log(logging.ERROR, text, one)
            else:
                refused[one.queue] = one
        for queue, one in refused.items():
            pause = self._queues.setdefault(queue, _Pause())
            pause.until = monotonic() + self._seconds(pause.tries)
            pause.tries += 1
            if pause.told != one.error:
                _log(logging.WARNING, "events wait", one)
            pause.told = one.error

    def _seconds(self, tries: int) -> float:
        pause = min(2.0**tries, _LONGEST_PAUSE)
        return self._settings.unsent_pause * pause * random.uniform(0.8, 1.2)


def _log(level: int, what: str, one: _Verdict) -> None:
    """Tell of an event that was refused: where a queue waits, of the last one that was."""
    event = one.event
    fields = {
        "topic": event["topic"],
        "message_id": event["event_id"],
        "message_type": event["type"],
        "reason": one.reason,
    }
    if event["key"]:
        fields["key"] = event["key"][:LONGEST_KEY]
    with traces.within(event["traceparent"]):
        log.log(level, "relay: %s: %s", what, one.error, extra=fields)


def _of_topic(event: asyncpg.Record) -> Queue:
    return Queue(event["topic"], b"")


def _of_key(event: asyncpg.Record) -> Queue:
    key = event["key"]
    return Queue(event["topic"], b"-" if key is None else sha256(key).digest())


def _rows(verdicts: Iterable[_Verdict]) -> list[list[object]]:
    return _columns(
        (one.event["id"], one.queue.name, one.attempts, one.reason, one.error, one.is_dead)
        for one in verdicts
    )


def _columns(rows: Iterable[Sequence[object]]) -> list[list[object]]:
    """Return rows as what `unnest` takes."""
    return [list(column) for column in zip(*rows, strict=True)]
