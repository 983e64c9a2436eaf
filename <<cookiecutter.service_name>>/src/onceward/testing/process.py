"""A process of the service, as far as it handles messages: what it holds in memory."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

from sqlalchemy.ext.asyncio import AsyncEngine

from onceward.apply import positions
from onceward.apply.attempt import Findings
from onceward.apply.batch import read
from onceward.apply.breaker import Breaker
from onceward.apply.claim_check import ClaimCheck, resolve_batch
from onceward.apply.outcome import BatchOutcome
from onceward.apply.positions import Slot
from onceward.apply.source import Source
from onceward.apply.transactions import ConsumeTransactions, Signals
from onceward.consume.partition_source import PartitionBatch, PartitionSource
from onceward.errors import SourceLost
from onceward.handlers.registry import Handlers
from onceward.observe.health import Health
from onceward.operators import statements
from onceward.retry.workers import BacklogWorkers
from onceward.servers.database import autocommitting
from onceward.servers.retrying import Retrying
from onceward.service import Service
from onceward.settings import Settings

from .databases import attempts
from .errors import HarnessMisused
from .records import KafkaRecord
from .stand_ins import StandIn, replaced

_ROUNDS = 200
"""Rounds of retries without a pause after which a step ends with an error."""
_EXACT = 100
"""Pauses of a step after which a message that is due again and again is retried late."""
_LATE = 0.1
"""Share of the time passed by which retries are late then."""
_HANGS = 3_600.0


@dataclass
class Step:
    """What processes have done in a step of a test."""

    outcomes: list[BatchOutcome] = field(default_factory=list)
    """Those of its transactions."""
    skipped: int = 0
    """Records of a type that no handler takes."""
    rounds: int = 0
    """Since time has passed: lanes that were served, and times that something was still due."""
    pauses: int = 0
    """How often time has passed."""
    is_running: bool = False

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Forget the step before. Raises `HarnessMisused` if it has not ended."""
        if self.is_running:
            raise HarnessMisused(
                "two methods of the harness run at once: await one after the other. To let messages"
                " share a transaction, use handle_batch"
            )
        self.outcomes.clear()
        self.skipped = self.rounds = self.pauses = 0
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    def next_round(self) -> None:
        """Count a round. Raises `HarnessMisused` if there have been too many."""
        self.rounds += 1
        if self.rounds > _ROUNDS:
            raise HarnessMisused(
                f"after {_ROUNDS} rounds of retries there are more: raise Park or Retry with a"
                " longer after=; and leave no row of pipeline.backlog locked, or of a consumer"
                " without a handler"
            )

    def lateness(self, passed: timedelta) -> timedelta:
        """Return the time that passes at least until a message is retried."""
        return _LATE * passed if self.pauses >= _EXACT else timedelta()

    def pause(self, time: timedelta) -> None:
        """Note that so much time has passed; if none has, something is still due."""
        if time:
            self.pauses, self.rounds = self.pauses + 1, 0
        else:
            self.next_round()


class _Recording(ConsumeTransactions):
    """The transactions of the engine; the outcomes of all that were committed are kept."""

    step: Step

    async def apply(
        self, source: Source, retrying: Retrying, findings: Findings | None = None
    ) -> Sequence[BatchOutcome]:
        found = await super().apply(source, retrying, findings)
        self.step.outcomes += found
        return found


class Process:
    """Applies records, and serves the backlog, by the engine's own parts."""

    def __init__(
        self,
        service: Service,
        engine: AsyncEngine,
        settings: Settings,
        handlers: Handlers,
        claims: ClaimCheck | None,
        step: Step,
    ) -> None:
        self._step = step
        self._engine = engine
        self._workers = service.workers
        self._health = Health(stall_after=_HANGS)
        self._consume = _Recording(
            engine,
            group=service.name,
            source=service.source,
            settings=settings,
            breaker=Breaker(
                keys=settings.breaker_keys, pause=settings.retry_pause, health=self._health
            ),
            handlers=handlers,
            signals=Signals(),
            claims=claims,
            encryption=service.encryption,
        )
        self._consume.step = step
        self._backlog = BacklogWorkers(self._consume, self._health)
        self._positions: dict[Slot, int] = {}

    async def apply(self, slot: Slot, records: Sequence[KafkaRecord]) -> None:
        """Apply records of a partition; those before its position have been applied already."""
        # After an error the position may be anywhere in the batch: it is read again.
        start = self._positions.pop(slot, None)
        while True:
            if start is None:
                start = await attempts()(self._position, slot)
            if records[0].offset < 0:  # they are new
                for place, one in enumerate(records):
                    one.offset = start + place
            left = [one for one in records if one.offset >= start]
            if not left:
                self._positions[slot] = start
                return
            batch = await read(self._consume.handlers, start, left)
            batch = await resolve_batch(batch, self._consume.claims)
            try:
                await self._consume.apply(
                    PartitionSource([PartitionBatch(slot, batch)]), attempts()
                )
            except SourceLost:  # it was committed, and the answer was lost
                start = None
                continue
            self._step.skipped += len(batch.skipped)
            start = batch.end

    async def seek(self, slot: Slot, offset: int) -> None:
        """Continue a partition at an offset; what took effect before is still skipped."""
        self._positions.pop(slot, None)
        async with autocommitting(self._engine) as driver:
            await driver.execute(statements.SET_POSITION, *slot, offset)

    async def work_off(self) -> None:
        """Handle what is due in the backlog. Raises `HarnessMisused` if that has no end."""
        await self._work_off(self._backlog)

    async def call(self, stand_ins: Mapping[str, StandIn]) -> None:
        """Make the calls to the outside that are due, by stand-ins for the effects' functions."""
        consume = copy(self._consume)
        consume.handlers = replaced(consume.handlers, stand_ins)
        for kind in self._workers:
            await self._work_off(kind(consume, self._health))

    async def _work_off(self, workers: BacklogWorkers) -> None:
        while await workers.work_off():
            self._step.next_round()

    async def _position(self, slot: Slot) -> int:
        """Return the position of a partition, which begins at 0."""
        async with autocommitting(self._engine) as driver:
            await positions.start_at(driver, slot, 0)
            found = await positions.position(driver, slot)
        assert found is not None
        return found.next_offset


def open_claims(service: Service, settings: Settings, folder: Path) -> ClaimCheck | None:
    """Return the claim check of the service, with a folder for its object store, if it has one."""
    if service.claims is None:
        return None
    with patch.dict(os.environ, {"PIPELINE_CLAIM_URL": folder.as_uri()}):
        return service.claims(service.name, settings)
