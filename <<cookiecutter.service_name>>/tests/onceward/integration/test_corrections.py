"""Corrections: what was applied is handed to them, once each, in the order of what they correct."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa

from onceward import (
    Applied,
    AppliedEvent,
    Event,
    Handlers,
    Policy,
    Transaction,
)
from onceward.apply.backlog import lane_of
from onceward.apply.item import Row, order_key
from onceward.operators import corrections, stopping
from onceward.operators.stopping import Stop, Subject
from onceward.plain import PayloadFields, Plain
from onceward.retry.lane_source import read_rows, take
from onceward.schema import FIRST_LANE_OF_CALLS
from onceward.servers.database import autocommitting
from onceward.servers.tasks import in_background

from .applier import Applier, NewApplier
from .bank import Bank
from .calling import take_calls
from .test_dead import redrive
from tests.contract.bank import Account, Deposit, Deposited, histories
from tests.servers.waiting import PATIENCE

TOPIC = "deposits"


class Rung(Event, type="correction.rung"):
    """A call."""


class Undoing:
    """A bank with a correction that takes deposits back."""

    def __init__(self, **options: Any) -> None:
        self.bank = Bank(deposits=TOPIC, balances="balances", name="bank", options=options)
        self.made: list[int] = []
        self.errors: dict[int, Exception] = {}
        self.recalled: list[Applied] = []
        self.uses_session = False
        loads = Account.by("account")

        @self.bank.handlers.correct(
            Deposited, topic=TOPIC, of="deposit", consumer="undo", loads=loads
        )
        async def undo(event: Deposited, tx: Transaction) -> None:
            self.made.append(event.amount)
            if self.uses_session:
                await tx.session.execute(sa.text("SELECT"))
            if error := self.errors.get(event.amount):
                raise error
            account = await tx.load_or_create(Account, event.account)
            account.balance -= event.amount
            account.history += f"{-event.amount},"

        @self.bank.handlers.correct(Applied, topic=TOPIC, of="deposit", consumer="recall")
        async def recall(was: Applied, tx: Transaction) -> None:
            self.recalled.append(was)


@pytest.fixture
def undoing() -> Undoing:
    """Return a bank whose deposits can be taken back."""
    return Undoing()


@pytest.fixture
async def applier(undoing: Undoing, new_applier: NewApplier) -> Applier:
    """Return the applier of that bank."""
    return await new_applier(undoing.bank.handlers, topic=TOPIC)


async def hand(
    applier: Applier, *deposits: Deposit, start: int = 0, longest: float = 0
) -> Sequence[Row]:
    """Hand the deposits at these offsets to the correction that takes them back."""
    records = (one.record(TOPIC, start + place) for place, one in enumerate(deposits))
    found = [corrections.item_of(applier.handlers, "undo", one) for one in records]
    items = [one for one in found if one is not None]
    assert len(items) == len(deposits)
    async with autocommitting(applier.engine) as driver:
        return await corrections.hand(driver, items, longest, None)


async def test_each_message_is_corrected_once_however_often_it_is_handed(
    undoing: Undoing, applier: Applier, db: asyncpg.Connection
) -> None:
    came = [Deposit(n, account) for n, account in enumerate(["ada", "bob", "ada", "ada"], 1)]
    await applier.apply(*came)
    assert undoing.made == [], "no record of the topic goes to it"
    assert [len(await hand(applier, *came)) for _ in range(2)] == [4, 0]
    await applier.work_off()
    assert sorted(undoing.made) == [1, 2, 3, 4]
    assert await histories(db) == {"ada": [1, 3, 4, -1, -3, -4], "bob": [2, -2]}
    assert len(await hand(applier, *came)) == 4
    await applier.work_off()
    assert len(undoing.made) == 4, "its markers know them"
    assert await applier.backlog() == []
    markers = "SELECT count(*) FROM pipeline.inbox WHERE consumer = 'undo'"
    assert await db.fetchval(markers) == 4


async def test_what_comes_meanwhile_waits_behind_it_and_other_keys_go_on(
    undoing: Undoing, applier: Applier, db: asyncpg.Connection
) -> None:
    await applier.apply(Deposit(1))
    await hand(applier, Deposit(1), longest=60)
    await applier.apply(Deposit(2), Deposit(3, "bob"))
    assert await applier.park() == {("deposit", 1): "follows another", ("undo", 0): "correction"}
    await applier.work_off()
    assert (undoing.made, undoing.bank.calls) == ([], [1, 3]), "it is not due yet"
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [1, -1, 2], "bob": [3]}
    assert await applier.backlog() == []


async def test_its_order_is_kept_if_it_alone_uses_the_session(
    undoing: Undoing, applier: Applier, db: asyncpg.Connection
) -> None:
    undoing.uses_session = True
    await applier.apply(Deposit(1))
    await hand(applier, Deposit(1), longest=60)
    await applier.apply(Deposit(2))
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [1, -1, 2]}


async def test_it_is_never_at_work_beside_what_it_corrects(
    undoing: Undoing, new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """A transaction that has not seen its row has ended before it is due."""
    limits = {"transaction_timeout": 3, "lock_timeout": 2}
    reading, working = [
        await new_applier(undoing.bank.handlers, topic=TOPIC, **limits) for _ in range(2)
    ]
    await reading.apply(Deposit(1))
    begun, is_at_work = asyncio.Event(), False

    async def take_long() -> None:
        """Go on until the transaction is cut off, once."""
        nonlocal is_at_work
        del undoing.bank.waits[2]
        is_at_work = True
        begun.set()
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            is_at_work = False

    undoing.bank.waits[2] = take_long
    async with in_background(reading.apply(Deposit(2))) as applying:
        await asyncio.wait_for(begun.wait(), PATIENCE)
        await hand(reading, Deposit(1), longest=limits["transaction_timeout"])
        while not undoing.made:
            await working.work_off()
            await asyncio.sleep(0.02)
        assert not is_at_work
        await applying
    await working.make_due()
    await working.work_off()
    assert await histories(db) == {"ada": [1, -1, 2]}


async def test_it_goes_before_what_its_key_holds(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    undoing = Undoing(policy=Policy(attempts=1, after_death="hold"))
    applier = await new_applier(undoing.bank.handlers, topic=TOPIC)
    undoing.bank.refused = {2}
    await applier.apply(Deposit(1), Deposit(2), Deposit(3))
    await hand(applier, Deposit(1))
    await applier.work_off()
    assert undoing.made == [1]
    undoing.bank.refused = set()
    await redrive(applier)
    await applier.work_off()
    assert await histories(db) == {"ada": [1, -1, 2, 3]}


async def test_a_failed_correction_is_a_separate_dead_letter_that_blocks_nothing(
    undoing: Undoing, applier: Applier, db: asyncpg.Connection
) -> None:
    await applier.apply(Deposit(1))
    undoing.errors = {1: ValueError("no")}
    await hand(applier, Deposit(1))
    await applier.apply(Deposit(2))
    await applier.work_off()
    assert await applier.park() == {("undo", 0): "attempts used up"}
    assert await histories(db) == {"ada": [1, 2]}
    undoing.errors = {}
    await redrive(applier)
    await applier.work_off()
    assert await histories(db) == {"ada": [1, 2, -1]}


async def test_a_process_without_it_leaves_its_rows_alone(
    undoing: Undoing, applier: Applier, new_applier: NewApplier
) -> None:
    older = await new_applier(Bank(TOPIC, "balances", "bank").handlers, topic=TOPIC)
    await older.apply(Deposit(1))
    await hand(applier, Deposit(1))
    await older.work_off()
    assert await older.park() == {("undo", 0): "correction"}
    await applier.work_off()
    assert undoing.made == [1]


async def test_its_events_go_on_with_the_sequence(applier: Applier, db: asyncpg.Connection) -> None:
    handlers = applier.handlers

    class Corrected(Event, type="correction.corrected", topic="balances"):
        account: str

    loads = Account.by("account")

    @handlers.correct(Deposited, topic=TOPIC, of="deposit", consumer="note", loads=loads)
    async def note(event: Deposited, tx: Transaction) -> None:
        tx.publish(Corrected(account="ada"), of=await tx.load(Account, event.account))

    await applier.apply(Deposit(1), Deposit(2))
    item = corrections.item_of(handlers, "note", Deposit(1).record(TOPIC, 0))
    assert item is not None
    async with autocommitting(applier.engine) as driver:
        await corrections.hand(driver, [item], 0.0, None)
    await applier.work_off()
    await applier.apply(Deposit(3))
    rows = await db.fetch("SELECT type, sequence FROM pipeline.outbox ORDER BY id")
    assert [tuple(row) for row in rows] == [
        ("balance.changed", 1),
        ("balance.changed", 2),
        ("correction.corrected", 3),
        ("balance.changed", 4),
    ]


@pytest.mark.parametrize("is_plain", [False, True], ids=["CloudEvents", "another codec"])
async def test_without_a_record_it_is_given_what_is_remembered(
    undoing: Undoing, applier: Applier, is_plain: bool
) -> None:
    if is_plain:
        codec = Plain("deposited", PayloadFields("amount"))
        undoing.bank.handlers.topic(TOPIC, codec=codec)
    was = Applied(
        consumer="deposit",
        source="/tests",
        id="an id ✓",
        type="deposited",
        topic=TOPIC,
        partition=3,
        offset=17,
        key="ada",
        release="1.4.2",
        at=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        result={"balance": 1},
        events=[AppliedEvent(id="e", topic="balances", type="t", key="ada", sequence=7)],
    )
    record = corrections.record_of(was, b"ada")
    item = corrections.item_of(applier.handlers, "recall", record, b"hash of the marker")
    assert item is not None
    live = Deposit(1).record(TOPIC, 17)
    assert (item.order_key, item.message.hash) == (
        order_key("deposit", live),
        b"hash of the marker",
    )
    async with autocommitting(applier.engine) as driver:
        await corrections.hand(driver, [item], 0.0, None)
    (row,) = await applier.backlog()
    assert (row["source"], row["id"], row["hash"]) == ("/tests", "an id ✓", b"hash of the marker")
    assert (row["partition"], row["offset"], row["record_key"]) == (3, 17, b"ada")
    await applier.work_off()
    assert undoing.recalled == [was]
    assert await applier.backlog() == []


async def test_a_correction_of_calls_has_an_order_apart_from_their_workers(
    new_applier: NewApplier,
) -> None:
    handlers, recalled = Handlers(), list[str]()
    take_calls(handlers, Rung, "ring")

    @handlers.correct(Applied, topic="(calls)", of="ring", consumer="unring")
    async def unring(was: Applied, tx: Transaction) -> None:
        recalled.append(was.id)

    applier = await new_applier(handlers, topic=TOPIC)
    assert handlers.callers == {"ring"}
    assert not handlers.topics
    was = Applied(
        consumer="ring",
        source="/bank",
        id="1",
        type="correction.rung",
        topic="(calls)",
        partition=0,
        offset=1,
        at=datetime(2026, 1, 2, tzinfo=UTC),
    )
    record = corrections.record_of(was, b"ada")
    item = corrections.item_of(handlers, "unring", record)
    assert item is not None
    assert item.order_key == order_key("unring", record)
    assert lane_of(item.order_key, item.handler.mode) < FIRST_LANE_OF_CALLS
    async with autocommitting(applier.engine) as driver:
        await corrections.hand(driver, [item], 0.0, None)
    await applier.work_off()
    assert recalled == ["1"]


async def test_a_correction_ignores_messages_of_types_that_it_does_not_take(
    applier: Applier,
) -> None:
    record = Deposit(1, type="withdrawn").record(TOPIC, 0)
    assert corrections.item_of(applier.handlers, "undo", record) is None
    assert (
        corrections.item_of(applier.handlers, "undo", Deposit(1, type="").record(TOPIC, 0)) is None
    )
    assert corrections.item_of(applier.handlers, "recall", Deposit(1).record(TOPIC, 0)) is None


@pytest.mark.parametrize(("asked", "found"), [("undo", ["undo"]), ("deposit", [])])
async def test_a_worker_takes_no_rows_of_a_consumer_that_rests(
    applier: Applier, asked: str, found: list[str]
) -> None:
    """As where the breaker is open for one of the two whose rows a key has."""
    await applier.apply(Deposit(1))
    await hand(applier, Deposit(1))
    await applier.apply(Deposit(2))
    lease = await applier.lanes._claim(32)
    assert lease is not None
    async with autocommitting(applier.engine) as driver:
        rows = await take(driver, lease, {asked}, 100)
    assert [row["consumer"] for row in rows] == ["undo", "deposit"]
    source = await read_rows(lease, applier.handlers, rows)
    assert [item.consumer for item in source.items] == found


async def test_what_follows_a_message_that_a_throttle_leaves_out_waits_for_it(
    applier: Applier,
) -> None:
    await applier.apply(Deposit(1), Deposit(2))
    await hand(applier, Deposit(1), Deposit(2))
    await applier.apply(Deposit(3))
    lease = await applier.lanes._claim(32)
    assert lease is not None
    async with autocommitting(applier.engine) as driver:
        rows = await take(driver, lease, {"undo", "deposit"}, 100)
    source = await read_rows(lease, applier.handlers, rows)
    assert [item.consumer for item in source.items] == ["undo", "undo", "deposit"]
    applier.consume.throttles._rates = {("consumer", "undo"): 1.0}
    left = applier.lanes._within_rates(source)
    assert [(item.consumer, item.record.offset) for item in left.items] == [("undo", 0)]


def test_a_correction_takes_no_part_in_what_is_paused_of_a_topic(undoing: Undoing) -> None:
    handlers = undoing.bank.handlers
    stop = Stop("consumer", "deposit", "", "", 0.0, None, 0.0, "ada", "a test")
    assert stopping.paused_topics(handlers, [stop]) == {TOPIC}
    assert stopping.consequence(handlers, stop.subject) == ""
    undo = Subject("consumer", "undo")
    assert stopping.consequence(handlers, undo) == "Keys of deposit wait behind its messages."
    keys = stopping.pausable(handlers, ())[f"key of {TOPIC}"]
    assert keys == [Subject("key", "deposit", TOPIC)]
