"""Members of a group as real processes: they come, go, freeze and die, and the ledger is right."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.errors import GroupCoordinatorNotAvailableError
from aiokafka.protocol.group import LeaveGroupRequest

from onceward.operators import stopping
from onceward.operators.stopping import Subject

from .bank import Bank
from .conftest import position_of, position_reaches
from .processes import starting
from .test_inbox import somebody_waits
from .test_process import check_the_ledger
from .test_throttles import knows_of
from tests.contract.bank import Deposit, histories
from tests.servers.processes import Process, Start
from tests.servers.topics import following
from tests.servers.waiting import eventually

Connect = Callable[[], Awaitable[asyncpg.Connection]]
PARTITIONS = 12
PATIENCE = 300.0
"""Seconds: half a dozen processes may have to share one core with others."""
LEAD = 600
"""Records that the load is ahead of the service, at most."""
PACE = 0.2
"""Seconds between two portions of the load, which leave some time for the processes."""


@pytest.fixture
async def bank(bank: Bank, new_topic: Callable[..., Awaitable[str]]) -> Bank:
    """Return a bank whose deposits and balances have many partitions."""
    bank.deposits, bank.balances = await new_topic(PARTITIONS), await new_topic(3)
    return bank


@pytest.fixture
async def start(bank: Bank, database_url: str, kafka: str) -> AsyncIterator[Start]:
    """Start processes of the bank, which are soon taken for dead."""
    async with starting(
        bank,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
        kafka_session_timeout=6,
        transaction_timeout=5,
        lock_timeout=4,
        retry_pause=0.2,
        batch_size=20,
        relay_lease=2,
        relay_poll_max=0.2,
        hang_timeout=600,  # however long those that are frozen stand still
    ) as one:
        yield one


@dataclass(frozen=True)
class Group:
    """A consumer group, as the broker sees it."""

    admin: AIOKafkaAdminClient
    name: str
    topic: str

    async def describe(self) -> tuple[str, dict[str, set[int]]]:
        """Return the state, and the partitions by the id of their member."""
        (answer,) = await self.admin.describe_consumer_groups([self.name])
        (_, _, state, _, _, members, *_) = answer.groups[0]
        return state, {id: _partitions(assigned) for id, _, _, _, assigned in members}

    async def settles_with(self, count: int) -> dict[str, set[int]]:
        """Wait until there are so many members and all have their partitions; return these."""
        members: dict[str, set[int]] = {}

        async def is_settled() -> bool:
            nonlocal members
            try:
                state, members = await self.describe()
            except GroupCoordinatorNotAvailableError:  # on a broker that no group has used before
                return False
            return state == "Stable" and len(members) == count

        await eventually(is_settled, PATIENCE)
        return members

    async def reaches(self, state: str) -> None:
        """Wait until the group is in this state."""

        async def is_there() -> bool:
            return (await self.describe())[0] == state

        await eventually(is_there, PATIENCE)

    async def evict(self, member: str) -> None:
        """Remove a member, which learns of it only when it sends its next heartbeat."""
        broker = await self.admin.find_coordinator(self.name)
        answer = await self.admin._client.send(broker, LeaveGroupRequest(self.name, member))
        assert answer.error_code == 0


def _partitions(assigned: bytes) -> set[int]:
    topics = ConsumerProtocolMemberAssignment.decode(assigned).assignment if assigned else []
    return {partition for _, partitions in topics for partition in partitions}


@pytest.fixture
async def group(bank: Bank, kafka: str) -> AsyncIterator[Group]:
    """Return the bank's group."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    yield Group(admin, bank.name, bank.deposits)
    await admin.close()


@pytest.fixture(autouse=True)
async def positions_only_go_forward(db: asyncpg.Connection) -> AsyncIterator[None]:
    """Note every position that is moved back or left where it was: that is what a zombie does."""
    await db.execute("""
        CREATE TABLE moved_back (partition int, old bigint, new bigint);
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO moved_back VALUES (NEW.partition, OLD.next_offset, NEW.next_offset);
            RETURN NULL;
        END $$;
        CREATE TRIGGER note AFTER UPDATE OF next_offset ON pipeline.position
        FOR EACH ROW WHEN (NEW.next_offset <= OLD.next_offset) EXECUTE FUNCTION note();
    """)
    yield
    assert await db.fetch("SELECT * FROM moved_back") == []


