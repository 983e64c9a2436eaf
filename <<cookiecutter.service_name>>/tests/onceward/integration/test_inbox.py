"""What the inbox remembers: duplicates by whatever way they come, over every generation."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward import Transaction
from onceward.apply import inbox, positions
from onceward.retention import generations
from onceward.retention.maintenance import run_retention
from onceward.servers.database import autocommitting
from onceward.settings import Settings

from .applier import Applier, NewApplier
from .bank import Bank
from .conftest import position_reaches
from tests.conftest import Running
from tests.contract.bank import Deposit, Deposited, histories
from tests.servers.waiting import PATIENCE, eventually

Connect = Callable[[], Awaitable[asyncpg.Connection]]


async def close_generation(db: asyncpg.Connection, settings: Callable[..., Settings]) -> None:
    """Close the current generation, as retention does, and make the next ones."""
    current = await db.fetchval("SELECT current FROM pipeline.inbox_generation")
    assert await generations.close_generation(db, current=current)
    await run_retention(db, settings())


async def count(db: asyncpg.Connection, table: str) -> int:
    """Count the rows of a table."""
    return int(await db.fetchval(f"SELECT count(*) FROM {table}"))


async def test_duplicates_in_the_same_or_later_batches_are_skipped_and_counted(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection, outcomes: Counter[str]
) -> None:
    _, applier = ledger
    await applier.apply(Deposit(1), Deposit(2), Deposit(1), Deposit(1))
    await applier.apply(Deposit(2), Deposit(1), Deposit(3))
    await applier.apply(Deposit(3))
    assert await histories(db) == {"ada": [1, 2, 3]}
    assert await applier.position() == 8
    assert await count(db, "pipeline.outbox") == 3
    assert (outcomes["applied"], outcomes["duplicate"]) == (3, 5)


async def test_a_record_sent_again_with_another_time_is_a_duplicate(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    """Trap 31."""
    _, applier = ledger
    for minute in (b"01", b"02"):
        await applier.apply(
            Deposit(1, headers=(("ce_time", b"2026-01-31T23:" + minute + b":59Z"),))
        )
    assert await histories(db) == {"ada": [1]}
    assert await applier.position() == 2


async def test_a_record_repeated_days_later_is_a_duplicate_whatever_its_times(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    """Traps 9 and 31."""
    _, applier = ledger
    first = datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)
    for days in (0, 0, 1, 5, 40, -3):
        time = first + timedelta(days)
        stamp = ("ce_time", time.isoformat().encode())
        await applier.apply(Deposit(1, headers=(stamp,), timestamp=round(time.timestamp() * 1_000)))
        await close_generation(db, settings)
    assert await histories(db) == {"ada": [1]}
    assert await applier.position() == 6


async def test_the_same_id_of_two_sources_is_two_events(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    """Trap 24."""
    _, applier = ledger
    await applier.apply(Deposit(1, source="/a"), Deposit(1, source="/b"), Deposit(1, source="/a"))
    assert await histories(db) == {"ada": [1, 1]}


async def test_json_that_is_only_written_otherwise_is_the_same_payload(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    await applier.apply(Deposit(1, value=b'{"account": "ada", "amount": 1}'))
    await applier.apply(
        Deposit(1, value=b'{"amount":1,"account":"ada"}'),
        Deposit(1, value=b' {\n"account" : "\\u0061da",\t"amount" : 1 } '),
    )
    assert await histories(db) == {"ada": [1]}
    assert await applier.position() == 3


@pytest.mark.parametrize("apart", [0, 1, 2, 3])
async def test_an_id_with_another_payload_is_a_dead_letter_with_both_hashes(
    ledger: tuple[Bank, Applier],
    db: asyncpg.Connection,
    settings: Callable[..., Settings],
    apart: int,
) -> None:
    _, applier = ledger
    await applier.apply(Deposit(1), Deposit(2))
    for _ in range(apart):
        await close_generation(db, settings)
    altered = Deposit(200, id="2")
    await applier.apply(Deposit(3), Deposit(1), altered, Deposit(4))
    (row,) = await applier.backlog()
    remembered = await db.fetchval("SELECT hash FROM pipeline.inbox WHERE id = '2'")
    now = (await applier.read(altered, start=0)).items[0].message.hash
    assert (row["offset"], row["reason"]) == (4, "identity mismatch")
    assert (row["remembered_hash"], row["hash"]) == (remembered, now)
    assert (row["value"], row["id"]) == (altered.record("", 0).value, "2")
    assert row["died_at"] is not None
    for hash in (remembered, now):
        assert hash.hex() in row["error"]
    assert await histories(db) == {"ada": [1, 2, 3, 4]}
    assert await applier.position() == 6


async def test_every_mismatch_of_a_batch_is_a_dead_letter_whoever_came_first(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    await applier.apply(Deposit(1))
    # One with what an earlier batch has applied, two with what their own batch brings.
    await applier.apply(
        Deposit(100, id="1"),
        Deposit(2),
        Deposit(200, id="2"),
        Deposit(300, id="2"),
        Deposit(3),
    )
    assert await applier.park() == {("", offset): "identity mismatch" for offset in (1, 3, 4)}
    assert await histories(db) == {"ada": [1, 2, 3]}
    assert await applier.position() == 6
    # Sent once more they are the same incidents, and no new ones.
    await applier.apply(Deposit(100, id="1"), Deposit(200, id="2"))
    assert len(await applier.backlog()) == 3


def with_others(*consumers: str) -> Bank:
    """Return a bank whose deposits more consumers take."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")

    async def note(event: Deposited, tx: Transaction) -> None:
        pass

    for consumer in consumers:
        bank.handlers.on(Deposited, topic=bank.deposits, consumer=consumer)(note)
    return bank


