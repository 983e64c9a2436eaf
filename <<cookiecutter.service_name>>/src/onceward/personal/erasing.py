"""Forgetting a subject: its keys are deleted, and what can't be read any more is found.

A transaction that runs meanwhile may make a new key for the subject. So the command waits for those
that ran when the keys were deleted, and deletes again.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import asyncpg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from onceward.errors import OncewardError
from onceward.handlers.policy import FORGOTTEN
from onceward.operators import audit
from onceward.operators.audit import Change

from .keys import THE_SERVICE
from .marks import Subject
from .stored import Stored

log = logging.getLogger(__name__)

_POLL = 0.2

_FORGET = """
WITH deleted AS (
    DELETE FROM pipeline.personal_key
     WHERE subject = {name} AND (kind IS NULL OR kind = {kind}) RETURNING id
), noted AS (
    INSERT INTO pipeline.personal_forgotten (subject, kind, keys, forgotten_by)
    SELECT {name}, {kind}, (SELECT count(*) FROM deleted), {by}
)
SELECT id FROM deleted
"""

_FORGET_AGAIN = """
DELETE FROM pipeline.personal_key WHERE subject = $1 AND (kind IS NULL OR kind = $2) RETURNING id
"""

_OF_A_KIND = "SELECT kind FROM pipeline.personal_key WHERE subject = {name} AND kind <> '' LIMIT 1"

_ADD_TO_THE_LATEST = """
UPDATE pipeline.personal_forgotten SET keys = keys + $3
 WHERE id = (SELECT max(id) FROM pipeline.personal_forgotten
              WHERE subject = $1 AND kind IS NOT DISTINCT FROM $2)
"""

_RUNNING = "SELECT pg_snapshot_xip(pg_current_snapshot())::text"

_STILL_RUN = """
SELECT count(*) FROM unnest($1::text[]::xid8[]) AS xid WHERE pg_xact_status(xid) = 'in progress'
"""

_IDS = "SELECT id FROM pipeline.personal_key WHERE subject = $1"

_COUNT = "SELECT count(*) FROM pipeline.{table} WHERE position($1 IN {column}) > 0 AND {which}"

_FIND = """
SELECT {key} AS key, {column} AS stored FROM pipeline.{table}
 WHERE position($1 IN {column}) > 0 AND died_at IS NOT NULL AND discarded_at IS NULL
"""

_MARK = "UPDATE pipeline.{table} SET reason = $2 WHERE {key} = ANY ($1) AND died_at IS NOT NULL"

_LISTED = """
SELECT subject, kind, keys, forgotten_by, forgotten_at FROM pipeline.personal_forgotten
 ORDER BY id DESC LIMIT $1
"""

_SECONDS = 600.0
"""Time limit of a statement that reads a table of payloads."""


@dataclass(frozen=True)
class Forgotten:
    """What was found when a subject was forgotten."""

    keys: int
    """So many were deleted."""
    dead_letters: int
    """Dead letters that can't be read any more."""
    dead_events: int
    """The same of events that Kafka rejects."""
    waiting: int
    """Messages in the backlog with data of the subject. They are handled with null in its place, or
    become dead letters."""
    scheduled: int
    """Scheduled events with such data. They are published with null, or become dead events."""
    of_the_service: int
    """Rows that are encrypted as a whole by the service's key: they may be about anybody."""
    are_all_done: bool
    """Whether all transactions that ran at the time have ended."""


class NoSubject(OncewardError, ValueError):
    """The subject to be forgotten is not named, or not by a name of it alone."""


def _named(subject: str, kind: str | None) -> Subject:
    """Return the subject. Raises `NoSubject`."""
    if not subject:
        raise NoSubject("a subject is named by the id in its events, not by an empty text")
    return Subject.of(subject, kind or "")


def _demand_one(one: Subject, kind: str | None, other: str | None) -> None:
    """Raise `NoSubject` if no `kind` was given, and there is a subject of the `other` kind."""
    if kind is None and other is not None:
        id = one.name.removeprefix(f"{other}:")
        raise NoSubject(
            f"{one.name!r} is the id of a subject without a kind, or the subject {id!r} of the kind"
            f" {other!r}, which has keys: nothing is deleted. Name the one that is meant, by the"
            f" kind {other!r} and the id {id!r}, or by an empty kind (in a handler `kind=`, of the"
            " command `--kind`)"
        )


