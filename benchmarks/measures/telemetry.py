"""Telemetry: spans and metrics sent to a receiver, beside none."""

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
from demo.otlp import METRICS, PATHS, receiving
from demo.processes import ProcessFailed


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
        "metrics_exports": sink.requests[METRICS],
    }


@asynccontextmanager
async def traced() -> AsyncIterator[tuple[Contestant, "Sink"]]:
    """Lend ours with telemetry on, and what receives it. Raises `ProcessFailed` if it got none."""
    sink = Sink()
    async with receiving(sink.take) as url:
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
    """Takes everything and keeps nothing."""

    def __init__(self) -> None:
        self.bytes = Counter[str]()
        """What came so far, by path."""
        self.requests = Counter[str]()
        """How often something came, by path."""

    async def take(self, path: str, body: bytes) -> None:
        """Count a request."""
        self.bytes[path] += len(body)
        self.requests[path] += 1