async def test_a_repeated_mismatch_is_one_dead_letter_for_all_consumers(
    new_applier: NewApplier,
    db: asyncpg.Connection,
    outcomes: Counter[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    bank = with_others("audit", "notice")
    applier = await new_applier(bank.handlers, topic=bank.deposits, dead_letter_topic="dead")
    sent = "SELECT count(*) FROM pipeline.outbox WHERE topic = 'dead'"
    altered = Deposit(100, id="1")
    await applier.apply(Deposit(1))
    for is_discarded in (False, True):
        await applier.apply(altered, altered)
        (row,) = await applier.backlog()
        assert row["reason"] == "identity mismatch"
        assert (row["discarded_at"] is not None) == is_discarded
        told = [one for one in caplog.records if "identity mismatch" in one.getMessage()]
        assert (len(told), outcomes["identity mismatch"], await db.fetchval(sent)) == (1, 1, 1)
        await db.execute("UPDATE pipeline.backlog SET discarded_at = now()")


async def test_a_replay_for_a_new_consumer_reports_no_letter_again(
    new_applier: NewApplier, db: asyncpg.Connection, outcomes: Counter[str]
) -> None:
    came = Deposit(1), Deposit(100, id="1"), Deposit(2, type=""), Deposit(3, "bob")
    applier = await new_applier(with_others().handlers, topic="deposits", dead_letter_topic="dead")
    await applier.apply(*came)
    before = await applier.backlog()
    assert [row["reason"] for row in before] == ["identity mismatch", "missing attribute"]
    await db.execute("UPDATE pipeline.position SET next_offset = 0")
    outcomes.clear()
    new = await new_applier(with_others("new").handlers, topic="deposits", dead_letter_topic="dead")
    await new.apply(*came)
    assert outcomes == {"applied": 2, "duplicate": 2}
    assert [dict(row) for row in await applier.backlog()] == [dict(row) for row in before]
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox WHERE topic = 'dead'") == 2


async def test_another_type_with_the_same_id_and_data_is_another_payload(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger

    class Withdrawn(Deposited, type="withdrawn"):
        """Money went out."""

    @bank.handlers.on(Withdrawn, topic=bank.deposits, consumer="deposit")
    async def withdraw(event: Withdrawn, tx: Transaction) -> None:
        raise AssertionError("it must not come here")

    await applier.apply(Deposit(1))
    await applier.apply(Deposit(1, type="withdrawn"))
    assert await applier.park() == {("", 1): "identity mismatch"}


async def test_a_hash_of_another_version_is_not_compared(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    await applier.apply(Deposit(1))
    await db.execute("UPDATE pipeline.inbox SET hash = '\\x00', hash_version = 0")
    await applier.apply(Deposit(1))
    assert await histories(db) == {"ada": [1]}


async def test_a_duplicate_is_recognised_over_many_closed_generations(
    ledger: tuple[Bank, Applier],
    db: asyncpg.Connection,
    settings: Callable[..., Settings],
    outcomes: Counter[str],
) -> None:
    """Trap 9."""
    _, applier = ledger
    for amount in range(1, 6):
        await applier.apply(*(Deposit(every) for every in range(1, amount + 1)))
        await close_generation(db, settings)
    assert await histories(db) == {"ada": [1, 2, 3, 4, 5]}
    rows = await db.fetch("SELECT generation, id FROM pipeline.inbox ORDER BY generation")
    assert [tuple(row) for row in rows] == [(n, str(n)) for n in range(1, 6)]
    assert (outcomes["applied"], outcomes["duplicate"]) == (5, 10)


@pytest.mark.parametrize("takes_old", [False, True])
async def test_messages_older_than_the_inbox_are_applied_only_if_handlers_allow_it(
    new_applier: NewApplier, db: asyncpg.Connection, takes_old: bool
) -> None:
    """Trap 10: whoever forgets what can still come again applies it twice."""
    bank = Bank("deposits", "balances", "bank", options={"takes_old": takes_old})
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    since = datetime(2026, 1, 31, tzinfo=UTC)
    before, after = (round((since + timedelta(hours=h)).timestamp() * 1_000) for h in (-1, 1))
    await db.execute("UPDATE pipeline.inbox_generation SET since = $1", since)
    old = ("ce_time", (since - timedelta(seconds=1)).isoformat().encode())
    await applier.apply(
        Deposit(1, timestamp=before),
        Deposit(2, timestamp=after, headers=(old,)),
        Deposit(3, timestamp=after),
    )
    if takes_old:
        assert await histories(db) == {"ada": [1, 2, 3]}
        assert await applier.park() == {}
    else:
        assert await histories(db) == {"ada": [3]}
        assert await applier.park() == {("deposit", 0): "too old", ("deposit", 1): "too old"}
        assert all(row["died_at"] is not None for row in await applier.backlog())


@pytest.fixture
async def forgotten(db: asyncpg.Connection) -> datetime:
    """Forget all that is before today, as retention does; return since when all is remembered."""
    since = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    await forget(db, since)
    return since


async def forget(db: asyncpg.Connection, since: datetime) -> None:
    """Close the current generation, and forget it."""
    current = await db.fetchval("SELECT current FROM pipeline.inbox_generation")
    assert await generations.close_generation(db, current=current)
    await db.execute("UPDATE pipeline.inbox_generation SET oldest = current, since = $1", since)
    await db.execute("DELETE FROM pipeline.inbox WHERE generation = $1", current)


def at(time: datetime) -> int:
    """Return the time as a record has it."""
    return round(time.timestamp() * 1_000)


async def test_a_forgotten_event_repeated_with_a_new_time_takes_effect_again(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    """Only its `time` tells that it is old."""
    bank, applier = ledger
    await inbox.register(db, bank.handlers.consumers)
    now = datetime.now(UTC)
    time = ("ce_time", now.isoformat().encode())
    await applier.apply(Deposit(1), Deposit(2, headers=(time,)))
    await forget(db, now + timedelta(hours=2))
    later = at(now + timedelta(hours=4))
    await applier.apply(Deposit(1, timestamp=later), Deposit(2, timestamp=later, headers=(time,)))
    assert await histories(db) == {"ada": [1, 2, 1]}
    assert await applier.park() == {("deposit", 3): "too old"}


async def test_a_consumer_that_begins_on_an_old_topic_applies_its_records(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection, forgotten: datetime
) -> None:
    """It can have forgotten nothing: whatever it has applied is remembered."""
    bank, applier = ledger
    await inbox.register(db, bank.handlers.consumers)
    last_year = ("ce_time", b"2020-01-01T00:00:00Z")
    long_ago = at(forgotten - timedelta(days=300))
    await applier.apply(
        Deposit(1, timestamp=long_ago),
        Deposit(2, timestamp=at(datetime.now(UTC)), headers=(last_year,)),
        Deposit(3, timestamp=1_700_000_000),
    )
    assert await histories(db) == {"ada": [1, 2, 3]}
    assert await applier.park() == {}
    again = await applier.apply(Deposit(1, timestamp=long_ago))
    assert [one.is_new for one in again] == [False]


async def test_of_two_consumers_of_a_topic_only_the_older_may_have_forgotten(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    taken = []
    await inbox.register(db, bank.handlers.consumers)
    old = Deposit(1, timestamp=at(datetime.now(UTC) - timedelta(days=300)))
    await applier.apply(old)
    await forget(db, datetime.now(UTC))

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="new")
    async def take(event: Deposited, tx: Transaction) -> None:
        taken.append(event.amount)

    await inbox.register(db, bank.handlers.consumers)
    await applier.apply(old)
    assert taken == [1]
    assert await applier.park() == {("deposit", 1): "too old"}
    assert await histories(db) == {"ada": [1]}


async def test_a_repeated_message_is_too_old_once_its_consumer_forgets_any(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection, forgotten: datetime
) -> None:
    """Trap 10: the first copy was applied and forgotten, whatever the time of the second is."""
    bank, applier = ledger
    await inbox.register(db, bank.handlers.consumers)
    old = Deposit(1, timestamp=at(forgotten - timedelta(days=300)))
    await applier.apply(old)
    assert await generations.close_generation(db, current=2)
    await applier.apply(old)
    assert await applier.park() == {}, "it is known"
    await db.execute("UPDATE pipeline.inbox_generation SET oldest = current")
    await inbox.register(db, bank.handlers.consumers)
    await applier.apply(old)
    assert await histories(db) == {"ada": [1]}
    assert await applier.park() == {("deposit", 2): "too old"}


async def test_a_consumer_that_is_not_registered_may_have_forgotten_anything(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection, forgotten: datetime
) -> None:
    """As when a failover has lost its row: rather a dead letter than applied twice."""
    _, applier = ledger
    await applier.apply(Deposit(1, timestamp=at(forgotten - timedelta(days=1))))
    assert await applier.park() == {("deposit", 0): "too old"}


async def test_a_service_applies_an_old_topic_that_it_begins_to_read(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    forgotten: datetime,
) -> None:
    for amount in range(3):
        old = Deposit(amount, timestamp=at(forgotten - timedelta(days=100 - amount)))
        await old.send(producer, bank.deposits)
    async with running(bank.service):
        await eventually(position_reaches(db, bank.deposits, 3))
    assert await histories(db) == {"ada": [0, 1, 2]}
    # Read once more, by whatever way.
    await db.execute("UPDATE pipeline.position SET next_offset = 0, anchor_offset = NULL")
    async with running(bank.service):
        await eventually(position_reaches(db, bank.deposits, 3))
    assert await histories(db) == {"ada": [0, 1, 2]}
    assert await count(db, "pipeline.backlog") == 0


async def test_what_is_known_is_a_duplicate_however_old_it_is(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    await applier.apply(Deposit(1))
    await db.execute("UPDATE pipeline.inbox_generation SET since = now()")
    (again,) = await applier.apply(Deposit(1))
    assert not again.is_new
    assert await applier.park() == {}


async def test_a_generation_is_not_closed_without_a_successor(db: asyncpg.Connection) -> None:
    await db.execute("DROP TABLE pipeline.inbox_g2")
    assert not await generations.close_generation(db, current=1)
    assert await db.fetchval("SELECT current FROM pipeline.inbox_generation") == 1


async def test_a_successor_that_is_made_but_not_attached_does_not_count(
    db: asyncpg.Connection,
) -> None:
    await db.execute("ALTER TABLE pipeline.inbox DETACH PARTITION pipeline.inbox_g2")
    assert not await generations.close_generation(db, current=1)


async def test_of_two_that_close_the_same_generation_only_one_does(
    db: asyncpg.Connection, connect: Connect
) -> None:
    other = await connect()
    closed = [await generations.close_generation(one, current=1) for one in (db, other)]
    assert closed == [True, False]
    assert await db.fetchval("SELECT current FROM pipeline.inbox_generation") == 2


async def test_a_generation_is_not_closed_under_an_open_consume_transaction(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    inside, go_on = asyncio.Event(), asyncio.Event()

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="waiting", timeout=PATIENCE)
    async def waiting(event: Deposited, tx: Transaction) -> None:
        inside.set()
        await go_on.wait()

    applying = asyncio.create_task(applier.apply(Deposit(1)))
    await inside.wait()
    with pytest.raises(asyncpg.LockNotAvailableError):
        await generations.close_generation(db, current=1)
    go_on.set()
    await applying
    assert await generations.close_generation(db, current=1)
    assert await count(db, "pipeline.inbox_g1") == 2


async def test_retention_closes_a_generation_that_is_old_and_no_other(
    db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    await run_retention(db, settings())
    assert await db.fetchval("SELECT current FROM pipeline.inbox_generation") == 1
    await db.execute("UPDATE pipeline.inbox_generation SET opened_at = now() - interval '97 hours'")
    await run_retention(db, settings())
    await run_retention(db, settings())
    assert await db.fetchval("SELECT current FROM pipeline.inbox_generation") == 2


async def test_concurrent_writers_of_the_same_ids_apply_each_once_during_generation_rotation(
    new_applier: NewApplier,
    db: asyncpg.Connection,
    connect: Connect,
    settings: Callable[..., Settings],
) -> None:
    """Trap 9: neither a boundary nor a rotation under way makes an id new."""
    writers, rounds, step = 12, 20, 10
    ids = (rounds + 1) * step
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    appliers = [
        await new_applier(bank.handlers, topic=bank.deposits, partition=number, concurrency=1)
        for number in range(writers)
    ]
    finished = asyncio.Event()
    closed = 0

    async def write(applier: Applier) -> None:
        chance = random.Random(applier.slot.partition)
        for first in range(0, rounds * step, step):
            # Half of them the others have had before, half of them are new to all.
            amounts = chance.sample(range(first, first + 2 * step), step)
            await applier.apply(*(Deposit(n, account=f"account {n}") for n in amounts))
        await applier.apply(*(Deposit(n, account=f"account {n}") for n in range(ids)))

    async def rotate_on() -> None:
        nonlocal closed
        keeper = await connect()
        while not finished.is_set():
            current = await keeper.fetchval("SELECT current FROM pipeline.inbox_generation")
            try:
                closed += await generations.close_generation(keeper, current=current)
                await run_retention(keeper, settings())
            except asyncpg.LockNotAvailableError:
                pass
            await asyncio.sleep(0)

    rotating = asyncio.create_task(rotate_on())
    await asyncio.gather(*(write(applier) for applier in appliers))
    finished.set()
    await rotating
    assert closed > 1
    assert await histories(db) == {f"account {n}": [n] for n in range(ids)}
    assert await count(db, "pipeline.inbox") == ids
    assert await db.fetchval("SELECT count(DISTINCT id) FROM pipeline.inbox") == ids


async def test_the_second_of_two_partitions_waits_and_finds_a_duplicate(
    new_applier: NewApplier, db: asyncpg.Connection, outcomes: Counter[str]
) -> None:
    """Traps 11 and 31: two transactions at once, neither of which sees the other's marker."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    first, second = [
        await new_applier(bank.handlers, topic=bank.deposits, partition=number) for number in (0, 1)
    ]
    inside, go_on = asyncio.Event(), asyncio.Event()

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="waiting", timeout=PATIENCE)
    async def waiting(event: Deposited, tx: Transaction) -> None:
        inside.set()
        await go_on.wait()

    one = asyncio.create_task(first.apply(Deposit(1)))
    await inside.wait()
    other = asyncio.create_task(second.apply(Deposit(1), Deposit(2)))
    await somebody_waits(db)
    go_on.set()
    await asyncio.gather(one, other)
    assert await histories(db) == {"ada": [1, 2]}
    # Two consumers of each.
    assert (outcomes["applied"], outcomes["duplicate"]) == (4, 2)


async def test_after_a_rollback_a_waiting_transaction_does_not_find_a_duplicate(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    first, second = [
        await new_applier(bank.handlers, topic=bank.deposits, partition=number) for number in (0, 1)
    ]
    inside, go_on = asyncio.Event(), asyncio.Event()

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="waiting", timeout=PATIENCE)
    async def waiting(event: Deposited, tx: Transaction) -> None:
        if tx.message.partition == 0 and not go_on.is_set():
            inside.set()
            await go_on.wait()

    one = asyncio.create_task(first.apply(Deposit(1)))
    await inside.wait()
    other = asyncio.create_task(second.apply(Deposit(1)))
    await somebody_waits(db)
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    await other
    assert await histories(db) == {"ada": [1]}
    # The one that was rolled back is now a duplicate.
    assert [outcome.is_new for outcome in await first.apply(Deposit(1))] == [False, False]
    assert await first.position() == 1


@pytest.mark.parametrize("amount", [1, 10])
async def test_a_waiting_transaction_finds_an_event_that_was_set_aside_meanwhile(
    new_applier: NewApplier, db: asyncpg.Connection, outcomes: Counter[str], amount: int
) -> None:
    """Trap 31: what is set aside leaves no marker, and yet nobody takes its copy for new."""
    bank = Bank("deposits", "balances", "bank", options={"timeout": PATIENCE})
    first, second = [
        await new_applier(bank.handlers, topic=bank.deposits, partition=number) for number in (0, 1)
    ]
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        # In the transaction that knows of the failure.
        if bank.calls == [1, 2]:
            inside.set()
            await go_on.wait()

    bank.refused = {1}
    bank.waits[2] = hold
    one = asyncio.create_task(first.apply(Deposit(1), Deposit(2, account="bob")))
    await inside.wait()
    bank.refused = set()
    other = asyncio.create_task(second.apply(Deposit(amount, id="1"), Deposit(3)))
    await somebody_waits(db)
    go_on.set()
    await asyncio.gather(one, other)
    assert await histories(db) == {"bob": [2]}
    assert outcomes["parked"] == 2, "the first event, and the later one of its key"
    assert (outcomes["duplicate"], outcomes["identity mismatch"]) == (
        (1, 0) if amount == 1 else (0, 1)
    )
    await first.make_due()
    await first.work_off()
    assert await histories(db) == {"ada": [1, 3], "bob": [2]}


async def test_two_partitions_with_the_same_ids_in_opposite_order_do_not_deadlock(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Trap 11."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    first, second = [
        await new_applier(bank.handlers, topic=bank.deposits, partition=number, lock_timeout=4)
        for number in (0, 1)
    ]
    before = await deadlocks(db)
    amounts = range(400)
    for start in range(0, 400, 100):
        batch = [Deposit(n, account=str(n)) for n in amounts[start : start + 100]]
        await asyncio.gather(first.apply(*batch), second.apply(*reversed(batch)))
    assert await histories(db) == {str(n): [n] for n in amounts}
    assert first.outages == second.outages == []
    assert await deadlocks(db) == before


async def somebody_waits(db: asyncpg.Connection) -> None:
    """Wait until a transaction of the test's database waits for another's lock."""

    async def waits() -> bool:
        return bool(
            await db.fetchval(
                "SELECT EXISTS (SELECT FROM pg_stat_activity"
                " WHERE datname = current_database() AND wait_event_type = 'Lock')"
            )
        )

    await eventually(waits)


async def deadlocks(db: asyncpg.Connection) -> int:
    """Count the deadlocks that the server has found in the test's database."""
    return int(
        await db.fetchval(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )
    )


async def test_a_start_position_does_not_replace_a_stored_one(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    await applier.apply(Deposit(1))
    async with autocommitting(applier.engine) as driver:
        assert (await applier.position()) == 1
        await positions.start_at(driver, applier.slot, 700)
        assert (await applier.position()) == 1
