"""The consume transaction: one batch of a topic partition takes effect as a whole."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import asyncpg
import pydantic_core
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session
from tenacity import AsyncRetrying

from . import inbox, telemetry
from .aggregate import Aggregate, Key
from .batch import Batch, Item, Stuck
from .database import driver_of
from .failures import is_infrastructure, is_of_the_database
from .inbox import Generations, IdentityMismatch, PositionMoved, Slot
from .outbox import Outbox
from .settings import Settings
from .transaction import Rows, Transaction

_EARLY = 0.01
"""Seconds; uvloop rounds its timers, and one that fires early would look like an outage."""


class Outcome(NamedTuple):
    """What became of a message at one of its handlers."""

    item: Item
    is_new: bool
    """False for a duplicate, whose handler was not called."""
    result: Any
    """What the handler returned, as JSON has it; for a duplicate, what it returned then."""


class _Unclear(Exception):
    """The batch failed as a whole, and any of its records may be at fault."""

    def __init__(self, reason: str, error: BaseException) -> None:
        super().__init__(str(error))
        self.reason = reason
        self.error = error


class _Session(Session):
    """The session of a batch. A handler that committed it would lose its neighbours' events."""

    def commit(self) -> None:
        raise TypeError("leave session.commit() out: the whole batch commits after its handlers")


