"""What a window holds, whatever commits in whatever order; and how other cursors fail at it."""

import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

import asyncpg
import pytest

from onceward.handlers import staging
from onceward.relay import statements as relay_statements
from onceward.relay import window
from onceward.relay.window import Progress

from .outgoing import ALL_SHARDS, event, numbered, read, read_all, stage, start_of
from .writers import Writers, faults

Connect = Callable[[], Awaitable[asyncpg.Connection]]
Events = Sequence[asyncpg.Record]


async def test_a_lower_id_that_commits_later_is_not_passed_over(
    connect: Connect, db: asyncpg.Connection
) -> None:
    """Trap 1."""
    progress = await start_of(db)
    late = await connect()
    transaction = late.transaction()
    await transaction.start()
    await staging.append(late, numbered("t", [1]))
    await stage(await connect(), numbered("t", [2]))
    before, progress = await read_all(db, progress)
    await transaction.commit()
    after, _ = await read_all(db, progress)
    assert (before, after) == (["2"], ["1"])


async def test_transactions_above_the_snapshots_xmax_are_not_passed_over(
    connect: Connect, db: asyncpg.Connection
) -> None:
    """Trap 27."""
    writers = [await connect() for _ in range(3)]
    while True:
        transactions = [writer.transaction() for writer in writers]
        for number, (writer, transaction) in enumerate(zip(writers, transactions, strict=True)):
            await transaction.start()
            await staging.append(writer, numbered("t", [number]))
        xids = [await writer.fetchval("SELECT pg_current_xact_id()") for writer in writers]
        ids, progress = await read_all(db, await start_of(db))
        assert ids == []
        if progress.seen[1] <= min(xids):
            break
        # Another test's transaction, begun later, has ended: xmax is behind it.
        for transaction in transactions:
            await transaction.rollback()
    for number in (1, 2, 0):
        await transactions[number].commit()
        ids, progress = await read_all(db, progress)
        assert ids == [str(number)]


async def test_only_events_rolled_back_to_a_savepoint_are_not_published(
    connect: Connect, db: asyncpg.Connection
) -> None:
    progress = await start_of(db)
    writer = await connect()
    async with writer.transaction():
        await staging.append(writer, numbered("t", [1]))
        async with writer.transaction():
            await staging.append(writer, numbered("t", [2]))
        with suppress(ZeroDivisionError):
            async with writer.transaction():
                await staging.append(writer, numbered("t", [3]))
                raise ZeroDivisionError
        between, progress = await read_all(db, progress)
        async with writer.transaction():
            await staging.append(writer, numbered("t", [4]))
    after, _ = await read_all(db, progress)
    assert (between, after) == ([], ["1", "2", "4"])


async def test_a_row_committed_during_a_paged_window_comes_in_the_next(
    connect: Connect, db: asyncpg.Connection
) -> None:
    progress = await start_of(db)
    late = await connect()
    transaction = late.transaction()
    await transaction.start()
    await staging.append(late, numbered("t", ["late"]))
    await stage(await connect(), numbered("t", range(20)))
    first = await read(db, progress, 7)
    await staging.append(late, numbered("t", ["later"]))
    await transaction.commit()
    rest, _ = await read_all(db, first.then, 7)
    assert [row["event_id"] for row in first.events] == [str(number) for number in range(7)]
    assert rest == [*(str(number) for number in range(7, 20)), "late", "later"]


async def test_a_window_is_paged_through_a_long_gap_of_ids(
    db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "_SCAN_AT_MOST", 10)
    progress = await start_of(db)
    await stage(db, numbered("t", [1, 2, 3]))
    await db.execute("SELECT nextval('pipeline.outbox_id_seq') FROM generate_series(1, 95)")
    await stage(db, numbered("t", [4, 5, 6]))
    ids, progress = await read_all(db, progress, 2)
    # The gap gives pages without events: `read_all` goes on because a target is set.
    assert ids == ["1", "2", "3", "4", "5", "6"]
    assert progress.target is None


