"""A record that can't be handled: found among its neighbours, which lose nothing by it."""

import asyncio
from collections import Counter
from collections.abc import Callable

import asyncpg
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from onceward import Event, Handlers, Transaction
from onceward.events.event import Unpublishable

from .applier import Applier, NewApplier
from .bank import Bank, Refused
from tests.contract.bank import Account, Deposit, Deposited, histories
from tests.servers.waiting import PATIENCE, eventually

TOO_MUCH = 1_000_000
"""An amount that `forbid_riches` lets nobody hold."""

AT_FLUSH = f"ALTER TABLE account ADD CONSTRAINT not_rich CHECK (balance < {TOO_MUCH})"
AT_COMMIT = f"""
CREATE FUNCTION refuse_riches() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.balance >= {TOO_MUCH} THEN
        RAISE check_violation USING MESSAGE = 'too rich';
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER not_rich AFTER INSERT OR UPDATE ON account
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse_riches()
"""


@pytest.fixture(params=[AT_FLUSH, AT_COMMIT], ids=["at the flush", "at the commit"])
async def forbid_riches(request: pytest.FixtureRequest, db: asyncpg.Connection) -> None:
    """Let the flush, or only the COMMIT, of an account that holds too much fail."""
    await db.execute(request.param)


async def events_of(db: asyncpg.Connection) -> list[bytes]:
    """Return the payloads in the outbox, in the order of staging."""
    return [row["payload"] for row in await db.fetch("SELECT * FROM pipeline.outbox ORDER BY id")]


@pytest.mark.usefixtures("forbid_riches")
@pytest.mark.parametrize(
    "amounts",
    [
        [TOO_MUCH, 1, 2, 3, 4],
        [1, 2, TOO_MUCH, 3, 4],
        [1, 2, 3, 4, TOO_MUCH],
        [1, TOO_MUCH, 2, TOO_MUCH + 1, 3],
        [TOO_MUCH],
        [1, TOO_MUCH],
    ],
)
async def test_a_record_rejected_only_at_flush_or_commit_is_isolated(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection, amounts: list[int]
) -> None:
    _, applier = ledger
    await applier.apply(*(Deposit(amount, account=f"of {amount}") for amount in amounts))
    innocent = [amount for amount in amounts if amount < TOO_MUCH]
    await applier.work_off()  # what the flush refuses beside others is tried alone
    assert await applier.park() == {
        ("deposit", offset): "transaction failed"
        for offset, amount in enumerate(amounts)
        if amount >= TOO_MUCH
    }
    assert [row["attempts"] for row in await applier.backlog()] == [1] * (
        len(amounts) - len(innocent)
    )
    assert await applier.position() == len(amounts)
    assert await histories(db) == {f"of {amount}": [amount] for amount in innocent}
    assert len(await events_of(db)) == len(innocent)
    assert await db.fetchval("SELECT count(*) FROM pipeline.inbox") == len(innocent)
    assert applier.outages == []


@pytest.mark.usefixtures("forbid_riches")
async def test_records_that_nobody_takes_are_passed_once_beside_one_that_is_refused(
    ledger: tuple[Bank, Applier], outcomes: Counter[str]
) -> None:
    _, applier = ledger
    skipped = Deposit(1, type="withdrawn")
    await applier.apply(skipped, Deposit(2, "bob"), skipped, Deposit(TOO_MUCH), skipped)
    await applier.work_off()
    assert await applier.park() == {("deposit", 3): "transaction failed"}
    assert await applier.position() == 5
    assert (outcomes["skipped"], outcomes["applied"]) == (3, 1)


