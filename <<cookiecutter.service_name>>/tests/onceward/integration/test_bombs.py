"""Large batches take turns; one that is too large is named, and nobody dies of it for ever."""

import asyncio
import gc
import json
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer, ConsumerRecord

from onceward import Event, Transaction
from onceward.apply.item import Item
from onceward.consume.reader import Share
from onceward.errors import StoreUnavailable
from onceward.handlers.staged import StagedEvent
from onceward.handlers.staging import Outbox
from onceward.observe.health import Health

from .bank import Bank
from .conftest import Command, position_reaches
from .processes import starting
from tests.conftest import Running
from tests.contract.bank import Deposit, Deposited, histories
from tests.servers.processes import Start, most_memory
from tests.servers.waiting import PATIENCE, eventually

MEBIBYTE = 2**20
ANY_SIZE = 2**28
"""Bytes that a producer may put into a batch."""
SHARE = {"memory_mebibytes": 64}
"""Settings with which each of four partitions has a mebibyte."""

NewTopic = Callable[..., Awaitable[str]]


async def send_batch(kafka: str, topic: str, *deposits: Deposit, codec: str | None) -> None:
    """Send deposits as one batch, to the partition of the first."""
    async with AIOKafkaProducer(
        bootstrap_servers=kafka,
        compression_type=codec,
        max_request_size=ANY_SIZE,
        max_batch_size=ANY_SIZE,
    ) as one:
        batch = one.create_batch()
        for deposit in deposits:
            record = deposit.record(topic, 0)
            assert batch.append(
                timestamp=None,
                key=record.key,
                value=record.value,
                headers=[*record.headers],
            )
        await (await one.send_batch(batch, topic, partition=deposits[0].partition))


async def send_bomb(kafka: str, topic: str, mebibytes: int, codec: str = "gzip") -> None:
    """Send a record that is small as long as it is packed."""
    bomb = Deposit(666, value=bytes(mebibytes * MEBIBYTE))
    await send_batch(kafka, topic, bomb, codec=codec)


def large(amount: int, mebibytes: float, *, account: str, partition: int) -> Deposit:
    """Return a deposit with so much white space."""
    value = json.dumps({"account": account, "amount": amount}).ljust(round(mebibytes * MEBIBYTE))
    id = f"{account}-{amount}"
    return Deposit(amount, account, id, value=value.encode(), partition=partition)


async def starts(db: asyncpg.Connection) -> int:
    """Return how many processes have begun at the position and not come back."""
    return int(await db.fetchval("SELECT starts FROM pipeline.position"))


def applied(db: asyncpg.Connection, *deposits: int) -> Callable[[], Awaitable[bool]]:
    """Return whether exactly these deposits have been applied."""

    async def are_applied() -> bool:
        return await histories(db) == {"ada": list(deposits)}

    return are_applied


def blocked(health: Health, bank: Bank) -> str:
    """Return why the bank's partition is blocked; empty if it is not."""
    return health.reasons.get(f"partition {bank.deposits}/0", "")


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_an_oversized_unpacked_batch_is_named_and_skipped_only_manually(
    bank: Bank,
    running: Running,
    command: Command,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
    codec: str,
) -> None:
    await Deposit(1).send(producer, bank.deposits)
    await send_bomb(kafka, bank.deposits, 8, codec)
    await Deposit(2).send(producer, bank.deposits)
    async with running(bank.service, unpacked_mebibytes=1, retry_pause=0.1) as health:
        await eventually(lambda: bool(blocked(health, bank)))
        await eventually(position_reaches(db, bank.deposits, 1))
        await eventually(lambda: blocked(health, bank).startswith("offset 1: unreadable batch: "))
        text = blocked(health, bank)
        assert "the batch of the offsets 1 to 1 (" in text
        assert f"{codec}) unpacks to more than 1,048,576 bytes" in text
        assert "PIPELINE_UNPACKED_MEBIBYTES" in text
        seek = ("topics", "seek", bank.deposits, "--partition", "0", "--to", "2")
        assert text.endswith(f": service {' '.join(seek)}")
        assert await histories(db) == {"ada": [1]}, "what comes before it is applied"
        assert await starts(db) == 0, "the first records were others"
        done = await command(*seek)
        assert "skips 1 offsets, which this service never reads" in done.stdout
        await eventually(position_reaches(db, bank.deposits, 3))
        await eventually(lambda: health.is_ready)
    assert await histories(db) == {"ada": [1, 2]}