@dataclass
class Load:
    """Deposits without end, on all partitions.

    Of every ten deposits one is sent twice, and one to two partitions at once: that one has an
    account of its own. All other accounts stay with one partition.
    """

    producer: AIOKafkaProducer
    topic: str
    db: asyncpg.Connection
    first: int = 1
    """The first amount. Loads that run at once have amounts of their own, and names of accounts."""
    name: str = "account"
    records: int = 0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.amounts = self.first - 1
        """The last amount that was sent."""

    async def run(self) -> None:
        """Send until `stopping` is set, always a little faster than the service can follow."""
        while not self.stopping.is_set():
            await self.send(range(self.amounts + 1, self.amounts + 61))
            await eventually(lambda: self.is_behind(LEAD), PATIENCE)
            await asyncio.sleep(PACE)

    async def send(self, amounts: Iterable[int]) -> None:
        """Send deposits and wait for the acknowledgements."""
        deposits = [deposit for amount in amounts for deposit in self._deposits(amount)]
        await asyncio.gather(*(one.send(self.producer, self.topic) for one in deposits))
        self.amounts = deposits[-1].amount
        self.records += len(deposits)

    def _deposits(self, amount: int) -> list[Deposit]:
        home, another = amount % PARTITIONS, (amount + 5) % PARTITIONS
        if amount % 10 == 0:
            account = f"{self.name} shared {amount}"
            return [Deposit(amount, account, partition=one) for one in (home, another)]
        one = Deposit(amount, f"{self.name} {home}", partition=home)
        return [one, one] if amount % 10 == 1 else [one]

    async def is_behind(self, lead: int) -> bool:
        """Whether the service is no more than so many records behind."""
        return self.records - sum((await self.positions()).values()) <= lead

    async def goes_on(self) -> None:
        """Wait until every partition has moved on."""
        before = await self.positions()

        async def all_moved() -> bool:
            now = await self.positions()
            return len(now) == PARTITIONS and all(now[one] > before.get(one, 0) for one in now)

        await eventually(all_moved, PATIENCE)

    async def positions(self) -> dict[int, int]:
        """Return the positions stored."""
        async with self.asking:
            rows = await self.db.fetch(
                "SELECT partition, next_offset FROM pipeline.position WHERE topic = $1", self.topic
            )
        return {row["partition"]: row["next_offset"] for row in rows}


Loading = Callable[[], AbstractAsyncContextManager[Load]]


@pytest.fixture
def loading(
    bank: Bank, producer: AIOKafkaProducer, connect: Connect, db: asyncpg.Connection, kafka: str
) -> Loading:
    """Keep the service busy as long as a `with` block lasts, and check the ledger at its end."""

    @asynccontextmanager
    async def load() -> AsyncIterator[Load]:
        one = Load(producer, bank.deposits, await connect())
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(one.run())
            try:
                yield one
            except BaseException:
                sending.cancel()
                raise
            one.stopping.set()
        await eventually(lambda: one.is_behind(0), PATIENCE)
        await check_the_ledger(db, kafka, bank, one.amounts)

    return load


@pytest.mark.full
async def test_one_member_becomes_six_and_one_again_under_load(
    start: Start, group: Group, loading: Loading
) -> None:
    processes: list[Process] = []

    async def become(members: int) -> None:
        joining = [start("run") for _ in range(members - len(processes))]
        processes.extend(await asyncio.gather(*joining))
        leaving = processes[members:]
        del processes[members:]
        for one in leaving:
            one.send(signal.SIGTERM)
        assert [await one.ended() for one in leaving] == [0] * len(leaving)
        await group.settles_with(members)
        await load.goes_on()

    async with loading() as load:
        for members in (1, 2, 4, 6, 5, 3, 1):
            await become(members)


async def test_one_of_four_members_continues_after_two_deaths_and_a_freeze(
    start: Start, group: Group, loading: Loading
) -> None:
    """Traps 12 and 35."""
    async with loading() as load:
        frozen, *killed, _ = await asyncio.gather(*(start("run") for _ in range(4)))
        await group.settles_with(4)
        await load.goes_on()
        frozen.send(signal.SIGSTOP)
        for one in killed:
            await one.kill()
        (partitions,) = (await group.settles_with(1)).values()
        assert len(partitions) == PARTITIONS
        await load.goes_on()
        frozen.send(signal.SIGCONT)
        await start("run")
        await group.settles_with(3)
        await load.goes_on()
        assert frozen.is_running


_KEY = "account 3"
_TAKEN = """
SELECT COALESCE((SELECT history FROM account WHERE id = $1), '') AS of_key,
       (SELECT array_agg(next_offset ORDER BY partition) FROM pipeline.position
         WHERE topic = $2) AS positions,
       (SELECT count(*) FROM pipeline.inbox WHERE topic = $2) AS of_topic
"""
_ALL_BEGAN_LATER = """
SELECT NOT EXISTS (SELECT FROM pg_stat_activity
                    WHERE datname = current_database() AND xact_start < $1)
"""
_SPENT = """
SELECT max(attempts) AS attempts, max(waited) AS waited FROM pipeline.backlog
 WHERE topic = $1 AND record_key = $2
"""