async def test_a_window_of_one_large_transaction_is_read_from_its_first_event(
    db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `service adopt`, which gives all events one transaction."""
    monkeypatch.setattr(window, "_SCAN_AT_MOST", 10)
    progress = await start_of(db)
    await stage(db, numbered("t", range(35)))
    await db.execute("UPDATE pipeline.outbox SET xid = DEFAULT")
    ids, progress = await read_all(db, progress, 2)
    assert ids == [str(number) for number in range(35)]
    assert progress.target is None


async def test_a_page_ends_with_the_event_that_fills_it(
    db: asyncpg.Connection,
) -> None:
    """Small ones, then large ones, and some without a payload: the cut leaves nothing out."""
    progress = await start_of(db)
    sizes = [10] * 50 + [1_000, None, 400, None, None, 3_000, 1, None, 999, None] * 3 + [10] * 50
    payloads = [None if size is None else b"x" * size for size in sizes]
    await stage(db, [event("t", n, payload=one) for n, one in enumerate(payloads)])  # type: ignore[arg-type]
    ids: list[str] = []
    pages = list[int]()
    while not pages or progress.target is not None:
        step = window.page if progress.target else window.fresh
        one = await step(db, progress, ALL_SHARDS, 5_000, 1_000)
        read = [len(row["payload"] or b"") for row in one.events]
        assert sum(read[:-1]) < 1_000
        pages.append(sum(read))
        ids += [row["event_id"] for row in one.events]
        progress = one.then
    assert ids == [str(n) for n in range(len(sizes))]
    assert len(pages) > 3
    assert min(pages[:-1]) >= 1_000, "a page is full before another one is begun"


# The same for every schedule, and the cursors that others would take.


class Reader(Protocol):
    """Something that reads the events it has not read yet, page by page."""

    async def read(self, db: asyncpg.Connection, limit: int) -> tuple[Events, bool]:
        """Return the next events, and whether that is all there was to read at this moment."""


class OnSnapshots:
    """The engine's own: before it reads, it asks whether there can be anything new."""

    def __init__(self, start: Progress) -> None:
        self._progress = start

    async def is_as_seen(self, db: asyncpg.Connection) -> bool:
        server = await db.fetchval("SELECT pg_postmaster_start_time()")
        return await window.is_as_seen(db, [self._progress], server)

    async def read(self, db: asyncpg.Connection, limit: int) -> tuple[Events, bool]:
        before = self._progress
        if await self.is_as_seen(db):
            return [], True
        one = await read(db, before, limit)
        self._progress = one.then
        return one.events, before.target is None and one.then.target is None


class OnIds:
    """Trap 1: a cursor on `id`."""

    where = "id > $1"

    def __init__(self, _: Progress) -> None:
        self._last_id = 0

    async def read(self, db: asyncpg.Connection, limit: int) -> tuple[Events, bool]:
        events = await db.fetch(
            f"SELECT * FROM pipeline.outbox WHERE {self.where} ORDER BY id LIMIT $2",
            self._last_id,
            limit,
        )
        self._last_id = events[-1]["id"] if events else self._last_id
        return events, len(events) < limit


class OnIdsOfFinished(OnIds):
    """A cursor on `id` that goes as far as the oldest running transaction, and not beyond."""

    where = "id > $1 AND xid < pg_snapshot_xmin(pg_current_snapshot())"


class OnFinished:
    """Trap 2: whatever is below the oldest running transaction, window by window."""

    def __init__(self, _: Progress) -> None:
        self._below = 0

    async def read(self, db: asyncpg.Connection, limit: int) -> tuple[Events, bool]:
        oldest = await db.fetchval("SELECT pg_snapshot_xmin(pg_current_snapshot())")
        events = await db.fetch(
            "SELECT * FROM pipeline.outbox WHERE xid >= $1 AND xid < $2 ORDER BY id",
            self._below,
            oldest,
        )
        self._below = oldest
        return events, True


class OnTransactions:
    """Trap 3: ordered by `xid`, up to the oldest running transaction."""

    def __init__(self, _: Progress) -> None:
        self._last = (0, 0)

    async def read(self, db: asyncpg.Connection, limit: int) -> tuple[Events, bool]:
        events = await db.fetch(
            "SELECT * FROM pipeline.outbox WHERE (xid, id) > ($1, $2)"
            " AND xid < pg_snapshot_xmin(pg_current_snapshot()) ORDER BY xid, id LIMIT $3",
            *self._last,
            limit,
        )
        if events:
            self._last = (events[-1]["xid"], events[-1]["id"])
        return events, len(events) < limit


class Patched(OnSnapshots):
    """The engine's own, with another text in the place of one."""

    right: str
    wrong: str

    async def read(self, db: asyncpg.Connection, limit: int) -> tuple[Events, bool]:
        assert relay_statements.READ_WINDOW.count(self.right) == 1, (
            "the statement is not what this test knows"
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                relay_statements,
                "READ_WINDOW",
                relay_statements.READ_WINDOW.replace(self.right, self.wrong),
            )
            return await super().read(db, limit)


class WithoutTheRunning(Patched):
    """The engine's own without the transactions that were running in the last snapshot."""

    right = "WHERE pg_visible_in_snapshot(running, pg_current_snapshot())"
    wrong = "WHERE false"


class LooksAtTheHighest(OnSnapshots):
    """The engine's own, if it asked only whether a later transaction has finished."""

    async def is_as_seen(self, db: asyncpg.Connection) -> bool:
        highest = await db.fetchval("SELECT pg_snapshot_xmax(pg_current_snapshot())")
        return self._progress.target is None and self._progress.seen[1] == highest


class BoundedByAnId(Patched):
    """Trap 27: the engine's own, above the highest id that was handed out at the last one."""

    right = "WHERE xid >= pg_snapshot_xmax($1)"

    def __init__(self, start: Progress) -> None:
        super().__init__(start)
        self._high = 0

    async def read(self, db: asyncpg.Connection, limit: int) -> tuple[Events, bool]:
        self.wrong = f"{self.right} AND id > {self._high}"
        events, complete = await super().read(db, limit)
        if complete:
            self._high = await db.fetchval(
                "SELECT coalesce(pg_sequence_last_value('pipeline.outbox_id_seq'), 0)"
            )
        return events, complete


async def faults_of(
    kind: Callable[[Progress], Reader], connect: Connect, db: asyncpg.Connection, seed: int
) -> set[str]:
    """Let writers work at random, read now and then, and return what went wrong."""
    chance = random.Random(seed)
    await Writers.prepare(db)
    writers = Writers("t", [await connect() for _ in range(6)], chance)
    reader = kind(await start_of(db))
    found: list[tuple[bytes | None, str]] = []
    held_up: set[str] = set()

    async def read_page() -> bool:
        events, complete = await reader.read(db, chance.choice([1, 2, 7, 7, 30]))
        found.extend((row["key"], row["event_id"]) for row in events)
        return complete

    async def read_to_the_end() -> set[str]:
        while not await read_page():
            pass
        return set(writers.ids) - {id for _, id in found}

    for number in range(1, 1001):
        await writers.step()
        if number % 60 == 0:
            held_up |= await read_to_the_end()
        elif chance.random() < 0.2:
            await read_page()
    await writers.finish()
    lost = await read_to_the_end()
    assert all(writers.committed.values()), "a schedule without events proves nothing"
    assert len(writers.taken_back) > 50
    # What comes late, but comes, was held up by a transaction that had nothing to do with it.
    return faults(writers.committed, found) | ({"held up"} if held_up - lost else set())


@pytest.mark.parametrize("ids_at_a_time", [5, 50_000])
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3, 4))]
)
async def test_events_are_read_once_in_key_order_whatever_the_commit_order(
    connect: Connect,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    ids_at_a_time: int,
) -> None:
    monkeypatch.setattr(window, "_SCAN_AT_MOST", ids_at_a_time)
    assert await faults_of(OnSnapshots, connect, db, seed) == set()


