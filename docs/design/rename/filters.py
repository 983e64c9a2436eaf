"""CPU of looking new events up in the closed generations of the inbox, with and without filters.

    cd CLONE/'<<cookiecutter.service_name>>'
    ../.venv/bin/python dev/stack.py run --postgres -- \
        ../.venv/bin/python filters.py [--markers 5000000] [--rounds 5]

The server must be on this machine: the CPU is that of its backend, from /proc. Needs about
1.2 GB of disk for each million markers of a generation. A schema `spike` is made and dropped.

Which result decides which way. A is "no filters, 3 generations"; B is "filters, 10 generations", the
sum of the database's and Python's CPU. The decision (record 35: generations of four days, no filters)

- stands if A is at most 10 us a key above B, or at most twice what inserting a marker costs;
- stands with a note of the figure if it is more, but less than a tenth of the CPU of an event of the
  benchmark (`docs/performance.md`), as filters cost 400 lines, memory and states of their own;
- is reopened, with fewer and longer generations first (two of eight days), if it is more than that.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

import asyncpg

KEYS = 500
"""Keys of a statement, as in a batch."""
STATEMENTS = 200
"""Of one measure. The clock of a backend's CPU has ticks of 10 ms."""
CLOSED = (1, 2, 3, 6, 10)
FALSE_POSITIVES = 0.001

FIND = """
SELECT key, hash, hash_version FROM spike.inbox
 WHERE generation >= $1 AND generation < $2 AND key = ANY ($3)
"""
MARK = """
INSERT INTO spike.inbox (generation, key, hash, hash_version)
SELECT $1, key, key, 0 FROM unnest($2::bytea[]) AS new (key) ON CONFLICT DO NOTHING RETURNING key
"""

Call = Callable[[], Awaitable[object]]


async def fill(db: asyncpg.Connection, markers: int) -> None:
    await db.execute("DROP SCHEMA IF EXISTS spike CASCADE; CREATE SCHEMA spike")
    await db.execute("""
        CREATE TABLE spike.inbox (
            generation integer NOT NULL, key bytea NOT NULL, hash bytea NOT NULL,
            hash_version smallint NOT NULL, PRIMARY KEY (key, generation)
        ) PARTITION BY LIST (generation)
    """)
    for number in range(1, max(CLOSED) + 2):  # the last one is the current one
        begun = time.monotonic()
        await db.execute(f"CREATE TABLE spike.g{number} (LIKE spike.inbox)")
        await db.execute(
            f"INSERT INTO spike.g{number} SELECT {number}, decode(md5('{number}/' || n), 'hex'),"
            f" decode(md5('hash' || n), 'hex'), 0 FROM generate_series(1, {markers}) AS n"
        )
        await db.execute(f"ALTER TABLE spike.g{number} ADD PRIMARY KEY (key, generation)")
        await db.execute(
            f"ALTER TABLE spike.inbox ATTACH PARTITION spike.g{number} FOR VALUES IN ({number})"
        )
        await db.execute(f"VACUUM ANALYZE spike.g{number}")
        print(f"generation {number}: {time.monotonic() - begun:.0f} s", flush=True)


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process, in user and system mode."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measured(pid: int, call: Call, keys: int) -> tuple[float, float]:
    """Return the CPU of the backend and of this process, in us for each key."""
    begun, own = cpu_of(pid), time.process_time()
    for _ in range(STATEMENTS):
        await call()
    own = time.process_time() - own
    used = cpu_of(pid) - begun
    return 1e6 * used / STATEMENTS / keys, 1e6 * own / STATEMENTS / keys


def new_keys(count: int) -> Sequence[bytes]:
    return [os.urandom(16) for _ in range(count)]


def filters_of(markers: int) -> Sequence[object] | None:
    """Return filled filters, with the keys' own bits as their hash; None without the library."""
    try:
        from rbloom import Bloom
    except ImportError:
        print("rbloom is not installed: the CPU of filters in Python is left out")
        return None
    made = []
    for _ in range(max(CLOSED)):
        one = Bloom(markers, FALSE_POSITIVES, hash_of)
        one.update(new_keys(min(markers, 500_000)))  # the time of a look-up does not depend on it
        made.append(one)
    return made


def hash_of(key: bytes) -> int:
    return int.from_bytes(key, "little", signed=True)


async def measure(db: asyncpg.Connection, markers: int, rounds: int) -> None:
    pid = await db.fetchval("SELECT pg_backend_pid()")
    current = max(CLOSED) + 1
    calls: dict[str, tuple[Call, int]] = {}
    for closed in CLOSED:

        def look(closed: int = closed) -> Awaitable[object]:
            return db.fetch(FIND, current - closed, current, new_keys(KEYS))

        def look_up_rest(closed: int = closed) -> Awaitable[object]:
            few = max(1, round(KEYS * closed * FALSE_POSITIVES))
            return db.fetch(FIND, current - closed, current, new_keys(few))

        calls[f"no filters, {closed} closed"] = look, KEYS
        calls[f"filters, {closed} closed: database"] = look_up_rest, KEYS
    calls["insert a marker"] = (lambda: db.fetch(MARK, current, new_keys(KEYS))), KEYS
    filters = filters_of(markers)
    for closed in CLOSED if filters else ():

        async def sift(closed: int = closed) -> None:
            assert filters is not None
            for key in new_keys(KEYS):
                any(key in one for one in filters[:closed])

        calls[f"filters, {closed} closed: Python"] = sift, KEYS
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for number in range(rounds + 1):  # interleaved, so that a busy machine disturbs all alike
        for name, (call, keys) in calls.items():
            one = await measured(pid, call, keys)
            if number:  # the first round reads into the caches
                found[name].append(one)
    print(f"\nus of CPU for each key, median of {rounds} rounds (and the lowest)")
    print(f"{'':34}{'backend':>18}{'this process':>18}")
    for name, some in found.items():
        cells = (f"{statistics.median(one):8.2f} ({min(one):.2f})" for one in zip(*some, strict=True))
        print(f"{name:34}" + "".join(f"{cell:>18}" for cell in cells))


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--markers", type=int, default=5_000_000, help="of each generation")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    url = os.environ["PIPELINE_DATABASE_URL"].replace("postgresql+asyncpg", "postgresql")
    db = await asyncpg.connect(url)
    try:
        await fill(db, given.markers)
        await db.execute("SET jit = off")
        await measure(db, given.markers, given.rounds)
    finally:
        await db.execute("DROP SCHEMA IF EXISTS spike CASCADE")
        await db.close()


asyncio.run(main())
