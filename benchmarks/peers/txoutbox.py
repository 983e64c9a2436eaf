"""txoutbox: its relay and its table, behind the transaction of `usual`.

python -m benchmarks.peers.txoutbox prepare|run
"""

from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession
from txoutbox import OutboxMessage, Relay, RelayConfig
from txoutbox.adapters.postgres import PostgresStorage

from benchmarks import usual
from benchmarks.peers.shared import BATCH, POLL_SECONDS, Event, connected, consume, until_stopped
from benchmarks.work import Place, main

CONFIG = RelayConfig(
    batch_size=BATCH, concurrency=BATCH, lease=timedelta(seconds=60), poll_max=POLL_SECONDS
)
TABLE = "outbox_message"


async def prepare(place: Place) -> None:
    """Create the tables."""
    await usual.prepare(place)
    storage = await PostgresStorage.connect(place.dsn, table=TABLE)
    await storage.create_schema()
    await storage.close()


async def run(place: Place) -> None:
    """Work until SIGTERM."""
    storage = await PostgresStorage.connect(place.dsn, table=TABLE)
    async with connected(place) as clients:

        async def stage(event: Event, session: AsyncSession) -> None:
            connection = await (await session.connection()).get_raw_connection()
            await storage.insert(
                connection.driver_connection,
                place.output,
                event.json,
                key=event.key,
                headers=event.headers,
            )

        async def publish(message: OutboxMessage) -> None:
            await clients.producer.send_and_wait(
                message.topic,
                message.payload,
                key=message.key.encode(),
                headers=[(name, value.encode()) for name, value in message.headers.items()],
            )

        async with Relay(storage, publish, config=CONFIG):
            await until_stopped(*(consume(one, clients, stage) for one in clients.consumers))
    await storage.close()


if __name__ == "__main__":
    main(prepare, run)