class Consume:
    """Applies batches, each in one transaction, in the order that `docs/protocol.md` fixes."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        group: str,
        source: str,
        settings: Settings,
        staged: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._group = group
        self._source = source
        self._settings = settings
        self._staged = staged
        self._lanes = asyncio.Semaphore(settings.lanes)

    async def apply(self, slot: Slot, batch: Batch, attempts: AsyncRetrying) -> Sequence[Outcome]:
        """Commit the batch; returns what became of it when its last record has taken effect.

        Raises `Stuck` for the first record at fault, when all before it is committed, and
        `PositionMoved` if the partition is not where the batch was read from.
        """
        try:
            return await self._attempt(slot, batch, attempts)
        except Stuck as stuck:
            if stuck.offset > batch.start:
                await self.apply(slot, batch.between(batch.start, stuck.offset), attempts)
            raise
        except _Unclear:
            middle = batch.offsets[len(batch.offsets) // 2]
            before = await self.apply(slot, batch.between(batch.start, middle), attempts)
            return [*before, *await self.apply(slot, batch.between(middle, batch.end), attempts)]

    async def _attempt(
        self, slot: Slot, batch: Batch, attempts: AsyncRetrying
    ) -> Sequence[Outcome]:
        """Commit the batch, again and again while infrastructure fails."""
        try:
            return await attempts.copy()(self._commit, slot, batch)
        except _Unclear:
            if len(batch.offsets) > 1:
                raise
            # Once more: a row that another partition has created meanwhile is found now, and what
            # took so long may have been the way to the server, which is a new one now.
            try:
                return await attempts.copy()(self._commit, slot, batch)
            except _Unclear as still:
                raise Stuck(batch.offsets[0], still.reason, still.error) from still.error

    async def _commit(self, slot: Slot, batch: Batch) -> Sequence[Outcome]:
        started = perf_counter()
        limit = self._settings.transaction_timeout
        new_session = AsyncSession(
            self._engine, sync_session_class=_Session, expire_on_commit=False
        )
        async with self._lanes, new_session as session:
            try:
                transaction = await session.begin()
                # Outside the limit: waiting for a connection is not the batch's doing.
                connection = await session.connection()
                with _blaming(batch, limit):
                    async with asyncio.timeout(limit + _EARLY):
                        outcomes, staged = await self._execute(session, connection, slot, batch)
                    await transaction.commit()
            except (Stuck, _Unclear, PositionMoved):
                if perf_counter() - started > limit:
                    await session.invalidate()  # the server may have cut it off
                raise
            except BaseException:
                # Lost, cut off or cancelled in the middle: nobody else may get this connection.
                await session.invalidate()
                raise
        if staged:
            self._staged()
        self._count(slot, batch, outcomes, perf_counter() - started)
        return outcomes

    async def _execute(
        self, session: AsyncSession, connection: AsyncConnection, slot: Slot, batch: Batch
    ) -> tuple[Sequence[Outcome], int]:
        settings = self._settings
        await inbox.begin(
            connection,
            transaction_timeout=settings.transaction_timeout,
            lock_timeout=settings.lock_timeout,
        )
        driver = await driver_of(connection)
        generations = await inbox.move_position(
            driver,
            slot,
            fetched_from=batch.start,
            next_offset=batch.end,
            anchor=batch.anchor,
        )
        rows = Rows(session)
        outbox = Outbox(self._source, settings.max_event_bytes)
        known = await self._mark(driver, slot, generations, batch)
        new: dict[bytes, Item] = {}
        for item in batch.items:
            if item.marker.key not in known:
                new.setdefault(item.marker.key, item)
        for entity, keys in _declared(new.values()):
            await rows.lock(entity, keys)
        returned: dict[bytes, str] = {}
        for key, item in new.items():
            result = await self._handle(item, session, rows, outbox, driver)
            if result is not None:
                returned[key] = result
        await session.flush()
        if not connection.in_transaction():
            raise RuntimeError("a handler has rolled the transaction back: it is the batch's")
        if returned:
            await inbox.keep_results(driver, generations, returned)
        if len(outbox):
            await outbox.write(driver)
        elif new:
            # COMMIT is silent when a handler has swallowed the error of a statement. This is not.
            await driver.execute("SELECT")
        return _outcomes(batch, new, known | returned), len(outbox)

    async def _mark(
        self, driver: asyncpg.Connection, slot: Slot, generations: Generations, batch: Batch
    ) -> dict[bytes, str | None]:
        """Remember the messages; returns the results of those remembered before, by key."""
        try:
            return await inbox.mark(
                driver, slot, generations, [item.marker for item in batch.items]
            )
        except IdentityMismatch as error:
            raise Stuck(error.offset, "identity mismatch", error) from error

    async def _handle(
        self,
        item: Item,
        session: AsyncSession,
        rows: Rows,
        outbox: Outbox,
        driver: asyncpg.Connection,
    ) -> str | None:
        """Call the handler; returns what it returned, as JSON."""
        message, consumer = item.marker.message, item.handler.consumer
        tx = Transaction(
            session=session, rows=rows, outbox=outbox, consumer=consumer, message=message
        )
        try:
            with tx, telemetry.process_span(message, consumer, self._group):
                result = await item.handler.function(item.event, tx)
            return (
                None
                if result is None
                else pydantic_core.to_json(result, inf_nan_mode="strings").decode()
            )
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Stuck(message.offset, f"{consumer} failed", error) from error
        except Exception as error:
            if is_of_the_database(error) or driver.is_closed():
                raise
            raise Stuck(message.offset, f"{consumer} failed", error) from error

    def _count(self, slot: Slot, batch: Batch, outcomes: Sequence[Outcome], seconds: float) -> None:
        applied = Counter(one.item.handler.consumer for one in outcomes if one.is_new)
        seen = Counter(item.handler.consumer for item in batch.items)
        for consumer, count in seen.items():
            fresh = applied[consumer]
            telemetry.processed(slot.topic, consumer, "new", fresh, self._group)
            telemetry.processed(slot.topic, consumer, "duplicate", count - fresh, self._group)
        if batch.skipped:
            telemetry.processed(slot.topic, "", "skipped", len(batch.skipped), self._group)
        telemetry.batch_applied(slot.topic, len(batch.items) + len(batch.skipped), seconds)


def _outcomes(
    batch: Batch, new: Mapping[bytes, Item], results: Mapping[bytes, str | None]
) -> list[Outcome]:
    values = {key: pydantic_core.from_json(text) for key, text in results.items() if text}
    return [
        Outcome(item, new.get(item.marker.key) is item, values.get(item.marker.key))
        for item in batch.items
    ]


def _declared(items: Iterable[Item]) -> list[tuple[type[Aggregate], set[Key]]]:
    """Return the rows that the handlers are going to change, by table name."""
    wanted: dict[type[Aggregate], set[Key]] = {}
    for item in items:
        if loads := item.handler.loads:
            wanted.setdefault(loads.entity, set()).add(loads.key_of(item.event))
    return sorted(wanted.items(), key=lambda one: str(sa.inspect(one[0]).local_table.fullname))


@contextmanager
def _blaming(batch: Batch, limit: float) -> Iterator[None]:
    """Turn an error that any record of the batch may have caused into the question which.

    So is an outage, unless the batch has taken more seconds than the limit: then it was cut off.
    """
    started = perf_counter()
    try:
        yield
    except (Stuck, _Unclear, PositionMoved):
        raise
    except Exception as error:
        in_time = perf_counter() - started < limit
        if not batch.items or (in_time and is_infrastructure(error)):
            raise
        reason = "transaction failed" if in_time else f"takes longer than {limit} s"
        raise _Unclear(reason, error) from error
