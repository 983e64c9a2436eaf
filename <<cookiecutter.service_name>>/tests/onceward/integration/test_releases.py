"""Releases: each row names the one that has written it, whatever has written it."""

from collections.abc import Callable
from datetime import timedelta

import asyncpg
import pytest
import sqlalchemy as sa

from onceward import Event, Handlers, Transaction, Writer, Writing
from onceward.apply import inbox
from onceward.relay import statements as relay_statements
from onceward.relay.scheduled import Scheduled
from onceward.servers.database import create_engine
from onceward.settings import Settings

from .applier import Applier, NewApplier
from .calling import CallWorkers, take_calls
from tests.contract.bank import Account, Deposit, Deposited

OWN, FAILING = 7, 13
"""Amounts for which the handler has a session of its own, and raises."""
LATER = timedelta(hours=1)


class Noticed(Event, type="release.noticed", topic="notices"):
    """Something that a release publishes."""

    what: str


class Rung(Event, type="release.rung"):
    """A call that a release makes."""


def acting() -> Handlers:
    """Return handlers that publish, schedule and call."""
    handlers = Handlers()

    async def ring(event: Rung, tx: Transaction) -> None:
        tx.publish(Noticed(what="rung"), key="ada")

    @handlers.on(Deposited, topic="deposits", consumer="act", loads=Account.by("account"))
    async def act(event: Deposited, tx: Transaction) -> None:
        if event.amount == FAILING:
            raise ValueError("no")
        if event.amount == OWN:
            await tx.session.execute(sa.text("SELECT 1"))
        tx.publish(Noticed(what="now"), key="ada")
        tx.publish(Noticed(what="later"), key="ada", after=LATER, name="later")
        tx.call(Rung(), key="ada")

    take_calls(handlers, Rung, "ring", ring)
    return handlers


async def releases(db: asyncpg.Connection, table: str) -> set[str | None]:
    """Return the releases that the rows of a table name."""
    rows = await db.fetch(f"SELECT release FROM pipeline.{table}")
    return {row["release"] for row in rows}


async def make_calls(applier: Applier) -> None:
    """Make the calls that are due."""
    workers, lanes = CallWorkers(applier.consume, applier.health), 1
    while lanes := await workers.work_off(lanes):
        pass


@pytest.mark.parametrize("amount", [1, OWN], ids=["shared session", "own session"])
async def test_what_a_transaction_writes_has_its_release(
    new_applier: NewApplier, db: asyncpg.Connection, amount: int
) -> None:
    applier = await new_applier(acting(), topic="deposits", release="1.4.2")
    await applier.apply(Deposit(amount), Deposit(FAILING, "bob"))
    waiting = await db.fetch("SELECT consumer FROM pipeline.backlog ORDER BY consumer")
    assert [row["consumer"] for row in waiting] == ["act", "ring"]
    for table in ("inbox", "outbox", "scheduled", "backlog"):
        assert await releases(db, table) == {"1.4.2"}, table


async def test_what_a_writer_writes_has_its_release(
    settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    engine = create_engine(settings(), name="api")
    writer = Writer(
        engine, source="/api", max_event_bytes=100_000, handlers=acting(), release="1.4.3"
    )

    async def work(writing: Writing) -> None:
        await writing.session.execute(sa.text("SELECT 1"))
        writing.publish(Noticed(what="now"), key="ada")
        writing.publish(Noticed(what="later"), key="ada", after=LATER)
        writing.call(Rung(), key="ada")

    try:
        await writer.write(work)
    finally:
        await engine.dispose()
    for table in ("outbox", "scheduled", "backlog"):
        assert await releases(db, table) == {"1.4.3"}, table


async def test_without_a_release_there_is_none_also_after_others_of_the_session(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """As of processes of version 1.0.0, and of the next client of a pooler's connection."""
    await (await new_applier(acting(), topic="deposits", release="")).apply(Deposit(1))
    assert await releases(db, "inbox") == await releases(db, "outbox") == {None}
    event = (
        "INSERT INTO pipeline.outbox (topic, event_id, source, type, content_type)"
        " VALUES ('t', 'e', 's', 'y', 'c') RETURNING release"
    )
    async with db.transaction():
        await db.execute("SELECT set_config('pipeline.release', '1.4.2', true)")
        assert await db.fetchval(event) == "1.4.2"
    assert await db.fetchval(event) is None


async def test_a_scheduled_event_keeps_the_release_that_has_scheduled_it(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    handlers = acting()
    for release, amount in (("1.4.1", 1), ("1.4.2", 2)):  # the second replaces that of the first
        applier = await new_applier(handlers, topic="deposits", release=release)
        await applier.apply(Deposit(amount))
        assert await releases(db, "scheduled") == {release}
    await db.execute("UPDATE pipeline.scheduled SET due_at = now() - interval '1 s'")
    await db.execute("DELETE FROM pipeline.outbox")
    assert await Scheduled().move(db)
    assert await releases(db, "outbox") == {"1.4.2"}
    id, at = await db.fetchrow("SELECT id, created_at FROM pipeline.outbox")
    await db.execute(relay_statements.ADD_REJECTED, [id], ["too large"], ["a test"], [True], at, at)
    assert await releases(db, "outbox_rejected") == {"1.4.2"}


async def test_calls_record_the_staging_release_and_their_markers_the_calling_one(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    handlers = acting()
    first = await new_applier(handlers, topic="deposits", release="1.4.1")
    await first.apply(Deposit(1))
    assert await releases(db, "backlog") == {"1.4.1"}
    await make_calls(await new_applier(handlers, topic="deposits", release="1.4.2"))
    by_consumer = await db.fetch("SELECT consumer, release FROM pipeline.inbox ORDER BY consumer")
    assert [tuple(row) for row in by_consumer] == [("act", "1.4.1"), ("ring", "1.4.2")]
    assert await releases(db, "outbox") == {"1.4.1", "1.4.2"}
    assert await releases(db, "backlog") == set()


async def test_a_release_is_known_since_its_first_start(db: asyncpg.Connection) -> None:
    first = "SELECT first_at FROM pipeline.release WHERE name = '1.4.2'"
    await inbox.register(db, ["act"], "1.4.2")
    since = await db.fetchval(first)
    await inbox.register(db, ["act", "another"], "1.4.2")
    await inbox.register(db, ["act"])
    assert await db.fetchval(first) == since
    assert await db.fetchval("SELECT array_agg(name) FROM pipeline.release") == ["1.4.2"]
    assert await db.fetchval("SELECT count(*) FROM pipeline.inbox_consumer") == 2


@pytest.mark.parametrize("release", ["1.4.2 ", "v'1", "x" * 41, "älter", "1:4"])
def test_a_name_that_is_no_plain_word_is_refused(
    settings: Callable[..., Settings], release: str
) -> None:
    with pytest.raises(ValueError, match="up to 40 letters"):
        settings(release=release)
