"""Topics with codecs of their own: read, published, retried, and while a codec can't work."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward import (
    CloudEvents,
    Codec,
    Event,
    Handlers,
    Message,
    Service,
    Transaction,
)
from onceward.apply.backlog import lane_of
from onceward.apply.item import StoredRecord, order_key
from onceward.apply.writer import Writing
from onceward.errors import StoreUnavailable
from onceward.events.codec import Encoded, Outgoing
from onceward.events.event import declared_events
from onceward.events.message import Reason, Record, Undecodable
from onceward.plain import Header, PayloadFields, Plain, Position
from onceward.runtime import Part
from onceward.service import Misconfigured
from onceward.settings import Settings
from onceward.testing import Harness, Sent
from onceward.testing.databases import Migrate

from .applier import Applier, NewApplier
from .bank import Bank
from .conftest import position_reaches
from tests.conftest import Records, Refusing, Running
from tests.contract.bank import Account, Base, Deposit, Deposited
from tests.servers import databases
from tests.servers.databases import migrations_of_the_engine
from tests.servers.waiting import eventually

HEX = "application/x-hex"


@dataclass
class Hex(Codec):
    """Writes JSON in hexadecimal digits, and reads it with what it has to fetch first."""

    unavailable: bool = False
    read: list[int] = field(default_factory=list)
    is_ready: bool = False
    asked: int = 0
    topics: set[str] = field(default_factory=set)

    async def open(self, topic: str, events: Sequence[type[Event]]) -> None:
        self._ask()

    async def prepare(self, records: Sequence[Record]) -> None:
        self.topics |= {one.topic for one in records}
        if not self.is_ready:
            self._ask()
            self.is_ready = True

    def _ask(self) -> None:
        self.asked += 1
        if self.unavailable:
            raise StoreUnavailable("registry at http://localhost: no answer")

    def decode(self, record: Record, *, hash: bytes | None = None) -> Message:
        self.read.append(record.offset)
        if not self.is_ready:
            raise Undecodable(Reason.INVALID_ENVELOPE, "it is read without what it needs")
        value = None if record.value is None else bytes.fromhex(record.value.decode())
        headers = [pair for pair in record.headers if pair[0] != "content-type"]
        place = record.topic, record.partition, record.offset, record.timestamp, record.key
        return CloudEvents().decode(StoredRecord(*place, value, headers, 0.0), hash=hash)

    def encode(self, event: Outgoing) -> Encoded:
        return Encoded((event.payload or b"").hex().encode(), HEX)


def written(amount: int, account: str = "ada") -> Deposit:
    """Return a deposit as `Hex` writes it."""
    value = json.dumps({"account": account, "amount": amount}).encode().hex().encode()
    return Deposit(amount, account=account, value=value)


async def test_what_needs_a_schema_waits_for_it_and_spends_no_attempt(
    new_applier: NewApplier,
) -> None:
    bank = Bank(deposits="hex", balances="balances", name="bank")
    codec = Hex()
    bank.handlers.topic("hex", codec=codec)
    applier = await new_applier(bank.handlers, topic="hex", retry_pause=0.01)
    bank.refused = {1}
    await applier.apply(written(1), written(2))
    assert [(row["reason"], row["attempts"]) for row in await applier.backlog()] == [
        ("failed", 1),
        ("follows another", 0),
    ]
    bank.refused.clear()
    codec.unavailable, codec.is_ready = True, False
    await applier.make_due()
    before = await applier.backlog()

    for _ in range(3):
        assert await applier.lanes.work_off()

    assert applier.health.reasons == {"backlog": "registry at http://localhost: no answer"}
    assert await applier.backlog() == before
    assert bank.calls == [1]
    codec.unavailable = False
    await applier.work_off()
    assert bank.calls == [1, 1, 2]
    assert await applier.backlog() == []


@pytest.mark.parametrize("batch_size", [1, 3_000])
async def test_other_topics_of_a_lane_go_on_while_a_codec_waits(
    new_applier: NewApplier, db: asyncpg.Connection, batch_size: int
) -> None:
    bank = Bank(deposits="hex", balances="balances", name="bank")
    calls: list[str] = []

    @bank.handlers.on(Deposited, topic="json", consumer="deposit")
    async def note(event: Deposited, tx: Transaction) -> None:
        calls.append(event.account)
        if len(calls) < 2:
            raise RuntimeError("not yet")

    codec = Hex()
    bank.handlers.topic("hex", codec=codec)
    applier = await new_applier(bank.handlers, topic="hex", retry_pause=0.01, batch_size=batch_size)
    other = await new_applier(bank.handlers, topic="json", retry_pause=0.01)

    def lane(account: str, topic: str) -> int:
        record = StoredRecord(topic, 0, 0, 0, account.encode(), b"", (), 0.0)
        return lane_of(order_key("deposit", record), "immediate")

    same = next(n for n in map(str, range(1_000)) if lane(n, "json") == lane("ada", "hex"))
    bank.refused = {1}
    await applier.apply(written(1))
    await other.apply(Deposit(2, account=same))
    bank.refused.clear()
    codec.unavailable, codec.is_ready = True, False
    await applier.make_due()
    async with applier.engine.begin() as connection:  # its row is read first
        await connection.exec_driver_sql(
            "UPDATE pipeline.backlog SET due_at = due_at - interval '1 s' WHERE topic = 'hex'"
        )

    assert await applier.lanes.work_off()

    assert calls == [same, same]
    assert await applier.park() == {("deposit", 0): "failed"}
    codec.unavailable = False
    await applier.work_off()
    assert await applier.backlog() == []
    assert bank.calls == [1, 1]


async def test_a_partition_waits_for_what_its_codec_needs_and_others_go_on(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    codec = Hex()
    bank.handlers.topic(bank.deposits, codec=codec)

    @bank.handlers.on(Deposited, topic=bank.balances, consumer="other")
    async def note(event: Deposited, tx: Transaction) -> None: ...

    await written(1).send(producer, bank.deposits)
    await Deposit(2).send(producer, bank.balances)
    async with running(bank.service, Part.CONSUME) as health:
        await eventually(position_reaches(db, bank.deposits, 1))
        await eventually(position_reaches(db, bank.balances, 1))
        codec.unavailable, codec.is_ready = True, False
        asked = codec.asked
        await written(3).send(producer, bank.deposits)
        await Deposit(4).send(producer, bank.balances)
        await eventually(lambda: codec.asked > asked + 1)
        await eventually(position_reaches(db, bank.balances, 2))
        (reason,) = health.reasons.values()
        assert reason == "registry at http://localhost: no answer"
        assert bank.calls == [1]
        codec.unavailable = False
        await eventually(position_reaches(db, bank.deposits, 2))
        await eventually(lambda: health.is_ready)
    assert bank.calls == [1, 3]
    assert codec.topics == {bank.deposits}
    assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0


async def test_work_without_encoding_is_done_while_the_codec_is_unavailable(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    codec = Hex(unavailable=True)
    bank.handlers.topic(bank.balances, codec=codec)

    @bank.handlers.on(Deposited, topic=bank.balances, consumer="other")
    async def note(event: Deposited, tx: Transaction) -> None: ...

    await written(2).send(producer, bank.balances)
    codec.is_ready = True
    for amount in (1, 3):
        await Deposit(amount).send(producer, bank.deposits)
    async with running(bank.service, Part.CONSUME) as health:
        await eventually(position_reaches(db, bank.balances, 1))
        await eventually(lambda: len(bank.calls) > 2)
        assert health.reasons["codecs"] == "registry at http://localhost: no answer"
    # It has ended without an error while the codec was unavailable.
    assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0
    async with running(bank.service, Part.CONSUME) as health:
        codec.unavailable = False
        await eventually(position_reaches(db, bank.deposits, 2))
        await eventually(lambda: health.is_ready)
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox") == 2
    assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0


async def test_a_record_that_kills_when_it_is_decoded_is_parked_undecoded(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    codec = Hex()
    bank.handlers.topic(bank.deposits, codec=codec)
    await written(1).send(producer, bank.deposits)
    async with running(bank.service, Part.CONSUME):
        await eventually(position_reaches(db, bank.deposits, 1))
    codec.read.clear()
    for amount in (2, 3, 4):
        await written(amount).send(producer, bank.deposits)
    # Processes have died over the batch, then over its first record alone.
    await db.execute("UPDATE pipeline.position SET starts = 2 WHERE topic = $1", bank.deposits)
    async with running(bank.service, Part.CONSUME, unclean_starts=1):
        await eventually(position_reaches(db, bank.deposits, 4))
        await eventually(lambda: bank.calls == [1, 3, 4])
    assert 1 not in codec.read
    (row,) = await db.fetch("SELECT * FROM pipeline.backlog")
    assert (row["reason"], row["offset"], row["consumer"]) == ("process died", 1, "")


async def test_a_row_that_kills_when_it_is_decoded_dies_undecoded(new_applier: NewApplier) -> None:
    bank = Bank(deposits="hex", balances="balances", name="bank")
    codec = Hex()
    bank.handlers.topic("hex", codec=codec)
    applier = await new_applier(bank.handlers, topic="hex", retry_pause=0.01)
    bank.refused = {1}
    await applier.apply(written(1), written(2))
    bank.refused.clear()
    codec.read.clear()
    async with applier.engine.begin() as connection:
        await connection.exec_driver_sql(
            "UPDATE pipeline.backlog SET deaths = 2, attempts = 6, due_at = now()"
            ' WHERE "offset" = 0'
        )
    await applier.work_off()
    assert codec.read == [1]
    assert bank.calls == [1, 2]
    (row,) = await applier.backlog()
    assert (row["reason"], row["attempts"]) == ("attempts used up", 6)


async def test_an_attempt_is_counted_before_a_suspect_is_decoded(new_applier: NewApplier) -> None:
    bank = Bank(deposits="hex", balances="balances", name="bank")
    attempts: list[tuple[str, int]] = []

    class Watched(Hex):
        async def prepare(self, records: Sequence[Record]) -> None:
            attempts.extend((row["reason"], row["attempts"]) for row in await applier.backlog())
            await super().prepare(records)

    bank.handlers.topic("hex", codec=Watched())
    applier = await new_applier(bank.handlers, topic="hex", retry_pause=0.01)
    bank.refused = {1}
    await applier.apply(written(1))
    bank.refused.clear()
    async with applier.engine.begin() as connection:
        await connection.exec_driver_sql(
            "UPDATE pipeline.backlog SET reason = 'process died', due_at = now()"
        )
    await applier.work_off()
    assert attempts == [("process died", 2)]
    assert bank.calls == [1, 1]
    assert await applier.backlog() == []


async def test_a_writer_waits_for_the_codec_of_what_it_publishes(
    bank: Bank, settings: Callable[..., Settings]
) -> None:
    codec = Hex(unavailable=True)
    bank.handlers.topic(bank.balances, codec=codec)
    (changed,) = (one for one in declared_events() if one.__event_topic__ == bank.balances)

    async def publish(writing: Writing) -> None:
        writing.publish(changed(account="ada", balance=1, amount=1))

    async with bank.service.writer(settings()) as writer:
        with pytest.raises(StoreUnavailable, match="no answer"):
            await writer.write(publish)
        codec.unavailable = False
        await eventually(lambda: not bank.handlers.closed)
        await writer.write(publish)


@pytest.mark.parametrize("form", ["hex", "plain"])
async def test_events_travel_in_the_form_of_their_topic(
    bank: Bank, running: Running, producer: AIOKafkaProducer, records: Records, form: str
) -> None:
    plain = Plain(
        Header("eventType"),
        PayloadFields("id"),
        data="payload",
        types={"Changed": "balance.changed"},
    )
    bank.handlers.topic(bank.balances, codec=Hex() if form == "hex" else plain)
    await Deposit(1).send(producer, bank.deposits)
    async with running(bank.service):
        (record,) = await records(bank.balances, 1)
    headers = dict(record.headers)
    data = {"account": "ada", "balance": 1, "amount": 1}
    assert record.key == b"ada"
    if form == "hex":
        assert json.loads(bytes.fromhex(record.value.decode())) == data
        assert headers["content-type"] == HEX.encode()
        assert (headers["ce_type"], headers["ce_sequence"]) == (b"balance.changed", b"%020d" % 1)
    else:
        assert {*headers} - {"traceparent"} == {"content-type", "eventType"}
        assert headers["eventType"] == b"Changed"
        value = json.loads(record.value)
        assert value["payload"] == data
        assert len(value["id"]) == 32


async def test_a_service_that_could_not_read_what_it_publishes_does_not_start(
    bank: Bank, settings: Callable[..., Settings], refusing: Refusing
) -> None:
    bank.handlers.topic(bank.balances, codec=Plain("another", Position()))
    text = f"topic '{bank.balances}': 'balance.changed' can't be published .* read as 'another'"
    with pytest.raises(Misconfigured, match=text):
        async with bank.service.writer(settings()):
            pass
    with pytest.raises(Misconfigured, match=text):
        await refusing(bank.service, Part.CONSUME)


async def test_a_redriven_record_is_read_by_the_codec_of_today(
    ledger: tuple[Bank, Applier],
) -> None:
    bank, applier = ledger
    await applier.apply(written(1))
    assert await applier.park() == {("deposit", 0): "invalid payload"}
    bank.handlers.topic(bank.deposits, codec=Hex())
    async with applier.engine.begin() as connection:
        await connection.exec_driver_sql(
            "UPDATE pipeline.backlog SET died_at = NULL, due_at = now()"
        )
    await applier.work_off()
    assert bank.calls == [1]
    assert await applier.backlog() == []


class Shipped(Event, type="codec.shipped", topic="shipments"):
    """An account was paid out."""

    account: str


handlers = Handlers()
handlers.topic("deposits", codec=Plain("deposited", PayloadFields("id"), data="deposit"))
handlers.topic("shipments", codec=Plain(Header("type"), Header("id")))


@handlers.on(Deposited, topic="deposits", consumer="ship", loads=Account.by("account"))
async def ship(event: Deposited, tx: Transaction) -> None:
    account = await tx.load_or_create(Account, event.account)
    account.balance += event.amount
    tx.publish(Shipped(account=event.account), of=account)


@handlers.on(Deposited, topic="by-position", consumer="count", loads=Account.by("account"))
async def count(event: Deposited, tx: Transaction) -> None:
    account = await tx.load_or_create(Account, event.account)
    account.balance += event.amount


handlers.topic("by-position", codec=Plain("deposited", Position()))


@pytest.fixture(scope="session")
def harness_service() -> Service:
    return Service("bank", handlers, Base.metadata, package=__package__)


@pytest.fixture(scope="session")
def harness_migrate() -> Migrate:
    return lambda url: databases.build(url, migrations_of_the_engine(), Base.metadata)


async def test_the_kit_sends_and_reads_events_in_the_form_of_their_topic(harness: Harness) -> None:
    event = Deposited(account="ada", amount=5)

    outcome = await harness.handle(event, topic="deposits", id="7")

    assert outcome.applied == ["ship"]
    assert outcome.published == [Shipped(account="ada")]
    assert (await harness.handle(event, topic="deposits", id="7")).is_duplicate
    raw = b'{"id": "7", "deposit": {"account": "ada", "amount": 5, "failures": 0}}'
    assert (await harness.handle_record("deposits", raw, key=b"ada")).is_duplicate
    other = Deposited(account="ada", amount=6)
    (failure,) = (await harness.handle(other, topic="deposits", id="7")).failures
    assert failure.reason == "identity mismatch"


@pytest.mark.parametrize(("topic", "expected"), [("deposits", {3}), ("by-position", {3, 9})])
async def test_the_kit_explores_topics_without_cloudevents(
    harness: Harness, topic: str, expected: set[int]
) -> None:
    sent = [Sent(Deposited(account="ada", amount=n), topic=topic) for n in (1, 2)]
    found: set[int] = set()

    async def note(harness: Harness) -> None:
        found.add((await harness.get(Account, "ada")).balance)

    assert await harness.explore(sent, invariant=note) == 7
    # By its position every record is an event of its own, repeated ones too.
    assert found == expected
