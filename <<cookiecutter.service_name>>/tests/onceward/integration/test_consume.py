"""What the consume transaction does to a message."""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward import (
    Event,
    Handlers,
    Policy,
    Service,
    Tombstone,
    Transaction,
)
from onceward.apply.positions import Slot
from onceward.events.event import Unpublishable
from onceward.events.message import headers_of
from onceward.handlers.staging import Outbox
from onceward.operators import offsets
from onceward.operators.audit import Change
from onceward.plain import Header, PayloadFields, Plain, Position
from onceward.runtime import Part

from .bank import Bank
from .conftest import position_reaches
from tests.conftest import Records, Running
from tests.contract.bank import Account, Base, Deposit, Deposited, histories
from tests.servers.waiting import PATIENCE, eventually


async def balance(db: asyncpg.Connection, account: str = "ada") -> int | None:
    """Return what an account holds."""
    held: int | None = await db.fetchval("SELECT balance FROM account WHERE id = $1", account)
    return held


async def test_a_message_changes_its_row_is_remembered_and_causes_an_event(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    records: Records,
) -> None:
    await Deposit(5).send(producer, bank.deposits)
    await Deposit(7).send(producer, bank.deposits)
    async with running(bank.service):
        events = await records(bank.balances, 2)
    assert await balance(db) == 12
    assert await db.fetchval("SELECT version FROM account") == 2
    assert await db.fetchval("SELECT count(*) FROM pipeline.inbox") == 2
    headers = [dict(event.headers) for event in events]
    assert [one["ce_sequence"] for one in headers] == [b"%020d" % 1, b"%020d" % 2]
    assert [one["ce_source"] for one in headers] == [f"/{bank.name}".encode()] * 2
    assert [event.key for event in events] == [b"ada", b"ada"]


async def test_messages_that_go_well_are_no_lines_of_the_log(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    records: Records,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "onceward")
    async with running(bank.service):
        well = [Deposit(number) for number in range(1, 102)]
        for deposit in (well[0], Deposit(0, "bob", value=b"rubbish"), *well):
            await deposit.send(producer, bank.deposits)
        await records(bank.balances, 101)
    lines = [one for one in caplog.records if one.name.startswith("onceward")]
    assert len(lines) < 20
    assert [vars(one)["message_id"] for one in lines if "message_id" in vars(one)] == ["0"]


async def test_at_debug_level_each_message_is_logged_with_id_and_outcome(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    records: Records,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "onceward.apply.outcome")
    async with running(bank.service):
        for deposit in (Deposit(1), Deposit(1), Deposit(2)):
            await deposit.send(producer, bank.deposits)
        await records(bank.balances, 2)
    lines = [vars(one) for one in caplog.records if one.name == "onceward.apply.outcome"]
    assert sorted((one["offset"], one["message_id"], one["reason"]) for one in lines) == [
        (0, "1", "applied"),
        (1, "1", "duplicate"),
        (2, "2", "applied"),
    ]
    assert {(one["consumer"], one["key"]) for one in lines} == {("deposit", b"ada")}


async def test_a_failed_record_blocks_its_key_until_applied_in_order_after_repair(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    records: Records,
    caplog: pytest.LogCaptureFixture,
) -> None:
    at_once = {"policy": Policy(schedule=(0,), attempts=1_000)}
    bank = Bank(bank.deposits, bank.balances, bank.name, options=at_once, refused={3})
    for amount in (1, 2, 3, 4):
        await Deposit(amount).send(producer, bank.deposits)
    await Deposit(10, "bob").send(producer, bank.deposits)
    await Deposit(5).send(producer, bank.deposits)
    async with running(bank.service) as health:
        await eventually(position_reaches(db, bank.deposits, 6))
        await eventually(lambda: bank.calls.count(3) > 3)
        assert await histories(db) == {"ada": [1, 2], "bob": [10]}
        assert {4, 5}.isdisjoint(bank.calls)
        await eventually(lambda: health.is_ready)
        # Every line has all that is needed to find the record.
        lines = [line.__dict__ for line in caplog.records if line.name == "onceward.apply.outcome"]
        names = ("topic", "partition", "offset", "consumer", "message_id", "reason")
        assert {tuple(line[name] for name in names) for line in lines} == {
            (bank.deposits, 0, 2, "deposit", "3", "failed")
        }
        bank.refused = set()
        events = await records(bank.balances, 6)
    assert await histories(db) == {"ada": [1, 2, 3, 4, 5], "bob": [10]}
    amounts = [json.loads(event.value)["amount"] for event in events if event.key == b"ada"]
    assert amounts == [1, 2, 3, 4, 5]
    assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0


