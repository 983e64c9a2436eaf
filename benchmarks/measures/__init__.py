"""The measures, by the names that ONLY takes, in the order in which they are taken."""

from collections.abc import Awaitable, Callable

from benchmarks.bench import Bench
from benchmarks.measures.deferred import deferred
from benchmarks.measures.dropping import dropping
from benchmarks.measures.duplicates import duplicates
from benchmarks.measures.growth import growth
from benchmarks.measures.idle import idle
from benchmarks.measures.latency import latency
from benchmarks.measures.layers import layers
from benchmarks.measures.ledger import ledger
from benchmarks.measures.memory import memory
from benchmarks.measures.old_tables import old_tables
from benchmarks.measures.ordinary import ordinary
from benchmarks.measures.peers import peers
from benchmarks.measures.poison import poison
from benchmarks.measures.relay import relay
from benchmarks.measures.streamed import streamed
from benchmarks.measures.telemetry import telemetry
from benchmarks.measures.throughput import throughput
from benchmarks.measures.xmin import xmin

MEASURES: dict[str, Callable[[Bench], Awaitable[None]]] = {
    one.__name__: one
    for one in (
        throughput,
        peers,
        layers,
        relay,
        latency,
        streamed,
        ordinary,
        duplicates,
        deferred,
        poison,
        ledger,
        old_tables,
        dropping,
        telemetry,
        idle,
        memory,
        xmin,
        growth,
    )
}