async def test_a_start_is_counted_only_before_something_is_unpacked(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection, kafka: str
) -> None:
    await Deposit(1).send(producer, bank.deposits)
    async with running(bank.service):
        await eventually(position_reaches(db, bank.deposits, 1))
    async with running(bank.service, unpacked_mebibytes=1, retry_pause=0.1) as health:
        # The record before the position is read once more, which nobody dies of.
        await eventually(lambda: health.is_ready)
        assert await starts(db) == 0
        await send_bomb(kafka, bank.deposits, 8)
        await eventually(lambda: bool(blocked(health, bank)))
        assert await starts(db) == 1
    assert await starts(db) == 0, "who ends in order has died of nothing"


async def test_a_batch_that_is_let_unpack_goes_the_way_of_any_record(
    bank: Bank, running: Running, db: asyncpg.Connection, kafka: str
) -> None:
    await send_bomb(kafka, bank.deposits, 8)
    async with running(bank.service, unpacked_mebibytes=1, retry_pause=0.1) as health:
        await eventually(lambda: bool(blocked(health, bank)))
    async with running(bank.service, unpacked_mebibytes=9):
        await eventually(position_reaches(db, bank.deposits, 1))
    reasons = await db.fetch("SELECT reason, octet_length(value) FROM pipeline.backlog")
    assert [tuple(row) for row in reasons] == [("invalid payload", 8 * MEBIBYTE)]


@pytest.mark.parametrize(("mebibytes", "died"), [(1, 0), (64, 4)], ids=["setting", "deaths"])
async def test_an_applied_batch_that_may_not_be_unpacked_again_blocks_nothing(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
    caplog: pytest.LogCaptureFixture,
    mebibytes: int,
    died: int,
) -> None:
    """Its last record is compared when the partition is read again, which may not cost memory."""
    await send_bomb(kafka, bank.deposits, 17)
    async with running(bank.service, unpacked_mebibytes=18):
        await eventually(position_reaches(db, bank.deposits, 1))
    await db.execute("UPDATE pipeline.position SET starts = $1", died)
    await Deposit(1).send(producer, bank.deposits)
    async with running(bank.service, unpacked_mebibytes=mebibytes, retry_pause=0.1) as health:
        await eventually(lambda: bool(blocked(health, bank)) or bank.calls == [1])
        await eventually(lambda: health.is_ready)
    assert "is blocked" not in caplog.text


