"""The database goes back in time, or moves: backups, failover and dumps of real clusters.

Two services in a row show it: the bank, whose database is restored, and the mirror, which copies
the bank's balances into accounts of its own and is not restored.
"""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import chain as join
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer, ConsumerRecord
from servers.network import LOOPBACK
from sqlalchemy import make_url

from onceward import Event, Handlers, Service, Transaction
from onceward.observe.health import Health
from onceward.operators import adopting
from onceward.runtime import Part
from onceward.settings import Settings

from . import clusters
from .bank import Bank
from .clusters import Cluster
from .conftest import build
from .outgoing import let_leases_end, numbered, relaying, stage
from .processes import forwarding, starting
from tests.conftest import Running
from tests.contract.bank import Account, Base, Deposit, histories
from tests.servers.databases import empty_database
from tests.servers.pooler import pooling
from tests.servers.processes import Start
from tests.servers.topics import Tail, following, id_of, ids_in, records_in
from tests.servers.waiting import eventually

pytestmark = pytest.mark.full

ACCOUNTS = ("ada", "bob")
"""Each has a partition of its own."""


class BalanceChanged(Event, type="balance.changed"):
    """What the bank tells, as the mirror reads it."""

    account: str
    balance: int
    amount: int


def mirror(bank: Bank) -> Service:
    """Return the service that copies the bank's balances."""
    handlers = Handlers()

    @handlers.on(BalanceChanged, topic=bank.balances, consumer="copy", loads=Account.by("account"))
    async def copy(event: BalanceChanged, tx: Transaction) -> None:
        account = await tx.load_or_create(Account, event.account)
        account.balance = event.balance
        account.history += f"{event.amount},"

    return Service(f"mirror-{bank.name}", handlers=handlers, metadata=Base.metadata)


def by_account(amounts: Iterable[int]) -> dict[str, list[int]]:
    """Return what each account has got, when these amounts were deposited."""
    found: dict[str, list[int]] = defaultdict(list)
    for amount in amounts:
        found[ACCOUNTS[amount % 2]].append(amount)
    return dict(found)


def amount_of(record: ConsumerRecord) -> int:
    """Return the amount that an event tells."""
    return int(json.loads(record.value)["amount"])


def amounts_in(records: Iterable[ConsumerRecord]) -> dict[str, list[int]]:
    """Return the amounts that events tell, by account."""
    told: dict[str, list[int]] = defaultdict(list)
    for record in records:
        told[record.key.decode()].append(amount_of(record))
    return dict(told)


@dataclass
class Chain:
    """The bank's topics, what the bank tells, and what has come of it behind the mirror."""

    bank: Bank
    producer: AIOKafkaProducer
    kafka: str
    mirror: Health
    mirrored: asyncpg.Connection

    async def deposit(self, amounts: Iterable[int]) -> None:
        """Send deposits; the parity of the amount says to which account."""
        for amount in amounts:
            one = Deposit(amount, ACCOUNTS[amount % 2], partition=amount % 2)
            await one.send(self.producer, self.bank.deposits)

    async def until_mirrored(self, amounts: Iterable[int]) -> None:
        """Wait until the mirror holds these deposits: each once, in order, nothing else."""
        await until_applied(self.mirrored, amounts)
        rows = await self.mirrored.fetch("SELECT id, balance FROM account")
        told = {account: sum(some) for account, some in by_account(amounts).items()}
        assert {row["id"]: row["balance"] for row in rows} == told

    async def told(self) -> list[ConsumerRecord]:
        """Return all that the bank has told, repeats too."""
        return await records_in(self.kafka, self.bank.balances)

    async def check(self, amounts: Iterable[int], *, repeated: Iterable[int]) -> None:
        """Compare the topic with what was deposited, and what came again with what came first."""
        contents = defaultdict(set)
        first: dict[str, ConsumerRecord] = {}
        times: Counter[int] = Counter()
        for record in await self.told():
            sequence = dict(record.headers)["ce_sequence"]
            contents[id_of(record)].add((record.key, record.value, sequence))
            first.setdefault(id_of(record), record)
            times[amount_of(record)] += 1
        assert {len(some) for some in contents.values()} == {1}
        assert amounts_in(first.values()) == by_account(amounts)
        assert all(times[amount] > 1 for amount in repeated)


