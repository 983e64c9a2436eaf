"""What people pause: it is not taken, waits in its order, and nothing is spent on it."""

import asyncio
import json
import logging
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from time import monotonic

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward import Policy, Transaction, errors
from onceward.apply import throttles
from onceward.apply.attempt import Findings
from onceward.apply.limits import ConcurrencyLimit
from onceward.apply.positions import Slot
from onceward.apply.statements import PAUSES
from onceward.apply.throttles import Resting, Throttles
from onceward.consume.gathering import Gatherer
from onceward.consume.limits import TopicLimits
from onceward.consume.partition_source import PartitionBatch, PartitionSource
from onceward.observe import metrics
from onceward.observe.health import Health
from onceward.operators import dead_rows, offsets, stopping
from onceward.operators.audit import Change
from onceward.operators.stopping import Subject
from onceward.retry import lanes
from onceward.runtime import Part
from onceward.servers.database import create_engine
from onceward.servers.retrying import Retrying
from onceward.servers.tasks import in_background
from onceward.settings import Settings

from .applier import Applier, NewApplier
from .bank import Bank, Refused
from .conftest import Command, position_of, position_reaches
from .outgoing import all_is_written, event, numbered, stage, waits
from .processes import starting
from .test_backlog import bank_with
from .test_bombs import SHARE, large, send_batch
from .test_dead import somebody_waits
from .test_interrupted import Gate
from .test_round_trips import wiring
from .wire import Wire
from tests.conftest import Running
from tests.contract.bank import Deposit, Deposited, histories
from tests.servers.processes import Process, Start
from tests.servers.topics import following
from tests.servers.waiting import PATIENCE, eventually

NewTopic = Callable[..., Awaitable[str]]

_STARTS = "SELECT COALESCE(max(starts), 0) FROM pipeline.position"
_AUDIT = "SELECT who, action, subject, why FROM pipeline.audit ORDER BY id"
_LATE = "SELECT count(*) FROM pipeline.inbox WHERE created_at > $1"
_TICKS = 10
"""Looks of the test's own, each a second after the one before: on a busy machine they come later,
as those of the processes do."""


async def pause(
    db: asyncpg.Connection, kind: str, name: str, lasts: timedelta | None = None
) -> None:
    """Pause something, as a person would."""
    await stopping.ask(db, [Subject(kind, name)], lasts=lasts, who="ada", why="a test")


async def resume(db: asyncpg.Connection, kind: str, name: str) -> None:
    """Let it go on."""
    assert await stopping.resume(db, [Subject(kind, name)], who="ada", why=None)


def knows(health: Health, *subjects: str) -> Callable[[], bool]:
    """Return the question whether a process has seen that just these are paused."""
    return lambda: list(health.paused) == list(subjects)


async def send(
    producer: AIOKafkaProducer, topic: str, amounts: range, account: str = "ada"
) -> None:
    """Send deposits, in this order."""
    for amount in amounts:
        await Deposit(amount, account).send(producer, topic)


@pytest.fixture
async def other(bank: Bank, new_topic: NewTopic) -> str:
    """Return another topic that the bank reads, beside its own, and does nothing with."""
    topic = await new_topic()

    @bank.handlers.on(Deposited, topic=topic, consumer="other")
    async def leave(event: Deposited, tx: Transaction) -> None:
        """Leave a marker."""

    return topic


@pytest.fixture
async def start(bank: Bank, database_url: str, kafka: str) -> AsyncIterator[Start]:
    async with starting(
        bank, database_url=database_url, kafka_bootstrap_servers=kafka, kafka_session_timeout=10
    ) as start:
        yield start


async def knows_of(process: Process, *subjects: str) -> None:
    """Wait until a process is ready, and has seen that these are paused, in any order."""

    async def has_seen() -> bool:
        status, body = await process.get("/health/ready")
        return status == 200 and sorted(json.loads(body).get("paused", [])) == sorted(subjects)

    await eventually(has_seen)


