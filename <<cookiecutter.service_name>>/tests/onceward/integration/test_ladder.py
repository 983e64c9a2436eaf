"""What counts is what committed: the message that is at fault, and no other, spends an attempt."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime, timedelta, timezone
from time import monotonic
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
import sqlalchemy as sa
from sqlalchemy import make_url
from sqlalchemy.orm import object_session

from onceward import Event, Handlers, Policy, Reject, Transaction
from onceward.apply import backlog, limits
from onceward.apply.item import Row
from onceward.apply.ladder import BATCH
from onceward.consume.partition_source import PartitionBatch, PartitionSource
from onceward.errors import is_infrastructure
from onceward.observe import metrics
from onceward.servers.database import autocommitting, create_engine
from onceward.servers.probe import Probe
from onceward.servers.retrying import Retrying
from onceward.settings import Settings

from .applier import Applier, NewApplier
from .bank import Bank
from .grantees import PASSWORD
from tests.contract.bank import Account, Deposit, Deposited, histories
from tests.servers.waiting import PATIENCE, eventually

POISON = 3
"""The amount whose handling fails."""

ENDS_ITS_CONNECTION = "SELECT pg_terminate_backend(pg_backend_pid())"
RAISE = "DO $$ BEGIN RAISE EXCEPTION 'no server' USING ERRCODE = '{}'; END $$"
AT_FLUSH = """
CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'no server' USING ERRCODE = '{}';
END $$;
CREATE TRIGGER fail BEFORE INSERT OR UPDATE ON account
FOR EACH ROW WHEN (NEW.balance = 3) EXECUTE FUNCTION fail()
"""
AT_COMMIT = AT_FLUSH.replace(
    "CREATE TRIGGER fail BEFORE", "CREATE CONSTRAINT TRIGGER fail AFTER"
).replace("FOR EACH", "DEFERRABLE INITIALLY DEFERRED FOR EACH")

AT_MARKERS = """
CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM marked WHERE "offset" = 2) AND (SELECT count(*) > {} FROM marked) THEN
        {};
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER fail AFTER INSERT ON pipeline.inbox REFERENCING NEW TABLE AS marked
FOR EACH STATEMENT EXECUTE FUNCTION fail()
"""
"""Lets the statement fail that inserts more than so many markers, one of them of offset 2."""

OF_SERVERS = ["08001", "25006", "53100", "53200", "57P01", "57P03", "58030", "XX000"]
"""Codes of errors that a server has when it can't be used, and that any statement can raise."""


def deposits(*amounts: int) -> list[Deposit]:
    return [Deposit(amount, account=f"of {amount}") for amount in amounts]


def add_to(account: Account, event: Deposited) -> Account:
    account.balance += event.amount
    account.history += f"{event.amount},"
    return account


async def add(event: Deposited, tx: Transaction) -> None:
    add_to(await tx.load_or_create(Account, event.account), event)


LATER = Policy(schedule=(60,))
IN_THE_LANE = 2
"""Calls until a message is called in a lane that has failed beside others."""


class Later(Deposited, type="later"):
    """For a handler that is called later."""


async def bank_whose_handler_executes(new_applier: NewApplier, statement: str) -> Applier:
    bank = Bank(deposits="deposits", balances="balances", name="bank")

    @bank.handlers.on(Deposited, topic="asked", consumer="ask")
    async def ask(event: Deposited, tx: Transaction) -> None:
        if event.amount == POISON:
            await tx.session.execute(sa.text(statement))
        tx.session.add(add_to(Account(event.account), event))

    return await new_applier(bank.handlers, topic="asked")


async def assert_only_the_poison_is_set_aside(
    applier: Applier, db: asyncpg.Connection, reason: str = "failed in a batch"
) -> None:
    assert set(await histories(db)) == {f"of {amount}" for amount in (1, 2, 4, 5)}
    [row] = await applier.backlog()
    assert (row["reason"], row["attempts"], row["offset"]) == (reason, 0, 2)
    assert await applier.position() == 5


async def tried_alone(applier: Applier) -> asyncpg.Record:
    """Let the only message of the backlog be tried once more, and return its row."""
    await applier.make_due()
    await applier.work_off()
    [row] = await applier.backlog()
    return row


