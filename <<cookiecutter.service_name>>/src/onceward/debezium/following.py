"""The relay that runs beside Debezium's connector.

PostgreSQL does not tell two slots of one name apart. So the connector refuses a slot that is newer
than its own offset (`offset.mismatch.strategy`), and this relay publishes whatever was committed
before it found the slot.
"""

import logging
from typing import Any

import asyncpg

from onceward.apply.throttles import Throttles
from onceward.observe import metrics
from onceward.operators import stopping
from onceward.relay.cursor import ServerChanged
from onceward.relay.relay import Relay
from onceward.relay.window import Page, Progress

log = logging.getLogger(__name__)

# The snapshot of a statement is older than what its functions return: what is visible in `seen`
# was committed below `written`.
_FOLLOW = """
SELECT pg_postmaster_start_time() AS server, pg_current_snapshot() AS seen,
       (pg_current_wal_insert_lsn() - '0/0')::bigint AS written,
       (slot.confirmed_flush_lsn - '0/0')::bigint AS confirmed, slot.active_pid AS walsender
  FROM (SELECT) AS one
  LEFT JOIN pg_replication_slots AS slot
    ON slot_name = $1 AND database = current_database() AND wal_status <> 'lost'
"""

_LAG_AT_MOST = 10_000
_LAG = """
SELECT topic, count(*) AS count, min(created_at) AS oldest
  FROM (SELECT topic, created_at FROM pipeline.outbox
         WHERE xid >= pg_snapshot_xmin($1) AND NOT pg_visible_in_snapshot(xid, $1)
         ORDER BY xid LIMIT $2) AS unconfirmed
 GROUP BY topic
"""


class FollowingRelay(Relay):
    """A relay that lets a connector publish, and moves the cursor as far as its slot is confirmed.

    It publishes by itself what was committed before it found the slot, and everything while there
    is none. So events may be sent twice then, and none is skipped. Scheduled events, and those that
    wait for a topic or were redriven, stay the relay's. While the outbox has a publication, none
    waits because people have paused its topic: the connector would publish later ones of its key
    before it.
    """

    def __init__(self, *arguments: Any, slot: str, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._asked, self._ignoring = self._throttles, Throttles()
        self._slot = slot
        self._covered: dict[int, Progress] = {}
        """Shards whose events are all published, or decoded from the slot, with their progress."""
        self._noted: asyncpg.Record | None = None
        """What was committed at a moment since which the same walsender holds the slot."""
        self._has_slot = True

    async def _serve(self) -> None:
        self._covered.clear()
        self._noted = None
        await super()._serve()

    async def _step(self, driver: asyncpg.Connection, *, is_poll: bool) -> tuple[bool, bool]:
        is_published = await stopping.publication(driver) is not None
        self._throttles = self._ignoring if is_published else self._asked
        self._rejected.throttles = self._throttles
        now = await driver.fetchrow(_FOLLOW, self._slot)
        if now["server"] != self._cursor.server:
            raise ServerChanged
        has_slot = now["confirmed"] is not None
        if has_slot != self._has_slot:
            log.warning("relay: %s", self._describe(has_slot))
            self._has_slot = has_slot
        # Shards claimed meanwhile have another relay's progress, or that of a reset.
        if has_slot and self._covered == self._cursor.progress:
            await self._retry(driver)
            await self._follow(driver, now)
            self._covered = dict(self._cursor.progress)
            return False, False
        found, is_more = await super()._step(driver, is_poll=False)
        # The window was opened after the slot was found, and all of it is published.
        self._covered = dict(self._cursor.progress) if has_slot and not is_more else {}
        return found, is_more

    async def _follow(self, driver: asyncpg.Connection, now: asyncpg.Record) -> None:
        """Advance to what was noted, if that is confirmed, and note what is committed now."""
        noted = self._noted
        if noted and noted["walsender"] != now["walsender"]:
            noted = None
        if noted and now["confirmed"] >= noted["written"]:
            then = Progress(noted["seen"], None, 0, 0)
            self._cursor.advance(Page([*self._cursor.progress], [], then, now["server"]))
            noted = None
        self._noted = noted or (now if now["walsender"] else None)
        for one in {*self._cursor.progress.values()}:
            rows = await driver.fetch(_LAG, one.seen, _LAG_AT_MOST)
            count = sum(row["count"] for row in rows)
            oldest = {row["topic"]: row["oldest"] for row in rows}
            metrics.observe_outbox(count, oldest, is_all=count < _LAG_AT_MOST)
        self._failures = 0
        if now["walsender"]:
            self._health.ready("relay")
        else:
            reason = f"no connector reads the replication slot {self._slot}: see its task's status"
            self._health.not_ready("relay", reason)

    def _describe(self, has_slot: bool) -> str:
        if has_slot:
            return f"there is the replication slot {self._slot}: its connector publishes"
        return f"the replication slot {self._slot} is missing or lost: this relay publishes"