async def test_a_partition_that_stands_still_never_says_that_it_is_ready(
    bank: Bank, running: Running, producer: AIOKafkaProducer
) -> None:
    part = f"partition {bank.deposits}/0"
    bank.refused = {1}
    await Deposit(1).send(producer, bank.deposits)
    async with running(bank.service, Part.CONSUME, breaker_keys=1) as health:
        await eventually(lambda: "breaker open" in health.reasons.get(part, ""))
        seen = len(bank.calls)
        while len(bank.calls) < seen + 3:
            assert part in health.reasons
            await asyncio.sleep(0)
        bank.refused = set()
        await eventually(lambda: health.is_ready)


async def test_a_known_id_with_another_payload_is_reported_and_blocks_nothing(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await Deposit(1).send(producer, bank.deposits)
    async with running(bank.service, Part.CONSUME) as health:
        await eventually(position_reaches(db, bank.deposits, 1))
        for deposit in (Deposit(2), Deposit(100, id="1"), Deposit(3)):
            await deposit.send(producer, bank.deposits)
        await eventually(position_reaches(db, bank.deposits, 4))
        await eventually(lambda: health.is_ready)
    assert await histories(db) == {"ada": [1, 2, 3]}
    first = await db.fetchval("SELECT hash FROM pipeline.inbox WHERE id = '1'")
    (error,) = [line for line in caplog.records if line.name == "onceward.apply.outcome"]
    assert error.levelno == logging.ERROR
    assert (error.__dict__["offset"], error.__dict__["reason"]) == (2, "identity mismatch")
    hashes = re.findall(r"\b[0-9a-f]{32}\b", error.getMessage())
    assert len(set(hashes)) == 2
    assert first.hex() in hashes


@pytest.mark.parametrize(
    ("headers", "value", "reason"),
    [
        ([], b'{"account": "ada", "amount": 2}', "not CloudEvents"),
        ([("ce_id", b"2")], b"{}", "missing attribute"),
        (Deposit(2)._headers(), b'{"account": "ada"', "invalid payload"),
        (Deposit(2)._headers(), b'{"account": "ada", "amount": "much"}', "invalid payload"),
        ([("content-type", b"application/cloudevents+json")], b"[]", "invalid envelope"),
    ],
    ids=["no headers", "no source", "no JSON", "a wrong type", "a broken envelope"],
)
async def test_an_unreadable_record_is_kept_unchanged_and_passed(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    headers: list[tuple[str, bytes]],
    value: bytes,
    reason: str,
) -> None:
    """Trap 14."""
    await Deposit(1).send(producer, bank.deposits)
    await producer.send_and_wait(
        bank.deposits, value, key=b"\xff\x00", partition=0, headers=headers
    )
    await Deposit(3).send(producer, bank.deposits)
    for _ in range(2):
        await db.execute("UPDATE pipeline.position SET next_offset = 0")
        async with running(bank.service, Part.CONSUME) as health:
            await eventually(position_reaches(db, bank.deposits, 3))
            await eventually(lambda: health.is_ready)
    assert await histories(db) == {"ada": [1, 3]}
    (row,) = await db.fetch("SELECT * FROM pipeline.backlog")
    assert (row["topic"], row["partition"], row["offset"]) == (bank.deposits, 0, 1)
    assert (row["record_key"], row["value"]) == (b"\xff\x00", value)
    assert headers_of(row["headers"]) == headers
    assert row["reason"] == reason
    assert row["died_at"] is not None


async def test_a_person_can_pass_over_a_record_while_the_service_runs(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    bank.refused = {2}
    await Deposit(1).send(producer, bank.deposits)
    # The first failure opens the breaker: the partition waits before its record.
    async with running(bank.service, breaker_keys=1) as health:
        await eventually(position_reaches(db, bank.deposits, 1))
        await Deposit(2).send(producer, bank.deposits)
        await Deposit(3).send(producer, bank.deposits)
        await eventually(lambda: f"partition {bank.deposits}/0" in health.reasons)
        await offsets.seek(db, Slot(bank.name, bank.deposits, 0), 2, Change("ada", "seek"))
        await eventually(position_reaches(db, bank.deposits, 3))
        await eventually(lambda: health.is_ready)
    assert await histories(db) == {"ada": [1, 3]}


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_compressed_records_are_read(
    bank: Bank, running: Running, kafka: str, db: asyncpg.Connection, codec: str
) -> None:
    """Trap 33."""
    async with AIOKafkaProducer(bootstrap_servers=kafka, compression_type=codec) as producer:
        await Deposit(5).send(producer, bank.deposits)
    async with running(bank.service):
        await eventually(position_reaches(db, bank.deposits, 1))
    assert await histories(db) == {"ada": [5]}


async def test_types_that_nobody_takes_and_tombstones_are_passed(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    await Deposit(1).send(producer, bank.deposits)
    await Deposit(2, type="withdrawn").send(producer, bank.deposits)
    await producer.send_and_wait(bank.deposits, None, key=b"ada", partition=0)
    await Deposit(3).send(producer, bank.deposits)
    await Deposit(4, type="closed", value=b"not even JSON").send(producer, bank.deposits)
    async with running(bank.service, Part.CONSUME) as health:
        await eventually(position_reaches(db, bank.deposits, 5))
        await eventually(lambda: health.is_ready)
    assert await histories(db) == {"ada": [1, 3]}
    assert await db.fetchval("SELECT count(*) FROM pipeline.inbox") == 2


async def test_a_tombstone_goes_to_the_handler_that_asks_for_it_once(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    bank.handlers.topic(bank.deposits, codec=Plain("deletion", Position()))

    @bank.handlers.on(Tombstone, topic=bank.deposits, consumer="close", loads=Account.by("key"))
    async def close(event: Tombstone, tx: Transaction) -> None:
        assert tx.message.data is None
        account = await tx.load(Account, event.key)
        assert account is not None
        account.history += "-1,"

    await Deposit(1).send(producer, bank.deposits)
    await producer.send_and_wait(bank.deposits, None, key=b"ada", partition=0)
    await Deposit(2).send(producer, bank.deposits)
    async with running(bank.service, Part.CONSUME):
        await eventually(position_reaches(db, bank.deposits, 3))
    await db.execute("UPDATE pipeline.position SET next_offset = 0")
    async with running(bank.service, Part.CONSUME):
        await eventually(position_reaches(db, bank.deposits, 3))
    assert await histories(db) == {"ada": [1, -1, 2]}


async def test_structured_mode_and_binary_mode_give_the_same_event(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    envelope = {
        "specversion": "1.0",
        "id": "1",
        "source": "/tests",
        "type": "deposited",
        "datacontenttype": "application/json",
        "data": {"amount": 1, "account": "ada"},
    }
    structured = [("content-type", b"application/cloudevents+json; charset=UTF-8")]
    for id in ("1", "2"):
        value = json.dumps(envelope | {"id": id}).encode()
        await producer.send_and_wait(bank.deposits, value, partition=0, headers=structured)
    await Deposit(1).send(producer, bank.deposits)
    async with running(bank.service, Part.CONSUME):
        await eventually(position_reaches(db, bank.deposits, 3))
    assert await histories(db) == {"ada": [1, 1]}
    assert await db.fetchval("SELECT count(*) FROM pipeline.inbox") == 2


@pytest.mark.parametrize(
    ("identity", "applied"),
    [
        (Position(), [1, 1, 2, 2]),
        (Header("Message-Id"), [1, 2]),
        (PayloadFields("account", "amount"), [1, 2, 2]),
    ],
    ids=["position", "header", "fields"],
)
async def test_a_plain_topic_names_its_events_as_it_was_told(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    identity: Position | Header | PayloadFields,
    applied: list[int],
) -> None:
    bank.handlers.topic(bank.deposits, codec=Plain("deposited", identity))
    for amount, account, id in ((1, "ada", b"a"), (1, "ada", b"a"), (2, "ada", b"b")):
        value = json.dumps({"account": account, "amount": amount}).encode()
        await producer.send_and_wait(
            bank.deposits, value, partition=0, headers=[("message-id", id)]
        )
    # Written otherwise: to fields it is "2.0", another name; to the header the same one.
    again = b'{"account": "ada", "amount": 2}' if isinstance(identity, Header) else None
    await producer.send_and_wait(
        bank.deposits,
        again or b'{"account": "ada", "amount": 2.0}',
        partition=0,
        headers=[("message-id", b"b")],
    )
    async with running(bank.service, Part.CONSUME):
        await eventually(position_reaches(db, bank.deposits, 4))
        # A restart from the beginning makes no record a new event.
    await db.execute("UPDATE pipeline.position SET next_offset = 0")
    async with running(bank.service, Part.CONSUME):
        await eventually(position_reaches(db, bank.deposits, 4))
    assert await histories(db) == {"ada": applied}


async def test_killed_connections_are_survived_and_told_in_readiness(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    records: Records,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside, go_on = asyncio.Event(), asyncio.Event()

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="waiting", timeout=PATIENCE)
    async def waiting(event: Deposited, tx: Transaction) -> None:
        inside.set()
        await go_on.wait()

    told: list[str] = []
    part = f"partition {bank.deposits}/0"
    for amount in (1, 2, 3):
        await Deposit(amount).send(producer, bank.deposits)
    async with running(bank.service) as health:
        not_ready = health.not_ready

        def tell(of: str, reason: str) -> None:
            if of == part:
                told.append(reason)
            not_ready(of, reason)

        monkeypatch.setattr(health, "not_ready", tell)
        await inside.wait()
        await db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = $1",
            bank.name,
        )
        go_on.set()
        await eventually(position_reaches(db, bank.deposits, 3))
        await eventually(lambda: health.is_ready)
        events = await records(bank.balances, 3)
    assert told
    assert await histories(db) == {"ada": [1, 2, 3]}
    assert [json.loads(event.value)["amount"] for event in events] == [1, 2, 3]
    assert len({dict(event.headers)["ce_id"] for event in events}) == 3


async def test_an_event_of_the_maximum_size_is_accepted_by_kafka(
    new_topic: Callable[..., Awaitable[str]],
    running: Running,
    producer: AIOKafkaProducer,
    records: Records,
) -> None:
    """Trap 6: what staging lets pass the broker takes, with headers, key and trace context."""
    limit = 20_000
    deposits = await new_topic()
    told = await new_topic(**{"max.message.bytes": str(limit)})
    handlers = Handlers()
    sizes: list[int] = []
    own = {"tenant": "ü" * 100, "region": ""}

    class Told(
        Event,
        type="com.example.a.rather.long.name.of.an.event.type." + "x" * 200,
        topic=told,
    ):
        text: str

    @handlers.on(Deposited, topic=deposits, consumer="tell")
    async def tell(event: Deposited, tx: Transaction) -> None:
        fits, too_large = 0, limit
        while too_large - fits > 1:
            size = (fits + too_large) // 2
            try:
                Outbox(service.source, limit).stage(
                    Told(text="x" * size), id="0" * 32, key="k" * 500, sequence=1, headers=own
                )
                fits = size
            except Unpublishable:
                too_large = size
        sizes.append(fits)
        tx.publish(Told(text="x" * fits), key="k" * 500, headers=own)

    trace = (
        ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b9c7c989f97918e1-01"),
        ("tracestate", b"vendor=" + b"t" * 200),
        ("baggage", b"user=" + b"u" * 200),
    )
    service = Service(f"bank-{deposits[-8:]}", handlers=handlers, metadata=Base.metadata)
    await Deposit(1, headers=trace).send(producer, deposits)
    await Deposit(2).send(producer, deposits)
    async with running(service, max_event_bytes=limit):
        events = await records(told, 2)
    assert [len(json.loads(event.value)["text"]) for event in events] == sizes
    assert sizes[0] < sizes[1]
    assert sizes[1] > limit - 3_000
    traced, untraced = (dict(event.headers) for event in events)
    assert {"ce_id", "traceparent", "baggage"} <= traced.keys()
    for sent in (traced, untraced):
        assert (sent["tenant"], sent["region"]) == (("ü" * 100).encode(), b"")
