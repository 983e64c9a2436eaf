"""The ledger: what was sent to the bank, and the check that exactly this has come of it."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import asyncpg
from aiokafka import AIOKafkaProducer, ConsumerRecord

from .bank import Deposit, histories
from tests.servers.topics import Tail, id_of, records_in
from tests.servers.waiting import eventually

ACCOUNTS = 12
PORTION = 40
"""Deposits that traffic sends at a time."""
AHEAD = 3 * PORTION
"""Deposits that traffic is ahead of what is published, at most."""


@dataclass
class Ledger:
    """A bank's topics and tables, seen from outside. Every amount is sent as one deposit only."""

    name: str
    """The bank's, and that of its consumer group."""
    deposits: str
    balances: str
    kafka: str
    db: asyncpg.Connection
    producer: AIOKafkaProducer
    published: Tail
    """What the bank has published until now, repeats too."""
    amount: int = 0
    """The last one sent."""

    async def send(self, *deposits: Deposit) -> None:
        """Send these deposits in this order."""
        # Those of a partition wait in the producer in the order of these calls.
        await asyncio.gather(*(one.send(self.producer, self.deposits) for one in deposits))
        self.amount = max(self.amount, *(one.amount for one in deposits))

    async def send_portion(self, count: int = PORTION, *, failing: bool = True) -> None:
        """Send deposits for all accounts. One in ten comes twice, one in forty fails at first."""
        portion = []
        for amount in range(self.amount + 1, self.amount + 1 + count):
            account, failures = f"account-{amount % ACCOUNTS}", int(failing and amount % 40 == 7)
            one = Deposit(amount, account, partition=None, failures=failures)
            portion += [one, one] if amount % 10 == 0 else [one]
        await self.send(*portion)

    @asynccontextmanager
    async def traffic(self, *, failing: bool = True) -> AsyncIterator[None]:
        """Send deposits as long as the block lasts, then wait for the last, and check."""
        ending = False

        async def go_on() -> None:
            while not ending:
                await self.send_portion(failing=failing)
                await eventually(lambda: len(self.published.records) > self.amount - AHEAD)

        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(go_on())
            try:
                yield
            except BaseException:
                sending.cancel()
                raise
            ending = True
        await self.check()

    async def progresses(self, events: int = 2 * PORTION) -> None:
        """Wait until so many more events have been published."""
        enough = len(self.published.records) + events
        await self.published.until(lambda: len(self.published.records) >= enough)

    async def check(self) -> None:
        """Wait until every deposit has had its effect; then compare what was sent with that.

        Nothing is lost, doubled or reordered if the topic of deposits, the tables and the topic
        of balances agree.
        """
        await eventually(self.has_published_all)
        sent = _by_account(await records_in(self.kafka, self.deposits))
        amounts = {account: [one["amount"] for one in all_of] for account, all_of in sent.items()}
        assert await histories(self.db) == amounts, "in the tables, in the order of the topic"
        published = _by_account(await records_in(self.kafka, self.balances))
        balances = {
            account: [one["balance"] for one in all_of] for account, all_of in published.items()
        }
        sums = {account: list(accumulate(all_of)) for account, all_of in amounts.items()}
        assert balances == sums, "published, in the same order, and each change once"
        rows = "SELECT count(*), count(DISTINCT event_id) FROM pipeline.outbox"
        assert set(await self.db.fetchrow(rows)) == {self.amount}
        assert await self.waiting() == [], "nothing waits any more, and nothing is dead"

    async def has_published_all(self) -> bool:
        """Whether there is an event of every deposit, and nothing waits to be tried again."""
        return len(set(self.published.ids)) >= self.amount and not await self.waiting()

    async def waiting(self) -> list[tuple[str, str]]:
        """Return what waits in the backlog or is dead: ids of messages, and why."""
        rows = await self.db.fetch(
            'SELECT id, reason FROM pipeline.backlog ORDER BY topic, partition, "offset"'
        )
        return [(row["id"], row["reason"]) for row in rows]


def _by_account(records: list[ConsumerRecord]) -> dict[str, list[dict[str, Any]]]:
    """Return the payloads of each key in the order of their first appearance; repeats left out."""
    first: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for record in records:
        first[record.key.decode()].setdefault(id_of(record), json.loads(record.value))
    return {key: list(found.values()) for key, found in first.items()}
