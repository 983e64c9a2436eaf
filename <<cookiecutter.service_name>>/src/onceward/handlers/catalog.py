"""The catalog of the database: what PostgreSQL does with each version of a row.

Messages that share a session are written together, and of a row that several of them change only
the last version would be written. So the catalog is asked which tables must get each version.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.dialects.postgresql.asyncpg import dialect
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Mapper

from onceward.errors import Repeat

from . import statements
from .columns import cache_by_class

_NAMES = sa.bindparam("names", type_=ARRAY(sa.Text), literal_execute=True)
"""A part of the text, so that PostgreSQL keeps its plan, which takes longer than the query."""
_REACTIONS = sa.text(statements.READ_REACTIONS).bindparams(_NAMES)
_STATE = sa.text(statements.READ_CATALOG_STATE).bindparams(_NAMES)

UNNAMED = "ALL"
"""Stands for deferred constraints whose name one that is not deferred has, too."""
_EVENTS = ("before_insert", "after_insert", "before_update", "after_update")
_quoted = dialect().identifier_preparer  # type: ignore[no-untyped-call]


class Reactions(NamedTuple):
    """How the database reacts to a version of a row."""

    judges: bool
    """It may reject it: by CHECK, UNIQUE, EXCLUDE, a foreign key, a domain, a policy, an expression
    in an index, a NOT NULL that the class does not have."""
    to_insert: bool
    """It does something else with a new one, by a trigger for each row or by a rule."""
    to_update: bool
    deferred: tuple[str, ...]
    """Constraints that it checks at the end of the transaction."""

    @property
    def is_any(self) -> bool:
        """Whether a message has to be written by itself."""
        return self.to_insert or self.to_update or bool(self.deferred)


class CatalogChanged(Repeat):
    """Since the process has read the catalog, a table has got or lost constraints or triggers."""


class Catalog:
    """What a process knows of the tables of handlers."""

    def __init__(self) -> None:
        self._known: dict[type[Any], Reactions] = {}
        self._state: int | None = None
        """That of the catalog's rows on these tables, when the reactions were read."""
        self.reacting: set[str] = set()
        """Consumers whose messages are written by themselves."""

    async def learn(
        self, connection: AsyncConnection, entities: Set[type[Any]]
    ) -> Mapping[type[Any], Reactions]:
        """Return the reactions to rows of mapped classes, and of those that derive from them."""
        derived = [one for entity in entities for one in _derived(entity)]
        if unknown := [one for one in derived if one not in self._known]:
            self._known |= await _read(connection, unknown)
        return {one: self._known[one] for one in derived}

    async def check(
        self, connection: AsyncConnection, known: Mapping[type[Any], Reactions]
    ) -> None:
        """Raise `CatalogChanged` if the database now reacts in another way.

        After a transaction has written a table, changes of its definition wait for its end.
        """
        # Of all tables, so that the statement stays the same.
        entities = [*self._known]
        state = await connection.scalar(_STATE, {"names": _names_of(entities)})
        if state != self._state:
            self._known |= await _read(connection, entities)
            self._state = state
        changed = [one.__name__ for one in known if known[one] != self._known[one]]
        if changed:
            self.reacting.clear()
            raise CatalogChanged(f"constraints or triggers have changed: {', '.join(changed)}")


async def _read(
    connection: AsyncConnection, entities: Iterable[type[Any]]
) -> dict[type[Any], Reactions]:
    rows = await connection.execute(_REACTIONS, {"names": _names_of(entities)})
    by_name = {row.name: row for row in rows}
    found = {}
    for entity in entities:
        tables = _tables_of(entity)
        parts = [by_name[name] for name in tables if name in by_name]
        is_watched = _is_watched(entity) or len(parts) < len(tables)
        found[entity] = Reactions(
            judges=any(one.judges or tables[one.name] & {*one.not_null} for one in parts),
            to_insert=is_watched or any(one.to_insert for one in parts),
            to_update=is_watched or any(one.to_update for one in parts),
            deferred=tuple(name for one in parts for name in one.deferred),
        )
    return found


def _names_of(entities: Iterable[type[Any]]) -> Sequence[str]:
    return sorted({name for entity in entities for name in _tables_of(entity)})


@cache_by_class
def _derived(entity: type[Any]) -> Iterable[type[Any]]:
    return [mapper.class_ for mapper in sa.inspect(entity).self_and_descendants]


@cache_by_class
def _tables_of(entity: type[Any]) -> Mapping[str, Set[str]]:
    """Return the columns that may be NULL in a class's tables, and in those of its relationships,
    by the table's name as SQL has it."""
    mapper: Mapper[Any] = sa.inspect(entity)
    tables = (*mapper.tables, *(one.secondary for one in mapper.relationships))
    return {
        _quoted.format_table(table): {one.name for one in table.columns if one.nullable}
        for table in tables
        if isinstance(table, sa.Table)
    }


def _is_watched(entity: type[Any]) -> bool:
    """Whether SQLAlchemy does something else with each version: events, or a version counter."""
    mapper: Mapper[Any] = sa.inspect(entity)
    events = [getattr(mapper.dispatch, name) for name in _EVENTS]
    return mapper.version_id_col is not None or any(events)
