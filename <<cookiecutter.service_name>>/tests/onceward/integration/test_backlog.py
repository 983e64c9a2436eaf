"""The backlog: what fails is set aside and tried again, and its key waits behind it, in order."""

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from typing import Literal

import asyncpg
import pytest
import sqlalchemy as sa

from onceward import Handlers, Park, Policy, Reject, Retry, Transaction
from onceward.apply import backlog
from onceward.apply.breaker import BreakerOpen, FailedMessage
from onceward.apply.item import Row
from onceward.events.message import time_of
from onceward.handlers.policy import DEFERRED, dead
from onceward.observe import metrics
from onceward.operators import adopting
from onceward.schema import LANES
from onceward.servers.database import autocommitting

from .applier import Applier, NewApplier
from .bank import Bank, Refused
from tests.contract.bank import Account, Deposit, Deposited, histories

HOLDING = Policy(attempts=1, after_death="hold")
QUICK = Policy(schedule=(0,))


async def bank_with(new_applier: NewApplier, **options: object) -> tuple[Bank, Applier]:
    """Return a bank whose handler is registered with these options, and its applier."""
    bank = Bank(deposits="deposits", balances="balances", name="bank", options=options)
    return bank, await new_applier(bank.handlers, topic=bank.deposits)


def told(rows: list[asyncpg.Record]) -> list[tuple[int, str, int]]:
    """Say of each row: its offset, why it is there, and the attempts it has had."""
    return [(row["offset"], row["reason"], row["attempts"]) for row in rows]


