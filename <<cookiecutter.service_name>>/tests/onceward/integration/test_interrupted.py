"""What happens when PostgreSQL, or the way to it, fails in the middle of a batch."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from sqlalchemy import make_url

from onceward import Event, Handlers, Transaction
from onceward.apply import limits, statements
from onceward.apply.positions import PositionMoved
from onceward.apply.statements import GENERATION_LOCK
from onceward.handlers import staging
from onceward.handlers.staged import StagedEvent
from onceward.runtime import Part
from onceward.servers.database import autocommitting, connect_args
from onceward.settings import Settings

from .applier import Applier, NewApplier
from .bank import Bank
from .conftest import position_reaches
from tests.conftest import Running
from tests.contract.bank import Account, Deposit, Deposited, histories
from tests.servers.pooler import POOLED
from tests.servers.proxy import Pass, proxy
from tests.servers.waiting import PATIENCE, eventually

Connect = Callable[[], Awaitable[asyncpg.Connection]]


class Gate:
    """A place where a handler waits, the first time that it comes there."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def wait(self) -> None:
        """Wait until the test opens the gate."""
        self.reached.set()
        await self.open.wait()


async def kill_connections(db: asyncpg.Connection, name: str = "applier") -> int:
    """Let the server end the connections of an application; returns how many."""
    killed = await db.fetch(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = $1",
        name,
    )
    return len(killed)


async def outbox_of(db: asyncpg.Connection) -> list[tuple[str, int | None]]:
    """Return id and sequence of the events in the outbox, in the order of staging."""
    rows = await db.fetch("SELECT event_id, sequence FROM pipeline.outbox ORDER BY id")
    return [(row["event_id"], row["sequence"]) for row in rows]


async def test_a_connection_killed_during_a_handler_only_costs_a_second_execution(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    gate = Gate()

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="waiting", timeout=PATIENCE)
    async def waiting(event: Deposited, tx: Transaction) -> None:
        if event.amount == 2:
            await gate.wait()

    applying = asyncio.create_task(applier.apply(*(Deposit(amount) for amount in (1, 2, 3))))
    await gate.reached.wait()
    assert await kill_connections(db) == 1
    gate.open.set()
    await applying
    assert bank.calls[:2] == [1, 2]
    assert bank.calls[-3:] == [1, 2, 3]
    assert await histories(db) == {"ada": [1, 2, 3]}
    events = await outbox_of(db)
    assert [sequence for _, sequence in events] == [1, 2, 3]
    assert len({id for id, _ in events}) == 3
    assert len(applier.outages) == 1
    assert await applier.position() == 3


async def test_event_ids_do_not_depend_on_executions_or_batch_boundaries(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger

    class Told(Event, type="told", topic="told"):
        """The second and the third event of a handler for a message."""

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="tell")
    async def tell(event: Deposited, tx: Transaction) -> None:
        tx.publish(Told())
        tx.publish(Told())

    deposits = [Deposit(amount) for amount in (1, 2, 3)]
    await applier.apply(*deposits)
    first = [id for id, _ in await outbox_of(db)]
    assert len(set(first)) == 9
    await db.execute("TRUNCATE pipeline.inbox, pipeline.outbox, pipeline.position, account")
    for deposit in deposits:
        await applier.apply(deposit)
    assert [id for id, _ in await outbox_of(db)] == first


async def test_a_deadlock_is_tried_again_in_place(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    first, second = [
        await new_applier(bank.handlers, topic=bank.deposits, partition=number, lock_timeout=4)
        for number in (0, 1)
    ]
    await first.apply(Deposit(1, account="ada"), Deposit(2, account="bob"))
    met = asyncio.Barrier(2)
    calls = []

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="crossing")
    async def crossing(event: Deposited, tx: Transaction) -> None:
        # Its own row is locked by now; then it wants the other's, which is not declared.
        calls.append(event.amount)
        if calls.count(event.amount) == 1:
            await met.wait()
        other = await tx.load(Account, {"ada": "bob", "bob": "ada"}[event.account])
        assert other is not None
        other.balance += 1_000

    await asyncio.gather(
        first.apply(Deposit(3, account="ada")), second.apply(Deposit(4, account="bob"))
    )
    assert await histories(db) == {"ada": [1, 3], "bob": [2, 4]}
    assert await db.fetchval("SELECT sum(balance) FROM account") == 1 + 2 + 3 + 4 + 2_000


