"""When rows in memory are written, and which of them are then what the database has."""

from collections.abc import Iterable, Sequence, Set
from typing import Any, cast

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import InstanceState
from sqlalchemy.orm.attributes import instance_state

from onceward.servers.database import driver_of

from .aggregate import Aggregate
from .catalog import UNNAMED, Catalog, CatalogChanged, Reactions
from .columns import is_as_stored, related
from .sessions import RowSession, SharedSession, by_engine
from .statements import CHECK_DEFERRED
from .versions import Versions


class Writes:
    """What the rows of a session have to be written for, and what has been written."""

    def __init__(self, session: AsyncSession, catalog: Catalog) -> None:
        self._session = session
        self._known = cast(RowSession, session.sync_session)
        self._connection = cast(AsyncConnection, self._known.by_engine(lambda _: session.bind))
        self._catalog = catalog
        self._versions = Versions()
        self._reactions: dict[type[Any], Reactions] = {}
        self._unsure: set[InstanceState[Any]] = set()
        """Rows that were flushed, and that the database may return with other values."""
        self.are_needed = False
        """Whether the database reacts to versions of any of these classes."""
        self.each = False
        """Whether each message is written after its call."""
        self.has_flushed = False
        """Whether the message has written rows while its handler was called."""
        self.has_related = False
        """Whether rows may be in the session that were loaded with others, without a lock."""

    async def learn(self, entities: Set[type[Any]]) -> None:
        """Ask the catalog how the database reacts to rows of these classes."""
        if not entities <= self._reactions.keys():
            self._reactions |= await self._catalog.learn(self._connection, entities)
            self.are_needed = any(one.is_any for one in self._reactions.values())

    async def flush(self, *, is_last: bool = False) -> None:
        """Write the changed rows, and earlier versions of them that the database judges."""
        if isinstance(self._known, SharedSession) and not is_last:
            if not (written := [*self._known.new, *self._known.dirty]):
                return
            self.has_flushed = True
            # After the flush they look unchanged.
            self._unsure.update(instance_state(row) for row in written if not is_as_stored(row))
        await by_engine(self._session, self._versions.flush)

    async def end(self, messages: int) -> None:
        """Write the rest, at the end of a run of messages.

        Raises `CatalogChanged` if the database reacts in another way than was assumed.
        """
        await self.flush(is_last=True)
        if messages > 1 and self._reactions:
            await self._catalog.check(self._connection, self._reactions)

    def is_current(self, row: object) -> bool:
        """Whether the row is what a transaction that reads it after its flush would see."""
        return instance_state(row) not in self._unsure and is_as_stored(row)

    def was_read(self, rows: Iterable[object]) -> None:
        """Note that rows are what the database has returned."""
        self._unsure -= {instance_state(row) for row in rows}

    def keep_version(self, state: InstanceState[Any]) -> None:
        """Keep what a row is before another message changes it."""
        self._versions.keep(state, is_judged=self._reactions[state.class_].judges)

    async def write_message(
        self, consumer: str, entities: Set[type[Any]], *, is_first: bool, has_new_key: bool
    ) -> bool:
        """Write what a message has changed if the database reacts to each version.

        It must see what earlier messages have changed first, so that these are written by
        themselves in such runs. Raises `CatalogChanged` if that was not known. Returns whether
        rows in memory may have changed in the database.
        """
        if self.has_related:
            entities = {*entities, *map(type, self._known.dirty)}
            entities |= {other for one in entities for other in related(one)}
        await self.learn(entities)
        reactions = self._reactions_to(entities)
        if not (reactions or self.each or has_new_key):
            return False
        if reactions and not self.each:
            self._catalog.reacting.add(consumer)
            self.each = is_first
            if not is_first:
                raise CatalogChanged(f"a message of {consumer} is written by itself")
        if not (self.has_flushed or self._known.new or self._known.dirty):
            return False
        await self.flush()
        if deferred := {name for one in reactions for name in one.deferred}:
            await self._catalog.check(self._connection, self._reactions)
        if deferred or has_new_key:
            names = ", ".join(sorted(deferred))
            is_by_name = deferred and UNNAMED not in deferred
            modes = [f"SET CONSTRAINTS {names} {mode}" for mode in ("IMMEDIATE", "DEFERRED")]
            driver = await driver_of(self._connection)
            await driver.execute("; ".join(modes) if is_by_name else CHECK_DEFERRED)
        return bool(reactions) or has_new_key

    def _reactions_to(self, entities: Set[type[Any]]) -> Sequence[Reactions]:
        # A new row of a class that is no aggregate is not changed any more.
        return [
            reaction
            for entity in entities
            for reaction in (self._reactions[entity],)
            if reaction.to_insert
            or reaction.deferred
            or (reaction.to_update and (issubclass(entity, Aggregate) or self.has_related))
        ]
