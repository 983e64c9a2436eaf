"""Filters of closed generations: what they rule out is new, and nothing else is taken for new."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from uuid import UUID

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from rbloom import Bloom

from pipeline.apply import filters
from pipeline.apply.filters import Filters
from pipeline.observe import metrics
from pipeline.retention import generations
from pipeline.retention.maintenance import run_retention
from pipeline.runtime import Part
from pipeline.settings import Settings

from .bank import Bank
from .desk import Desk, NewDesk
from .test_inbox import close_generation, count, somebody_waits
from tests.conftest import Running
from tests.contract.bank import Deposit, histories
from tests.servers.waiting import PATIENCE, eventually

Connect = Callable[[], Awaitable[asyncpg.Connection]]
NewSettings = Callable[..., Settings]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Collect the first and last generations of the filters that are fetched."""
    generations: list[tuple[int, int]] = []
    load = filters._load

    async def load_(
        db: asyncpg.Connection, one: filters._Filter, blooms: dict[filters._Filter, Bloom]
    ) -> None:
        generations.append((one.first, one.last))
        await load(db, one, blooms)

    monkeypatch.setattr(filters, "_load", load_)
    return generations


@pytest.fixture
def one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a filter be full with its first generation."""
    monkeypatch.setattr(filters, "_ROOM", 1)
    monkeypatch.setattr(filters, "_AT_LEAST", 1)


async def keys_of(desk: Desk, *deposits: Deposit) -> list[bytes]:
    """Return the markers' keys of the deposits."""
    return [item.key for item in (await desk.read(*deposits, start=0)).items]


async def sifted(desk: Desk, db: asyncpg.Connection, *deposits: Deposit) -> tuple[set[int], range]:
    """Return which of the deposits must be looked up, by place, and which generations for all."""
    oldest, current, opening = await db.fetchrow(
        "SELECT oldest, current, opening FROM pipeline.inbox_generation"
    )
    keys = await keys_of(desk, *deposits)
    suspects, bare = desk.filters.sift(range(oldest, current), opening, keys)
    return {keys.index(key) for key in suspects}, bare


async def stored(db: asyncpg.Connection) -> list[tuple[int, int]]:
    """Return the first and last generations of the filters that are stored."""
    rows = await rows_of(db)
    return [(row["first_generation"], row["last_generation"]) for row in rows if row["capacity"]]


async def rows_of(db: asyncpg.Connection) -> list[asyncpg.Record]:
    """Return the filters that are stored."""
    rows: list[asyncpg.Record] = await db.fetch(
        "SELECT * FROM pipeline.inbox_filter ORDER BY first_generation"
    )
    return rows


@pytest.mark.parametrize("loaded", [False, True], ids=["from the database", "by its filter"])
async def test_a_duplicate_is_found_in_every_closed_generation(
    ledger: tuple[Bank, Desk],
    db: asyncpg.Connection,
    settings: NewSettings,
    outcomes: Counter[str],
    loaded: bool,
) -> None:
    """Trap 9."""
    _, desk = ledger
    for amount in (1, 2, 3):
        await desk.apply(Deposit(amount))
        await close_generation(db, settings)
    assert await stored(db) == [(1, 3)]
    if loaded:
        await desk.load_filters()
    every = [Deposit(amount) for amount in range(1, 6)]
    known, bare = await sifted(desk, db, *every)
    assert (known, bare) == (({0, 1, 2}, range(0)) if loaded else (set(), range(1, 4)))
    await desk.apply(*every)
    assert await histories(db) == {"ada": [1, 2, 3, 4, 5]}
    assert (outcomes["applied"], outcomes["duplicate"]) == (5, 3)


