"""Dead letters: a person lists them, looks at one, has them tried again, or gives them up."""

import asyncio
import getpass
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import asyncpg
import pytest

from onceward import (
    CloudEvents,
    Codec,
    Handlers,
    Message,
    Policy,
    Reject,
    Transaction,
)
from onceward.apply import backlog
from onceward.apply.batch import Batch, read
from onceward.apply.breaker import BreakerOpen
from onceward.apply.item import Row
from onceward.cli import advice, dead, dead_commands
from onceward.cli.commands import command_line
from onceward.cli.dead import Selection, State
from onceward.cli.dead_letters import REASONS, DeadLetters, Redriven
from onceward.cli.terminal import Invocation
from onceward.consume.partition_source import PartitionBatch, PartitionSource
from onceward.errors import StoreUnavailable
from onceward.events.message import Record
from onceward.handlers.policy import GAP, NEW
from onceward.handlers.policy import dead as fate_of
from onceward.operators import dead_rows
from onceward.operators.audit import Change
from onceward.operators.copies import Copy
from onceward.plain import PayloadFields, Plain
from onceward.retry import lanes
from onceward.retry import statements as retry_statements
from onceward.retry.lane_source import LaneSource, read_rows, take
from onceward.runtime import Part
from onceward.servers.database import autocommitting
from onceward.servers.retrying import Retrying
from onceward.settings import Settings

from .applier import Applier, NewApplier, store_of
from .bank import Bank
from .conftest import Command, complaint
from .outgoing import bury as bury_events
from .processes import starting
from tests.conftest import Running
from tests.contract.bank import Deposit, Deposited, histories
from tests.servers.processes import Start
from tests.servers.waiting import eventually

HOLDING = Policy(attempts=1, after_death="hold")
PATIENCE = 300.0
EVERYTHING = Selection()
REDRIVES = Change("ann", "redrive")
DISCARDS = Change("ann", "discard", "a test")


@pytest.fixture
async def start(bank: Bank, database_url: str, kafka: str) -> AsyncIterator[Start]:
    """Start commands of the bank."""
    async with starting(bank, database_url=database_url, kafka_bootstrap_servers=kafka) as one:
        yield one


@pytest.fixture
async def applier(bank: Bank, new_applier: NewApplier) -> Applier:
    """Return the applier of the bank."""
    return await new_applier(bank.handlers, topic=bank.deposits)


async def bury(applier: Applier, *deposits: Deposit, holds: bool = False) -> None:
    """Store deposits, at offsets that follow the position, as if a handler had rejected them."""
    start = await applier.position()
    policy = HOLDING if holds else Policy()
    decision = fate_of(policy, "rejected", Reject("no"), NEW._replace(attempts=1))
    items = (await applier.read(*deposits, start=start)).items
    rows = [Row(one.key, one.consumer, one.record, decision, one) for one in items]
    async with autocommitting(applier.engine) as driver:
        for first in range(0, len(rows), 5_000):
            await backlog.add(driver, rows[first : first + 5_000], None)
        await driver.execute("UPDATE pipeline.position SET next_offset = $1", start + len(deposits))


def store(
    applier: Applier, connection: asyncpg.Connection, patience: float = PATIENCE
) -> DeadLetters:
    """Return the dead letters as the service of the applier has them."""
    return store_of(DeadLetters, connection, applier.handlers, patience)


async def redrive(applier: Applier, selection: Selection = EVERYTHING) -> list[Redriven]:
    """Redrive as the command does, without waiting for what becomes of them."""
    async with autocommitting(applier.engine) as driver:
        until = selection.until or await dead_commands.ago(driver, timedelta(0))
        chosen = store(applier, driver).redrivable(replace(selection, until=until))
        return [
            one async for some in store(applier, driver).redrive(chosen, REDRIVES) for one in some
        ]


async def discard(applier: Applier, selection: Selection = EVERYTHING) -> int:
    async with autocommitting(applier.engine) as driver:
        done = store(applier, driver).discard(selection, DISCARDS)
        return len([one async for some in done for one in some])


async def became(
    applier: Applier, redriven: list[Redriven], seconds: float = 0.0
) -> dict[str, int]:
    """Say what has become of them; only what has become of any."""
    async with autocommitting(applier.engine) as driver:
        found = await store(applier, driver).follow(redriven, seconds)
    return {outcome: number for outcome, number in found.counts.items() if number}


async def letters(
    applier: Applier, state: State = "dead", selection: Selection = EVERYTHING, limit: int = 1_000
) -> list[SimpleNamespace]:
    async with autocommitting(applier.engine) as driver:
        found = store(applier, driver).chunks(state, selection, limit)
        return [SimpleNamespace(**one) async for some in found for one in some]


async def key_of(applier: Applier, letter: SimpleNamespace) -> bytes:
    """Return the primary key of a dead letter."""
    async with autocommitting(applier.engine) as driver:
        (key,) = await store(applier, driver).keys_of([letter.id])
    return key


@asynccontextmanager
async def working(applier: Applier) -> AsyncIterator[None]:
    """Work the backlog off beside the block."""

    async def work() -> None:
        while True:
            await applier.work_off()
            await asyncio.sleep(0.02)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_redriven_dead_letters_have_a_new_budget_and_keep_key_order(
    bank: Bank, applier: Applier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead, "CHUNK", 3)  # a key is cut in the middle
    bank.errors = {n: Reject("no") for n in range(1, 8)}
    # One after the other: each dies by itself, the last one first.
    for n in range(7, 0, -1):
        await applier.apply(Deposit(n), Deposit(100 + n, "bob"))
    await applier.work_off()
    # As they would lie if they had died in the order of their offsets, and the other way round.
    await db.execute("UPDATE pipeline.backlog SET died_at = now() - \"offset\" * interval '1 s'")
    await redrive(applier)
    rows = await applier.backlog()
    assert {(row["reason"], row["attempts"], row["waited"]) for row in rows} == {("redriven", 0, 0)}
    bank.errors = {5: ValueError("a slip")}
    bank.calls.clear()
    await applier.work_off()
    assert (await histories(db))["ada"] == [7, 6], "what follows waits for its turn"
    bank.errors = {}
    (head, *_) = await applier.backlog()
    assert (head["reason"], head["attempts"]) == ("failed", 1)
    await applier.make_due()
    await applier.work_off()
    assert (await histories(db))["ada"] == [7, 6, 5, 4, 3, 2, 1]
    assert await applier.backlog() == []