async def until_applied(db: asyncpg.Connection, amounts: Iterable[int]) -> None:
    """Wait until the accounts of a database hold these deposits: each once, in order."""
    wanted = by_account(amounts)

    async def are_applied() -> bool:
        return await histories(db) == wanted

    await eventually(are_applied)


@pytest.fixture
def mirror_url(server_url: str, used_databases: list[str]) -> str:
    """URL of the mirror's database."""
    url = asyncio.run(empty_database(server_url, used_databases))
    build(url)
    return url


@pytest.fixture
async def chain(
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    producer: AIOKafkaProducer,
    running: Running,
    mirror_url: str,
) -> AsyncIterator[Chain]:
    """Run the mirror, and follow what it reads."""
    bank = Bank(
        deposits=await new_topic(2), balances=await new_topic(2), name=f"bank-{uuid4().hex[:8]}"
    )
    async with (
        running(mirror(bank), Part.CONSUME, database_url=mirror_url) as health,
        connected(mirror_url) as mirrored,
    ):
        yield Chain(bank, producer, kafka, health, mirrored)


@pytest.fixture
async def start(chain: Chain, kafka: str) -> AsyncIterator[Start]:
    """Start processes of the bank; each is told its database."""
    async with starting(
        chain.bank,
        kafka_bootstrap_servers=kafka,
        kafka_session_timeout=6,
        transaction_timeout=5,
        lock_timeout=2,
        relay_lease=1,
        offset_commit_interval=0.2,
    ) as one:
        yield one


@pytest.fixture(scope="module")
def private() -> Iterator[Cluster]:
    """Start a cluster for the tests of this file, one after the other."""
    with clusters.private() as one:
        yield one


@pytest.fixture
def cluster(private: Cluster) -> Cluster:
    """Return the private cluster, which serves again if a test has crashed it."""
    if not private.serves():
        private.start()
        private.wait_until_serving()
    return private


async def own_database(cluster: Cluster) -> str:
    """Make an empty database and the user in its URL, who owns it and may do nothing else."""
    name = f"bank_{uuid4().hex[:8]}"
    async with connected(cluster.url()) as superuser:
        await superuser.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{name}'")
        await superuser.execute(f"CREATE DATABASE {name} OWNER {name}")
    return owned(cluster, name)


def owned(cluster: Cluster, name: str) -> str:
    """Return where the owner finds its database in a cluster."""
    url = make_url(cluster.url(name)).set(username=name, password=name)
    return url.render_as_string(hide_password=False)


def migrated(cluster: Cluster) -> str:
    """Make a database of the bank's, migrated; its URL."""
    url = asyncio.run(own_database(cluster))
    build(url)
    return url


@pytest.fixture
def bank_url(cluster: Cluster) -> str:
    """URL of a database of the bank's, migrated, in the private cluster."""
    return migrated(cluster)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    """Connect as long as the `with` block lasts, whatever becomes of the server."""
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        yield connection
    finally:
        connection.terminate()


