"""Relays that publish in Kafka transactions, so that one that was stopped can't send late."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import CoordinatorNotAvailableError

from onceward.relay.cursor import Cursor
from onceward.relay.publisher import Publisher
from onceward.relay.relay import Relay
from onceward.settings import Settings

from .outgoing import let_leases_end, numbered, relaying, shares, stage
from tests.servers.topics import following, id_of
from tests.servers.waiting import PATIENCE, eventually


class Stopped(Relay):
    """A relay that is stopped, as by SIGSTOP, between its look at the lease and its send."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_stopped = asyncio.Event()
        self.sleep_or_event = asyncio.Event()
        sleep_or_event, is_stopped = self.sleep_or_event, self.is_stopped

        class Late(Publisher):
            async def _new_producer(self, owner: str) -> AIOKafkaProducer:
                producer = await super()._new_producer(owner)
                send_batch = producer.send_batch

                async def late(*args: Any, **options: Any) -> Any:
                    is_stopped.set()
                    await sleep_or_event.wait()
                    return await send_batch(*args, **options)

                producer.send_batch = late
                return producer

        self._publisher = Late(self._settings, client_id="bank-relay", owner=self._cursor.owner)

        class Still(Cursor):
            async def extend(self, driver: asyncpg.Connection) -> list[int]:
                if is_stopped.is_set():
                    await sleep_or_event.wait()
                return await super().extend(driver)

        self._cursor = Still(self._settings, self._cursor.owner)


@pytest.mark.parametrize("transactional", [False, True])
async def test_what_a_stopped_relay_sends_late_is_refused_by_the_brokers(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    transactional: bool,
) -> None:
    """Trap 5, at the brokers; without transactions it arrives, as repeats with the same ids."""
    topic = await new_topic()
    chosen = settings(relay_lease=3, relay_transactional=transactional)
    await stage(db, numbered(topic, [1, 2, 3]))
    async with following(kafka, topic) as tail, relaying(chosen, Stopped) as stopped:
        assert isinstance(stopped.relay, Stopped)
        await asyncio.wait_for(stopped.relay.is_stopped.wait(), PATIENCE)
        async with relaying(chosen):
            await tail.until_ids([1, 2, 3])
            stopped.relay.sleep_or_event.set()
            await eventually(lambda: stopped.reason != "")
            await eventually(lambda: stopped.reason == "")
            await stage(db, numbered(topic, [4]))
            await tail.until_ids([4])
    assert tail.first_ids() == {b"ada": ["1", "2", "3", "4"]}
    twice = {} if transactional else {"1": 2, "2": 2, "3": 2}
    assert Counter(tail.ids) == {"1": 1, "2": 1, "3": 1, "4": 1} | twice


async def test_a_transaction_that_a_killed_relay_left_open_holds_up_nobody(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    """Its successor ends it; else the brokers would hide all later records for a minute."""
    topic = await new_topic()
    chosen = settings(relay_lease=1, relay_transactional=True, max_event_bytes=20_000)
    large = [one._replace(payload=b" " * 9_000 + b"{}") for one in numbered(topic, range(40))]
    await stage(db, large)
    sent = asyncio.Event()

    async def hang() -> None:
        sent.set()
        await asyncio.Event().wait()

    class Killed(Publisher):
        async def _new_producer(self, owner: str) -> AIOKafkaProducer:
            producer = await super()._new_producer(owner)
            producer.commit_transaction = hang
            return producer

    class KilledRelay(Relay):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            owner = self._cursor.owner
            self._publisher = Killed(self._settings, client_id="bank-relay", owner=owner)

    async with following(kafka, topic) as tail:
        async with relaying(chosen, KilledRelay) as killed:
            await asyncio.wait_for(sent.wait(), PATIENCE)
            await killed.kill()
        assert tail.ids == []
        await let_leases_end(db)
        async with relaying(chosen):
            await tail.until_ids(range(40))
        assert [id_of(record) for record in tail.records] == [str(n) for n in range(40)]


async def test_many_pages_in_transactions_of_their_own(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic(partitions=3)
    keys = [f"key-{n}" for n in range(9)]
    for key in keys:
        await stage(db, numbered(topic, [f"{key}/{n}" for n in range(50)], key))
    chosen = settings(relay_transactional=True, relay_batch_events=40)
    async with following(kafka, topic) as tail, relaying(chosen):
        await eventually(lambda: len(tail.records) == 450)
    assert tail.first_ids() == {key.encode(): [f"{key}/{n}" for n in range(50)] for key in keys}


async def test_a_relay_publishes_its_own_shards_while_another_cannot_be_fenced(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    """Only what the dead one held has to wait until the brokers answer for it."""

    class Unheard(Publisher):
        async def _new_producer(self, owner: str) -> AIOKafkaProducer:
            if owner != self._owner and not heard.is_set():
                raise CoordinatorNotAvailableError
            return await super()._new_producer(owner)

    class UnheardRelay(Relay):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            owner = self._cursor.owner
            self._publisher = Unheard(self._settings, client_id="bank-relay", owner=owner)

    heard = asyncio.Event()
    topic = await new_topic()
    chosen = settings(relay_transactional=True, relay_lease=1)

    async def both_have_half() -> bool:
        return await shares(db) == [32, 32]

    async with (
        following(kafka, topic) as tail,
        relaying(chosen) as dead,
        relaying(chosen, UnheardRelay) as living,
    ):
        await eventually(both_have_half)
        await dead.kill()
        for number in range(64):
            await stage(db, numbered(topic, [number], f"key-{number}"))
        rows = await db.fetch(
            "SELECT event_id FROM pipeline.outbox JOIN pipeline.outbox_cursor USING (shard)"
            " WHERE owner = $1",
            living.relay._cursor.owner,
        )
        await tail.until_ids(row["event_id"] for row in rows)
        await eventually(lambda: len(tail.ids) >= len(rows))
        heard.set()
        await tail.until_ids(range(64))
