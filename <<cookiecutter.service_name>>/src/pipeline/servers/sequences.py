"""Sequences of the engine's tables, which order what they number.

Logical replication carries rows over and leaves sequences behind: what is then added would come
before what is there.
"""

import asyncpg

from pipeline.schema import FIRST_LANE_OF_CALLS

# The catalog names those of identity columns; the one of calls numbers some of a table's rows.
_SEQUENCES = f"""
SELECT 'pipeline.backlog_call_seq' AS name, '"offset"' AS field,
       'pipeline.backlog WHERE lane >= {FIRST_LANE_OF_CALLS}' AS rows
 UNION ALL
SELECT sequence.oid::regclass::text, quote_ident(attname), refobjid::regclass::text
  FROM pg_class AS sequence
  JOIN pg_depend ON classid = 'pg_class'::regclass AND objid = sequence.oid
   AND refclassid = classid AND deptype IN ('a', 'i')
  JOIN pg_attribute ON attrelid = refobjid AND attnum = refobjsubid
 WHERE sequence.relkind = 'S' AND relnamespace = 'pipeline'::regnamespace
 ORDER BY 1
"""

_BEHIND = """
SELECT highest FROM (SELECT max({field}) AS highest FROM {rows}) AS assigned
 WHERE highest > COALESCE(pg_sequence_last_value('{name}'), 0)
"""


async def behind(connection: asyncpg.Connection, seconds: float | None = None) -> dict[str, int]:
    """Return the sequences that are behind their rows, with the highest number of a row."""
    found = {}
    for one in await connection.fetch(_SEQUENCES):
        highest = await connection.fetchval(_BEHIND.format(**one), timeout=seconds)
        if highest is not None:
            found[one["name"]] = highest
    return found


async def advance(connection: asyncpg.Connection, seconds: float) -> None:
    """Let each sequence go on after its rows; `seconds` is the time-out of each statement."""
    for name, highest in (await behind(connection, seconds)).items():
        await connection.execute("SELECT setval($1::text::regclass, $2)", name, highest)
