"""The rows that handlers change: locked once in a transaction, read back between messages."""

import asyncio
from itertools import chain
from typing import TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import instance_state

from pipeline.servers.guard import CANCELLED, CURRENT_GUARD, UNDER_WAY, HandlerFault

from .aggregate import Aggregate, Key, canonical, create, key_of, locking, record_key
from .columns import is_as_stored
from .sessions import OwnSession, RowSession, SharedSession

A = TypeVar("A", bound=Aggregate)
Place = tuple[type[Aggregate], Key]
"""A class of rows, and a primary key as `canonical` returns it."""


class Rows:
    """The aggregates that a session has locked, and the keys for which there is no row."""

    def __init__(self, session: AsyncSession) -> None:
        self.session = session
        # Its methods are three times as fast as those of the AsyncSession.
        self._known = cast(RowSession, session.sync_session)
        if isinstance(self._known, OwnSession):
            self._known.rows = self
        self.locked: dict[Place, Aggregate | None] = {}
        self._taken: dict[Place, int] = {}
        """Number of the message that has loaded the row last."""
        self._unsure: set[int] = set()
        """`id` of rows that were flushed, and that the database may return with other values."""
        self._statement = asyncio.Lock()
        """Held while a handler's `get` executes one."""
        self._has_related = False
        """Whether rows may be in the session that were loaded with others, without a lock."""
        self.message = 0
        """Number of the message whose handler is called."""
        self.error: BaseException | None = None
        """Error of a statement: it may have written the row of another message, and the handler may
        have caught the error."""

    def begin_message(self) -> None:
        """Note that the handler of the next message is called."""
        self.message += 1
        self.error = None

    async def flush(self) -> None:
        """Write the changed rows."""
        if self._has_related:
            self.check()
        await self.session.run_sync(Session.flush)

    async def get(self, entity: type[A], key: Key) -> A | None:
        """Return the locked row; one that is not declared is fetched and locked now.

        A row that another message of the batch has changed is read back, unless the database would
        return the values that are in memory.
        """
        place = entity, canonical(entity, key)
        if not self._has(place):
            call = CURRENT_GUARD.set(None)  # what follows is the engine's
            try:
                async with self._statement:
                    if not self._has(place):
                        await self.lock(entity, {place[1]})
            except BaseException as error:
                self.error = error
                raise
            finally:
                CURRENT_GUARD.reset(call)
        self._taken[place] = self.message
        row = self.locked[place]
        return None if row is None or row not in self._known else cast(A, row)

    def raise_error(self) -> None:
        """Raise the error of a statement, or `HandlerFault` if one is cancelled or under way."""
        if self._statement.locked():
            raise HandlerFault(UNDER_WAY)
        if isinstance(self.error, asyncio.CancelledError):
            raise HandlerFault(CANCELLED)
        if self.error is not None:
            raise self.error

    def _has(self, place: Place) -> bool:
        """Whether the row in memory is what the database would return."""
        if place not in self.locked:
            return False
        row, taken = self.locked[place], self._taken.get(place, self.message)
        if row is None:
            # In a shared session a row can have appeared only by `create` or `add`.
            return isinstance(self._known, SharedSession) and not self._known.has_new
        if taken != self.message:
            return id(row) not in self._unsure and is_as_stored(row)
        if isinstance(self._known, SharedSession):
            return True
        # A row that is deleted and created anew before a flush would keep its old values.
        return not instance_state(row).expired and row not in self._known.deleted

    async def lock(self, entity: type[Aggregate], keys: set[Key]) -> None:
        """Fetch and lock the rows that exist, in the order of their keys, in one statement."""
        keys = {canonical(entity, key) for key in keys}
        if isinstance(self._known, SharedSession):  # after the flush they look unchanged
            written = chain(self._known.new, self._known.dirty)
            self._unsure.update(id(row) for row in written if not is_as_stored(row))
        await self.flush()
        self._has_related = self._has_related or any(
            mapper.relationships for mapper in sa.inspect(entity).self_and_descendants
        )
        for key in keys:
            row = self.locked.get((entity, key))
            if row is not None and row in self._known and not instance_state(row).expired:
                self._known.expunge(row)
        columns = {f"key_{place}": list(one) for place, one in enumerate(zip(*keys, strict=True))}
        rows = await self.session.run_sync(
            # A joined relationship repeats rows.
            lambda session: Session.scalars(session, locking(entity), columns).unique().all()
        )
        found: dict[Key, Aggregate] = {canonical(entity, key_of(row)): row for row in rows}
        if unexpected := found.keys() - keys:
            raise TypeError(
                f"{entity.__name__} has the key {unexpected.pop()!r}, but was requested as"
                f" {next(iter(keys))!r}: use the type that the column holds"
            )
        self.locked |= {(entity, key): found.get(key) for key in keys}

    def check(self) -> None:
        """Raise an error for a row that was changed or deleted without a lock.

        It is `HandlerFault` in the session of one message.
        """
        is_shared = isinstance(self._known, SharedSession)
        kind = InvalidRequestError if is_shared else HandlerFault
        for row in chain(self._known.deleted, self._known.dirty):
            if (
                isinstance(row, Aggregate)
                and row not in self._known.added
                and not self._holds(row, instance_state(row).identity or ())
                and (row in self._known.deleted or self._known.is_modified(row))
            ):
                raise kind(
                    f"{type(row).__name__} was changed without a lock, and another transaction may"
                    " change it meanwhile: fetch it by load or load_or_create of tx or the writer"
                )

    def key_of(self, row: object) -> str:
        """Return the key of events of a row.

        Raises `TypeError` if it has none, or another transaction could change the row.
        """
        if not isinstance(row, Aggregate):
            raise TypeError(f"an event of= needs an Aggregate that is locked, not {row!r}")
        values = () if instance_state(row).expired else key_of(row)
        if None in values:
            raise TypeError("an event of=row needs the row's primary key: flush first")
        if not values or not (
            self._holds(row, values) or row in self._known.new or row in self._known.added
        ):
            raise TypeError(
                f"an event of={type(row).__name__} needs a row that is locked, or events lose"
                " their order: fetch it by tx.load or tx.load_or_create, and once more after a"
                " savepoint was rolled back"
            )
        return record_key(type(row), values)

    def _holds(self, row: Aggregate, values: Key) -> bool:
        place = canonical(type(row), values)
        if self.locked.get((type(row), place)) is row:
            return True
        # The row may have been loaded as an instance of a base class.
        return any(self.locked.get((one, place)) is row for one in type(row).__mro__)

    def create(self, entity: type[A], key: Key) -> A:
        """Add a new row to the session."""
        row, has_new = create(entity, key), self._known.has_new
        Session.add(self._known, row)
        self._known.has_new = has_new
        self.locked[entity, canonical(entity, key)] = row
        return row