async def test_a_lock_that_another_holds_too_long_spends_no_attempt(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier = await new_applier(bank.handlers, topic=bank.deposits, lock_timeout=0.1)
    await applier.apply(Deposit(1))
    holding = db.transaction()
    await holding.start()
    await db.execute("SELECT FROM account FOR UPDATE")
    await applier.apply(Deposit(2), Deposit(3))
    await applier.work_off()
    assert [(row["reason"], row["attempts"]) for row in await applier.backlog()] == [
        ("locked out", 0),
        ("follows another", 0),
    ]
    await holding.rollback()
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [1, 2, 3]}


async def test_the_system_keeps_an_idle_connection_alive(new_applier: NewApplier) -> None:
    applier = await new_applier(Handlers(), topic="deposits")
    async with autocommitting(applier.engine) as driver:
        link = driver._transport.get_extra_info("socket")
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_a_connection_has_only_the_parameters_that_pages_on_poolers_name(
    settings: Callable[..., Settings],
) -> None:
    """A pooler in session mode refuses others, and that looks like an outage."""
    options = connect_args(settings(database_pooler=False), name="bank")
    assert set(options["server_settings"]) == {"application_name", "jit"}


async def test_a_lock_that_is_not_granted_to_a_begin_is_an_outage(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier = await new_applier(bank.handlers, topic=bank.deposits, lock_timeout=0.1)
    async with db.transaction():
        await db.execute("SELECT pg_advisory_xact_lock($1)", GENERATION_LOCK)
        applying = asyncio.create_task(applier.apply(*map(Deposit, (1, 2, 3))))
        await eventually(lambda: len(applier.outages) == 6)
    await applying
    assert "lock timeout" in applier.outages[0]
    assert not await applier.backlog()
    assert await histories(db) == {"ada": [1, 2, 3]}


@pytest.mark.parametrize(("lost", "fails"), [({1, 2}, False), ({2}, True)])
async def test_a_connection_that_is_lost_at_a_begin_is_an_outage(
    new_applier: NewApplier, db: asyncpg.Connection, database_url: str, lost: set[int], fails: bool
) -> None:
    """Also if the handler has failed before, and its message is being parked."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    bank.refused = {1} if fails else set()
    begins = 0

    def cut(message: bytes) -> bool:
        nonlocal begins
        is_begin = b"pg_advisory_xact_lock_shared" in message
        begins += is_begin
        return is_begin and begins in lost

    async with wire(database_url, cut, delivers=False) as url:
        applier = await new_applier(bank.handlers, topic=bank.deposits, database_url=url)
        await applier.position()
        await applier.apply(Deposit(1))
        assert [row["attempts"] for row in await applier.backlog()] == [1] * fails
        await applier.engine.dispose()
    assert len(applier.outages) == len(lost)
    assert await histories(db) == ({} if fails else {"ada": [1]})


async def test_a_stopped_process_holds_locks_no_longer_than_the_transaction_timeout(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Trap 35: the server ends what nobody answers for, and the successor goes on."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier = await new_applier(
        bank.handlers, topic=bank.deposits, transaction_timeout=3, lock_timeout=2
    )
    await applier.apply(Deposit(1))
    async with applier.engine.connect() as stopped:
        await limits.begin(stopped, statements.set_limits(stopped, applier.consume.settings))
        driver = (await stopped.get_raw_connection()).driver_connection
        assert isinstance(driver, asyncpg.Connection)
        await driver.execute("SELECT FROM account FOR UPDATE")
        await applier.apply(Deposit(2))
        await eventually(driver.is_closed)
        await stopped.invalidate()
    assert await histories(db) == {"ada": [1, 2]}


@asynccontextmanager
async def wire(
    url: str, cut: Callable[[bytes], bool], *, delivers: bool = True
) -> AsyncIterator[str]:
    """Forward connections to the server of the URL, and give the URL that leads through here.

    After a message for which `cut` is true the server's answer is awaited, and never delivered;
    unless it `delivers`, the message isn't either.
    """
    there = make_url(url)
    host, server_port = str(there.host), int(there.port or 0)

    def ways() -> tuple[Pass, Pass]:
        lost = False

        async def to_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal lost
            while data := await reader.read(65_536):
                lost = lost or cut(data)
                if lost and not delivers:
                    break
                writer.write(data)

        async def back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65_536):
                if lost:
                    break
                writer.write(data)

        return to_server, back

    async with proxy(host, server_port, ways=ways) as port:
        yield there.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)


async def test_a_commit_whose_answer_is_lost_is_settled_by_the_position(
    new_applier: NewApplier, db: asyncpg.Connection, database_url: str
) -> None:
    """Trap 19."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    cuts = 0

    def cut(message: bytes) -> bool:
        nonlocal cuts
        if cuts == 0 and b"COMMIT" in message and bank.calls:
            cuts += 1
            return True
        return False

    async with wire(database_url, cut) as url:
        applier = await new_applier(bank.handlers, topic=bank.deposits, database_url=url)
        batch = await applier.read(Deposit(1), Deposit(2), start=await applier.position())
        with pytest.raises(PositionMoved):
            await applier.apply_batch(batch)
        assert await applier.position() == 2
        await applier.apply(Deposit(3))
        await applier.engine.dispose()
    assert cuts == 1
    assert bank.calls == [1, 2, 3]
    assert await histories(db) == {"ada": [1, 2, 3]}


@pytest.mark.parametrize("delivers", [True, False], ids=["done", "not done"])
async def test_losing_the_connection_at_every_second_commit_applies_each_message_once(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    database_url: str,
    delivers: bool,
) -> None:
    """Trap 19: whether the server has done it can't be told from here."""
    commits = 0

    def cut(message: bytes) -> bool:
        nonlocal commits
        is_commit = b"COMMIT;" in message  # and not BEGIN … READ COMMITTED
        commits += is_commit
        return is_commit and commits % 2 == 0

    amounts = range(20)
    for amount in amounts:
        await Deposit(amount).send(producer, bank.deposits)
    async with (
        wire(database_url, cut, delivers=delivers) as url,
        running(bank.service, Part.CONSUME, batch_size=4, database_url=url) as health,
    ):
        await eventually(position_reaches(db, bank.deposits, len(amounts)))
        await eventually(lambda: health.is_ready)
    assert commits > 4
    assert await histories(db) == {"ada": list(amounts)}
    events = await outbox_of(db)
    assert [sequence for _, sequence in events] == [amount + 1 for amount in amounts]
    assert len({id for id, _ in events}) == len(amounts)
    # What was committed has not been tried again; what was not, has.
    assert (len(bank.calls) == len(amounts)) == delivers


async def test_a_connection_killed_during_the_commit_of_a_batch_is_tried_again(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    """Trap 19, the other way: nothing had been committed."""
    await db.execute("""
        CREATE FUNCTION wait_for_lock() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_advisory_xact_lock_shared(1);
            RETURN NULL;
        END $$;
        CREATE CONSTRAINT TRIGGER at_commit AFTER UPDATE ON pipeline.position
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait_for_lock();
        SELECT pg_advisory_lock(1);
    """)
    _, applier = ledger
    applying = asyncio.create_task(applier.apply(Deposit(1), Deposit(2)))

    async def commits() -> bool:
        return bool(
            await db.fetchval(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE application_name = 'applier' AND query LIKE 'COMMIT%'"
                " AND datname = current_database() AND wait_event_type = 'Lock'"
            )
        )

    await eventually(commits)
    await kill_connections(db)
    await db.execute("SELECT pg_advisory_unlock(1)")
    await applying
    assert await histories(db) == {"ada": [1, 2]}
    assert await applier.position() == 2


async def test_a_cancelled_batch_leaves_nothing_behind_and_its_connection_to_nobody(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    """Trap 12."""
    bank, applier = ledger
    gate = Gate()

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="waiting", timeout=PATIENCE)
    async def waiting(event: Deposited, tx: Transaction) -> None:
        if not gate.open.is_set():
            await tx.session.flush()
            await gate.wait()

    applying = asyncio.create_task(applier.apply(Deposit(1)))
    await gate.reached.wait()
    applying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await applying
    assert await histories(db) == {}
    assert await applier.position() == 0
    gate.open.set()
    await applier.apply(Deposit(1))
    assert await histories(db) == {"ada": [1]}


async def test_outbox_rows_are_refused_outside_a_transaction(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    event = StagedEvent(
        topic="t", key=None, payload=b"", event_id="1", source="/", type="t", subject=None,
        sequence=None, content_type="text/plain", traceparent=None, tracestate=None, baggage=None,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="in a transaction"):
        await staging.append(db, [event])
    async with autocommitting(applier.engine) as driver:
        with pytest.raises(RuntimeError, match="in a transaction"):
            await staging.append(driver, [event])
    assert await outbox_of(db) == []


async def test_a_changed_column_type_does_not_make_a_record_guilty(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    """A migration that runs beside the service invalidates its prepared statements."""
    _, applier = ledger
    await applier.apply(Deposit(1))
    await applier.apply(Deposit(2))
    await db.execute("ALTER TABLE account ALTER balance TYPE bigint")
    await applier.apply(Deposit(3))
    assert await histories(db) == {"ada": [1, 2, 3]}


@pytest.mark.skipif(POOLED, reason="a pooler keeps connections that the server has ended")
async def test_connections_that_the_server_has_ended_are_not_lent_again(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    """Else every one of them costs an attempt, and a pause, after a restart of the server."""
    _, applier = ledger
    together = asyncio.Barrier(3)
    lent: list[asyncpg.Connection] = []

    async def borrow() -> None:
        async with autocommitting(applier.engine) as driver:
            lent.append(driver)
            await together.wait()
            await driver.execute("SELECT")

    await asyncio.gather(*(borrow() for _ in range(3)))
    await kill_connections(db)
    await eventually(lambda: all(driver.is_closed() for driver in lent))
    await asyncio.gather(*(borrow() for _ in range(3)))


async def test_an_outage_of_another_server_is_only_the_handlers_failure(
    ledger: tuple[Bank, Applier],
) -> None:
    bank, applier = ledger

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="offline")
    async def offline(event: Deposited, tx: Transaction) -> None:
        raise ConnectionRefusedError("somebody else's server")

    await applier.apply(Deposit(1))
    assert applier.outages == []
    (row,) = await applier.backlog()
    assert (row["reason"], row["attempts"]) == ("failed", 1)
    assert "somebody else's server" in row["error"]


async def test_a_connection_killed_while_the_backlog_is_worked_off_costs_no_attempt(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Trap 16."""
    bank = Bank("deposits", "balances", "bank", options={"timeout": PATIENCE})
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    bank.refused = {1}
    await applier.apply(Deposit(1), Deposit(2))
    bank.refused = set()
    gate = Gate()
    bank.waits[1] = gate.wait
    await applier.make_due()
    working = asyncio.create_task(applier.work_off())
    await gate.reached.wait()
    assert await kill_connections(db) == 1
    (first, _) = await applier.backlog()
    assert (first["reason"], first["attempts"]) == ("failed", 1)
    gate.open.set()
    await working
    assert await histories(db) == {"ada": [1, 2]}
    assert bank.calls == [1, 1, 2, 1, 2], "both once more, in place"
