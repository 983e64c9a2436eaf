"""The rows that handlers change: locked once in a transaction, and shared by its messages.

What a message finds in memory is what it would find in the database, and the database gets what it
would get if each message had a transaction:

    the database, by its catalog            rows of the table
    --------------------------------------  --------------------------------------------------
    takes each version of a row             the last version is written
    may reject one (CHECK, UNIQUE, ...)     the version of each message is written, together
    does something with it (triggers, ...)  are written and read again after each message
"""

import asyncio
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstanceState, Session
from sqlalchemy.orm.attributes import instance_state

from onceward.servers.guard import CANCELLED, UNDER_WAY, HandlerFault

from .aggregate import Aggregate, Key, canonical, create, key_of, locking, record_key, set_defaults
from .catalog import Catalog
from .columns import cache_by_class, can_hide_changes, primary_key
from .sessions import OwnSession, RowSession, SharedSession, by_engine
from .versions import Snapshot
from .writes import Writes

A = TypeVar("A", bound=Aggregate)
Place = tuple[type[Aggregate], Key]
"""A class of rows, and a primary key as `canonical` returns it."""


class Rows:
    """The aggregates that a session has locked, and the keys for which there is no row."""

    def __init__(self, session: AsyncSession, catalog: Catalog | None = None) -> None:
        """`catalog` is needed for the session that messages share."""
        self.session = session
        self.writes = Writes(session, catalog or Catalog())
        # Its methods are three times as fast as those of the AsyncSession.
        self._known = cast(RowSession, session.sync_session)
        if isinstance(self._known, OwnSession):
            self._known.rows = self
        self.locked: dict[Place, Aggregate | None] = {}
        self._wanted: Iterable[Place] = ()
        """Those that `lock` has locked last, or waits for."""
        self._taken: dict[InstanceState[Any], int] = {}
        """Number of the message that has loaded or added the row last."""
        self._added: dict[type[Aggregate], list[Aggregate]] = {}
        """Rows that earlier messages have added, by base class, until one of it is looked for."""
        self._new: dict[Place, Aggregate] = {}
        """The others of them, by base class and key."""
        self.is_stale = False
        """Whether the database has reacted to what a message has written."""
        self._before: dict[InstanceState[Any], Snapshot] = {}
        """The rows that the message has loaded, as it has found them."""
        self._created: dict[Place, Aggregate] = {}
        """Rows that the message has created."""
        self._statement = asyncio.Lock()
        """Held while a handler's `get` executes one."""
        self.message = 0
        """Number of the message whose handler is called."""
        self.error: BaseException | None = None
        """Error of a statement: it may have written the row of another message, and the handler may
        have caught the error."""

    def begin_message(self) -> None:
        """Note that the handler of the next message is called."""
        self.message += 1
        self.error = None
        self.writes.has_flushed = False
        self._before, self._created = {}, {}

    def undo_message(self) -> bool:
        """Undo in memory what the message has done to rows, if all of it is known."""
        known = cast(SharedSession, self._known)
        touched = {*(state.class_ for state in self._before), *map(type, known.recent)}
        hides = self.writes.has_related or any(can_hide_changes(entity) for entity in touched)
        if hides or self.writes.has_flushed:
            return False
        for state, before in self._before.items():
            before.restore(state, known)
        for row in (*known.recent, *self._created.values()):
            known.by_engine(partial(Session.expunge, instance=row))
        for entity, key in self._created:
            self.locked[entity, key] = None
            del self._new[_base(entity), key]
        known.recent = []
        return True

    @property
    def has_to_write(self) -> bool:
        """Whether `write_message` may have something to do."""
        return isinstance(self._known, SharedSession) and (
            self.writes.are_needed
            or self.writes.each
            or bool(self._known.recent)
            or self._has_new_key
        )

    @property
    def _has_new_key(self) -> bool:
        """Whether the message has given a row another key."""
        for state, before in self._before.items():
            names = primary_key(state.class_)
            # Of a new row all attributes count as changed.
            if not state.committed_state.keys().isdisjoint(names) and any(
                before.values.get(name) != state.dict.get(name) for name in names
            ):
                return True
        new = self._created
        return bool(new) and any(_key_of(row) != key for (_, key), row in new.items())

    async def write_message(self, consumer: str) -> None:
        """Write what the message has changed if the database reacts to each version.

        Raises `CatalogChanged` if that was not known.
        """
        known = cast(SharedSession, self._known)
        added, known.recent = known.recent, []
        for row in added:
            self._taken[instance_state(row)] = self.message
            if isinstance(row, Aggregate):
                self._added.setdefault(_base(type(row)), []).append(row)
        new = (*added, *self._created.values())
        changed = (
            state.class_
            for state, before in self._before.items()
            if self.writes.has_flushed or before.has_changed(state)
        )
        if await self.writes.write_message(
            consumer,
            {*map(type, new), *changed},
            is_first=self.message == 1,
            has_new_key=self._has_new_key,
        ):
            known.by_engine(Session.expunge_all)
            self.locked, self._taken = {}, {}
            self._added, self._new = {}, {}
            self.is_stale = True

    async def flush(self) -> None:
        """Write the changed rows."""
        if self.writes.has_related:
            self.check()
        await self.writes.flush()

    async def end(self) -> None:
        """Write the rest, at the end of a run, and close the session."""
        if self.writes.has_related:
            self.check()
        await self.writes.end(self.message)
        self.release()

    def release(self) -> None:
        """Close the session: a handler may have kept its rows, and be called again with them."""
        self._known.by_engine(Session.close)

    async def get(self, entity: type[A], key: Key) -> A | None:
        """Return the locked row; one that is not declared is fetched and locked now.

        A row that another message of the batch has changed is read back, unless the database would
        return the values that are in memory.
        """
        place = entity, canonical(entity, key)
        if not self._has(place):
            try:
                async with self._statement:
                    if not self._has(place):
                        await self.lock(entity, {place[1]})
            except BaseException as error:
                self.error = self.error or error  # others of this message fail by the first
                raise
        row = self.locked[place]
        if row is None:
            return None
        state = instance_state(row)
        if self._taken.get(state, self.message) != self.message:
            self.writes.keep_version(state)
        self._taken[state] = self.message
        self._note(state)
        return cast(A, row)

    def _note(self, state: InstanceState[Any]) -> None:
        """Note what the message finds in a row, so that its changes can be undone."""
        if isinstance(self._known, SharedSession) and state not in self._before:
            values, unwritten = state.dict.copy(), state.committed_state.copy()
            self._before[state] = Snapshot(values, unwritten, state.modified)

    def raise_error(self) -> None:
        """Raise the error of a statement, or `HandlerFault` if one is cancelled or under way."""
        if self._statement.locked():
            raise HandlerFault(UNDER_WAY)
        if self.error is not None:
            is_cancelled = isinstance(self.error, asyncio.CancelledError)
            raise HandlerFault(CANCELLED) if is_cancelled else self.error

    def _has(self, place: Place) -> bool:
        """Whether the row in memory is what the database would return."""
        if place not in self.locked:
            return False
        row = self.locked[place]
        if not isinstance(self._known, SharedSession):
            # A row that is deleted and created anew before a flush would keep its old values.
            return (
                row is not None
                and row in self._known
                and not (instance_state(row).expired or row in self._known.deleted)
            )
        if row is None:
            return self._find_new(place, self._known.recent)
        state = instance_state(row)
        if not (self._known.identity_map.contains_state(state) or row in self._known):
            return False  # it was read again, or undone, by another name
        if self._taken.get(state, self.message) == self.message:
            return True
        if state.key is None and _key_of(row) != place[1]:
            return False
        return self.writes.is_current(row)

    def _find_new(self, place: Place, recent: Iterable[object]) -> bool:
        """Whether it is known which row messages have added at a place where there was none."""
        entity, key = place
        base = _base(entity)
        if any(isinstance(row, base) for row in recent):
            return False
        if added := self._added.get(base):
            # Some get their keys from the database.
            self._added[base] = [row for row in added if None in key_of(row)]
            for row in added:
                if None not in key_of(row):
                    set_defaults(row)
                    self._new[base, _key_of(row)] = row
            if self._added[base]:
                return False
        found = self._new.get((base, key))
        if found is None:
            return True
        if found not in self._known or not isinstance(found, entity):
            return False
        if not self.writes.is_current(found):
            return False
        self.locked[place] = found
        return True

    def places(self) -> Iterator[Place]:
        """Yield the places that are locked, after those that `lock` waits for."""
        yield from self._wanted
        yield from self.locked

    async def lock(self, entity: type[Aggregate], keys: set[Key]) -> None:
        """Fetch and lock the rows that exist, in the order of their keys, in one statement."""
        keys = {canonical(entity, key) for key in keys}
        if isinstance(self._known, SharedSession):
            await self.writes.learn({entity})
        await self.flush()
        self.writes.has_related |= any(
            mapper.relationships for mapper in sa.inspect(entity).self_and_descendants
        )
        for key in keys if self.locked else ():
            row = self.locked.get((entity, key))
            if row is not None and row in self._known and not instance_state(row).expired:
                self._known.by_engine(partial(Session.expunge, instance=row))
        self._wanted = ((entity, key) for key in keys)
        columns = {f"key_{place}": list(one) for place, one in enumerate(zip(*keys, strict=True))}
        rows = await by_engine(
            self.session,
            # A joined relationship repeats rows.
            lambda session: Session.scalars(session, locking(entity), columns).unique().all(),
        )
        found = {canonical(entity, instance_state(row).identity or ()): row for row in rows}
        if unexpected := found.keys() - keys:
            raise TypeError(
                f"{entity.__name__} has the key {unexpected.pop()!r}, but was requested as"
                f" {next(iter(keys))!r}: use the type that the column holds"
            )
        self.locked |= {(entity, key): found.get(key) for key in keys}
        self.writes.was_read(rows)

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
                and not self._holds(row, canonical(type(row), instance_state(row).identity or ()))
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
        state = instance_state(row)
        if self._taken.get(state, self.message) != self.message:  # another message has left it
            cast(SharedSession, self._known).want()
        self._note(state)
        values = () if state.expired else key_of(row)
        if None in values:
            raise TypeError("an event of=row needs the row's primary key: flush first")
        key = canonical(type(row), values)
        if (
            not values
            or state.session_id != self._known.hash_key
            or not (self._holds(row, key) or row in self._known.new or row in self._known.added)
        ):
            raise TypeError(
                f"an event of={type(row).__name__} needs a row that is locked, or events lose"
                " their order: fetch it by tx.load or tx.load_or_create, and once more after a"
                " savepoint was rolled back"
            )
        return record_key(key)

    def _holds(self, row: Aggregate, key: Key) -> bool:
        if self.locked.get((type(row), key)) is row:
            return True
        # The row may have been loaded as an instance of a base class.
        return any(self.locked.get((one, key)) is row for one in type(row).__mro__)

    def create(self, entity: type[A], key: Key) -> A:
        """Add a new row to the session."""
        row, place = create(entity, key), canonical(entity, key)
        Session.add(self._known, row)
        self._taken[instance_state(row)] = self.message
        if isinstance(self._known, SharedSession):
            self._known.recent = [one for one in self._known.recent if one is not row]
            self._created[entity, place] = row
        self._new[_base(entity), place] = self.locked[entity, place] = row
        return row


def _key_of(row: Aggregate) -> Key:
    return canonical(type(row), key_of(row))


@cache_by_class
def _base(entity: type[Any]) -> type[Aggregate]:
    """Return the base class of those that share a primary key."""
    return cast(type[Aggregate], sa.inspect(entity).base_mapper.class_)
