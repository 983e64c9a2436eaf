"""Telemetry: spans and metrics sent to a receiver, beside none."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.load import SAMPLED, Load
from benchmarks.marks import Values
from benchmarks.rig import OURS, Contestant
from benchmarks.runs import Throughput
from demo.processes import ProcessFailed

PATHS = ("/v1/traces", "/v1/metrics")


async def telemetry(bench: Bench) -> None:
    """Compare the rate with telemetry on, of whose traces one in a hundred is recorded."""
    one = load.make(1_000, bench.options.events, traced=True)
    await bench.rounds(
        "telemetry",
        {
            "off": partial(Throughput(OURS, one), bench.rig),
            "on": partial(_on, bench, one),
        },
    )
    bench.compare("telemetry on, sampled 1 %", "on", "off")


async def _on(bench: Bench, load_: Load) -> Values:
    async with traced() as (who, sink):
        values = await Throughput(who, load_)(bench.rig)
    return {
        **values,
        "received_bytes": sum(sink.bytes.values()),
        "metrics_exports": sink.requests["/v1/metrics"],
    }


@asynccontextmanager
async def traced() -> AsyncIterator[tuple[Contestant, "Sink"]]:
    """Lend ours with telemetry on, and what receives it. Raises `ProcessFailed` if it got none."""
    sink = Sink()
    async with sink.serving() as url:
        settings = {
            "PIPELINE_OTLP_ENDPOINT": url,
            "PIPELINE_TRACE_SAMPLE_RATIO": str(1 / SAMPLED),
            # By default it is a minute, and most runs are shorter.
            "OTEL_METRIC_EXPORT_INTERVAL": "1000",
        }
        yield replace(OURS, name="ours-traced", settings=settings), sink
    if not all(sink.bytes[path] for path in PATHS):
        raise ProcessFailed(f"the service has not sent both traces and metrics: {sink.bytes}")


class Sink:
    """A receiver of OTLP over HTTP that takes everything and keeps nothing."""

    def __init__(self) -> None:
        self.bytes = Counter[str]()
        """What came so far, by path."""
        self.requests = Counter[str]()
        """How often something came, by path."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve; yields the base URL."""
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()[:2]
            yield f"http://{host}:{port}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                request, *headers = head.splitlines()
                length = next(
                    int(line.partition(":")[2])
                    for line in headers
                    if line.startswith("content-length:")
                )
                await reader.readexactly(length)
                path = request.split()[1]
                self.bytes[path] += length
                self.requests[path] += 1
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