async def test_a_paused_topic_is_not_read_and_its_neighbour_is(
    bank: Bank,
    other: str,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    running: Running,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await pause(db, "topic", bank.deposits)
    caplog.set_level(logging.WARNING, "onceward")
    async with running(bank.service) as health:
        await eventually(lambda: not health.reasons)
        await eventually(knows(health, f"topic {bank.deposits}"))
        for topic in (bank.deposits, other):
            await send(producer, topic, range(30))
        await eventually(position_reaches(db, other, 30))
        assert bank.calls == []
        assert not await position_of(db, bank.deposits)
        await resume(db, "topic", bank.deposits)
        await eventually(position_reaches(db, bank.deposits, 30))
        assert knows(health)()
    assert await histories(db) == {"ada": [*range(30)]}
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


async def test_start_latest_skips_no_records_sent_to_a_paused_topic(
    bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection, running: Running
) -> None:
    await pause(db, "topic", bank.deposits)
    async with running(bank.service, consumer_start="latest"):
        await eventually(position_reaches(db, bank.deposits, 0))
        await send(producer, bank.deposits, range(3))
        await resume(db, "topic", bank.deposits)
        await eventually(position_reaches(db, bank.deposits, 3))
    assert await histories(db) == {"ada": [0, 1, 2]}


async def test_a_topic_paused_while_it_is_read_resumes_at_its_position(
    bank: Bank, other: str, producer: AIOKafkaProducer, db: asyncpg.Connection, running: Running
) -> None:
    async with running(bank.service) as health:
        await send(producer, bank.deposits, range(10))
        await eventually(position_reaches(db, bank.deposits, 10))
        await pause(db, "topic", bank.deposits)
        await eventually(knows(health, f"topic {bank.deposits}"))
        for topic in (bank.deposits, other):
            await send(producer, topic, range(10, 20))
        await eventually(position_reaches(db, other, 10))
        assert await position_of(db, bank.deposits) == 10
        assert not health.reasons
        # As `service topics seek` does it meanwhile.
        await offsets.seek(db, Slot(bank.name, bank.deposits, 0), 12, Change("ada", "seek"))
        await resume(db, "topic", bank.deposits)
        await eventually(position_reaches(db, bank.deposits, 20))
    assert await histories(db) == {"ada": [*range(10), *range(12, 20)]}
    assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0


async def test_a_failed_batch_is_not_split_once_its_topic_is_paused(
    bank: Bank, other: str, producer: AIOKafkaProducer, db: asyncpg.Connection, running: Running
) -> None:
    async with running(bank.service) as health:

        async def be_paused() -> None:
            if not health.paused:
                await pause(db, "topic", bank.deposits)
                await eventually(knows(health, f"topic {bank.deposits}"))

        bank.waits[2], bank.errors[2] = be_paused, Refused("now it is paused")
        await eventually(lambda: not health.reasons)
        await send(producer, bank.deposits, range(5))
        await eventually(knows(health, f"topic {bank.deposits}"))
        await send(producer, other, range(5))
        await eventually(position_reaches(db, other, 5))
        position = await position_of(db, bank.deposits) or 0
        assert position <= 2, "what comes before may have been a batch of its own"
        assert bank.calls.count(2) == 1
        assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0
        bank.waits.clear()
        bank.errors.clear()
        await resume(db, "topic", bank.deposits)
        await eventually(position_reaches(db, bank.deposits, 5))
    assert await histories(db) == {"ada": [*range(5)]}


async def test_a_paused_topics_batches_waiting_for_a_slot_are_not_taken(
    bank: Bank,
    new_topic: NewTopic,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = Bank(
        *(await new_topic(12), bank.balances, bank.name),
        handlers=bank.handlers,
        options={"timeout": PATIENCE},
    )
    gate, fetched = Gate(), Counter[str]()

    def received(topic: str, group: str, count: int) -> None:
        fetched[topic] += count

    monkeypatch.setattr(metrics, "received", received)
    many.waits = dict.fromkeys(range(12), gate.wait)
    for number in range(12):
        await Deposit(number, f"of {number}", partition=number).send(producer, many.deposits)
    async with running(bank.service, concurrency=1) as health:
        await eventually(gate.reached.is_set)
        await eventually(lambda: fetched[many.deposits] == 12)
        await pause(db, "topic", many.deposits)
        await eventually(knows(health, f"topic {many.deposits}"))
        gate.open.set()
        # It gets the only slot after those that have waited for it.
        await Deposit(12, "the last").send(producer, bank.deposits)
        await eventually(position_reaches(db, bank.deposits, 1))
        assert len(many.calls) == 1, "that which had begun"
        assert len(await histories(db)) == 2
        await resume(db, "topic", many.deposits)
        await eventually(lambda: db.fetchval("SELECT count(*) = 13 FROM pipeline.inbox"))
    assert {*many.calls} == {*range(12)}


def is_waited_for(slots: ConcurrencyLimit) -> Callable[[], bool]:
    """Return the question whether a transaction waits for one that is alone."""
    return lambda: bool(slots._entrance._waiters)


async def test_batches_that_share_a_transaction_look_when_it_begins(
    ledger: tuple[Bank, Applier],
) -> None:
    bank, applier = ledger
    limits = TopicLimits(applier.consume.throttles, bank.handlers.takers, bank.deposits)
    parts = []
    for number in range(2):
        one = replace(applier, slot=replace(applier.slot, partition=number))
        batch = await one.read(Deposit(number, f"of {number}"), start=await one.position())
        parts.append(PartitionBatch(one.slot, batch, limits=limits))
    gatherer, slots = Gatherer(applier.consume), applier.consume._slots
    async with slots.all():
        applying = [asyncio.create_task(gatherer.apply(part, Findings())) for part in parts]
        await eventually(is_waited_for(slots))
        applier.consume.throttles._rates = {("topic", bank.deposits): 0.0}
    assert await asyncio.gather(*applying) == [False, False]
    attempts = Retrying(
        "the test", "PostgreSQL", unless=lambda: False, report=applier.outages.append
    )
    for part in parts:
        with pytest.raises(Resting):
            await applier.consume.apply(PartitionSource([part]), attempts)
    assert bank.calls == []


async def test_a_pause_ends_by_the_clock_of_the_database(
    bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection, running: Running
) -> None:
    await pause(db, "topic", bank.deposits, timedelta(hours=1))
    async with running(bank.service) as health:
        await eventually(knows(health, f"topic {bank.deposits}"))
        await send(producer, bank.deposits, range(5))
        await db.execute("UPDATE pipeline.throttle SET until = clock_timestamp()")
        await eventually(position_reaches(db, bank.deposits, 5))
    assert await stopping.listed(db, 10) == []


async def test_nothing_is_taken_on_an_old_look(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, health = create_engine(settings(), name="bank"), Health(stall_after=PATIENCE)
    looking = Throttles(engine, health)
    taking = asyncio.create_task(looking.fresh())
    try:
        await asyncio.sleep(0)
        assert not taking.done(), "there was no look yet"
        async with in_background(looking.run()):
            await asyncio.wait_for(taking, PATIENCE)
        # As after SIGSTOP and SIGCONT.
        monkeypatch.setattr(throttles, "monotonic", lambda: monotonic() + 3)
        taking = asyncio.create_task(looking.fresh())
        await asyncio.sleep(0)
        assert not taking.done()
        async with in_background(looking.run()):
            await asyncio.wait_for(taking, PATIENCE)
    finally:
        taking.cancel()
        await engine.dispose()
    await Throttles().fresh()  # nobody can ask for anything
    assert not health.reasons


async def test_nothing_is_taken_while_it_is_not_known_what_is_paused(
    bank: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    running: Running,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(bank.service) as health:
        await eventually(lambda: not health.reasons)
        await db.execute("ALTER TABLE pipeline.throttle RENAME TO elsewhere")
        await eventually(lambda: "throttles" in health.reasons)
        assert health.reasons["throttles"].startswith("it is not known what is paused, so nothing")
        await asyncio.sleep(throttles._FRESH_SECONDS)
        await send(producer, bank.deposits, range(5))
        await asyncio.sleep(1)
        assert bank.calls == []
        await db.execute("ALTER TABLE pipeline.elsewhere RENAME TO throttle")
        await eventually(position_reaches(db, bank.deposits, 5))
        await eventually(lambda: not health.reasons)
    told = [one for one in caplog.records if "it is not known what is paused" in one.message]
    assert len(told) == 1


@pytest.mark.full
async def test_a_pause_takes_effect_in_all_processes_within_two_seconds(
    bank: Bank,
    new_topic: NewTopic,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    settings: Callable[..., Settings],
    kafka: str,
) -> None:
    bank.deposits = await new_topic(3)
    sent, wires = 0, [Wire() for _ in range(3)]

    async def deposit(stopping: asyncio.Event) -> None:
        nonlocal sent
        while not stopping.is_set():
            await Deposit(sent, f"{sent % 9}", partition=sent % 3).send(producer, bank.deposits)
            sent += 1

    async with AsyncExitStack() as stack:
        wired = [await stack.enter_async_context(wiring(settings(), wire)) for wire in wires]
        start = await stack.enter_async_context(
            starting(bank, kafka_bootstrap_servers=kafka, kafka_session_timeout=10)
        )
        three = [await start("consume", database_url=there) for there in wired]
        stopping = asyncio.Event()
        async with in_background(deposit(stopping)) as depositing:
            await eventually(lambda: db.fetchval("SELECT count(*) > 100 FROM pipeline.inbox"))
            for process in three:
                await eventually(process.is_ready)
            await pause(db, "topic", bank.deposits)
            before = [wire.seen["throttle: look"] for wire in wires]
            for _ in range(_TICKS):
                await db.fetchval("SELECT count(*) FROM pipeline.throttle")
                await asyncio.sleep(1)
            looks = [
                wire.seen["throttle: look"] - one for wire, one in zip(wires, before, strict=True)
            ]
            assert min(looks) >= _TICKS / 2 - 1, f"each looks once in two seconds: {looks}"
            for process in three:
                await knows_of(process, f"topic {bank.deposits}")
            since = await db.fetchval("SELECT clock_timestamp()")
            await asyncio.sleep(2)
            assert await db.fetchval(_LATE, since) == 0
            stopping.set()
            await asyncio.wait_for(asyncio.shield(depositing), PATIENCE)
        await resume(db, "topic", bank.deposits)
        await eventually(lambda: db.fetchval("SELECT count(*) = $1 FROM pipeline.inbox", sent))
    expected = {f"{n}": [*range(n, sent, 9)] for n in range(9)}
    assert await histories(db) == expected


@pytest.mark.full
async def test_a_process_started_paused_takes_nothing_and_counts_no_deaths(
    bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection, start: Start
) -> None:
    await send(producer, bank.deposits, range(5))
    await pause(db, "topic", bank.deposits)
    for _ in range(5):
        process = await start("consume")
        await knows_of(process, f"topic {bank.deposits}")
        await asyncio.sleep(0.5)
        await process.kill()
    assert await db.fetchval(_STARTS) == 0
    assert not await position_of(db, bank.deposits)
    await resume(db, "topic", bank.deposits)
    process = await start("consume")
    await eventually(position_reaches(db, bank.deposits, 5))
    assert "processes crashed" not in process.output
    assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0
    assert await histories(db) == {"ada": [*range(5)]}


@pytest.mark.full
async def test_a_process_that_was_stopped_looks_before_it_takes(
    bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection, start: Start
) -> None:
    process = await start("consume", kafka_session_timeout=60)
    await send(producer, bank.deposits, range(5))
    await eventually(position_reaches(db, bank.deposits, 5))
    await eventually(process.is_ready)
    process.send(signal.SIGSTOP)
    await pause(db, "topic", bank.deposits)
    await asyncio.sleep(throttles._FRESH_SECONDS + 0.5)
    await send(producer, bank.deposits, range(5, 10))
    process.send(signal.SIGCONT)
    await knows_of(process, f"topic {bank.deposits}")
    await asyncio.sleep(1)
    assert await position_of(db, bank.deposits) == 5
    await resume(db, "topic", bank.deposits)
    await eventually(position_reaches(db, bank.deposits, 10))


async def test_who_pauses_and_resumes_is_written_down(
    command: Command, bank: Bank, db: asyncpg.Connection
) -> None:
    topic = "topic", bank.deposits
    because = "--because", "wrong prices", "--operator", "ada"
    done = await command("pause", *topic, *because)
    assert done.exit_code == 1
    assert "give --yes" in done.stderr
    for wrong in (("--because", " "), ("--because", "x", "--operator", "")):
        assert (await command("pause", *topic, *wrong, "--yes")).exit_code == 2
    unknown = await command("pause", "topic", "elsewhere", *because, "--yes")
    assert unknown.exit_code == 1
    assert f"the service has no such topic; it has topic {bank.deposits}" in unknown.stderr
    assert await stopping.listed(db, 10) == []
    done = await command("pause", *topic, *because, "--for", "30m", "--yes", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"subjects": [f"topic {bank.deposits}"], "are": "paused"}
    (one,) = json.loads((await command("status", "--json")).stdout)["stops"]
    assert (one["kind"], one["name"], one["who"]) == ("topic", bank.deposits, "ada")
    # Asked again, it is another one.
    assert (await command("pause", *topic, *because, "--yes")).exit_code == 0
    (row,) = await stopping.listed(db, 10)
    assert row.until is None
    screen = (await command("status")).stdout
    assert re.search(
        rf"^paused +topic {bank.deposits}, \d+ s, ada: wrong prices$", screen, re.MULTILINE
    )
    found = [json.loads(line) for line in (await command("doctor", "--json")).stdout.splitlines()]
    (paused,) = [each for each in found if each["check"] == "paused"]
    assert paused["level"] == "warning"
    assert f"`service resume topic {bank.deposits}`" in paused["advice"]
    assert (await command("resume", *topic, "--operator", "bob")).exit_code == 0
    again = await command("resume", *topic)
    assert again.exit_code == 1
    assert f"topic {bank.deposits} is not paused" in again.stderr
    assert [tuple(row) for row in await db.fetch(_AUDIT)] == [
        ("ada", "pause", f"topic {bank.deposits}", "wrong prices"),
        ("ada", "pause", f"topic {bank.deposits}", "wrong prices"),
        ("bob", "resume", f"topic {bank.deposits}", None),
    ]
    assert await stopping.listed(db, 10) == []


async def test_a_relay_alone_knows_what_is_paused(
    bank: Bank, db: asyncpg.Connection, running: Running
) -> None:
    await pause(db, "topic", bank.deposits)
    async with running(bank.service, Part.RELAY) as health:
        await eventually(knows(health, f"topic {bank.deposits}"))


_MESSAGES_ARE_DUE = "UPDATE pipeline.backlog SET due_at = now() WHERE topic <> '(paused)'"


async def pause_key(
    db: asyncpg.Connection, bank: Bank, account: str = "ada", lasts: timedelta | None = None
) -> None:
    """Pause the deposits to an account."""
    key = Subject("key", "deposit", bank.deposits, account.encode())
    await stopping.ask(db, [key], lasts=lasts, who="ada", why="a test")


async def resume_keys(db: asyncpg.Connection, account: str = "ada") -> None:
    """Let them go on."""
    keys = await stopping.of_key(db, account.encode())
    assert await stopping.resume(db, keys, who="ada", why=None)


async def test_a_paused_key_waits_and_others_of_its_partition_go_on(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    await applier.apply(Deposit(0, "ada"), Deposit(1, "bob"))
    await pause_key(db, bank)
    await applier.apply(*(Deposit(n, ("ada", "bob")[n % 2]) for n in range(2, 12)))
    await applier.work_off()
    await applier.apply(*(Deposit(n, ("ada", "bob")[n % 2]) for n in range(12, 22)))
    await applier.work_off()
    odd = [*range(1, 22, 2)]
    assert await histories(db) == {"ada": [0], "bob": odd}
    rows = [row for row in await applier.backlog() if row["topic"] == bank.deposits]
    assert {row["reason"] for row in rows} == {"follows another"}
    assert {(row["attempts"], row["waited"]) for row in rows} == {(0, 0.0)}
    assert len(rows) == 10
    await resume_keys(db)
    await applier.apply(Deposit(22, "ada"))
    await applier.work_off()
    assert await histories(db) == {"ada": [*range(0, 23, 2)], "bob": odd}
    assert await applier.backlog() == []


async def test_a_key_goes_on_when_its_time_is_over(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    await pause_key(db, bank, lasts=timedelta(hours=1))
    await applier.apply(Deposit(1), Deposit(2))
    await applier.work_off()
    assert bank.calls == []
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [1, 2]}
    assert await applier.backlog() == []


async def test_a_row_that_another_lane_demotes_as_a_pause_ends_goes_on(
    new_applier: NewApplier,
    db: asyncpg.Connection,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
) -> None:
    bank, applier = await bank_with(new_applier, mode="deferred")
    await pause_key(db, bank, lasts=timedelta(0))
    await applier.apply(Deposit(1))
    (row,) = [row for row in await applier.backlog() if row["topic"] == bank.deposits]
    other = await connect()
    async with other.transaction():  # of the worker that has the lane of deferred messages
        await dead_rows.lock_lane(other, row["lane"])
        await lanes.schedule_heads(other, [row["lane"]], [row["order_key"]])
        ending = asyncio.create_task(applier.work_off())

        async def has_ended_or_waits() -> bool:
            return ending.done() or await somebody_waits(db, other.get_server_pid())

        await eventually(has_ended_or_waits)
        assert bank.calls == []
    await ending
    await applier.work_off()
    assert await histories(db) == {"ada": [1]}
    assert await applier.backlog() == []


async def test_a_pause_row_is_not_tried_after_a_process_death(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    await pause_key(db, bank)
    await applier.apply(Deposit(1))
    await applier.work_off()
    await resume_keys(db)
    await db.execute("UPDATE pipeline.backlog_lane SET starts = 1, lease_until = now()")
    await applier.work_off()
    assert await histories(db) == {"ada": [1]}
    assert await applier.backlog() == []


async def test_a_pause_that_is_prolonged_while_it_ends_stays(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    await pause_key(db, bank, lasts=timedelta(0))
    await applier.apply(Deposit(1))
    lease = await applier.lanes._claim()
    assert lease is not None
    source = await applier.lanes._read(lease, await applier.lanes._due(lease, 10))
    assert len(source.ended) == 1
    await pause_key(db, bank)
    await applier.lanes._apply(applier.consume, source)
    await applier.lanes._release(lease, forgets_deaths=True)
    await applier.work_off()
    assert bank.calls == []
    assert [row["waits"] for row in await applier.backlog() if row["topic"] == "(paused)"] == [True]
    await resume_keys(db)
    await applier.work_off()
    assert await histories(db) == {"ada": [1]}


async def test_a_key_paused_while_its_head_is_tried_is_not_retried(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    bank.refused = {1}
    await applier.apply(Deposit(1), Deposit(2))
    before = bank.calls.count(1)

    async def be_paused() -> None:
        await pause_key(db, bank)

    bank.waits[1] = be_paused
    await db.execute(_MESSAGES_ARE_DUE)
    await applier.work_off()
    tried = bank.calls.count(1)
    assert tried > before
    bank.waits.clear()
    for _ in range(3):
        await db.execute(_MESSAGES_ARE_DUE)
        await applier.work_off()
    assert bank.calls.count(1) == tried
    bank.refused = set()
    await resume_keys(db)
    await applier.work_off()
    assert await histories(db) == {"ada": [1, 2]}


@asynccontextmanager
async def a_suspect_that_is_not_tried(
    bank: Bank, applier: Applier, db: asyncpg.Connection
) -> AsyncIterator[None]:
    """Let a message that may have killed a process wait to be tried alone, while the block runs.

    Fails the test if it is called then, or if that is stored.
    """
    bank.refused = {1}
    await applier.apply(Deposit(1))
    bank.refused, calls = set(), len(bank.calls)
    await db.execute("UPDATE pipeline.backlog SET deaths = 1, due_at = now()")
    (before,) = await applier.backlog()
    slots = applier.consume._slots
    async with slots.one(waits=False):
        working = asyncio.create_task(applier.work_off())
        await eventually(slots._entrance.locked)
        yield
    await working
    assert len(bank.calls) == calls
    (row,) = [row for row in await applier.backlog() if row["topic"] != PAUSES]
    for column in ("attempts", "deaths", "reason"):
        assert row[column] == before[column]


async def test_a_suspect_is_not_tried_alone_once_its_key_is_paused(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    async with a_suspect_that_is_not_tried(bank, applier, db):
        await pause_key(db, bank)
    await resume_keys(db)
    await applier.work_off()
    assert await histories(db) == {"ada": [1]}
    assert await applier.backlog() == []


async def test_what_was_read_before_its_key_was_paused_is_not_handled(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    bank.refused = {1}
    await applier.apply(Deposit(1))
    bank.refused, calls = set(), len(bank.calls)
    await db.execute(_MESSAGES_ARE_DUE)
    lease = await applier.lanes._claim()
    assert lease is not None
    source = await applier.lanes._read(lease, await applier.lanes._due(lease, 10))
    await pause_key(db, bank)
    await applier.lanes._apply(applier.consume, source)
    await applier.lanes._release(lease, forgets_deaths=True)
    assert len(bank.calls) == calls
    await resume_keys(db)
    await applier.work_off()
    assert await histories(db) == {"ada": [1]}


async def test_a_dead_letter_that_holds_its_key_still_does_after_a_pause(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    policy = Policy(attempts=1, after_death="hold")
    bank = Bank("deposits", "balances", "bank", options={"policy": policy})
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    bank.refused = {1}
    await applier.apply(Deposit(1))
    await pause_key(db, bank)
    await applier.apply(Deposit(2))
    await resume_keys(db)
    await applier.work_off()
    bank.refused = set()
    await applier.apply(Deposit(3))
    await applier.work_off()
    assert await histories(db) == {}
    assert [row["amount"] for row in await db.fetch(_WAITING)] == [2, 3]


_WAITING = """
SELECT (convert_from(value, 'UTF8')::json ->> 'amount')::integer AS amount
  FROM pipeline.backlog WHERE died_at IS NULL ORDER BY partition, "offset"
"""


async def test_pausing_a_key_covers_all_consumers_and_appears_in_the_backlog(
    command: Command, bank: Bank, other: str, db: asyncpg.Connection
) -> None:
    because = "--because", "a dispute", "--operator", "ada", "--yes"
    unknown = await command("pause", "key", "parcel 17", "--topic", "elsewhere", *because)
    assert unknown.exit_code == 1
    assert f"the service has no such key; it has key of {min(bank.deposits, other)}" in (
        unknown.stderr
    )
    done = await command("pause", "key", "parcel 17", *because, "--json")
    both = {
        f"key 'parcel 17' --topic {topic} --consumer {consumer}"
        for topic, consumer in ((bank.deposits, "deposit"), (other, "other"))
    }
    assert {*json.loads(done.stdout)["subjects"]} == both
    listed = (await command("dead", "list", "--waiting", "--reason", "paused")).stdout
    assert listed.count("parcel 17") == 2
    (shown,) = {row["error"] for row in await db.fetch("SELECT error FROM pipeline.backlog")}
    assert shown == "ada: a dispute"
    alone = "key", "parcel 17", "--topic", other
    assert (await command("resume", *alone)).exit_code == 0
    again = await command("resume", *alone)
    assert again.exit_code == 1
    assert "key parcel 17 is not paused" in again.stderr
    assert (await command("resume", "key", "parcel 17")).exit_code == 0
    assert await stopping.listed(db, 10) == []
    due = "SELECT count(*) FROM pipeline.backlog WHERE due_at <= clock_timestamp()"
    assert await db.fetchval(due) == 2
    actions = await db.fetch("SELECT action, subject FROM pipeline.audit ORDER BY id")
    assert {row["subject"] for row in actions} == both
    assert [row["action"] for row in actions] == ["pause", "pause", "resume", "resume"]


def let_rest(applier: Applier, *consumers: str) -> None:
    """Let an applier know that these consumers are paused, and no others."""
    applier.consume.throttles._rates = {("consumer", one): 0.0 for one in consumers}


@pytest.fixture
def heard(bank: Bank) -> list[int]:
    """Return the amounts that another consumer of the deposits has handled."""
    amounts: list[int] = []

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="second")
    async def second(event: Deposited, tx: Transaction) -> None:
        amounts.append(event.amount)

    return amounts


async def test_a_paused_consumer_of_two_leaves_the_other_its_records(
    bank: Bank,
    heard: list[int],
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    running: Running,
) -> None:
    await pause(db, "consumer", "deposit")
    async with running(bank.service) as health:
        await send(producer, bank.deposits, range(30))
        await eventually(position_reaches(db, bank.deposits, 30))
        assert {*heard} == {*range(30)}
        assert bank.calls == []
        rows = await db.fetch("SELECT reason, attempts, waited FROM pipeline.backlog")
        assert {tuple(row) for row in rows} == {("deferred", 0, 0.0)}
        assert len(rows) == 30
        assert not health.reasons
        await resume(db, "consumer", "deposit")
        await send(producer, bank.deposits, range(30, 40))
        await eventually(position_reaches(db, bank.deposits, 40))
        await eventually(lambda: db.fetchval("SELECT count(*) = 0 FROM pipeline.backlog"))
    assert await histories(db) == {"ada": [*range(40)]}


async def test_the_only_consumer_of_a_topic_stores_nothing_while_it_is_paused(
    bank: Bank, other: str, producer: AIOKafkaProducer, db: asyncpg.Connection, running: Running
) -> None:
    await pause(db, "consumer", "deposit")
    async with running(bank.service) as health:
        await eventually(knows(health, "consumer deposit"))
        for topic in (bank.deposits, other):
            await send(producer, topic, range(10))
        await eventually(position_reaches(db, other, 10))
        assert not await position_of(db, bank.deposits)
        assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0
        await resume(db, "consumer", "deposit")
        await eventually(position_reaches(db, bank.deposits, 10))
    assert await histories(db) == {"ada": [*range(10)]}


async def test_a_consumer_paused_while_its_batch_fails_is_not_called_again(
    bank: Bank,
    heard: list[int],
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    running: Running,
) -> None:
    async with running(bank.service) as health:

        async def be_paused() -> None:
            if not health.paused:
                await pause(db, "consumer", "deposit")
                await eventually(knows(health, "consumer deposit"))

        bank.waits[2], bank.errors[2] = be_paused, Refused("now it is paused")
        await eventually(lambda: not health.reasons)
        await send(producer, bank.deposits, range(5))
        await eventually(knows(health, "consumer deposit"))  # the handler has used `db` until then
        await eventually(position_reaches(db, bank.deposits, 5))
        assert bank.calls.count(2) == 1
        assert {*heard} == {*range(5)}
        assert await db.fetchval("SELECT max(attempts) FROM pipeline.backlog") == 0
        bank.waits.clear()
        bank.errors.clear()
        await resume(db, "consumer", "deposit")
        await eventually(lambda: db.fetchval("SELECT count(*) = 0 FROM pipeline.backlog"))
    assert await histories(db) == {"ada": [*range(5)]}


async def test_a_failed_message_of_a_paused_consumer_spends_nothing(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    bank.refused = {1}
    await applier.apply(Deposit(1))
    let_rest(applier, "deposit")
    await db.execute(_MESSAGES_ARE_DUE)
    before, calls = await applier.backlog(), len(bank.calls)
    for _ in range(3):
        await applier.work_off()
    assert len(bank.calls) == calls
    assert [row["attempts"] for row in await applier.backlog()] == [
        row["attempts"] for row in before
    ]
    bank.refused = set()
    let_rest(applier)
    await applier.work_off()
    assert await histories(db) == {"ada": [1]}


async def test_a_paused_consumers_worker_that_waits_for_a_slot_calls_nothing(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    bank.refused = {1}
    await applier.apply(Deposit(1))
    bank.refused, calls = set(), len(bank.calls)
    (before,) = await applier.backlog()
    await db.execute(_MESSAGES_ARE_DUE)
    async with applier.consume._slots.all():
        working = asyncio.create_task(applier.work_off())
        await eventually(is_waited_for(applier.consume._slots))
        let_rest(applier, "deposit")
    await working
    assert len(bank.calls) == calls
    (row,) = await applier.backlog()
    assert (row["attempts"], row["reason"]) == (before["attempts"], before["reason"])
    let_rest(applier)
    await applier.work_off()
    assert await histories(db) == {"ada": [1]}


async def test_a_suspect_whose_consumer_is_paused_before_its_try_spends_no_attempt(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, applier = ledger
    bank.refused = {1}
    await applier.apply(Deposit(1))
    bank.refused = set()
    (before,) = await applier.backlog()
    calls = len(bank.calls)

    async def end(self: Throttles, consumers: Collection[str]) -> None:
        let_rest(applier, "deposit")
        raise Resting

    monkeypatch.setattr(Throttles, "end_if_paused", end)
    await db.execute("UPDATE pipeline.backlog_lane SET starts = 1, lease_until = now()")
    await db.execute(_MESSAGES_ARE_DUE)
    await applier.work_off()
    monkeypatch.undo()
    (row,) = await applier.backlog()
    assert (row["attempts"], row["deaths"]) == (before["attempts"], before["deaths"])
    assert row["reason"] == before["reason"]
    assert len(bank.calls) == calls
    let_rest(applier)
    await db.execute(_MESSAGES_ARE_DUE)
    await applier.work_off()
    assert await histories(db) == {"ada": [1]}


async def test_what_is_paused_is_no_other_finding(
    command: Command, bank: Bank, db: asyncpg.Connection
) -> None:
    await db.execute(
        'INSERT INTO pipeline.backlog (key, lane, order_key, consumer, topic, partition, "offset",'
        " timestamp, headers, hash_version, reason, attempts, waited, holds, received_at, due_at)"
        " VALUES ('x', 0, 'x', 'deposit', 't', 0, 0, 0, '[]', 1, 'failed', 1, 0, false,"
        " now() - interval '3 h', now() - interval '2 h')"
    )
    await db.execute("UPDATE pipeline.backlog_lane SET released_at = now() - interval '1 d'")

    async def found() -> set[str]:
        lines = (await command("doctor", "--json")).stdout.splitlines()
        each = [json.loads(line) for line in lines]
        return {one["check"] for one in each if one["level"] != "ok"}

    assert "backlog" in await found()
    await slow_down(db, "consumer", "deposit", 0.001)  # no lane is claimed for minutes
    told = await found()
    assert "backlog" not in told
    assert "paused" in told
    await pause(db, "consumer", "deposit")
    told = await found()
    assert "backlog" not in told
    assert "paused" in told
    topics = json.loads((await command("status", "--json")).stdout)["paused_topics"]
    assert topics == [bank.deposits]


async def test_who_pauses_a_consumer_is_told_what_is_stored(
    command: Command, bank: Bank, heard: list[int], other: str
) -> None:
    alone = await command("pause", "consumer", "other", "--because", "x")
    assert "consumer other will be paused. Go on?" in alone.stderr
    shared = await command("pause", "consumer", "deposit", "--because", "x")
    assert "Its messages are stored: second of its topic go on." in shared.stderr
    assert alone.exit_code == shared.exit_code == 1


async def test_events_are_not_paused_while_the_outbox_has_a_publication(
    bank: Bank, db: asyncpg.Connection
) -> None:
    await db.execute("CREATE PUBLICATION bank_outbox FOR TABLE pipeline.outbox")
    with pytest.raises(errors.Refused, match="relay publishes them again: DROP PUBLICATION bank_"):
        await pause(db, "events", bank.balances)
    assert await stopping.listed(db, 10) == []
    await pause(db, "topic", bank.deposits)
    await db.execute("DROP PUBLICATION bank_outbox")
    await pause(db, "events", bank.balances)
    assert len(await stopping.listed(db, 10)) == 2


async def test_a_relay_pauses_one_topic_and_publishes_the_others(
    bank: Bank,
    new_topic: NewTopic,
    db: asyncpg.Connection,
    kafka: str,
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there, counted = await new_topic(), list[dict[str, int]]()
    monkeypatch.setattr(metrics, "observe_rejected", lambda **numbers: counted.append(numbers))
    await pause(db, "events", bank.balances)
    async with (
        running(bank.service, Part.RELAY, relay_batch_events=7, relay_lease=3) as health,
        following(kafka, there) as others,
        following(kafka, bank.balances) as paused,
    ):
        for first in (0, 20):
            some = [*range(first, first + 20)]
            await stage(db, [*numbered(bank.balances, some), *numbered(there, some)])
            await others.until_ids(range(first + 20))
        await eventually(waits(db, range(40)))
        await eventually(lambda: all_is_written(db))
        await eventually(lambda: {"waiting": 0, "dead": 0, "paused": 40} in counted)
        assert paused.records == []
        assert not health.reasons
        await resume(db, "events", bank.balances)
        await stage(db, numbered(bank.balances, range(40, 50)))
        await paused.until_ids(range(50))
        await eventually(waits(db, []))
    assert paused.first_ids() == {b"ada": [str(n) for n in range(50)]}


@pytest.mark.full
async def test_a_paused_topic_changes_its_relay_and_keeps_its_order(
    bank: Bank, db: asyncpg.Connection, kafka: str, start: Start
) -> None:
    keys = ["ada", "bob", "eve"]
    some = [event(bank.balances, n, keys[n % 3]) for n in range(60)]
    process = await start("relay", relay_lease=2)
    await eventually(process.is_ready)
    await pause(db, "events", bank.balances)
    await knows_of(process, f"events {bank.balances}")
    await stage(db, some[:30])
    await eventually(waits(db, range(30)))
    await process.kill()
    await stage(db, some[30:50])
    other = await start("relay", relay_lease=2)
    await eventually(waits(db, range(50)))
    await knows_of(other, f"events {bank.balances}")
    async with following(kafka, bank.balances) as tail:
        await resume(db, "events", bank.balances)
        await stage(db, some[50:])
        await tail.until_ids(range(60))
    expected = {key.encode(): [str(n) for n in range(at, 60, 3)] for at, key in enumerate(keys)}
    assert tail.first_ids() == expected


RATE = 20.0
NUMBER = 120
"""What is taken at this rate."""
AT_LEAST = NUMBER / RATE - 3
"""Seconds between the first and the last: what is allowed in a second is taken at once by the first
and by the last, and the first may begin as much as a second after it was noted."""


async def slow_down(db: asyncpg.Connection, kind: str, name: str, rate: float = RATE) -> None:
    """Throttle something, as a person would."""
    subjects = [Subject(kind, name)]
    await stopping.ask(db, subjects, per_second=rate, lasts=None, who="ada", why="a test")


async def seconds_of(db: asyncpg.Connection, topic: str, consumer: str = "deposit") -> float:
    """Return how much later the last message of a topic was taken than the first."""
    seconds: float = await db.fetchval(
        "SELECT extract(epoch FROM max(created_at) - min(created_at))::float"
        " FROM pipeline.inbox WHERE topic = $1 AND consumer = $2",
        topic,
        consumer,
    )
    return seconds


async def test_a_throttle_is_kept_by_all_that_take_together(
    settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    await slow_down(db, "topic", "scans", 10.0)
    engine, health = create_engine(settings(), name="bank"), Health(stall_after=PATIENCE)
    one, other = Throttles(engine, health), Throttles(engine)
    try:
        for each in (one, other):
            await each.look()
            assert each.left("topic", "scans") == 0
            assert each.most("topic", "scans") == 10
            assert each.most("topic", "elsewhere") == float("inf")
        assert list(health.paused) == ["topic scans at 10/s"]
        await one.took({("topic", "scans"): 10})  # those of the second before
        await one.took({("topic", "scans"): 2_000})
        await other.took({("topic", "scans"): 1_000})
        assert 200 < other.left("topic", "scans") <= 300
        assert one.resting("topic") == {"scans"}
        assert one.paused("topic") == set()
        before = await db.fetchval("SELECT next_at FROM pipeline.throttle")
        await one.took({("topic", "elsewhere"): 10})
        await one.took({("topic", "scans"): 0})
        assert await db.fetchval("SELECT next_at FROM pipeline.throttle") == before
    finally:
        await engine.dispose()


async def test_an_earlier_database_reply_does_not_shorten_a_throttles_later_wait(
    settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    await slow_down(db, "topic", "scans", 10.0)
    engine = create_engine(settings(), name="bank")
    one = Throttles(engine)
    try:
        await one.look()
        await one.took({("topic", "scans"): 2_000})
        await db.execute("UPDATE pipeline.throttle SET next_at = NULL")  # as of an earlier answer
        await one.took({("topic", "scans"): 10})
        assert one.left("topic", "scans") > 100
    finally:
        await engine.dispose()


async def test_a_look_does_not_forget_what_is_being_noted(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
) -> None:
    await slow_down(db, "topic", "scans", 0.01)
    engine, other = create_engine(settings(), name="bank"), await connect()
    one = Throttles(engine)
    try:
        await one.look()
        async with other.transaction():
            await other.execute("SELECT FROM pipeline.throttle FOR UPDATE")
            taking = asyncio.create_task(one.took({("topic", "scans"): 1}))
            await eventually(lambda: somebody_waits(db, other.get_server_pid()))
            await one._look(monotonic())
            assert one.left("topic", "scans") > 0
        await taking
    finally:
        await engine.dispose()


async def test_a_reader_notes_all_that_it_takes_before_others_ask(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    places = ("topic", bank.deposits), ("consumer", "deposit")
    for kind, name in places:
        await slow_down(db, kind, name, 0.01)
    rates = Throttles(applier.engine)
    limits = TopicLimits(rates, bank.handlers.takers, bank.deposits)
    batch = await applier.read(Deposit(1), start=0)
    await rates.look()
    assert [rates.left(*one) for one in places] == [0, 0]
    taking = asyncio.create_task(limits.take(batch))
    await asyncio.sleep(0)
    assert not taking.done(), "the database has not answered yet"
    assert all(rates.left(*one) > 0 for one in places)
    await taking


async def test_two_workers_of_a_process_use_an_allowance_only_once(
    new_applier: NewApplier,
) -> None:
    bank, applier = await bank_with(new_applier, mode="deferred")
    await applier.apply(*(Deposit(n, f"of {n}") for n in range(40)))
    applier.consume.throttles._rates = {("consumer", "deposit"): 0.01}
    sources = []
    for _ in range(2):
        lease = await applier.lanes._claim(8)
        assert lease is not None
        sources.append(await applier.lanes._read(lease, await applier.lanes._due(lease, 100)))
    await applier.lanes._try(applier.consume, sources[0])
    with pytest.raises(Resting):
        await applier.lanes._try(applier.consume, sources[1])
    assert len(bank.calls) == 1


async def test_a_suspect_that_the_rate_does_not_allow_spends_no_attempt(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    rates = applier.consume.throttles
    async with a_suspect_that_is_not_tried(bank, applier, db):
        rates._rates = {("consumer", "deposit"): 0.001}
        await rates.took({("consumer", "deposit"): 1})
    rates._rates = {}
    await db.execute(_MESSAGES_ARE_DUE)
    await applier.work_off()
    assert await histories(db) == {"ada": [1]}


async def test_what_can_not_be_noted_is_reported_once(
    settings: Callable[..., Settings], db: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await slow_down(db, "topic", "scans", 10.0)
    await db.execute("ALTER TABLE pipeline.throttle ADD CHECK (next_at IS NULL)")
    engine = create_engine(settings(), name="bank")
    one = Throttles(engine)
    try:
        await one.look()
        for _ in range(3):
            await one.took({("topic", "scans"): 20})
        assert one.left("topic", "scans") > 0, "it keeps to the rate by itself"
    finally:
        await engine.dispose()
    (told,) = [each for each in caplog.records if "throttled" in each.message]
    assert told.message.startswith("topic scans is throttled in each process by itself: Check")


@pytest.mark.parametrize("partitions", [1, 8])
async def test_a_throttled_topic_is_read_at_its_rate(
    bank: Bank,
    new_topic: NewTopic,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    running: Running,
    partitions: int,
) -> None:
    topic = await new_topic(partitions)
    Bank(topic, bank.balances, bank.name, handlers=bank.handlers)
    await slow_down(db, "topic", topic)
    # All of them are there when it begins: each reader has as much as it may take.
    for number in range(NUMBER):
        place = number % partitions
        await Deposit(number, f"of {place}", partition=place).send(producer, topic)
    async with running(bank.service) as health:
        await eventually(knows(health, f"topic {topic} at 20/s"))
        others = range(NUMBER, NUMBER + 5)
        await send(producer, bank.deposits, others)
        await eventually(position_reaches(db, bank.deposits, 5))
        count = "SELECT count(*) = $1 FROM pipeline.inbox"
        await eventually(lambda: db.fetchval(count, NUMBER + 5))
        assert await seconds_of(db, topic) >= AT_LEAST
        assert not health.reasons
        await resume(db, "topic", topic)
    expected = {f"of {n}": [*range(n, NUMBER, partitions)] for n in range(partitions)}
    assert await histories(db) == expected | {"ada": [*others]}
    actions = [row["action"] for row in await db.fetch(_AUDIT)]
    assert actions == ["throttle to 20/s", "resume"]


async def test_a_throttled_consumer_of_two_uses_the_backlog_at_its_rate(
    bank: Bank,
    heard: list[int],
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    running: Running,
) -> None:
    await slow_down(db, "consumer", "deposit")
    async with running(bank.service) as health:
        await eventually(knows(health, "consumer deposit at 20/s"))
        await send(producer, bank.deposits, range(NUMBER))
        await eventually(position_reaches(db, bank.deposits, NUMBER))
        assert {*heard} == {*range(NUMBER)}
        await eventually(lambda: db.fetchval("SELECT count(*) = 0 FROM pipeline.backlog"))
        assert await seconds_of(db, bank.deposits) >= AT_LEAST
    assert await histories(db) == {"ada": [*range(NUMBER)]}


async def test_a_deferred_consumer_is_called_at_its_rate_and_stored_at_once(
    bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection, running: Running
) -> None:
    later = Bank(bank.deposits, bank.balances, bank.name, options={"mode": "deferred"})
    await slow_down(db, "consumer", "deposit", 0.001)
    async with running(later.service) as health:
        await send(producer, bank.deposits, range(30))
        await eventually(position_reaches(db, bank.deposits, 30))
        await eventually(lambda: later.calls == [0])
        await pause(db, "consumer", "deposit")
        await eventually(knows(health, "consumer deposit"))
        await send(producer, bank.deposits, range(30, 40))
        await resume(db, "consumer", "deposit")
        await eventually(lambda: db.fetchval("SELECT count(*) = 40 FROM pipeline.inbox"))
        await eventually(lambda: db.fetchval("SELECT count(*) = 0 FROM pipeline.backlog"))
    assert await histories(db) == {"ada": [*range(40)]}


async def test_a_partition_does_not_rest_in_the_turn_for_which_others_wait(
    bank: Bank, new_topic: NewTopic, db: asyncpg.Connection, kafka: str, running: Running
) -> None:
    slow = Bank(
        *(await new_topic(3), bank.balances, bank.name),
        handlers=bank.handlers,
        options={"timeout": 60},
    )
    await slow_down(db, "topic", slow.deposits, 0.001)
    several = [large(n, 0.7, account="ada", partition=0) for n in (1, 2, 3)]
    await send_batch(kafka, slow.deposits, *several, codec="gzip")
    async with running(bank.service, batch_size=1, **SHARE) as health:
        await eventually(position_reaches(db, slow.deposits, 1))
        one = large(4, 2, account="bob", partition=0)
        await send_batch(kafka, bank.deposits, one, codec="gzip")
        await eventually(position_reaches(db, bank.deposits, 1))
        assert await position_of(db, slow.deposits) == 1
        await eventually(lambda: not health.reasons)
    assert await histories(db) == {"ada": [1], "bob": [4]}


async def test_the_events_of_a_throttled_topic_are_published_at_its_rate(
    bank: Bank,
    new_topic: NewTopic,
    db: asyncpg.Connection,
    kafka: str,
    running: Running,
) -> None:
    there = await new_topic()
    await slow_down(db, "events", bank.balances)
    async with (
        running(bank.service, Part.RELAY) as health,
        following(kafka, there) as others,
        following(kafka, bank.balances) as slow,
    ):
        await eventually(knows(health, f"events {bank.balances} at 20/s"))
        some = range(NUMBER)
        await stage(db, [*numbered(bank.balances, some), *numbered(there, some)])
        await others.until_ids(some)
        await slow.until_ids(some)
    sent = [one.timestamp / 1e3 for one in slow.records]
    assert max(sent) - min(sent) >= AT_LEAST
    assert slow.first_ids() == {b"ada": [str(n) for n in some]}


async def test_a_key_is_not_throttled_and_a_rate_is_a_positive_number(
    command: Command, bank: Bank, db: asyncpg.Connection
) -> None:
    because = "--because", "a slow disk", "--yes"
    for wrong in (("key", "ada", "20"), ("topic", bank.deposits, "0"), ("topic", bank.deposits)):
        assert (await command("throttle", *wrong, *because)).exit_code == 2
    assert await stopping.listed(db, 10) == []
    done = await command("throttle", "consumer", "deposit", "0.5", *because)
    assert done.exit_code == 0, done.output
    assert "consumer deposit is throttled to 0.5/s" in done.stdout
    screen = (await command("status")).stdout
    assert "consumer deposit throttled to 0.5/s, " in screen
