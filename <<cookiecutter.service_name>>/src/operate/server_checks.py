"""Checks of the PostgreSQL server: the rows of each statement are what is not as it should be."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta

import asyncpg

from .health import Finding, Level

LONG = timedelta(minutes=5)
"""How long a transaction may be open."""
OLDEST_POSTGRESQL = 14


@dataclass(frozen=True)
class ServerCheck:
    """A statement; its rows fill in the texts."""

    name: str
    level: Level
    found: str
    advice: str
    statement: str
    arguments: tuple[object, ...] = ()

    async def findings(self, connection: asyncpg.Connection) -> AsyncIterator[Finding]:
        """Yield a finding for each row."""
        for row in await connection.fetch(self.statement, *self.arguments):
            yield Finding(self.level, self.found.format(**row), self.advice.format(**row))


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
)
