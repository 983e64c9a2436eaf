"""What the database lets each part of a service do, where the parts have roles of their own.

The owner of the tables migrates. Retention makes and drops partitions, which PostgreSQL lets
nobody do but their owner: its role owns the tables that have partitions, and no others.
"""

import re
from typing import NamedTuple

import asyncpg
from sqlalchemy import MetaData

from pipeline.handlers.staging import COLUMNS
from pipeline.retention import partitions
from pipeline.schema import SCHEMA

from .errors import Refused

RETENTION = "retention"
ROLES = {
    "service": "consume",
    "relay": "publish",
    "operator": "look at everything, and decide on what is dead",
    RETENTION: "make and drop partitions, as their owner",
}
"""What each may do, in words."""

PARTITIONED = ("inbox", "outbox")
"""The tables that retention owns, with their partitions."""

# The server gives each event its `id` and `xid`; any other would break the order, or hide it.
_PUT_EVENTS = f"INSERT ({COLUMNS})"
_ALL = "SELECT, INSERT, UPDATE, DELETE"
# What was discarded, locked by one of its columns.
_DELETE = "UPDATE (discarded_at), DELETE"
_JUDGE = "UPDATE (reason, attempts, died_at, discarded_at, discarded_by, discarded_why, {more})"

# To lock a row takes the right to update one of its columns; such are those of a single column.
GRANTS: dict[str, dict[str, str]] = {
    "position": {"service": "SELECT, INSERT, UPDATE", "operator": "SELECT"},
    "inbox_generation": dict.fromkeys(ROLES, "SELECT") | {RETENTION: "SELECT, UPDATE"},
    "inbox_closed": {"service": "SELECT", "operator": "SELECT", RETENTION: _ALL},
    "inbox_consumer": {"service": "SELECT, INSERT", "operator": "SELECT"},
    "inbox": {"service": _ALL, "operator": "SELECT"},
    "inbox_filter": {
        "service": "SELECT, DELETE",
        "relay": "SELECT, DELETE",
        "operator": "SELECT",
        RETENTION: _ALL,
    },
    "backlog": {
        "service": _ALL,
        "operator": f"SELECT, {_JUDGE.format(more='waited, due_at, holds')}",
        RETENTION: f"SELECT (key, discarded_at), {_DELETE}",
    },
    "backlog_effect_seq": {"service": "USAGE"},
    "backlog_lane": {
        "service": "SELECT, UPDATE",
        "operator": "SELECT, UPDATE (token, owner, lease_until, starts)",
    },
    "outbox": {
        "service": _PUT_EVENTS,
        "relay": f"SELECT, {_PUT_EVENTS}",  # those that were scheduled
        "operator": "SELECT",
    },
    "scheduled": {
        "service": _ALL,
        "relay": "SELECT, DELETE, UPDATE (scheduled_at)",
        "operator": "SELECT, DELETE",
        RETENTION: "SELECT (event_id, dataref)",
    },
    "claim": {
        "service": "INSERT",
        "operator": "SELECT",
        RETENTION: "SELECT, UPDATE (published_at), DELETE",
    },
    "outbox_closed": {"operator": "SELECT", RETENTION: _ALL},
    "outbox_unsent": {
        "relay": _ALL,
        "operator": f"SELECT, {_JUDGE.format(more='parked_at, error, queue')}",
        RETENTION: f"SELECT (id, event_id, dataref, discarded_at), {_DELETE}",
    },
    "outbox_cursor": {
        "relay": "SELECT, UPDATE",
        "operator": "SELECT, UPDATE (owner)",
        RETENTION: "SELECT",
    },
    "outbox_epoch": dict.fromkeys(("relay", "operator", RETENTION), "SELECT"),
    "outbox_relay": {"relay": _ALL, "operator": "SELECT"},
    "retention_lease": {
        "service": "SELECT, UPDATE (archives)",
        "relay": "SELECT, UPDATE (archives)",
        "operator": "SELECT",
        RETENTION: "SELECT, UPDATE",
    },
}
"""What each role may do with each of the engine's tables that it does not own, and sequences."""


class Need(NamedTuple):
    """A privilege that a role needs on a table of the engine, or on a sequence."""

    table: str
    privilege: str
    columns: str
    """Those that it is for, or nothing for all of them."""

    def __str__(self) -> str:
        which = f" ({self.columns})" if self.columns else ""
        return f"{self.privilege}{which} on {SCHEMA}.{self.table}"


_OWNERS = """
SELECT pg_get_userbyid(position.relowner) AS owner, pg_get_userbyid(outbox.relowner) AS present,
       COALESCE(current_schema(), 'public') AS home
  FROM pg_class AS position, pg_class AS outbox
 WHERE position.oid = 'pipeline.position'::regclass AND outbox.oid = 'pipeline.outbox'::regclass
"""

