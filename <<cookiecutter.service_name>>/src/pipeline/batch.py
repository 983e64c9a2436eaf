"""The consume transaction: one batch of a topic partition takes effect as a whole."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter

import asyncpg
import sqlalchemy as sa
from aiokafka import ConsumerRecord
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from tenacity import AsyncRetrying

from . import inbox, telemetry
from .aggregate import Aggregate, Key
from .database import driver_of
from .events import Event, Tombstone
from .failures import is_infrastructure, is_of_the_database
from .handlers import Handler, Handlers
from .inbox import Generations, IdentityMismatch, Marker, PositionMoved, Slot
from .message import Message, Plain, Position, Undecodable, decode, marker_key
from .outbox import Outbox
from .settings import Settings
from .transaction import Rows, Transaction

_BARE_TOMBSTONE = Plain(Tombstone.event_type, Position())
"""Compacted topics carry tombstones without any header: their place names them."""


class Stuck(Exception):
    """A record that can't be handled. Its partition stands still before it."""

    def __init__(self, offset: int, reason: str, error: BaseException) -> None:
        super().__init__(f"offset {offset}: {reason}: {error}")
        self.offset = offset
        self.reason = reason
        self.error = error


class _Culprit(Exception):
    """The record at this offset is at fault; what stands before it is not."""

    def __init__(self, offset: int, reason: str, error: BaseException) -> None:
        super().__init__(offset)
        self.offset = offset
        self.reason = reason
        self.error = error


class _Unclear(Exception):
    """The batch failed as a whole, and any of its records may be at fault, or none."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


@dataclass(frozen=True, slots=True)
class Item:
    """One message for one of its handlers."""

    handler: Handler
    marker: Marker
    event: Event


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records of a partition, decoded: `start` is the position they were read from."""

    start: int
    end: int
    items: Sequence[Item]
    skipped: Sequence[int] = ()
    """Offsets of the records that no handler takes."""
    stuck: Stuck | None = None
    """The record at `end`, if it can't be decoded."""
    has_failed: bool = False
    """Whether its only record was tried before, and the flush or the COMMIT failed."""

    def part(self, start: int, end: int) -> "Batch":
        """Return the records from `start` to below `end`."""
        return Batch(
            start,
            end,
            [item for item in self.items if start <= item.marker.message.offset < end],
            [offset for offset in self.skipped if start <= offset < end],
        )


def read(handlers: Handlers, topic: str, start: int, records: Sequence[ConsumerRecord]) -> Batch:
    """Decode and validate records; the batch ends before the first one that can't be."""
    plain = handlers.plain_of(topic)
    tombstones = handlers.takes_tombstones(topic)
    items: list[Item] = []
    skipped: list[int] = []
    stuck = None
    end = start
    for record in records:
        try:
            found: list[Item] = []
            if record.value is not None or tombstones:
                how = plain or (_BARE_TOMBSTONE if record.value is None else None)
                found = list(_items(handlers, decode(record, how)))
            if found:
                items += found
            else:
                skipped.append(record.offset)
        except Undecodable as error:
            stuck = Stuck(record.offset, error.reason, error)
        except Exception as error:  # a model's own validator may raise anything
            stuck = Stuck(record.offset, "invalid payload", error)
        if stuck:
            end = record.offset
            break
        end = record.offset + 1
    return Batch(start, end, items, skipped, stuck)


def _items(handlers: Handlers, message: Message) -> Iterator[Item]:
    type = Tombstone.event_type if message.data is None else message.type
    event: Event | None = None
    for handler in handlers.of(message.topic, type):
        if event is None:
            event = _validated(handler.event, message)
        key = marker_key(handler.consumer, message.source, message.id)
        yield Item(handler, Marker(key, handler.consumer, message), event)


def _validated(model: type[Event], message: Message) -> Event:
    if message.data is None:
        return Tombstone(key=(message.key or b"").decode("utf-8", "backslashreplace"))
    return model.model_validate_json(message.data)


