"""Checks of the PostgreSQL server: the rows of each statement are what is not as it should be."""

from dataclasses import dataclass
from datetime import timedelta

from .health import Check

LONG = timedelta(minutes=5)
"""How long a transaction may be open."""
BLOATED = 10_000
"""Dead rows of a table that has not a tenth as many living ones."""
OLDEST_POSTGRESQL = 14
_HOT = ["backlog", "backlog_lane", "outbox_cursor", "outbox_rejected", "position", "scheduled"]
"""Tables whose rows are updated and deleted; the others are dropped as a whole."""


@dataclass(frozen=True)
class ServerCheck(Check):
    """A statement; its rows fill in the texts, and may have the `level`."""

    statement: str
    arguments: tuple[object, ...] = ()


CHECKS = (
    ServerCheck(
        "server",
        "ok",
        "PostgreSQL {version}, of which {oldest} is the oldest that will do",
        "{advice}",
        """
SELECT current_setting('server_version') AS version, $1 AS oldest,
       CASE WHEN is_old THEN 'wrong' ELSE 'ok' END AS level,
       CASE WHEN is_old THEN 'upgrade the server' ELSE '' END AS advice
  FROM (SELECT current_setting('server_version_num')::int < 10000 * $1::int AS is_old) AS server
""",
        (OLDEST_POSTGRESQL,),
    ),
    ServerCheck(
        "standby",
        "wrong",
        "this server is a standby, on which nothing can be written",
        "let PIPELINE_DATABASE_URL name the primary",
        "SELECT WHERE pg_is_in_recovery()",
    ),
    ServerCheck(
        "jit",
        "warning",
        "jit is on: to compile a page of the outbox takes longer than to read it",
        "ALTER ROLE {role} SET jit = off",
        "SELECT quote_ident(current_user) AS role WHERE current_setting('jit') <> 'off'",
    ),
    ServerCheck(
        "activity",
        "warning",
        "role {role} may not see whether others hold transactions open",
        "GRANT pg_read_all_stats TO {role}",
        """
SELECT quote_ident(current_user) AS role WHERE NOT pg_has_role('pg_read_all_stats', 'USAGE')
""",
    ),
    ServerCheck(
        "long transactions",
        "warning",
        "a transaction of process {pid} of {name} is open since {xact_start}: nothing is vacuumed"
        " meanwhile",
        "end it: SELECT pg_terminate_backend({pid})",
        """
SELECT pid, COALESCE(NULLIF(application_name, ''), usename, '?') AS name, xact_start
  FROM pg_stat_activity
 WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'
   AND xact_start < clock_timestamp() - $1::interval
 ORDER BY xact_start LIMIT 5
""",
        (LONG,),
    ),
    ServerCheck(
        "bloat",
        "warning",
        "pipeline.{relname} has {dead:,} dead rows for {living:,}",
        "end what is open for long, then VACUUM pipeline.{relname}",
        """
SELECT relname, n_live_tup AS living, n_dead_tup AS dead FROM pg_stat_user_tables
 WHERE schemaname = 'pipeline' AND relname = ANY ($1)
   AND n_dead_tup > $2 AND n_dead_tup > 10 * n_live_tup
 ORDER BY relname
""",
        (_HOT, BLOATED),
    ),
    ServerCheck(
        "sizes",
        "ok",
        "{total:,} MB in all, the largest with their indexes: {largest}",
        "",
        """
  WITH sizes AS (
       SELECT root.relname AS name,
              (sum(pg_total_relation_size(one.oid)) / 1000000)::bigint AS megabytes
         FROM pg_class AS one
         JOIN pg_class AS root ON root.oid = COALESCE(pg_partition_root(one.oid), one.oid)
        WHERE one.relnamespace = 'pipeline'::regnamespace AND one.relkind IN ('r', 'p')
        GROUP BY root.relname)
SELECT sum(megabytes)::bigint AS total,
       (SELECT string_agg(format('%s %s MB', name, megabytes), ', ' ORDER BY megabytes DESC)
          FROM (SELECT * FROM sizes ORDER BY megabytes DESC LIMIT 4) AS first) AS largest
  FROM sizes
""",
    ),
)