@pytest.mark.parametrize("code", OF_SERVERS)
async def test_an_apparent_outage_is_the_messages_fault_while_the_database_works(
    new_applier: NewApplier, db: asyncpg.Connection, code: str
) -> None:
    applier = await bank_whose_handler_executes(new_applier, RAISE.format(code))
    await applier.apply(*deposits(1, 2, POISON, 4, 5))
    await assert_only_the_poison_is_set_aside(applier, db)
    row = await tried_alone(applier)
    spends = not code.startswith(("53", "58"))
    assert (row["attempts"], row["waits"]) == (int(spends), True)
    assert row["waited"] > 0


@pytest.mark.parametrize("trigger", [AT_FLUSH, AT_COMMIT], ids=["flush", "commit"])
@pytest.mark.parametrize("code", ["08006", "53100", "57P01"])
async def test_it_is_the_messages_at_the_flush_and_at_the_commit_too(
    new_applier: NewApplier, db: asyncpg.Connection, code: str, trigger: str
) -> None:
    await db.execute(trigger.format(code))
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    await applier.apply(*deposits(1, 2, POISON, 4, 5))
    await applier.work_off()
    assert set(await histories(db)) == {f"of {amount}" for amount in (1, 2, 4, 5)}
    [row] = await applier.backlog()
    assert (row["offset"], row["attempts"]) == (2, 0 if code == "53100" else 1)
    assert row["waits"]


@pytest.mark.parametrize("failure", [*OF_SERVERS, "57014", "lost"])
async def test_an_engine_statement_failing_for_many_messages_is_repeated_for_fewer(
    new_applier: NewApplier, db: asyncpg.Connection, failure: str
) -> None:
    raises = f"RAISE EXCEPTION 'no room' USING ERRCODE = '{failure}'"
    ends = "PERFORM pg_terminate_backend(pg_backend_pid())"
    await db.execute(AT_MARKERS.format(1, ends if failure == "lost" else raises))
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    await asyncio.wait_for(applier.apply(*deposits(1, 2, POISON, 4, 5)), PATIENCE)
    assert set(await histories(db)) == {f"of {amount}" for amount in (1, 2, POISON, 4, 5)}
    assert sorted(bank.calls) == sorted({*bank.calls})
    assert (await applier.backlog(), applier.outages) == ([], [])


@pytest.mark.parametrize("code", ["22021", "54000", "42501"])
async def test_a_partition_stops_exactly_at_a_record_that_cannot_be_marked(
    new_applier: NewApplier, db: asyncpg.Connection, code: str
) -> None:
    await db.execute(AT_MARKERS.format(0, f"RAISE EXCEPTION 'no' USING ERRCODE = '{code}'"))
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    with pytest.raises(asyncpg.PostgresError) as raised:
        await applier.apply(*deposits(1, 2, POISON, 4, 5))
    assert raised.value.sqlstate == code
    assert set(await histories(db)) == {"of 1", "of 2"}
    assert (await applier.position(), await applier.backlog()) == (2, [])
    others = PartitionSource(
        [PartitionBatch(applier.slot, await applier.read(*deposits(6, 7), start=9))]
    )
    assert applier.consume.first_rung(others) == BATCH, "other partitions go on as before"


