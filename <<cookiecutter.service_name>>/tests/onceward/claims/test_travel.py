"""Large payloads on their way from one service to another, by Kafka and the store."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from servers.s3proxy import S3Proxy

from onceward import CloudEvents, Message
from onceward.claims import open_claims
from onceward.claims.check import Claims
from onceward.claims.commands import app
from onceward.claims.settings import ClaimSettings
from onceward.cli.commands import command_line
from onceward.events.message import Record
from onceward.runtime import Part
from onceward.settings import Settings

from .conftest import FOLDER_AND_S3, GONE, LIMIT, SETTINGS, Objects, Outage
from .press import Press, letters_for
from tests.conftest import Records, Running
from tests.onceward.integration.conftest import Command
from tests.onceward.integration.outgoing import all_is_written
from tests.onceward.integration.tcp_proxy import TcpProxy
from tests.servers.databases import HOME
from tests.servers.processes import most_memory
from tests.servers.waiting import PATIENCE, eventually

ROOT = Path(__file__).parents[3]


@pytest.fixture
async def press(new_topic: Callable[..., Awaitable[str]]) -> Press:
    """Return a press with topics of its own, of two partitions."""
    return Press(
        orders=await new_topic(2),
        books=await new_topic(2),
        name=f"press-{uuid4().hex[:8]}",
        claims=open_claims,
    )


@FOLDER_AND_S3
async def test_large_payloads_travel_through_the_store_and_small_ones_through_kafka(
    press: Press,
    running: Running,
    producer: AIOKafkaProducer,
    records: Records,
    objects: Objects,
) -> None:
    sizes = {"at": LIMIT, "above": LIMIT + 1, "most": SETTINGS["memory_bytes"]}
    letters = {title: letters_for(size, title) for title, size in sizes.items()}
    async with running(press.printer), running(press.reader, Part.CONSUME):
        for title in letters:
            await press.order(producer, title, letters[title])
        await eventually(lambda: len(press.read) == 3)
    assert dict(press.read) == letters
    found = {record.key.decode(): record for record in await records(press.books, 3)}
    assert len(found["at"].value) == LIMIT
    assert "ce_dataref" not in dict(found["at"].headers)
    for title in ("above", "most"):
        headers = {name: value.decode() for name, value in found[title].headers}
        name = headers["ce_dataref"].removeprefix(f"{objects.url}/")
        content = objects.get(name)
        assert found[title].value == b""
        assert headers["ce_datalength"] == str(len(content)) == str(sizes[title])
        assert headers["ce_datachecksum"] == sha256(content).hexdigest()
        assert headers["content-type"] == "application/json"
    assert len(objects.names()) == 2


async def test_the_events_of_a_key_keep_their_order_whichever_way_they_go(
    press: Press, running: Running, producer: AIOKafkaProducer, store_url: str
) -> None:
    sizes = [(f"book {number % 3}", number * 97 % 2_500) for number in range(60)]
    async with running(press.printer), running(press.reader, Part.CONSUME):
        for number, (title, letters) in enumerate(sizes):
            # The partition of an order is that of its key.
            await press.order(producer, title, letters, int(title[-1]) % 2, id=str(number))
        await eventually(lambda: len(press.read) >= len(sizes))
    for one in ("book 0", "book 1", "book 2"):
        wanted = [letters for title, letters in sizes if title == one]
        assert [letters for title, letters in press.read if title == one] == wanted


async def test_a_lagging_reader_takes_as_much_as_fits_into_its_memory(
    press: Press,
    running: Running,
    producer: AIOKafkaProducer,
    store_url: str,
    db: asyncpg.Connection,
) -> None:
    async with running(press.printer):
        for number in range(30):
            await press.order(producer, "book", 2_000 + number, id=str(number))
        await eventually(lambda: _are_published(db, 30))
        async with running(press.reader, Part.CONSUME):
            await eventually(lambda: len(press.read) >= 30)
    assert [letters for _, letters in press.read] == [2_000 + number for number in range(30)]
    transactions = await db.fetchval(
        "SELECT count(DISTINCT xid) FROM pipeline.inbox WHERE consumer = 'read'"
    )
    assert transactions >= 30 / 4, "four fit into the memory"


async def _are_published(db: asyncpg.Connection, count: int) -> bool:
    committed = await db.fetchval("SELECT count(*) FROM pipeline.outbox")
    return bool(committed == count and await all_is_written(db))


async def test_while_the_store_is_away_only_those_wait_who_need_it(
    press: Press,
    running: Running,
    producer: AIOKafkaProducer,
    objects: Objects,
    outage: Outage,
    db: asyncpg.Connection,
) -> None:
    async with running(press.printer) as printer:
        await eventually(lambda: printer.is_ready)
        async with outage():
            await press.order(producer, "large", 2_000, partition=0)
            await eventually(lambda: objects.url in "".join(printer.reasons.values()))
            await press.order(producer, "small", 1, partition=1)
            await eventually(lambda: _published(db, "small"))
            assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0
        await eventually(lambda: _published(db, "large"))
        await eventually(lambda: printer.is_ready)
    assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0


async def _published(db: asyncpg.Connection, key: str) -> bool:
    return bool(
        await db.fetchval("SELECT count(*) FROM pipeline.outbox WHERE key = $1", key.encode())
    )


@pytest.mark.parametrize("loss", ["unmounted"], indirect=True)
async def test_a_reader_waits_for_the_store_in_the_partition_that_needs_it(
    press: Press,
    running: Running,
    producer: AIOKafkaProducer,
    objects: Objects,
    loss: Outage,
    db: asyncpg.Connection,
) -> None:
    async with running(press.printer):
        await press.order(producer, "large", 2_000)
        await eventually(lambda: _published(db, "large"))
    decoded: list[tuple[int, int]] = []

    class Noted(CloudEvents):
        def decode(self, record: Record, *, hash: bytes | None = None) -> Message:
            decoded.append((record.partition, record.offset))
            return CloudEvents().decode(record, hash=hash)

    press.reading.topic(press.books, codec=Noted())
    async with loss():
        async with running(press.reader) as reader:
            await eventually(lambda: objects.url in "".join(reader.reasons.values()))
            headers = [
                (f"ce_{name}", value)
                for name, value in {
                    "specversion": b"1.0", "id": b"1", "source": b"/tests", "type": b"printed"
                }.items()
            ]  # fmt: skip
            for partition in range(2):
                await producer.send_and_wait(
                    press.books, b'{"title":"inline","text":"x"}', partition=partition,
                    headers=headers,
                )  # fmt: skip
            # One of the two stands behind the large one.
            await eventually(lambda: ("inline", 1) in press.read)
            assert "large" not in dict(press.read)
            assert len(decoded) == len(set(decoded)), "an attempt to fetch data decodes nothing"
        assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0
    async with running(press.reader):
        await eventually(lambda: ("large", 2_000) in press.read)


_OPEN = """
SELECT count(*) FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid()
   AND backend_type = 'client backend' AND xact_start < $1
