"""One topic partition whose batches a test applies itself: in PostgreSQL, by hand."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import asyncpg
import pydantic_core
from aiokafka import ConsumerRecord
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine

from onceward import Handlers, Service
from onceward.apply import positions
from onceward.apply.batch import Batch, read
from onceward.apply.item import Item
from onceward.apply.outcome import BatchOutcome
from onceward.apply.positions import Slot
from onceward.apply.transactions import ConsumeTransactions
from onceward.cli.dead import Store
from onceward.consume.partition_source import PartitionBatch, PartitionSource
from onceward.observe.health import Health
from onceward.retry.workers import BacklogWorkers
from onceward.servers.database import autocommitting
from onceward.servers.retrying import Retrying

from tests.contract.bank import Deposit


class Outcome(NamedTuple):
    """What became of a message at one of its handlers."""

    item: Item
    is_new: bool
    """False for a duplicate, and for what is not applied now: their handler was not called."""
    result: Any
    """What the handler returned, as JSON has it."""


def outcomes_of(items: Sequence[Item], results: Sequence[BatchOutcome]) -> list[Outcome]:
    """Say of each of the items what became of it."""
    new = {id(item) for one in results for item in one.applied}
    texts = {key: text for one in results for key, text in one.returned.items()}
    values = {key: pydantic_core.from_json(text) for key, text in texts.items() if text}
    return [Outcome(item, id(item) in new, values.get(item.key)) for item in items]


@dataclass
class Applier:
    """Takes the place of the consumer's reader."""

    engine: AsyncEngine
    consume: ConsumeTransactions
    lanes: BacklogWorkers
    health: Health
    handlers: Handlers
    slot: Slot
    outages: list[str] = field(default_factory=list)
    """Why attempts were repeated in place."""

    async def read(self, *deposits: Deposit, start: int) -> Batch:
        """Decode the deposits as the records from offset `start` on."""
        records: list[ConsumerRecord[bytes, bytes]] = [
            replace(deposit, partition=self.slot.partition).record(self.slot.topic, start + place)
            for place, deposit in enumerate(deposits)
        ]
        return await read(self.handlers, start, records)

    async def apply(self, *deposits: Deposit, start: int | None = None) -> Sequence[Outcome]:
        """Apply the deposits as one batch, from the position stored unless `start` says where."""
        if start is None:
            start = await self.position()
        return await self.apply_batch(await self.read(*deposits, start=start))

    async def apply_batch(self, batch: Batch, *, deaths: int = 0) -> Sequence[Outcome]:
        """Apply the batch as the reader does: infrastructure is tried again for ever.

        A single record may be one over which so many processes have died.
        """
        attempts = Retrying(
            "the test", "PostgreSQL", unless=lambda: False, report=self.outages.append
        )
        results = await self.consume.apply(
            PartitionSource([PartitionBatch(self.slot, batch, deaths)]), attempts
        )
        return outcomes_of(batch.items, results)

    async def work_off(self, lanes: int = 1) -> None:
        """Handle what is due in the backlog, as a worker does that begins with so many lanes."""
        while lanes := await self.lanes.work_off(lanes):
            pass

    async def make_due(self) -> None:
        """Let the time pass that heads of keys wait for."""
        async with autocommitting(self.engine) as driver:
            await driver.execute(
                "UPDATE pipeline.backlog SET due_at = now() WHERE due_at > clock_timestamp()"
            )

    def let_probe(self, consumer: str) -> None:
        """Let the time pass for which the breaker lets a consumer rest."""
        self.consume.throttles.rest("consumer", consumer, 0.0)

    async def backlog(self) -> list[asyncpg.Record]:
        """Return the rows of the backlog, in the order of their records."""
        async with autocommitting(self.engine) as driver:
            rows: list[asyncpg.Record] = await driver.fetch(
                "SELECT *, due_at > clock_timestamp() AS waits FROM pipeline.backlog"
                ' ORDER BY consumer, topic, partition, "offset"'
            )
        return rows

    async def park(self) -> dict[tuple[str, int], str]:
        """Return why messages are in the backlog, by consumer and offset."""
        return {(row["consumer"], row["offset"]): row["reason"] for row in await self.backlog()}

    async def position(self) -> int:
        """Return the position stored; 0 is stored first if there is none."""
        async with autocommitting(self.engine) as driver:
            await positions.start_at(driver, self.slot, 0)
            stored = await positions.position(driver, self.slot)
        assert stored is not None
        return stored.next_offset


NewApplier: TypeAlias = Callable[..., Awaitable[Applier]]


Kind = TypeVar("Kind", bound=Store)


def store_of(
    kind: type[Kind],
    connection: asyncpg.Connection,
    handlers: Handlers | None = None,
    patience: float = 300.0,
) -> Kind:
    """Return dead letters or events as commands have them, which wait for a lock for so long."""
    settings: Any = SimpleNamespace(backlog_lease=patience, relay_lease=3 * patience)
    return kind(connection, Service("applier", handlers or Handlers(), MetaData()), settings)
