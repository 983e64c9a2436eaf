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

from pipeline.errors import Repeat

from .columns import cache_by_class

_NAMES = sa.bindparam("names", type_=ARRAY(sa.Text), literal_execute=True)
# A table has the constraints and triggers of its partitions and children, too. In `tgtype`, 1 is a
# trigger for each row, 4 is INSERT, 8 is DELETE, 16 is UPDATE. A view has a rule for SELECT ('1').
# A foreign key that refers to a unique column, and changes its rows with that, has a trigger here,
# too. SET CONSTRAINTS goes by name: it fails if one of that name is not deferrable.
_REACTIONS = sa.text("""
WITH RECURSIVE of_name (name, id) AS (
    SELECT name, to_regclass(name)::oid FROM unnest((:names)::text[]) AS name
     UNION
    SELECT name, inhrelid FROM of_name JOIN pg_inherits ON inhparent = id
), part (name, id, kind, may_reject) AS (
    SELECT name, id, relkind, relkind = 'p' OR relispartition OR relrowsecurity
      FROM of_name JOIN pg_class ON oid = id
)
SELECT name,
       bool_or(may_reject
               OR EXISTS (SELECT FROM pg_constraint
                           WHERE conrelid = id AND contype IN ('c', 'f', 'x'))
               OR EXISTS (SELECT FROM pg_index
                           WHERE indrelid = id
                             AND (indisunique AND NOT indisprimary OR indexprs IS NOT NULL
                                  OR indpred IS NOT NULL))
               OR EXISTS (SELECT FROM pg_attribute
                            JOIN pg_type AS own ON own.oid = atttypid
                            LEFT JOIN pg_type AS of ON of.oid = own.typelem
                           WHERE attrelid = id AND (attgenerated = 's' OR own.typtype IN ('c', 'd')
                                                    OR of.typtype IN ('c', 'd')))) AS judges,
       bool_or(kind IN ('v', 'f') OR fires & 4 > 0 OR rules) AS to_insert,
       bool_or(kind IN ('v', 'f') OR fires & 24 > 0 OR rules OR cascades) AS to_update,
       ARRAY(SELECT DISTINCT attname::text
               FROM part AS one
               JOIN pg_attribute ON attrelid = one.id
              WHERE one.name = part.name AND attnotnull) AS not_null,
       ARRAY(SELECT DISTINCT CASE WHEN EXISTS (
                         SELECT FROM pg_constraint AS other
                          WHERE other.conname = its.conname AND NOT other.condeferred
                            AND other.connamespace = its.connamespace)
                    THEN 'ALL' ELSE format('%I.%I', nspname, conname) END
               FROM part AS one
               JOIN pg_trigger ON tgrelid = one.id
               JOIN pg_constraint AS its ON its.oid = tgconstraint
               JOIN pg_namespace ON pg_namespace.oid = connamespace
              WHERE one.name = part.name AND condeferred
                AND (its.conrelid = one.id OR NOT EXISTS (
                         SELECT FROM pg_constraint AS key
                          WHERE key.conrelid = one.id AND key.contype = 'p'
                            AND key.conkey @> its.confkey))
              ORDER BY 1) AS deferred
  FROM part,
       LATERAL (SELECT COALESCE(bit_or(tgtype), 0) AS fires
                  FROM pg_trigger
                 WHERE tgrelid = id AND NOT tgisinternal AND tgenabled <> 'D' AND tgtype & 1 > 0
               ) AS triggers,
       LATERAL (SELECT count(*) > 0 AS cascades
                  FROM pg_trigger JOIN pg_constraint AS key ON key.oid = tgconstraint
                 WHERE tgrelid = id AND confrelid = id AND confupdtype IN ('c', 'n', 'd')
                   AND NOT EXISTS (SELECT FROM pg_constraint AS its
                                    WHERE its.conrelid = id AND its.contype = 'p'
                                      AND its.conkey @> key.confkey)) AS keys,
       LATERAL (SELECT count(*) > 0 AS rules
                  FROM pg_rewrite
                 WHERE ev_class = id AND ev_type <> '1') AS rewrites
 GROUP BY name
""").bindparams(_NAMES)
# Each of these rows is another one after a change. Names of tables are a part of the text, so that
# PostgreSQL keeps its plan, which takes longer than the query.
_STATE = sa.text("""
WITH RECURSIVE one (id) AS (
    SELECT to_regclass(name)::oid FROM unnest((:names)::text[]) AS name
     UNION
    SELECT inhrelid FROM one JOIN pg_inherits ON inhparent = id
), part (ids) AS (
    SELECT array_agg(id) FROM one
)
SELECT hashtextextended(string_agg(concat_ws(' ', id, state), ',' ORDER BY id, state::text), 0)
  FROM (SELECT id, NULL FROM one
         UNION ALL
        SELECT attrelid, pg_attribute.xmin
          FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
         WHERE attrelid = ANY ((SELECT ids FROM part)::oid[]) AND NOT relispartition
         UNION ALL
        SELECT oid, xmin FROM pg_class WHERE oid = ANY ((SELECT ids FROM part)::oid[])
         UNION ALL
        SELECT indrelid, xmin FROM pg_index WHERE indrelid = ANY ((SELECT ids FROM part)::oid[])
         UNION ALL
        SELECT conrelid, xmin
          FROM pg_constraint WHERE conrelid = ANY ((SELECT ids FROM part)::oid[])
         UNION ALL
        SELECT other.oid, other.xmin
          FROM pg_trigger
          JOIN pg_constraint AS its ON its.oid = tgconstraint
          JOIN pg_constraint AS other ON other.conname = its.conname
           AND other.connamespace = its.connamespace
         WHERE tgrelid = ANY ((SELECT ids FROM part)::oid[]) AND tginitdeferred
         UNION ALL
        SELECT tgrelid, xmin FROM pg_trigger WHERE tgrelid = ANY ((SELECT ids FROM part)::oid[])
         UNION ALL
        SELECT ev_class, xmin FROM pg_rewrite WHERE ev_class = ANY ((SELECT ids FROM part)::oid[])
         UNION ALL
        SELECT inhparent, xmin
          FROM pg_inherits WHERE inhparent = ANY ((SELECT ids FROM part)::oid[])
       ) AS states (id, state)
""").bindparams(_NAMES)

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
