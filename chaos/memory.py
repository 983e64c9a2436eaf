"""Memory and time: the rig's hand on the database's clock, and on what the service remembers.

Days and generations are moved into the past only where that is true of all that anybody could tell
by them: what the service is then free to forget is never sent again and never replayed.
"""

import asyncio
import logging
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime

import asyncpg  # type: ignore[import-untyped]

from chaos.backlog import POSITIONS
from chaos.errands import CHARGE
from chaos.system import AWAY, Member, Servers
from chaos.talk import Helper
from demo import feed, witness
from demo.processes import ProcessFailed

_TIMES = {"clock_timestamp": "VOLATILE", "now": "STABLE", "statement_timestamp": "STABLE"}
# Whatever is created or asked later finds these before PostgreSQL's own.
CLOCK = (
    "CREATE SCHEMA rig",
    "CREATE TABLE rig.clock AS SELECT interval '0' AS ahead, current_date AS began",
    *(
        f"CREATE FUNCTION rig.{name}() RETURNS timestamptz LANGUAGE plpgsql {kind} AS"
        f" 'BEGIN RETURN pg_catalog.{name}() + (SELECT ahead FROM rig.clock); END'"
        for name, kind in _TIMES.items()
    ),
    "ALTER ROLE CURRENT_USER SET search_path = public, rig, pg_catalog",
)
"""A clock that can be set, for all that the service asks of its database."""
MARKERS = """
CREATE TABLE rig.marker (
    generation bigint, consumer text, source text, id text,
    PRIMARY KEY (generation, consumer, source, id))
"""
"""What was remembered in generations that are gone."""
VERSIONS = """
CREATE TABLE rig.version (parcel_id text, scans integer);
CREATE TABLE rig.unwatched (parcel_id text, scans integer);
CREATE TABLE rig.audited (parcel_id text PRIMARY KEY, scans integer)
"""
"""What an audit has written down, what came while there was none, and where the last one ended."""
AUDIT = """
CREATE FUNCTION rig.note_version() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO rig.version VALUES (NEW.id, NEW.scans); RETURN NULL; END';
CREATE TRIGGER audit AFTER INSERT OR UPDATE ON parcel
   FOR EACH ROW EXECUTE FUNCTION rig.note_version();
INSERT INTO rig.unwatched
SELECT id, number
  FROM parcel LEFT JOIN rig.audited ON parcel_id = id,
       generate_series(coalesce(audited.scans, 0) + 1, parcel.scans) AS number
"""
"""Writes down each version of a parcel's row from now on: nobody writes one until this commits."""
END_AUDIT = """
DROP TRIGGER audit ON parcel;
DROP FUNCTION rig.note_version;
INSERT INTO rig.audited SELECT id, scans FROM parcel
    ON CONFLICT (parcel_id) DO UPDATE SET scans = excluded.scans
"""

# A day is over and old enough: the service keeps the outbox for two hours, the shortest there is.
NEXT_DAY = "UPDATE rig.clock SET ahead = ahead + interval '27 hours'"
# Whoever notes that a call begins holds a lane meanwhile. Nobody is made to wait for long.
NOBODY_NOTES = (
    "SET LOCAL lock_timeout = '1s'",
    "LOCK TABLE pipeline.backlog_lane IN SHARE MODE",
)
# They are noted before, and until it is known what came of them.
UNDER_WAY = f"""
SELECT count(*) FROM pipeline.backlog
 WHERE consumer = '{CHARGE}' AND reason = 'outcome unknown' AND died_at IS NULL
"""
CLOSE = "UPDATE pipeline.inbox_generation SET opened_at = opened_at - interval '1 hour'"
CLOSED = "SELECT generation FROM pipeline.inbox_closed ORDER BY generation"
# Closed generations don't change any more.
KEEP = """
INSERT INTO rig.marker
SELECT generation, consumer, source, id FROM pipeline.inbox WHERE generation = ANY ($1)
    ON CONFLICT DO NOTHING
"""
AGE = """
UPDATE pipeline.inbox_closed SET closed_at = closed_at - interval '3000 days'
 WHERE generation <= $1
"""
MOVE_LOCK = 0x1B0C8
"""The engine's lock around the moving of scheduled events."""
_HOLD = "SELECT pg_advisory_lock($1)"
_IS_DUE = "SELECT EXISTS (SELECT FROM pipeline.scheduled WHERE due_at < clock_timestamp())"
_MOVES = """
SELECT EXISTS (
       SELECT FROM pg_locks
        WHERE locktype = 'advisory' AND objid = $1::bigint::oid AND pid <> pg_backend_pid())
"""
_END_MOVES = """
SELECT count(pg_terminate_backend(pid)) FROM pg_locks
 WHERE locktype = 'advisory' AND objid = $1::bigint::oid AND pid <> pg_backend_pid()
"""
_MAY_WRITE = "SET default_transaction_read_only = off"

# Servers that are away are told of by the schedule.
logging.getLogger("aiokafka").addHandler(logging.NullHandler())

LOOK_EVERY = 0.3
MOVES_ENDED = 3
"""Transactions that are ended in the middle of a move."""
INTO_IT = (0.0, 0.01, 0.4, 0.8)
"""Seconds after one was seen; with a delay on the way it lasts for that long."""
AT_ONCE = 0.01