class _Session(AsyncSession):
    """The session of a batch. A handler that committed it would lose its neighbours' events."""

    async def commit(self) -> None:
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

    async def apply(self, slot: Slot, batch: Batch, attempts: AsyncRetrying) -> None:
        """Commit the batch; returns when its last record has taken effect.

        Raises `Stuck` for the first record at fault, when all before it is committed, and
        `PositionMoved` if the partition is not where the batch was read from.
        """
        try:
            async for attempt in attempts.copy():
                with attempt:
                    await self._commit(slot, batch)
            return
        except _Culprit as culprit:
            stuck = Stuck(culprit.offset, culprit.reason, culprit.error)
        except _Unclear as unclear:
            offsets = sorted({item.marker.message.offset for item in batch.items})
            middle = offsets[len(offsets) // 2]
            if len(offsets) > 1:
                await self.apply(slot, batch.part(batch.start, middle), attempts)
                await self.apply(slot, batch.part(middle, batch.end), attempts)
                return
            if not batch.has_failed:
                # Once more: a row that another partition has created meanwhile is found now.
                await self.apply(slot, replace(batch, has_failed=True), attempts)
                return
            stuck = Stuck(middle, "transaction failed", unclear.error)
        if stuck.offset > batch.start:
            await self.apply(slot, batch.part(batch.start, stuck.offset), attempts)
        raise stuck from stuck.error

    async def _commit(self, slot: Slot, batch: Batch) -> None:
        started = perf_counter()
        limit = self._settings.transaction_timeout
        async with self._lanes, _Session(self._engine, expire_on_commit=False) as session:
            try:
                transaction = await session.begin()
                await session.connection()
                with _blaming(batch, limit):
                    async with asyncio.timeout(limit):
                        new, staged = await self._execute(session, slot, batch)
                    await transaction.commit()
            except (_Culprit, _Unclear, PositionMoved):
                if perf_counter() - started > limit:
                    await session.invalidate()  # the server may have cut it off
                raise
            except BaseException:
                # Lost, cut off or cancelled in the middle: nobody else may get this connection.
                await session.invalidate()
                raise
        if staged:
            self._staged()
        self._count(slot, batch, new, perf_counter() - started)

    async def _execute(
        self, session: AsyncSession, slot: Slot, batch: Batch
    ) -> tuple[Sequence[Item], int]:
        settings = self._settings
        connection = await session.connection()
        await inbox.begin(
            connection,
            transaction_timeout=settings.transaction_timeout,
            lock_timeout=settings.lock_timeout,
        )
        driver = await driver_of(connection)
        generations = await inbox.move_position(
            driver, slot, fetched_from=batch.start, next_offset=batch.end
        )
        rows = Rows(session)
        outbox = Outbox(self._source, settings.max_event_bytes)
        new = await self._mark(driver, slot, generations, batch)
        for entity, keys in _declared(new):
            await rows.lock(entity, keys)
        for item in new:
            await self._handle(item, session, rows, outbox, driver)
        await session.flush()
        if not connection.in_transaction():
            raise RuntimeError("a handler has rolled the transaction back: it is the batch's")
        if len(outbox):
            await outbox.write(driver)
        elif new:
            # COMMIT is silent when a handler has swallowed the error of a statement. This is not.
            await driver.execute("SELECT")
        return new, len(outbox)

    async def _mark(
        self, driver: asyncpg.Connection, slot: Slot, generations: Generations, batch: Batch
    ) -> Sequence[Item]:
        """Return the items that are new, each once."""
        try:
            inserted = await inbox.mark(
                driver, slot, generations, [item.marker for item in batch.items]
            )
        except IdentityMismatch as error:
            raise _Culprit(error.offset, "identity mismatch", error) from error
        new: dict[bytes, Item] = {}
        for item in batch.items:
            if item.marker.key in inserted:
                new.setdefault(item.marker.key, item)
        return list(new.values())

    async def _handle(
        self,
        item: Item,
        session: AsyncSession,
        rows: Rows,
        outbox: Outbox,
        driver: asyncpg.Connection,
    ) -> None:
        message, consumer = item.marker.message, item.handler.consumer
        tx = Transaction(
            session=session, rows=rows, outbox=outbox, consumer=consumer, message=message
        )
        try:
            with tx, telemetry.process_span(message, consumer, self._group):
                await item.handler.function(item.event, tx)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise _Culprit(message.offset, f"{consumer} failed", error) from error
        except Exception as error:
            if is_of_the_database(error) or driver.is_closed():
                raise
            raise _Culprit(message.offset, f"{consumer} failed", error) from error

    def _count(self, slot: Slot, batch: Batch, new: Sequence[Item], seconds: float) -> None:
        applied = Counter(item.handler.consumer for item in new)
        seen = Counter(item.handler.consumer for item in batch.items)
        for consumer, count in seen.items():
            fresh = applied[consumer]
            telemetry.processed(slot.topic, consumer, "new", fresh, self._group)
            telemetry.processed(slot.topic, consumer, "duplicate", count - fresh, self._group)
        if batch.skipped:
            telemetry.processed(slot.topic, "", "skipped", len(batch.skipped), self._group)
        telemetry.batch_applied(slot.topic, len(batch.items) + len(batch.skipped), seconds)


def _declared(items: Sequence[Item]) -> list[tuple[type[Aggregate], set[Key]]]:
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
    except (_Culprit, _Unclear, PositionMoved):
        raise
    except Exception as error:
        offsets = {item.marker.message.offset for item in batch.items}
        in_time = perf_counter() - started < limit
        if not offsets or (in_time and is_infrastructure(error)):
            raise
        if in_time or len(offsets) > 1:
            raise _Unclear(error) from error
        raise _Culprit(offsets.pop(), f"takes longer than {limit} s", error) from error
