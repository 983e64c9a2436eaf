"""The same event at the same moment: on many connections, and while generations are closed."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

import asyncpg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from onceward import Transaction
from onceward.apply import inbox, limits, positions
from onceward.apply.positions import Generations
from onceward.apply.statements import GENERATION_LOCK
from onceward.retention import statements as retention_statements
from onceward.retention.generations import close_generation
from onceward.retention.maintenance import run_retention
from onceward.settings import Settings

from .applier import Applier, NewApplier
from .bank import Bank
from .test_inbox import count, somebody_waits
from .test_interrupted import Gate
from tests.contract.bank import Deposit, Deposited, histories
from tests.servers.waiting import PATIENCE, eventually

Connect = Callable[[], Awaitable[asyncpg.Connection]]
MANY = 100
"""Transactions at once; the server has 200 connections for all who test."""


class Held(Bank):
    """A bank that waits at a gate, inside the transaction of the first deposit of 1."""

    def __init__(self) -> None:
        super().__init__(deposits="deposits", balances="balances", name="bank")
        self.gate = Gate()

        @self.handlers.on(Deposited, topic=self.deposits, consumer="waiting", timeout=PATIENCE)
        async def waiting(event: Deposited, tx: Transaction) -> None:
            if event.amount == 1 and not self.gate.reached.is_set():
                await self.gate.wait()


@pytest.fixture
async def held() -> Held:
    """Return a bank whose gate nobody has reached yet."""
    return Held()


@pytest.fixture
async def pair(held: Held, new_applier: NewApplier) -> tuple[Applier, Applier]:
    """Return the appliers of two partitions; the account `ada` is there, with a deposit of 0."""
    first, second = [
        await new_applier(held.handlers, topic=held.deposits, partition=number, lock_timeout=4)
        for number in (0, 1)
    ]
    await first.apply(Deposit(0))
    return first, second


async def rotate(db: asyncpg.Connection) -> bool:
    """Close the current generation as retention does; False if it is in use."""
    current = await db.fetchval("SELECT current FROM pipeline.inbox_generation")
    try:
        return await close_generation(db, current=current)
    except asyncpg.LockNotAvailableError:
        return False


async def rotate_without_the_lock(db: asyncpg.Connection) -> bool:
    """Close the current generation as nobody may: under those who have read that it is open."""
    await db.execute("UPDATE pipeline.inbox_generation SET current = current + 1")
    return True


@pytest.mark.parametrize(
    ("close", "closes", "applied"),
    [(rotate, False, [0, 1]), (rotate_without_the_lock, True, [0, 1, 1])],
    ids=["the engine", "without the lock"],
)
async def test_no_generation_is_closed_under_who_has_read_that_it_is_open(
    held: Held,
    pair: tuple[Applier, Applier],
    db: asyncpg.Connection,
    close: Callable[[asyncpg.Connection], Awaitable[bool]],
    closes: bool,
    applied: list[int],
) -> None:
    """Trap 9: the boundary falls into a transaction. Who rotates without the lock doubles."""
    first, second = pair
    one = asyncio.create_task(first.apply(Deposit(1)))
    await held.gate.reached.wait()
    assert await close(db) == closes
    other = asyncio.create_task(second.apply(Deposit(1)))
    await somebody_waits(db)
    held.gate.open.set()
    await asyncio.gather(one, other)
    assert await histories(db) == {"ada": applied}


async def test_a_stopped_process_holds_the_lock_of_generations_for_seconds_only(
    new_applier: NewApplier, connect: Connect, db: asyncpg.Connection
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier = await new_applier(bank.handlers, topic=bank.deposits, lock_timeout=0.1)
    stopped = await connect()
    await stopped.transaction().start()
    # As far as `close_generation` comes before it is stopped.
    await stopped.execute(retention_statements.LOCK_GENERATIONS, GENERATION_LOCK, "1s")
    await applier.apply(*map(Deposit, (1, 2, 3)))
    assert await histories(db) == {"ada": [1, 2, 3]}
    assert not await applier.backlog()


@pytest.fixture(params=["the engine", "lock and read in one statement"])
def applied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the deposits that are applied by the engine, or by one that is made naive here."""
    if request.param == "the engine":
        return [0, 1]
    found: ContextVar[Generations] = ContextVar("found")
    move_positions = positions.move_positions

    async def begin(connection: AsyncConnection, _: object) -> None:
        row = await connection.execute(
            sa.text(
                "SELECT pg_advisory_xact_lock_shared(:lock), current, oldest, since"
                " FROM pipeline.inbox_generation"
            ),
            {"lock": GENERATION_LOCK},
        )
        _, *generations = row.one()
        found.set(Generations(*generations))

    async def move(*args: object, **kwargs: object) -> Generations:
        await move_positions(*args, **kwargs)  # type: ignore[arg-type]
        return found.get()

    monkeypatch.setattr(limits, "begin", begin)
    monkeypatch.setattr(positions, "move_positions", move)
    return [0, 1, 1]


