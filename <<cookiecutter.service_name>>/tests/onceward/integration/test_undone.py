"""Handlers that raise beside others: what they have changed in memory is undone."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import asyncpg
import pytest

from onceward import Handlers, Policy, Reject, Retry, Transaction

from .applier import NewApplier
from .test_careless import Boxed, Overdraft, Thing
from .test_session import (
    TOPIC,
    Changed,
    Habit,
    Habits,
    Note,
    Tagged,
    Wallet,
    add_cents,
    change,
    errors_of,
    events_of,
    wallet_of,
)
from .test_session import habits as habits
from .test_versions import Watched
from tests.contract.bank import Deposit, Deposited

Step = Callable[[Transaction, str], Awaitable[object]]


def failing(step: Step) -> Habit:
    """Return a handler that does this, and is rejected."""

    async def fail(tx: Transaction, key: str) -> None:
        await step(tx, key)
        raise Reject("no")

    return fail


async def add_and_publish(tx: Transaction, key: str) -> None:
    """Change a row, and publish it twice."""
    await add_cents(tx, key, 5)
    await add_cents(tx, key, 6)


async def schedule(tx: Transaction, key: str) -> None:
    """Schedule an event, and cancel another."""
    tx.publish(Changed(cents=1), key=key, name="mine", after=timedelta(hours=1))
    tx.cancel("earlier")


async def add_a_row(tx: Transaction, key: str) -> None:
    """Add a wallet and a note."""
    tx.add(Wallet(id=f"{key} new", cents=7))
    tx.add(Note(text="lost"))


async def create_and_change(tx: Transaction, key: str) -> None:
    """Create a wallet that a later message creates, too."""
    wallet = await tx.load_or_create(Wallet, f"{key} later")
    wallet.cents = 9
    tx.publish(Changed(cents=9), of=wallet)


async def add_and_publish_a_row(tx: Transaction, key: str) -> None:
    """Add a row, and publish it."""
    wallet = Wallet(id=f"{key} new", cents=7)
    tx.add(wallet)
    tx.publish(Changed(cents=7), of=wallet)


async def change_what_is_watched(tx: Transaction, key: str) -> None:
    """Change a row whose writes are counted."""
    watched = await tx.load_or_create(Watched, "watched")
    watched.cents = 99


async def leave_a_task(tx: Transaction, key: str) -> None:
    """Change a row in a task that goes on when another has failed."""
    wallet = await tx.load_or_create(Wallet, key)

    async def compute() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            wallet.cents += 100

    async def validate() -> None:
        raise Reject("no")

    await asyncio.gather(compute(), validate())


async def load_after_a_change(tx: Transaction, key: str) -> None:
    """Change a row, and load another, for which the change is written."""
    await add_cents(tx, key, 5)
    await tx.load(Wallet, "not declared")


async def change_in_place(tx: Transaction, key: str) -> None:
    """Change a value in place."""
    tagged = await tx.load_or_create(Tagged, "tagged")
    if tagged.tags is None:
        tagged.tags = []
    tagged.tags.append("lost")


async def change_under_another_name(tx: Transaction, key: str) -> None:
    """Change a row that was loaded under the name of its base class."""
    thing = await tx.load(Thing, "t")
    assert isinstance(thing, Boxed)
    thing.box_id = None


async def use_its_session(tx: Transaction, key: str) -> None:
    """Change a row by SQLAlchemy's session."""
    wallet = await tx.load_or_create(Wallet, key)
    wallet.cents = 99
    await tx.session.flush()


