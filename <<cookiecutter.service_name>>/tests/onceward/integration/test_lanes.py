"""Lanes of the backlog: one worker each, whoever dies, sleeps or comes late."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa
from aiokafka import AIOKafkaProducer

from onceward import Policy, Retry
from onceward.apply import backlog, batch
from onceward.apply.breaker import BreakerOpen
from onceward.apply.encryption import Rows
from onceward.apply.item import Item, order_key
from onceward.apply.outcome import BatchOutcome
from onceward.apply.transactions import ConsumeTransactions
from onceward.retry import lane_source, lanes
from onceward.retry.lane_source import LaneSource, is_suspect, read_rows, take
from onceward.retry.lanes import LaneLost, Lease
from onceward.retry.workers import BacklogWorkers
from onceward.schema import LANES
from onceward.servers.database import autocommitting
from onceward.servers.retrying import Retrying
from onceward.servers.tasks import SLICE_SECONDS, in_background

from .applier import Applier, NewApplier
from .bank import Bank
from .lives import lanes_of
from .test_backlog import QUICK, bank_with
from tests.conftest import Running
from tests.contract.bank import Deposit, histories
from tests.servers.pooler import POOLED
from tests.servers.waiting import PATIENCE, eventually

LEASE = 1.0


async def claim(applier: Applier, lease: float = LEASE) -> LaneSource:
    """Claim the lane that has something due, and read it."""
    async with autocommitting(applier.engine) as driver:
        taken = await lanes.claim(driver, "somebody", lease, applier.handlers.consumers)
        assert taken is not None
        consumers = applier.handlers.consumers
        return await read_rows(taken, applier.handlers, await take(driver, taken, consumers, 100))


async def handle(applier: Applier, source: LaneSource) -> Sequence[BatchOutcome]:
    """Handle what was read."""
    attempts = Retrying(
        "the test", "PostgreSQL", unless=lambda: False, report=applier.outages.append
    )
    return await applier.consume.apply(source, attempts)


def is_note(source: LaneSource) -> bool:
    """Whether it stores what becomes of a row if the process dies over it."""
    return any(row.decision.is_assumed for row in source.unhandleable)


async def waiting(new_applier: NewApplier, *amounts: int) -> tuple[Bank, Applier]:
    """Return an applier in whose backlog these deposits of ada's are due."""
    bank, applier = await bank_with(new_applier, policy=QUICK)
    bank.refused = set(amounts)
    await applier.apply(*(Deposit(amount) for amount in amounts))
    bank.refused = set()
    return bank, applier


