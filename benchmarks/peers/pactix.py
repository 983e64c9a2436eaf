"""pactix: its inbox is filled from Kafka and worked off by runners, as its outbox is.

    python -m benchmarks.peers.pactix prepare|run

It keeps order among messages of one type and ordering key, so both events have one type here.
"""

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime

from aiokafka import AIOKafkaConsumer  # type: ignore[import-untyped]
from pactix import (
    InboxMessageRecord,
    InboxRunner,
    InboxStore,
    MessageEnvelope,
    MessageMetadata,
    OutboxRunner,
    OutboxStore,
    PactixConfig,
    ProcessAll,
    PublisherRegistry,
)
from pactix.db.tables import metadata
from pactix.inbox import HandleOutcome
from pactix.transport.kafka import (
    AIOKafkaOffsetCommitter,
    AIOKafkaProducerClient,
    KafkaInboundMessage,
    KafkaInboxConsumer,
    KafkaOutboxPublisher,
    KafkaTopicRouter,
)
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks import usual
from benchmarks.models import ScanRecorded
from benchmarks.peers.shared import (
    BATCH,
    POLL_SECONDS,
    RELAYS,
    Clients,
    connected,
    identity,
    moved,
    until_stopped,
)
from benchmarks.work import Place, main

TYPE = "parcel"
CONFIG = PactixConfig(outbox_batch_size=BATCH, inbox_batch_size=BATCH)
inbox, outbox = InboxStore(CONFIG), OutboxStore(CONFIG)


class Handler:
    """Moves parcels."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    async def handle(self, record: InboxMessageRecord) -> HandleOutcome:
        """Move a parcel, stage its events and settle the marker in one transaction."""
        async with self._clients.sessions.begin() as session:
            connection = await session.connection()
            # The runner would do so after the handler's transaction, and might not get to it.
            await inbox.mark_processed(connection, record.id, datetime.now(UTC))
            for event in await moved(ScanRecorded.model_validate(record.payload), session):
                about = MessageMetadata(event.id, TYPE, event.key, event.key, headers=event.headers)
                await outbox.append(connection, MessageEnvelope(about, json.loads(event.json)))
        return HandleOutcome.processed()


async def receive(consumer: AIOKafkaConsumer, clients: Clients) -> None:
    """Store the messages of a partition in the inbox."""
    receiver, committer = KafkaInboxConsumer("scans", inbox), AIOKafkaOffsetCommitter(consumer)
    async with consumer:
        while True:
            record = await consumer.getone()
            message = KafkaInboundMessage.from_record(record)
            names = {"event_type": TYPE, "message_id": " ".join(identity(record))}
            headers = {**message.headers, **names, "ordering_key": message.key}
            message = replace(message, headers=headers)
            await receiver.save_and_commit(clients.engine, message, committer)


async def prepare(place: Place) -> None:
    """Create the tables."""
    await usual.prepare(place)
    engine = create_async_engine(place.database_url)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await engine.dispose()


async def run(place: Place) -> None:
    """Work until SIGTERM."""
    async with connected(place) as clients:
        router, publishers = KafkaTopicRouter(), PublisherRegistry()
        await router.register(TYPE, place.output)
        client = AIOKafkaProducerClient(clients.producer)
        await publishers.register(TYPE, KafkaOutboxPublisher(client, router))
        handling = InboxRunner(inbox, Handler(clients), ProcessAll())
        relaying = OutboxRunner(outbox, publishers)

        async def work(runner: InboxRunner | OutboxRunner) -> None:
            while True:
                if not (await runner.run_once(clients.engine)).claimed:
                    await asyncio.sleep(POLL_SECONDS)

        await until_stopped(
            *(receive(one, clients) for one in clients.consumers),
            *(work(runner) for runner in (handling, relaying) for _ in range(RELAYS)),
        )


if __name__ == "__main__":
    main(prepare, run)