async def first_seed_that_shows(
    fault: str, kind: Callable[[Progress], Reader], connect: Connect, db: asyncpg.Connection
) -> int | None:
    """Return the first schedule in which the reader is at fault; most often the first of all."""
    for seed in range(10):
        if fault in await faults_of(kind, connect, db, seed):
            return seed
        await db.execute("DROP TABLE aggregate; TRUNCATE pipeline.outbox")
    return None


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (OnIds, "lost"),
        (OnIdsOfFinished, "lost"),
        (OnFinished, "held up"),
        (OnTransactions, "out of order"),
        (WithoutTheRunning, "lost"),
        (LooksAtTheHighest, "held up"),
        (BoundedByAnId, "lost"),
    ],
)
async def test_that_property_notices_a_wrong_cursor(
    connect: Connect, db: asyncpg.Connection, kind: Callable[[Progress], Reader], fault: str
) -> None:
    """Traps 1, 2, 3 and 27."""
    assert await first_seed_that_shows(fault, kind, connect, db) is not None


async def test_that_property_notices_ids_that_are_fetched_ahead(
    connect: Connect, db: asyncpg.Connection
) -> None:
    """Trap 28."""
    await db.execute("ALTER SEQUENCE pipeline.outbox_id_seq CACHE 20")
    assert await first_seed_that_shows("out of order", OnSnapshots, connect, db) is not None


async def test_the_ids_of_the_outbox_are_handed_out_one_by_one(
    connect: Connect, db: asyncpg.Connection
) -> None:
    """Trap 28."""
    writers = [await connect(), await connect()]
    for number in range(6):
        await stage(writers[number % 2], numbered("t", [number]))
    rows = await db.fetch("SELECT event_id FROM pipeline.outbox ORDER BY id")
    assert [row["event_id"] for row in rows] == list("012345")


async def test_a_snapshot_in_a_writing_transaction_differs_from_what_others_see(
    connect: Connect, db: asyncpg.Connection
) -> None:
    """Trap 30: why the relay reads outside of any transaction that writes."""
    progress = await start_of(db)
    async with db.transaction():
        await staging.append(db, numbered("t", [1]))
        await stage(await connect(), numbered("t", [2]))
        before, progress = await read_all(db, progress)
        await staging.append(db, numbered("t", [3]))
    after, _ = await read_all(db, progress)
    # Read before it is committed, and the later one never.
    assert (before, after) == (["1", "2"], [])