@pytest.mark.usefixtures("forbid_riches")
async def test_earlier_changes_to_a_row_are_kept_and_later_records_wait(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    await applier.apply(*(Deposit(amount) for amount in (1, 2, TOO_MUCH, 3)))
    await applier.work_off()
    assert await histories(db) == {"ada": [1, 2]}
    assert await db.fetchval("SELECT version FROM account") == 2
    assert await applier.park() == {
        ("deposit", 2): "transaction failed",
        ("deposit", 3): "follows another",
    }


async def test_what_the_database_refuses_is_tried_again_like_any_other_failure(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    await db.execute(AT_COMMIT)
    await applier.apply(*(Deposit(amount) for amount in (1, TOO_MUCH, 3)))
    await applier.work_off()
    await applier.make_due()
    await applier.work_off()
    assert [row["attempts"] for row in await applier.backlog()] == [2, 0]
    await db.execute("DROP TRIGGER not_rich ON account")
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [1, TOO_MUCH, 3]}
    assert await applier.park() == {}


async def test_a_batch_commits_as_one_transaction_if_its_halves_pass_separately(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    # One row more than two in a transaction is refused: nobody alone is guilty.
    await db.execute("""
        CREATE FUNCTION at_most_two() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF (SELECT count(*) FROM account WHERE xmin = pg_current_xact_id()::xid) > 2 THEN
                RAISE check_violation;
            END IF;
            RETURN NULL;
        END $$;
        CREATE CONSTRAINT TRIGGER few AFTER INSERT ON account
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION at_most_two()
    """)
    _, applier = ledger
    await applier.apply(*(Deposit(amount, account=str(amount)) for amount in range(1, 6)))
    assert await histories(db) == {str(amount): [amount] for amount in range(1, 6)}
    assert await applier.position() == 5


async def test_an_error_of_autoflush_is_blamed_on_the_record_that_caused_it(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    await db.execute(AT_FLUSH)

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="count")
    async def count(event: Deposited, tx: Transaction) -> None:
        # Flushes the deposit of its own record, and of all before it.
        await tx.session.scalar(sa.select(sa.func.count()).select_from(Account))

    await applier.apply(*(Deposit(n, account=str(n)) for n in (1, 2, TOO_MUCH, 3, 4)))
    assert await histories(db) == {str(n): [n] for n in (1, 2, 3, 4)}
    assert await applier.park() == {("deposit", 2): "failed in a batch"}
    await applier.work_off()
    assert await applier.park() == {("deposit", 2): "transaction failed"}


async def test_a_later_query_is_not_blamed_for_an_earlier_handlers_row(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    await db.execute(AT_FLUSH)
    handlers = Handlers()

    @handlers.on(Deposited, topic=bank.deposits, consumer="naive")
    async def naive(event: Deposited, tx: Transaction) -> None:
        if event.amount == 4:
            await tx.session.scalar(sa.select(sa.func.count()).select_from(Account))
        else:
            account = Account(event.account)
            account.version, account.balance = 0, event.amount
            tx.session.add(account)

    applier.handlers = handlers
    await applier.apply(*(Deposit(n, account=str(n)) for n in (1, TOO_MUCH, 3, 4)))
    assert await applier.park() == {("naive", 1): "failed in a batch"}
    assert set(await histories(db)) == {"1", "3"}


async def test_with_demanded_types_an_unhandled_type_is_dead_without_a_consumer(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    bank.handlers.topic(bank.deposits, demands_types=True)
    await applier.apply(Deposit(1), Deposit(2, type="withdrawn"), Deposit(3))
    (row,) = await applier.backlog()
    assert (row["consumer"], row["offset"], row["reason"]) == ("", 1, "unknown type")
    assert row["died_at"] is not None
    assert await histories(db) == {"ada": [1, 3]}


async def test_a_savepoint_lets_a_handler_go_on_after_an_error(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="careful")
    async def careful(event: Deposited, tx: Transaction) -> None:
        with pytest.raises(DBAPIError):
            async with tx.session.begin_nested():
                await tx.session.execute(sa.text("SELECT 1 / 0"))

    await applier.apply(Deposit(1), Deposit(2))
    assert await histories(db) == {"ada": [1, 2]}
    assert await applier.position() == 2


async def test_a_record_whose_handler_suppresses_a_flush_error_is_not_applied(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    await db.execute(AT_FLUSH)

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="careless")
    async def careless(event: Deposited, tx: Transaction) -> None:
        try:
            await tx.session.flush()
        except DBAPIError:
            return

    await applier.apply(Deposit(1), Deposit(TOO_MUCH), Deposit(2))
    assert await histories(db) == {"ada": [1]}
    await applier.work_off()
    assert await histories(db) == {"ada": [1]}
    assert await applier.park() == {
        ("deposit", 1): "transaction failed",
        ("deposit", 2): "follows another",
    }


async def test_a_record_whose_handler_suppresses_a_statement_error_is_not_applied(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    """PostgreSQL answers COMMIT with ROLLBACK then, and no error: nobody may call that applied."""
    bank, applier = ledger
    handlers = applier.handlers = Handlers()

    @handlers.on(Deposited, topic=bank.deposits, consumer="careless")
    async def careless(event: Deposited, tx: Transaction) -> None:
        try:
            await tx.session.execute(sa.text(f"SELECT 1 / {event.amount}"))
        except DBAPIError:
            return

    await applier.apply(Deposit(1), Deposit(0))
    await applier.work_off()
    assert await applier.park() == {("careless", 1): "failed"}
    assert await db.fetchval("SELECT array_agg(id) FROM pipeline.inbox") == ["1"]


@pytest.mark.parametrize("ending", ["commit", "commit in run_sync", "rollback", "close"])
async def test_a_handler_that_ends_the_transaction_fails_and_its_neighbours_lose_nothing(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection, ending: str
) -> None:
    bank, applier = ledger

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="impatient")
    async def impatient(event: Deposited, tx: Transaction) -> None:
        await tx.session.execute(sa.text("SELECT"))
        if event.amount == 2 and ending == "commit in run_sync":
            await tx.session.run_sync(lambda session: session.commit())
        elif event.amount == 2:
            await getattr(tx.session, ending)()

    await applier.apply(*(Deposit(amount, account=str(amount)) for amount in (1, 2, 3)))
    await applier.work_off()
    assert set(await applier.park()) == {("impatient", 1)}
    assert await histories(db) == {"1": [1], "2": [2], "3": [3]}
    assert await db.fetchval("SELECT count(*) FROM pipeline.inbox") == 5
    assert len(await events_of(db)) == 3


async def test_a_cancellation_that_a_handler_lets_out_is_its_own_error(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="cancelling")
    async def cancelling(event: Deposited, tx: Transaction) -> None:
        if event.amount == 2:
            abandoned = asyncio.get_running_loop().create_future()
            abandoned.cancel()
            await abandoned

    await applier.apply(Deposit(1), Deposit(2))
    assert await applier.park() == {("cancelling", 1): "failed"}
    assert await histories(db) == {"ada": [1, 2]}


async def test_a_key_that_postgresql_can_not_store_fails_alone(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    poison = Deposit(3, value=b'{"account": "\\u0000", "amount": 3}')
    await applier.apply(Deposit(1), Deposit(2), poison, Deposit(4), Deposit(5, account="bob"))
    await applier.work_off()
    assert await applier.park() == {
        ("deposit", 2): "transaction failed",
        ("deposit", 3): "follows another",
    }
    assert await histories(db) == {"ada": [1, 2], "bob": [5]}


class Note(Event, type="note", topic="notes"):
    """Anything, told to nobody."""

    text: str = ""


class Nowhere(Event, type="nowhere"):
    """An event without a topic."""


@pytest.mark.parametrize(
    ("publish", "told"),
    [
        (lambda tx: tx.publish(Note(text="x" * 900_000)), "takes"),
        (lambda tx: tx.publish(Nowhere()), "no topic"),
        (lambda tx: tx.publish(Note(), key="a\x00b"), "NUL"),
        (lambda tx: tx.publish(Note(), key="\ud800"), "UTF-8"),
        (lambda tx: tx.publish(Note(text="\ud800")), "UTF-8"),
    ],
    ids=["too large", "no topic", "NUL in the key", "half a letter in the key", "in the payload"],
)
async def test_an_event_that_could_never_be_published_is_refused_when_staged(
    ledger: tuple[Bank, Applier],
    db: asyncpg.Connection,
    publish: Callable[[Transaction], None],
    told: str,
) -> None:
    """Trap 6."""
    bank, applier = ledger

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="tell")
    async def tell(event: Deposited, tx: Transaction) -> None:
        if event.amount == 2:
            publish(tx)

    await applier.apply(*(Deposit(amount) for amount in (1, 2, 3)))
    refused, follower = await applier.backlog()
    assert (refused["offset"], refused["reason"]) == (1, "failed")
    assert refused["error"].startswith(Unpublishable.__name__)
    assert told in refused["error"]
    assert (follower["offset"], follower["reason"]) == (2, "follows another")
    assert len(await events_of(db)) == 3
    assert await histories(db) == {"ada": [1, 2, 3]}


async def test_a_refused_event_leaves_no_trace_if_its_handler_continues(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    handlers = applier.handlers = Handlers()

    @handlers.on(Deposited, topic=bank.deposits, consumer="tell", loads=Account.by("account"))
    async def tell(event: Deposited, tx: Transaction) -> None:
        account = await tx.load_or_create(Account, event.account)
        with pytest.raises(Unpublishable):
            tx.publish(Note(text="x" * 900_000), of=account)
        tx.publish(Note(text="short"), of=account)

    await applier.apply(Deposit(1))
    rows = await db.fetch("SELECT sequence, payload FROM pipeline.outbox")
    assert [tuple(row) for row in rows] == [(1, b'{"text":"short"}')]
    assert await db.fetchval("SELECT version FROM account") == 1


async def test_a_failed_handlers_changes_are_undone_and_other_consumers_changes_kept(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    broken = True

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="bonus", loads=Account.by("account"))
    async def bonus(event: Deposited, tx: Transaction) -> None:
        account = await tx.load_or_create(Account, event.account)
        account.balance += 1_000
        if broken and event.amount == 2:
            raise Refused("no bonus today")

    await applier.apply(Deposit(1), Deposit(2))
    assert await applier.park() == {("bonus", 1): "failed"}
    assert await db.fetchval("SELECT balance FROM account") == 1_003
    broken = False
    await applier.apply(Deposit(2), Deposit(2), Deposit(1))
    await applier.make_due()
    await applier.work_off()
    assert await db.fetchval("SELECT balance FROM account") == 2_003
    assert await histories(db) == {"ada": [1, 2]}
    rows = await db.fetch(
        "SELECT id, array_agg(consumer ORDER BY consumer) AS c FROM pipeline.inbox GROUP BY id"
    )
    assert {row["id"]: row["c"] for row in rows} == {
        "1": ["bonus", "deposit"],
        "2": ["bonus", "deposit"],
    }


async def test_a_handler_added_later_takes_what_another_has_taken_before(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    await applier.apply(Deposit(1))
    seen: list[int] = []

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="later")
    async def later(event: Deposited, tx: Transaction) -> None:
        seen.append(event.amount)

    await applier.apply(Deposit(1))
    assert seen == [1]
    assert await histories(db) == {"ada": [1]}


async def in_a_hurry(new_applier: NewApplier) -> tuple[Bank, Applier]:
    """Return a bank whose transactions have two seconds."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    options = {"transaction_timeout": 2, "lock_timeout": 1}
    return bank, await new_applier(bank.handlers, topic=bank.deposits, **options)


async def test_a_batch_that_exceeds_the_transaction_time_is_split_into_parts(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """A loss after the time budget is the batch's own fault, and no outage."""
    bank, applier = await in_a_hurry(new_applier)

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="slow")
    async def slow(event: Deposited, tx: Transaction) -> None:
        await tx.session.execute(sa.text("SELECT pg_sleep(0.3)"))

    async with asyncio.timeout(PATIENCE):
        await applier.apply(*map(Deposit, range(1, 9)))
    assert await histories(db) == {"ada": [*range(1, 9)]}


async def test_a_handler_that_hangs_is_found_and_its_neighbours_are_applied(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Trap 35."""
    bank, applier = await in_a_hurry(new_applier)

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="hanging")
    async def hanging(event: Deposited, tx: Transaction) -> None:
        if event.amount == 3:
            await asyncio.sleep(3)
            await tx.session.execute(sa.text("SELECT 1"))

    async with asyncio.timeout(PATIENCE):
        await applier.apply(*(Deposit(amount) for amount in (1, 2, 3, 4)))
        assert await histories(db) == {"ada": [1, 2]}
        await applier.work_off()
    assert await applier.park() == {
        ("hanging", 2): "takes too long",
        ("hanging", 3): "follows another",
    }
    assert await histories(db) == {"ada": [1, 2, 3, 4]}


async def test_after_one_timeout_a_record_is_retried_before_it_is_blamed(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """A connection that died without a word takes as long as a handler that hangs."""
    bank, applier = await in_a_hurry(new_applier)
    calls = 0

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="slow-once")
    async def slow_once(event: Deposited, tx: Transaction) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await asyncio.Event().wait()

    await applier.apply(Deposit(1))
    assert calls == 2
    assert await histories(db) == {"ada": [1]}
    assert await applier.park() == {}


async def test_only_the_record_whose_row_stays_locked_is_set_aside(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """An outage passes. A lock that is held each time the record comes is no outage."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier = await new_applier(bank.handlers, topic=bank.deposits, lock_timeout=0.05)
    await applier.apply(Deposit(1, account="ada"))
    async with db.transaction():
        await db.execute("SELECT FROM account FOR UPDATE")
        await applier.apply(Deposit(2, account="bob"), Deposit(3, account="ada"))
        assert await applier.park() == {("deposit", 2): "undecided"}
        await applier.work_off()
        [row] = await applier.backlog()
        assert (row["attempts"], row["waits"], row["waited"] > 0) == (0, True, True)
    assert await histories(db) == {"ada": [1], "bob": [2]}
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [1, 3], "bob": [2]}


async def test_where_there_is_nobody_to_blame_a_lock_is_waited_for(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """What is only stored calls no handler: if that does not work, the database is at fault."""
    options = {"mode": "deferred"}
    bank = Bank(deposits="deposits", balances="balances", name="bank", options=options)
    applier = await new_applier(bank.handlers, topic=bank.deposits, lock_timeout=0.05)
    async with db.transaction():
        await db.execute("LOCK TABLE pipeline.backlog IN EXCLUSIVE MODE")
        applying = asyncio.create_task(applier.apply(Deposit(1)))
        await eventually(lambda: len(applier.outages) > 3)
    await applying
    assert await applier.park() == {("deposit", 0): "deferred"}
    assert bank.calls == []
