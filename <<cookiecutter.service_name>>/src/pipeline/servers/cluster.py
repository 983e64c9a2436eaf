"""Whether this database is the service's own, or a copy that it has not adopted.

It was filled in the database and the cluster whose ids are stored with it, for brokers whose id is
stored, too. In another cluster the transaction ids in the outbox and its cursor mean nothing; they
stay valid after a physical restore or a failover. What a copy publishes, calls or deletes may be
what the original does at the same time.
"""

import asyncio

import asyncpg
from aiokafka.protocol.metadata import MetadataRequest

from pipeline.settings import Settings

from . import clients, revisions, sequences

_IS_OURS = """
SELECT EXISTS (
       SELECT FROM pipeline.outbox_cluster AS filled
         JOIN pg_control_system() AS cluster USING (system_identifier)
         JOIN pg_database ON pg_database.oid = database_oid
        WHERE datname = current_database())
"""

# Locked, so that of two processes with different brokers one is refused.
_IS_OF_BROKERS = """
UPDATE pipeline.outbox_cluster SET kafka_cluster = $1
 WHERE kafka_cluster IS NULL OR kafka_cluster = $1
RETURNING true
"""

COPY = "copy"
"""Key in the `info` of a connection to a copy: the error that a change raises."""

_ANSWER_SECONDS = 5.0

_SECONDS = 86_400.0
"""Time-out of a statement that reads or rewrites the whole outbox."""

# A role or database may have limits that are meant for shorter work.
_SET_NO_LIMITS = """
SELECT set_config(name, '0', true) FROM pg_settings
 WHERE name IN ('statement_timeout', 'lock_timeout', 'transaction_timeout')
"""

# The owners are kept: the relay that takes their shards has to know which one to fence.
_TAKE_SHARDS = """
UPDATE pipeline.outbox_cursor SET token = token + 1, lease_until = clock_timestamp()
"""

_FORGET_PROGRESS = """
UPDATE pipeline.outbox_cursor
   SET seen = $1, target = NULL, last_id = 0, high_id = 0
"""

_RENEW_EVENTS = "UPDATE pipeline.outbox SET xid = DEFAULT"

# The transactions that closed them were another cluster's; this one comes after all of them.
_CLOSE_DAYS_AGAIN = "UPDATE pipeline.outbox_closed SET xid = DEFAULT"

_SET_CLUSTER = """
UPDATE pipeline.outbox_cluster
   SET system_identifier = (SELECT system_identifier FROM pg_control_system()),
       database_oid = (SELECT oid FROM pg_database WHERE datname = current_database()),
       kafka_cluster = NULL,
       reset_xid = CASE WHEN $1 THEN reset_xid ELSE pg_current_xact_id() END
"""


class NotAdopted(ConnectionError):
    """The database is a copy, whose original may be in use."""

    def __init__(self, filled: str) -> None:
        super().__init__(
            f"the database was filled {filled}, and is a copy: nothing is consumed, published,"
            " called or deleted before `service adopt` makes it the service's database"
            " (docs/incidents.md)"
        )


IN_ANOTHER = "in another database or cluster, as before a dump is restored"


async def is_ours(connection: asyncpg.Connection) -> bool:
    """Return whether the database is the one that was filled, and has not to be adopted."""
    return bool(await connection.fetchval(_IS_OURS))


async def gate(connection: asyncpg.Connection, service: str) -> None:
    """Raise `WrongDatabase` as `revisions.check_database`, and `NotAdopted` for a copy.

    Asked by each new connection of a process, so before the first effect of any of its parts. A
    database that has to be migrated passes: nothing works in it before.
    """
    await revisions.check_database(connection, service)
    try:
        is_adopted = await is_ours(connection)
    except (
        asyncpg.InvalidSchemaNameError,
        asyncpg.UndefinedTableError,
        asyncpg.UndefinedColumnError,
    ):
        return
    if not is_adopted:
        raise NotAdopted(IN_ANOTHER)


async def read_only(connection: asyncpg.Connection, service: str) -> None:
    """Do as `gate`, but let a copy be read: a statement that changes it raises `NotAdopted`.

    For commands and the page. `autocommitting` raises it. Not behind a pooler, where what is set
    here might become another client's.
    """
    try:
        await gate(connection, service)
    except NotAdopted as error:
        if connection.get_server_pid() != await connection.fetchval("SELECT pg_backend_pid()"):
            raise
        connection.info[COPY] = error
        await connection.execute("SET default_transaction_read_only = on")


async def id_of_brokers(settings: Settings) -> str | None:
    """Return the id of the Kafka cluster; None if it has none. Raises `KafkaError`, `OSError`."""
    async with (
        asyncio.timeout(2 * _ANSWER_SECONDS),
        clients.admin_client(settings, answer_within=_ANSWER_SECONDS) as admin,
    ):
        answer = await admin._send_request(MetadataRequest([], False))
    id: str | None = getattr(answer, "cluster_id", None)
    return id


async def check_brokers(connection: asyncpg.Connection, id: str) -> None:
    """Raise `NotAdopted` if the database was filled for other brokers; the first ones are stored.

    Asked when a process starts, before any of its parts does.
    """
    if not await connection.fetchval(_IS_OF_BROKERS, id):
        raise NotAdopted("for other brokers than those of PIPELINE_KAFKA_BOOTSTRAP_SERVERS")


async def count(connection: asyncpg.Connection) -> int:
    """Return how many events are published again if the database is adopted."""
    return int(await connection.fetchval("SELECT count(*) FROM pipeline.outbox", timeout=_SECONDS))


async def adopt(connection: asyncpg.Connection, *, keep_progress: bool) -> int:
    """Make the database the service's; return how many events are published again, in order.

    With `keep_progress` relays go on where they were: for a cluster that has kept the ids. Running
    relays wait, and lose their shards. If it fails, nothing has changed.
    """
    async with connection.transaction():
        # Read before the transaction has an id, so that its own changes are not visible in it.
        seen = await connection.fetchval("SELECT pg_current_snapshot()")
        await connection.execute(_SET_NO_LIMITS)
        # No relay may claim a shard meanwhile.
        await connection.execute("LOCK TABLE pipeline.outbox_cursor IN ACCESS EXCLUSIVE MODE")
        await connection.execute(_TAKE_SHARDS)
        renewed = 0
        if not keep_progress:
            await connection.execute(_FORGET_PROGRESS, seen)
            done = await connection.execute(_RENEW_EVENTS, timeout=_SECONDS)
            renewed = int(done.split()[-1])
            await connection.execute(_CLOSE_DAYS_AGAIN)
        await sequences.advance(connection, _SECONDS)
        await connection.execute(_SET_CLUSTER, keep_progress)
    return renewed
