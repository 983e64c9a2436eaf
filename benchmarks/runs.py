"""The runs that several measures are made of."""

import json
import pickle
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from math import ceil

from benchmarks import probe
from benchmarks.load import Load
from benchmarks.marks import Values, is_saturated, quantile
from benchmarks.rig import (
    PARTITIONS,
    Contestant,
    Count,
    Rig,
    Sample,
    Site,
    connected,
    guarded,
    running,
)
from demo.flights import ROOT
from demo.processes import ProcessFailed, Service, run

PER_SECOND = 100
"""Records a second, where latency is measured."""
_WARM_UP_SECONDS = 2
_TICK = 0.01
"""Seconds of CPU that the system counts at a time."""
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999, "most": 1.0}


def rate(samples: Sequence[Sample], messages: int) -> dict[str, float]:
    """Return messages a second, and CPU seconds for 1,000 of them by who spent them; also messages
    for each second of CPU, the service's and PostgreSQL's, where the latter is known.

    All from the beginning of the work to its end: who does one half of it first and then the other
    is not measured by the second.
    """
    begin, end = samples[0], samples[-1]
    spent = {name: cpu - begin.cpu.get(name, 0.0) for name, cpu in end.cpu.items()}
    values = {
        "rate": messages / (end.at - begin.at),
        **{f"cpu_{name}": seconds / messages * 1_000 for name, seconds in spent.items()},
    }
    if "cpu_postgres" in values:  # in a container nobody sees it
        least = _TICK / messages * 1_000  # a short run may use none
        values["per_cpu"] = 1_000 / max(least, values["cpu_python"] + values["cpu_postgres"])
    return values


@asynccontextmanager
async def asking(site: Site, question: str, *arguments: object) -> AsyncIterator[Count]:
    """Lend a way to ask the site's database for a number."""
    async with connected(site.database) as connection:

        async def count() -> int:
            return await connection.fetchval(question, *arguments)  # type: ignore[no-any-return]

        yield count


def parcels(site: Site) -> AbstractAsyncContextManager[Count]:
    """Lend a way to see whether a handler has taken effect: 0 or 1, for any contestant."""
    return asking(site, "SELECT count(*) FROM (SELECT FROM parcel LIMIT 1) AS one")


def positions(site: Site) -> AbstractAsyncContextManager[Count]:
    """Lend a way to count what our service has consumed."""
    # Offsets begin at 0 and have no gaps: the benchmark alone has written the topic.
    return asking(
        site,
        "SELECT COALESCE(sum(next_offset), 0)::bigint FROM pipeline.position"
        " WHERE consumer_group = $1",
        site.group,
    )


@dataclass(frozen=True)
class Throughput:
    """A load that is there before the contestant starts, and worked off as fast as it can."""

    contestant: Contestant
    load: Load
    partitions: int = PARTITIONS
    processes: int = 1
    settings: Mapping[str, str] | None = None
    begun: Callable[[Site], AbstractAsyncContextManager[Count]] = parcels
    """Sees whether the first record has been consumed."""

    async def __call__(self, rig: Rig) -> Values:
        """Run it on fresh tables. Raises `CheckFailed`."""
        input_ = await rig.input(self.load, self.partitions)
        async with rig.site(self.contestant, input_, self.partitions) as site:
            return await self.at(rig, site)

    async def at(self, rig: Rig, site: Site) -> Values:
        """Run it at a site whose topic for events is empty. Raises `CheckFailed`."""
        services = [rig.process(site, settings=self.settings) for _ in range(self.processes)]
        async with (
            running(*services),
            rig.counted(site.output) as count,
            self.begun(site) as begun,
        ):
            samples = await rig.watch(services, count, self.load.events, begun=begun)
            # One of several may still be starting, and could not end properly.
            await ready(site, services)
        await rig.check(site, self.load)
        return rate(samples, len(self.load.scans))


_SIZES = """
SELECT (SELECT sum(pg_total_relation_size(inhrelid))::float FROM pg_inherits
         WHERE inhparent = 'pipeline.inbox'::regclass) / (SELECT count(*) FROM pipeline.inbox),
       (SELECT sum(pg_total_relation_size(inhrelid))::float FROM pg_inherits
         WHERE inhparent = 'pipeline.outbox'::regclass) / (SELECT count(*) FROM pipeline.outbox)
"""


