"""The stamp of the database: its id, stored beside each offset that is committed to Kafka.

Positions are in PostgreSQL, so two databases that one group reads for would each lose what the
other handles. The id stays the same through a restore, a failover and pg_upgrade.
"""

import asyncio
from collections.abc import Collection

import asyncpg

from pipeline.servers import clients
from pipeline.servers.revisions import WrongDatabase
from pipeline.settings import Settings

_ANSWER_SECONDS = 10.0
_PREFIX = "database "
_ID = "SELECT database_id FROM pipeline.inbox_generation"


async def stamp_of(driver: asyncpg.Connection) -> str:
    """Return the stamp of a database."""
    return f"{_PREFIX}{await driver.fetchval(_ID)}"


async def check(settings: Settings, topics: Collection[str], group: str, stamp: str) -> None:
    """Raise `WrongDatabase` if the group has read one of the topics for another database.

    Raises `KafkaError`, `OSError` or `TimeoutError` when the brokers don't answer in 10 seconds.
    """
    async with (
        asyncio.timeout(_ANSWER_SECONDS),
        clients.offsets_client(settings, group) as client,
    ):
        found = await client.offset_metadata(topics)
    stamps = {one for one in found if one.startswith(_PREFIX)}
    if others := stamps - {stamp}:
        raise WrongDatabase(
            f"the group {group} reads its topics for another database: the group's metadata in"
            f" Kafka names {min(others)}, and this is {stamp}; each service would miss the messages"
            " that the other handles",
            "let PIPELINE_DATABASE_URL name that database, PIPELINE_KAFKA_BOOTSTRAP_SERVERS other"
            " brokers, or rename one of the services. If this database takes the other's place,"
            " stop all processes of the service and delete the group's offsets, whose numbers"
            f" the service does not use: kafka-consumer-groups.sh --delete --group {group}",
        )
