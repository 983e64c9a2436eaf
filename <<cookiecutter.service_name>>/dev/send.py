"""Send one record to the development servers, and print the events that the service publishes.

While `make run` runs, send a CloudEvent:
`.venv/bin/python dev/send.py TOPIC TYPE '{"json": "data"}' --key KEY --watch TOPIC`
or any bytes, with only the given headers:
`.venv/bin/python dev/send.py TOPIC --file PATH --header NAME=VALUE`
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
    """Return the address of the stack's Kafka."""
    stack = Path(__file__).with_name("stack.py")
    done = subprocess.run([sys.executable, stack, "env"], stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        if name == "PIPELINE_KAFKA_BOOTSTRAP_SERVERS":
            return value.strip("'\"")
    sys.exit(1)


async def check_topics(topics: set[str], servers: str) -> None:
    """Exit with a message if a topic is missing: producers and consumers would wait for it."""
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        found = {topic for topic in await admin.list_topics() if not topic.startswith("__")}
    finally:
        await admin.close()
    if missing := sorted(topics - found):
        sys.exit(
            f"missing topic: {', '.join(missing)}; existing: {', '.join(sorted(found))}."
            " `make run` creates the service's topics before it is ready."
        )


def cloud_event(given: argparse.Namespace) -> dict[str, str]:
    """Return the headers of an event in CloudEvents' binary mode."""
    return {
        "ce_specversion": "1.0",
        "ce_id": given.id,
        "ce_source": given.source,
        "ce_type": given.type,
        "content-type": "application/json",
    }


async def send(given: argparse.Namespace, servers: str) -> None:
    """Send the record, then print the events that are published under its key for `SECONDS`."""
    await check_topics({given.topic, *given.watch}, servers)
    event = given.file is None
    value = given.data.encode() if event else given.file
    headers = (cloud_event(given) if event else {}) | dict(given.header)
    key = None if given.key is None else given.key.encode()
    async with (
        AIOKafkaConsumer(*given.watch, bootstrap_servers=servers) as consumer,
        AIOKafkaProducer(bootstrap_servers=servers) as producer,
    ):
        if given.watch:
            await consumer.seek_to_end()
        sent = await producer.send_and_wait(
            given.topic,
            value,
            key=key,
            headers=[(name, text.encode()) for name, text in headers.items()],
        )
        what = f"{given.type} {given.id!r} of {given.source!r}" if event else f"{len(value)} bytes"
        print(f"sent {what} to {sent.topic}, partition {sent.partition}, offset {sent.offset}")
        if given.watch and not await _print_records(consumer, key):
            of_key = f" under key {given.key!r}" if key is not None else ""
            handled = f" (`service inbox show {given.id}` shows whether it was handled)"
            print(
                f"nothing was published{of_key} in {SECONDS} s: its handler publishes nothing, or"
                f" under another key{handled if event else ''}, no handler has its type, it is a"
                " duplicate or a dead letter (`service dead list`), or it waits"
                " (`service dead list --waiting`);"
                " `service doctor` finds causes such as a missing table, and /health/ready shows"
                " whether the service is ready"
            )


async def _print_records(consumer: AIOKafkaConsumer, key: bytes | None) -> bool:
    """Print the records of this key, or of all keys for None; return whether there were any."""
    found = False
    deadline = asyncio.get_running_loop().time() + SECONDS
    while (left := deadline - asyncio.get_running_loop().time()) > 0:
        for records in (await consumer.getmany(timeout_ms=int(left * 1000))).values():
            for record in records:
                if key in (None, record.key):
                    kind = dict(record.headers).get("ce_type", b"a record").decode()
                    value = (record.value or b"").decode(errors="backslashreplace")
                    print(f"published {kind} {value}")
                    found = True
    return found


def _json(text: str) -> str:
    try:
        json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}; --file sends any bytes") from None
    return text


def _bytes(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _header(text: str) -> tuple[str, str]:
    name, is_one, value = text.partition("=")
    if not (name and is_one):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("topic", help="topic to send to")
    parser.add_argument("type", nargs="?", help="type of the event, as in its class")
    parser.add_argument("data", nargs="?", type=_json, help="fields of the event, as JSON")
    parser.add_argument(
        "--file",
        type=_bytes,
        metavar="PATH",
        help="send these bytes instead of an event; `-` reads standard input",
    )
    parser.add_argument("--key", help="key of the record; events of a key are ordered (none)")
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        type=_header,
        metavar="NAME=VALUE",
        help="header of the record; replaces a header of the event that has this name",
    )
    parser.add_argument("--source", default="/by-hand", help="source of the event (/by-hand)")
    parser.add_argument("--id", default=str(uuid4()), help="id of the event (a new one)")
    parser.add_argument(
        "--watch",
        action="append",
        default=[],
        metavar="TOPIC",
        help="topic whose new records are printed",
    )
    given = parser.parse_intermixed_args()  # DATA may follow options
    if (given.data is None) == (given.file is None):
        parser.error("give either TYPE and DATA of an event, or --file")
    asyncio.run(send(given, bootstrap_servers()))


if __name__ == "__main__":
    main()
