"""Send one event by hand, and watch what the service publishes.

While `make run` runs:
`.venv/bin/python dev/send.py TOPIC TYPE '{"json": "data"}' --key KEY --watch TOPIC`
"""

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

SECONDS = 3


def bootstrap_servers() -> str:
    """Ask the stack where Kafka is."""
    stack = Path(__file__).with_name("stack.py")
    asked = subprocess.run([sys.executable, stack, "env"], stdout=subprocess.PIPE, text=True)
    for line in asked.stdout.splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        if name == "PIPELINE_KAFKA_BOOTSTRAP_SERVERS":
            return value.strip("'\"")
    sys.exit(1)


async def refuse_missing(topics: set[str], servers: str) -> None:
    """End with a sentence if a topic isn't there: producers and consumers would wait for it."""
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        found = {topic for topic in await admin.list_topics() if not topic.startswith("__")}
    finally:
        await admin.close()
    if missing := sorted(topics - found):
        sys.exit(f"no such topic: {', '.join(missing)}; there are: {', '.join(sorted(found))}")


async def send(told: argparse.Namespace, servers: str) -> None:
    """Send the event, then print for some seconds what is published under its key."""
    await refuse_missing({told.topic, *told.watch}, servers)
    headers = {
        "ce_specversion": "1.0",
        "ce_id": told.id,
        "ce_source": told.source,
        "ce_type": told.type,
        "content-type": "application/json",
    }
    async with (
        AIOKafkaConsumer(*told.watch, bootstrap_servers=servers) as consumer,
        AIOKafkaProducer(bootstrap_servers=servers) as producer,
    ):
        if told.watch:
            await consumer.seek_to_end()
        await producer.send_and_wait(
            told.topic,
            told.data.encode(),
            key=told.key.encode(),
            headers=[(name, text.encode()) for name, text in headers.items()],
        )
        print(f"sent {told.type} {told.id!r} of {told.source!r}")
        if told.watch and not await _print_what_comes(consumer, told.key.encode()):
            print(
                f"nothing was published in {SECONDS} s: its handler publishes nothing (`service"
                f" inbox show {told.id}` tells whether it was handled), no handler takes"
                f" {told.type}, it is a duplicate or a dead letter (`service dead list`), or it"
                " waits; /health/ready tells whether the service is at work"
            )


async def _print_what_comes(consumer: AIOKafkaConsumer, key: bytes) -> bool:
    found = False
    deadline = asyncio.get_running_loop().time() + SECONDS
    while (left := deadline - asyncio.get_running_loop().time()) > 0:
        for records in (await consumer.getmany(timeout_ms=int(left * 1000))).values():
            for record in records:
                if record.key == key:
                    kind = dict(record.headers)["ce_type"].decode()
                    print(f"published {kind} {(record.value or b'').decode()}")
                    found = True
    return found


def _json(text: str) -> str:
    try:
        json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    return text


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("topic", help="where to send it")
    parser.add_argument("type", help="type of the event, as its class has it")
    parser.add_argument("data", type=_json, help="its fields, as JSON")
    parser.add_argument("--key", required=True, help="key of the record: what keeps its order")
    parser.add_argument("--source", default="/by-hand", help="who sends it (/by-hand)")
    parser.add_argument("--id", default=str(uuid4()), help="its id at that source (a new one)")
    parser.add_argument(
        "--watch", action="append", default=[], metavar="TOPIC", help="print what comes there"
    )
    told = parser.parse_args()
    asyncio.run(send(told, bootstrap_servers()))


if __name__ == "__main__":
    main()
