"""Relay: the outbox alone, filled before, beside aiokafka's producer alone."""

from collections import Counter
from functools import partial

from benchmarks.bench import Bench
from benchmarks.check import require
from benchmarks.marks import Values, ratios
from benchmarks.rig import OURS, running
from benchmarks.runs import rate

EVENTS = 300_000
KEYS = 1_000
PAYLOAD = 250
"""Bytes."""
_A_TRANSACTION = 1_000

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
            "producer": partial(_producer, bench, count, headers=False),
            "producer, headers": partial(_producer, bench, count, headers=True),
        },
    )
    found = partial(bench.found, "relay")
    bench.mark("relay alone", ratios(found("relay"), found("producer")))


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
        service = rig.process(site, command="relay")
        async with running(service), rig.counted(site.output) as published:
            samples = await rig.watch([service], published, count)
        expected = Counter(f"parcel-{number % KEYS:06}" for number in range(count))
        require((await rig.read(site.output)).faults(expected, {}, {}), "relay")
        return rate(samples, count)


async def _producer(bench: Bench, count: int, *, headers: bool) -> Values:
    rig = bench.rig
    async with rig.fresh_topic() as topic:
        told = await rig.produce(topic, count, headers=headers)
        return {
            "rate": told["count"] / told["seconds"],
            "cpu_python": told["cpu_seconds"] / told["count"] * 1_000,
        }