async def test_a_record_that_fails_is_set_aside_and_only_its_key_waits(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    bank.refused = {20}
    await applier.apply(Deposit(10), Deposit(1, "bob"), Deposit(20), Deposit(2, "bob"), Deposit(30))
    assert await applier.position() == 5
    assert await histories(db) == {"ada": [10], "bob": [1, 2]}
    rows = await applier.backlog()
    assert told(rows) == [(2, "failed", 1), (4, "follows another", 0)]
    assert rows[0]["waits"], "it is tried again later"
    assert rows[0]["error"].startswith("Refused: 20")
    assert "in deposit" in rows[0]["traceback"]
    assert await db.fetchval("SELECT count(*) FROM pipeline.inbox") == 3


async def test_later_records_of_the_key_wait_behind_it_also_in_later_batches(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    """Trap 7: backoff belongs to the key, and what failed is not overtaken."""
    bank, applier = ledger
    bank.refused = {10}
    await applier.apply(Deposit(10))
    bank.refused = set()
    await applier.apply(Deposit(20), Deposit(1, "bob"))
    await applier.apply(Deposit(30))
    await applier.work_off()
    assert await histories(db) == {"bob": [1]}, "the first one is not due yet"
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [10, 20, 30], "bob": [1]}
    assert await applier.backlog() == []
    await applier.apply(Deposit(40))
    assert await applier.backlog() == [], "the key is back on the fast path"
    assert await histories(db) == {"ada": [10, 20, 30, 40], "bob": [1]}
    assert bank.calls.count(20) == 1


async def test_what_comes_again_while_it_waits_is_a_duplicate(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    bank.refused = {10}
    await applier.apply(Deposit(10), Deposit(20))
    bank.refused = set()
    outcomes = await applier.apply(Deposit(10), Deposit(20), Deposit(20))
    assert [one.is_new for one in outcomes] == [False, False, False]
    assert len(await applier.backlog()) == 2
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [10, 20]}
    await applier.apply(Deposit(10), Deposit(20))
    assert await histories(db) == {"ada": [10, 20]}
    assert await db.fetchval("SELECT count(*) FROM pipeline.inbox") == 2


async def test_correcting_a_backlog_payload_does_not_change_the_messages_identity(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    bank.refused = {10}
    await applier.apply(Deposit(10))
    await db.execute(
        "UPDATE pipeline.backlog"
        " SET value = convert_to(replace(convert_from(value, 'UTF8'), '10', '12'), 'UTF8')"
    )
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [12]}
    (outcome,) = await applier.apply(Deposit(10))
    assert not outcome.is_new
    assert await applier.backlog() == [], "the original is a duplicate, no impostor"


async def test_another_payload_under_a_waiting_id_is_dead_with_both_hashes(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    bank.refused = {10}
    await applier.apply(Deposit(10), Deposit(11, id="10"))
    await applier.apply(Deposit(12, id="10"), Deposit(5, "bob"))
    *others, first = await applier.backlog()
    assert first["reason"] == "failed"
    assert len(others) == 2
    for row in others:
        assert (row["reason"], row["remembered_hash"]) == ("identity mismatch", first["hash"])
        assert row["hash"] != first["hash"]
        assert row["died_at"] is not None
    assert await histories(db) == {"bob": [5]}


async def test_all_failing_messages_are_set_aside_and_the_others_commit_together(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    bank.refused = {2, 4, 6}
    await applier.apply(*(Deposit(n, account=str(n)) for n in range(1, 8)))
    assert await histories(db) == {str(n): [n] for n in (1, 3, 5, 7)}
    assert await db.fetchval("SELECT count(DISTINCT xid) FROM pipeline.inbox") == 1
    assert len(bank.calls) < 3 * 7
    assert told(await applier.backlog()) == [(1, "failed", 1), (3, "failed", 1), (5, "failed", 1)]


async def test_who_failed_only_because_of_another_is_applied_at_once(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, applier = await bank_with(new_applier)
    await applier.apply(Deposit(100))

    @bank.handlers.on(
        Deposited, topic="transfers", consumer="withdraw", loads=Account.by("account")
    )
    async def withdraw(event: Deposited, tx: Transaction) -> None:
        account = await tx.load(Account, event.account)
        assert account is not None
        if event.amount == 50:
            account.balance = 0
            raise ValueError("a bug behind a change")
        if event.amount > account.balance:
            raise ValueError("not enough")
        account.balance -= event.amount

    transfers = await new_applier(bank.handlers, topic="transfers")
    # Without a key they have no order: the second must not wait for the first.
    await transfers.apply(Deposit(50, key=None), Deposit(7, key=None))
    await transfers.work_off()
    assert await db.fetchval("SELECT balance FROM account") == 93
    assert told(await transfers.backlog()) == [(0, "failed", 1)]


async def test_attempts_are_counted_and_used_up(ledger: tuple[Bank, Applier]) -> None:
    """Trap 15: what fails spends an attempt each time, and is dead in the end."""
    bank, applier = ledger
    bank.refused = {10}
    await applier.apply(Deposit(10), Deposit(20))
    for attempt in range(1, 6):
        rows = await applier.backlog()
        assert rows[0]["attempts"] == attempt
        assert rows[0]["died_at"] is None
        await applier.make_due()
        await applier.work_off()
    (row,) = await applier.backlog()
    assert (row["reason"], row["attempts"]) == ("attempts used up", 6)
    assert row["died_at"] is not None
    assert bank.calls.count(10) == 6
    assert bank.calls[-1] == 20, "its followers go on"


async def test_an_effect_that_bypasses_the_transaction_is_repeated_and_not_rolled_back(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, applier = await bank_with(new_applier)
    await db.execute("CREATE TABLE letter (amount int)")

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="write")
    async def write(event: Deposited, tx: Transaction) -> None:
        await db.execute("INSERT INTO letter VALUES ($1)", event.amount)
        if broken:
            raise Refused(event.amount)

    broken = True
    await applier.apply(Deposit(10))
    failed = await db.fetchval("SELECT count(*) FROM letter")
    assert failed
    broken = False
    await applier.make_due()
    await applier.work_off()
    assert await applier.backlog() == []
    assert await db.fetchval("SELECT count(*) FROM letter") == failed + 1


async def test_messages_of_a_key_in_two_partitions_have_no_order(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, applier = await bank_with(new_applier)
    other = await new_applier(bank.handlers, topic=bank.deposits, partition=1)
    bank.refused = {10}
    await other.apply(Deposit(10))
    await applier.apply(Deposit(20))
    assert [row["reason"] for row in await applier.backlog()] == ["follows another", "failed"]
    bank.refused = set()
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [20, 10]}, "in the order of their partitions"


async def test_a_key_that_holds_goes_on_only_when_a_person_has_decided(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, applier = await bank_with(new_applier, policy=HOLDING)
    bank.refused = {10}
    await applier.apply(Deposit(10), Deposit(20), Deposit(1, "bob"))
    await applier.apply(Deposit(30))
    await applier.work_off()
    assert await histories(db) == {"bob": [1]}
    assert [row["holds"] for row in await applier.backlog()] == [True, False, False]


async def test_waiting_is_bounded_by_the_age_that_the_policy_allows(
    new_applier: NewApplier,
) -> None:
    policy = Policy(attempts=100, max_age=100, schedule=(30,))
    bank, applier = await bank_with(new_applier, policy=policy)
    bank.refused = {10}
    await applier.apply(Deposit(10))
    while (row := (await applier.backlog())[0])["died_at"] is None:
        assert row["waited"] <= 100
        await applier.make_due()
        await applier.work_off()
    assert row["reason"] == "waited too long"
    assert 3 <= row["attempts"] <= 5


async def test_handlers_steer_with_exceptions(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, applier = await bank_with(new_applier)
    bank.errors = {
        1: Retry("busy", after=7),
        2: Park("no order yet", after=9),
        3: Reject("never"),
        4: Retry("busy"),
    }
    for amount in bank.errors:
        await applier.apply(Deposit(amount, account=str(amount)))
    retried, parked, rejected, scheduled = await applier.backlog()
    assert told([retried, parked, rejected]) == [
        (0, "failed", 1),
        (1, "parked by its handler", 0),
        (2, "rejected", 1),
    ]
    assert 6 < (retried["due_at"] - retried["received_at"]).total_seconds() < 8
    assert 8 < (parked["due_at"] - parked["received_at"]).total_seconds() < 10
    assert 26 < (scheduled["due_at"] - scheduled["received_at"]).total_seconds() < 34
    assert rejected["died_at"] is not None


async def test_what_is_parked_floods_no_log(
    new_applier: NewApplier, caplog: pytest.LogCaptureFixture
) -> None:
    bank, applier = await bank_with(new_applier)
    bank.errors = {1: Park("no order yet"), 2: Retry("busy")}
    caplog.set_level(logging.INFO, "onceward.apply.outcome")
    await applier.apply(Deposit(1, account="ada"), Deposit(2, account="bob"))
    await applier.work_off()
    assert {vars(one)["message_id"] for one in caplog.records} == {"2"}


async def test_two_handlers_of_one_event_each_have_their_own_fate(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    counted: list[int] = []

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="count")
    async def count(event: Deposited, tx: Transaction) -> None:
        await tx.session.execute(sa.text("SELECT 1"))
        counted.append(event.amount)

    bank.refused = {10}
    await applier.apply(Deposit(10), Deposit(20))
    assert await histories(db) == {}
    assert counted[-2:] == [10, 20]
    assert {row["consumer"] for row in await applier.backlog()} == {"deposit"}
    bank.refused = set()
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [10, 20]}
    assert counted[-2:] == [10, 20], "the other is not called again"


async def test_deferred_messages_are_stored_at_once_and_handled_later_in_order(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, applier = await bank_with(new_applier, mode="deferred")
    await applier.apply(*(Deposit(n, account=str(n % 3)) for n in range(1, 100)))
    assert bank.calls == []
    assert await applier.position() == 99
    await applier.work_off()
    assert await applier.backlog() == []
    wanted = {str(k): [n for n in range(1, 100) if n % 3 == k] for k in range(3)}
    assert await histories(db) == wanted
    assert await db.fetchval("SELECT count(*) FROM pipeline.inbox") == 99
    assert await db.fetchval("SELECT count(DISTINCT xid) FROM pipeline.inbox") <= 3, "in batches"


@pytest.mark.parametrize("another", ["system_identifier = 1", "database_oid = 1"])
async def test_no_lane_is_claimed_in_a_database_that_is_not_adopted(
    new_applier: NewApplier, db: asyncpg.Connection, another: str
) -> None:
    """Its data may be replaced under connections that are open."""
    _, applier = await bank_with(new_applier, mode="deferred")
    await applier.apply(Deposit(10))
    await db.execute(f"UPDATE pipeline.outbox_cluster SET {another}")
    await applier.work_off()
    assert await histories(db) == {}
    await adopting.adopt(db, keep_progress=True)
    await applier.work_off()
    assert await histories(db) == {"ada": [10]}


async def test_of_rows_stored_together_only_each_keys_first_is_due(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    _, applier = await bank_with(new_applier, mode="deferred")
    keyless = [Deposit(n, f"account {n}", key=None) for n in (5, 8, 9)]
    await applier.apply(Deposit(1), Deposit(2), Deposit(3, "bob"), Deposit(4), keyless[0])
    await applier.apply(Deposit(6), Deposit(7), *keyless[1:])
    due = [row["offset"] for row in await applier.backlog() if row["due_at"] is not None]
    assert due == [0, 2, 4, 5, 7, 8], "also behind others that are stored already"
    await applier.work_off()
    assert (await histories(db))["ada"] == [1, 2, 4, 6, 7]
    assert await applier.backlog() == []


async def test_rows_stored_with_a_dead_letter_are_due_unless_held(
    new_applier: NewApplier,
) -> None:
    bank, applier = await bank_with(new_applier, mode="deferred")
    decisions = [dead(Policy(), "rejected", Reject()), DEFERRED, DEFERRED]
    decisions += [dead(HOLDING, "rejected", Reject()), DEFERRED]
    deposits = [Deposit(n, name) for n, name in enumerate(("ada", "ada", "ada", "bob", "bob"), 1)]
    items = (await applier.read(*deposits, start=0)).items
    rows = [
        Row(item.key, "deposit", item.record, decision, item)
        for item, decision in zip(items, decisions, strict=True)
    ]
    async with autocommitting(applier.engine) as driver:
        await backlog.add(driver, rows, None)
    due = [row["offset"] for row in await applier.backlog() if row["due_at"] is not None]
    assert due == [1], "the first of ada's that is alive; bob's wait for a person"
    await applier.work_off()
    assert bank.calls == [2, 3]


async def test_a_transaction_tells_how_long_its_oldest_message_has_waited(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, float]] = []
    monkeypatch.setattr(metrics, "backlog_applied", lambda *one: told.append(one))
    _, applier = await bank_with(new_applier, mode="deferred")
    await applier.apply(Deposit(1), Deposit(2), Deposit(3))
    await db.execute(
        "UPDATE pipeline.backlog SET received_at = received_at - interval '1 hour'"
        ' WHERE "offset" = 1'
    )
    await applier.work_off()
    ((consumer, seconds),) = told
    assert (consumer, seconds // 600) == ("deposit", 6)


async def test_a_hot_key_drains_in_batches_and_others_take_their_turns(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Trap 8: one row of a key at a time would make it crawl, all of them starve the others."""
    bank, applier = await bank_with(new_applier, policy=QUICK)
    # A transaction takes fewer messages if they would take more than a quarter of its time limit.
    slowest = {"transaction_timeout": 3_600, "kafka_session_timeout": 4_000, "backlog_lease": 4_000}
    applier = await new_applier(bank.handlers, topic=bank.deposits, batch_size=100, **slowest)
    bank.refused = {1}
    await applier.apply(Deposit(1))
    count = 1_000
    await applier.apply(*(Deposit(n) for n in range(2, count + 1)))
    bank.refused = set()
    bank.calls.clear()
    before = await db.fetchval("SELECT count(DISTINCT xid) FROM pipeline.inbox")
    await applier.work_off()
    assert (await histories(db))["ada"] == list(range(1, count + 1))
    assert await db.fetchval("SELECT count(DISTINCT xid) FROM pipeline.inbox") - before == 10
    assert await applier.backlog() == []


async def test_a_handler_exceeding_its_timeout_is_cancelled_and_its_record_set_aside(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, applier = await bank_with(new_applier)

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="slow", timeout=0.2)
    async def slow(event: Deposited, tx: Transaction) -> None:
        if event.amount == 20:
            await tx.session.execute(sa.text("SELECT pg_sleep(30)"))

    await applier.apply(Deposit(10), Deposit(20), Deposit(30))
    assert await histories(db) == {"ada": [10, 20, 30]}
    await applier.work_off()
    assert [(row["consumer"], *told([row])[0]) for row in await applier.backlog()] == [
        ("slow", 1, "failed", 1),
        ("slow", 2, "follows another", 0),
    ]


async def test_a_call_that_waits_for_a_dead_connection_spends_no_attempt(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Trap 16: what the way to the servers did is not counted against a message."""
    bank, applier = await bank_with(new_applier)
    stalls = 1

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="ask", timeout=0.3)
    async def ask(event: Deposited, tx: Transaction) -> None:
        nonlocal stalls
        if event.amount == 20 and stalls:
            stalls -= 1
            await tx.session.execute(sa.text("SELECT pg_sleep(30)"))

    await applier.apply(Deposit(10), Deposit(20), Deposit(30))
    assert await applier.backlog() == []
    assert await histories(db) == {"ada": [10, 20, 30]}


async def test_a_deployment_that_fails_for_everything_sets_nothing_aside(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, applier = await bank_with(new_applier)
    bank.refused = set(range(1_000))
    batch = [Deposit(n, account=str(n)) for n in range(1, 101)]
    for _ in range(3):
        with pytest.raises(BreakerOpen, match="deposit fails with Refused"):
            await applier.apply(*batch)
        assert await applier.backlog() == []
        assert await applier.position() == 0
    assert "breaker of deposit" in applier.health.reasons
    bank.refused = {7}
    await applier.apply(*batch)
    assert len(await histories(db)) == 99
    assert "breaker of deposit" not in applier.health.reasons
    assert told(await applier.backlog()) == [(6, "failed", 1)]


async def test_a_deployment_that_fails_for_everything_is_judged_after_few_messages(
    new_applier: NewApplier,
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier = await new_applier(bank.handlers, topic="asked")
    calls = 0

    @bank.handlers.on(Deposited, topic="asked", consumer="ask")
    async def ask(event: Deposited, tx: Transaction) -> None:
        nonlocal calls
        calls += 1
        if event.amount <= broken:
            raise Refused(event.amount)

    broken = 1_000
    batch = [Deposit(n, account=str(n)) for n in range(1, 1_001)]
    with pytest.raises(BreakerOpen, match="ask fails with Refused"):
        await applier.apply(*batch)
    assert calls < 250
    broken = 60  # a piece of them has no success, and after these all is well
    with pytest.raises(BreakerOpen, match="ask fails with Refused"):
        await applier.apply(*batch)
    broken = 40  # a piece of 50 has some: they are at fault themselves
    await applier.apply(*batch)
    assert told(await applier.backlog()) == [(n, "failed", 1) for n in range(40)]


async def test_an_always_failing_consumer_opens_its_breaker_though_another_only_rejects(
    new_applier: NewApplier,
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    calls = 0

    @bank.handlers.on(Deposited, topic="asked", consumer="ask")
    async def ask(event: Deposited, tx: Transaction) -> None:
        nonlocal calls
        calls += 1
        raise Refused(event.amount)

    @bank.handlers.on(Deposited, topic="asked", consumer="listen")
    async def listen(event: Deposited, tx: Transaction) -> None:
        if event.amount == 7:
            raise Reject("not this one")

    applier = await new_applier(bank.handlers, topic="asked")
    with pytest.raises(BreakerOpen, match="ask fails with Refused"):
        await applier.apply(*(Deposit(n, account=str(n)) for n in range(1, 1_001)))
    assert calls < 250


async def test_rejections_open_no_breaker(new_applier: NewApplier) -> None:
    bank, applier = await bank_with(new_applier)
    bank.errors = {n: Reject("not this one") for n in range(200)}
    for n in range(100):  # one by one, and many together: each of another key
        await applier.apply(Deposit(n, account=str(n)))
    await applier.apply(*(Deposit(n, account=str(n)) for n in range(100, 200)))
    assert [row["reason"] for row in await applier.backlog()] == ["rejected"] * 200
    assert not applier.consume.breaker.open


@pytest.mark.parametrize(
    ("mode", "reason"), [("immediate", "failed in a batch"), ("deferred", "deferred")]
)
async def test_the_breaker_does_not_count_batch_failures_again_when_retried_alone(
    new_applier: NewApplier, mode: Literal["immediate", "deferred"], reason: str
) -> None:
    """Also those of lanes that the worker gives back before it tries them."""
    handlers = Handlers()
    applier = await new_applier(handlers, topic="asked", breaker_keys=5)

    @handlers.on(Deposited, topic="asked", consumer="checked", mode=mode)
    async def checked(event: Deposited, tx: Transaction) -> None:
        if event.amount % 2:
            await tx.session.execute(sa.text("SELECT 1 / 0"))

    await applier.apply(*(Deposit(n, account=str(n)) for n in range(60)))
    assert {row["reason"] for row in await applier.backlog()} == {reason}
    await applier.work_off(lanes=LANES)
    assert told(await applier.backlog()) == [(n, "failed", 1) for n in range(1, 60, 2)]
    assert not applier.consume.breaker.open


async def test_the_breaker_counts_untried_messages_when_they_are_tried_alone(
    new_applier: NewApplier,
) -> None:
    handlers = Handlers()
    applier = await new_applier(handlers, topic="asked", breaker_keys=5)

    @handlers.on(Deposited, topic="asked", consumer="slow", timeout=0.2)
    async def slow(event: Deposited, tx: Transaction) -> None:
        await tx.session.execute(sa.text("SELECT pg_sleep(30)"))

    await applier.apply(*(Deposit(n, account=str(n)) for n in range(8)))
    assert {row["reason"] for row in await applier.backlog()} == {"undecided"}
    await applier.work_off()
    assert applier.consume.breaker.open == {"slow"}
    assert Counter(row["attempts"] for row in await applier.backlog()) == {0: 4, 1: 4}


async def test_retries_that_fail_do_not_look_like_a_bad_deployment(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, _ = await bank_with(new_applier)
    applier = await new_applier(bank.handlers, topic=bank.deposits, breaker_keys=5)
    # Poison, every other one, so that it does not look like that at first either.
    bank.refused = set(range(0, 20, 2))
    await applier.apply(*(Deposit(n, account=str(n)) for n in range(20)))
    await applier.work_off()
    await applier.make_due()
    await applier.work_off()
    rows = await applier.backlog()
    assert {row["attempts"] for row in rows} == {2}
    assert applier.health.reasons == {"process": "no part has reported yet"}
    # Nor do those that fail in another way: first attempts show what a deployment does.
    bank.refused, bank.errors = set(), {n: KeyError(n) for n in range(20)}
    await applier.make_due()
    await applier.work_off()
    assert {row["attempts"] for row in await applier.backlog()} == {3}
    assert not applier.consume.breaker.open
    # While it is open they spend none.
    bank.errors = {n: KeyError(n) for n in range(30)}
    with pytest.raises(BreakerOpen):
        await applier.apply(*(Deposit(n, account=str(n)) for n in range(20, 30)))
    applier.let_probe("deposit")
    await applier.make_due()
    await applier.work_off()
    assert {row["attempts"] for row in await applier.backlog()} == {3}


async def test_one_worker_at_a_time_probes_for_an_open_breaker(new_applier: NewApplier) -> None:
    called, others_are_done = asyncio.Event(), asyncio.Event()
    calls = 0
    handlers = Handlers()

    @handlers.on(Deposited, topic="asked", consumer="ask", mode="deferred")
    async def ask(event: Deposited, tx: Transaction) -> None:
        nonlocal calls
        calls += 1
        called.set()
        await others_are_done.wait()
        raise ValueError("not yet")

    applier = await new_applier(handlers, topic="asked", backlog_workers=2, retry_pause=3_600)
    await applier.apply(*(Deposit(n, account=str(n)) for n in range(20)))
    with suppress(BreakerOpen):
        applier.consume.breaker.observe(
            FailedMessage("ask", bytes([n]), ValueError(n)) for n in range(20)
        )
    applier.let_probe("ask")
    probe = asyncio.create_task(applier.lanes.work_off())
    await called.wait()
    for _ in range(5):  # other lanes are due
        await applier.lanes.work_off()
    assert calls == 1
    others_are_done.set()
    await probe
    assert {row["attempts"] for row in await applier.backlog()} == {0}


async def test_an_invalid_payload_that_holds_its_key_lets_those_before_it_pass(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    _, applier = await bank_with(new_applier, policy=Policy(after_death="hold"))
    await applier.apply(Deposit(10), Deposit(20, value=b'{"account": 7}'), Deposit(30))
    assert await histories(db) == {"ada": [10]}
    assert told(await applier.backlog()) == [(1, "invalid payload", 0), (2, "follows another", 0)]


async def test_an_identity_mismatch_holds_its_key_under_no_policy(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    _, applier = await bank_with(new_applier, policy=Policy(after_death="hold"))
    await applier.apply(Deposit(10), Deposit(20, id="10"), Deposit(30))
    assert await histories(db) == {"ada": [10, 30]}
    assert told(await applier.backlog()) == [(1, "identity mismatch", 0)]


async def test_an_invalid_payload_is_dead_at_once_and_its_neighbours_are_applied(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    await applier.apply(
        Deposit(10), Deposit(20, value=b'{"account": 7}'), Deposit(30), Deposit(1, type="")
    )
    assert await histories(db) == {"ada": [10, 30]}
    nobodys, invalid = await applier.backlog()
    assert (nobodys["reason"], nobodys["consumer"], nobodys["offset"]) == (
        "missing attribute",
        "",
        3,
    )
    assert (invalid["reason"], invalid["value"]) == ("invalid payload", b'{"account": 7}')
    assert invalid["died_at"] is not None
    assert "amount: Field required" in invalid["error"]


NOW = 1_800_000_000_000
"""Milliseconds; what the inbox of `forgetful` remembers begins a second before."""


async def forgetful(db: asyncpg.Connection) -> None:
    """Drop the inbox's memory, as retention does with what is old."""
    await db.execute("UPDATE pipeline.inbox_generation SET current = 2, oldest = 2")
    await db.execute("UPDATE pipeline.inbox_generation SET since = to_timestamp($1)", NOW / 1e3 - 1)
    await db.execute("DELETE FROM pipeline.inbox WHERE generation = 1")


async def test_a_repeated_message_that_the_inbox_forgot_is_not_applied_again(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    """Trap 10: the memory is gone when an old position is read again."""
    _, applier = ledger
    old = Deposit(10, timestamp=NOW - 2_000)
    await applier.apply(old, Deposit(20, timestamp=NOW))
    await forgetful(db)
    await applier.apply(old, Deposit(30, timestamp=NOW))
    assert await histories(db) == {"ada": [10, 20, 30]}
    (row,) = await applier.backlog()
    assert (row["reason"], row["attempts"], row["timestamp"]) == ("too old", 0, NOW - 2_000)
    assert row["died_at"] is not None
    assert "takes_old=True" in row["error"]
    assert f"record is of {time_of(NOW - 2_000)}" in row["error"]


async def test_an_old_event_in_a_new_record_is_too_old_as_well(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    await forgetful(db)
    times = (("ce_time", b"2020-01-01T00:00:00Z"),)
    unknown = Deposit(3, timestamp=-1)  # a record of an ancient format has no time
    await applier.apply(
        Deposit(1, timestamp=NOW, headers=times), Deposit(2, timestamp=NOW), unknown
    )
    (row,) = await applier.backlog()
    assert row["reason"] == "too old"
    assert "its event of 2020-01-01 00:00:00+00:00, and the inbox remembers since" in row["error"]
    assert await histories(db) == {"ada": [2, 3]}


async def test_a_record_whose_producer_stamps_seconds_is_too_old_and_says_why(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    await forgetful(db)
    await applier.apply(Deposit(1, timestamp=1_700_000_000))
    (row,) = await applier.backlog()
    assert "its record is of 1970-01-20 16:13:20+00:00, and" in row["error"]
    assert row["error"].endswith(
        "The record's timestamp, 1700000000, looks like seconds, and has to be milliseconds:"
        " for 2023-11-14 22:13:20+00:00 let its producer send 1700000000000"
    )


async def test_a_handler_may_take_what_is_older_than_the_inbox_remembers(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    _, applier = await bank_with(new_applier, takes_old=True)
    await forgetful(db)
    await applier.apply(Deposit(1, timestamp=NOW - 2_000))
    assert await histories(db) == {"ada": [1]}


async def test_an_unhandled_type_is_a_dead_letter_where_types_are_demanded(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    bank.handlers.topic(bank.deposits, demands_types=True)
    await applier.apply(Deposit(1), Deposit(2, type="withdrawn"))
    (row,) = await applier.backlog()
    assert (row["reason"], row["consumer"]) == ("unknown type", "")
    assert "no handler takes 'withdrawn'" in row["error"]
    assert await histories(db) == {"ada": [1]}


async def test_a_record_that_nobody_could_read_takes_its_place_when_somebody_can(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    bank.handlers.topic(bank.deposits, demands_types=True)
    await applier.apply(Deposit(1, type="deposited.v2"))
    bank.refused = {2}
    await applier.apply(Deposit(2))
    (letter, _) = await applier.backlog()

    class DepositedAgain(Deposited, type="deposited.v2"):
        pass

    @bank.handlers.on(DepositedAgain, topic=bank.deposits, consumer="deposit")
    async def deposit(event: DepositedAgain, tx: Transaction) -> None:
        bank.calls.append(event.amount)

    await db.execute(
        "UPDATE pipeline.backlog SET died_at = NULL, due_at = now() WHERE key = $1", letter["key"]
    )
    await applier.work_off()
    rows = await applier.backlog()
    assert [row["offset"] for row in rows] == [1]
    assert bank.calls[-1] == 1
