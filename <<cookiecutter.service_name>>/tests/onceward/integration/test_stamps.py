"""One group reads for one database: the other one is refused before it takes a partition."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import DeleteGroupsRequest
from aiokafka.structs import OffsetAndMetadata
from sqlalchemy import make_url

from onceward.cli import doctor
from onceward.cli.health import Finding
from onceward.operators import adopting
from onceward.runtime import Part
from onceward.servers.revisions import WrongDatabase
from onceward.settings import Settings

from .bank import Bank
from .conftest import position_reaches
from .test_ownership import committed_offsets
from tests.conftest import Refusing, Running
from tests.contract.bank import Deposit, histories
from tests.servers.databases import administer, copied, url_of
from tests.servers.waiting import eventually

Examine = Callable[[str], Awaitable[list[Finding]]]


@pytest.fixture
async def staging_url(
    server_url: str, way_in: str, template: str, used_databases: list[str]
) -> AsyncIterator[str]:
    """URL of another database, which was migrated by itself."""
    name = await copied(server_url, template)
    async with connected(url_of(server_url, name)) as staging:
        # The databases of tests are copies of one.
        await staging.execute("UPDATE pipeline.inbox_generation SET database_id = $1", uuid4())
    yield url_of(way_in, name)
    used_databases.append(name)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    yield connection
    await connection.close()


@pytest.fixture
def examine(bank: Bank, settings: Callable[..., Settings]) -> Examine:
    """Return what the doctor finds about the group with a database."""

    async def ask(url: str) -> list[Finding]:
        chosen = settings(database_url=url)
        async with connected(url) as connection:
            return [one async for one in doctor._group(connection, bank.service, chosen)]

    return ask


async def send(producer: AIOKafkaProducer, bank: Bank, *amounts: int) -> None:
    for amount in amounts:
        await Deposit(amount).send(producer, bank.deposits)


async def delete_group(kafka: str, group: str) -> int:
    """Delete a group with its offsets, as `kafka-consumer-groups.sh --delete` does."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        coordinator = await admin.find_coordinator(group)
        answer = await admin._client.send(coordinator, DeleteGroupsRequest([group]))
        ((_, code),) = answer.results
        return int(code)
    finally:
        await admin.close()


async def test_a_groups_second_database_is_refused_and_the_first_continues(
    bank: Bank,
    running: Running,
    refusing: Refusing,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    database_url: str,
    staging_url: str,
    kafka: str,
    examine: Examine,
) -> None:
    await send(producer, bank, *range(50))
    async with running(bank.service, Part.CONSUME) as health:
        await eventually(position_reaches(db, bank.deposits, 50))

        async def is_committed() -> bool:
            return bool(await committed_offsets(kafka, bank.name))

        await eventually(is_committed)
        with pytest.raises(WrongDatabase, match="reads its topics for another database") as error:
            await refusing(bank.service, Part.CONSUME, database_url=staging_url)
        await send(producer, bank, *range(50, 100))
        await eventually(position_reaches(db, bank.deposits, 100))
        assert health.is_ready
    assert await histories(db) == {"ada": [*range(100)]}
    (finding,) = await examine(staging_url)
    assert finding.level == "wrong"
    assert f"{finding.found}: {finding.advice}" == str(error.value)
    assert f"--delete --group {bank.name}" in finding.advice
    assert await examine(database_url) == []


async def test_a_replacing_database_is_accepted_after_the_advice_is_followed(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    staging_url: str,
    kafka: str,
    examine: Examine,
) -> None:
    await send(producer, bank, 1)
    async with running(bank.service, Part.CONSUME):
        await eventually(position_reaches(db, bank.deposits, 1))
    assert await examine(staging_url)
    assert await delete_group(kafka, bank.name) == 0
    assert await examine(staging_url) == []
    async with (
        running(bank.service, Part.CONSUME, database_url=staging_url),
        connected(staging_url) as staging,
    ):
        await eventually(position_reaches(staging, bank.deposits, 1))
        assert await histories(staging) == {"ada": [1]}


async def test_a_copy_of_the_database_takes_its_place_when_it_is_adopted(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    database_url: str,
    server_url: str,
    way_in: str,
    used_databases: list[str],
) -> None:
    await send(producer, bank, 1)
    async with running(bank.service, Part.CONSUME):
        await eventually(position_reaches(db, bank.deposits, 1))
    await db.close()
    restored = f"restored_{uuid4().hex[:12]}"
    origin = make_url(database_url).database
    await administer(server_url, f"CREATE DATABASE {restored} TEMPLATE {origin}")
    used_databases.append(restored)
    await send(producer, bank, 2)
    async with (
        running(bank.service, Part.CONSUME, database_url=url_of(way_in, restored)) as health,
        connected(url_of(server_url, restored)) as copy,
    ):
        await eventually(lambda: "service adopt" in health.reasons.get("retention", ""))
        assert await histories(copy) == {"ada": [1]}
        await adopting.adopt(copy, keep_progress=True)
        await eventually(position_reaches(copy, bank.deposits, 2))
        assert await histories(copy) == {"ada": [1, 2]}


async def test_the_first_brokers_are_stored_and_others_wait_for_adoption(
    bank: Bank, running: Running, db: asyncpg.Connection
) -> None:
    brokers = "SELECT kafka_cluster FROM pipeline.outbox_cluster"

    async def are_stored() -> bool:
        return bool(await db.fetchval(brokers))

    async with running(bank.service, retention_interval=1):
        await eventually(are_stored)
        await adopting.adopt(db, keep_progress=True)
        assert not await are_stored()
        await eventually(are_stored)
    first = await db.fetchval(brokers)
    await db.execute("UPDATE pipeline.outbox_cluster SET kafka_cluster = 'another'")
    async with running(bank.service, Part.RELAY) as health:
        await eventually(lambda: "service adopt" in health.reasons.get("retention", ""))
        await adopting.adopt(db, keep_progress=True)
        await eventually(are_stored)
    assert await db.fetchval(brokers) == first


async def test_offsets_that_another_tool_has_committed_say_nothing(
    bank: Bank, examine: Examine, database_url: str, kafka: str
) -> None:
    partition = TopicPartition(bank.deposits, 0)
    async with AIOKafkaConsumer(bootstrap_servers=kafka, group_id=bank.name) as tool:
        tool.assign([partition])
        await tool.commit({partition: OffsetAndMetadata(0, "of some tool")})
    assert await committed_offsets(kafka, bank.name) == {partition: 0}
    assert await examine(database_url) == []