async def test_who_waited_for_a_rotation_knows_of_it(
    held: Held,
    pair: tuple[Applier, Applier],
    db: asyncpg.Connection,
    connect: Connect,
    applied: list[int],
) -> None:
    """Trap 9: a statement that waits for the lock has its snapshot from before the rotation."""
    first, second = pair
    keeper = await connect()
    async with keeper.transaction():
        await keeper.execute("SELECT pg_advisory_xact_lock($1)", GENERATION_LOCK)
        one = asyncio.create_task(first.apply(Deposit(1)))
        await somebody_waits(db)
        await keeper.execute("UPDATE pipeline.inbox_generation SET current = current + 1")
    await held.gate.reached.wait()
    other = asyncio.create_task(second.apply(Deposit(1)))
    await somebody_waits(db)
    held.gate.open.set()
    await asyncio.gather(one, other)
    assert await histories(db) == {"ada": applied}


@pytest.mark.parametrize("gives_up", [False, True])
async def test_another_payload_is_recognised_by_who_waited_for_the_first(
    held: Held, pair: tuple[Applier, Applier], db: asyncpg.Connection, gives_up: bool
) -> None:
    first, second = pair
    altered = Deposit(100, id="1")
    one = asyncio.create_task(first.apply(Deposit(1)))
    await held.gate.reached.wait()
    other = asyncio.create_task(second.apply(Deposit(7), altered, Deposit(8)))
    await somebody_waits(db)
    if gives_up:
        # Nothing is known of the first one then: the second is the event.
        await give_up(one)
    held.gate.open.set()
    await (other if gives_up else asyncio.gather(one, other))
    if gives_up:
        await first.apply(Deposit(1))
    mismatched = await first.backlog()
    assert len(mismatched) == 1, "it is an incident of the event, and not of each consumer"
    hashes = [
        (await applier.read(deposit, start=0)).items[0].message.hash
        for applier, deposit in ((first, Deposit(1)), (second, altered))
    ]
    known, new = reversed(hashes) if gives_up else hashes
    for row in mismatched:
        assert row["reason"] == "identity mismatch"
        assert (row["remembered_hash"], row["hash"]) == (known, new)
    assert await histories(db) == {"ada": [0, 7, 100, 8] if gives_up else [0, 1, 7, 8]}
    assert (await first.position(), await second.position()) == (2, 3)


async def give_up(applying: asyncio.Task[object]) -> None:
    """End an attempt in the middle: its transaction is rolled back."""
    applying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await applying