@pytest.fixture
async def start(
    bank: Bank, database_url: str, kafka: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    """Start processes that die when a batch unpacks to more than 18 MiB."""
    monkeypatch.setenv("BANK_MEMORY", str(18 * MEBIBYTE))
    async with starting(
        bank,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
        kafka_session_timeout=6,
        transaction_timeout=5,
        lock_timeout=2,
        unclean_starts=1,
        retry_pause=0.2,
        backlog_lease=6,
        backlog_poll_max=0.1,
    ) as one:
        yield one


async def test_a_batch_that_killed_its_process_is_named_without_unpacking_it(
    bank: Bank,
    start: Start,
    command: Command,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
) -> None:
    await Deposit(1).send(producer, bank.deposits)
    await send_bomb(kafka, bank.deposits, 20)
    await Deposit(2).send(producer, bank.deposits)
    # Behind what comes before it, and by itself.
    for _ in range(2):
        assert await (await start("run")).ended() == -signal.SIGKILL
    process = await start("run")
    await process.says("is blocked and skips no record")
    await eventually(applied(db, 1))
    assert "offset 1: unreadable batch: the batch of the offsets 1 to 1 (" in process.output
    assert "Processes have died here (1): give them more memory" in process.output
    again = f"service topics seek {bank.deposits} --partition 0 --to 1"
    assert again in process.output

    await process.kill()
    assert (await command(*again.split()[1:])).exit_code == 0
    await start("run", more_variables={"BANK_MEMORY": str(80 * MEBIBYTE)})
    # On a busy machine the second attempt is the one that is not too late.
    await eventually(applied(db, 1, 2))
    assert await db.fetchval("SELECT reason FROM pipeline.backlog") == "invalid payload"


@pytest.fixture
async def four(new_topic: NewTopic) -> Bank:
    """Return a bank of four partitions, whose handler may take its time."""
    return Bank(
        deposits=await new_topic(4),
        balances=await new_topic(),
        name=f"bank-{uuid4().hex[:8]}",
        options={"timeout": 60},
    )


@dataclass
class Gate:
    """Where the handler waits."""

    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0
    most: int = 0
    """The most that have waited at once."""

    async def pass_through(self) -> None:
        """Wait until it is open."""
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await self.is_open.wait()
        self.waiting -= 1


@pytest.mark.parametrize("ends", [False, True])
async def test_batches_exceeding_a_share_are_read_singly_without_delaying_other_partitions(
    four: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
    ends: bool,
) -> None:
    gate = Gate()
    four.waits = dict.fromkeys((1, 2, 3), gate.pass_through)
    for place, account in enumerate("abc"):
        deposit = large(place + 1, 2, account=account, partition=place)
        await send_batch(kafka, four.deposits, deposit, codec="gzip")

    async def all_are_applied() -> bool:
        return await histories(db) == {"a": [1], "b": [2], "c": [3], "d": [4, 5, 6]}

    async with running(four.service, **SHARE) as health:
        await eventually(lambda: gate.waiting == 1)
        for offset, amount in enumerate((4, 5, 6)):
            await Deposit(amount, "d", partition=3).send(producer, four.deposits)
            await eventually(position_reaches(db, four.deposits, offset + 1, partition=3))
        await eventually(lambda: health.is_ready)
        if ends:  # while two of them wait
            asyncio.get_running_loop().call_later(0.2, gate.is_open.set)
        else:
            gate.is_open.set()
            await eventually(all_are_applied)
    assert await db.fetchval("SELECT sum(starts) FROM pipeline.position") == 0
    async with running(four.service, **SHARE):
        await eventually(all_are_applied)
    assert gate.most == 1


async def test_turns_of_other_partitions_come_in_between(
    four: Bank,
    running: Running,
    db: asyncpg.Connection,
    kafka: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares, gate = list[Share](), Gate()

    def noted(size: int) -> Share:
        shares.append(Share(size))
        return shares[-1]

    monkeypatch.setattr("onceward.consume.consumer.Share", noted)
    # A call takes an hour; a fetch, which may have to be repeated, takes no time.
    monkeypatch.setattr("onceward.consume.reader.monotonic", lambda: 3_600 * len(four.calls))
    four.waits = dict.fromkeys((1, 4, 7), gate.pass_through)
    wanted = {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}
    for place, (account, amounts) in enumerate(wanted.items()):
        batch = [large(n, 0.7, account=account, partition=place) for n in amounts]
        await send_batch(kafka, four.deposits, *batch, codec="gzip")

    async def all_are_applied() -> bool:
        return await histories(db) == wanted

    def others_wait() -> bool:
        return gate.waiting == 1 and len(shares[-1].exceeding._waiters or ()) == 2

    async with running(four.service, batch_size=1, **SHARE):
        await eventually(others_wait)
        gate.is_open.set()
        await eventually(all_are_applied)
    first = [*dict.fromkeys(four.calls)][:3]  # some may have been repeated on a busy machine
    assert {(amount - 1) // 3 for amount in first} == {0, 1, 2}, four.calls


async def test_after_restarts_records_behind_a_batch_exceeding_a_share_are_read(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection, kafka: str
) -> None:
    """The last record of the batch is read again, to compare it."""
    first = large(1, 5, account="ada", partition=0)
    await send_batch(kafka, bank.deposits, first, codec="gzip")
    async with running(bank.service, **SHARE):
        await eventually(applied(db, 1))
    async with running(bank.service, **SHARE) as health:
        await eventually(lambda: health.is_ready)
        await Deposit(2).send(producer, bank.deposits)
        await eventually(applied(db, 1, 2))


@pytest.fixture
async def other(bank: Bank, new_topic: NewTopic) -> str:
    """Return another topic of the bank; each notes in `calls` what comes."""
    topic = await new_topic()

    @bank.handlers.on(Deposited, topic=topic, consumer="other")
    async def note(event: Deposited, tx: Transaction) -> None:
        bank.calls.append(event.amount)

    return topic


@pytest.fixture
def large_records(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], int]]:
    """Return how many large records exist; no garbage is collected, and none is in a log."""
    caplog.set_level(logging.CRITICAL, "onceward")
    gc.disable()

    def number() -> int:
        records = (one for one in gc.get_objects() if type(one) is ConsumerRecord)
        return sum(len(one.value or b"") > MEBIBYTE for one in records)

    yield number
    gc.enable()


async def test_a_batch_that_exceeds_a_share_and_is_blocked_is_freed_meanwhile(
    bank: Bank, running: Running, large_records: Callable[[], int], kafka: str
) -> None:
    bank.refused = {1}
    first = large(1, 3, account="ada", partition=0)
    await send_batch(kafka, bank.deposits, first, codec="gzip")
    async with running(bank.service, breaker_keys=1, retry_pause=1, **SHARE) as health:
        await eventually(lambda: large_records() > 0)
        await eventually(lambda: "breaker open" in blocked(health, bank))
        await eventually(lambda: not large_records())


async def test_a_blocked_batch_that_exceeds_a_share_delays_no_other(
    bank: Bank, other: str, running: Running, db: asyncpg.Connection, kafka: str
) -> None:
    bank.refused = {1}
    first = large(1, 3, account="ada", partition=0)
    await send_batch(kafka, bank.deposits, first, codec="gzip")
    async with running(bank.service, breaker_keys=1, **SHARE) as health:
        await eventually(lambda: "breaker open" in blocked(health, bank))
        await send_batch(kafka, other, large(2, 3, account="bob", partition=0), codec="gzip")
        await eventually(lambda: 2 in bank.calls)
        bank.refused = set()
        await eventually(applied(db, 1))


@dataclass
class Store:
    """A claim check whose data exceeds each share, and may be unavailable."""

    is_away: bool = True

    def sent_size(self, event: StagedEvent, allowed: int) -> int:
        """Store no event."""
        return event.size

    async def store(
        self,
        connection: asyncpg.Connection,
        outbox: Outbox,
        reserve: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Store nothing."""

    async def resolve(self, items: Sequence[Item], memory: float) -> Sequence[Item]:
        """Return the items with the data of a deposit, if there is memory for it."""
        if memory < inf:
            return []
        if self.is_away:
            raise StoreUnavailable("the store is away")
        data = large(1, 0, account="ada", partition=0).value
        messages = [item.message._replace(data=data, reference=None) for item in items]
        return [item._replace(message=one) for item, one in zip(items, messages, strict=True)]

    async def sweep(self, connection: asyncpg.Connection) -> None:
        """Delete nothing."""


async def test_data_that_exceeds_a_share_and_is_unavailable_holds_up_no_other(
    bank: Bank,
    other: str,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
) -> None:
    store = Store()
    referring = Deposit(1, value=b"", headers=(("ce_dataref", b"file:///1"),))
    await referring.send(producer, bank.deposits)
    async with running(replace(bank.service, claims=lambda *_: store), **SHARE) as health:
        await eventually(lambda: "store failed: the store is away" in blocked(health, bank))
        await send_batch(kafka, other, large(2, 3, account="bob", partition=0), codec="gzip")
        await eventually(lambda: 2 in bank.calls)
        store.is_away = False
        await eventually(applied(db, 1))


async def test_events_that_transactions_stage_have_a_part_of_the_memory(
    bank: Bank,
    new_topic: NewTopic,
    running: Running,
    db: asyncpg.Connection,
    kafka: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is larger than half of the part that a transaction has."""
    topic, loud, written = await new_topic(), await new_topic(), list[int]()
    size, amounts, write = 300_000, list(range(1, 31)), Outbox.write

    class Told(Event, type="told", topic=loud):
        number: int
        text: str

    @bank.handlers.on(Deposited, topic=topic, consumer="loud")
    async def tell(event: Deposited, tx: Transaction) -> None:
        tx.publish(Told(number=event.amount, text="x" * size), key="one")

    async def noted(outbox: Outbox, connection: asyncpg.Connection) -> bool:
        written.append(len(outbox))
        return await write(outbox, connection)

    monkeypatch.setattr(Outbox, "write", noted)
    deposits = [Deposit(amount, "ada", partition=0) for amount in amounts]
    await send_batch(kafka, topic, *deposits, codec=None)

    async def published() -> list[int]:
        rows = await db.fetch(
            "SELECT payload FROM pipeline.outbox WHERE topic = $1 ORDER BY id", loud
        )
        return [json.loads(row["payload"])["number"] for row in rows]

    async def are_published() -> bool:
        return await published() == amounts

    async with running(bank.service, memory_mebibytes=64, concurrency=8) as health:
        await eventually(are_published)
        await eventually(lambda: health.is_ready)
    assert max(written) == 2, "a run has been smaller, and no larger one was written"
    assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0


TWELVE = range(12)
LIMIT = 768 * MEBIBYTE
UNPACKED = {"max.message.bytes": f"{ANY_SIZE}", "segment.bytes": f"{ANY_SIZE}"}
"""Configuration of a topic that takes large batches which are not packed."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("codec", "count", "mebibytes"),
    [("gzip", 1, 100), ("gzip", 100, 1), ("zstd", 400, 0.25), (None, 22, 2)],
)
async def test_twelve_partitions_with_a_large_batch_each_need_less_than_768_mebibytes(
    database_url: str,
    kafka: str,
    db: asyncpg.Connection,
    new_topic: NewTopic,
    codec: str | None,
    count: int,
    mebibytes: float,
) -> None:
    """Each has 100 MiB, or 44 if they are not packed: a small broker takes no more requests."""
    bank = Bank(
        deposits=await new_topic(len(TWELVE), **UNPACKED),
        balances=await new_topic(),
        name=f"bank-{uuid4().hex[:8]}",
    )
    amounts, accounts = list(range(1, count + 1)), [f"of {place}" for place in TWELVE]
    for place, account in zip(TWELVE, accounts, strict=True):
        batch = [large(n, mebibytes, account=account, partition=place) for n in amounts]
        await send_batch(kafka, bank.deposits, *batch, codec=codec)

    async def all_are_applied() -> bool:
        return await histories(db) == dict.fromkeys(accounts, amounts)

    async with starting(
        bank,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
        memory_mebibytes=LIMIT // MEBIBYTE,
        kafka_session_timeout=120,
        transaction_timeout=60,
        backlog_lease=120,
    ) as start:
        process = await start("run")
        await eventually(all_are_applied, 2 * PATIENCE)
        assert most_memory(process.pid) < LIMIT
        process.send(signal.SIGTERM)
        assert await process.ended() == 0
    assert await db.fetchval("SELECT sum(starts) FROM pipeline.position") == 0
    assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0