# A superuser is a member of every role. $1 are roles for a part, $3 is to own partitions.
_MIGHTY = """
SELECT name FROM unnest($1::name[]) AS name
 WHERE CASE name WHEN 'public' THEN true
                 ELSE pg_has_role(name, $2::name, 'MEMBER')
                      OR name <> $3 AND pg_has_role(name, $3::name, 'MEMBER') END
"""

_NOT_OURS = """
SELECT string_agg(quote_ident(name), ', ') AS names, quote_ident(current_user) AS who
  FROM unnest($1::name[]) AS name WHERE NOT pg_has_role(name, 'MEMBER')
"""

# Of partitions that are to be made.
_READERS = """
SELECT DISTINCT reader.rolname
  FROM pg_default_acl, aclexplode(defaclacl) AS acl JOIN pg_roles AS reader ON reader.oid = grantee
 WHERE defaclnamespace = 'pipeline'::regnamespace AND defaclobjtype = 'r'
   AND privilege_type = 'SELECT' AND pg_get_userbyid(defaclrole) = $1
"""

# Also partitions on their way out, which are detached.
_ANOTHERS = """
SELECT relname FROM pg_class
 WHERE relnamespace = 'pipeline'::regnamespace AND relkind IN ('r', 'p')
   AND relname ~ ('^(' || array_to_string($1::text[], '|') || ')(_[gp][0-9]+)?$')
   AND pg_get_userbyid(relowner) <> $2
 ORDER BY relname
"""

_HELD = """
SELECT name, privilege, columns
  FROM unnest($1::text[], $2::text[], $3::text[]) AS needed (name, privilege, columns)
 WHERE CASE
           WHEN privilege = 'OWNERSHIP' THEN
               (SELECT pg_has_role(relowner, 'USAGE')
                  FROM pg_class WHERE oid = ('pipeline.' || name)::regclass)
           WHEN privilege = 'USAGE' THEN has_sequence_privilege('pipeline.' || name, privilege)
           WHEN columns = '' THEN has_table_privilege('pipeline.' || name, privilege)
           ELSE (SELECT bool_and(has_column_privilege('pipeline.' || name, one, privilege))
                   FROM unnest(string_to_array(columns, ', ')) AS one) END
"""


def needs(role: str) -> set[Need]:
    """Return what a role of `ROLES` needs on the engine's tables."""
    owned = PARTITIONED if role == RETENTION else ()
    return {Need(table, "OWNERSHIP", "") for table in owned} | {
        Need(table, privilege, columns)
        for table, granted in GRANTS.items()
        for privilege, columns in re.findall(r"([A-Z]+)(?: \((.*?)\))?", granted.get(role, ""))
    }


async def lacks(connection: asyncpg.Connection) -> dict[str, set[Need]]:
    """Return the roles that the connection's one stands for, and what it lacks for each.

    Its name says nothing of it. It stands for those of which it lacks nothing; and for another if
    something that it has of it, on whichever columns, is for none of which it lacks less.
    """
    every = {role: needs(role) for role in ROLES}
    asked = sorted(set().union(*every.values()))
    rows = await connection.fetch(_HELD, *map(list, zip(*asked, strict=True)))
    held = {Need(*row) for row in rows}
    lacking = {role: needed - held for role, needed in every.items()}
    kinds = {role: {one[:2] for one in needed} for role, needed in every.items()}
    # An owner may do everything.
    kinds[RETENTION] |= {one[:2] for one in asked if one.table in PARTITIONED}
    found = set(ROLES)
    for role in sorted(ROLES, key=lambda one: len(lacking[one]), reverse=True):
        others = set().union(*(kinds[one] for one in found if one != role))
        if lacking[role] and {one[:2] for one in every[role] & held} <= others:
            found.remove(role)
    return {role: lacking[role] for role in ROLES if role in found}


