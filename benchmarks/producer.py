"""Producer: aiokafka's idempotent producer alone, `send()` after `send()`.

    python -m benchmarks.producer run        BENCH_COUNT=300000 BENCH_HANDLER=plain or headers

What it sends is 250 bytes long and says first, for the check, how many its key has had with it.
Then it waits for SIGTERM, as the others do: the rate is taken from outside.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]

from benchmarks.check import CheckFailed
from benchmarks.work import (
    MOVED,
    Headers,
    Place,
    collect_hardly_ever,
    constant_headers,
    main,
    until_terminated,
)

KEYS = 1_000
PAYLOAD = 250
"""Bytes."""
DIGITS = 20
CHECK_EVERY = 10_000
NO_HEADERS: Headers = ()


def key_of(number: int) -> str:
    """Return the key of one of the records."""
    return f"parcel-{number % KEYS:06}"


def told(record: Any) -> tuple[str, int, None]:
    """Return key and sequence of a record, which tells nothing. Raises `CheckFailed`."""
    if len(record.value) != PAYLOAD:
        raise CheckFailed(f"producer: {len(record.value)} bytes were sent, and not {PAYLOAD}")
    return record.key.decode(), int(record.value[:DIGITS]), None


def headers_of_events() -> list[Headers]:
    """Return the headers of an event of each key."""
    return [
        [
            *constant_headers("/benchmarks/producer", MOVED),
            ("ce_id", b"%032x" % number),
            ("ce_time", b"2013-01-01T05:15:00.000000+00:00"),
            ("ce_subject", key_of(number).encode()),
            ("ce_sequence", b"%020d" % number),
        ]
        for number in range(KEYS)
    ]


async def send(
    producer: AIOKafkaProducer, topic: str, count: int, headers: Sequence[Headers]
) -> None:
    """Send that many, and wait until all are acknowledged. Raises the error of one that is not."""
    keys = [key_of(number).encode() for number in range(KEYS)]
    values = [
        (b"%0*d" % (DIGITS, sequence)).ljust(PAYLOAD, b"x")
        for sequence in range(1, count // KEYS + 2)
    ]
    sent: list[asyncio.Future[object]] = []
    for number in range(count):
        sequence, place = divmod(number, KEYS)
        sent.append(
            await producer.send(topic, values[sequence], key=keys[place], headers=headers[place])
        )
        if len(sent) == CHECK_EVERY:
            sent = _without_acknowledged(sent)
    await asyncio.gather(*sent)


def _without_acknowledged(sent: Sequence[asyncio.Future[object]]) -> list[asyncio.Future[object]]:
    left = []
    for one in sent:
        if one.done():
            one.result()
        else:
            left.append(one)
    return left


async def prepare(_: Place) -> None:
    """Do nothing: it has no tables."""


async def run(place: Place) -> None:
    """Send all, and wait for SIGTERM."""
    stopping = until_terminated()
    has_headers = os.environ["BENCH_HANDLER"] == "headers"
    producer = AIOKafkaProducer(
        bootstrap_servers=place.bootstrap_servers,
        enable_idempotence=True,
        acks="all",
        linger_ms=5,
        max_batch_size=128 * 1024,
    )
    await producer.start()
    try:
        collect_hardly_ever()
        headers = headers_of_events() if has_headers else [NO_HEADERS] * KEYS
        await send(producer, place.output, int(os.environ["BENCH_COUNT"]), headers)
        await stopping.wait()
    finally:
        await producer.stop()


if __name__ == "__main__":
    main(prepare, run)
