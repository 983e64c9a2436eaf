"""`python -m demo.traced`: one scan through two services, and its trace as a picture.

Both are baked, run on a stack of their own, and send their spans to an OpenTelemetry Collector. The
first is the worked example. The second posts a notice about each parcel that has moved: its handler
fails once, and schedules the notice for later.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg  # type: ignore[import-untyped]
from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from rich.console import Console

from demo.collector import Collector, collecting
from demo.display import say
from demo.flights import ROOT
from demo.otlp import receiving
from demo.processes import Service, Stack, bake
from demo.running import add_into, only_one_in, short, until_interrupted
from demo.waterfall import Span, draw

FIRST, SECOND = "parcel-tracker", "notice-board"
PICTURE = ROOT / "docs" / "trace.svg"
SECRET = "T024BE7LD"
"""What lets somebody use the webhook: path and query of its URL, as for chats."""
WITHIN = 300.0
"""Seconds in which the scan has gone through both services."""
STATUS_CODE_ERROR = 2
"""As OTLP writes it in JSON: enumerations are numbers there."""

SETTINGS = {
    # Only what its sender records is recorded: this one scan.
    "PIPELINE_TRACE_SAMPLE_RATIO": "0",
    "OTEL_BSP_SCHEDULE_DELAY": "200",
}

EVENTS = '''"""The events that the service takes in and publishes."""

from onceward import Event


class ParcelMoved(Event, type="parcel.moved.v1"):
    """A parcel was scanned."""

    parcel_id: str
    place: str


class NoticePosted(Event, type="notice.posted.v1", topic="notices"):
    """Whoever waits for the parcel may read where it is."""

    text: str
'''

HANDLERS = '''"""What the service does with each event."""

from datetime import timedelta

from onceward import Handlers, Policy, Retry, Transaction

from .events import NoticePosted, ParcelMoved

handlers = Handlers()
tried: set[str] = set()


@handlers.on(
    ParcelMoved, topic="parcel-events", consumer="post-notice", policy=Policy(schedule=(1,))
)
async def post_notice(moved: ParcelMoved, tx: Transaction) -> None:
    """Fail once, then say a second later where the parcel is."""
    if tx.message.id not in tried:
        tried.add(tx.message.id)
        raise Retry("the board is being cleaned")
    text = f"{moved.parcel_id} is at {moved.place}"
    tx.publish(NoticePosted(text=text), key=moved.parcel_id, after=timedelta(seconds=1))
'''

SCAN = b"""{"scanner": "JFK", "number": 1, "parcel_id": "N14228", "place": "JFK",
"scanned_at": "2013-01-01T06:00:00Z", "minutes_late": 75}"""


def _read(request: dict[str, Any]) -> Iterator[Span]:
    """Return the spans of a request, which is in the JSON encoding of OTLP."""
    for resource in request["resourceSpans"]:
        service = _attributes(resource["resource"])["service.name"]
        for scope in resource["scopeSpans"]:
            for one in scope["spans"]:
                yield Span(
                    service,
                    one["name"],
                    _attributes(one).get("pipeline.consumer", ""),
                    one["traceId"],
                    one["spanId"],
                    one.get("parentSpanId", ""),
                    tuple(link["spanId"] for link in one.get("links", ())),
                    int(one["startTimeUnixNano"]),
                    int(one["endTimeUnixNano"]),
                    one["status"].get("code") == STATUS_CODE_ERROR,
                    _attributes(one),
                )


def _attributes(told: dict[str, Any]) -> dict[str, str]:
    return {one["key"]: one["value"].get("stringValue", "") for one in told.get("attributes", ())}


async def _whole(collector: Collector) -> list[Span]:
    """Wait until the last span of each branch has come; return all, the earliest first."""
    async with asyncio.timeout(WITHIN):
        while True:
            spans = [one for request in collector.requests() for one in _read(request)]
            if _is_whole(spans):
                return sorted(spans, key=lambda one: one.begin)
            await asyncio.sleep(0.1)


async def trace_of_a_scan(folder: Path) -> list[Span]:
    """Send a scan through both services; return its spans, the earliest first.

    Raises `ProcessFailed` if a service or the collector fails, `TimeoutError` if a span does not
    come, and `NoGo` where the collector cannot be built.
    """
    log = folder / "setup.log"
    first = await bake(folder, log)
    second = await bake(folder, log, service_name=SECOND, worked_example="none")
    source = second / "src" / "notice_board"
    (source / "events.py").write_text(EVENTS, "utf-8")
    (source / "handlers.py").write_text(HANDLERS, "utf-8")
    configuration = (first / "deploy" / "compose" / "collector.yaml").read_text("utf-8")
    stack = Stack(first, folder / "stack")
    async with AsyncExitStack() as running:
        webhook = await running.enter_async_context(receiving(_accept))
        collector = await running.enter_async_context(collecting(configuration, folder))
        running.push_async_callback(stack.remove, log)
        await stack.up(log)
        own = {**SETTINGS, **stack.addresses, "PIPELINE_OTLP_ENDPOINT": collector.url}
        tracker = _service(first, own | {"DELAY_WEBHOOK": f"{webhook}/{SECRET}?by={SECRET}"})
        board = _service(second, own | {"PIPELINE_DATABASE_URL": await _another(stack)})
        for service in (tracker, board):
            await service.prepare(log)
            running.push_async_callback(service.stop)
            await service.start()
        await asyncio.gather(tracker.ready(), board.ready())
        await _send(stack.kafka, collector.url)
        return await _whole(collector)


async def _accept(path: str, body: bytes) -> None:
    """Be a webhook that takes everything."""


def _service(project: Path, settings: Mapping[str, str]) -> Service:
    folder, name = project.parent, project.name
    log, lock = folder / f"{name}.log", folder / f"{name}.lock"
    # With the service's own defaults: nobody is killed here, and nothing has to be quick.
    module = name.replace("-", "_")
    return Service(project, settings, log, lock, module=module, defaults={})


async def _another(stack: Stack) -> str:
    """Create a database for the second service; return its URL."""
    name = f"board_{uuid4().hex}"
    connection = await asyncpg.connect(stack.database)
    try:
        await connection.execute(f"CREATE DATABASE {name}")
    finally:
        await connection.close()
    return stack.addresses["PIPELINE_DATABASE_URL"].rpartition("/")[0] + f"/{name}"


async def _send(kafka: str, url: str) -> None:
    """Send the scan in a span of its own, as an instrumented producer does."""
    provider = TracerProvider(resource=Resource({"service.name": "scanner"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces")))
    tracer = provider.get_tracer("demo")
    headers = {
        "ce_specversion": "1.0",
        "ce_id": "1",
        "ce_source": "/scanners/JFK",
        "ce_type": "scan.recorded.v1",
        "content-type": "application/json",
    }
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        with tracer.start_as_current_span("send scans", kind=trace.SpanKind.PRODUCER):
            TraceContextTextMapPropagator().inject(headers)
            await producer.send_and_wait(
                "scans",
                SCAN,
                key=b"N14228",
                headers=[(name, value.encode()) for name, value in headers.items()],
            )
    # It waits until the span is exported.
    await asyncio.to_thread(provider.shutdown)


def _is_whole(spans: list[Span]) -> bool:
    """Whether the last of each branch has come."""
    return {"tell-webhook", "send notices", "send scans"} <= {
        name for one in spans for name in (one.consumer, one.name)
    }


async def _picture(folder: Path, picture: Path, console: Console) -> bool:
    with only_one_in(folder):
        say(console, "running", "a scan through two services")
        spans = await trace_of_a_scan(folder)
    drawn = draw("The trace of one scan", spans)
    await asyncio.to_thread(picture.write_text, drawn, "utf-8")
    say(console, "drawn", f"{len(spans)} spans: {short(picture)}")
    return True


def main() -> int:
    """Draw the picture; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_into(parser, "traced")
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE")
    options = parser.parse_args()
    console = Console()
    work = _picture(options.into, options.picture, console)
    return asyncio.run(until_interrupted(work, console))


if __name__ == "__main__":
    sys.exit(main())