def statements(owners: set[str], names: dict[str, str], tables: list[tuple[str, str]]) -> list[str]:
    """Return what gives the roles of these names all that they need, and takes what they don't.

    `owners` own the engine's tables. `names` are the database's, by those of `ROLES`; one may stand
    for several. `tables` are the service's own, each with its schema: its handlers use them, and
    the others don't.
    """
    granted = {one: _quoted(name) for one, name in names.items()}
    heir = granted.get(RETENTION)
    everyone = ", ".join(sorted(set(granted.values())))
    # An owner from whom something is taken has it no more.
    others = sorted(set(granted.values()) - {heir})
    makers = ", ".join(sorted(map(_quoted, owners)))
    later = f"ALTER DEFAULT PRIVILEGES FOR ROLE {makers} IN SCHEMA {SCHEMA}"
    made = [
        f"REVOKE ALL ON SCHEMA {SCHEMA} FROM PUBLIC, {everyone}",
        f"REVOKE ALL ON ALL TABLES IN SCHEMA {SCHEMA} FROM {', '.join(('PUBLIC', *others))}",
        f"REVOKE ALL ON ALL SEQUENCES IN SCHEMA {SCHEMA} FROM {', '.join(('PUBLIC', *others))}",
        f"GRANT USAGE ON SCHEMA {SCHEMA} TO {everyone}",
        f"GRANT SELECT ON alembic_version TO {everyone}",  # what a process looks at when it starts
    ]
    if others:
        made.append(f"{later} REVOKE ALL ON TABLES FROM {', '.join(others)}")
    if heir:
        made.append(f"GRANT CREATE ON SCHEMA {SCHEMA} TO {heir}")
        made += [
            f"REVOKE ALL ON {SCHEMA}.{name} FROM {heir}"
            for name in GRANTS
            if name not in PARTITIONED
        ]
    made += [f"REVOKE ALL ON {_quoted(*one)} FROM PUBLIC, {everyone}" for one in tables]
    for name, privileges in GRANTS.items():
        made += [
            f"GRANT {many} ON {'SEQUENCE' if many == 'USAGE' else 'TABLE'} {SCHEMA}.{name}"
            f" TO {granted[one]}"
            for one, many in privileges.items()
            if one in granted
        ]
    if "operator" in granted:
        made += [
            # Partitions as well, which `service retention status` looks into.
            f"GRANT SELECT ON ALL TABLES IN SCHEMA {SCHEMA} TO {granted['operator']}",
            f"{later} GRANT SELECT ON TABLES TO {granted['operator']}",
        ]
    if "service" in granted:
        for schema in sorted({schema for schema, _ in tables}):
            named = _quoted(schema)
            made.append(f"GRANT USAGE ON SCHEMA {named} TO {granted['service']}")
            made.append(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {named} TO {granted['service']}")
        made += [f"GRANT {_ALL} ON {_quoted(*one)} TO {granted['service']}" for one in tables]
    return made


def _quoted(*names: str) -> str:
    return ".".join('"' + one.replace('"', '""') + '"' for one in names)


async def grant(connection: asyncpg.Connection, names: dict[str, str], tables: MetaData) -> None:
    """Let the roles do their work and no more: all of it or nothing. Harmless to repeat.

    The connection's role owns the tables, and is a member of retention's, which is made the owner
    of those that have partitions. Raises `asyncpg.UndefinedObjectError` for a role that does not
    exist, and `Refused` for one that can't be held to it, and for what can't be done now.
    """
    async with connection.transaction():
        owner, present, home = await connection.fetchrow(_OWNERS)
        heir = names.get(RETENTION, present)
        mighty = await connection.fetch(_MIGHTY, list(names.values()), owner, heir)
        if mighty:
            raise Refused(
                f"{', '.join(sorted({row['name'] for row in mighty}))}: no role for a single part."
                f" It is everybody, a superuser, or a member of {owner} or of retention's role,"
                " which own the tables: make one of its own"
            )
        if RETENTION not in names and present in names.values():
            raise Refused(
                f"{present} owns the partitions: name it by --to-retention, too, or make one of its"
                " own"
            )
        lacking, who = await connection.fetchrow(_NOT_OURS, list({heir, present}))
        if lacking:
            raise Refused(
                f"{who} can't hand partitions over: an administrator has to GRANT {lacking} TO"
                f" {who}"
            )
        readers = {row["rolname"] for row in await connection.fetch(_READERS, present)}
        # Before the grants: what the former owner was granted would go over as well.
        await _hand_over(connection, heir)
        own = [(one.schema or home, one.name) for one in tables.sorted_tables]
        made = statements({owner, heir}, names, own)
        if others := readers.difference(names.values()):
            made.append(
                f"ALTER DEFAULT PRIVILEGES FOR ROLE {_quoted(heir)} IN SCHEMA {SCHEMA}"
                f" GRANT SELECT ON TABLES TO {', '.join(map(_quoted, sorted(others)))}"
            )
        for statement in made:
            await connection.execute(statement)


async def _hand_over(connection: asyncpg.Connection, heir: str) -> None:
    """Make a role the owner of what has partitions, unless it is. Raises `Refused`."""
    if not await connection.fetch(_ANOTHERS, PARTITIONED, heir):
        return
    tables = ", ".join(f"{SCHEMA}.{name}" for name in PARTITIONED)
    try:
        await connection.execute(partitions.BEGIN, partitions.HOUSEKEEPING_LOCK)
        # At once: one by one, others would wait for the first while this one waits for the next.
        await connection.execute(f"LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE")
        await connection.execute(f"GRANT CREATE ON SCHEMA {SCHEMA} TO {_quoted(heir)}")
        for row in await connection.fetch(_ANOTHERS, PARTITIONED, heir):
            await connection.execute(
                f"ALTER TABLE {SCHEMA}.{row['relname']} OWNER TO {_quoted(heir)}"
            )
    except asyncpg.LockNotAvailableError:
        raise Refused(f"{tables} are in use for longer than two seconds; run it again") from None
