"""The loop of `bare` with the handlers of the payments example.

    python -m benchmarks.bare_payments prepare|run

The rows that the handlers' `loads=` name are locked in one query for each table.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, ClassVar

from aiokafka import ConsumerRecord  # type: ignore[import-untyped]
from sqlalchemy import ARRAY, Select, Text, bindparam, func, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from benchmarks import bare
from benchmarks.bare_orm import OrmHandler
from benchmarks.payments_example import EVENTS, HANDLERS, TABLES
from benchmarks.work import Place, main

_BY_TYPE = {one.event.__event_type__.encode(): one for one in HANDLERS}


class PaymentsHandler(OrmHandler):
    """Handles a batch in the transaction that is open on its connection."""

    consumes: ClassVar[Collection[bytes]] = frozenset(_BY_TYPE)
    publishes: ClassVar[Collection[bytes]] = tuple(
        event.__event_type__.encode() for event in EVENTS
    )

    async def handle(self, records: Sequence[ConsumerRecord]) -> Sequence[tuple[Any, ...]]:
        """Handle the commands; return the events."""
        keys = defaultdict[type[Any], set[str]](set)
        commands = []
        for record in records:
            handler = _BY_TYPE[dict(record.headers)["ce_type"]]
            command = handler.event.model_validate_json(record.value)
            commands.append((handler.function, command))
            for loads in handler.loads:
                keys[loads.entity].update(loads.key_of(command))
        async with AsyncSession(self._shell, autoflush=False) as session:
            batch = Batch(session.sync_session)
            # Refunds and payments before accounts, for whose rows the other lane waits.
            for entity in sorted(keys, key=lambda one: one.__tablename__, reverse=True):
                for row in await session.scalars(_lock(entity), {"ids": sorted(keys[entity])}):
                    batch.rows[entity, row.id] = row
            for function, command in commands:
                await function(command, batch)
            await session.flush()
        return batch.staged


class Batch:
    """What the handlers use of `Transaction`: rows in memory, and events to store."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rows: dict[tuple[type[Any], str], Any] = {}
        self.staged: list[tuple[bytes, bytes, int, bytes]] = []

    def add(self, row: Any) -> None:
        """Insert a row, which later commands of the batch find."""
        self._session.add(row)
        self.rows[type(row), row.id] = row

    async def load(self, entity: type[Any], id: str) -> Any:
        """Return the locked row, or None."""
        return self.rows.get((entity, id))

    async def load_or_create(self, entity: type[Any], id: str) -> Any:
        """Return the locked row, or a new one."""
        if (entity, id) not in self.rows:
            self.add(entity(id))
        return self.rows[entity, id]

    def publish(self, event: Any, of: Any, key: str | None = None) -> None:
        """Stage an event of a row; here each refused command is of a payment that has one."""
        of.version = (of.version or 0) + 1
        payload = event.model_dump_json().encode()
        self.staged.append((of.id.encode(), event.__event_type__.encode(), of.version, payload))


def _lock(entity: Any) -> Select[Any]:
    """Return the query that locks rows in the order of their ids."""
    return (
        select(entity)
        .where(entity.id == func.any(bindparam("ids", type_=ARRAY(Text))))
        .order_by(entity.id)
        .with_for_update(key_share=True)  # entries refer to them
    )


async def prepare(place: Place) -> None:
    """Create the tables."""
    await bare.prepare(place, bare.OWN_TABLES)
    engine = create_async_engine(place.database_url)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(TABLES.create_all)
    finally:
        await engine.dispose()


if __name__ == "__main__":
    main(prepare, partial(bare.run, kind=PaymentsHandler))
