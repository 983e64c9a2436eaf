"""Producer: aiokafka's idempotent producer alone, `send()` after `send()`.

    python -m benchmarks.producer COUNT          BENCH_HEADERS=1 for the headers of an event

Prints one line of JSON: the time from the first send to the last acknowledgement. What warms it up
comes before and is not counted.
"""

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Sequence

import uvloop
from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]

from benchmarks.work import MOVED, Headers, constant_headers

KEYS = 1_000
VALUE = b"x" * 250
WARM_UP = 0.05
"""This much of the count is sent before."""
CHECK_EVERY = 10_000
NO_HEADERS: Headers = ()


def headers_of_events() -> list[Headers]:
    """Return the headers of an event of each key."""
    return [
        [
            *constant_headers("/benchmarks/producer", MOVED),
            ("ce_id", b"%032x" % number),
            ("ce_time", b"2013-01-01T05:15:00.000000+00:00"),
            ("ce_subject", b"N%05d" % number),
            ("ce_sequence", b"%020d" % number),
        ]
        for number in range(KEYS)
    ]


async def send(
    producer: AIOKafkaProducer, topic: str, count: int, headers: Sequence[Headers]
) -> None:
    """Send that many, and wait until all are acknowledged. Raises the error of one that is not."""
    keys = [b"N%05d" % number for number in range(KEYS)]
    sent: list[asyncio.Future[object]] = []
    for number in range(count):
        place = number % KEYS
        sent.append(await producer.send(topic, VALUE, key=keys[place], headers=headers[place]))
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


async def measure(count: int) -> dict[str, float]:
    """Send that many and return what it took."""
    topic = os.environ["BENCH_OUTPUT"]
    has_headers = os.environ.get("BENCH_HEADERS") == "1"
    headers = headers_of_events() if has_headers else [NO_HEADERS] * KEYS
    producer = AIOKafkaProducer(
        bootstrap_servers=os.environ["PIPELINE_KAFKA_BOOTSTRAP_SERVERS"],
        enable_idempotence=True,
        acks="all",
        linger_ms=5,
        max_batch_size=128 * 1024,
    )
    await producer.start()
    try:
        await send(producer, topic, int(count * WARM_UP), headers)
        gc.collect()
        gc.freeze()
        began, used = time.perf_counter(), time.process_time()
        await send(producer, topic, count, headers)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - used
    finally:
        await producer.stop()
    return {"count": count, "seconds": round(seconds, 3), "cpu_seconds": round(cpu_seconds, 3)}


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdigit():
        sys.exit("say how many to send: python -m benchmarks.producer COUNT")
    print(json.dumps(uvloop.run(measure(int(sys.argv[1])))))