"""


@pytest.mark.full
@pytest.mark.parametrize("store_url", ["s3"], indirect=True)
async def test_while_data_is_fetched_no_transaction_is_open(
    press: Press,
    running: Running,
    producer: AIOKafkaProducer,
    store_url: str,
    s3proxy: S3Proxy,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(press.printer):
        await press.order(producer, "book", 2_000)
        await eventually(lambda: _are_published(db, 1))

    def patient(service: str, _: Settings) -> Claims:
        """Open a claim check that waits for longer than the test: nothing ends by itself."""
        return Claims(service, ClaimSettings().model_copy(update={"timeout": 2 * PATIENCE}))

    press.claims = patient
    async with TcpProxy("127.0.0.1", s3proxy.port).listening() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        proxy.hold()
        async with running(press.reader, Part.CONSUME):
            await eventually(lambda: proxy.attempts > 0)
            asked_at = await db.fetchval("SELECT clock_timestamp()")

            async def nothing_is_open() -> bool:
                """Those of its other parts end soon; one that is about the batch would not."""
                return not await db.fetchval(_OPEN, asked_at)

            await eventually(nothing_is_open)
            assert press.read == []
            proxy.restore()
            await eventually(lambda: press.read == [("book", 2_000)])


async def run(
    press: Press, database_url: str, kafka: str, *command: str, dies: bool
) -> asyncio.subprocess.Process:
    """Start the press as a process of its own."""
    inherited = {k: v for k, v in os.environ.items() if k != "PIPELINE_DATABASE_POOLER"}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"{__package__}.app",
        *command,
        cwd=HOME,
        env={
            **inherited,
            "PIPELINE_DATABASE_URL": database_url,
            "PIPELINE_KAFKA_BOOTSTRAP_SERVERS": kafka,
            "PIPELINE_HEALTH_PORT": "0",
            "PRESS_ORDERS": press.orders,
            "PRESS_BOOKS": press.books,
            "PRESS_NAME": press.name,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "dev", ROOT))),
        }
        | ({"PRESS_DIES": "yes"} if dies else {}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


@pytest.mark.full
async def test_twelve_partitions_with_large_data_each_need_less_than_768_mebibytes(
    press: Press,
    new_topic: Callable[..., Awaitable[str]],
    producer: AIOKafkaProducer,
    objects: Objects,
    database_url: str,
    kafka: str,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    press.books = await new_topic(12)
    for place in range(12):
        content = json.dumps({"title": f"{place}", "text": "x"}).ljust(100 * 2**20).encode()
        headers = {
            "ce_specversion": "1.0",
            "ce_id": f"{place}",
            "ce_source": "/tests",
            "ce_type": "printed",
            "ce_dataref": objects.put(f"large/{place}", content),
            "ce_datalength": f"{len(content)}",
            "ce_datachecksum": sha256(content).hexdigest(),
            "content-type": "application/json",
        }
        written = [(name, value.encode()) for name, value in headers.items()]
        await producer.send_and_wait(press.books, b"", partition=place, headers=written)
    for name, value in {
        "PRESS_READS": "yes",
        "PIPELINE_CLAIM_MEMORY_BYTES": f"{2**27}",
        "PIPELINE_CLAIM_TIMEOUT": "120",
        "PIPELINE_TRANSACTION_TIMEOUT": "240",
        "PIPELINE_KAFKA_SESSION_TIMEOUT": "480",
        "PIPELINE_BACKLOG_LEASE": "480",
        "PIPELINE_MEMORY_MEBIBYTES": "768",
    }.items():
        monkeypatch.setenv(name, value)

    async def all_are_read() -> bool:
        return bool(await db.fetchval("SELECT count(*) FROM pipeline.inbox") == 12)

    process = await run(press, database_url, kafka, "run", dies=False)
    try:
        await eventually(all_are_read, patience=800)
        assert most_memory(process.pid) < 768 * 2**20
    finally:
        process.send_signal(signal.SIGTERM)
        await process.communicate()


@FOLDER_AND_S3
async def test_payloads_of_a_killed_process_are_swept_but_not_its_successors(
    press: Press,
    running: Running,
    producer: AIOKafkaProducer,
    direct_url: str,
    kafka: str,
    objects: Objects,
    opened: Callable[..., Claims],
    commands: Callable[..., Command],
    db: asyncpg.Connection,
) -> None:
    await press.order(producer, "large", 2_000)
    process = await run(press, direct_url, kafka, "consume", dies=True)
    output, _ = await process.communicate()
    assert process.returncode == -signal.SIGKILL, output.decode()
    (orphan,) = objects.names()
    assert await db.fetchval("SELECT count(*) FROM pipeline.claim") == 0

    async with running(press.printer), running(press.reader, Part.CONSUME):
        await eventually(lambda: ("large", 2_000) in press.read)
    (kept,) = objects.names() - {orphan}
    # The same event, and the same place but for the attempt.
    assert kept.rpartition("-")[0] == orphan.rpartition("-")[0]

    service = commands(command_line(press.printer, claims=app), "claims")
    for arguments in ("sweep",), ("sweep", "--dry-run"):
        done = await service(*arguments)
        assert done.exit_code == 0, done.output
        assert "0 payloads without an event, of 2" in done.stdout
    assert objects.names() == {orphan, kept}

    await opened(press.name, **GONE).sweep(db)
    assert objects.names() == {kept}
