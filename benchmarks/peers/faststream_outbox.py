"""faststream-outbox: a queue of its outbox, with one worker, for each of several sets of keys.

    python -m benchmarks.peers.faststream_outbox prepare|run

One queue with several workers would be as simple, and would lose the order of each key.
"""

from faststream.kafka import KafkaBroker, KafkaResponse
from faststream_outbox import OutboxBroker, make_outbox_table
from faststream_outbox.annotations import OutboxMessage
from sqlalchemy.ext.asyncio import AsyncSession

from benchmarks.models import Base
from benchmarks.peers.shared import (
    BATCH,
    POLL_SECONDS,
    Event,
    connected,
    consume,
    until_stopped,
)
from benchmarks.usual import prepare
from benchmarks.work import Place, main, partition_of

QUEUES = 8
table = make_outbox_table(Base.metadata, table_name="outbox_message")


async def run(place: Place) -> None:
    """Work until SIGTERM."""
    async with connected(place) as clients:
        kafka = KafkaBroker(
            place.bootstrap_servers, acks="all", enable_idempotence=True, logger=None
        )
        outbox = OutboxBroker(clients.engine, outbox_table=table, logger=None)
        for number in range(QUEUES):
            relay = outbox.subscriber(
                f"queue-{number}",
                max_workers=1,
                fetch_batch_size=BATCH,
                terminal_flush_batch_size=BATCH,
                min_fetch_interval=POLL_SECONDS,
            )
            kafka.publisher(place.output)(relay(_response))

        async def stage(event: Event, session: AsyncSession) -> None:
            await outbox.publish(
                event.json.encode(),
                queue=f"queue-{partition_of(event.key.encode(), QUEUES)}",
                session=session,
                headers=event.headers,
            )

        async with kafka, outbox:
            await until_stopped(*(consume(one, clients, stage) for one in clients.consumers))


async def _response(message: OutboxMessage) -> KafkaResponse:
    return KafkaResponse(
        message.body, key=message.headers["ce_subject"].encode(), headers=message.headers
    )


if __name__ == "__main__":
    main(prepare, run)
