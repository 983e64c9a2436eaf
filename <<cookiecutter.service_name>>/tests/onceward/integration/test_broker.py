"""What happens when a broker takes long, answers nothing, is away or moves: nothing is skipped."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward.relay import publisher
from onceward.servers.clients import KafkaProducer
from onceward.settings import Settings

from .bank import Bank
from .kafka_wire import Wire
from .outgoing import Running as Relaying
from .outgoing import all_is_written, event, relaying, stage, waiting
from tests.conftest import Running
from tests.contract.bank import Deposit, histories
from tests.servers.proxy import proxy
from tests.servers.topics import Tail, following, id_of
from tests.servers.waiting import eventually

NewTopic = Callable[..., Awaitable[str]]
NewSettings = Callable[..., Settings]

KEYS = ["ada", "bob", "eve"]
STRIKES: dict[str, Callable[[Wire], None]] = {
    "records do not get through": Wire.hold,
    "answers are lost": Wire.lose_answers,
    "answers are lost after the second": partial(Wire.lose_answers, after=2),
    "the broker is away": Wire.shut,
    "the partitions have no leader": Wire.take_leaders,
}
TOLD = dict.fromkeys(STRIKES, "waits for Kafka") | {"the partitions have no leader": "events wait"}


@pytest.fixture
async def wire(kafka: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Wire]:
    """Return a wire to Kafka, and let producers wait for no answer longer than a second."""
    impatient = partial(KafkaProducer, request_timeout_ms=1_000)
    monkeypatch.setattr(publisher, "KafkaProducer", impatient)
    async with Wire(kafka).listening() as one:
        yield one


async def stage_numbers(db: asyncpg.Connection, topic: str, numbers: range) -> None:
    """Commit events of three keys by turns, a few in each transaction, that fill a batch by two."""
    for start in range(numbers.start, numbers.stop, 5):
        some = range(start, min(start + 5, numbers.stop))
        await stage(
            db, [event(topic, n, KEYS[n % 3], payload=b"%d" % n + b" " * 400) for n in some]
        )


def in_order(count: int) -> dict[bytes, list[str]]:
    """Return the ids of each key in the order in which they must appear."""
    return {key.encode(): [str(n) for n in range(i, count, 3)] for i, key in enumerate(KEYS)}


async def passed(db: asyncpg.Connection) -> set[str]:
    """Return the ids of the events that the cursor in the database is past."""
    rows = await db.fetch(
        "SELECT event_id FROM pipeline.outbox JOIN pipeline.outbox_cursor USING (shard)"
        " WHERE pg_visible_in_snapshot(xid, seen)"
        "    OR (pg_visible_in_snapshot(xid, target) AND id <= last_id)"
    )
    return {row["event_id"] for row in rows}


def told(one: Relaying) -> str:
    """Return why the relay, or a topic of it, is not ready."""
    return "; ".join(one.health.reasons.values())


def repeats_are_equal(tail: Tail) -> bool:
    """Whether all records of one id have the same key, value and headers."""
    return len({(one.key, one.value, one.headers) for one in tail.records}) == len(
        {id_of(one) for one in tail.records}
    )


@pytest.mark.parametrize("strike", STRIKES)
async def test_unacknowledged_events_are_sent_again_in_key_order(
    settings: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    wire: Wire,
    strike: str,
) -> None:
    """Traps 6, 7 and 23."""
    topic = await new_topic(2)
    chosen = settings(
        kafka_bootstrap_servers=wire.address,
        relay_batch_events=20,
        relay_lease=1,
        relay_topic_pause=0.1,
        max_event_bytes=1_000,
    )
    async with following(kafka, topic) as tail, relaying(chosen) as one:
        await stage_numbers(db, topic, range(40))
        await tail.until_ids(range(40))
        await eventually(lambda: all_is_written(db))
        STRIKES[strike](wire)
        await stage_numbers(db, topic, range(40, 100))
        await eventually(lambda: TOLD[strike] in told(one))
        await stage_numbers(db, topic, range(100, 140))
        assert await passed(db) <= {*tail.ids, *await waiting(db)}
        wire.go_on()
        await tail.until_ids(range(140))
        await eventually(lambda: all_is_written(db))
        await eventually(lambda: one.health.is_ready)
    assert tail.first_ids() == in_order(140)
    assert repeats_are_equal(tail)


async def test_a_broker_that_fails_again_and_again_loses_and_reorders_nothing(
    settings: NewSettings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic, wire: Wire
) -> None:
    """Traps 7 and 23."""
    topic = await new_topic(2)
    chosen = settings(
        kafka_bootstrap_servers=wire.address,
        relay_batch_events=7,
        relay_lease=1,
        relay_topic_pause=0.1,
        max_event_bytes=1_000,
    )
    strikes = list(STRIKES) * 2
    async with following(kafka, topic) as tail, relaying(chosen) as one:
        for number, strike in enumerate(strikes):
            STRIKES[strike](wire)
            await stage_numbers(db, topic, range(50 * number, 50 * number + 50))
            await eventually(lambda strike=strike: TOLD[strike] in told(one))  # type: ignore[misc]
            wire.go_on()
            # Not for all of them: what is left is struck again.
            await eventually(lambda: one.health.is_ready)
        await tail.until_ids(range(50 * len(strikes)))
    assert tail.first_ids() == in_order(50 * len(strikes))
    assert repeats_are_equal(tail)


async def test_no_transaction_is_open_while_the_broker_is_waited_for(
    settings: NewSettings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic, wire: Wire
) -> None:
    """Trap 21."""
    topic = await new_topic()
    chosen = settings(kafka_bootstrap_servers=wire.address, relay_lease=1)
    states: set[str] = set()

    async def lease() -> object:
        states.update(
            row["state"]
            for row in await db.fetch(
                "SELECT state FROM pg_stat_activity"
                " WHERE application_name = 'bank' AND datname = current_database()"
            )
        )
        return await db.fetchval("SELECT max(lease_until) FROM pipeline.outbox_relay")

    async def is_extended(before: object) -> bool:
        return await lease() != before

    wire.hold()
    await stage_numbers(db, topic, range(10))
    async with following(kafka, topic) as tail, relaying(chosen):
        await eventually(lambda: wire.held > 0)
        for _ in range(3):
            before = await lease()
            await eventually(lambda before=before: is_extended(before))  # type: ignore[misc]
        wire.go_on()
        await tail.until_ids(range(10))
    assert states <= {"idle", "active"}


async def test_moved_brokers_are_found_again_by_the_bootstrap_address(
    running: Running,
    db: asyncpg.Connection,
    kafka: str,
    producer: AIOKafkaProducer,
    new_topic: NewTopic,
    unused_tcp_port: int,
) -> None:
    """As where a cluster is replaced behind one name; by the consumer and by the relay."""
    bank = Bank(await new_topic(), await new_topic(), "bank")

    async def is_applied_and_published(*amounts: int) -> bool:
        published = sum(len(ids) for ids in tail.first_ids().values())
        return await histories(db) == {"ada": [*amounts]} and published == len(amounts)

    def bootstrap(wire: Wire) -> AbstractAsyncContextManager[int]:
        host, _, port = wire.address.rpartition(":")
        return proxy(host, int(port), listen=unused_tcp_port)

    async with (
        Wire(kafka).listening() as old,
        Wire(kafka).listening() as new,
        following(kafka, bank.balances) as tail,
        AsyncExitStack() as first,
    ):
        await first.enter_async_context(bootstrap(old))
        address = f"127.0.0.1:{unused_tcp_port}"
        async with running(bank.service, kafka_bootstrap_servers=address):
            await Deposit(1).send(producer, bank.deposits)
            await eventually(lambda: is_applied_and_published(1))
            old.shut()
            await first.aclose()
            async with bootstrap(new):
                await Deposit(2).send(producer, bank.deposits)
                await eventually(lambda: is_applied_and_published(1, 2))


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (26, "InvalidSessionTimeoutError"),
        (30, "GroupAuthorizationFailedError"),
        (81, "GroupIsFullError"),
    ],
)
async def test_a_rejected_group_member_says_why_and_joins_once_accepted(
    running: Running,
    db: asyncpg.Connection,
    wire: Wire,
    producer: AIOKafkaProducer,
    new_topic: NewTopic,
    code: int,
    name: str,
) -> None:
    bank = Bank(await new_topic(), await new_topic(), "bank")
    wire.refuse_members(code)
    async with running(bank.service, kafka_bootstrap_servers=wire.address) as health:
        await Deposit(1).send(producer, bank.deposits)
        await eventually(lambda: name in health.reasons.get("consumer", ""))
        wire.go_on()
        await eventually(lambda: health.is_ready)
        await eventually(lambda: applied(db))


async def test_a_group_that_may_not_be_described_is_reported_once_and_read(
    running: Running,
    db: asyncpg.Connection,
    wire: Wire,
    producer: AIOKafkaProducer,
    new_topic: NewTopic,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "onceward.consume.consumer")
    bank = Bank(await new_topic(), await new_topic(), "bank")
    wire.refuse_descriptions(30)
    async with running(bank.service, kafka_bootstrap_servers=wire.address) as health:
        await Deposit(1).send(producer, bank.deposits)
        await eventually(lambda: "the ACL Read on the group" in caplog.text)
        await eventually(lambda: applied(db))
        await eventually(lambda: health.is_ready)
    assert caplog.text.count("go unnoticed") == 1


async def applied(db: asyncpg.Connection) -> bool:
    """Whether the deposit is applied."""
    return await histories(db) == {"ada": [1]}