@pytest.mark.full
async def test_pauses_and_order_hold_while_a_member_joins_and_another_dies(
    start: Start,
    group: Group,
    bank: Bank,
    new_topic: Callable[..., Awaitable[str]],
    producer: AIOKafkaProducer,
    connect: Connect,
    db: asyncpg.Connection,
    kafka: str,
) -> None:
    other = await new_topic(PARTITIONS)
    stops = [Subject("topic", other), Subject("key", "deposit", bank.deposits, _KEY.encode())]
    reported = f"topic {other}", f"keys of {bank.deposits}"
    load = Load(producer, bank.deposits, await connect())
    both = load, Load(producer, other, await connect(), first=200_001, name="other")

    async def join(members: int) -> Process:
        process = await start("consume", more_variables={"BANK_OTHERS": other})
        await group.settles_with(members)
        return process

    async def taken() -> tuple[object, ...]:
        return tuple(await db.fetchrow(_TAKEN, _KEY, other))

    async def what_had_begun_ends() -> None:
        await load.goes_on()
        now = await db.fetchval("SELECT clock_timestamp()")
        await eventually(lambda: db.fetchval(_ALL_BEGAN_LATER, now), PATIENCE)

    async with asyncio.TaskGroup() as loading:
        for one in both:
            loading.create_task(one.run())
        dies, stays = await join(1), await join(2)
        for one in both:
            await one.goes_on()
        await stopping.ask(db, stops, lasts=None, who="ada", why="a test")
        for process in (dies, stays):
            await knows_of(process, *reported)
        await what_had_begun_ends()
        before = await taken()
        joins = await join(3)
        await load.goes_on()
        await dies.kill()
        await group.settles_with(2)
        for _ in range(2):
            await load.goes_on()
        for process in (stays, joins):
            await knows_of(process, *reported)
        assert await taken() == before
        spent = await db.fetchrow(_SPENT, bank.deposits, _KEY.encode())
        assert tuple(spent) == (0, 0.0)
        assert await stopping.resume(db, stops, who="ada", why=None)
        for one in both:
            one.stopping.set()

    sent: dict[bytes | None, list[str]] = {}
    for one in both:
        await eventually(partial(one.is_behind, 0), PATIENCE)
        async with following(kafka, one.topic) as tail:
            await tail.until_ids(range(one.first, one.amounts + 1))
            sent |= tail.first_ids()
    await eventually(lambda: db.fetchval("SELECT count(*) = 0 FROM pipeline.backlog"), PATIENCE)
    applied = {key.encode(): [*map(str, ids)] for key, ids in (await histories(db)).items()}
    assert applied == sent
    events = [row["event_id"] for row in await db.fetch("SELECT event_id FROM pipeline.outbox")]
    assert len(events) == len(set(events)) == sum(one.amounts - one.first + 1 for one in both)


@dataclass
class Duel:
    """Two members, and a deposit that one of them holds in a transaction, waiting for a row."""

    owner: Process
    owner_id: str
    other: Process
    other_id: str


async def joined(start: Start, group: Group, count: int) -> tuple[Process, str]:
    """Start a process that makes the members so many; return it and the id that is new."""
    before = (await group.describe())[1]
    process = await start("consume")
    (new,) = (await group.settles_with(count)).keys() - before.keys()
    return process, new


@asynccontextmanager
async def in_a_transaction(
    start: Start, group: Group, bank: Bank, producer: AIOKafkaProducer, connect: Connect
) -> AsyncIterator[Duel]:
    """Hold a row that a member waits for, as long as the `with` block lasts.

    It is the row of the account `ada`, whose first deposit is applied; the second one waits.
    """
    db = await connect()
    members = {}
    for count in (1, 2):
        process, id = await joined(start, group, count)
        members[id] = process
    await Deposit(1).send(producer, bank.deposits)
    await eventually(position_reaches(db, bank.deposits, 1))
    assigned = await group.settles_with(2)
    (owner,) = (id for id, partitions in assigned.items() if 0 in partitions)
    (other,) = members.keys() - {owner}
    locking = await connect()
    async with locking.transaction():
        await locking.execute("SELECT FROM account FOR UPDATE")
        await Deposit(2).send(producer, bank.deposits)
        await somebody_waits(db)
        yield Duel(members[owner], owner, members[other], other)


async def has_applied(db: asyncpg.Connection, *amounts: int) -> bool:
    """Whether these are the deposits of `ada`, and nobody else has any."""
    return await histories(db) == {"ada": list(amounts)}


