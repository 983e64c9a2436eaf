"""The run without faults: one process applies each message by itself.

`python -m onceward.prove.clean FILE NAME NOTES GIVEN FOUND` reads from `GIVEN` the records, and the
order in which transactions of the run under faults have committed, and writes to `FOUND` what came
of it.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine

from onceward.apply import inbox
from onceward.apply.positions import Slot
from onceward.events.message import headers_of
from onceward.handlers.staging import CALLS
from onceward.retention.maintenance import make_ahead
from onceward.servers.database import autocommitting, create_engine
from onceward.service import Service
from onceward.settings import Settings
from onceward.testing import stored
from onceward.testing.process import Process, Step
from onceward.testing.records import KafkaRecord, record

from . import evidence, statements
from .member import noting
from .proof import Proof, load

_YEAR = timedelta(days=365)


class CleanRun:
    """Applies messages by the engine's own parts, to the end of all retries."""

    def __init__(self, service: Service, driver: asyncpg.Connection, engine: AsyncEngine) -> None:
        self._driver = driver
        self._settings = Settings()
        self._step = Step()
        claims = service.claims and service.claims(service.name, self._settings)

        def process(consumer: str | None = None) -> Process:
            handlers = service.handlers.changed(
                lambda one: one if consumer in (None, one.consumer) else None
            )
            return Process(service, engine, self._settings, handlers, claims, self._step)

        self._name, self._all = service.name, process()
        self._by_consumer = {one: process(one) for one in service.handlers.consumers}
        self.scheduled: set[str] = set()
        """Ids of the events that were published when they were due."""

    async def apply(self, record: KafkaRecord, consumer: str | None = None) -> None:
        """Apply a record for one consumer, or for all that have not done so yet."""
        self._step.rounds = 0
        process = self._by_consumer.get(consumer or "", self._all)
        slot = Slot(self._name, record.topic, record.partition)
        await process.seek(slot, record.offset)
        await process.apply(slot, [record])
        await self.settle()

    async def call(self) -> None:
        """Make the calls that are due."""
        await self._all.call({})

    async def settle(self, *, schedule: bool = False) -> None:
        """Let time pass until nothing is to be retried; with `schedule` nor to be published."""
        await self._all.work_off()
        while True:
            left = await self._driver.fetchrow(statements.LEFT)
            if not left["later"] and not (schedule and left["scheduled"]):
                return
            rows = await self._driver.fetch(statements.SCHEDULED)
            self.scheduled |= {row["event_id"] for row in rows}
            passed = _YEAR - await stored.pass_time(
                self._driver, _YEAR, timedelta(), self._settings
            )
            self._step.pause(passed)
            await stored.publish_due(self._driver)
            await self._all.work_off()
            if schedule:
                await self.call()


async def run(proof: Proof, service: Service, given: Mapping[str, Any]) -> dict[str, Any]:
    """Apply the messages, and return what has come of them."""
    made = map(_record, given["records"])
    records = {(one.topic, one.partition, one.offset): one for one in made}
    settings = Settings()
    await service.open_codecs()
    engine = create_engine(settings, name=service.name)
    async with service.opened() as service, autocommitting(engine) as driver:
        await make_ahead(driver, settings)
        await inbox.register(driver, service.handlers.consumers)
        clean = CleanRun(service, driver, engine)
        for consumer, *place in given["order"]:
            if place[0] == CALLS:
                await clean.call()
            elif (one := records.get(tuple(place))) is not None:
                await clean.apply(one, consumer)
        # What has not been applied under faults is applied now, and makes a difference.
        for one in records.values():
            await clean.apply(one)
        await clean.call()
        await clean.settle(schedule=True)
        found = await evidence.stored(driver, proof)
        outbox = await evidence.outbox(driver, service.encryption)
        events = await evidence.published(outbox, service.handlers, proof.may_differ)
    await engine.dispose()
    return {"stored": found, "published": events, "scheduled": sorted(clean.scheduled)}


def _record(row: list[Any]) -> KafkaRecord:
    topic, partition, offset, timestamp, *texts, headers = row
    key, value = (None if text is None else bytes.fromhex(text) for text in texts)
    made = record(topic, value, key=key, headers={}, partition=partition)
    made.offset, made.timestamp, made.headers = offset, timestamp, tuple(headers_of(headers))
    return made


def main(file: str, name: str, notes: str, given: str, found: str) -> None:
    """Run it."""
    proof = load(Path(file))
    service = proof.instrumented(name, noting(Path(notes)))
    result = asyncio.run(run(proof, service, json.loads(Path(given).read_text("utf-8"))))
    Path(found).write_text(json.dumps(result), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
