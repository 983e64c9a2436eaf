"""Relay: the outbox alone, filled before, beside aiokafka's producer alone."""

from collections import Counter
from functools import partial
from typing import Any

from benchmarks.bench import Bench
from benchmarks.check import CheckFailed, require
from benchmarks.marks import Values
from benchmarks.producer import KEYS, PAYLOAD, key_of, told
from benchmarks.rig import (
    OURS,
    PRODUCER,
    PRODUCER_HEADERS,
    Contestant,
    Rig,
    Site,
    Told,
    place_of,
    running,
)
from benchmarks.runs import rate
from demo.processes import Service

EVENTS = 300_000
_A_TRANSACTION = 1_000
REQUIRED_HEADERS = {
    *("ce_specversion", "ce_id", "ce_source", "ce_type", "ce_time", "ce_subject"),
    *("ce_sequence", "content-type"),
}

# A commit ends each round of the loop, as if so many transactions had staged them.
_FILL = """
DO $$ BEGIN
FOR one IN 0..{last} LOOP
    INSERT INTO pipeline.outbox
           (topic, key, payload, event_id, source, type, subject, sequence, content_type)
    SELECT '{topic}', convert_to(name, 'UTF8'), convert_to(repeat('x', {payload}), 'UTF8'),
           lpad(to_hex(n), 32, '0'), '/benchmarks/relay', 'parcel.moved.v1', name,
           n / {keys} + 1, 'application/json'
      FROM generate_series(one * {size}, one * {size} + {size} - 1) AS n,
           LATERAL (SELECT 'parcel-' || lpad((n % {keys})::text, 6, '0')) AS parcel (name);
    COMMIT;
END LOOP;
END $$
"""


async def relay(bench: Bench) -> None:
    """Compare the relay with the producer, without headers as well as with those of an event."""
    count = bench.scaled(EVENTS) // _A_TRANSACTION * _A_TRANSACTION
    await bench.rounds(
        "relay",
        {
            "relay": partial(_relay, bench, count),
            "producer": partial(_producer, bench, PRODUCER, count),
            "producer, headers": partial(_producer, bench, PRODUCER_HEADERS, count),
        },
    )
    bench.compare("relay alone", "relay", "producer")


async def _relay(bench: Bench, count: int) -> Values:
    rig = bench.rig
    async with rig.site(OURS, "-") as site:
        last = count // _A_TRANSACTION - 1
        await rig.execute(
            _FILL.format(
                topic=site.output, keys=KEYS, payload=PAYLOAD, last=last, size=_A_TRANSACTION
            ),
            "VACUUM ANALYZE pipeline.outbox",
            "CHECKPOINT",
            database=site.database,
        )
        return await _published(rig, site, rig.process(site, command="relay"), count, event_of)


async def _producer(bench: Bench, who: Contestant, count: int) -> Values:
    rig = bench.rig
    async with rig.fresh_topic() as topic:
        site = Site(who, rig.stack.database, "-", topic, who.name)
        service = rig.process(site, settings={"BENCH_COUNT": str(count)})
        return await _published(rig, site, service, count, told)


def event_of(record: Any) -> tuple[str, int, None]:
    """Return key and sequence of an event of the backlog. Raises `CheckFailed` unless it is one."""
    key, sequence, _ = place_of(record)
    names = {name for name, _ in record.headers}
    if len(record.value) != PAYLOAD or not names >= REQUIRED_HEADERS:
        raise CheckFailed(f"relay: an event of {len(record.value)} bytes with {sorted(names)}")
    return key, sequence, None


async def _published(rig: Rig, site: Site, service: Service, count: int, told: Told) -> Values:
    """Watch a process publish so many; `told` says what its records are."""
    async with running(service), rig.counted(site.output) as published:
        samples = await rig.watch([service], published, count)
    expected = Counter(map(key_of, range(count)))
    check = await rig.read(site.output, told)
    require(check.faults(expected, {}, {}), site.contestant.name)
    return rate(samples, count)
