"""The stamp of the database: its id, stored beside each offset that is committed to Kafka.

Positions are in PostgreSQL, so two databases that one group reads for would each lose what the
other handles. The id stays the same through a restore, a failover and pg_upgrade. In turn the
database has the id of the brokers, in which alone a physical copy may differ from its original.
"""

import asyncio
from collections.abc import Collection

import asyncpg
from aiokafka.errors import KafkaError

from onceward.errors import StoreUnavailable, describe_error
from onceward.servers import clients
from onceward.servers.cluster import check_brokers
from onceward.servers.revisions import WrongDatabase
from onceward.settings import Settings

from . import statements

_ANSWER_SECONDS = 10.0
_PREFIX = "database "


async def check(
    connection: asyncpg.Connection, settings: Settings, group: str, topics: Collection[str]
) -> tuple[str, str | None]:
    """Return the stamp of a database that is used by this group, and its brokers' id, if any.

    Raises `NotAdopted` if it was used with other brokers, `WrongDatabase` if the group has read one
    of the topics for another database, and `StoreUnavailable` if the brokers don't answer in 10
    seconds.
    """
    try:
        async with (
            asyncio.timeout(_ANSWER_SECONDS),
            clients.offsets_client(settings, group) as client,
        ):
            brokers = await client.cluster_id()
            texts = await client.offset_metadata(topics) if topics else set()
    except (KafkaError, TimeoutError) as error:
        named = f"{settings.kafka} (PIPELINE_KAFKA_BOOTSTRAP_SERVERS)"
        raise StoreUnavailable(f"{named}: {describe_error(error)}") from error
    id = await connection.fetchval(statements.READ_DATABASE_ID)
    stamp = f"{_PREFIX}{id}"
    if others := {one for one in texts if one.startswith(_PREFIX)} - {stamp}:
        raise WrongDatabase(
            f"the group {group} reads its topics for another database: the group's metadata in"
            f" Kafka names {min(others)}, and this is {stamp}; each service would miss the messages"
            " that the other handles",
            "let PIPELINE_DATABASE_URL name that database, PIPELINE_KAFKA_BOOTSTRAP_SERVERS other"
            " brokers, or rename one of the services. If this database takes the other's place,"
            " stop all processes of the service and delete the group's offsets, whose numbers"
            f" the service does not use: kafka-consumer-groups.sh --delete --group {group}",
        )
    await check_brokers(connection, brokers)
    return stamp, brokers