async def test_a_worker_whose_lane_went_to_another_changes_nothing(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    _, applier = await waiting(new_applier, 1, 2, 3)
    stale = await claim(applier)
    await eventually(lambda: _has_ended(db, stale.lease))
    await applier.work_off()
    assert await histories(db) == {"ada": [1, 2, 3]}
    with pytest.raises(LaneLost):
        await handle(applier, stale)
    assert await histories(db) == {"ada": [1, 2, 3]}


async def test_other_tasks_run_while_rows_with_slow_validation_are_read(
    new_applier: NewApplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, applier = await waiting(new_applier, *range(1, 21))
    validated, seen = 0, [0]

    def burn(item: Item) -> Item:
        nonlocal validated
        validated += 1
        time.sleep(SLICE_SECONDS)
        return batch.validated(item)

    async def look() -> None:
        while True:
            seen.append(validated)
            await asyncio.sleep(0)

    monkeypatch.setattr(lane_source, "validated", burn)
    async with in_background(look()):
        taken = await claim(applier)
    assert len(taken.items) == validated == 20
    assert max(after - before for before, after in pairwise(seen)) == 1


async def _has_ended(db: asyncpg.Connection, lease: Lease) -> bool:
    return bool(
        await db.fetchval(
            "SELECT lease_until < clock_timestamp() FROM pipeline.backlog_lane WHERE lane = $1",
            *lease.lanes,
        )
    )


async def test_a_lane_is_claimed_only_after_its_lease_has_ended(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    _, applier = await waiting(new_applier, 1)
    lease = (await claim(applier, lease=60)).lease
    assert not await applier.lanes.work_off()
    await db.execute(
        "UPDATE pipeline.backlog_lane SET lease_until = clock_timestamp() WHERE lane = $1",
        *lease.lanes,
    )
    await applier.work_off()
    assert await histories(db) == {"ada": [1]}


async def test_a_rollback_does_not_undo_that_the_lease_was_extended(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, applier = await waiting(new_applier, 1)
    source = await claim(applier, lease=60)
    await db.execute("UPDATE pipeline.backlog_lane SET lease_until = clock_timestamp()")
    has_ended: list[bool] = []

    async def look() -> None:
        has_ended.append(await _has_ended(db, source.lease))

    bank.waits[1] = look
    await handle(applier, source)
    assert has_ended == [False]


async def test_a_lease_not_extended_in_time_is_extended_on_another_connection(
    new_applier: NewApplier,
    db: asyncpg.Connection,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
) -> None:
    _, applier = await waiting(new_applier, 1)
    source = await claim(applier)
    given_up: list[object] = []
    sa.event.listen(applier.engine.sync_engine, "invalidate", lambda *given: given_up.append(given))
    other = await connect()
    async with other.transaction():
        await other.execute("SELECT FROM pipeline.backlog_lane FOR UPDATE")
        handling = asyncio.create_task(handle(applier, source))
        await eventually(lambda: bool(applier.outages))
        assert given_up, "its statement may still be under way"
    await handling
    assert await histories(db) == {"ada": [1]}


async def test_rows_that_a_dead_worker_can_not_have_read_are_handled_together(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, applier = await bank_with(new_applier, mode="deferred")
    await applier.apply(*(Deposit(n) for n in range(1, 6)))
    await claim(applier, lease=0.0)  # and die
    a_batch = applier.lanes._settings.model_copy(update={"batch_size": 2})
    monkeypatch.setattr(applier.lanes, "_settings", a_batch)
    handle, together = applier.lanes._handle, list[int]()

    async def count(lease: Lease, rows: Rows) -> Lease:
        together.append(len(rows))
        return await handle(lease, rows)

    monkeypatch.setattr(applier.lanes, "_handle", count)
    await applier.lanes.work_off()
    assert together[:2] == [1, 1]
    assert together[2] > 1, "all three, unless the machine was too busy for quick ones"
    assert await histories(db) == {"ada": [1, 2, 3, 4, 5]}


async def test_a_claim_whose_answer_was_lost_is_no_death(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, applier = await waiting(new_applier, 1)
    claim_lane = lanes.claim
    starts: list[int] = []

    async def lose_first(*arguments: Any) -> Lease | None:
        lane = await claim_lane(*arguments)
        if not starts:
            starts.append(0)
            raise asyncpg.ConnectionDoesNotExistError("connection was closed")
        starts.extend([lane.starts] if lane else [])
        return lane

    monkeypatch.setattr(lanes, "claim", lose_first)
    assert await applier.lanes.work_off()
    assert starts == [0, 1]
    assert await histories(db) == {"ada": [1]}
    count = "SELECT max(starts), count(lease_until) FROM pipeline.backlog_lane"
    assert tuple(await db.fetchrow(count)) == (0, 0)


_COPY = """
INSERT INTO pipeline.backlog
SELECT (jsonb_populate_record(b, jsonb_build_object('key', '\\x01', 'lane', $1::integer))).*
  FROM pipeline.backlog b
"""


async def test_after_an_unanswered_claim_a_lane_that_waited_longer_comes_first(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, applier = await waiting(new_applier, 1)
    claim_lane = lanes.claim
    is_lost = False

    async def lose_first(*arguments: Any) -> Lease | None:
        nonlocal is_lost
        lane = await claim_lane(*arguments)
        if is_lost or lane is None:
            return lane
        is_lost = True
        other = (lane.lanes[0] + 1) % LANES
        old = "UPDATE pipeline.backlog_lane SET released_at = '2000-01-01' WHERE lane = $1"
        await db.execute(old, other)
        await db.execute(_COPY, other)
        raise asyncpg.ConnectionDoesNotExistError("connection was closed")

    monkeypatch.setattr(lanes, "claim", lose_first)
    first, second = await applier.lanes._claim(), await applier.lanes._claim()
    assert first is not None
    assert second is not None
    assert first.lanes == [(second.lanes[0] + 1) % LANES]
    assert (first.starts, second.starts) == (1, 1)


async def test_a_late_claim_takes_no_lane_that_the_process_already_serves(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, applier = await waiting(new_applier, 1)
    claim_lane = lanes.claim
    late: list[tuple[Any, ...]] = []

    async def give_up_first(driver: asyncpg.Connection, *arguments: Any) -> Lease | None:
        if not late:
            late.append(arguments)
            raise asyncpg.ConnectionDoesNotExistError("connection was closed")
        return await claim_lane(driver, *arguments)

    monkeypatch.setattr(lanes, "claim", give_up_first)
    lane = await applier.lanes._claim()
    assert lane is not None
    assert await claim_lane(db, *late[0]) is None
    await applier.lanes.serve(lane)
    assert await histories(db) == {"ada": [1]}


async def test_a_lane_served_by_this_process_is_reclaimed_after_its_lease(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    _, applier = await waiting(new_applier, 1)
    lane = await applier.lanes._claim()
    assert lane is not None
    assert await applier.lanes._claim() is None
    await db.execute("UPDATE pipeline.backlog_lane SET lease_until = clock_timestamp()")
    again = await applier.lanes._claim()
    assert again is not None
    assert again.starts == 2  # the first may be stuck in a handler
    await applier.lanes._work_at(lane)  # and loses it
    assert await applier.lanes._claim() is None
    await applier.lanes._work_at(again)
    assert await histories(db) == {"ada": [1]}


async def test_a_release_can_be_repeated(new_applier: NewApplier, db: asyncpg.Connection) -> None:
    _, applier = await waiting(new_applier, 1)
    lane = await applier.lanes._claim()
    assert lane is not None
    for _ in range(2):
        await lanes.release(db, lane, forgets_deaths=False)
    assert await db.fetchval("SELECT min(starts) FROM pipeline.backlog_lane") == 0


async def starts_of(db: asyncpg.Connection) -> int:
    """Return the largest number of starts of a lane."""
    starts: int = await db.fetchval("SELECT max(starts) FROM pipeline.backlog_lane")
    return starts


@pytest.mark.parametrize("why", ["an open breaker", "a shutdown"])
async def test_a_death_counts_until_every_row_was_tried_alone(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    _, applier = await bank_with(new_applier, mode="deferred")
    await applier.apply(*(Deposit(n) for n in range(1, 6)))
    await claim(applier, lease=0.0)  # and die
    handle = applier.lanes._handle
    alone: list[bool] = []

    async def interrupt_third(lease: Lease, rows: Rows) -> None:
        if len(alone) == 2:
            alone.append(False)
            if why == "an open breaker":
                raise BreakerOpen(why, "deposit")
            applier.lanes.stop()
            return
        alone.append(len(rows) == 1 and is_suspect(lease, rows[0]))
        await handle(lease, rows)

    monkeypatch.setattr(applier.lanes, "_handle", interrupt_third)
    await applier.lanes.work_off()
    assert await starts_of(db) == 1
    applier.lanes._stopping.clear()
    applier.lanes._ends_at = float("inf")
    await applier.lanes.work_off()
    assert alone == [True, True, False, True, True, True]
    assert await starts_of(db) == 0
    assert await histories(db) == {"ada": [1, 2, 3, 4, 5]}


async def test_a_dead_workers_lane_is_claimed_after_a_clock_setback(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    _, applier = await waiting(new_applier, 1)
    await claim(applier)  # and die
    await db.execute("UPDATE pipeline.backlog_lane SET lease_until = lease_until + interval '1 h'")
    await applier.work_off()
    assert await histories(db) == {"ada": [1]}


async def test_workers_that_stop_do_not_wait_for_a_count(
    new_applier: NewApplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, applier = await waiting(new_applier)
    counting = asyncio.Event()

    async def count(driver: asyncpg.Connection, *limits: float) -> None:
        counting.set()
        await driver.fetch("SELECT pg_sleep(1000)")

    monkeypatch.setattr(lanes, "waiting", count)
    async with in_background(applier.lanes.run()) as running:
        await counting.wait()
        applier.lanes.stop()
        await asyncio.wait_for(running, PATIENCE)


async def test_what_is_tried_alone_is_not_overtaken_at_its_last_attempt(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spent beforehand, the attempt must not count until somebody has died over it."""
    bank, applier = await bank_with(new_applier, policy=Policy(attempts=2, schedule=(0,)))
    bank.refused = {10}
    await applier.apply(Deposit(10))
    bank.refused = set()
    await applier.make_due()
    await claim(applier, lease=0.0)  # and die
    apply = applier.lanes._apply
    seen: list[Sequence[asyncpg.Record]] = []

    another = await new_applier(bank.handlers, topic=bank.deposits)

    async def apply_and_meet_a_later_one(
        consume: ConsumeTransactions, work: LaneSource
    ) -> Sequence[BatchOutcome]:
        results = await apply(consume, work)
        if is_note(work) and not seen:
            seen.append(await applier.backlog())
            await another.apply(Deposit(20))
        return results

    with monkeypatch.context() as patch:
        patch.setattr(applier.lanes, "_apply", apply_and_meet_a_later_one)
        await applier.work_off()
    [[assumed]] = seen
    assert (assumed["reason"], assumed["attempts"], assumed["died_at"]) == ("process died", 2, None)
    await applier.work_off()
    assert await histories(db) == {"ada": [10, 20]}


async def test_after_a_death_only_existing_rows_are_read_and_tried_singly(
    new_applier: NewApplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, applier = await bank_with(new_applier, mode="deferred")
    another = await new_applier(bank.handlers, topic=bank.deposits)
    await applier.apply(*(Deposit(n) for n in range(20)))
    await claim(applier, lease=0.0)  # and die
    read_due, apply = applier.lanes._due, applier.lanes._apply
    read: list[int] = []
    handled: list[int] = []

    async def read_and_count(lease: Lease, limit: int, *, before: datetime | None = None) -> Rows:
        rows = await read_due(lease, limit, before=before)
        read.append(len(rows))
        return rows

    async def apply_and_count(
        consume: ConsumeTransactions, work: LaneSource
    ) -> Sequence[BatchOutcome]:
        if is_note(work) and not handled:
            await another.apply(*(Deposit(n) for n in range(20, 60)))
        if not is_note(work):
            handled.append(len(work.items))
        return await apply(consume, work)

    monkeypatch.setattr(applier.lanes, "_due", read_and_count)
    monkeypatch.setattr(applier.lanes, "_apply", apply_and_count)
    await applier.lanes.work_off()
    assert bank.calls == list(range(60))
    assert (handled[:20], read[:20]) == ([1] * 20, [1] * 20)
    assert len(handled) < 30, "what came since is handled together"


async def test_a_repeatedly_due_row_does_not_keep_its_lane_careful(
    new_applier: NewApplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, applier = await bank_with(new_applier, policy=Policy(attempts=50, schedule=(0,)))
    bank.refused = {1}
    await applier.apply(Deposit(1), Deposit(2))
    await claim(applier, lease=0.0)  # and die
    careful: list[int] = []

    async def apply(consume: ConsumeTransactions, work: LaneSource) -> Sequence[BatchOutcome]:
        careful.append(is_note(work))
        return await BacklogWorkers._apply(applier.lanes, consume, work)

    monkeypatch.setattr(applier.lanes, "_apply", apply)
    await applier.work_off()
    assert bank.calls.count(1) == 50
    assert sum(careful) < 10


async def test_who_is_told_to_end_accuses_no_row(new_applier: NewApplier) -> None:
    bank, applier = await waiting(new_applier, 1)
    await applier.make_due()
    await claim(applier, lease=0.0)  # and die
    bank.calls.clear()
    bank.waits = {1: asyncio.Event().wait}  # type: ignore[dict-item]
    working = asyncio.create_task(applier.lanes.work_off())
    await eventually(lambda: bank.calls == [1])
    (row,) = await applier.backlog()
    assert (row["reason"], row["attempts"]) == ("process died", 2)
    applier.lanes.stop()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    (row,) = await applier.backlog()
    assert (row["reason"], row["attempts"], row["deaths"]) == ("failed", 1, 0)


async def test_a_worker_whose_loop_is_torn_down_has_died(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """As all tasks are when one of a handler raises `KeyboardInterrupt` or `SystemExit`."""
    bank, applier = await waiting(new_applier, 1)
    await applier.make_due()
    bank.calls.clear()
    bank.waits = {1: asyncio.Event().wait}  # type: ignore[dict-item]
    working = asyncio.create_task(applier.lanes.work_off())
    await eventually(lambda: bank.calls == [1])
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert await lanes_of(db, applier) == [1], "as if it had begun and not come back"


async def test_a_row_whose_last_attempt_killed_a_process_dies_untried(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, applier = await bank_with(new_applier, policy=Policy(attempts=2, schedule=(0,)))
    bank.refused = {10}
    await applier.apply(Deposit(10))
    bank.calls.clear()
    await db.execute("UPDATE pipeline.backlog SET reason = 'process died', attempts = 2")
    await applier.make_due()
    await applier.work_off()
    (row,) = await applier.backlog()
    assert (row["reason"], row["attempts"]) == ("attempts used up", 2)
    assert row["died_at"] is not None
    assert row["error"].startswith("ProcessDied")
    assert bank.calls == []


async def test_a_follower_stored_behind_a_row_already_gone_is_still_handled(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    # The partition's transaction has seen the head; before it commits, the head is done.
    bank, applier = await waiting(new_applier, 1)
    held = await new_applier(bank.handlers, topic=bank.deposits)
    seen, go_on = asyncio.Event(), asyncio.Event()
    found = backlog.find

    async def find_and_wait(*args: object) -> object:
        answer = await found(*args)  # type: ignore[arg-type]
        seen.set()
        await go_on.wait()
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backlog, "find", find_and_wait)
        following = asyncio.create_task(held.apply(Deposit(2)))
        await seen.wait()
    await applier.work_off()
    assert await histories(db) == {"ada": [1]}
    go_on.set()
    await following
    assert [row["reason"] for row in await applier.backlog()] == ["follows another"]
    await applier.work_off()
    assert await histories(db) == {"ada": [1, 2]}


async def test_a_message_repeated_at_the_moment_it_settles_is_applied_once(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    for number in range(20):
        bank, applier = await bank_with(new_applier, policy=QUICK)
        bank.handlers = applier.handlers
        other = await new_applier(bank.handlers, topic=bank.deposits, partition=1)
        bank.refused = {number}
        await applier.apply(Deposit(number))
        bank.refused = set()
        await asyncio.gather(applier.work_off(), other.apply(Deposit(number)))
        await applier.work_off()
    assert sorted((await histories(db))["ada"]) == list(range(20))
    assert await db.fetchval("SELECT count(*) FROM pipeline.inbox") == 20
    assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0


@pytest.mark.parametrize(
    "seed",
    # Each takes twice as long behind a pooler.
    [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (() if POOLED else (1, 2)))],
)
async def test_workers_partitions_and_zombies_keep_every_key_in_order(
    new_applier: NewApplier, db: asyncpg.Connection, seed: int
) -> None:
    """Trap 7: whatever fails, and however often, no record is overtaken by a later one."""
    rng = random.Random(seed)
    keys, count = 6, 400
    bank, applier = await bank_with(new_applier, policy=Policy(attempts=1_000, schedule=(0, 0.01)))

    class Flaky(dict[int, Exception]):
        def __contains__(self, amount: object) -> bool:
            return rng.random() < 0.1

        def __getitem__(self, amount: int) -> Exception:
            return rng.choice([Retry(), ValueError(), Retry(after=0.02)])

    bank.errors = Flaky()
    small = {"batch_size": 20, "breaker_keys": 1_000}
    small |= {"backlog_lease": 9, "transaction_timeout": 5, "lock_timeout": 2}
    workers = [await new_applier(bank.handlers, topic=bank.deposits, **small) for _ in range(3)]
    sent: dict[str, list[int]] = {str(key): [] for key in range(keys)}
    ended = asyncio.Event()

    async def feed() -> None:
        for first in range(0, count, 10):
            batch = []
            for amount in range(first, first + 10):
                key = str(rng.randrange(keys))
                sent[key].append(amount)
                batch.append(Deposit(amount, key))
            await applier.apply(*batch)
        ended.set()

    async def work(worker: Applier) -> None:
        while not (ended.is_set() and await db_is_empty()):
            if not await worker.lanes.work_off():
                await asyncio.sleep(0.005)

    async def db_is_empty() -> bool:
        async with autocommitting(applier.engine) as driver:
            return not await driver.fetchval("SELECT EXISTS (SELECT FROM pipeline.backlog)")

    async def usurp() -> None:
        """Take lanes away from their workers, as a lease that ends does.

        Ever less often: a slow machine has to get something done in between.
        """
        pause = 0.03
        while not ended.is_set():
            await asyncio.sleep(pause)
            pause *= 1.05
            await db.execute("""
                UPDATE pipeline.backlog_lane SET token = token + 1, lease_until = NULL
                 WHERE lane IN (SELECT lane FROM pipeline.backlog_lane
                                 WHERE lease_until IS NOT NULL ORDER BY random() LIMIT 1)
            """)

    await asyncio.wait_for(asyncio.gather(feed(), usurp(), *map(work, workers)), 300)
    assert await histories(db) == sent


async def test_a_service_retries_by_itself_and_the_key_goes_on_in_order(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    bank = Bank(
        bank.deposits, bank.balances, bank.name, options={"policy": Policy(schedule=(0.2,))}
    )
    bank.refused = {2}
    for amount in range(1, 6):
        await Deposit(amount).send(producer, bank.deposits)
        await Deposit(amount, "bob", id=f"bob's {amount}").send(producer, bank.deposits)
    bank.errors = {}
    async with running(bank.service) as health:
        await eventually(lambda: bank.calls.count(2) >= 6)
        bank.refused = set()
        await eventually(lambda: _is_done(db))
        assert health.is_ready
    assert await histories(db) == {"ada": [1, 2, 3, 4, 5], "bob": [1, 2, 3, 4, 5]}


async def _is_done(db: asyncpg.Connection) -> bool:
    return bool(await db.fetchval("SELECT count(*) = 10 FROM pipeline.inbox"))


async def test_a_bad_deployment_pauses_and_resumes_by_itself_after_the_repair(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    count = 2_000
    bank.refused = set(range(count))
    for amount in range(count):
        await producer.send(
            bank.deposits,
            Deposit(amount, account=str(amount)).record(bank.deposits, 0).value,
            key=str(amount).encode(),
            headers=list(Deposit(amount).record(bank.deposits, 0).headers),
        )
    await producer.flush()
    part = f"partition {bank.deposits}/0"
    async with running(bank.service, retry_pause=0.1) as health:
        await eventually(lambda: "breaker of deposit" in health.reasons)
        await eventually(lambda: bank.calls.count(0) > 3)
        assert "breaker open" in health.reasons[part]
        stored = await db.fetchval("SELECT count(*) FROM pipeline.backlog")
        assert stored < 20, "nothing is set aside by the thousand"
        assert await db.fetchval("SELECT count(*) FROM pipeline.backlog WHERE died_at > now()") == 0
        bank.refused = set()
        await eventually(lambda: health.is_ready)
        # What had been set aside before it opened has its turn by its own schedule.
        await eventually(lambda: _holds(db, count - stored))


async def _holds(db: asyncpg.Connection, count: int) -> bool:
    return bool(await db.fetchval("SELECT count(*) >= $1 FROM pipeline.inbox", count))


async def scattered(
    new_applier: NewApplier, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> tuple[Bank, Applier, list[int]]:
    """Return an applier with a due row in each lane, and a list of how many rows it has at once."""
    bank = Bank("deposits", "balances", "bank", options={"mode": "deferred"})
    applier = await new_applier(bank.handlers, topic=bank.deposits, **settings)
    accounts = {
        backlog.lane_of(order_key("deposit", one.record(bank.deposits, 0)), "deferred"): one
        for one in (Deposit(n, account=f"{n}") for n in range(400))
    }
    assert len(accounts) == LANES
    await applier.apply(*accounts.values())
    apply, handled = applier.lanes._apply, list[int]()

    async def apply_and_count(
        consume: ConsumeTransactions, work: LaneSource
    ) -> Sequence[BatchOutcome]:
        handled.append(len(work.items))
        return await apply(consume, work)

    monkeypatch.setattr(applier.lanes, "_apply", apply_and_count)
    return bank, applier, handled


async def test_rows_of_many_lanes_share_transactions(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, applier, handled = await scattered(new_applier, monkeypatch)
    await applier.work_off()
    assert handled == [1, 2, 4, 8, 16, 1]
    assert sorted(bank.calls) == sorted(amount for [amount] in (await histories(db)).values())
    assert await starts_of(db) == 0


async def test_a_worker_whose_transactions_are_full_leaves_lanes_to_others(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, applier, handled = await scattered(new_applier, monkeypatch)
    applier.lanes._pace.limit = 8
    assert await applier.lanes.work_off(LANES) == 1
    assert handled == [8]
    assert await starts_of(db) == 0
    await applier.work_off()
    assert len(await histories(db)) == LANES


async def test_what_is_tried_alone_is_tried_with_one_lane(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, applier, _ = await scattered(new_applier, monkeypatch, breaker_keys=1_000)
    free: list[int] = []

    async def look() -> None:
        count = "SELECT count(*) FROM pipeline.backlog_lane WHERE owner IS NULL AND lane >= $1"
        free.append(await db.fetchval(count, LANES) - LANES)

    bank.waits = dict.fromkeys(range(400), look)
    failing = asyncpg.CheckViolationError("no")
    bank.errors = dict.fromkeys(range(400), failing)
    await applier.lanes.work_off(LANES)  # together, in one transaction
    assert free[-1] == 0
    assert await applier.lanes.work_off(LANES) == 1
    assert free[-1] == LANES - 1, "the others can be claimed"
    bank.errors = {}
    await applier.make_due()
    await applier.work_off(LANES)
    assert len(await histories(db)) == LANES
    assert await starts_of(db) == 0


async def test_rows_that_become_due_during_a_pause_share_transactions(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = 0.1
    bank, applier, handled = await scattered(new_applier, monkeypatch, backlog_poll_min=pause)
    await db.execute(
        "UPDATE pipeline.backlog SET due_at = now() + (lane % $1) * interval '10 ms'", LANES
    )
    begun = time.monotonic()
    async with asyncio.TaskGroup() as group:
        group.create_task(applier.lanes.run())
        await eventually(lambda: len(bank.calls) == LANES)
        seconds = time.monotonic() - begun
        applier.lanes.stop()
    assert len(handled) <= seconds / pause + 1


async def test_a_lane_that_is_lost_takes_no_other_with_it(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, applier, _ = await scattered(new_applier, monkeypatch)
    lease = await applier.lanes._claim(8)
    assert lease is not None
    assert len(lease.lanes) == 8
    await db.execute(
        "UPDATE pipeline.backlog_lane SET token = token + 1, owner = NULL, lease_until = NULL,"
        " starts = 0 WHERE lane = $1",
        lease.lanes[3],
    )
    await applier.lanes._work_at(lease)  # and loses it
    assert await histories(db) == {}
    assert await starts_of(db) == 0
    await applier.work_off()
    assert len(await histories(db)) == LANES


async def test_a_lane_whose_worker_has_died_is_claimed_by_itself(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, applier, handled = await scattered(new_applier, monkeypatch)
    dead = (await claim(applier, lease=0.0)).lease
    lease = await applier.lanes._claim(LANES)
    assert lease is not None
    assert (lease.lanes, lease.starts) == (dead.lanes, 2)
    await applier.lanes._work_at(lease)
    assert handled == [0, 1]  # its note, and the row
    await applier.work_off(LANES)
    assert handled[2:] == [LANES - 1]
    assert len(await histories(db)) == LANES


async def test_rows_stored_after_a_dead_workers_lease_are_not_tried_alone(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, applier = await bank_with(new_applier, mode="deferred")
    await applier.apply(Deposit(1))
    dead = (await claim(applier, lease=0.0)).lease
    await eventually(lambda: _has_ended(db, dead))
    await applier.apply(*(Deposit(n) for n in range(2, 12)))
    handle, tried = applier.lanes._try_alone, list[bytes]()

    async def note(lease: Lease, row: asyncpg.Record) -> None:
        tried.append(row["key"])
        await handle(lease, row)

    monkeypatch.setattr(applier.lanes, "_try_alone", note)
    await applier.work_off()
    assert len(tried) == 1
    assert bank.calls == list(range(1, 12))