async def test_a_key_that_is_redriven_in_parts_keeps_its_order(
    bank: Bank, applier: Applier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead, "CHUNK", 3)
    await bury(applier, *(Deposit(n) for n in range(10)))
    await db.execute("UPDATE pipeline.backlog SET died_at = now() - \"offset\" * interval '1 s'")
    async with autocommitting(applier.engine) as driver:
        async for some in store(applier, driver).redrive(EVERYTHING, REDRIVES):
            assert len(some) <= 3
            await applier.work_off()  # before the next part
    assert await histories(db) == {"ada": list(range(10))}


async def test_a_redriven_message_goes_before_the_followers_that_it_held(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank = Bank("deposits", "balances", "bank", options={"policy": HOLDING})
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    bank.refused = {10}
    await applier.apply(Deposit(10), Deposit(20))
    await applier.apply(Deposit(30))
    await applier.work_off()
    assert await histories(db) == {}
    bank.refused = set()
    redriven = await redrive(applier)
    assert await became(applier, redriven) == {"waiting": 1}
    await applier.work_off()
    assert await histories(db) == {"ada": [10, 20, 30]}
    assert await became(applier, redriven) == {"applied": 1}
    assert await applier.backlog() == []


async def test_a_redriven_message_takes_effect_after_those_that_passed_it(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank = Bank("deposits", "balances", "bank")
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    bank.errors = {10: Reject("no")}
    await applier.apply(Deposit(10), Deposit(20))
    assert await histories(db) == {"ada": [20]}
    bank.errors = {}
    redriven = await redrive(applier)
    await applier.work_off()
    assert await histories(db) == {"ada": [20, 10]}
    assert await became(applier, redriven) == {"applied": 1}


async def test_a_message_that_dies_again_holds_its_key_again(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank = Bank("deposits", "balances", "bank", options={"policy": HOLDING})
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    bank.refused = {10}
    await applier.apply(Deposit(10), Deposit(20))
    redriven = await redrive(applier)
    await applier.work_off()
    assert await became(applier, redriven) == {"dead": 1}
    assert await histories(db) == {}
    assert [row["holds"] for row in await applier.backlog()] == [True, False]


async def test_discarding_a_dead_letter_releases_its_ten_thousand_followers(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank = Bank("deposits", "balances", "bank", options={"policy": HOLDING})
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    bank.refused = {1}
    count = 10_001
    for first in range(1, count, 2_500):
        await applier.apply(*(Deposit(n) for n in range(first, min(first + 2_500, count + 1))))
    await applier.apply(Deposit(count))
    await applier.work_off()
    assert await histories(db) == {}
    assert await discard(applier) == 1
    await applier.work_off()
    assert await histories(db) == {"ada": list(range(2, count + 1))}
    (row,) = await applier.backlog()
    assert (row["discarded_by"], row["discarded_why"]) == ("ann", "a test")
    assert row["discarded_at"] is not None
    (audited,) = await db.fetch("SELECT who, action, subject, why FROM pipeline.audit")
    subject = f"dead letter {row['key'].hex()[:16]}"
    assert tuple(audited) == ("ann", "discard", subject, "a test")


async def test_a_discarded_message_stays_known_and_is_not_applied_when_repeated(
    bank: Bank, applier: Applier, db: asyncpg.Connection
) -> None:
    bank.errors = {10: Reject("no")}
    await applier.apply(Deposit(10))
    await discard(applier)
    bank.errors = {}
    (again, other) = await applier.apply(Deposit(10), Deposit(11, id="10"))
    assert not again.is_new
    assert not other.is_new, "another payload under its id is an incident still"
    assert await histories(db) == {}
    assert [one.reason for one in await letters(applier)] == ["identity mismatch"]
    assert [one.reason for one in await letters(applier, "discarded")] == ["rejected"]
    # Neither is it redriven, nor discarded a second time.
    await db.execute("DELETE FROM pipeline.backlog WHERE reason = 'identity mismatch'")
    assert await redrive(applier) == []
    assert await discard(applier) == 0


async def nameless(applier: Applier, *deposits: Deposit, start: int) -> Batch:
    """Decode records that have no headers, and so no identity of their own."""
    topic = applier.slot.topic
    records = [replace(one.record(topic, start + n), headers=()) for n, one in enumerate(deposits)]
    return await read(applier.handlers, start, records)


async def test_a_topic_of_which_nothing_can_be_read_waits(applier: Applier) -> None:
    """As after a deployment with another codec."""
    await applier.position()
    unreadable = [Deposit(n, account=str(n)) for n in range(20)]
    await applier.apply_batch(await nameless(applier, *unreadable[:19], start=0))
    with pytest.raises(BreakerOpen, match=r"the decoder of .* fails with"):
        await applier.apply_batch(await nameless(applier, *unreadable[19:], start=19))
    assert len(await letters(applier)) == 19
    assert await applier.position() == 19


async def test_a_redriven_record_without_consumer_is_read_by_the_current_service(
    bank: Bank, applier: Applier, db: asyncpg.Connection
) -> None:
    await applier.position()
    await applier.apply_batch(await nameless(applier, Deposit(1), Deposit(2), Deposit(3), start=0))
    assert [one.reason for one in await letters(applier)] == ["not CloudEvents"] * 3
    redriven = await redrive(applier)
    await applier.work_off()
    assert await became(applier, redriven) == {"dead": 3}, "nothing has changed"
    bank.handlers.topic(bank.deposits, codec=Plain("deposited", PayloadFields("amount")))
    # The second one comes again, and is applied; the third in another guise.
    await applier.apply_batch(
        await nameless(
            applier, Deposit(2), Deposit(3, value=b'{"amount": 3, "account": "bob"}'), start=3
        )
    )
    redriven = await redrive(applier)
    assert await became(applier, redriven) == {"waiting": 3}
    await applier.work_off()
    assert await became(applier, redriven) == {"applied": 1, "duplicate": 1, "dead": 1}
    assert await histories(db) == {"ada": [2, 1], "bob": [3]}
    assert [one.reason for one in await letters(applier)] == ["identity mismatch"]


class Away(CloudEvents):
    """A codec whose registry is unavailable."""

    async def prepare(self, records: Sequence[Record]) -> None:
        raise StoreUnavailable("no answer")

    def decode(self, record: Record, *, hash: bytes | None = None) -> Message:
        raise StoreUnavailable("no answer")


@pytest.mark.parametrize("has_killed", [False, True])
async def test_a_record_is_redriven_without_being_decoded(
    bank: Bank, applier: Applier, has_killed: bool
) -> None:
    await applier.position()
    await applier.apply_batch(await nameless(applier, Deposit(1), start=0))
    codec: Codec = Away()
    if has_killed:  # it would kill the command, too
        codec = Plain("deposited", PayloadFields("amount"))
        async with autocommitting(applier.engine) as driver:
            await driver.execute("UPDATE pipeline.backlog SET error = 'ProcessDied: 6 times'")
    bank.handlers.topic(bank.deposits, codec=codec)
    redriven = await redrive(applier)
    assert [one.markers for one in redriven] == [[]]
    assert await became(applier, redriven) == {"waiting": 1}


async def test_a_redriven_record_that_was_undecodable_may_be_too_old(
    bank: Bank, applier: Applier, db: asyncpg.Connection
) -> None:
    """Another copy of it may have been applied, whose marker is forgotten."""
    await applier.position()
    await applier.apply_batch(await nameless(applier, Deposit(1), start=0))
    await db.execute("UPDATE pipeline.inbox_generation SET since = now()")
    bank.handlers.topic(bank.deposits, codec=Plain("deposited", PayloadFields("amount")))
    redriven = await redrive(applier)
    await applier.work_off()
    assert await became(applier, redriven) == {"dead": 1}
    (letter,) = await letters(applier)
    assert letter.reason == "too old"
    await redrive(applier, Selection(reasons=["too old"]))
    await applier.work_off()
    assert await histories(db) == {"ada": [1]}


async def test_what_nobody_takes_any_more_is_dead_again(bank: Bank, applier: Applier) -> None:
    await applier.position()
    await applier.apply_batch(await nameless(applier, Deposit(1), start=0))
    bank.handlers.topic(bank.deposits, codec=Plain("elsewhere", PayloadFields("amount")))
    redriven = await redrive(applier)
    await applier.work_off()
    assert await became(applier, redriven) == {"dead": 1}


async def test_who_has_the_identity_of_another_is_not_applied_in_its_place(
    bank: Bank, applier: Applier, db: asyncpg.Connection
) -> None:
    """Also as long as the first one has not taken effect, and when it has been given up."""
    bank.refused = {10}
    await applier.apply(Deposit(10), Deposit(11, "bob", id="10"))
    bank.refused = set()
    redriven = await redrive(applier)
    await applier.work_off()
    assert await became(applier, redriven) == {"dead": 1}
    assert await histories(db) == {}
    (_, first) = await applier.backlog()
    (letter,) = await letters(applier)
    async with autocommitting(applier.engine) as driver:
        detail = await store(applier, driver).show(letter.id)
    assert detail["remembered_hash"] == first["hash"].hex()
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [10]}
    redriven = await redrive(applier)
    await applier.work_off()
    assert await became(applier, redriven) == {"dead": 1}
    assert await histories(db) == {"ada": [10]}


async def test_messages_that_are_too_old_are_redriven_only_on_explicit_request(
    bank: Bank, applier: Applier, db: asyncpg.Connection
) -> None:
    await db.execute("UPDATE pipeline.inbox_generation SET since = now()")
    await applier.apply(Deposit(1), Deposit(2))
    newest, oldest = await letters(applier)
    assert (newest.reason, oldest.reason) == ("too old", "too old")
    assert await redrive(applier) == []
    redriven = await redrive(applier, Selection(keys=[await key_of(applier, oldest)]))
    await applier.work_off()
    assert await became(applier, redriven) == {"applied": 1}
    redriven = await redrive(applier, Selection(reasons=["too old"]))
    await applier.work_off()
    assert await histories(db) == {"ada": [1, 2]} or await histories(db) == {"ada": [2, 1]}


async def test_what_has_killed_processes_is_tried_alone_when_it_is_redriven(
    applier: Applier,
) -> None:
    start = await applier.position()
    batch = await applier.read(Deposit(1), start=start)
    attempts = Retrying(
        "the test", "PostgreSQL", unless=lambda: False, report=applier.outages.append
    )
    await applier.consume.apply(PartitionSource([PartitionBatch(applier.slot, batch, 3)]), attempts)
    async with autocommitting(applier.engine) as driver:
        await driver.execute(
            "UPDATE pipeline.backlog SET reason = 'attempts used up', due_at = NULL,"
            " died_at = now()"
        )
    await redrive(applier)
    [row] = await applier.backlog()
    assert (row["reason"], row["attempts"]) == ("process died", 0)


async def test_what_belongs_to_a_consumer_that_the_service_lost_is_left_alone(
    bank: Bank, applier: Applier
) -> None:
    await bury(applier, Deposit(1))
    other = Bank(bank.deposits, bank.balances, bank.name, handlers=Handlers())
    async with autocommitting(applier.engine) as driver:
        await driver.execute("UPDATE pipeline.backlog SET consumer = 'gone'")
        lost = store_of(DeadLetters, driver, other.handlers)
        assert [one async for one in lost.redrive(lost.redrivable(EVERYTHING), REDRIVES)] == []
    assert len(await letters(applier)) == 1


async def test_letters_are_chosen_by_what_they_are(bank: Bank, applier: Applier) -> None:
    bank.errors = {1: Reject("no"), 2: Reject("no")}
    await applier.apply(Deposit(1), Deposit(2, "bob"), Deposit(3, value=b"{}"), Deposit(4, type=""))
    await applier.work_off()
    by_offset = {one.offset: one for one in await letters(applier)}
    assert [by_offset[n].reason for n in range(4)] == [
        "rejected",
        "rejected",
        "invalid payload",
        "missing attribute",
    ]
    async with autocommitting(applier.engine) as driver:
        hour_ago = await dead_commands.ago(driver, timedelta(hours=1))
        for number in range(3):
            await driver.execute(
                "UPDATE pipeline.backlog SET died_at = died_at - interval '2 h'"
                ' WHERE "offset" = $1',
                number,
            )
        await driver.execute("UPDATE pipeline.backlog SET release = '1.4.2' WHERE \"offset\" = 2")
    for which, offsets in (
        (EVERYTHING, {0, 1, 2, 3}),
        (Selection(reasons=["rejected"]), {0, 1}),
        (Selection(reasons=["rejected", "missing attribute"]), {0, 1, 3}),
        (Selection(except_reasons=["rejected"]), {2, 3}),
        (Selection(consumers=[""]), {3}),
        (Selection(event_id="2"), {1}),
        (Selection(type="deposited"), {0, 1, 2}),
        (Selection(topic=bank.deposits), {0, 1, 2, 3}),
        (Selection(topic="another"), set()),
        (Selection(record_key=b"bob"), {1}),
        (Selection(release="1.4.2"), {2}),
        (Selection(release="1.4"), set()),
        (Selection(since=hour_ago), {3}),
        (Selection(until=hour_ago), {0, 1, 2}),
        (Selection(keys=[await key_of(applier, by_offset[2])]), {2}),
    ):
        found = await letters(applier, selection=which)
        assert {one.offset for one in found} == offsets, which
        async with autocommitting(applier.engine) as driver:
            assert sum(
                one["count"] for one in await store(applier, driver).count("dead", which)
            ) == len(offsets)
    assert await discard(applier, Selection(record_key=b"bob")) == 1
    assert [one.offset for one in await letters(applier, "discarded")] == [1]
    assert len(await redrive(applier, Selection(reasons=["rejected"]))) == 1
    assert [one.offset for one in await letters(applier, "waiting")] == [0]
    assert {one.offset for one in await letters(applier)} == {2, 3}


async def test_letters_come_newest_first_over_as_many_pages_as_there_are(
    applier: Applier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead, "CHUNK", 4)
    await bury(applier, *(Deposit(n) for n in range(10)))
    async with autocommitting(applier.engine) as driver:
        # Several of each moment, and not in the order in which they are stored.
        await driver.execute(
            'UPDATE pipeline.backlog SET died_at = now() - make_interval(secs => "offset" % 3)'
        )
    found = await letters(applier)
    assert sorted(one.offset for one in found) == list(range(10))
    assert [one.offset % 3 for one in found] == [0] * 4 + [1] * 3 + [2] * 3
    assert [one.offset for one in await letters(applier, limit=5)] == [one.offset for one in found][
        :5
    ]


async def failed_behind_a_letter(bank: Bank, applier: Applier) -> None:
    """Store a dead deposit of 5, and one of 10 of the same key that has failed and is due."""
    await bury(applier, Deposit(5))
    bank.refused = {10}
    await applier.apply(Deposit(10))
    bank.refused = set()
    await applier.make_due()


@pytest.mark.parametrize(
    ("decide", "at_once", "later"), [(redrive, {}, [5, 10]), (discard, {"ada": [10]}, [10])]
)
async def test_a_worker_keeps_its_lane_and_compares_what_it_has_read(
    bank: Bank,
    applier: Applier,
    db: asyncpg.Connection,
    decide: Callable[[Applier], Awaitable[object]],
    at_once: dict[str, list[int]],
    later: list[int],
) -> None:
    await failed_behind_a_letter(bank, applier)
    async with autocommitting(applier.engine) as driver:
        lane = await lanes.claim(driver, "a worker", 60, ["deposit"])
        assert lane is not None
        source = await read_rows(lane, applier.handlers, await take(driver, lane, ["deposit"], 100))
        assert await decide(applier), "the letter"
        attempts = Retrying(
            "the test", "PostgreSQL", unless=lambda: False, report=applier.outages.append
        )
        await applier.consume.apply(source, attempts)
        assert await histories(db) == at_once
        await lanes.release(driver, lane, forgets_deaths=False)
    await applier.work_off()
    assert await histories(db) == {"ada": later}


async def test_a_command_costs_a_row_that_is_tried_alone_no_attempt(
    bank: Bank, applier: Applier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await failed_behind_a_letter(bank, applier)
    assert await lanes.claim(db, "a worker that dies", 0.0, ["deposit"]) is not None
    read = applier.lanes._read

    async def redrive_before(*arguments: Any, **options: Any) -> LaneSource:
        """Redrive the letter when the attempt is stored, and the row not handled yet."""
        if not redriven:
            redriven.extend(await redrive(applier))
        return await read(*arguments, **options)

    redriven: list[Redriven] = []
    monkeypatch.setattr(applier.lanes, "_read", redrive_before)
    await applier.work_off()
    assert len(redriven) == 1
    assert await histories(db) == {"ada": [10, 5]}


async def test_a_command_waits_for_the_worker_and_ends_when_stalled(
    applier: Applier, connect: Callable[[], Awaitable[asyncpg.Connection]]
) -> None:
    """Trap 35: a stopped process must not hold what others need."""
    await bury(applier, Deposit(1))
    worker = await connect()
    async with worker.transaction():
        await worker.execute("UPDATE pipeline.backlog_lane SET token = token")
        async with autocommitting(applier.engine) as driver:
            with pytest.raises(asyncpg.LockNotAvailableError):
                waits = store(applier, driver, patience=2)
                async for _ in waits.discard(EVERYTHING, DISCARDS):
                    pass
    operator, by = await connect(), Change("ann", "discard")

    async def stop(rows: object) -> None:
        await eventually(operator.is_closed)

    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
        async for _ in store(applier, operator, patience=0.2)._in_chunks(
            "dead", EVERYTHING, stop, by
        ):
            pass
    assert len(await letters(applier)) == 1
    assert await discard(applier) == 1


async def test_dead_letters_are_redriven_and_discarded_while_workers_run(
    bank: Bank, running: Running, new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Two operators at once, over keys that keep getting new records."""
    bank.errors = {n: Reject("no") for n in range(0, 1_000, 5)}
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    counts = {"redriven": 0, "discarded": 0}

    async def redrive_often() -> None:
        for _ in range(20):
            counts["redriven"] += len(await redrive(applier))

    async def discard_often() -> None:
        for n in range(40):
            which = Selection(record_key=f"key {n}".encode())
            counts["discarded"] += await discard(applier, which)

    async with running(bank.service, Part.CONSUME, backlog_poll_max=0.05):
        for first in range(0, 1_000, 100):
            if first == 500:
                bank.errors = {}
            batch = [Deposit(n, f"key {n % 40}") for n in range(first, first + 100)]
            await asyncio.gather(applier.apply(*batch), redrive_often(), discard_often())
        await eventually(lambda: nothing_waits(db))
        await redrive(applier)
        await eventually(lambda: nothing_waits(db))
    applied = await histories(db)
    discarded = await db.fetch("SELECT id FROM pipeline.backlog WHERE discarded_at IS NOT NULL")
    every = [n for history in applied.values() for n in history]
    assert sorted(every + [int(row["id"]) for row in discarded]) == list(range(1_000))
    assert (
        len(discarded)
        == counts["discarded"]
        == await db.fetchval("SELECT count(*) FROM pipeline.backlog")
    )
    assert counts["redriven"] > 0
    for history in applied.values():
        straight = [n for n in history if n % 5]
        assert straight == sorted(straight), "what never died is in order"


async def nothing_waits(db: asyncpg.Connection) -> bool:
    waiting = "SELECT EXISTS (SELECT FROM pipeline.backlog WHERE died_at IS NULL)"
    return not await db.fetchval(waiting)


async def test_a_killed_command_has_done_a_part_and_the_next_continues(
    applier: Applier,
    db: asyncpg.Connection,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    start: Start,
) -> None:
    """Trap 20, too: with the statistics of a backlog in which nothing waits."""
    count = 5_000
    await bury(applier, *(Deposit(n, f"key {n % 997}") for n in range(count)))
    await db.execute("ANALYZE pipeline.backlog")
    statement = DeadLetters.chunk_statement("dead")
    chunk = await plan(db, statement, *EVERYTHING.arguments, 7, dead.CHUNK)
    assert "backlog_dead_idx" in chunk
    heads = await plan(db, retry_statements.SCHEDULE_HEADS, [b"a", b"b"], [7], 1_000, GAP, [b"a"])
    assert "Index Scan using backlog_pkey on backlog b " in heads

    command = ("dead", "redrive", "--all", "--yes", "--wait", "0", "--json")
    blocker = await connect()
    async with blocker.transaction():
        await blocker.execute("SELECT FROM pipeline.backlog_lane WHERE lane = 16 FOR UPDATE")
        killed = await start(*command)
        await eventually(lambda: somebody_waits(db, blocker.get_server_pid()))
        await killed.kill()
    redriven = await db.fetchval("SELECT count(*) FROM pipeline.backlog WHERE died_at IS NULL")
    assert 0 < redriven < count
    others = [await start(*command), await start(*command)]
    for one in others:
        assert await one.ended() == 0, one.output
    numbers = [json.loads(one.output.splitlines()[-1])["redriven"] for one in others]
    assert redriven + sum(numbers) == count
    assert await letters(applier) == []
    assert (
        await db.fetchval(
            "SELECT count(*) FROM pipeline.backlog WHERE reason = 'redriven' AND attempts = 0"
        )
        == count
    )
    due = 'SELECT DISTINCT ON (order_key) key FROM pipeline.backlog ORDER BY order_key, "offset"'
    heads_due = f"SELECT count(*) FROM pipeline.backlog WHERE due_at IS NOT NULL AND key IN ({due})"
    all_due = "SELECT count(*) FROM pipeline.backlog WHERE due_at IS NOT NULL"
    assert await db.fetchval(heads_due) == await db.fetchval(all_due) == 997


async def somebody_waits(db: asyncpg.Connection, pid: int) -> bool:
    """Whether somebody waits for a row that this server process holds."""
    blocked = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid)))"
    waits: bool = await db.fetchval(blocked, pid)
    return waits


async def plan(db: asyncpg.Connection, statement: str, *arguments: object) -> str:
    return "\n".join(line[0] for line in await db.fetch(f"EXPLAIN {statement}", *arguments))


async def test_list_and_show_tell_what_there_is(
    bank: Bank, applier: Applier, service: Command
) -> None:
    bank.errors = {1: Reject("no such account")}
    await applier.apply(Deposit(1))
    await applier.apply(Deposit(3, value=b"\xff\x00"))
    newest, oldest = await letters(applier)
    listed = (await service("list")).stdout.splitlines()
    first_words = ["id", newest.id, oldest.id, "2"]
    assert [line.split()[0] for line in listed] == first_words
    assert "1 dead, the newest of 2" in (await service("list", "--limit", "1")).stdout
    (line,) = (await service("list", "--limit", "1", "--json")).stdout.splitlines()
    varying = {"received_at": None, "died_at": None, "since": None, "error": None}
    assert json.loads(line) | varying == {
        "id": newest.id,
        "state": "dead",
        "reason": "invalid payload",
        "attempts": 0,
        "consumer": "deposit",
        "type": "deposited",
        "source": "/tests",
        "event_id": "3",
        "topic": bank.deposits,
        "partition": 0,
        "offset": 1,
        "key": {"text": "ada"},
        "due_at": None,
        "discarded_at": None,
        "release": None,
        "holds": False,
        "held": None,
        **varying,
    }
    summary = await service("list", "--summary", "--json", "--reason", "rejected")
    (group,) = [json.loads(line) for line in summary.stdout.splitlines()]
    assert (group["reason"], group["consumer"], group["count"]) == ("rejected", "deposit", 1)
    assert set(group) == {"count", "reason", "consumer", "type", "topic", "oldest", "newest"}
    shown = json.loads((await service("show", newest.id[:8], "--json")).stdout)
    assert shown["value"] == {"hex": "ff00"}
    assert shown["advice"] == REASONS["invalid payload"]


async def test_the_letters_that_a_release_has_stored_are_listed_and_redriven(
    bank: Bank, applier: Applier, service: Command, db: asyncpg.Connection
) -> None:
    bank.errors = {1: Reject("no"), 2: Reject("no")}
    await applier.apply(Deposit(1), Deposit(2, "bob"))
    await applier.work_off()
    await db.execute("UPDATE pipeline.backlog SET release = '1.4.2' WHERE id = '2'")
    (line,) = (await service("list", "--release", "1.4.2", "--json")).stdout.splitlines()
    of_release = json.loads(line)
    assert (of_release["event_id"], of_release["release"]) == ("2", "1.4.2")
    assert "0 dead" in (await service("list", "--release", "1.4")).stdout
    shown = (await service("show", of_release["id"])).stdout
    assert ["release", "1.4.2"] in [line.split() for line in shown.splitlines()]
    bank.errors = {}
    done = await service("redrive", "--release", "1.4.2", "--yes", "--wait", "0", "--json")
    assert json.loads(done.stdout)["redriven"] == 1
    assert [one.id for one in await letters(applier)] != [of_release["id"]]
    assert len(await letters(applier)) == 1


@pytest.mark.parametrize("what", ["account", "account.balance"])
async def test_show_has_the_doctor_name_what_the_database_lacks(
    applier: Applier, service: Command, db: asyncpg.Connection, what: str
) -> None:
    table, _, column = what.partition(".")
    await db.execute(f"ALTER TABLE {table} RENAME {column} TO renamed")
    await applier.apply(Deposit(1))
    (letter,) = await letters(applier, "waiting")

    shown = json.loads((await service("show", letter.id, "--json")).stdout)

    assert shown["error"].startswith("Undefined")
    assert "sqlalchemy" not in shown["error"]
    assert shown["attempts"] == 0
    assert "`service doctor`" in shown["advice"]
    assert "`service migrate`" in shown["advice"]
    back = f"{table} RENAME renamed TO {column}" if column else f"renamed RENAME TO {table}"
    await db.execute(f"ALTER TABLE {back}")
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [1]}


async def test_redrive_counts_asks_and_says_what_became_of_them(
    bank: Bank, applier: Applier, db: asyncpg.Connection, service: Command
) -> None:
    bank.errors = {1: Reject("no"), 2: Reject("no")}
    await applier.apply(Deposit(1, key=None), Deposit(2, key=None), Deposit(3, value=b"{}"))
    await applier.work_off()
    bank.errors = {2: Reject("never")}
    (second,) = [one.id for one in await letters(applier) if one.event_id == "2"]

    dry = await service("redrive", "--dry-run")
    assert "3 dead" in dry.stdout
    unsure = await service("redrive", input="n\n")
    assert (unsure.exit_code, "Redrive 3?" in unsure.stderr) == (1, True)
    without_terminal = await service("redrive", input="")
    assert (without_terminal.exit_code, "give --yes" in without_terminal.stderr) == (1, True)
    assert len(await letters(applier)) == 3, "nothing was done"

    async with working(applier):
        done = await service("redrive", "--reason", "rejected", input="y\n")
    assert done.exit_code == 3
    assert "redriven 2 of 2" in done.stderr
    assert "1 dead, 1 applied" in done.stdout
    assert f"{second} is dead again: rejected: Reject: never" in done.stdout
    assert await histories(db) == {"ada": [1]}

    done = await service("redrive", second[:8], "--yes", "--wait", "0.1", "--json")
    assert done.exit_code == 4
    assert json.loads(done.stdout) == {
        "found": 1,
        "redriven": 1,
        "became": {"waiting": 1, "dead": 0, "applied": 0, "duplicate": 0, "gone": 0},
        "died": [],
    }
    assert second in (await service("list", "--waiting")).stdout


async def test_discard_keeps_who_and_why(bank: Bank, applier: Applier, service: Command) -> None:
    await bury(applier, Deposit(1), Deposit(2, "bob"))
    (bobs,) = await letters(applier, selection=Selection(record_key=b"bob"))
    done = await service(
        "discard", "--key", "bob", "--because", "told Bob", "--operator", "ann", input="y\n"
    )
    assert "Discard 1?" in done.stderr
    assert "discarded 1 of 1" in done.stderr
    told = (await service("show", bobs.id)).stdout
    assert "told Bob" in told
    again = await service("discard", bobs.id, "--because", "x", "--yes")
    assert (again.exit_code, "not dead, but discarded" in again.stderr) == (1, True)
    assert f" {advice.DISCARDED}\n" in told
    done = await service("discard", "--because", "all of it", "--all", "--yes", "--json")
    assert json.loads(done.stdout) == {"found": 1, "discarded": 1}
    (first, _) = await letters(applier, "discarded")
    async with autocommitting(applier.engine) as driver:
        assert (await store(applier, driver).show(first.id))["discarded_by"] == getpass.getuser()
    assert (await service("list")).stdout == "0 dead\n"


@pytest.mark.parametrize("group", [[], ["events"]], ids=["letters", "events"])
@pytest.mark.parametrize(
    "command",
    [["redrive", "--wait", "0"], ["discard", "--because", "x"]],
    ids=["redrive", "discard"],
)
async def test_everything_is_meant_only_if_somebody_says_so(
    applier: Applier, db: asyncpg.Connection, service: Command, group: list[str], command: list[str]
) -> None:
    await bury(applier, Deposit(1), Deposit(2, "bob"))
    await bury_events(db, 2)
    line = (*group, *command)
    refused = await service(*line, "--yes")
    assert refused.exit_code == 2
    assert "--yes without an id or a filter would mean everything: add --all" in complaint(refused)
    excluded = await service(*line, "--yes", "--all", "--type", "deposited")
    assert excluded.exit_code == 2
    assert "--all excludes ids and filters" in complaint(excluded)
    assert "2 dead" in (await service(*line, "--yes", "--dry-run")).stdout
    assert "2 dead" in (await service(*line, input="n\n")).stdout
    assert "2 dead" in (await service(*group, "list", "--summary")).stdout, "nothing was done"
    assert (await service(*line, "--yes", "--newer-than", "1h", "--type", "x")).exit_code == 0
    done = await service(*line, "--yes", "--all")
    assert (done.exit_code, "2 of 2" in done.stderr) == (0, True)
    assert "0 dead" in (await service(*group, "list", "--summary")).stdout


async def test_the_log_names_letter_and_event_and_commands_accept_either(
    bank: Bank, applier: Applier, service: Command, caplog: pytest.LogCaptureFixture
) -> None:
    bank.errors = {1: Reject("no"), 2: ValueError("not yet")}
    caplog.set_level(logging.INFO, "onceward.apply.outcome")
    await applier.apply(Deposit(1), Deposit(2, "bob"), Deposit(3, value=b"{}"))
    await applier.work_off()
    logged = {vars(one)["message_id"]: one for one in caplog.records if "message_id" in vars(one)}
    assert set(logged) == {"1", "2", "3"}
    for id, record in logged.items():
        shown = await service("show", vars(record)["letter"], "--json")
        assert json.loads(shown.stdout)["event_id"] == id
    for id in ("1", "3"):
        assert f"), letter {vars(logged[id])['letter']}: " in logged[id].getMessage()
    (line,) = (await service("list", "--event-id", "3", "--json")).stdout.splitlines()
    assert json.loads(line)["id"].startswith(vars(logged["3"])["letter"])
    done = await service("redrive", "--event-id", "1", "--yes", "--wait", "0")
    assert "redriven 1 of 1" in done.stderr
    caplog.clear()
    bank.errors = {1: Reject("never")}
    await applier.work_off()
    again = [one for one in caplog.records if "message_id" in vars(one)]
    assert [vars(one)["letter"] for one in again] == [vars(logged["1"])["letter"]]
    done = await service("discard", "--event-id", "1", "--because", "x", "--yes")
    assert "discarded 1 of 1" in done.stderr
    assert [one.event_id for one in await letters(applier)] == ["3"]


async def test_the_log_names_the_dead_letter_of_an_identity_mismatch(
    bank: Bank, applier: Applier, service: Command, caplog: pytest.LogCaptureFixture
) -> None:
    await applier.apply(Deposit(1))
    await applier.apply(Deposit(1, value=b'{"account": "ada", "amount": 2}'))
    (identity_mismatch,) = [one for one in caplog.records if "message_id" in vars(one)]
    assert vars(identity_mismatch)["reason"] == "identity mismatch"
    letter = vars(identity_mismatch)["letter"]
    assert f"letter {letter}" in identity_mismatch.getMessage()
    assert "identity mismatch" in (await service("show", letter)).stdout


async def test_redrive_says_what_it_leaves_out(
    bank: Bank, applier: Applier, db: asyncpg.Connection, service: Command
) -> None:
    await bury(applier, Deposit(1), Deposit(2))
    await db.execute("UPDATE pipeline.backlog SET consumer = 'lost' WHERE \"offset\" = 0")
    await db.execute("UPDATE pipeline.backlog SET reason = 'too old' WHERE \"offset\" = 1")
    done = await service("redrive", "--all", "--yes")
    assert done.exit_code == 0
    assert "this service has no consumer 'lost'" in done.stderr
    assert "it is not known whether they were applied: select the reason 'too old'" in done.stderr
    assert "0 dead" in done.stdout
    assert len(await letters(applier)) == 2


async def test_a_command_that_loses_the_database_says_how_far_it_came(
    applier: Applier, service: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead, "CHUNK", 1)
    monkeypatch.setattr(dead_commands, "PROGRESS", 2)
    await bury(applier, *(Deposit(n, "ada") for n in range(3)))
    lock, calls = dead_rows.lock_lane, []

    async def lose(connection: asyncpg.Connection, lane: int) -> None:
        calls.append(lane)
        if len(calls) == 3:
            await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        await lock(connection, lane)

    monkeypatch.setattr(dead_rows, "lock_lane", lose)
    command = ("discard", "--because", "x", "--all", "--yes")
    done = await service(*command)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[:2] == [
        "discarded 2 of 3",
        "discarded 2 of 3; run it again to continue",
    ]
    assert "PostgreSQL at " in done.stderr
    monkeypatch.setattr(dead_rows, "lock_lane", lock)
    assert "discarded 1 of 1" in (await service(*command)).stderr


async def test_a_list_sorts_the_table_once_and_is_read_in_chunks(
    applier: Applier, service: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead, "CHUNK", 2)
    await bury(applier, *(Deposit(n) for n in range(5)))
    statements: list[str] = []
    async with autocommitting(applier.engine) as driver:
        driver.add_query_logger(lambda query: statements.append(query.query))
        found = store(applier, driver).chunks("dead", EVERYTHING, 4)
        chunks = [[one["id"] for one in some] async for some in found]
        await asyncio.sleep(0)  # asyncpg calls the logger by the event loop
    of_letters = [one for one in statements if "FROM pipeline.backlog" in one]
    assert ["LIMIT $12" in one for one in of_letters] == [True, False, False]
    newest = [one.id for one in await letters(applier)][:4]
    assert chunks == [newest[:2], newest[2:]]
    names, *lines, last = (await service("list")).stdout.splitlines()
    assert names.split()[0] == "id"
    assert [line.split()[0] for line in lines[:4]] == newest
    assert (len(lines), last) == (5, "5 dead")


async def test_a_list_without_a_limit_has_each_once_while_others_die(
    applier: Applier, service: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read in the order of its keys, so that none of it has to be in memory."""
    monkeypatch.setattr(dead, "CHUNK", 2)
    await bury(applier, *(Deposit(n) for n in range(5)))
    first = {one.id for one in await letters(applier)}
    async with autocommitting(applier.engine) as driver:
        found = store(applier, driver).chunks("dead", EVERYTHING)
        listed = [one["id"] for one in await anext(found)]
        await bury(applier, *(Deposit(n) for n in range(5, 10)))
        async for some in found:
            assert len(some) <= 2
            assert "row_key" not in some[0]
            listed += [one["id"] for one in some]
    assert first <= {*listed}
    assert len({*listed}) == len(listed)
    assert len((await service("list", "--json")).stdout.splitlines()) == 10
    assert len((await service("list", "--json", "--limit", "3")).stdout.splitlines()) == 3


async def test_a_list_leaves_out_what_is_discarded_while_it_is_read(
    applier: Applier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead, "CHUNK", 2)
    await bury(applier, *(Deposit(n) for n in range(4)))
    async with autocommitting(applier.engine) as driver:
        found = store(applier, driver).chunks("dead", EVERYTHING, 4)
        assert len(await anext(found)) == 2
        assert await discard(applier) == 4
        assert [one async for one in found] == [[]]


async def test_show_tells_all_and_lets_no_payload_command_the_terminal(
    bank: Bank, applier: Applier, service: Command
) -> None:
    bank.errors = {7: ValueError("\x1b[2Jgone")}
    hostile = Deposit(
        7,
        "ada\nstate  discarded",
        headers=(("x-note", b"\x1b]0;title\x07"), ("x-bytes", b"\xff\xfe"), ("x-none", b"")),
        timestamp=2**62,
    )
    await applier.apply(hostile)
    (letter,) = await letters(applier, "waiting")
    told = (await service("show", letter.id[:16])).stdout
    assert "\x1b" not in told
    assert "\x07" not in told
    for text in (
        "waiting",
        "failed",
        "nothing: it is tried again on schedule",
        r"ValueError: \u001b[2Jgone",
        r"ada\nstate  discarded",
        str(2**62),
        "header x-bytes",
        r"\u001b]0;title\u0007",
        "in deposit",
        '{"account": "ada\\nstate  discarded", "amount": 7}',
    ):
        assert text in told
    exact = json.loads((await service("show", letter.id, "--json")).stdout)
    assert ["x-bytes", {"hex": "fffe"}] in exact["headers"]
    assert exact["value"] == {"text": '{"account": "ada\\nstate  discarded", "amount": 7}'}
    assert exact["timestamp"] == 2**62
    assert exact["error"] == "ValueError: \x1b[2Jgone"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "0123abcd"], "no row has an id that begins with 0123abcd"),
        (["show", "nonsense"], "8 to 32 hex digits"),
        (["redrive", "0123abcd"], "no row has an id"),
        (["list", "--reason", "dance"], "is none of"),
        (["list", "--older-than", "soon"], "is not a time such as"),
        (["list", "--older-than", "9999999999d"], "is not a time such as"),
        (["list", "--newer-than", "36526d"], "is not a time such as"),
        (["list", "--waiting", "--discarded"], "exclude each other"),
        (["discard"], "--because"),
        (["discard", "--because", " "], "--because is empty"),
        (["discard", "--because", "x", "--operator", ""], "--operator is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
async def test_what_can_not_be_meant_is_refused(
    service: Command, arguments: list[str], said: str
) -> None:
    done = await service(*arguments)
    assert done.exit_code in (1, 2)
    assert said in complaint(done)
    assert isinstance(done.exception, SystemExit), "and no traceback"


async def test_a_list_says_how_many_messages_a_letter_holds(
    ledger: tuple[Bank, Applier], commands: Callable[..., Command]
) -> None:
    bank, applier = ledger
    service = commands(command_line(bank.service), "dead")
    await bury(applier, Deposit(1, "ada"), holds=True)
    await bury(applier, Deposit(2, "bob"))
    await bury(applier, Deposit(6, "eve"), holds=True)
    await applier.apply(Deposit(3, "ada"), Deposit(4, "ada"), Deposit(5, "bob"))
    await applier.apply(*(Deposit(n, "eve") for n in range(10, 1_020)))
    (eves, bobs, adas) = await letters(applier)
    names, *lines = (await service("list")).stdout.splitlines()
    listed = {line.split()[0]: line[names.index("holds") :].split()[0] for line in lines[:3]}
    assert listed == {adas.id: "2", bobs.id: "no", eves.id: "1,000+"}
    assert [(one.holds, one.held) for one in (bobs, eves)] == [(False, None), (True, 1_001)]
    assert json.loads((await service("show", adas.id, "--json")).stdout)["held"] == 2
    assert re.search("^held +2$", (await service("show", adas.id)).stdout, re.MULTILINE)
    assert json.loads((await service("show", bobs.id, "--json")).stdout)["held"] is None


async def test_a_letter_is_edited_and_its_copy_handled_in_its_place(
    bank: Bank, applier: Applier, service: Command, db: asyncpg.Connection, tmp_path: Path
) -> None:
    await bury(applier, Deposit(1), Deposit(2))
    first, second = sorted(await letters(applier), key=lambda one: int(one.offset))
    payload = tmp_path / "corrected.json"
    payload.write_text('{"account": "ada", "amount": 7}', "utf-8")
    command = "edit", first.id, "--payload", str(payload), "--because", "wrong amount"
    async with working(applier):
        done = await service(*command)
    assert (done.exit_code, "1 applied" in done.stdout) == (0, True), done.output
    assert "redriven 1 of 1" in done.stderr
    await redrive(applier, Selection(keys=[await key_of(applier, second)]))
    await applier.work_off()
    assert bank.calls == [7, 2], "in the order of the key"
    (letter,) = await applier.backlog()
    new_id = await db.fetchval("SELECT id FROM pipeline.inbox WHERE id LIKE '1~%'")
    assert re.fullmatch("1~[0-9a-f]{12}", new_id)
    assert letter["discarded_by"] == getpass.getuser()
    assert letter["discarded_why"] == f"replaced by {new_id}: wrong amount"
    again = await service(*command)
    assert (again.exit_code, "is not dead, but discarded" in again.stderr) == (1, True)
    # The letter itself is known if it comes again, and so it is not applied.
    await applier.apply(Deposit(1))
    assert bank.calls == [7, 2]


async def test_a_mismatch_belongs_to_no_consumer_and_its_copy_goes_to_all(
    bank: Bank, new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    heard: list[int] = []

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="second")
    async def second(event: Deposited, tx: Transaction) -> None:
        heard.append(event.amount)

    applier = await new_applier(bank.handlers, topic=bank.deposits)
    await applier.apply(Deposit(1))
    await applier.apply(Deposit(2, id="1"))
    (letter,) = await letters(applier)
    assert (letter.reason, letter.consumer) == ("identity mismatch", "")
    redriven = await redrive(applier)
    await applier.work_off()
    assert await became(applier, redriven) == {"dead": 1}
    assert [one.id for one in await letters(applier)] == [letter.id]
    selection = Selection(keys=[await key_of(applier, letter)])
    copy = Copy(b'{"account": "ada", "amount": 3}', "ann", "a test")
    async with autocommitting(applier.engine) as driver:
        chunks = store(applier, driver).redrive(selection, Change("ann", "edit", "a test"), copy)
        copied = [one async for some in chunks for one in some]
    await applier.work_off()
    assert await became(applier, copied) == {"applied": 1}
    assert (bank.calls, heard) == ([1, 3], [1, 3])
    assert await letters(applier) == []
    audited = await db.fetch("SELECT who, action, subject, why FROM pipeline.audit ORDER BY id")
    subject = f"dead letter {letter.id}"
    assert [tuple(row) for row in audited] == [
        (*REDRIVES[:2], subject, None),
        ("ann", "edit", subject, "a test"),
    ]


async def test_the_audit_names_each_letter_that_was_redriven_with_who_and_why(
    applier: Applier, service: Command, db: asyncpg.Connection
) -> None:
    """So the timeline of each key finds it, however many there were."""
    await bury(applier, *(Deposit(number, "ada") for number in range(1, 31)))
    ids = {one.id for one in await letters(applier)}
    line = "redrive", "--all", "--yes", "--wait", "0"
    done = await service(*line, "--because", "a test", "--operator", "ann")
    assert done.exit_code == 0, done.output
    ((*by, subject),) = await db.fetch("SELECT who, action, why, subject FROM pipeline.audit")
    assert by == ["ann", "redrive", "a test"]
    kind, _, named = subject.partition("letter ")
    assert (kind, {*named.split(", ")}) == ("dead ", ids)


async def test_a_payload_is_read_from_standard_input(applier: Applier, service: Command) -> None:
    await bury(applier, Deposit(1))
    (letter,) = await letters(applier)
    options = "--payload", "-", "--because", "a test", "--operator", "ann", "--wait", "0", "--json"
    done = await service("edit", letter.id, *options, input='{"account": "ada", "amount": 7}')
    assert done.exit_code == 0, done.output
    became = {"found": 1, "redriven": 1, "became": None, "died": None}
    assert json.loads(done.stdout) == became
    waits, discarded = sorted(
        await applier.backlog(), key=lambda row: row["discarded_at"] is not None
    )
    assert json.loads(waits["value"])["amount"] == 7
    assert (waits["reason"], discarded["discarded_by"]) == ("redriven", "ann")


@pytest.mark.parametrize(
    ("payload", "why", "code", "said"),
    [
        ('{"account": "ada"}', "a test", 1, "the payload is invalid"),
        ('{"account": "**********", "amount": 1}', "a test", 1, "secrets of the payload are hid"),
        ('{"account": "ada", "amount": 1}', " ", 2, "--because is empty"),
    ],
)
async def test_an_invalid_edit_or_reason_is_refused_keeping_the_dead_letter(
    applier: Applier, service: Command, payload: str, why: str, code: int, said: str
) -> None:
    await bury(applier, Deposit(1))
    (letter,) = await letters(applier)
    options = "--payload", "-", "--because", why, "--json"
    done = await service("edit", letter.id, *options, input=payload)
    assert (done.exit_code, said in complaint(done)) == (code, True), done.output
    assert [one.id for one in await letters(applier)] == [letter.id]


async def test_changes_are_counted_and_not_kept(
    bank: Bank, settings: Callable[..., Settings]
) -> None:
    class Changed:
        """A row that was changed."""

    rows: list[ref[Changed]] = []

    async def chunks() -> AsyncIterator[list[Changed]]:
        for number in range(3):
            one = Changed()
            rows.append(ref(one))
            chunk = [one]
            del one
            yield chunk
            del chunk
            assert [row() for row in rows[:number]] == [None] * number

    chosen = dead_commands.Confirmation(everything=True, yes=True)
    invocation = Invocation(bank.service, settings(), as_json=True)
    change = dead_commands._change(invocation, "discard", [{"count": 3}], chosen, chunks())
    assert await change == 3
    assert len(rows) == 3