async def check_that_all_go_on(
    group: Group, bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    """Wait until both members work, on all partitions, and compare what has been applied."""
    await group.settles_with(2)
    for amount, partition in enumerate(range(PARTITIONS), start=3):
        account = f"account {partition}" if partition else "ada"
        await Deposit(amount, account, partition=partition).send(producer, bank.deposits)
    for partition in range(PARTITIONS):
        end = 1 if partition else 3
        await eventually(position_reaches(db, bank.deposits, end, partition), PATIENCE)
    expected = {f"account {partition}": [partition + 3] for partition in range(1, PARTITIONS)}

    async def all_are_applied() -> bool:
        return await histories(db) == expected | {"ada": [1, 2, 3]}

    await eventually(all_are_applied, PATIENCE)
    events = await db.fetch("SELECT event_id FROM pipeline.outbox")
    assert len(events) == len(set(events)) == PARTITIONS + 2


@pytest.mark.full
async def test_a_member_stopped_in_its_transaction_is_replaced_and_commits_nothing(
    start: Start,
    group: Group,
    bank: Bank,
    producer: AIOKafkaProducer,
    connect: Connect,
    db: asyncpg.Connection,
) -> None:
    """Traps 12 and 35."""
    async with in_a_transaction(start, group, bank, producer, connect) as duel:
        duel.owner.send(signal.SIGSTOP)
    abandoned = "application_name = $1 AND state = 'idle in transaction'"
    pid = None

    async def holds_the_row() -> bool:
        nonlocal pid
        pid = await db.fetchval(f"SELECT pid FROM pg_stat_activity WHERE {abandoned}", bank.name)
        return pid is not None

    await eventually(holds_the_row)
    # Or the broker would wait for longer than the server does.
    await group.evict(duel.owner_id)
    await eventually(position_reaches(db, bank.deposits, 2), PATIENCE)
    assert not await db.fetchval("SELECT count(*) FROM pg_stat_activity WHERE pid = $1", pid)
    assert await histories(db) == {"ada": [1, 2]}
    duel.owner.send(signal.SIGCONT)
    await check_that_all_go_on(group, bank, producer, db)
    assert duel.owner.is_running


@pytest.mark.full
async def test_a_member_that_lost_its_partition_unnoticed_in_its_transaction_doubles_nothing(
    start: Start,
    group: Group,
    bank: Bank,
    producer: AIOKafkaProducer,
    connect: Connect,
    db: asyncpg.Connection,
) -> None:
    """Trap 12: for a while both take themselves for the owner."""
    async with in_a_transaction(start, group, bank, producer, connect) as duel:
        await group.evict(duel.owner_id)

        async def is_taken_over() -> bool:
            return 0 in (await group.describe())[1].get(duel.other_id, ())

        await eventually(is_taken_over)
    await check_that_all_go_on(group, bank, producer, db)
    assert duel.owner.is_running
    assert duel.other.is_running


@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "abandoned"])
async def test_a_running_batch_of_a_revoked_partition_is_finished_or_abandoned(
    start: Start,
    group: Group,
    bank: Bank,
    producer: AIOKafkaProducer,
    connect: Connect,
    db: asyncpg.Connection,
    is_finished: bool,
) -> None:
    """Trap 12."""
    async with in_a_transaction(start, group, bank, producer, connect):
        await start("consume")
        if is_finished:
            await group.reaches("PreparingRebalance")
        else:
            await group.settles_with(3)
            assert await histories(db) == {"ada": [1]}
    # Locked out for long enough, it would have been set aside; then its turn comes a little later.
    await eventually(lambda: has_applied(db, 1, 2), PATIENCE)
    await group.settles_with(3)
    assert await position_of(db, bank.deposits) == 2
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox") == 2


async def test_an_unreadable_record_is_kept_once_when_its_member_dies(
    start: Start,
    group: Group,
    bank: Bank,
    producer: AIOKafkaProducer,
    connect: Connect,
    db: asyncpg.Connection,
) -> None:
    """Trap 14: the one that takes over passes it neither unseen nor twice."""
    async with in_a_transaction(start, group, bank, producer, connect) as duel:
        for deposit in (Deposit(3, value=b"{"), Deposit(4)):
            await deposit.send(producer, bank.deposits)
        await duel.owner.kill()
    await eventually(position_reaches(db, bank.deposits, 4), PATIENCE)
    await eventually(lambda: has_applied(db, 1, 2, 4), PATIENCE)
    rows = await db.fetch('SELECT "offset", reason, value FROM pipeline.backlog')
    assert [tuple(row) for row in rows] == [(2, "invalid payload", b"{")]