async def test_a_failed_engine_statement_is_not_blamed_on_the_called_message(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    raises = "RAISE EXCEPTION 'no room' USING ERRCODE = '53200'"
    await db.execute(AT_MARKERS.format(1, raises))
    bank = Bank(deposits="deposits", balances="balances", name="bank")

    @bank.handlers.on(Later, topic=bank.deposits, consumer="later", mode="deferred")
    async def later(event: Later, tx: Transaction) -> None: ...

    applier = await new_applier(bank.handlers, topic=bank.deposits)
    others = (Deposit(n, account=f"of {n}", type="later") for n in (1, 2))
    await asyncio.wait_for(applier.apply(*others, Deposit(POISON)), 20)
    assert await histories(db) == {"ada": [POISON]}
    assert {row["consumer"] for row in await applier.backlog()} == {"later"}


@pytest.mark.parametrize(
    "fails", ["RAISE EXCEPTION 'late' USING ERRCODE = '57014'", "PERFORM pg_sleep(600)"]
)
async def test_storing_records_that_can_not_be_decoded_may_take_too_long(
    new_applier: NewApplier, db: asyncpg.Connection, fails: str
) -> None:
    await db.execute(
        f"""
        CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF (SELECT count(*) > 50 FROM added) THEN {fails}; END IF;
            RETURN NULL;
        END $$;
        CREATE TRIGGER fail AFTER INSERT ON pipeline.backlog REFERENCING NEW TABLE AS added
        FOR EACH STATEMENT EXECUTE FUNCTION fail()
        """
    )
    handlers = Handlers()

    @handlers.on(Deposited, topic="asked", consumer="ask")
    async def ask(event: Deposited, tx: Transaction) -> None: ...

    applier = await new_applier(handlers, topic="asked", transaction_timeout=5.0, lock_timeout=0.5)
    records = (Deposit(n, type="") for n in range(120))
    await asyncio.wait_for(applier.apply(*records), PATIENCE)
    assert {row["reason"] for row in await applier.backlog()} == {"missing attribute"}
    assert (len(await applier.backlog()), await applier.position()) == (120, 120)


async def test_declared_rows_that_cannot_be_locked_are_their_messages_fault(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    before, after = deposits(1, 2), deposits(4, 5)
    await applier.apply(*before, Deposit(POISON, account="no text of PostgreSQL\0"), *after)
    assert set(await histories(db)) == {f"of {amount}" for amount in (1, 2, 4, 5)}
    rows = [(row["reason"], row["attempts"], row["offset"]) for row in await applier.backlog()]
    assert rows == [("transaction failed", 1, 2)]


async def test_a_table_locked_for_long_spends_no_attempt_and_loses_nothing(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier = await new_applier(bank.handlers, topic=bank.deposits, lock_timeout=0.1)
    await applier.apply(*deposits(1, 2))
    async with db.transaction():
        await db.execute("ALTER TABLE account ADD note text")
        await applier.apply(*deposits(4, 5))
        for _ in range(3):
            await applier.make_due()
            await applier.work_off()
            rows = [(row["reason"], row["attempts"]) for row in await applier.backlog()]
            assert rows == [("locked out", 0)] * 2
    await applier.make_due()
    await applier.work_off()
    assert set(await histories(db)) == {f"of {amount}" for amount in (1, 2, 4, 5)}
    assert await applier.backlog() == []


@pytest.fixture
async def limited(db: asyncpg.Connection, database_url: str) -> AsyncIterator[sa.URL]:
    """Return the URL of a role for an applier: it may have three connections."""
    role = f"limited_{uuid4().hex[:8]}"
    await db.execute(f"""
        CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}' CONNECTION LIMIT 3;
        GRANT USAGE ON SCHEMA pipeline TO {role};
        GRANT ALL ON ALL TABLES IN SCHEMA pipeline, public TO {role};
        GRANT ALL ON ALL SEQUENCES IN SCHEMA pipeline TO {role}
    """)
    yield make_url(database_url).set(username=role, password=PASSWORD)
    await db.execute(f"""
        SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}';
        DROP OWNED BY {role}; DROP ROLE {role}
    """)


async def bank_of(role: sa.URL, new_applier: NewApplier) -> tuple[Bank, Applier]:
    """Return a bank with a first deposit, and its applier as the role."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    url = role.render_as_string(hide_password=False)
    applier = await new_applier(bank.handlers, topic=bank.deposits, database_url=url)
    await applier.apply(*deposits(1))
    return bank, applier


async def test_a_privilege_that_is_revoked_meanwhile_spends_no_attempt(
    new_applier: NewApplier, db: asyncpg.Connection, limited: sa.URL
) -> None:
    _, applier = await bank_of(limited, new_applier)
    await db.execute(f"REVOKE UPDATE ON account FROM {limited.username}")
    await applier.apply(*deposits(2, 4))
    for _ in range(3):
        await applier.make_due()
        await applier.work_off()
        assert [row["attempts"] for row in await applier.backlog()] == [0, 0]
    await db.execute(f"GRANT UPDATE ON account TO {limited.username}")
    await applier.make_due()
    await applier.work_off()
    assert set(await histories(db)) == {"of 1", "of 2", "of 4"}
    assert await applier.backlog() == []


async def test_a_reached_connection_limit_is_waited_for_without_spending_attempts(
    new_applier: NewApplier, db: asyncpg.Connection, limited: sa.URL
) -> None:
    bank, applier = await bank_of(limited, new_applier)
    batch = await applier.read(*deposits(2, 4), start=1)
    await applier.engine.dispose()
    sessions = f"SELECT count(*) FROM pg_stat_activity WHERE usename = '{limited.username}'"
    await eventually(lambda: _is_none(db, sessions))
    dsn = limited.set(drivername="postgresql").render_as_string(hide_password=False)
    others = [await asyncpg.connect(dsn) for _ in range(3)]
    applying = asyncio.create_task(applier.apply_batch(batch))
    await eventually(lambda: len(applier.outages) > 2)
    for other in others:
        await other.close()
    await applying
    assert set(await histories(db)) == {"of 1", "of 2", "of 4"}
    assert (await applier.backlog(), bank.calls) == ([], [1, 2, 4])


async def test_a_consumer_that_needed_a_session_once_shares_sessions_again(
    new_applier: NewApplier,
) -> None:
    sessions: list[str] = []
    bank = Bank(deposits="deposits", balances="balances", name="bank")

    @bank.handlers.on(Deposited, topic="asked", consumer="ask")
    async def ask(event: Deposited, tx: Transaction) -> None:
        account = await tx.load_or_create(Account, event.account)
        session = object_session(account)
        assert session is not None
        if event.amount == POISON:
            session.get_bind()
        sessions.append(type(session).__name__)
        add_to(account, event)

    applier = await new_applier(bank.handlers, topic="asked")
    await applier.apply(*deposits(1, POISON, 4))
    await applier.apply(*deposits(5, 6))
    assert sessions[-2:] == ["OwnSession"] * 2
    applier.consume._own_until["ask"] = monotonic()  # as after a minute
    await applier.apply(*deposits(7, 8))
    assert sessions[-2:] == ["SharedSession"] * 2


@pytest.mark.parametrize("fails", ["in its handler", "at the flush"])
async def test_a_failed_hot_key_is_handled_directly_in_the_next_round(
    new_applier: NewApplier, db: asyncpg.Connection, fails: str
) -> None:
    """A round is a batch of the key, and what workers find due after it."""
    poison, size = 250, 200
    dies = Policy(attempts=1)
    bank = Bank(deposits="deposits", balances="balances", name="b", options={"policy": dies})
    if fails == "in its handler":
        bank.refused.add(poison)
    else:
        on = f"= {poison * (poison + 1) // 2}"  # the sum up to it
        await db.execute(AT_FLUSH.format("22023").replace("= 3", on))
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    waiting = "SELECT count(*) FROM pipeline.backlog WHERE died_at IS NULL"
    stored = []
    for start in range(1, 5 * size, size):
        await applier.apply(*(Deposit(n) for n in range(start, start + size)))
        stored.append(await db.fetchval(waiting) > 0)
        await applier.work_off()
    assert stored == [False, fails == "at the flush", False, False, False]
    [row] = await applier.backlog()
    assert (row["offset"], row["died_at"] is None) == (poison - 1, False)
    [amounts] = (await histories(db)).values()
    assert amounts == [n for n in range(1, 5 * size + 1) if n != poison]


async def test_a_partition_waits_while_too_many_messages_are_to_be_tried_alone(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "_MOST_DUE", 2)
    await db.execute(AT_FLUSH.format("22023").replace("= 3)", "< 10)"))
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    await applier.apply(*deposits(1, 2, 10))
    with pytest.raises(backlog.BacklogFull, match=r"2 messages of deposit .* `service dead list"):
        await applier.apply(*deposits(3, 11))
    assert (await applier.position(), len(await applier.backlog())) == (3, 2)
    await applier.apply(*deposits(12, 13))  # nothing of these is stored
    await applier.work_off()
    assert [row["attempts"] for row in await applier.backlog()] == [1, 1]
    await applier.apply(*deposits(4, 14))
    assert (await applier.position(), len(await applier.backlog())) == (7, 3)


async def test_messages_that_were_only_stored_do_not_fill_the_backlog(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a pause of a consumer that shares its topic."""
    monkeypatch.setattr(backlog, "_MOST_DUE", 2)
    await db.execute(AT_FLUSH.format("22023").replace("= 3)", "< 10)"))
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    batch = await applier.read(*deposits(20, 21, 22), start=await applier.position())
    paused = PartitionSource([PartitionBatch(applier.slot, batch, stored={"deposit"})])
    attempts = Retrying(
        "the test", "PostgreSQL", unless=lambda: False, report=applier.outages.append
    )
    await applier.consume.apply(paused, attempts)
    await applier.apply(*(Deposit(n + 10, account=f"of {n}") for n in (20, 21, 22)))
    await applier.apply(*deposits(1, 10))
    reasons = Counter(row["reason"] for row in await applier.backlog())
    assert (reasons["deferred"], reasons["follows another"], reasons.total()) == (3, 3, 7)
    assert await applier.position() == 8
    assert await histories(db) == {"of 10": [10]}


async def test_a_message_over_which_connections_die_is_at_fault_at_the_third(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    applier = await bank_whose_handler_executes(new_applier, ENDS_ITS_CONNECTION)
    await applier.apply(*deposits(1, 2, POISON, 4, 5))
    await assert_only_the_poison_is_set_aside(applier, db, "undecided")
    seen = []
    for _ in range(6):
        row = await tried_alone(applier)
        seen.append((row["reason"], row["attempts"], row["losses"]))
    lost = "connection lost"
    assert seen == [
        *((lost, 0, 1), (lost, 0, 2), ("failed", 1, 0)),
        *((lost, 1, 1), (lost, 1, 2), ("failed", 2, 0)),
    ]


@pytest.mark.parametrize("others_commit", [False, True])
async def test_a_lost_connection_counts_during_outages_only_if_others_commit_between(
    new_applier: NewApplier, db: asyncpg.Connection, database_url: str, others_commit: bool
) -> None:
    name = database_url.rsplit("/", 1)[1]
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    goes_down = asyncio.Event()

    @bank.handlers.on(Deposited, topic="asked", consumer="ask")
    async def ask(event: Deposited, tx: Transaction) -> None:
        if event.amount == POISON:
            if goes_down.is_set():
                await db.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
            await tx.session.execute(sa.text(ENDS_ITS_CONNECTION))
        tx.session.add(add_to(Account(event.account), event))

    applier = await new_applier(bank.handlers, topic="asked")
    await applier.apply(*deposits(POISON))
    goes_down.set()
    seen = []
    for other in range(10, 13):
        await applier.make_due()
        applier.health.forget("backlog")
        trying = asyncio.create_task(applier.lanes.work_off())
        await eventually(lambda: "read-only" in applier.health.reasons.get("backlog", ""))
        await db.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        await trying
        [row] = await applier.backlog()
        seen.append((row["attempts"], row["losses"]))
        if others_commit:
            await applier.apply(*deposits(other))
    assert seen == ([(0, 1), (0, 2), (1, 0)] if others_commit else [(0, 1)] * 3)
    assert row["waits"]


async def test_without_room_for_the_probe_a_server_works_only_if_others_commit(
    settings: Callable[..., Settings], db: asyncpg.Connection, database_url: str
) -> None:
    role = f"crowd_{uuid4().hex[:8]}"
    await db.execute(f"""
        CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}' CONNECTION LIMIT 1;
        GRANT USAGE ON SCHEMA pipeline TO {role};
        GRANT ALL ON ALL TABLES IN SCHEMA pipeline TO {role};
        GRANT ALL ON ALL SEQUENCES IN SCHEMA pipeline TO {role}
    """)
    url = make_url(database_url).set(username=role, password=PASSWORD)
    crowded = settings(database_url=url.render_as_string(hide_password=False))
    pool = create_engine(crowded, name="crowd")
    sessions = f"SELECT count(*) FROM pg_stat_activity WHERE usename = '{role}'"
    try:
        probe = Probe(crowded, pool, name="probe")
        async with autocommitting(pool) as driver:
            await driver.execute("SELECT")
        await probe.write()  # the pool has the only connection
        await pool.dispose()
        dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
        await eventually(lambda: _is_none(db, sessions))
        other = await asyncpg.connect(dsn)
        with pytest.raises(sa.exc.DBAPIError, match="too many connections") as raised:
            await probe.write()
        assert is_infrastructure(raised.value)
        await other.close()
        await eventually(lambda: _is_none(db, sessions))
        await probe.write()
    finally:
        await pool.dispose()
        await db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_a_message_that_idles_until_its_session_ends_stops_no_other(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")

    @bank.handlers.on(Deposited, topic="asked", consumer="ask")
    async def ask(event: Deposited, tx: Transaction) -> None:
        if event.amount == POISON:
            limit = "SET LOCAL idle_in_transaction_session_timeout = '100ms'"
            await tx.session.execute(sa.text(limit))
            await asyncio.sleep(0.5)
        tx.session.add(add_to(Account(event.account), event))

    applier = await new_applier(bank.handlers, topic="asked")
    await applier.apply(*deposits(1, 2, POISON, 4, 5))
    await assert_only_the_poison_is_set_aside(applier, db, "undecided")


@pytest.mark.parametrize("translated", [Reject, ValueError])
async def test_a_handler_that_translates_a_lock_time_out_has_decided_nothing(
    new_applier: NewApplier, db: asyncpg.Connection, translated: type[Exception]
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")

    @bank.handlers.on(Deposited, topic="asked", consumer="ask")
    async def ask(event: Deposited, tx: Transaction) -> None:
        try:
            account = await tx.load_or_create(Account, event.account)
        except Exception as error:
            raise translated("it can't be loaded") from error
        add_to(account, event)

    applier = await new_applier(bank.handlers, topic="asked", lock_timeout=0.1)
    await applier.apply(Deposit(1))
    async with db.transaction():
        await db.execute("SELECT FROM account FOR UPDATE")
        await applier.apply(Deposit(2), Deposit(4, account="bob"))
        row = await tried_alone(applier)
        assert (row["attempts"], row["died_at"]) == (0, None)
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [1, 2], "bob": [4]}


async def test_a_decision_after_a_lock_timeout_in_its_own_savepoint_counts(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")

    @bank.handlers.on(Deposited, topic="asked", consumer="ask")
    async def ask(event: Deposited, tx: Transaction) -> None:
        statement = sa.select(Account.id).with_for_update(nowait=True)
        try:
            async with tx.session.begin_nested():
                await tx.session.execute(statement)
        except sa.exc.DBAPIError:
            raise Reject("somebody else works at it") from None

    await db.execute("INSERT INTO account (id, balance, history, version) VALUES ('ada', 0, '', 1)")
    applier = await new_applier(bank.handlers, topic="asked")
    async with db.transaction():
        await db.execute("SELECT FROM account FOR UPDATE")
        await applier.apply(Deposit(1))
    assert await applier.park() == {("ask", 0): "rejected"}


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM not_migrated",
        "SELECT not_migrated FROM account",
        "SELECT * FROM not_migrated.account",
        "SELECT not_migrated(1)",
        "SELECT CAST('x' AS not_migrated)",
        "SET LOCAL ROLE not_migrated",
    ],
)
async def test_what_the_catalog_lacks_spends_no_attempt(
    new_applier: NewApplier, db: asyncpg.Connection, statement: str
) -> None:
    applier = await bank_whose_handler_executes(new_applier, statement)
    await applier.apply(*deposits(1, 2, POISON, 4, 5))
    await assert_only_the_poison_is_set_aside(applier, db)
    if "ROLE" not in statement:  # an invalid value of a setting is a mistake
        for _ in range(3):
            row = await tried_alone(applier)
            assert (row["attempts"], row["waits"]) == (0, True)


async def test_a_failure_at_the_final_write_is_the_messages_fault(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    class Reminder(Event, type="reminder.v1", topic="reminders"):
        of: str

    bank = Bank(deposits="deposits", balances="balances", name="bank")
    before_time = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))

    @bank.handlers.on(Deposited, topic="asked", consumer="ask")
    async def ask(event: Deposited, tx: Transaction) -> None:
        add_to(await tx.load_or_create(Account, event.account), event)
        at = before_time if event.amount == POISON else None
        tx.publish(Reminder(of=event.account), key=event.account, at=at)

    applier = await new_applier(bank.handlers, topic="asked")
    await applier.apply(*deposits(1, 2, POISON, 4, 5))
    assert set(await histories(db)) == {f"of {amount}" for amount in (1, 2, 4, 5)}
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox") == 4
    await applier.work_off()
    [row] = await applier.backlog()
    assert (row["offset"], row["attempts"]) == (2, 1)


async def test_a_read_only_database_is_waited_for_without_spending_attempts(
    new_applier: NewApplier, db: asyncpg.Connection, database_url: str
) -> None:
    name = database_url.rsplit("/", 1)[1]
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    await applier.apply(*deposits(1))
    batch = await applier.read(*deposits(2, 4), start=1)
    await db.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    await db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'applier'"
    )
    applying = asyncio.create_task(applier.apply_batch(batch))
    await eventually(lambda: len(applier.outages) > 2)
    await db.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    await applying
    assert await applier.backlog() == []
    assert set(await histories(db)) == {"of 1", "of 2", "of 4"}


async def test_a_time_limit_that_passes_in_an_outage_is_nobodys(
    new_applier: NewApplier, db: asyncpg.Connection, database_url: str
) -> None:
    name = database_url.rsplit("/", 1)[1]
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    outages: list[str] = []

    @bank.handlers.on(Deposited, topic="asked", consumer="ask", timeout=0.3)
    async def ask(event: Deposited, tx: Transaction) -> None:
        if not outages:
            await db.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
            await tx.session.execute(sa.text("SELECT pg_sleep(10)"))
        tx.session.add(add_to(Account(event.account), event))

    applier = await new_applier(bank.handlers, topic="asked")
    applier.outages = outages
    applying = asyncio.create_task(applier.apply(*deposits(1)))
    await eventually(lambda: len(outages) > 1)
    await db.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    await applying
    await applier.work_off()
    assert (set(await histories(db)), await applier.backlog()) == ({"of 1"}, [])


async def test_time_that_the_database_takes_before_a_call_is_not_the_messages(
    new_applier: NewApplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = Handlers()
    calls = 0

    @handlers.on(Deposited, topic="asked", consumer="ask", mode="deferred")
    async def ask(event: Deposited, tx: Transaction) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(3)

    applier = await new_applier(handlers, topic="asked", transaction_timeout=6.0, lock_timeout=0.5)
    await applier.apply(Deposit(1))
    begin, delays = limits.begin, [4.0]

    async def slowly(connection: Any, statement: str) -> None:
        await begin(connection, statement)
        await asyncio.sleep(delays.pop() if delays else 0)

    monkeypatch.setattr(limits, "begin", slowly)
    await applier.work_off()
    assert [row["attempts"] for row in await applier.backlog()] == []
    assert calls == 1


async def test_a_call_waiting_for_the_database_reports_its_time_limit(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")

    @bank.handlers.on(Deposited, topic="asked", consumer="ask", timeout=0.3)
    async def ask(event: Deposited, tx: Transaction) -> None:
        await tx.session.execute(sa.text("SELECT pg_sleep(10)"))

    applier = await new_applier(bank.handlers, topic="asked")
    await applier.apply(*deposits(1))
    row = await tried_alone(applier)
    assert row["error"] == "TimeoutError: ask takes longer than 0.3 s"
    assert row["attempts"] == 1


@pytest.mark.parametrize("code", ["40P01", "55P03", "42P01", "53100"])
async def test_what_spends_no_attempt_says_nothing_about_the_deaths_over_a_message(
    new_applier: NewApplier, db: asyncpg.Connection, code: str
) -> None:
    applier = await bank_whose_handler_executes(new_applier, RAISE.format(code))
    await applier.apply(*deposits(1, POISON, 4))
    await db.execute("UPDATE pipeline.backlog SET deaths = 1, losses = 1")
    row = await tried_alone(applier)
    assert (row["attempts"], row["deaths"], row["losses"], row["waits"]) == (0, 1, 1, True)


async def test_the_probe_leaves_nothing_and_tells_whether_the_database_can_be_written(
    settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    await db.execute("COMMENT ON SCHEMA pipeline IS 'bank'")  # as in every service
    probe = Probe(settings(), create_engine(settings(), name="bank"), name="bank-probe")
    await asyncio.gather(*(probe.write() for _ in range(3)))
    assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0
    name = await db.fetchval("SELECT current_database()")
    await db.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    with pytest.raises(asyncpg.ReadOnlySQLTransactionError) as raised:
        await probe.write()
    assert is_infrastructure(raised.value)
    await db.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
    await probe.write()
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'bank-probe'"
    await eventually(lambda: _is_none(db, sessions))


async def _is_none(db: asyncpg.Connection, counted: str) -> bool:
    return bool(await db.fetchval(counted) == 0)


async def test_messages_of_a_key_that_are_tried_alone_keep_their_order(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """The first is refused by the database, and the second takes too long once."""
    calls: list[int] = []
    handlers = Handlers()

    @handlers.on(Deposited, topic="asked", consumer="ask", timeout=3, mode="deferred", policy=LATER)
    async def ask(event: Deposited, tx: Transaction) -> None:
        calls.append(event.amount)
        if event.amount == 4 and calls.count(4) == 1:
            await asyncio.sleep(PATIENCE)
        await add(event, tx)

    await db.execute(AT_FLUSH.format("22023"))
    applier = await new_applier(handlers, topic="asked")
    await applier.apply(Deposit(POISON), Deposit(4))
    await applier.work_off()
    await db.execute("DROP TRIGGER fail ON account")
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [POISON, 4]}


async def test_what_a_worker_has_not_decided_does_not_overtake_what_waits(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """In the lane the first is applied, then fails; beside it the second takes too long."""
    calls: list[int] = []
    handlers = Handlers()

    @handlers.on(Deposited, topic="asked", consumer="ask", timeout=3, policy=LATER)
    async def ask(event: Deposited, tx: Transaction) -> None:
        calls.append(event.amount)
        if event.amount == 1 and calls.count(1) != IN_THE_LANE:
            raise ValueError("not now")
        if event.amount == 2 and calls.count(2) == 1:
            await asyncio.sleep(PATIENCE)
        await add(event, tx)

    applier = await new_applier(handlers, topic="asked")
    await applier.apply(Deposit(1), Deposit(2))
    assert calls.count(1) == IN_THE_LANE - 1
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {}
    assert calls.count(2) == 1


async def test_storing_many_beside_one_that_has_failed_may_take_too_long(
    new_applier: NewApplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = Handlers()

    @handlers.on(Deposited, topic="asked", consumer="ask", policy=LATER)
    async def ask(event: Deposited, tx: Transaction) -> None:
        raise ValueError("not now")

    @handlers.on(Later, topic="asked", consumer="later", mode="deferred")
    async def later(event: Later, tx: Transaction) -> None: ...

    applier = await new_applier(handlers, topic="asked", transaction_timeout=1.0, lock_timeout=0.5)
    store = backlog.add

    async def slowly(connection: Any, rows: Sequence[Row], encryption: Any) -> Any:
        await asyncio.sleep(0.012 * len(rows))
        return await store(connection, rows, encryption)

    monkeypatch.setattr(backlog, "add", slowly)
    others = [Deposit(n, account=f"of {n}", type="later") for n in range(2, 101)]
    await applier.apply(Deposit(1), *others)
    assert len(await applier.backlog()) == 100


async def test_locks_open_no_breaker(new_applier: NewApplier) -> None:
    handlers = Handlers()

    @handlers.on(Deposited, topic="asked", consumer="ask", mode="deferred", policy=LATER)
    async def ask(event: Deposited, tx: Transaction) -> None:
        await tx.session.execute(sa.text(RAISE.format("55P03")))

    applier = await new_applier(handlers, topic="asked", breaker_keys=3)
    await applier.apply(*deposits(1, 2, 3, 4, 5, 6))
    await applier.work_off()
    assert {row["reason"] for row in await applier.backlog()} == {"locked out"}
    assert not applier.consume.breaker.open


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        (RAISE.format("22023"), "failed"),
        (RAISE.format("55P03"), "locked out"),
        (ENDS_ITS_CONNECTION, "connection lost"),
    ],
)
async def test_transactions_that_are_rolled_back_are_counted_by_reason(
    new_applier: NewApplier, monkeypatch: pytest.MonkeyPatch, statement: str, reason: str
) -> None:
    counted = Counter[str]()
    monkeypatch.setattr(metrics, "rolled_back", lambda reason: counted.update([reason]))
    applier = await bank_whose_handler_executes(new_applier, statement)
    await applier.apply(*deposits(1, 2))
    assert not counted
    await applier.apply(*deposits(POISON, 4))
    assert set(counted) == {reason}