async def forget(session: AsyncSession, subject: str, *, by: str, kind: str | None = None) -> int:
    """Delete the keys of a subject in a handler's transaction; return their number.

    For a service that gets the order to erase as an event: `await forget(tx.session, "17",
    by=event.clerk)`; with `kind="driver"` for an id of that kind. Data of the subject that is
    stored afterwards has a new key. Raises `NoSubject` for an empty subject, and if the id is the
    name of a subject with a kind as well, unless `kind=""` says that it has none.
    """
    one = _named(subject, kind)
    values = {"name": one.name, "kind": one.kind, "by": by}
    of_a_kind = sa.text(_OF_A_KIND.format(name=":name"))
    _demand_one(one, kind, await session.scalar(of_a_kind, {"name": one.name}))
    statement = sa.text(_FORGET.format(name=":name", kind="CAST(:kind AS text)", by=":by"))
    found = (await session.execute(statement, values)).all()
    log.info("personal data: %s keys of subject %r deleted by %s", len(found), one.name, by)
    return len(found)


async def forget_now(
    connection: asyncpg.Connection,
    subject: str,
    *,
    by: str,
    why: str | None = None,
    wait: float,
    kind: str | None = None,
) -> Forgotten:
    """Delete the keys of a subject, and find what can't be read any more; the audit has it.

    Waits up to `wait` seconds for the transactions that are running. Raises `NoSubject`.
    """
    one = _named(subject, kind)
    _demand_one(one, kind, await connection.fetchval(_OF_A_KIND.format(name="$1"), one.name))
    statement = _FORGET.format(name="$1", kind="$2::text", by="$3")
    async with audit.changing(connection, Change(by, "forget", why)) as subjects:
        rows = await connection.fetch(statement, *one, by)
        subjects.append(f"subject {one.name}")
    ids = [row["id"] for row in rows]
    running = [row[0] for row in await connection.fetch(_RUNNING)]
    deadline = monotonic() + wait
    while still := await connection.fetchval(_STILL_RUN, running):
        if monotonic() >= deadline:
            break
        await asyncio.sleep(_POLL)
    more = [row["id"] for row in await connection.fetch(_FORGET_AGAIN, *one)]
    if more:
        await connection.execute(_ADD_TO_THE_LATEST, *one, len(more))
    ids += more
    log.info("personal data: %s keys of subject %r deleted by %s", len(ids), one.name, by)
    service = [row["id"] for row in await connection.fetch(_IDS, THE_SERVICE.name)]
    return Forgotten(
        keys=len(ids),
        dead_letters=await _mark(connection, "backlog", "key", "value", ids),
        dead_events=await _mark(connection, "outbox_rejected", "id", "payload", ids),
        waiting=await _count(connection, "backlog", "value", ids, "died_at IS NULL"),
        scheduled=await _count(connection, "scheduled", "payload", ids),
        of_the_service=await _count(connection, "backlog", "value", service),
        are_all_done=not still,
    )


async def _mark(
    connection: asyncpg.Connection, table: str, key: str, column: str, ids: Sequence[bytes]
) -> int:
    """Give dead rows that can't be read any more that reason; return how many there are."""
    names = {"table": table, "key": key, "column": column}
    unreadable = set()
    for id in ids:
        needle = id.hex().encode()
        for row in await connection.fetch(_FIND.format(**names), needle, timeout=_SECONDS):
            one = Stored.parse(row["stored"])
            if one is not None and not one.is_readable(one.keys - {*ids}):
                unreadable.add(row["key"])
    await connection.execute(_MARK.format(**names), list(unreadable), FORGOTTEN)
    return len(unreadable)


async def _count(
    connection: asyncpg.Connection,
    table: str,
    column: str,
    ids: Sequence[bytes],
    which: str = "true",
) -> int:
    statement = _COUNT.format(table=table, column=column, which=which)
    counts = [
        await connection.fetchval(statement, id.hex().encode(), timeout=_SECONDS) for id in ids
    ]
    return sum(counts)


async def forgotten(connection: asyncpg.Connection, limit: int) -> Sequence[asyncpg.Record]:
    """Return the subjects that were forgotten, the latest first."""
    rows: Sequence[asyncpg.Record] = await connection.fetch(_LISTED, limit)
    return rows
