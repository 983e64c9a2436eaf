"""Corners of the way round in which something was once lost, doubled, blamed or held up."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward import Park, Policy, Retry, Transaction
from onceward.apply import backlog, breaker
from onceward.apply.breaker import BreakerOpen
from onceward.apply.item import order_key
from onceward.observe import metrics
from onceward.retry import lanes, measuring
from onceward.retry.lanes import Waiting
from onceward.schema import LANES
from onceward.servers.tasks import in_background
from onceward.service import Misconfigured
from onceward.settings import Settings

from .applier import Applier, NewApplier
from .bank import Bank
from .conftest import position_of, position_reaches
from .test_backlog import NOW, QUICK, bank_with, forgetful, told
from .test_dead import redrive
from tests.conftest import Running
from tests.contract.bank import Account, Deposit, Deposited, histories
from tests.servers.waiting import PATIENCE, eventually


def of_one_lane(count: int) -> list[int]:
    """Return amounts that, as accounts of the same name, have their order in one lane."""
    found: list[int] = []
    n = 0
    while len(found) < count:
        n += 1
        record = Deposit(n, account=str(n)).record("deposits", 0)
        if backlog.lane_of(order_key("deposit", record), "deferred") % LANES == 7:
            found.append(n)
    return found


# Too old.


async def test_what_is_deferred_is_asked_for_its_age_when_it_is_read(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Trap 10."""
    _, applier = await bank_with(new_applier, mode="deferred")
    old = Deposit(10, timestamp=NOW - 2_000)
    await applier.apply(old, Deposit(20, timestamp=NOW))
    await applier.work_off()
    await forgetful(db)
    await applier.apply(old)
    await applier.work_off()
    assert await histories(db) == {"ada": [10, 20]}
    assert [row["reason"] for row in await applier.backlog()] == ["too old"]