class Memory:
    """What the service remembers, of what the feed sends."""

    def __init__(self, servers: Servers, feed: Helper) -> None:
        self._servers = servers
        self._feed = feed
        self._begun: dict[int, int] = {}
        """Of every generation that was closed, how much had been sent by then, at most."""
        self._sent: dict[int, tuple[datetime, dict[int, int]]] = {}
        """Where the input ended, and when, behind all copies of what a generation remembers."""
        self._forgotten = 0
        self._since = datetime.fromtimestamp(0, UTC)
        """What was sent before may be forgotten."""
        self._busy = asyncio.Lock()
        """Held while what may be forgotten is found out, a replay goes back, or the input rests."""

    async def watch(self) -> None:
        """Keep what generations remember that were closed, and note what had been sent by then."""
        await self._feed.says("ready")  # it says what it has sent from then on
        while True:
            with suppress(*AWAY):
                await self._keep()
                await self._note_ends()
            await asyncio.sleep(LOOK_EVERY)

    async def rotate(self, seconds: float) -> bool:
        """Let every generation be old at once, and what nobody sends any more be forgotten.

        Returns whether one was made old.
        """
        ends, closed = asyncio.get_running_loop().time() + seconds, False
        while asyncio.get_running_loop().time() < ends:
            with suppress(*AWAY):
                await self._servers.execute(_MAY_WRITE, CLOSE)
                closed = True
                await self._forget()
            await asyncio.sleep(LOOK_EVERY)
        return closed

    async def next_day(self) -> int:
        """Let the database's clock go on by more than a day; return how many calls are under way.

        By the leases' clock all of them are over then, and somebody else may call meanwhile.
        """
        return await self._count_calls(before=NOBODY_NOTES, then=[NEXT_DAY])

    async def calls_under_way(self) -> int:
        """Return how many calls are under way that must not be repeated blindly, at most."""
        return await self._count_calls()

    async def _count_calls(self, before: Sequence[str] = (), then: Sequence[str] = ()) -> int:
        """Count them in one transaction with other statements."""
        while True:
            with suppress(*AWAY):
                connection = await asyncpg.connect(self._servers.stack.database)
                try:
                    await connection.execute(_MAY_WRITE)
                    async with connection.transaction():
                        for statement in before:
                            await connection.execute(statement)
                        under_way: int = await connection.fetchval(UNDER_WAY)
                        for statement in then:
                            await connection.execute(statement)
                    return under_way
                finally:
                    connection.terminate()
            await asyncio.sleep(LOOK_EVERY)

    async def replay(self, member: Member, seconds: float) -> bool:
        """Have the service read the latest seconds again, as far back as it remembers.

        Returns whether it does: something may be away, or nothing was read since then.
        """
        async with self._busy:
            since = max(self._since.timestamp(), datetime.now(UTC).timestamp() - seconds)
            place = datetime.fromtimestamp(since, UTC).isoformat()
            try:
                await member.service.command(
                    *("replay", feed.TOPIC, "--from", place, "--no-wait"), log=member.log
                )
            except ProcessFailed:
                return False
        return True

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[int]:
        """Let nothing be sent, forgotten or read again in the block; yield what is left to send."""
        async with self._busy:
            self._feed.send(signal.SIGSTOP)
            try:
                yield self._feed.said["sends"] - self._feed.said["done"]
            finally:
                self._feed.send(signal.SIGCONT)

    async def hold_up_moves(self, seconds: float) -> bool:
        """Let no relay move what is due; then end the first who do, in the middle of it.

        Returns whether an event was held up.
        """
        is_held_up = False
        with suppress(*AWAY):
            connection = await asyncpg.connect(self._servers.stack.database)
            try:
                await connection.execute(_HOLD, MOVE_LOCK)
                await asyncio.sleep(seconds)
                is_held_up = await connection.fetchval(_IS_DUE)
                await connection.execute("SELECT pg_advisory_unlock_all()")
                ended, until = 0, asyncio.get_running_loop().time() + seconds
                while ended < MOVES_ENDED and asyncio.get_running_loop().time() < until:
                    if await connection.fetchval(_MOVES, MOVE_LOCK):
                        await asyncio.sleep(random.choice(INTO_IT))
                        ended += await connection.fetchval(_END_MOVES, MOVE_LOCK)
                    await asyncio.sleep(AT_ONCE)
            finally:
                connection.terminate()
        return is_held_up

    async def _forget(self) -> None:
        """Age the generations of which no copy can come any more."""
        async with self._busy:
            connection = await asyncpg.connect(self._servers.stack.database)
            try:
                at = dict(await connection.fetch(POSITIONS, feed.TOPIC))
                over = [
                    generation
                    for generation, (_, ends) in self._sent.items()
                    if generation > self._forgotten
                    and all(at.get(partition, 0) >= end for partition, end in ends.items())
                ]
                if over:
                    await connection.execute(_MAY_WRITE)
                    await connection.execute(AGE, max(over))
                    self._forgotten, (self._since, _) = max(over), self._sent[max(over)]
            finally:
                await connection.close()

    async def _note_ends(self) -> None:
        """Note where the input ends behind all that generations remember, and all its copies."""
        said = self._feed.said
        sent = [
            generation
            for generation, begun in self._begun.items()
            if generation not in self._sent
            and said["done"] >= min(begun + said["reach"], said["sends"])
        ]
        if sent:
            now = datetime.now(UTC)
            reading = witness.reading(self._servers.stack.kafka, feed.TOPIC)
            async with self._busy, reading as consumer:
                ends = await consumer.end_offsets(consumer.assignment())
            there = {one.partition: end for one, end in ends.items()}
            self._sent |= dict.fromkeys(sent, (now, there))

    async def _keep(self) -> None:
        connection = await asyncpg.connect(self._servers.stack.database)
        try:
            closed = [row["generation"] for row in await connection.fetch(CLOSED)]
            new = [generation for generation in closed if generation not in self._begun]
            if new:
                await connection.execute(_MAY_WRITE)
                await connection.execute(KEEP, new)
                await asyncio.sleep(LOOK_EVERY)  # the feed's words may be under way
                self._begun |= dict.fromkeys(new, self._feed.said["begun"])
        finally:
            await connection.close()
