"""Batches that unpack to more than there is memory for: named, and nobody dies of them for ever."""

import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import asyncpg
import pytest
import typer
from aiokafka import AIOKafkaProducer

from operate.commands import command_line
from pipeline.observe.health import Health

from .bank import Bank
from .conftest import Command, position_reaches
from .processes import starting
from tests.conftest import Running
from tests.contract.bank import Deposit, histories
from tests.servers.processes import Start
from tests.servers.waiting import eventually

MEBIBYTE = 2**20


@pytest.fixture
def command(bank: Bank, commands: Callable[[typer.Typer], Command]) -> Command:
    """Call `service …` of the bank."""
    app = command_line(bank.service)
    assert isinstance(app, typer.Typer)
    return commands(app)


async def send_bomb(kafka: str, topic: str, mebibytes: int, codec: str = "gzip") -> None:
    """Send a record that is small as long as it is packed."""
    async with AIOKafkaProducer(
        bootstrap_servers=kafka,
        compression_type=codec,
        max_request_size=2 * mebibytes * MEBIBYTE,
        max_batch_size=2 * mebibytes * MEBIBYTE,
    ) as one:
        await Deposit(666, value=bytes(mebibytes * MEBIBYTE)).send(one, topic)


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
async def test_a_batch_that_unpacks_to_too_much_is_named_and_passed_over_only_by_a_person(
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


async def test_a_start_is_counted_before_anything_is_unpacked_and_not_where_nothing_is(
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
async def test_a_batch_that_was_applied_holds_up_nothing_when_it_may_not_be_unpacked_again(
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


async def test_a_batch_that_kills_whoever_unpacks_it_is_not_unpacked_again_and_named(
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
    # With what comes before it, behind that when it is parked, and by itself.
    for _ in range(3):
        assert await (await start("run")).ended() == -signal.SIGKILL
    process = await start("run")
    await process.says("is blocked and skips no record")

    # It was parked with the suspicion, and is tried alone when the lease of its lane has ended.
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