@pytest.mark.parametrize(
    "step",
    [
        add_and_publish,
        schedule,
        add_a_row,
        create_and_change,
        add_and_publish_a_row,
        change_what_is_watched,
        leave_a_task,
        load_after_a_change,
        change_in_place,
        change_under_another_name,
        use_its_session,
    ],
)
async def test_nothing_is_left_of_a_message_that_is_rejected_between_others(
    habits: Habits, db: asyncpg.Connection, step: Step
) -> None:
    await db.execute("INSERT INTO careless_box (id, name, version) VALUES ('b', 'old', 0)")
    await db.execute(
        "INSERT INTO careless_thing (id, kind, box_id, version) VALUES ('t', 'boxed', 'b', 0)"
    )

    async def other(tx: Transaction, key: str) -> None:
        await change(tx, key)
        tx.publish(Changed(cents=1), key=key, name="earlier", after=timedelta(hours=1))

    async def later(tx: Transaction, key: str) -> None:
        await change(tx, key)
        for name in (f"{key} new", f"{key} later"):
            assert await tx.load(Wallet, name) is None
        watched = await tx.load_or_create(Watched, "watched")
        assert watched.cents == 0
        tagged = await tx.load_or_create(Tagged, "tagged")
        assert not tagged.tags
        thing = await tx.load(Thing, "t")
        assert isinstance(thing, Boxed)
        assert thing.box_id == "b"
        await change(tx, f"{key} later")

    habits.habits = {1: other, 2: failing(step), 3: later, 4: failing(step), 5: change}
    await habits.together(1, 2, 3, 4, 5)
    assert set(await errors_of(habits.applier)) == {1, 3}
    assert await events_of(db) == [(n, f'{{"cents":{n}}}') for n in (1, 2, 3)]
    assert (await wallet_of(db))["cents"] == 3
    assert await events_of(db, "ada later") == [(1, '{"cents":1}')]
    assert await db.fetchval("SELECT count(*) FROM note") == 0
    assert await db.fetchval("SELECT writes FROM versions_watched") == 1
    assert await db.fetchval("SELECT count(*) FROM wallet") == 2
    assert await db.fetch("SELECT name FROM pipeline.scheduled") == [("earlier",)]


async def test_each_message_is_called_once_however_many_are_rejected(
    habits: Habits, db: asyncpg.Connection
) -> None:
    habits.habits = {n: failing(add_and_publish) for n in range(0, 200, 2)}
    await habits.applier.apply(*(Deposit(n, account=f"of {n % 5}") for n in range(200)))
    assert habits.calls == list(range(200))
    assert len(await errors_of(habits.applier)) == 100
    assert await db.fetchval("SELECT sum(cents) FROM wallet") == 100


async def test_a_decision_based_on_another_messages_change_is_undone_with_it(
    habits: Habits, db: asyncpg.Connection
) -> None:
    async def overdraw(tx: Transaction, key: str) -> None:
        account = await tx.load_or_create(Overdraft, "shared")
        account.cents -= 5

    async def pay(tx: Transaction, key: str) -> None:
        account = await tx.load_or_create(Overdraft, "shared")
        if account.cents < 0:
            raise Reject("overdrawn")
        account.cents += 1

    habits.habits = {1: pay, 2: overdraw, 3: pay, 4: pay}
    await habits.applier.apply(*(Deposit(n, account=str(n)) for n in (1, 2, 3, 4)))
    assert set(await errors_of(habits.applier)) == {1}
    assert await db.fetchval("SELECT cents FROM careless_overdraft") == 3


@pytest.mark.parametrize("after_death", ["go on", "hold"])
@pytest.mark.parametrize("is_dead", [False, True])
async def test_later_messages_of_the_key_follow_a_failed_one_by_policy(
    new_applier: NewApplier, db: asyncpg.Connection, after_death: str, *, is_dead: bool
) -> None:
    handlers = Handlers()
    policy = Policy(schedule=(3_600,), after_death="hold" if after_death == "hold" else "go on")

    @handlers.on(Deposited, topic=TOPIC, consumer="wallet", policy=policy)
    async def wallet(event: Deposited, tx: Transaction) -> None:
        if event.amount == 2:
            raise Reject("no") if is_dead else Retry("later")
        await change(tx, event.account)

    applier = await new_applier(handlers, topic=TOPIC)
    keys = {1: "ada", 2: "ada", 3: "ada", 4: "bob"}
    await applier.apply(*(Deposit(n, account=key) for n, key in keys.items()))
    goes_on = is_dead and after_death == "go on"
    assert (await wallet_of(db))["cents"] == (2 if goes_on else 1)
    assert (await wallet_of(db, "bob"))["cents"] == 1
    reasons = {row["offset"]: row["reason"] for row in await applier.backlog()}
    assert set(reasons) == ({1} if goes_on else {1, 2})
    if not goes_on:
        assert reasons[2] == "follows another"
