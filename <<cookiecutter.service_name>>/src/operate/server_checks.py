"""Checks of the PostgreSQL server: the rows of each statement are what is not as it should be."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta

import asyncpg

from .health import Finding, Level

LONG = timedelta(minutes=5)
"""How long a transaction may be open."""
BLOATED = 10_000
"""Dead rows of a table that has not a tenth as many living ones."""
OLDEST_POSTGRESQL = 14
_HOT = ["backlog", "backlog_lane", "outbox_cursor", "outbox_rejected", "position", "scheduled"]
"""Tables whose rows are updated and deleted; the others are dropped as a whole."""


@dataclass(frozen=True)
class ServerCheck:
    """A statement; its rows fill in the texts, and may have the `level`."""

    name: str
    level: Level
    found: str
    advice: str
    statement: str
    arguments: tuple[object, ...] = ()

    async def findings(self, connection: asyncpg.Connection) -> AsyncIterator[Finding]:
        """Yield a finding for each row."""
        for row in await connection.fetch(self.statement, *self.arguments):
            level = row.get("level", self.level)
            yield Finding(level, self.found.format(**row), self.advice.format(**row))


CHECKS = (
    ServerCheck(
        "server",
        "ok",
        "PostgreSQL {version}",
        "",
        "SELECT current_setting('server_version') AS version",
    ),
    ServerCheck(
        "server version",
        "wrong",
        "PostgreSQL {version} is older than {oldest}",
        "upgrade the server",
        """
SELECT current_setting('server_version') AS version, $1::int AS oldest
 WHERE current_setting('server_version_num')::int < 10000 * $1::int
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
        "prepared transactions",
        "warning",
        "the prepared transaction {gid} is open: nothing is vacuumed meanwhile",
        "COMMIT PREPARED or ROLLBACK PREPARED '{gid}'",
        """
SELECT gid FROM pg_prepared_xacts WHERE prepared < clock_timestamp() - $1::interval LIMIT 5
""",
        (LONG,),
    ),
    ServerCheck(
        "replication slots",
        "warning",
        "replication slot {slot_name} has no reader, and keeps {megabytes:,} MB of the log, and"
        " dead rows",
        "start its reader, or SELECT pg_drop_replication_slot('{slot_name}')",
        """
SELECT slot_name, megabytes, CASE WHEN megabytes > 1000 THEN 'wrong' ELSE 'warning' END AS level
  FROM (SELECT slot_name, COALESCE(
                   pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn) / 1000000, 0)::bigint
                   AS megabytes
          FROM pg_replication_slots WHERE NOT active) AS unread
 ORDER BY slot_name
""",
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
