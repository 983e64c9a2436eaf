"""A clock that tests set, for all that is asked of their database."""

from datetime import timedelta

import asyncpg

_DEFAULTS = """
SELECT adrelid::regclass::text AS relation, attname AS name, pg_get_expr(adbin, adrelid) AS default
  FROM pg_attrdef JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum
 WHERE attgenerated = '' AND pg_get_expr(adbin, adrelid) ~ '(now|_timestamp)\\(\\)'
"""
_TIMES = {"clock_timestamp": "VOLATILE", "now": "STABLE", "statement_timestamp": "STABLE"}
_PATH = "public, settable, pg_catalog"
# Whatever is asked later finds these before PostgreSQL's own.
_CLOCK = (
    "CREATE SCHEMA settable",
    "CREATE TABLE settable.clock AS SELECT interval '0' AS ahead",
    *(
        f"CREATE FUNCTION settable.{name}() RETURNS timestamptz LANGUAGE plpgsql {kind} AS"
        f" 'BEGIN RETURN pg_catalog.{name}() + (SELECT ahead FROM settable.clock); END'"
        for name, kind in _TIMES.items()
    ),
)


class Clock:
    """The database's clock: of connections that are opened after it, and of `db`."""

    def __init__(self, db: asyncpg.Connection) -> None:
        self._db = db

    async def put_up(self) -> None:
        """Take the place of PostgreSQL's clock, in the defaults of columns too."""
        defaults = await self._db.fetch(_DEFAULTS)
        for statement in _CLOCK:
            await self._db.execute(statement)
        database = await self._db.fetchval("SELECT current_database()")
        await self._db.execute(f"ALTER DATABASE {database} SET search_path = {_PATH}")
        await self._db.execute(f"SET search_path = {_PATH}")
        for relation, name, default in defaults:
            await self._db.execute(f"ALTER TABLE {relation} ALTER {name} SET DEFAULT {default}")

    async def set(self, ahead: timedelta) -> None:
        """Set it so far ahead of what it really is, or behind."""
        await self._db.execute("UPDATE settable.clock SET ahead = $1", ahead)