async def sizes(site: Site) -> Values:
    """Return the bytes of a marker and of an event on disk, with their indexes."""
    async with connected(site.database) as connection:
        marker, event = await connection.fetchrow(_SIZES)
    return {"marker_bytes": marker, "event_bytes": event}


async def written(site: Site) -> int:
    """Return how many bytes of write-ahead log the server has written so far."""
    async with connected(site.database) as connection:
        return int(await connection.fetchval("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn"))


def records(seconds: float, per_second: float = PER_SECOND) -> int:
    """Return how many `latency` sends to measure for so long: those that warm up, and more."""
    return ceil(_WARM_UP_SECONDS * per_second) + ceil(seconds * per_second)


@dataclass(frozen=True)
class Streamed:
    """Records that were sent at a steady rate, without those that warm up, and their events."""

    sent: Mapping[int, float]
    """When, by the number of the scan."""
    arrived: Mapping[int, float]
    """When the first event of each scan was received."""
    seconds: float
    """From the first record to the last event."""
    cpu: Mapping[str, float]
    """CPU seconds in that time, by process: python, postgres, kafka, and probe, which sends and
    observes."""
    idle: float
    """The idle share of the machine; 0 where it is unknown."""
    late: float
    """Milliseconds that the latest record was sent after its time."""

    def values(self, **reached: Mapping[int, float]) -> Values:
        """Return the cores that each process took, the idle share, and latencies in ms.

        Latencies are quantiles from sending to arrival, and to each of the other times, with its
        name before theirs. A saturated machine gives none.
        """
        busy = {f"busy_{name}": spent / self.seconds for name, spent in self.cpu.items()}
        values = {**busy, "machine_idle": self.idle, "late_ms": self.late}
        if is_saturated(values):
            return values
        for name, at in {"": self.arrived, **reached}.items():
            took = [(at[number] - sent) * 1_000 for number, sent in self.sent.items()]
            prefix = f"{name}_" if name else ""
            values |= {f"{prefix}{of}": quantile(took, share) for of, share in _QUANTILES.items()}
        return values


async def latency(
    rig: Rig,
    site: Site,
    services: Sequence[Service],
    load_: Load,
    *,
    per_second: float = PER_SECOND,
) -> Values:
    """Send records at a slow pace; return latencies until their events arrive, and CPU."""
    return (await stream(rig, site, services, load_, per_second=per_second)).values()


async def stream(
    rig: Rig,
    site: Site,
    services: Sequence[Service],
    load_: Load,
    *,
    per_second: float = PER_SECOND,
) -> Streamed:
    """Send records at a steady rate and observe their events, in a process for that.

    The processes run already, and have seen none of the load. What comes in its first seconds warms
    up every connection and does not count. Raises `ProcessFailed` if an event never comes.
    """
    warm_up = records(0, per_second)
    servers = {name: [pid] for name, pid in rig.server_pids().items()}
    plan = probe.Plan(
        bootstrap_servers=rig.stack.kafka,
        input=site.input,
        output=site.output,
        records=list(load_.records()),
        warm_up=warm_up,
        per_second=per_second,
        events=load_.events,
        processes={"python": [service.pid or 0 for service in services], **servers},
    )
    paths = rig.folder / "probe.pickle", rig.folder / "probe.json"
    paths[0].write_bytes(pickle.dumps(vars(plan)))
    command = [sys.executable, "-m", "benchmarks.probe", *map(str, paths)]
    await guarded(run(command, log=rig.folder / "probe.txt", cwd=ROOT), services)
    told = json.loads(paths[1].read_text("utf-8"))
    arrived = {int(number): at for number, at in told["arrived"].items()}
    numbers = [scan.number for scan in load_.scans]
    if missing := set(numbers) - set(arrived):
        raise ProcessFailed(f"{len(missing):,} of {len(numbers):,} scans have no event")
    sent = dict(zip(numbers[warm_up:], told["sent"][warm_up:], strict=True))
    return Streamed(
        sent, arrived, told["seconds"], told["cpu"], told["idle"] or 0.0, told["late"] * 1_000
    )


async def ready(site: Site, services: Sequence[Service]) -> None:
    """Wait until our processes say that they are ready; of others nobody knows."""
    if site.contestant.is_ours:
        for service in services:
            await guarded(service.ready(), services)