async def live_a_time_that_is_lost(chain: Chain, bank_url: str, amounts: range) -> int:
    """Let the bank take deposits; returns the last transaction id that staged an event."""
    middle = amounts[len(amounts) // 2]
    await chain.deposit(range(amounts.start, middle))
    async with connected(bank_url) as db:
        # So that a relay that stayed in that time would take all what comes later for published.
        for _ in range(500):
            await db.execute("SELECT pg_current_xact_id()")
        await chain.deposit(range(middle, amounts.stop))
        await chain.until_mirrored(range(1, amounts.stop))
        return await last_xid(db)


async def last_xid(db: asyncpg.Connection) -> int:
    """Return the highest transaction id in the outbox."""
    return int(await db.fetchval("SELECT max(xid) FROM pipeline.outbox"))


async def test_events_repeated_after_a_restore_from_a_backup_are_dropped(
    chain: Chain, start: Start, cluster: Cluster, bank_url: str
) -> None:
    service = await start("run", database_url=bank_url)
    await chain.deposit(range(1, 11))
    await chain.until_mirrored(range(1, 11))
    await asyncio.gather(asyncio.to_thread(cluster.back_up), chain.deposit(range(11, 21)))
    lost = await live_a_time_that_is_lost(chain, bank_url, range(21, 41))
    await service.kill()
    await asyncio.to_thread(cluster.crash)
    await chain.deposit(range(41, 51))
    await asyncio.to_thread(cluster.restore)
    await start("run", database_url=bank_url)
    await chain.until_mirrored(range(1, 51))
    await chain.check(range(1, 51), repeated=range(21, 41))
    async with connected(bank_url) as db:
        await until_applied(db, range(1, 51))
        assert await last_xid(db) < lost


@pytest.fixture
def archiving() -> Iterator[Cluster]:
    """Start a cluster that archives its WAL."""
    with clusters.private(*clusters.ARCHIVING) as one:
        yield one


@pytest.fixture
def archived_url(archiving: Cluster) -> str:
    """URL of a database of the bank's, migrated, in that cluster."""
    return migrated(archiving)


async def test_events_repeated_after_a_point_in_time_recovery_are_dropped(
    chain: Chain, start: Start, archiving: Cluster, archived_url: str
) -> None:
    service = await start("run", database_url=archived_url)
    await chain.deposit(range(1, 11))
    await chain.until_mirrored(range(1, 11))
    await asyncio.to_thread(archiving.back_up)
    await chain.deposit(range(11, 21))
    await chain.until_mirrored(range(1, 21))
    async with connected(archived_url) as db:
        point = int(await db.fetchval("SELECT pg_current_xact_id()"))
    lost = await live_a_time_that_is_lost(chain, archived_url, range(21, 41))
    await service.kill()
    await chain.deposit(range(41, 51))
    await asyncio.to_thread(archiving.restore, to=point)
    async with connected(archived_url) as db:
        assert await histories(db) == by_account(range(1, 21))
    doctor = await start("doctor", "--json", database_url=archived_url)
    await doctor.ended()
    found = [json.loads(line) for line in doctor.output.splitlines() if line.startswith("{")]
    levels = {one["check"]: one["level"] for one in found}
    assert (levels["cluster"], levels["positions"]) == ("ok", "ok")
    await start("run", database_url=archived_url)
    await chain.until_mirrored(range(1, 51))
    await chain.check(range(1, 51), repeated=range(21, 41))
    async with connected(archived_url) as db:
        await until_applied(db, range(1, 51))
        assert await last_xid(db) < lost


async def test_a_service_outlives_a_failover_that_loses_transactions(
    chain: Chain, running: Running, cluster: Cluster, bank_url: str, unused_tcp_port: int
) -> None:
    """It is like a restore, but for what the process remembers of the time that is lost."""
    address = make_url(bank_url).set(port=unused_tcp_port)
    bank_here = running(
        chain.bank.service, database_url=address.render_as_string(hide_password=False)
    )
    with clusters.standing_by(cluster) as standby:
        promoted_url = owned(standby, str(make_url(bank_url).database))
        async with connected(standby.url()) as superuser, connected(promoted_url) as db, bank_here:
            async with forwarding(unused_tcp_port, to=f"{LOOPBACK}:{cluster.port}"):
                await chain.deposit(range(1, 21))
                await until_applied(db, range(1, 21))
                await stop_following(superuser)
                lost = await live_a_time_that_is_lost(chain, bank_url, range(21, 41))
                await asyncio.to_thread(cluster.crash)
            await chain.deposit(range(41, 51))
            await superuser.execute("SELECT pg_promote()")
            async with forwarding(unused_tcp_port, to=f"{LOOPBACK}:{standby.port}"):
                await chain.until_mirrored(range(1, 51))
                await chain.check(range(1, 51), repeated=range(21, 41))
                await until_applied(db, range(1, 51))
                assert await last_xid(db) < lost


async def test_a_relay_behind_a_pooler_notices_a_failover_hidden_by_it(
    settings: Callable[..., Settings],
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    cluster: Cluster,
    bank_url: str,
) -> None:
    """Its connection outlives the server, and ids of the time that is lost are used again."""
    topic = await new_topic()
    with clusters.standing_by(cluster) as standby, pooling(bank_url) as pooler:
        promoted_url = owned(standby, str(make_url(bank_url).database))
        async with (
            connected(standby.url()) as superuser,
            connected(promoted_url) as there,
            following(kafka, topic) as tail,
            relaying(settings(database_url=pooler.url, database_pooler=True)),
        ):
            async with connected(bank_url) as db:
                await stage(db, numbered(topic, [1]))
                await tail.until_ids([1])
                await eventually(holds(there, [1]))
                await stop_following(superuser)
                for _ in range(30):
                    await db.execute("SELECT pg_current_xact_id()")
                await stage(db, numbered(topic, [2]))
                await tail.until_ids([2])
            pooler.pause()
            await asyncio.to_thread(cluster.crash)
            await superuser.execute("SELECT pg_promote()")
            async with connected(promoted_url) as db:
                # Others are first: when the relay looks, nothing is ahead of this server.
                await stage(db, numbered(topic, [3]))
                for _ in range(60):
                    await db.execute("SELECT pg_current_xact_id()")
                pooler.resume_at(standby.port)
                await stage(db, numbered(topic, [4]))
                await tail.until_ids([3, 4])


async def stop_following(standby: asyncpg.Connection) -> None:
    """Cut a standby off from its primary."""
    await standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
    await standby.execute("SELECT pg_reload_conf()")

    async def is_cut_off() -> bool:
        return not await standby.fetchval("SELECT count(*) FROM pg_stat_wal_receiver")

    await eventually(is_cut_off)


async def test_a_relay_reads_nothing_from_a_standby_until_it_is_promoted(
    settings: Callable[..., Settings],
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    cluster: Cluster,
    bank_url: str,
) -> None:
    """Trap 30: a standby's snapshot lists no running transactions, so a cursor would skip them."""
    topic = await new_topic()
    with clusters.standing_by(cluster) as standby:
        standby_url = owned(standby, str(make_url(bank_url).database))
        async with (
            connected(bank_url) as db,
            connected(bank_url) as late,
            connected(standby_url) as there,
            following(kafka, topic) as tail,
            relaying(settings(database_url=standby_url)) as relay,
        ):
            async with late.transaction():
                await stage(late, numbered(topic, [1]))
                await stage(db, numbered(topic, [2], key="bob"))
                await eventually(holds(there, [2]))
                running = await late.fetchval("SELECT pg_current_xact_id()")
                assert await there.fetchval(
                    "SELECT pg_visible_in_snapshot($1, pg_current_snapshot())", running
                )
                await eventually(lambda: "read-only" in relay.reason)
            assert await ids_in(kafka, topic) == []
            await eventually(holds(there, [1, 2]))
            await asyncio.to_thread(cluster.crash)
            async with connected(standby.url()) as superuser:
                await superuser.execute("SELECT pg_promote()")
            await tail.until_ids([1, 2])
            await eventually(lambda: relay.reason == "")


def holds(db: asyncpg.Connection, ids: Sequence[object]) -> Callable[[], Awaitable[bool]]:
    """Return the question whether these are the events in the outbox, for `eventually`."""

    async def are_there() -> bool:
        rows = await db.fetch("SELECT event_id FROM pipeline.outbox ORDER BY id")
        return [row["event_id"] for row in rows] == [str(id) for id in ids]

    return are_there


async def test_a_restore_into_the_middle_of_a_window_goes_on_in_it(
    settings: Callable[..., Settings],
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    cluster: Cluster,
    bank_url: str,
) -> None:
    topic = await new_topic()
    keys = [f"key-{number}" for number in range(10)]
    before = {key: [f"{key}/{number}" for number in range(100)] for key in keys}
    after = {key: [f"{key}/again/{number}" for number in range(5)] for key in keys}
    pages = settings(database_url=bank_url, relay_batch_events=7, relay_cursor_interval=0.001)
    async with following(kafka, topic) as tail:
        async with connected(bank_url) as db, connected(bank_url) as late:
            async with late.transaction():
                await stage(late, numbered(topic, ["lost"], key="late"))
                for key, ids in before.items():
                    await stage(db, numbered(topic, ids, key))
                async with relaying(pages) as one:
                    await tail.until(lambda: len(tail.records) > 20)
                    await one.kill()
                assert await db.fetchval("SELECT bool_and(last_id > 0) FROM pipeline.outbox_cursor")
                await let_leases_end(db)
                await asyncio.to_thread(cluster.back_up)
            published = set(await ids_in(kafka, topic))
            async with relaying(settings(database_url=bank_url)):
                await stage(db, numbered(topic, ["lost too"], key="late"))
                await tail.until_ids(["lost", "lost too", *join(*before.values())])
        await asyncio.to_thread(cluster.restore)
        known = len(tail.records)
        async with connected(bank_url) as db, relaying(settings(database_url=bank_url)):
            for key, ids in after.items():
                await stage(db, numbered(topic, ids, key))
            await tail.until_ids(join(*after.values()))
        again = Tail(tail.records[known:])
        for key in keys:
            ids = again.first_ids()[key.encode()]
            wanted = before[key] + after[key]
            assert ids == wanted[-len(ids) :]
            assert published.issuperset(wanted[: -len(ids)])


async def test_a_service_that_goes_on_beside_its_restored_copy_does_no_harm(
    chain: Chain, running: Running, cluster: Cluster, bank_url: str
) -> None:
    """Both are of one group; what the old one takes is lost with its database, and comes again."""
    async with AsyncExitStack() as old:
        await old.enter_async_context(running(chain.bank.service, database_url=bank_url))
        await chain.deposit(range(1, 21))
        with clusters.copied(cluster) as copy:
            await chain.deposit(range(21, 31))
            await chain.until_mirrored(range(1, 31))
            copy_url = owned(copy, str(make_url(bank_url).database))
            async with (
                running(chain.bank.service, database_url=copy_url),
                connected(copy_url) as db,
            ):
                await chain.deposit(range(31, 41))
                await chain.until_mirrored(range(1, 41))
                # Each has one of the partitions now.
                await eventually(lambda: has_accounts(db, 1, range(1, 41)))
                await old.aclose()
                await chain.deposit(range(41, 51))
                await until_applied(db, range(1, 51))
                await chain.until_mirrored(range(1, 51))
    await chain.check(range(1, 51), repeated=range(21, 31))


async def has_accounts(db: asyncpg.Connection, count: int, amounts: Iterable[int]) -> bool:
    """Whether that many accounts hold all of their share of these deposits."""
    found, wanted = await histories(db), by_account(amounts)
    return sum(found.get(account) == share for account, share in wanted.items()) == count


async def dump_amid_traffic(chain: Chain, running: Running, url: str, file: Path) -> None:
    """Take 25 deposits: 10 before the dump, 5 whose events it holds unpublished, 10 after it."""
    async with running(chain.bank.service, database_url=url):
        await chain.deposit(range(1, 11))
        await chain.until_mirrored(range(1, 11))
    async with running(chain.bank.service, Part.CONSUME, database_url=url), connected(url) as db:
        await chain.deposit(range(11, 16))
        await until_applied(db, range(1, 16))
        await asyncio.to_thread(clusters.dump, url, file)
    async with running(chain.bank.service, database_url=url):
        await chain.deposit(range(16, 26))
        await chain.until_mirrored(range(1, 26))


@pytest.fixture(params=["to lower ids", "to higher ids"])
def move(
    request: pytest.FixtureRequest,
    cluster: Cluster,
    bank_url: str,
    direct_url: str,
    server_url: str,
    used_databases: list[str],
) -> tuple[str, str]:
    """Return the bank's database and an empty one in another cluster.

    The private cluster's transaction ids are higher.
    """
    if request.param == "to higher ids":
        return direct_url, asyncio.run(own_database(cluster))
    return bank_url, asyncio.run(empty_database(server_url, used_databases))


async def test_a_dump_restored_into_another_cluster_is_republished_only_after_adoption(
    chain: Chain, running: Running, start: Start, move: tuple[str, str], tmp_path: Path
) -> None:
    """Trap 2: transaction ids do not survive it, be the other cluster's lower or higher."""
    old, new = move
    await dump_amid_traffic(chain, running, old, tmp_path / "dump")
    await asyncio.to_thread(clusters.load, tmp_path / "dump", new)
    before = amounts_in(await chain.told())
    async with running(chain.bank.service, database_url=new) as health, connected(new) as db:
        await chain.deposit(range(26, 31))
        await eventually(lambda: "service adopt" in health.reasons.get("retention", ""))
        assert amounts_in(await chain.told()) == before
        reset = await start("adopt", "--yes", database_url=new)
        assert await reset.ended() == 0
        await until_applied(db, range(1, 31))
        await chain.until_mirrored(range(1, 31))
        await eventually(lambda: health.is_ready)
        await chain.deposit(range(31, 36))
        await chain.until_mirrored(range(1, 36))
    await chain.check(range(1, 36), repeated=range(1, 26))
    again = {
        account: amounts[len(before[account]) :]
        for account, amounts in amounts_in(await chain.told()).items()
    }
    assert again == by_account(range(1, 36))


async def test_a_dump_restored_within_its_cluster_continues_after_it_is_adopted(
    chain: Chain,
    running: Running,
    direct_url: str,
    server_url: str,
    used_databases: list[str],
    tmp_path: Path,
) -> None:
    new = await empty_database(server_url, used_databases)
    await dump_amid_traffic(chain, running, direct_url, tmp_path / "dump")
    await asyncio.to_thread(clusters.load, tmp_path / "dump", new)
    await adopt(new)
    async with running(chain.bank.service, database_url=new), connected(new) as db:
        await chain.deposit(range(26, 31))
        await chain.until_mirrored(range(1, 31))
        await until_applied(db, range(1, 31))
    await chain.check(range(1, 31), repeated=range(11, 26))


async def test_an_event_that_cannot_be_reproduced_identically_is_not_silently_dropped(
    chain: Chain,
    running: Running,
    direct_url: str,
    server_url: str,
    used_databases: list[str],
    tmp_path: Path,
) -> None:
    """The lost time knew a change that no message had caused: the balance comes out otherwise."""
    new = await empty_database(server_url, used_databases)
    async with (
        running(chain.bank.service, database_url=direct_url),
        connected(direct_url) as db,
    ):
        await chain.deposit([1])
        await chain.until_mirrored([1])
        await asyncio.to_thread(clusters.dump, direct_url, tmp_path / "dump")
        await db.execute("UPDATE account SET balance = balance + 1000")
        await chain.deposit([3])
        await until_applied(chain.mirrored, [1, 3])
    await asyncio.to_thread(clusters.load, tmp_path / "dump", new)
    await adopt(new)
    async with running(chain.bank.service, database_url=new):
        await eventually(lambda: _has_an_impostor(chain.mirrored))


async def adopt(url: str) -> None:
    """Decide that a copy in the same cluster takes the place of its original."""
    async with connected(url) as db:
        await adopting.adopt(db, keep_progress=True)


async def _has_an_impostor(db: asyncpg.Connection) -> bool:
    reasons = await db.fetch("SELECT reason FROM pipeline.backlog WHERE died_at IS NOT NULL")
    return [row["reason"] for row in reasons] == ["identity mismatch"]
