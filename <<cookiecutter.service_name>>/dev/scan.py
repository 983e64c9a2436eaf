"""Scan a parcel by hand, and watch what the service publishes of it.

`.venv/bin/python dev/scan.py JFK --parcel N14228 --minutes-late 90`, while `make run` runs.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from time import time_ns

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer


def bootstrap_servers() -> str:
    """Ask the stack where Kafka is."""
    stack = Path(__file__).with_name("stack.py")
    asked = subprocess.run([sys.executable, stack, "env"], stdout=subprocess.PIPE, text=True)
    for line in asked.stdout.splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        if name == "PIPELINE_KAFKA_BOOTSTRAP_SERVERS":
            return value.strip("'\"")
    sys.exit("The servers are not up: run `make run` first.")


async def scan(place: str, *, parcel: str, scanner: str, number: int, late: int | None) -> None:
    """Send one scan, then print the parcel's events for a few seconds."""
    servers = bootstrap_servers()
    now = datetime.now(UTC).isoformat()
    value = {
        "scanner": scanner,
        "number": number,
        "parcel_id": parcel,
        "place": place,
        "scanned_at": now,
        "minutes_late": late,
    }
    headers = {
        "ce_specversion": "1.0",
        "ce_id": str(number),
        "ce_source": f"/scanners/{scanner}",
        "ce_type": "scan.recorded.v1",
        "ce_time": now,
        "content-type": "application/json",
    }
    async with (
        AIOKafkaConsumer("parcel-events", bootstrap_servers=servers) as consumer,
        AIOKafkaProducer(bootstrap_servers=servers) as producer,
    ):
        await consumer.seek_to_end()
        await producer.send_and_wait(
            "scans",
            json.dumps(value).encode(),
            key=parcel.encode(),
            headers=[(name, text.encode()) for name, text in headers.items()],
        )
        print(f"sent      scan {number} of {scanner}: {parcel} at {place}")
        deadline = asyncio.get_running_loop().time() + 3
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            for records in (await consumer.getmany(timeout_ms=int(left * 1000))).values():
                for record in records:
                    kind = dict(record.headers)["ce_type"].decode()
                    print(f"published {kind} {(record.value or b'').decode()}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("place")
    parser.add_argument("--parcel", default="N14228")
    parser.add_argument("--scanner", default="by-hand")
    parser.add_argument("--number", type=int, default=time_ns() // 1_000_000)
    parser.add_argument("--minutes-late", type=int)
    told = parser.parse_args()
    asyncio.run(
        scan(
            told.place,
            parcel=told.parcel,
            scanner=told.scanner,
            number=told.number,
            late=told.minutes_late,
        )
    )


if __name__ == "__main__":
    main()