async def test_nobody_waits_for_a_marker_for_longer_than_the_lock_time_out(
    held: Held, new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Trap 11."""
    first, second = [
        await new_applier(held.handlers, topic=held.deposits, partition=number, lock_timeout=0.1)
        for number in (0, 1)
    ]
    one = asyncio.create_task(first.apply(Deposit(1, account="ada")))
    await held.gate.reached.wait()
    other = asyncio.create_task(second.apply(Deposit(1, account="ada"), Deposit(2, account="bob")))
    await eventually(lambda: len(second.outages) == 2)
    held.gate.open.set()
    await asyncio.gather(one, other)
    assert all("lock timeout" in outage for outage in second.outages)
    assert await histories(db) == {"ada": [1], "bob": [2]}


@pytest.mark.parametrize("in_order", [True, False], ids=["the engine", "in the records' order"])
async def test_concurrent_inserts_of_the_same_markers_in_opposite_order_never_deadlock(
    pair: tuple[Applier, Applier],
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    in_order: bool,
) -> None:
    """Trap 11. The server holds both up between their first and their second marker."""
    if not in_order:
        monkeypatch.setattr(inbox, "sorted", list, raising=False)
    await db.execute("""
        CREATE FUNCTION hold_the_second() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF current_setting('test.has_first', true) = 'yes' THEN
                PERFORM pg_advisory_xact_lock_shared(1);
            END IF;
            PERFORM set_config('test.has_first', 'yes', true);
            RETURN NEW;
        END $$;
        CREATE TRIGGER hold BEFORE INSERT ON pipeline.inbox
        FOR EACH ROW EXECUTE FUNCTION hold_the_second();
        SELECT pg_advisory_lock(1);
    """)
    first, second = pair
    deposits = [Deposit(amount, account=str(amount)) for amount in (2, 3)]
    both = asyncio.gather(first.apply(*deposits), second.apply(*reversed(deposits)))

    async def both_wait() -> bool:
        return await waiting(db) == 2

    await eventually(both_wait)
    await db.execute("SELECT pg_advisory_unlock(1)")
    await both
    outages = first.outages + second.outages
    assert ["deadlock" in outage for outage in outages] == ([] if in_order else [True])
    assert await histories(db) == {"ada": [0], "2": [2], "3": [3]}


async def waiting(db: asyncpg.Connection) -> int:
    """Count the transactions of the test's database that wait for a lock."""
    return int(
        await db.fetchval(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
    )


@pytest.fixture
async def hall(held: Held, new_applier: NewApplier) -> list[Applier]:
    """Return a hundred appliers, each with a connection of its own."""
    patient = {
        "lock_timeout": 40,
        "transaction_timeout": 45,
        "kafka_session_timeout": 50,
        "backlog_lease": 50,
    }
    appliers = [
        await new_applier(
            held.handlers, topic=held.deposits, partition=number, concurrency=1, **patient
        )
        for number in range(MANY)
    ]
    for applier in appliers:  # each has some seconds to connect, which all at once may exceed
        await applier.position()
    return appliers


def from_two_sources(amounts: range) -> list[Deposit]:
    """Return deposits of the same ids from two sources, each to an account of its own."""
    return [
        Deposit(amount, account=f"{source} {amount}", source=source)
        for amount in amounts
        for source in ("/a", "/b")
    ]


async def check(db: asyncpg.Connection, amounts: range) -> None:
    """Compare accounts, markers and outbox with what each of the deposits causes once."""
    assert await histories(db) == {
        deposit.account: [deposit.amount] for deposit in from_two_sources(amounts)
    }
    # Two sources, two consumers.
    assert await count(db, "pipeline.inbox") == 4 * len(amounts)
    assert await count(db, "pipeline.outbox") == 2 * len(amounts)


async def test_of_a_hundred_that_wait_for_one_that_gives_up_one_applies(
    held: Held, hall: list[Applier], db: asyncpg.Connection
) -> None:
    """Traps 11, 24 and 31: all began before any marker could be seen."""
    amounts = range(1, 11)
    deposits = from_two_sources(amounts)
    first, *others = hall
    one = asyncio.create_task(first.apply(*deposits))
    await held.gate.reached.wait()
    rest = [
        asyncio.create_task(applier.apply(*random.Random(n).sample(deposits, len(deposits))))
        for n, applier in enumerate(others)
    ]

    async def all_wait() -> bool:
        return await waiting(db) == len(others)

    await eventually(all_wait)
    assert not await rotate(db)
    await give_up(one)
    await asyncio.gather(*rest)
    await check(db, amounts)
    assert sum(len(applier.outages) for applier in hall) == 0
    # Once by the one that gave up, and once by another.
    assert len(held.calls) == len(deposits) + 1
    assert [await applier.position() for applier in hall] == [0] + [len(deposits)] * len(others)


async def test_duplicates_by_the_hundred_are_applied_once_while_generations_are_closed(
    held: Held,
    hall: list[Applier],
    db: asyncpg.Connection,
    connect: Connect,
    settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traps 9, 24 and 31: every event comes a hundred times at once, and all again later."""
    held.gate.reached.set()
    keeper = await connect()
    closed = 0
    finished = asyncio.Event()
    rotations = asyncio.Lock()

    async def rotate_on() -> None:
        nonlocal closed
        while not finished.is_set():
            async with rotations:
                closed += await rotate(keeper)
                await run_retention(keeper, settings())

    async def take(applier: Applier, deposits: list[Deposit]) -> None:
        chance = random.Random(applier.slot.partition)
        await applier.apply(*chance.sample(deposits, len(deposits)))

    rotating = asyncio.create_task(rotate_on())
    for last in (5, 10, 15):
        # One must come between what is new and its repetition, however busy the hall is.
        before = closed
        await eventually(lambda before=before: closed > before)  # type: ignore[misc]
        deposits = from_two_sources(range(1, last + 1))
        await asyncio.gather(*(take(applier, deposits) for applier in hall))
    finished.set()
    await rotating
    await check(db, range(1, 16))
    assert len(await db.fetch("SELECT DISTINCT generation FROM pipeline.inbox")) > 1