@pytest.mark.usefixtures("one_each")
async def test_a_false_positive_is_looked_up_and_new(
    ledger: tuple[Bank, Desk],
    db: asyncpg.Connection,
    settings: NewSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filters, "_RATE", 0.5)
    _, desk = ledger
    first = [Deposit(amount) for amount in range(64)]
    await desk.apply(*first)
    await close_generation(db, settings)
    await desk.load_filters()
    new = [Deposit(amount) for amount in range(64, 128)]
    suspects, bare = await sifted(desk, db, *new)
    assert 0 < len(suspects) < len(new)
    assert bare == range(0)
    await desk.apply(*new, *first)
    assert await histories(db) == {"ada": list(range(128))}


async def test_a_process_with_filters_of_before_a_rotation_asks_the_database_until_the_next_load(
    ledger: tuple[Bank, Desk],
    db: asyncpg.Connection,
    settings: NewSettings,
    fetched: list[tuple[int, int]],
) -> None:
    """Trap 9."""
    _, desk = ledger
    for amount in (1, 2, 3):
        await desk.apply(Deposit(amount))
        await close_generation(db, settings)
        assert await sifted(desk, db, Deposit(amount)) == (set(), range(1, amount + 1))
        await desk.apply(Deposit(amount))
        assert desk.filters.lacking.is_set()
        desk.filters.lacking.clear()
        await desk.load_filters()
        assert await sifted(desk, db, Deposit(amount)) == ({0}, range(0))
        await desk.apply(*(Deposit(every) for every in range(1, amount + 1)))
        assert not desk.filters.lacking.is_set()
    assert fetched == [(1, 1), (1, 2), (1, 3)]
    assert await histories(db) == {"ada": [1, 2, 3]}


async def test_a_generation_whose_filter_is_not_built_yet_is_looked_up_and_the_others_are_not(
    ledger: tuple[Bank, Desk], db: asyncpg.Connection, settings: NewSettings
) -> None:
    _, desk = ledger
    for amount in (1, 2):
        await desk.apply(Deposit(amount))
        await close_generation(db, settings)
    await desk.apply(Deposit(3))
    assert await generations.close_generation(db, current=3)
    await desk.load_filters()
    every = [Deposit(amount) for amount in (1, 2, 3, 4)]
    assert await sifted(desk, db, *every) == ({0, 1}, range(3, 4))
    assert desk.filters.lacking.is_set()
    await desk.apply(*every)
    assert await histories(db) == {"ada": [1, 2, 3, 4]}


_DAMAGES = {
    "no bit is set": "bits = decode(repeat('00', octet_length(bits)), 'hex')",
    "a bit is lost": "bits = set_bit(bits, 64 + 7, 1 - get_bit(bits, 64 + 7))",
    "the end is lost": "bits = substring(bits FOR octet_length(bits) - 1)",
    "nothing is left": "bits = ''",
    "another filter's": """
        bits = (SELECT bits FROM pipeline.inbox_filter WHERE first_generation = 2)
    """,
    "another generation": "first_generation = 0",
    "another count": "keys = keys + 1",
    "another capacity": "capacity = capacity + 1",
    "another digest": "digest = sha256(digest)",
}


