"""The handler of `bare`, by hand: one statement reads the parcels of a batch, one writes them."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, ClassVar, Self

import asyncpg  # type: ignore[import-untyped]
import orjson
from aiokafka import ConsumerRecord  # type: ignore[import-untyped]

from benchmarks.work import DELAYED, LATE, MOVED, SCAN, Place

LOCK = """
    SELECT id, place, scans, last_scanned_at, version FROM parcel
    WHERE id = ANY ($1::text[]) ORDER BY id FOR UPDATE
"""
STORE = """
    INSERT INTO parcel (id, place, scans, last_scanned_at, version)
    SELECT * FROM unnest($1::text[], $2::text[], $3::int[], $4::timestamptz[], $5::bigint[])
    ON CONFLICT (id) DO UPDATE SET place = excluded.place, scans = excluded.scans,
        last_scanned_at = excluded.last_scanned_at, version = excluded.version
"""
NEVER = datetime.fromisoformat("0001-01-02T00:00:00Z")


class SqlHandler:
    """Handles a batch in the transaction that is open on its connection."""

    consumes: ClassVar[Collection[bytes]] = (SCAN,)
    publishes: ClassVar[Collection[bytes]] = MOVED, DELAYED

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.connection = connection

    @classmethod
    async def connect(cls, place: Place) -> Self:
        """Open a connection of its own."""
        return cls(await asyncpg.connect(place.dsn))

    async def close(self) -> None:
        """Close the connection."""
        await self.connection.close()

    async def handle(self, records: Sequence[ConsumerRecord]) -> Sequence[tuple[Any, ...]]:
        """Store what the scans say of their parcels; return the events that tell of it."""
        scans = [orjson.loads(record.value) for record in records]
        ids = sorted({scan["parcel_id"] for scan in scans})
        parcels = {id: [id, "", 0, NEVER, 0] for id in ids}
        for row in await self.connection.fetch(LOCK, ids):
            parcels[row[0]] = list(row)
        staged: list[tuple[bytes, bytes, int, bytes]] = []
        stage, dumps, read_time = staged.append, orjson.dumps, datetime.fromisoformat
        for record, scan in zip(records, scans, strict=True):
            parcel_id = scan["parcel_id"]
            parcel = parcels[parcel_id]
            parcel[2] += 1
            if (scanned_at := read_time(scan["scanned_at"])) >= parcel[3]:
                parcel[1] = scan["place"]
                parcel[3] = scanned_at
            parcel[4] += 1
            moved = {
                "parcel_id": parcel_id,
                "place": parcel[1],
                "scans": parcel[2],
                "scanner": scan["scanner"],
                "number": scan["number"],
            }
            stage((record.key, MOVED, parcel[4], dumps(moved)))
            late = scan["minutes_late"]
            if late is not None and late > LATE:
                parcel[4] += 1
                delayed = {
                    "parcel_id": parcel_id,
                    "minutes_late": late,
                    "scanner": scan["scanner"],
                    "number": scan["number"],
                }
                stage((record.key, DELAYED, parcel[4], dumps(delayed)))
        await self.connection.execute(STORE, *map(list, zip(*parcels.values(), strict=True)))
        return staged
