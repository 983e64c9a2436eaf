"""omni-box: its consumer runner for each partition, its publisher in several tasks.

python -m benchmarks.peers.omni_box prepare|run
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import NAMESPACE_OID, uuid5

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRecord  # type: ignore[import-untyped]
from omni_box import InboxConsumerRunner, InboxEvent, OmniBoxDomainService, OutboxPublisher
from omni_box.core.converters.event import RawEventConverter
from omni_box.infra.brokers.kafka import KafkaEventConsumer, KafkaEventPublisher
from omni_box.infra.storage.postgres import (
    InboxEventDBBase,
    OutboxEventDBBase,
    PostgresInboxRepository,
    PostgresOutboxRepository,
)

from benchmarks.models import Base, ScanRecorded
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
from benchmarks.usual import prepare
from benchmarks.work import Place, main

domain = OmniBoxDomainService()


class InboxRow(InboxEventDBBase, Base):  # type: ignore[misc]  # has no types here
    """The table of markers."""


class OutboxRow(OutboxEventDBBase, Base):  # type: ignore[misc]
    """The table of events."""


class Program:
    """What runs with the clients."""

    def __init__(self, clients: Clients, place: Place) -> None:
        self._clients = clients
        self._place = place
        self._broker = KafkaEventPublisher(clients.producer, RawEventConverter())

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[PostgresInboxRepository]:
        """Lend the inbox in a transaction."""
        async with self._clients.sessions.begin() as session:
            yield PostgresInboxRepository(session, model_class=InboxRow)

    async def handle(self, event: InboxEvent, inbox: PostgresInboxRepository) -> None:
        """Move a parcel and stage its events in the transaction of the inbox."""
        outbox = PostgresOutboxRepository(inbox.session, model_class=OutboxRow)
        for staged in await moved(ScanRecorded.model_validate(event.payload), inbox.session):
            await outbox.create(
                domain.create_outbox_event(
                    aggregate_type="parcel",
                    aggregate_id=uuid5(NAMESPACE_OID, staged.key),
                    event_type=staged.type,
                    topic=self._place.output,
                    partition_key=staged.key,
                    payload=json.loads(staged.json),
                    headers=staged.headers,
                )
            )

    async def consume(self, consumer: AIOKafkaConsumer) -> None:
        """Consume a partition."""
        runner = InboxConsumerRunner(
            consumer=KafkaEventConsumer(consumer, message_id_getter=_identity),
            transaction_provider=self,
            handler=self.handle,
            worker_id="consumer",
            consumer_group=self._place.name,
        )
        await runner.start()
        try:
            await runner.run_forever()
        finally:
            await runner.stop()

    async def relay(self, worker: str) -> None:
        """Publish batch after batch."""
        while True:
            async with self._clients.sessions.begin() as session:
                outbox = PostgresOutboxRepository(session, model_class=OutboxRow)
                publisher = OutboxPublisher(outbox, self._broker)
                done = await publisher.publish_batch(worker_id=worker, batch_size=BATCH)
            if not done.processed_event_ids:
                await asyncio.sleep(POLL_SECONDS)


def _identity(record: ConsumerRecord, _headers: object) -> str:
    return " ".join(identity(record))


async def run(place: Place) -> None:
    """Work until SIGTERM."""
    # By default it prints several lines for each message.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    async with connected(place) as clients:
        program = Program(clients, place)
        await until_stopped(
            *map(program.consume, clients.consumers),
            *(program.relay(f"relay-{number}") for number in range(RELAYS)),
        )


if __name__ == "__main__":
    main(prepare, run)