@pytest.mark.usefixtures("one_each")
@pytest.mark.parametrize("damage", _DAMAGES)
async def test_a_damaged_filter_is_told_of_and_not_trusted_but_built_anew(
    ledger: tuple[Bank, Desk],
    db: asyncpg.Connection,
    settings: NewSettings,
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    _, desk = ledger
    for amount in (1, 2):
        await desk.apply(Deposit(amount))
        await close_generation(db, settings)
    wanted = await rows_of(db)
    await db.execute(
        f"UPDATE pipeline.inbox_filter SET {_DAMAGES[damage]} WHERE first_generation = 1"
    )
    (first, last), _ = await stored(db)
    with caplog.at_level(logging.WARNING, logger="pipeline"):
        await desk.load_filters()
    warnings = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert [one.getMessage() for one in warnings] == [
        f"the filter of inbox generations {first} to {last} is damaged: it will be built anew"
    ]
    await desk.apply(Deposit(1), Deposit(2), Deposit(3))
    assert await histories(db) == {"ada": [1, 2, 3]}
    await run_retention(db, settings())
    assert await rows_of(db) == wanted
    await desk.load_filters()
    assert await sifted(desk, db, Deposit(1), Deposit(2), Deposit(4)) == ({0, 1}, range(0))


async def test_a_damaged_filter_is_not_added_to(
    ledger: tuple[Bank, Desk], db: asyncpg.Connection, settings: NewSettings
) -> None:
    """With a digest of its own again it would be trusted."""
    _, desk = ledger
    await desk.apply(Deposit(1))
    await close_generation(db, settings)
    await db.execute(f"UPDATE pipeline.inbox_filter SET {_DAMAGES['no bit is set']}")
    await desk.apply(Deposit(2))
    await close_generation(db, settings)
    assert await stored(db) == [(1, 1), (2, 2)]
    await desk.load_filters()
    await run_retention(db, settings())
    await desk.load_filters()
    assert await sifted(desk, db, Deposit(1), Deposit(2), Deposit(3)) == ({0, 1}, range(0))


async def test_a_filter_of_another_format_is_not_trusted_but_built_anew(
    ledger: tuple[Bank, Desk],
    db: asyncpg.Connection,
    settings: NewSettings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where the bits of a key are is the library's affair: another version may see none of them."""
    _, desk = ledger
    await desk.apply(Deposit(1))
    with monkeypatch.context() as other:
        other.setattr(filters, "FORMAT", "1, rbloom 0.9")
        other.setattr(filters, "_hash", lambda key: -1)
        await close_generation(db, settings)
    await desk.load_filters()
    assert await stored(db) == [(1, 1)], "others may want it"
    assert "damaged" not in caplog.text
    await desk.apply(Deposit(1), Deposit(2))
    assert await histories(db) == {"ada": [1, 2]}
    await run_retention(db, settings())
    await desk.load_filters()
    assert await sifted(desk, db, Deposit(1), Deposit(2)) == ({0}, range(0))


_TABLES = (
    "account",
    "pipeline.position",
    "pipeline.inbox",
    "pipeline.inbox_closed",
    "pipeline.inbox_filter",
)


async def save(db: asyncpg.Connection) -> Callable[[], Awaitable[None]]:
    """Take a backup of what the engine remembers; returns what restores it."""
    generation = await db.fetchrow(
        "SELECT singleton, current, oldest, opened_at, since, opening"
        "  FROM pipeline.inbox_generation"
    )
    rows = {table: await db.fetch(f"SELECT * FROM {table}") for table in _TABLES}

    async def restore() -> None:
        async with db.transaction():
            await db.execute(f"TRUNCATE {', '.join(_TABLES)}")
            for table, some in rows.items():
                schema, _, name = table.rpartition(".")
                await db.copy_records_to_table(name, schema_name=schema or None, records=some)
            await db.execute(
                "UPDATE pipeline.inbox_generation SET (singleton, current, oldest, opened_at,"
                " since, opening) = ROW ($1::boolean, $2::int, $3::int, $4::timestamptz,"
                " $5::timestamptz, $6::uuid)",
                *generation,
            )

    return restore


@pytest.mark.parametrize(
    ("by_numbers", "applied"),
    [(False, [1, 3, 2]), (True, [1, 3, 2, 3])],
    ids=["the engine", "by the numbers alone"],
)
async def test_after_a_restore_the_filters_of_other_generations_with_the_same_numbers_say_nothing(
    ledger: tuple[Bank, Desk],
    db: asyncpg.Connection,
    settings: NewSettings,
    monkeypatch: pytest.MonkeyPatch,
    by_numbers: bool,
    applied: list[int],
) -> None:
    """Trap 9: the process lives on, the database goes back and closes them once more."""
    _, desk = ledger
    if by_numbers:
        naive = Filters.sift

        def sift(
            self: Filters, closed: range, opening: UUID, keys: Sequence[bytes]
        ) -> tuple[list[bytes], range]:
            if self._loaded_at:
                opening = self._loaded_at[1]
            return naive(self, closed, opening, keys)

        monkeypatch.setattr(Filters, "sift", sift)
    await desk.apply(Deposit(1))
    await close_generation(db, settings)
    restore = await save(db)
    await desk.apply(Deposit(2))
    await close_generation(db, settings)
    await desk.load_filters()
    assert await sifted(desk, db, Deposit(1), Deposit(2), Deposit(3)) == ({0, 1}, range(0))
    await restore()
    # Another partition is first this time.
    await desk.apply(Deposit(3))
    await close_generation(db, settings)
    await desk.apply(Deposit(2), Deposit(3))
    assert await histories(db) == {"ada": applied}
    await desk.load_filters()
    await desk.apply(Deposit(2), Deposit(3), Deposit(1))
    assert await histories(db) == {"ada": applied}


@pytest.mark.parametrize("how", ["cancelled", "connection lost"])
async def test_a_build_that_is_cut_off_leaves_nothing_and_is_done_again(
    ledger: tuple[Bank, Desk],
    db: asyncpg.Connection,
    connect: Connect,
    settings: NewSettings,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    _, desk = ledger
    await desk.apply(Deposit(1))
    await close_generation(db, settings)
    await db.execute("DELETE FROM pipeline.inbox_filter")
    async with stored_by_another(await connect()):
        builder = await connect()
        building = asyncio.create_task(run_retention(builder, settings(retention_interval=0.1)))
        await somebody_waits(db)
        if how == "cancelled":
            building.cancel()
            with pytest.raises(asyncio.CancelledError):
                await building
            builder.terminate()
        else:
            await db.execute("SELECT pg_terminate_backend($1)", builder.get_server_pid())
            await building
            assert "filter of a closed inbox generation is not built" in caplog.text
    assert await stored(db) == []
    await desk.load_filters()
    await desk.apply(Deposit(1), Deposit(2))

    async def is_built() -> bool:
        # The server may take a moment to free what the other one has held.
        await run_retention(db, settings())
        return await stored(db) == [(1, 1)]

    await eventually(is_built)
    await desk.load_filters()
    assert await sifted(desk, db, Deposit(1), Deposit(3)) == ({0}, range(0))
    assert await histories(db) == {"ada": [1, 2]}


@asynccontextmanager
async def stored_by_another(db: asyncpg.Connection) -> AsyncIterator[None]:
    """Hold a filter of generation 1 that is never committed: who stores one waits."""
    transaction = db.transaction()
    await transaction.start()
    await db.execute(filters._STORE, 1, 1, 0, 0, b"", "", b"")
    yield
    await transaction.rollback()


async def test_who_finds_another_process_building_leaves_it_to_that_one(
    ledger: tuple[Bank, Desk], db: asyncpg.Connection, connect: Connect, settings: NewSettings
) -> None:
    _, desk = ledger
    for amount in (1, 2):
        await desk.apply(Deposit(amount))
        await close_generation(db, settings)
    await db.execute("DELETE FROM pipeline.inbox_filter")
    first = await connect()
    async with stored_by_another(await connect()):
        building = asyncio.create_task(run_retention(first, settings()))
        await somebody_waits(db)
        await asyncio.wait_for(run_retention(db, settings()), PATIENCE)
        assert await stored(db) == []
        assert not building.done()
    await building
    assert await stored(db) == [(1, 2)]


async def test_many_that_build_at_once_build_every_filter(
    ledger: tuple[Bank, Desk], db: asyncpg.Connection, connect: Connect, settings: NewSettings
) -> None:
    _, desk = ledger
    for amount in range(1, 6):
        await desk.apply(Deposit(amount))
        await close_generation(db, settings)
    wanted = await rows_of(db)
    await db.execute("DELETE FROM pipeline.inbox_filter")
    connections = [await connect() for _ in range(5)]
    await asyncio.gather(*(run_retention(one, settings()) for one in connections))
    assert await rows_of(db) == wanted


async def test_what_the_server_refuses_to_build_is_told_of_and_stops_nothing(
    ledger: tuple[Bank, Desk],
    db: asyncpg.Connection,
    settings: NewSettings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, desk = ledger
    await db.execute("ALTER TABLE pipeline.inbox_filter RENAME TO elsewhere")
    await desk.apply(Deposit(1))
    await close_generation(db, settings)
    assert "filter of a closed inbox generation is not built" in caplog.text
    await desk.apply(Deposit(1), Deposit(2))
    assert await histories(db) == {"ada": [1, 2]}


async def fill(db: asyncpg.Connection, generation: int, markers: int) -> None:
    """Insert markers."""
    await db.execute(
        """
        INSERT INTO pipeline.inbox (generation, key, hash, hash_version, consumer, source, id, type,
                                    topic, partition, "offset")
        SELECT $1, decode(md5(n::text), 'hex'), '', 1, 'c', '/s', n, 't', 't', 0, n
          FROM generate_series(1, $2) AS n
        """,
        generation,
        markers,
    )


async def test_a_large_generation_is_read_to_its_end_in_portions(
    ledger: tuple[Bank, Desk], db: asyncpg.Connection, settings: NewSettings
) -> None:
    _, desk = ledger
    await fill(db, 1, 2 * filters._PORTION + 1)
    await close_generation(db, settings)
    await desk.load_filters()
    keys = [row["key"] for row in await db.fetch("SELECT key FROM pipeline.inbox")]
    assert len(keys) == 2 * filters._PORTION + 1
    opening = await db.fetchval("SELECT opening FROM pipeline.inbox_generation")
    suspects, bare = desk.filters.sift(range(1, 2), opening, keys)
    assert set(suspects) == set(keys)
    assert bare == range(0)


@pytest.mark.usefixtures("one_each")
async def test_what_does_not_fit_into_the_memory_is_looked_up(
    new_desk: NewDesk,
    db: asyncpg.Connection,
    settings: NewSettings,
    fetched: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filters, "_RATE", 1e-30)
    monkeypatch.setattr(filters, "_KEY_BYTES", 18.0)
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    little = {"inbox_filter_mebibytes": 1}
    desk = await new_desk(bank.handlers, topic=bank.deposits, **little)
    for generation, markers in enumerate((28_000, 70_000, 10_000, 25_000), 1):
        await desk.apply(Deposit(generation))
        await fill(db, generation, markers)
        await close_generation(db, lambda: settings(**little))
    assert await stored(db) == [(1, 1), (3, 3), (4, 4)], "the second is too large"
    await desk.load_filters()
    assert fetched == [(4, 4), (3, 3)], "behind these there is no room for the first"
    every = [Deposit(amount) for amount in range(1, 6)]
    assert await sifted(desk, db, *every) == ({2, 3}, range(1, 3))
    await desk.apply(*every)
    assert await histories(db) == {"ada": [1, 2, 3, 4, 5]}


async def test_without_memory_for_filters_none_is_built(
    new_desk: NewDesk, bank: Bank, db: asyncpg.Connection, settings: NewSettings
) -> None:
    desk = await new_desk(bank.handlers, topic=bank.deposits, inbox_filter_mebibytes=0)
    for amount in (1, 2):
        await desk.apply(Deposit(amount))
        await close_generation(db, lambda: settings(inbox_filter_mebibytes=0))
    assert await stored(db) == []
    await desk.load_filters()
    desk.filters.lacking.clear()
    await desk.apply(Deposit(1), Deposit(2), Deposit(3))
    assert await histories(db) == {"ada": [1, 2, 3]}
    assert not desk.filters.lacking.is_set(), "there is nothing to load"


def test_a_filter_holds_what_half_of_the_memory_does_at_most() -> None:
    million = 1_000_000
    default, most = filters._largest(128), filters._largest(1_000)
    assert 37 * million < default < 38 * million
    assert [filters._capacity(keys, default) for keys in (0, 1, million, 2 * million)] == [
        65_536,
        65_536,
        16 * million,
        32 * million,
    ]
    assert filters._capacity(5 * million, default) == default
    assert filters._capacity(default, default) == default
    assert filters._capacity(default + 1, default) == 0
    assert filters._capacity(50 * million, default) == 0
    assert filters._capacity(50 * million, most) == most > 5 * 50 * million
    assert filters._capacity(0, filters._largest(0)) == 0
    for mebibytes in (1, 128, 1_000):
        one = filters._Filter(1, 1, 1, filters._largest(mebibytes))
        bits = Bloom(one.capacity, filters._RATE).size_in_bits / 8
        assert bits == pytest.approx(one.size, rel=1e-3)
        assert 2 * one.size <= mebibytes * 2**20


async def test_a_generation_that_is_too_large_is_counted_once_told_of_and_never_waited_for(
    new_desk: NewDesk,
    bank: Bank,
    db: asyncpg.Connection,
    connect: Connect,
    settings: NewSettings,
    fetched: list[tuple[int, int]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unfiltered: list[int] = []
    monkeypatch.setattr(metrics.generations_unfiltered, "set", unfiltered.append)
    monkeypatch.setattr(filters, "_KEY_BYTES", 100.0)  # 5,242 keys in half of a MiB
    little = {"inbox_filter_mebibytes": 1}
    desk = await new_desk(bank.handlers, topic=bank.deposits, **little)
    for generation, markers in ((1, 10), (2, 10_000), (3, 20)):
        await desk.apply(Deposit(generation))
        await fill(db, generation, markers)
        await close_generation(db, lambda: settings(**little))
    assert await stored(db) == [(1, 1), (3, 3)], "one is as large as half of the memory allows"
    rows = await rows_of(db)
    assert [row["capacity"] for row in rows] == [5_242, 0, 5_242]
    await desk.load_filters()
    assert unfiltered == [1]
    assert "looked up in the inbox generations [2]" in caplog.text
    every = [Deposit(amount) for amount in range(1, 5)]
    desk.filters.lacking.clear()
    assert await sifted(desk, db, *every) == ({0, 2}, range(2, 3))
    assert not desk.filters.lacking.is_set(), "a filter that nobody builds is not waited for"
    await desk.apply(*every)
    assert await histories(db) == {"ada": [1, 2, 3, 4]}
    caplog.clear()
    await desk.load_filters()
    assert not caplog.records, "it is told once"
    counts: list[object] = []
    house = await connect()
    house.add_query_logger(lambda query: counts.append(query.query))
    await run_retention(house, settings(**little))
    assert filters._FORGET in counts
    assert filters._COUNT not in counts, "it is not counted again"
    assert await rows_of(db) == rows


async def test_with_more_memory_a_generation_that_was_too_large_gets_its_filter(
    new_desk: NewDesk,
    bank: Bank,
    db: asyncpg.Connection,
    settings: NewSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filters, "_KEY_BYTES", 100.0)
    await (await new_desk(bank.handlers, topic=bank.deposits)).apply(Deposit(1))
    await fill(db, 1, 10_000)
    await close_generation(db, lambda: settings(inbox_filter_mebibytes=1))
    assert await stored(db) == []
    desk = await new_desk(bank.handlers, topic=bank.deposits, inbox_filter_mebibytes=2)
    await desk.load_filters()
    desk.filters.lacking.clear()
    assert await sifted(desk, db, Deposit(1), Deposit(2)) == (set(), range(1, 2))
    assert desk.filters.lacking.is_set(), "retention is about to build it"
    await run_retention(db, settings(inbox_filter_mebibytes=2))
    assert await stored(db) == [(1, 1)]
    await desk.load_filters()
    assert await sifted(desk, db, Deposit(1), Deposit(2)) == ({0}, range(0))


async def test_filters_of_generations_that_are_forgotten_go(
    ledger: tuple[Bank, Desk],
    db: asyncpg.Connection,
    settings: NewSettings,
    fetched: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filters, "_ROOM", 2)
    monkeypatch.setattr(filters, "_AT_LEAST", 1)
    _, desk = ledger
    for amount in (1, 2, 3, 4):
        await desk.apply(Deposit(amount))
        await close_generation(db, settings)
    await desk.load_filters()
    assert fetched == [(3, 4), (1, 2)]
    every = [Deposit(amount) for amount in (1, 2, 3, 4, 5)]
    for oldest, suspects in ((2, {0, 1, 2, 3}), (3, {2, 3})):
        await db.execute("UPDATE pipeline.inbox_generation SET oldest = $1", oldest)
        await run_retention(db, settings())
        await desk.load_filters()
        assert await sifted(desk, db, *every) == (suspects, range(0))
    assert await stored(db) == [(3, 4)]
    assert fetched == [(3, 4), (1, 2)], "what is in memory is not fetched again"


async def test_a_filter_that_is_full_is_followed_by_another(
    ledger: tuple[Bank, Desk],
    db: asyncpg.Connection,
    settings: NewSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filters, "_AT_LEAST", 1)
    _, desk = ledger
    for first in range(0, 3_600, 100):
        await desk.apply(*(Deposit(first + n, account="x") for n in range(100)))
        await close_generation(db, settings)
    assert await stored(db) == [(1, 16), (17, 32), (33, 36)]
    await desk.load_filters()
    old = [Deposit(amount) for amount in range(3_600)]
    new = [Deposit(amount) for amount in range(10_000, 11_000)]
    suspects, bare = await sifted(desk, db, *old, *new)
    assert bare == range(0)
    assert suspects >= set(range(len(old)))
    assert len(suspects) - len(old) < 40, "of a hundred, less than one in each that is full"


async def test_an_empty_generation_has_a_filter_too(
    ledger: tuple[Bank, Desk], db: asyncpg.Connection, settings: NewSettings
) -> None:
    _, desk = ledger
    await close_generation(db, settings)
    await close_generation(db, settings)
    assert await stored(db) == [(1, 2)]
    await desk.load_filters()
    assert await sifted(desk, db, Deposit(1)) == (set(), range(0))


async def test_a_running_service_loads_the_filters_that_it_lacks(
    running: Running,
    bank: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    fetched: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    outcomes: Counter[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Trap 9. After the start, after rotations, and after it has failed."""
    monkeypatch.setattr(filters, "_PAUSE", 0.05)
    sent = 0

    async def send() -> None:
        nonlocal sent
        sent += 1
        for amount in (sent, *range(1, sent, 5)):
            await Deposit(amount).send(producer, bank.deposits)

    async def has_failed() -> bool:
        await send()
        return "inbox generations are not loaded" in caplog.text

    async def has_fetched() -> bool:
        await send()
        return len(set(fetched)) > 2

    async def all_is_applied() -> bool:
        return await histories(db) == {"ada": list(range(1, sent + 1))}

    await db.execute("ALTER TABLE pipeline.inbox_filter RENAME TO away")
    quick = {"inbox_generation_age": 0.3, "retention_interval": 0.1}
    async with running(bank.service, Part.CONSUME, **quick):
        await eventually(has_failed)
        await db.execute("ALTER TABLE pipeline.away RENAME TO inbox_filter")
        await eventually(has_fetched)
        await eventually(all_is_applied)
    assert outcomes["duplicate"] > 0
    assert await count(db, "pipeline.inbox") == sent