async def test_a_follower_is_asked_for_its_age_too(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Trap 10."""
    bank, applier = await bank_with(new_applier)
    old = Deposit(10, timestamp=NOW - 2_000)
    await applier.apply(old, Deposit(20, timestamp=NOW))
    await forgetful(db)
    bank.refused = {30}
    await applier.apply(Deposit(30, timestamp=NOW), old)
    bank.refused = set()
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [10, 20, 30]}


# The breaker.


@pytest.mark.parametrize("consumers", [1, 2])
async def test_a_deployment_that_fails_at_every_flush_opens_the_breaker(
    new_applier: NewApplier, db: asyncpg.Connection, consumers: int
) -> None:
    bank, applier = await bank_with(new_applier, policy=Policy(attempts=2))
    if consumers == 2:

        @bank.handlers.on(Deposited, topic=bank.deposits, consumer="count")
        async def count(event: Deposited, tx: Transaction) -> None:
            """Do nothing."""

    await db.execute("ALTER TABLE account ADD CONSTRAINT not_migrated CHECK (balance < 0)")
    with suppress(BreakerOpen):
        await applier.apply(*(Deposit(n, account=str(n)) for n in range(1, 201)))
    assert "breaker of deposit" in applier.health.reasons
    assert len(await applier.backlog()) <= 20 * consumers


async def test_an_open_breaker_spends_no_attempt_of_what_is_tried_alone(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    options = {"policy": Policy(attempts=3, schedule=(30,))}
    bank = Bank(deposits="deposits", balances="balances", name="bank", options=options)
    applier = await new_applier(bank.handlers, topic=bank.deposits, retry_pause=3_600)
    bank.refused = {10}
    await applier.apply(Deposit(10))
    await db.execute("UPDATE pipeline.backlog SET reason = 'process died', attempts = 1")
    bank.errors = {n: KeyError("bad deployment") for n in range(1000)}
    with suppress(BreakerOpen):
        await applier.apply(*(Deposit(n, account=str(n)) for n in range(100, 200)))
    assert "breaker of deposit" in applier.health.reasons
    for _ in range(3):
        applier.let_probe("deposit")
        calls = len(bank.calls)
        await applier.make_due()
        await applier.work_off()
        assert len(bank.calls) == calls + 1
        (row,) = await applier.backlog()
        assert (row["attempts"], row["died_at"]) == (1, None)


async def test_an_open_breaker_does_not_outlive_its_partition(
    new_applier: NewApplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "_FORGOTTEN_AFTER", 0.1)
    bank, one = await bank_with(new_applier)
    another = await new_applier(bank.handlers, topic=bank.deposits)
    bank.refused = set(range(100))
    batch = [Deposit(n, account=str(n)) for n in range(100)]
    with suppress(BreakerOpen):
        await one.apply(*batch)
    assert "breaker of deposit" in one.health.reasons
    bank.refused = set()
    await another.apply(*batch)

    async def is_ready() -> bool:
        await one.work_off()
        return "breaker of deposit" not in one.health.reasons

    await eventually(is_ready)


# Lanes.


async def redriven_in_a_new_shape(
    bank: Bank, applier: Applier, db: asyncpg.Connection, count: int
) -> None:
    """Redrive records that nobody could read, after a deployment that can."""
    bank.handlers.topic(bank.deposits, demands_types=True)
    deposits = [Deposit(n, account=f"account {n}", type="deposited.v2") for n in range(count)]
    await applier.apply(*deposits)
    assert len(await applier.backlog()) >= count

    class DepositedAgain(Deposited, type="deposited.v2"):
        pass

    @bank.handlers.on(DepositedAgain, topic=bank.deposits, consumer="deposit")
    async def deposit(event: DepositedAgain, tx: Transaction) -> None:
        bank.calls.append(event.amount)

    await redrive(applier)


async def test_a_suspect_and_records_that_were_nobodys_share_a_lane(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, _ = await bank_with(new_applier, policy=QUICK)
    applier = await new_applier(bank.handlers, topic=bank.deposits, breaker_keys=10_000)
    bank.refused = {1_000}
    await applier.apply(Deposit(1_000))
    await redriven_in_a_new_shape(bank, applier, db, 200)
    await db.execute("UPDATE pipeline.backlog SET reason = 'process died' WHERE consumer <> ''")
    await applier.make_due()
    bank.refused = set()
    bank.calls.clear()
    await applier.work_off()
    assert await applier.backlog() == []
    assert sorted(bank.calls) == [*range(200), 1_000]


async def test_records_that_were_nobodys_wait_for_a_lock(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, _ = await bank_with(new_applier)
    applier = await new_applier(
        bank.handlers, topic=bank.deposits, breaker_keys=1_000, lock_timeout=0.05
    )
    await redriven_in_a_new_shape(bank, applier, db, 100)
    async with db.transaction():
        await db.execute("LOCK TABLE pipeline.inbox IN ACCESS EXCLUSIVE MODE")
        working = asyncio.create_task(applier.work_off())
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(working), 3)
        assert not working.done()
    await working
    assert sorted(bank.calls) == list(range(100))


async def test_failures_of_a_lane_cost_no_square(new_applier: NewApplier) -> None:
    bank, _ = await bank_with(new_applier, mode="deferred", policy=Policy(schedule=(3_600,)))
    applier = await new_applier(bank.handlers, topic=bank.deposits, breaker_keys=100_000)
    amounts = of_one_lane(100)
    bank.refused = set(amounts)
    await applier.apply(*(Deposit(n, account=str(n)) for n in amounts))
    await applier.work_off()
    assert len(bank.calls) < 5 * len(amounts)
    assert {row["attempts"] for row in await applier.backlog()} == {1}


async def test_an_undecided_message_is_not_tried_before_an_earlier_failed_one(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Trap 7: the first time it went well, beside one that failed; the second time it did not."""
    bank, applier = await bank_with(new_applier, mode="deferred", policy=Policy(schedule=(3_600,)))
    guilty, key = map(str, of_one_lane(2))
    calls: list[int] = []

    async def fail() -> None:
        calls.append(3)
        await asyncio.sleep(0)  # so that it is not undone in memory
        raise ValueError("the second one of its key")

    async def fail_the_second_time() -> None:
        calls.append(2)
        if calls.count(2) == 2:
            raise ValueError("the first one of its key, when it is tried again")

    bank.refused = {1}
    bank.waits = {2: fail_the_second_time, 3: fail}
    await applier.apply(Deposit(1, guilty), Deposit(2, key), Deposit(3, key))
    await applier.work_off()
    assert calls == [2, 3, 2]
    assert told(await applier.backlog())[1:] == [(1, "failed", 1), (2, "deferred", 0)]


async def test_who_kills_in_a_lane_is_found_by_the_second_death(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, applier = await bank_with(new_applier, mode="deferred", policy=Policy(schedule=(3_600,)))
    amounts = of_one_lane(100)
    killer = amounts[60]

    async def die() -> None:
        # From outside, as by a loop that is torn down.
        asyncio.get_running_loop().call_soon(working.cancel)
        await asyncio.Event().wait()

    bank.waits = {killer: die}
    await applier.apply(*(Deposit(n, account=str(n)) for n in amounts))
    for _ in range(2):
        working = asyncio.create_task(applier.work_off())
        with pytest.raises(asyncio.CancelledError):
            await working
        await db.execute("UPDATE pipeline.backlog_lane SET lease_until = clock_timestamp()")
    row = await db.fetchrow("SELECT * FROM pipeline.backlog WHERE id = $1", str(killer))
    assert row["reason"] == "process died"


async def test_counting_what_waits_holds_no_worker_up(
    new_applier: NewApplier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bank, applier = await bank_with(new_applier, mode="deferred")
    counted = 0

    async def take_long(connection: asyncpg.Connection, most: int, idle: float) -> list[Waiting]:
        nonlocal counted
        counted += 1
        await connection.execute("SELECT pg_sleep(600)")
        return []

    monkeypatch.setattr(lanes, "waiting", take_long)
    monkeypatch.setattr(measuring, "_COUNT_SECONDS", 0.2)
    monkeypatch.setattr(measuring, "_SAMPLE_SECONDS", 0.1)
    working = asyncio.create_task(applier.lanes.run())
    try:
        await eventually(lambda: counted > 0)
        await applier.apply(Deposit(1))
        await eventually(lambda: bank.calls == [1])
        assert applier.health.reasons.get("backlog") is None
        await eventually(lambda: "its metrics keep their last values" in caplog.text)
    finally:
        applier.lanes.stop()
        await working


async def test_one_process_counts_what_waits_and_all_report_its_count(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, applier = await bank_with(new_applier, mode="deferred")
    await applier.apply(Deposit(1), Deposit(2, account="bob"))
    counted, count = 0, lanes.waiting

    async def counting(connection: asyncpg.Connection, most: int, idle: float) -> list[Waiting]:
        nonlocal counted
        counted += 1
        return await count(connection, most, idle)

    monkeypatch.setattr(lanes, "waiting", counting)
    monkeypatch.setattr(measuring, "_SAMPLE_SECONDS", 3_600.0)
    first, *others = [await measuring._counted(db) for _ in range(5)]
    assert [(one.consumer, one.waiting, one.dead) for one in first] == [("deposit", 2, 0)]
    assert others == [first] * 4
    assert counted == 1
    for passed in ("-2 h", "2 h"):  # or the clock was ahead when it was made
        later = "UPDATE pipeline.backlog_count SET counted_at = clock_timestamp() + $1::interval"
        await db.execute(later.replace("$1", f"'{passed}'"))
        await measuring._counted(db)
    assert counted == 3


async def test_the_delay_of_a_topic_without_waiting_messages_is_zero(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, applier = await bank_with(new_applier, mode="deferred")
    observed: dict[str, float] = {}

    def observe(
        consumer: str, waiting: int, dead: int, oldest: Mapping[str, float], *, has_calls: bool
    ) -> None:
        observed.clear()
        observed.update(oldest)

    monkeypatch.setattr(metrics, "observe_backlog", observe)
    monkeypatch.setattr(measuring, "_SAMPLE_SECONDS", 0.1)
    await applier.apply(Deposit(1), Deposit(2, account="bob"))
    await db.execute("UPDATE pipeline.backlog SET received_at = now() - interval '1 hour'")
    await db.execute(
        "UPDATE pipeline.backlog SET topic = 'other', received_at = now() - interval '2 hours'"
        ' WHERE "offset" % 2 = 1'
    )
    async with in_background(measuring.measure(applier.engine)):
        await eventually(lambda: observed.keys() == {bank.deposits, "other"})
        assert 3_500 < observed[bank.deposits] < 7_000 < observed["other"]
        await db.execute("DELETE FROM pipeline.backlog WHERE topic = 'other'")
        await eventually(lambda: observed["other"] == 0)
        assert observed[bank.deposits] > 3_500
        await db.execute("DELETE FROM pipeline.backlog")
        await eventually(lambda: observed == {bank.deposits: 0, "other": 0})


async def test_a_row_that_is_not_due_waits_behind_one_that_is_redriven(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, applier = await bank_with(new_applier, policy=Policy(attempts=1))
    bank.refused = {10}
    await applier.apply(Deposit(10))
    bank.errors = {20: Park("not before tomorrow", after=3_600)}
    await applier.apply(Deposit(20))
    bank.calls.clear()
    bank.refused = set()
    await redrive(applier)
    await applier.work_off()
    assert bank.calls == [10]


# Dead letters.


async def test_what_nobody_takes_any_more_stays_when_it_is_redriven(
    new_applier: NewApplier, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    bank, applier = await bank_with(new_applier)
    bank.handlers.topic(bank.deposits, demands_types=True)
    await applier.apply(Deposit(1, type="withdrawn"))
    other = Bank("payments", "balances", "bank")
    without = await new_applier(other.handlers, topic=other.deposits)
    await redrive(without)
    with caplog.at_level(logging.ERROR):
        await without.work_off()
    (row,) = await applier.backlog()
    assert row["reason"] == "no handler"
    assert row["died_at"] is not None
    assert "no handler" in caplog.text


async def test_a_process_of_an_older_release_leaves_unknown_messages_to_others(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, new = await bank_with(new_applier, mode="deferred")
    _, old = await bank_with(new_applier, mode="deferred")

    class Withdrawn(Deposited, type="withdrawn"):
        pass

    @bank.handlers.on(Withdrawn, topic=bank.deposits, consumer="deposit", mode="deferred")
    async def withdraw(event: Withdrawn, tx: Transaction) -> None:
        bank.calls.append(event.amount)

    await new.apply(Deposit(1, type="withdrawn"), Deposit(2))
    await old.work_off()
    assert told(await new.backlog()) == [(0, "no handler", 0), (1, "deferred", 0)]
    await new.make_due()
    await new.work_off()
    assert bank.calls == [1, 2]
    assert await new.backlog() == []


# What handlers raise.


@pytest.mark.parametrize("after", [float("nan"), float("inf"), -1.0, "soon"])
def test_a_schedule_is_made_of_seconds(after: float) -> None:
    with pytest.raises(ValueError, match="schedule"):
        Policy(schedule=(after,))


CENTURY = 100 * 365 * 86_400.0


@pytest.mark.parametrize(
    ("after", "taken"),
    [(float("nan"), None), (float("inf"), CENTURY), (9_999_999_999, CENTURY), (-1, 0.0), (30, 30)],
)
def test_a_delay_out_of_bounds_becomes_the_nearest_with_a_warning(
    after: float, taken: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in (Retry, Park):
        caplog.clear()
        assert kind("busy", after=after).after == taken
        told = [record.getMessage().partition(": ")[0] for record in caplog.records]
        expected = f"after={after!r} is not between 0 s and 100 years"
        assert told == ([] if after == taken else [expected])


def test_a_delay_is_a_number() -> None:
    with pytest.raises(ValueError, match="after is a number of seconds"):
        Retry("busy", after="soon")  # type: ignore[arg-type]


def test_what_a_death_does_is_one_of_two_things() -> None:
    with pytest.raises(ValueError, match="after_death"):
        Policy(after_death="halt")  # type: ignore[arg-type]


async def test_what_is_parked_does_not_die_of_attempts(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, applier = await bank_with(new_applier, policy=Policy(attempts=2, schedule=(30,)))
    bank.errors = {10: Park("not there")}
    await applier.apply(Deposit(10))
    await db.execute("UPDATE pipeline.backlog SET attempts = 3")  # of a policy with more of them
    await applier.make_due()
    await applier.work_off()
    assert told(await applier.backlog()) == [(0, "parked by its handler", 3)]


class Panic(BaseException):
    """What a library in another language raises."""


@pytest.mark.parametrize("error", [SystemExit(3), Panic("no Exception")])
async def test_whatever_a_handler_raises_is_its_own_failure(
    new_applier: NewApplier, db: asyncpg.Connection, error: BaseException
) -> None:
    bank, applier = await bank_with(new_applier)

    async def fail() -> None:
        raise error

    bank.waits = {3: fail}
    await applier.apply(Deposit(1, "bob"), Deposit(3), Deposit(2, "bob"))
    assert await histories(db) == {"bob": [1, 2]}
    (row,) = await applier.backlog()
    assert row["error"].startswith(type(error).__name__)


async def test_a_lock_that_a_handler_waits_for_spends_no_attempt(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank, applier = await bank_with(new_applier)

    @bank.handlers.on(Deposited, topic="transfers", consumer="ask")
    async def ask(event: Deposited, tx: Transaction) -> None:
        account = await tx.load_or_create(Account, event.account)
        account.balance += 1

    await applier.apply(Deposit(10))
    transfers = await new_applier(bank.handlers, topic="transfers", lock_timeout=0.5)
    async with db.transaction():
        await db.execute("SELECT FROM account FOR UPDATE")
        await transfers.apply(Deposit(20))  # it waits apart, so that its partition goes on
        await transfers.work_off()
        (row,) = await transfers.backlog()
        assert (row["attempts"], row["waited"] > 0) == (0, True)
    await transfers.make_due()
    await transfers.work_off()
    assert await transfers.backlog() == []


async def test_a_statement_timeout_of_the_role_is_an_outage(
    new_applier: NewApplier, db: asyncpg.Connection, database_url: str
) -> None:
    name = database_url.rsplit("/", 1)[1]
    await db.execute(f"ALTER DATABASE {name} SET statement_timeout = '200ms'")
    _, applier = await bank_with(new_applier)
    async with db.transaction():
        await db.execute("LOCK TABLE pipeline.inbox IN ACCESS EXCLUSIVE MODE")
        applying = asyncio.create_task(applier.apply(Deposit(10)))
        await eventually(lambda: len(applier.outages) > 1)
    await applying
    assert await applier.backlog() == []


# Processes.


async def test_a_clean_stop_while_suspects_are_tried_counts_no_attempt(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    for n in range(10):
        await Deposit(n, account=str(n)).send(producer, bank.deposits)
    await db.execute(
        "INSERT INTO pipeline.position (consumer_group, topic, partition, next_offset, starts)"
        " VALUES ($1, $2, 0, 0, 1)",
        bank.name,
        bank.deposits,
    )
    begun = asyncio.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.sleep(1.5)

    bank.waits = dict.fromkeys(range(10), wait)
    async with running(bank.service, unclean_starts=1, shutdown_grace=60):
        await asyncio.wait_for(begun.wait(), PATIENCE)
    assert await position_of(db, bank.deposits) == 10
    left = await db.fetch("SELECT reason, attempts FROM pipeline.backlog")
    assert {tuple(row) for row in left} == {("process died", 0)}
    bank.waits = {}
    async with running(bank.service, unclean_starts=1):
        await eventually(lambda: _is_applied(db, 10))
    assert await db.fetch("SELECT * FROM pipeline.backlog") == []


async def _is_applied(db: asyncpg.Connection, number: int) -> bool:
    return bool(await db.fetchval("SELECT count(*) = $1 FROM pipeline.inbox", number))


async def test_what_is_tried_alone_runs_while_nobody_else_does(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Whoever was under way when the process died would be suspected as well."""
    bank, applier = await bank_with(new_applier, policy=QUICK)
    bank.refused = {10}
    await applier.apply(Deposit(10))
    bank.refused = set()
    await db.execute("UPDATE pipeline.backlog SET reason = 'process died'")
    await applier.make_due()
    others: list[asyncio.Task[object]] = []

    async def meet() -> None:
        others.append(asyncio.create_task(applier.apply(Deposit(20, "bob"))))
        await asyncio.sleep(0.3)
        assert not others[0].done()

    bank.waits = {10: meet}
    await applier.work_off()
    await others[0]
    assert await histories(db) == {"ada": [10], "bob": [20]}


async def test_a_partition_on_which_processes_died_spends_no_attempt(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    """The one that killed them may have been another partition's."""
    bank = Bank(
        bank.deposits, bank.balances, bank.name, options={"policy": Policy(1, schedule=(0,))}
    )
    await Deposit(1).send(producer, bank.deposits)
    await db.execute(
        "INSERT INTO pipeline.position (consumer_group, topic, partition, next_offset, starts)"
        " VALUES ($1, $2, 0, 0, 9)",
        bank.name,
        bank.deposits,
    )
    async with running(bank.service):
        await eventually(lambda: bank.calls == [1])
        await eventually(position_reaches(db, bank.deposits, 1))
    assert await db.fetch("SELECT * FROM pipeline.backlog") == []
    assert await histories(db) == {"ada": [1]}


# What makes no sense.


async def test_a_service_does_not_read_its_own_dead_letters(
    bank: Bank, settings: Callable[..., Settings]
) -> None:
    with pytest.raises(Misconfigured, match="PIPELINE_DEAD_LETTER_TOPIC"):
        bank.service.check(settings(dead_letter_topic=bank.deposits))
    bank.service.check(settings(dead_letter_topic="another"))


async def test_types_are_demanded_of_topics_that_are_read(
    bank: Bank, settings: Callable[..., Settings]
) -> None:
    bank.handlers.topic("depsoits", demands_types=True)
    with pytest.raises(Misconfigured, match="depsoits"):
        bank.service.check(settings())


async def test_all_that_makes_no_sense_is_told_at_once(
    bank: Bank, settings: Callable[..., Settings]
) -> None:
    bank.handlers.topic("depsoits", demands_types=True)
    with pytest.raises(Misconfigured, match=r"(?s)PIPELINE_DEAD_LETTER_TOPIC.*depsoits"):
        bank.service.check(settings(dead_letter_topic=bank.deposits))
