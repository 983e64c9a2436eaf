"""The handler of `bare` with SQLAlchemy's ORM: objects fetched at once, changed one by one."""

from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Self

import asyncpg  # type: ignore[import-untyped]
from aiokafka import ConsumerRecord  # type: ignore[import-untyped]
from pydantic import BaseModel
from sqlalchemy import ARRAY, Text, bindparam, func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine

from benchmarks.models import Parcel, ScanRecorded, events_of
from benchmarks.work import DELAYED, MOVED, SCAN, Place

# An array, not an IN list: the statement is the same for every number of parcels.
LOCK = (
    select(Parcel)
    .where(Parcel.id == func.any(bindparam("ids", type_=ARRAY(Text))))
    .order_by(Parcel.id)
    .with_for_update()
)


class OrmHandler:
    """Handles a batch in the transaction that is open on its connection."""

    consumes: ClassVar[Collection[bytes]] = (SCAN,)
    publishes: ClassVar[Collection[bytes]] = MOVED, DELAYED

    def __init__(self, shell: AsyncConnection, connection: asyncpg.Connection) -> None:
        self._shell = shell
        self.connection = connection
        """The same connection, as asyncpg has it."""

    @classmethod
    async def connect(cls, place: Place) -> Self:
        """Open a connection of its own."""
        # Transactions are begun and ended below SQLAlchemy, which takes each for no transaction.
        engine = create_async_engine(place.database_url, isolation_level="AUTOCOMMIT")
        shell = await engine.connect()
        connection = (await shell.get_raw_connection()).driver_connection
        assert connection is not None
        return cls(shell, connection)

    async def close(self) -> None:
        """Close the connection."""
        await self._shell.close()
        await self._shell.engine.dispose()

    async def handle(self, records: Sequence[ConsumerRecord]) -> Sequence[tuple[Any, ...]]:
        """Store what the scans say of their parcels; return the events that tell of it."""
        scans = [ScanRecorded.model_validate_json(record.value) for record in records]
        ids = sorted({scan.parcel_id for scan in scans})
        async with AsyncSession(self._shell, autoflush=False) as session:
            parcels = {parcel.id: parcel for parcel in await session.scalars(LOCK, {"ids": ids})}
            for id in ids:
                if id not in parcels:
                    session.add(parcel := Parcel(id))
                    parcels[id] = parcel
            staged = _Staged()
            for record, scan in zip(records, scans, strict=True):
                staged.key = record.key
                handle(scan, parcels[scan.parcel_id], staged)
            await session.flush()
        return staged.rows


class _Staged:
    """The events of a batch; `key` is that of the record whose handler runs."""

    def __init__(self) -> None:
        self.key = b""
        self.rows: list[tuple[bytes, bytes, int, bytes]] = []

    def publish(self, type: bytes, event: BaseModel, of: Parcel) -> None:
        of.version += 1
        self.rows.append((self.key, type, of.version, event.model_dump_json().encode()))


def handle(scan: ScanRecorded, parcel: Parcel, staged: _Staged) -> None:
    """Store the parcel's place, and publish its move and its delay."""
    parcel.move_to(scan.place, scan.scanned_at)
    for type, event in events_of(scan, parcel):
        staged.publish(type, event, of=parcel)
