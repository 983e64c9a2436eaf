"""SQL of the window: which events of the outbox a relay has still to publish.

Parameters are described where a statement is executed. The statements that return a page are
executed on the primary, each by itself in READ COMMITTED or in a read-only snapshot, so that the
snapshot that they return is the one that they read with. A snapshot's xmax is the latest
*completed* transaction + 1, so rows of running ones may lie above it: the window is not bounded by
an id. `id + 0` and `xid <` keep the planner off the wrong index; pg_sequence_last_value prevents a
parallel plan, in which the head row might not come first. No statement names a day: the index of
each partition is searched.
"""

from pipeline.handlers import staged

COLUMNS = f"id, created_at, {staged.COLUMNS}"
"""An event, as it is sent."""


def filled(page: str, *, columns: str, place: str, at_most: str) -> str:
    """Return the statement that reads a page, cut off behind the event that fills it.

    PostgreSQL computes the size of a payload without reading it.
    """
    return f"""
SELECT {columns}
  FROM (SELECT page.*,
               sum(octet_length(payload)) OVER (
                   ORDER BY {place} ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
          FROM ({page}) AS page) AS summed
 WHERE before < {at_most} OR before IS NULL
 ORDER BY {place}
"""


def _headed(page: str, *, place: str, at_most: str) -> str:
    """Put a row before those of the page, with what is common to them."""
    rows = filled(page, columns=f"NULL, NULL, NULL, {COLUMNS}", place=place, at_most=at_most)
    return f"""
SELECT pg_postmaster_start_time() AS server, pg_current_snapshot() AS target,
       pg_sequence_last_value('pipeline.outbox_id_seq') AS high_id,
       {COLUMNS}
  FROM (SELECT (NULL::pipeline.outbox).*) AS nothing
 UNION ALL ({rows})"""


_BEGUN_SINCE = "xid >= pg_snapshot_xmax($1) AND xid < pg_snapshot_xmax(pg_current_snapshot())"
"""The condition of rows whose transaction has begun since the snapshot `$1`, in SQL."""

READ_WINDOW = _headed(
    f"""
SELECT {COLUMNS}
  FROM (SELECT {COLUMNS}
          FROM pipeline.outbox
         WHERE {_BEGUN_SINCE} AND shard = ANY ($2)
        UNION ALL
        SELECT {COLUMNS}
          FROM pipeline.outbox
         WHERE shard = ANY ($2)
           AND xid = ANY (ARRAY(
               SELECT running FROM pg_snapshot_xip($1) AS running
                WHERE pg_visible_in_snapshot(running, pg_current_snapshot())))) AS unseen
 ORDER BY id + 0
 LIMIT $3""",
    place="id + 0",
    at_most="$4",
)
"""Return events that became visible since the snapshot `$1`, after a row with what they share.

Locks: none.
Plan: `outbox_xid_idx` of each day. A sort of the whole window by id.
"""

MEASURE_WINDOW = f"""
SELECT count(*) > $2 AS is_wide, pg_postmaster_start_time() AS server,
       pg_current_snapshot() AS target, pg_sequence_last_value('pipeline.outbox_id_seq') AS high_id
  FROM ((SELECT xid FROM pipeline.outbox WHERE {_BEGUN_SINCE} ORDER BY xid LIMIT $2 + 1)
        UNION ALL
        (SELECT ended.xid FROM pg_snapshot_xip($1) AS running, LATERAL (
                SELECT xid FROM pipeline.outbox WHERE xid BETWEEN running AND running
                 ORDER BY xid LIMIT $2 + 1) AS ended)) AS unseen
"""
"""Return whether a window has more rows than one page scans.

`READ_WINDOW` reads a whole window to sort it. This one and `FIND_LOWEST_ID` open a wide one at an
id that none in it is below.

Locks: none.
Plan: `outbox_xid_idx` of each day, up to a limit.
"""

FIND_LOWEST_ID = """
SELECT min(id) AS id, max(xid::text::bigint) AS xid, count(*) AS rows
  FROM (SELECT id, xid FROM pipeline.outbox
         WHERE xid >= $1 AND xid < $2 ORDER BY xid LIMIT $3) AS piece
"""
"""Return the lowest id of a piece of a window, the last transaction of the piece, and its rows.

The transaction is returned as a number: PostgreSQL 14 has no max(xid8).

Locks: none.
Plan: `outbox_xid_idx` of each day, up to a limit.
"""

READ_PAGE = _headed(
    f"""
SELECT {COLUMNS}
  FROM pipeline.outbox
 WHERE id > $3 AND id <= $4
   AND NOT pg_visible_in_snapshot(xid, $1) AND pg_visible_in_snapshot(xid, $2)
   AND shard = ANY ($5)
 ORDER BY id
 LIMIT $6""",
    place="id",
    at_most="$7",
)
"""Return the next events of an open window, after a row with what they share.

Functions instead of comparisons of xid make the planner use the index on id.

Locks: none.
Plan: `outbox_id_idx` of each day, for a range of ids.
"""

COUNT_UNPUBLISHED = """
SELECT topic, count(*) AS count,
       GREATEST(extract(epoch FROM clock_timestamp() - min(created_at)), 0)::float AS oldest
  FROM (SELECT topic, created_at
          FROM pipeline.outbox JOIN pipeline.outbox_cursor USING (shard)
         WHERE xid >= (SELECT pg_snapshot_xmin(seen) FROM pipeline.outbox_cursor
                        ORDER BY pg_snapshot_xmin(seen) LIMIT 1)
           AND NOT pg_visible_in_snapshot(xid, seen)
           AND (target IS NULL OR id > last_id OR NOT pg_visible_in_snapshot(xid, target))
         ORDER BY xid LIMIT $1) AS unpublished
 GROUP BY topic
"""
"""Count events that are not published, up to a limit, and for how long each topic's oldest waits.

It also counts what a relay has published in the quarter of a second since it wrote its cursor.

Locks: none.
Plan: `outbox_xid_idx` of each day, from the oldest progress; a scan of `outbox_cursor`. Published
events above that are read, too: while a transaction runs for long, or a shard has no relay, all
since then. Only commands execute it.
"""

READ_SNAPSHOT = "SELECT pg_postmaster_start_time() AS server, pg_current_snapshot() AS snapshot"
"""Return the current snapshot, and when the server was started.

Locks: none.
Plan: reads no table.
"""
