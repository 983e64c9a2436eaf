"""Effects: calls to the outside, made after the commit, tried again in order, never lost."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import sleep
from typing import Any

import asyncpg
import pytest
from sqlalchemy import make_url

from onceward import Event, Handlers, Park, Policy, Reject, Retry, Transaction
from onceward.apply import backlog
from onceward.apply.item import Item, _digest
from onceward.cli.dead import Selection
from onceward.cli.dead_letters import DeadLetters
from onceward.effects import Call, Effects
from onceward.handlers.policy import UNKNOWN
from onceward.handlers.staging import CALLS
from onceward.observe.watchdog import calls_ignoring_cancellation
from onceward.operators import adopting, stopping
from onceward.operators.audit import Change
from onceward.operators.stopping import Subject
from onceward.retry.lanes import Lease
from onceward.runtime import _run_until
from onceward.servers.database import autocommitting

from .applier import TOPIC, Applier, NewApplier, Outside, Received, applier_of
from tests.contract.bank import Account, Deposit, Deposited, histories
from tests.onceward.integration.applier import store_of
from tests.onceward.integration.test_backlog import HOLDING, told
from tests.servers.proxy import proxy
from tests.servers.waiting import PATIENCE, eventually


class Answer(Event, type="answer", topic="answers"):
    """What the outside has answered."""

    text: str


async def test_the_call_is_made_after_the_commit_and_its_result_is_kept(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    outside, applier = await applier_of(new_calling_applier)
    await applier.apply(Deposit(1), Deposit(2, "bob"))
    assert outside.calls == []
    assert await histories(db) == {"ada": [1], "bob": [2]}
    await applier.call()
    assert sorted(outside.calls) == [1, 2]
    assert await applier.backlog() == []
    kept = await db.fetch("SELECT result, id, source FROM pipeline.inbox WHERE consumer = 'tell'")
    assert {row["result"] for row in kept} == {'"told ada"', '"told bob"'}
    assert {row["id"] for row in kept} == {id for id, _ in outside.ids}
    assert {row["source"] for row in kept} == {"/applier"}


async def test_a_transaction_that_is_rolled_back_calls_nobody(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    outside, applier = await applier_of(new_calling_applier)
    outside.refused = {1}
    await applier.apply(Deposit(1), Deposit(2))
    await applier.call()
    assert outside.calls == [2]


async def test_a_redelivered_message_calls_nobody_again(new_calling_applier: NewApplier) -> None:
    outside, applier = await applier_of(new_calling_applier)
    for _ in range(2):
        await applier.apply(Deposit(1))
        await applier.call()
    assert outside.calls == [1]


async def test_calls_of_a_key_run_in_order_and_other_keys_concurrently(
    new_calling_applier: NewApplier,
) -> None:
    outside, applier = await applier_of(new_calling_applier)
    release = asyncio.Event()
    outside.waits = {1: release.wait}
    await applier.apply(Deposit(1), Deposit(2), Deposit(3), Deposit(10, "bob"))
    calling = asyncio.create_task(_until_done(applier))
    await eventually(lambda: outside.calls == [1, 10] or outside.calls == [10, 1])
    release.set()
    await calling
    assert [amount for amount in outside.calls if amount < 10] == [1, 2, 3]


async def _until_done(applier: Applier) -> None:
    """Let several workers make the calls, as a process does."""

    async def work() -> None:
        while await applier.backlog():
            if not await applier.caller.work_off():
                await asyncio.sleep(0.01)

    await asyncio.gather(work(), work(), work())


def of_one_lane(count: int, *consumers: str) -> list[str]:
    """Return accounts whose calls are all in the same lane, whoever's they are."""

    def lane(consumer: str, account: str) -> int:
        key = _digest(consumer, CALLS, b"+" + account.encode())
        return backlog.lane_of(key, "call")

    found = (f"of {number}" for number in itertools.count())
    alike = (one for one in found if {lane(name, one) for name in consumers} == {64})
    return list(itertools.islice(alike, count))


async def test_many_calls_of_a_lane_are_under_way_at_once(new_calling_applier: NewApplier) -> None:
    outside, applier = await applier_of(new_calling_applier)
    together = asyncio.Barrier(5)
    outside.waits = dict.fromkeys(range(5), together.wait)
    accounts = of_one_lane(5, "tell")
    await applier.apply(*(Deposit(number, account) for number, account in enumerate(accounts)))
    await applier.call()
    assert sorted(outside.calls) == [0, 1, 2, 3, 4]
    assert await applier.backlog() == []


async def test_an_internal_error_in_one_call_keeps_the_results_of_others(
    new_calling_applier: NewApplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, applier = await applier_of(new_calling_applier)
    failing, well = of_one_lane(2, "tell")
    call, has_ended = applier.caller._call, asyncio.Event()

    async def call_or_fail(lease: Lease, item: Item, **noted: Any) -> object:
        if item.record.key == failing.encode():
            await has_ended.wait()
            raise RuntimeError("of the engine")
        called = await call(lease, item, **noted)
        has_ended.set()
        return called

    monkeypatch.setattr(applier.caller, "_call", call_or_fail)
    await applier.apply(Deposit(1, failing), Deposit(2, well))
    with pytest.raises(RuntimeError, match="of the engine"):
        await applier.caller.work_off()
    assert outside.calls == [2]
    assert len(await applier.backlog()) == 1, "the other one is done"


async def test_new_calls_are_made_while_other_keys_of_the_lane_hang(
    new_calling_applier: NewApplier,
) -> None:
    """Promise 4."""
    outside, applier = await applier_of(new_calling_applier)
    release = asyncio.Event()
    outside.waits = dict.fromkeys(range(10), release.wait)
    hanging, *others = of_one_lane(10, "tell")
    # More of one key than is read at once.
    await applier.apply(*(Deposit(number, hanging) for number in [0, *range(100, 200)]))
    calling = asyncio.create_task(applier.call())
    await eventually(lambda: outside.calls == [0])
    await applier.apply(*(Deposit(20 + place, one) for place, one in enumerate(others)))
    await eventually(lambda: sorted(outside.calls) == [0, *range(20, 29)])
    release.set()
    await calling
    assert outside.calls[10:] == list(range(100, 200))


async def test_a_rate_limited_effect_does_not_delay_others_of_its_lane(
    new_calling_applier: NewApplier,
) -> None:
    """Promise 4."""
    outside, applier = await applier_of(new_calling_applier, per_second=0.001)
    others: list[int] = []

    @outside.effects.on(Received, consumer="note")
    async def note(event: Received, call: Call) -> None:
        others.append(event.amount)

    applier = await new_calling_applier(outside.handlers, topic=TOPIC)
    accounts = of_one_lane(20, "tell", "note")
    await applier.apply(*(Deposit(number, account) for number, account in enumerate(accounts)))
    await applier.call()
    assert sorted(others) == list(range(20))
    assert len(outside.calls) == 1


async def test_effects_whose_calls_take_long_leave_a_place_for_others(
    new_calling_applier: NewApplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 4."""
    outside, _ = await applier_of(new_calling_applier)
    slow: list[int] = []
    quick: list[int] = []
    answered = asyncio.Event()

    @outside.effects.on(Received, consumer="ring", timeout=PATIENCE)
    async def ring(event: Received, call: Call) -> None:
        slow.append(event.amount)
        await answered.wait()

    @outside.effects.on(Received, consumer="note")
    async def note(event: Received, call: Call) -> None:
        quick.append(event.amount)

    monkeypatch.setenv("PIPELINE_EFFECT_CALLS", "6")
    applier = await new_calling_applier(outside.handlers, topic=TOPIC)
    outside.waits = dict.fromkeys(range(20), answered.wait)
    await applier.apply(*(Deposit(number, f"of {number}") for number in range(20)))
    calling = asyncio.create_task(applier.caller.run())
    await eventually(lambda: len(quick) == 20 and bool(outside.calls and slow))
    assert len(outside.calls) + len(slow) <= 5
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)


async def test_a_failed_call_is_repeated_with_its_key_before_its_successors(
    new_calling_applier: NewApplier,
) -> None:
    outside, applier = await applier_of(new_calling_applier, policy=Policy())
    outside.errors = {1: OSError("no route")}
    await applier.apply(Deposit(1), Deposit(2))
    await applier.call()
    assert outside.calls == [1]
    first, second = await applier.backlog()
    assert told([first, second]) == [
        (first["offset"], "failed", 1),
        (second["offset"], "deferred", 0),
    ]
    assert first["error"] == "OSError: no route"
    outside.errors = {}
    await applier.make_due()
    await applier.call()
    assert outside.calls == [1, 1, 2]
    assert outside.ids[0][0] == outside.ids[1][0] != outside.ids[2][0]
    assert [attempt for _, attempt in outside.ids] == [1, 2, 1]


async def test_a_call_whose_attempts_are_used_up_is_a_dead_letter(
    new_calling_applier: NewApplier,
) -> None:
    outside, applier = await applier_of(
        new_calling_applier, policy=Policy(attempts=2, schedule=(0,))
    )
    outside.errors = {1: ValueError("no")}
    await applier.apply(Deposit(1), Deposit(2))
    await _until_called(applier, outside, 3)
    (row,) = await applier.backlog()
    assert (row["reason"], row["attempts"], row["consumer"]) == ("attempts used up", 2, "tell")
    assert row["died_at"] is not None
    assert outside.calls == [1, 1, 2]


async def _until_called(applier: Applier, outside: Outside, times: int) -> None:
    async def called() -> bool:
        await applier.call()
        return len(outside.calls) >= times

    await eventually(called)
    await applier.call()


async def test_what_an_effect_rejects_or_puts_off_is_that(new_calling_applier: NewApplier) -> None:
    outside, applier = await applier_of(new_calling_applier, policy=HOLDING)
    outside.errors = {1: Reject("never"), 10: Park(after=3_600)}
    await applier.apply(Deposit(1), Deposit(2), Deposit(10, "bob"))
    await applier.call()
    reasons = {
        row["record_key"]: row["reason"] for row in await applier.backlog() if row["attempts"]
    }
    assert reasons == {b"ada": "rejected"}
    assert sorted(outside.calls) == [1, 10]
    assert "parked by its handler" in {row["reason"] for row in await applier.backlog()}


async def test_a_call_that_takes_too_long_is_ended_and_made_again(
    new_calling_applier: NewApplier,
) -> None:
    outside, applier = await applier_of(new_calling_applier, timeout=0.2, policy=Policy())
    outside.waits = {1: asyncio.Event().wait}
    await applier.apply(Deposit(1), Deposit(2, "bob"))
    await applier.call()
    (row,) = await applier.backlog()
    assert row["error"] == "TimeoutError: tell takes longer than 0.2 s"
    assert outside.under_way == 0
    assert sorted(outside.calls) == [1, 2]


async def test_a_call_that_ignores_its_cancellation_is_found(
    new_calling_applier: NewApplier,
) -> None:
    outside, applier = await applier_of(new_calling_applier, timeout=0.1)
    release = asyncio.Event()

    async def ignore() -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    outside.waits = {1: ignore}
    await applier.apply(Deposit(1))
    calling = asyncio.create_task(applier.call())
    await eventually(lambda: calls_ignoring_cancellation(0.1) != [])
    [(_, name)] = calls_ignoring_cancellation(0.1)
    assert name.startswith("tell: ")
    release.set()
    await calling


async def test_a_call_may_take_longer_than_the_lease_of_its_lane(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    outside, applier = await applier_of(new_calling_applier)
    outside.waits = {1: lambda: _renewed(db)}
    await applier.apply(Deposit(1))
    # The lease is to be renewed several times within it.
    applier.caller._settings = applier.caller._settings.model_copy(update={"backlog_lease": 0.3})
    await applier.call()
    assert outside.calls == [1]
    assert await applier.backlog() == []


async def _renewed(db: asyncpg.Connection) -> None:
    """Wait until the lease ends later, three times."""
    seen = set()

    async def look() -> bool:
        seen.add(
            await db.fetchval(
                "SELECT lease_until FROM pipeline.backlog_lane WHERE owner IS NOT NULL"
            )
        )
        return len(seen) > 3

    await eventually(look)


async def test_after_losing_a_lane_nothing_is_stored_and_calls_are_repeated(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """The outside answers twice; what it has to go by is the key."""
    outside, applier = await applier_of(new_calling_applier)
    other = await new_calling_applier(outside.handlers, topic=TOPIC)
    release = asyncio.Event()
    outside.waits = {1: release.wait}
    await applier.apply(Deposit(1))
    slow = asyncio.create_task(applier.call())
    await eventually(lambda: outside.calls == [1])
    await db.execute("UPDATE pipeline.backlog_lane SET lease_until = now() WHERE owner IS NOT NULL")
    outside.waits = {}
    await other.call()
    assert outside.calls == [1, 1]
    assert await applier.backlog() == []
    release.set()
    await slow
    assert outside.ids[0][0] == outside.ids[1][0]
    markers = "SELECT count(*) FROM pipeline.inbox WHERE consumer = 'tell'"
    assert await db.fetchval(markers) == 1


async def test_an_error_from_another_database_is_not_treated_as_an_outage(
    new_calling_applier: NewApplier,
) -> None:
    outside, applier = await applier_of(new_calling_applier, policy=Policy())
    outside.errors = {1: asyncpg.ConnectionDoesNotExistError("of the other one")}
    await applier.apply(Deposit(1))
    await applier.call()
    (row,) = await applier.backlog()
    assert row["error"].startswith("CallFailed: ConnectionDoesNotExistError: of the other one")
    assert outside.calls == [1]


async def broken_down(new_calling_applier: NewApplier, **options: Any) -> tuple[Outside, Applier]:
    """Return an outside that does nothing, and an applier that has tried it with 100 calls."""
    outside = Outside({"policy": Policy(), **options})
    applier = await new_calling_applier(outside.handlers, topic=TOPIC, retry_pause=3_600)
    outside.errors = {number: OSError("down") for number in range(100)}
    await applier.apply(*(Deposit(number, f"of {number}") for number in range(100)))
    await applier.call()
    assert applier.caller._breaker.open == {"tell"}
    return outside, applier


async def test_an_outage_of_the_outside_spends_no_attempts_of_many(
    new_calling_applier: NewApplier,
) -> None:
    """Promise 5, for the outside: the breaker opens, and closes when it answers again."""
    outside, applier = await broken_down(new_calling_applier)
    rows = await applier.backlog()
    assert len(rows) == 100
    assert sum(row["attempts"] for row in rows) < 20, "so many keys open it"
    before = len(outside.calls)
    applier.let_probe("tell")
    await applier.call()
    assert len(outside.calls) == before + 1, "one of them probes"
    outside.errors = {}
    applier.let_probe("tell")

    async def all_is_called() -> bool:
        await applier.make_due()
        await applier.call()
        return await applier.backlog() == []

    await eventually(all_is_called)


async def test_an_outage_of_the_called_service_ends_for_nonrepeatable_calls_too(
    new_calling_applier: NewApplier,
) -> None:
    outside, applier = await broken_down(new_calling_applier, repeatable=False)
    outside.errors = {}
    applier.let_probe("tell")

    async def all_is_called() -> bool:
        await applier.make_due()
        await applier.call()
        return all(row["died_at"] for row in await applier.backlog())

    await eventually(all_is_called)
    dead = await applier.backlog()
    assert {(row["reason"], row["error"]) for row in dead} == {(UNKNOWN, "OSError: down")}
    assert len(outside.calls) == len(set(outside.calls)) == 100, "none twice"
    assert len(dead) < 70, "those that were under way when it opened"


async def test_to_ask_in_vain_spends_no_attempt_while_the_breaker_is_open(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    async def ask(event: Received, call: Call) -> bool:
        raise OSError("down")

    _, applier = await broken_down(new_calling_applier, repeatable=False, ask=ask)
    # Those that may have happened are left: each probe asks for one of them.
    await db.execute("DELETE FROM pipeline.backlog WHERE reason <> $1", UNKNOWN)
    for _ in range(20):
        await applier.make_due()
        applier.let_probe("tell")
        await applier.call()
    rows = await applier.backlog()
    assert {(row["attempts"], row["died_at"]) for row in rows} == {(1, None)}


async def test_a_repeatedly_failed_call_waits_as_long_as_the_first_time(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    async def ask(event: Received, call: Call) -> bool:
        return False

    outside, applier = await broken_down(new_calling_applier, repeatable=False, ask=ask)
    await db.execute(
        "DELETE FROM pipeline.backlog"
        " WHERE key <> (SELECT key FROM pipeline.backlog WHERE reason = $1 LIMIT 1)",
        UNKNOWN,
    )
    outside.errors = {number: OSError("down again") for number in range(100)}
    await applier.make_due()
    applier.let_probe("tell")
    await applier.call()
    (row,) = await applier.backlog()
    assert (row["reason"], row["attempts"], row["error"]) == (UNKNOWN, 2, "OSError: down again")
    assert await db.fetchval("SELECT min(due_at) - now() > '20 s' FROM pipeline.backlog")


async def test_what_comes_after_a_call_is_done_in_a_transaction(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    failures = [ValueError("not yet")]

    async def then(event: Received, tx: Transaction, result: str) -> None:
        if failures:
            raise failures.pop()
        account = await tx.load_or_create(Account, event.account)
        account.balance += event.amount
        tx.publish(Answer(text=result), of=account)

    outside, applier = await applier_of(new_calling_applier, then=then, loads=Account.by("account"))
    await applier.apply(Deposit(1))
    await _until_called(applier, outside, 2)
    assert [attempt for _, attempt in outside.ids] == [1, 2]
    assert await db.fetchval("SELECT balance FROM account") == 1
    payload = b'{"text":"told ada"}'
    assert await db.fetchval("SELECT payload FROM pipeline.outbox") == payload


async def test_no_more_calls_begin_in_a_second_than_allowed(
    new_calling_applier: NewApplier,
) -> None:
    outside, applier = await applier_of(new_calling_applier, per_second=10)
    loop = asyncio.get_running_loop()
    await applier.apply(*(Deposit(number, f"of {number}") for number in range(6)))
    begun = loop.time()

    async def all_are_called() -> bool:
        await applier.call()
        return len(outside.calls) == 6

    await eventually(all_are_called)
    # The first one at once, then one every tenth of a second.
    assert loop.time() - begun >= 0.45


async def begin_and_die(applier: Applier, outside: Outside, db: asyncpg.Connection) -> None:
    """Begin a call, and leave everything as a process does that is killed in it."""

    async def keep(lease: Lease) -> None:
        pass

    outside.waits = {1: asyncio.Event().wait}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(applier.caller, "_release", keep)
        dying = asyncio.create_task(applier.caller.work_off())
        await eventually(lambda: outside.calls == [1])
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
    outside.waits = {}
    await db.execute("UPDATE pipeline.backlog_lane SET lease_until = now() WHERE owner IS NOT NULL")
    await applier.make_due()


async def test_a_call_that_may_be_repeated_is_after_a_death(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    outside, applier = await applier_of(new_calling_applier)
    await applier.apply(Deposit(1), Deposit(2))
    await begin_and_die(applier, outside, db)
    await applier.call()
    assert outside.calls == [1, 1, 2]
    assert await applier.backlog() == []


async def test_a_nonrepeatable_call_becomes_a_dead_letter_after_a_process_death(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    outside, applier = await applier_of(new_calling_applier, repeatable=False)
    await applier.apply(Deposit(1), Deposit(2))
    await begin_and_die(applier, outside, db)
    await applier.call()
    assert outside.calls == [1, 2], "never blindly again"
    (row,) = await applier.backlog()
    assert (row["reason"], row["attempts"]) == (UNKNOWN, 1)
    assert row["died_at"] is not None
    assert "a process began with it (attempt 1) and died" in row["error"]


NOTES_FAIL = """
CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM noted WHERE key = '{}') THEN
        RAISE EXCEPTION 'invalid page' USING ERRCODE = 'XX001';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER fail AFTER UPDATE ON pipeline.backlog REFERENCING NEW TABLE AS noted
FOR EACH STATEMENT EXECUTE FUNCTION fail()
"""


async def test_calls_are_noted_together_or_not_at_all(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    outside, applier = await applier_of(new_calling_applier, repeatable=False)
    accounts = of_one_lane(5, "tell")
    await applier.apply(*(Deposit(number, account) for number, account in enumerate(accounts)))
    last = await db.fetchval("SELECT max(key::text) FROM pipeline.backlog")
    await db.execute(NOTES_FAIL.format(last))
    with pytest.raises(asyncpg.PostgresError, match="invalid page"):
        await applier.call()
    assert outside.calls == []
    assert {row["attempts"] for row in await applier.backlog()} == {0}


async def test_nobody_is_asked_while_the_call_may_still_be_under_way(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    async def ask(event: Received, call: Call) -> bool:
        return False

    outside, applier = await applier_of(new_calling_applier, repeatable=False, ask=ask, timeout=300)
    release = asyncio.Event()
    outside.waits = {1: release.wait}
    await applier.apply(Deposit(1))
    calling = asyncio.create_task(applier.call())
    await eventually(lambda: outside.calls == [1])
    due_in = "SELECT extract(epoch FROM due_at - clock_timestamp()) FROM pipeline.backlog"
    assert await db.fetchval(due_in) > 300
    release.set()
    await calling
    assert await applier.backlog() == []


async def test_a_call_that_was_asked_for_is_noted_like_the_first(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    async def ask(event: Received, call: Call) -> bool:
        return False

    outside, applier = await applier_of(new_calling_applier, repeatable=False, ask=ask, timeout=300)
    await applier.apply(Deposit(1))
    await begin_and_die(applier, outside, db)
    # In the lane of a worker that has died each is noted anyway.
    await db.execute(
        "UPDATE pipeline.backlog_lane SET starts = 0, owner = NULL, lease_until = NULL"
    )
    release = asyncio.Event()
    outside.waits = {1: release.wait}
    calling = asyncio.create_task(applier.call())
    await eventually(lambda: outside.calls == [1, 1])
    due_in = "SELECT extract(epoch FROM due_at - clock_timestamp()) FROM pipeline.backlog"
    assert await db.fetchval(due_in) > 300, "nobody asks while the second one is under way"
    release.set()
    await calling
    assert await applier.backlog() == []


async def stopped_after_the_note(applier: Applier, then: Callable[[], Awaitable[object]]) -> None:
    """Work a lane off, in a process that is stopped for longer than a lease before a call."""
    note, stops = applier.caller._note, [applier.caller._settings.backlog_lease + 0.1]

    async def note_and_be_stopped(*given: Any, **options: Any) -> set[bytes]:
        noted = await note(*given, **options)
        if stops:
            sleep(stops.pop())  # noqa: ASYNC251 (as the whole process is, by SIGSTOP)
            await then()
        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(applier.caller, "_note", note_and_be_stopped)
        await applier.caller.work_off()


SHORT = {"backlog_lease": 3.0, "transaction_timeout": 2.5, "lock_timeout": 2}


async def test_a_worker_stopped_between_recording_and_making_a_call_makes_none(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    async def ask(event: Received, call: Call) -> bool:
        return False

    outside = Outside({"repeatable": False, "ask": ask})
    applier = await new_calling_applier(outside.handlers, topic=TOPIC, **SHORT)
    await applier.apply(Deposit(1))
    lost = "UPDATE pipeline.backlog_lane SET token = token + 1"
    await stopped_after_the_note(applier, lambda: db.execute(lost))
    assert outside.calls == []
    (row,) = await applier.backlog()
    assert (row["reason"], row["attempts"]) == (UNKNOWN, 1), "as a process that died"
    await db.execute("UPDATE pipeline.backlog_lane SET owner = NULL, lease_until = NULL")
    await applier.make_due()
    await applier.call()
    assert outside.calls == [1], "who comes after it asks, and makes it"
    assert await applier.backlog() == []


async def test_who_was_stopped_and_still_has_the_lane_begins_the_call_anew(
    new_calling_applier: NewApplier,
) -> None:
    outside = Outside({"repeatable": False})
    applier = await new_calling_applier(outside.handlers, topic=TOPIC, **SHORT)
    await applier.apply(Deposit(1))
    await stopped_after_the_note(applier, lambda: asyncio.sleep(0))
    assert [attempt for _, attempt in outside.ids] == [1], "it spends no attempt"
    assert await applier.backlog() == []


@pytest.mark.parametrize("starts", [0, 1])
async def test_an_unknown_outcome_stays_one_when_nobody_can_read_it_any_more(
    new_calling_applier: NewApplier, db: asyncpg.Connection, starts: int
) -> None:
    async def ask(event: Received, call: Call) -> bool:
        raise AssertionError("there is no event to ask about")

    outside, applier = await applier_of(
        new_calling_applier, repeatable=False, ask=ask, policy=Policy()
    )
    await applier.apply(Deposit(1))
    await begin_and_die(applier, outside, db)
    await db.execute("UPDATE pipeline.backlog SET value = '{}'")
    await db.execute("UPDATE pipeline.backlog_lane SET starts = least(starts, $1)", starts)
    await applier.call()
    assert outside.calls == [1]
    (row,) = await applier.backlog()
    assert row["died_at"] is not None
    assert row["reason"] == UNKNOWN, "and none of those that are redriven with all others"


@pytest.mark.parametrize("happened", [True, False])
async def test_somebody_who_can_ask_is_asked_instead(
    new_calling_applier: NewApplier, db: asyncpg.Connection, happened: bool
) -> None:
    asked: list[str] = []

    async def ask(event: Received, call: Call) -> bool:
        asked.append(call.id)
        if len(asked) == 1:
            raise OSError("nobody answers")
        return happened

    outside, applier = await applier_of(
        new_calling_applier, repeatable=False, ask=ask, policy=Policy()
    )
    await applier.apply(Deposit(1))
    await begin_and_die(applier, outside, db)
    await applier.call()
    (row,) = await applier.backlog()
    assert row["reason"] == UNKNOWN, "to fail to ask tells nothing"
    await applier.make_due()
    await applier.call()
    assert asked == [outside.ids[0][0]] * 2
    assert outside.calls == ([1] if happened else [1, 1])
    assert await applier.backlog() == []
    assert await db.fetchval("SELECT count(*) FROM pipeline.inbox WHERE consumer = 'tell'") == 1


async def test_only_what_surely_did_not_take_place_is_called_again_by_itself(
    new_calling_applier: NewApplier,
) -> None:
    outside, applier = await applier_of(new_calling_applier, repeatable=False)
    outside.errors = {1: Retry("refused before anything", after=60), 2: OSError("lost")}
    await applier.apply(Deposit(1), Deposit(2, "bob"), Deposit(3, "eve"))
    await applier.call()
    outside.errors.pop(1)
    await applier.make_due()
    await applier.call()
    (row,) = await applier.backlog()
    assert (row["reason"], row["record_key"]) == (UNKNOWN, b"bob")
    assert row["error"] == "OSError: lost"
    assert sorted(outside.calls) == [1, 1, 2, 3]


async def test_a_call_since_the_backup_is_made_again_after_a_restore(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Only the database remembers a call, also one that is not `repeatable`."""
    outside, applier = await applier_of(new_calling_applier, repeatable=False)
    await applier.apply(Deposit(1))
    tables = ("pipeline.backlog", "pipeline.inbox")
    for number, table in enumerate(tables):
        await db.execute(f"CREATE TABLE backup_{number} AS TABLE {table}")
    await applier.call()
    assert await applier.backlog() == []
    async with db.transaction():
        for number, table in enumerate(tables):
            await db.execute(f"DELETE FROM {table}")
            await db.execute(f"INSERT INTO {table} SELECT * FROM backup_{number}")
    await applier.call()
    assert outside.calls == [1, 1]
    assert outside.ids[0][0] == outside.ids[1][0]


async def test_a_completed_call_is_not_repeated_when_its_follow_up_fails(
    new_calling_applier: NewApplier,
) -> None:
    async def then(event: Received, tx: Transaction, result: str) -> None:
        raise Retry("of what?")

    outside, applier = await applier_of(new_calling_applier, repeatable=False, then=then)
    await applier.apply(Deposit(1))
    await applier.call()
    (row,) = await applier.backlog()
    assert row["reason"] == UNKNOWN
    assert row["error"].startswith("OutcomeUnknown: it took place, but then: Retry: of what?")
    assert outside.calls == [1]


async def test_calls_without_a_key_do_not_wait_for_each_other(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    handlers, calls = Handlers(), []

    @handlers.on(Deposited, topic=TOPIC, consumer="deposit")
    async def deposit(event: Deposited, tx: Transaction) -> None:
        for number in range(event.amount):
            tx.call(Received(account="", amount=number))
        tx.call(Received(account="", amount=100), key="one")
        tx.call(Received(account="", amount=101), key="one")

    @Effects(handlers).on(Received, consumer="tell", policy=Policy())
    async def tell(event: Received, call: Call) -> None:
        calls.append(event.amount)
        if event.amount in (1, 100):
            raise ValueError("no")

    applier = await new_calling_applier(handlers, topic=TOPIC)
    await applier.apply(Deposit(3))
    await applier.call()
    assert sorted(calls) == [0, 1, 2, 100]
    assert [row["reason"] for row in await applier.backlog()] == ["failed", "failed", "deferred"]


async def test_a_process_that_knows_no_handler_leaves_an_unknown_outcome_unknown(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """As in the middle of a deployment."""
    outside, applier = await applier_of(new_calling_applier, repeatable=False)
    older = Handlers()

    class Forgotten(Event, type="forgotten"):
        pass

    @Effects(older).on(Forgotten, consumer="tell")
    async def tell(event: Forgotten, call: Call) -> None: ...

    await applier.apply(Deposit(1))
    await begin_and_die(applier, outside, db)
    await (await new_calling_applier(older, topic=TOPIC)).call()
    (row,) = await applier.backlog()
    assert row["reason"] == UNKNOWN
    await applier.make_due()
    await applier.call()
    assert outside.calls == [1]


async def test_calls_with_an_unknown_outcome_are_redriven_only_on_explicit_request(
    new_calling_applier: NewApplier,
) -> None:
    outside, applier = await applier_of(new_calling_applier, repeatable=False)
    outside.errors = {1: OSError("lost"), 2: Reject("no")}
    await applier.apply(Deposit(1), Deposit(2, "bob"))
    await applier.call()
    outside.errors = {}
    assert await redriven(applier, Selection()) == 1
    await applier.call()
    assert sorted(outside.calls) == [1, 2, 2]
    assert await redriven(applier, Selection(reasons=[UNKNOWN])) == 1
    await applier.call()
    assert sorted(outside.calls) == [1, 1, 2, 2]
    assert await applier.backlog() == []


async def redriven(applier: Applier, which: Selection) -> int:
    """Have dead letters tried again, and return how many they were."""
    async with autocommitting(applier.engine) as driver:
        store = store_of(DeadLetters, driver, applier.handlers, patience=5)
        by = Change("ann", "redrive")
        chunks = [one async for one in store.redrive(store.redrivable(which), by)]
    return sum(map(len, chunks))


async def test_a_persons_command_leaves_calls_alone_that_are_under_way(
    new_calling_applier: NewApplier,
) -> None:
    outside, applier = await applier_of(new_calling_applier, repeatable=False)
    release = asyncio.Event()
    outside.waits = {1: release.wait}
    outside.errors = {2: Reject("no")}
    first, second = of_one_lane(2, "tell")
    await applier.apply(Deposit(1, first), Deposit(2, second))
    calling = asyncio.create_task(applier.call())

    async def is_dead() -> bool:
        return any(row["died_at"] for row in await applier.backlog())

    await eventually(is_dead)
    outside.errors = {}
    assert await redriven(applier, Selection()) == 1
    release.set()
    await calling
    assert sorted(outside.calls) == [1, 2, 2]
    assert await applier.backlog() == []


async def test_what_nobody_takes_is_refused_where_it_is_staged(
    new_calling_applier: NewApplier,
) -> None:
    handlers = Handlers()

    @handlers.on(Deposited, topic=TOPIC, consumer="deposit", policy=Policy())
    async def deposit(event: Deposited, tx: Transaction) -> None:
        tx.call(Received(account="", amount=1))

    applier = await new_calling_applier(handlers, topic=TOPIC)
    await applier.apply(Deposit(1))
    (row,) = await applier.backlog()
    assert "no effect takes Received: register one by @effects.on(Received, …)" in row["error"]


async def test_nobody_is_called_from_a_copy_whose_connections_are_open_already(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    outside, applier = await applier_of(new_calling_applier, repeatable=False)
    await applier.apply(Deposit(1), Deposit(2, "bob"))
    await db.execute("UPDATE pipeline.outbox_cluster SET system_identifier = 1")
    await applier.call()
    assert outside.calls == []
    await adopting.adopt(db, keep_progress=True)
    await applier.call()
    assert sorted(outside.calls) == [1, 2]


_BEGUN = 20
"""Calls under way at a stop."""


async def run_calls(
    applier: Applier, outside: Outside, answered: asyncio.Event, *, seconds: float
) -> tuple[asyncio.Event, asyncio.Task[None]]:
    """Begin calls that wait for an answer; return what stops the workers, and their run."""
    outside.waits = dict.fromkeys(range(_BEGUN), answered.wait)
    await applier.apply(*(Deposit(number, f"of {number}") for number in range(_BEGUN)))
    stopping = asyncio.Event()
    running = asyncio.create_task(_run_until(stopping, (), [(seconds, [applier.caller])]))
    await eventually(lambda: len(outside.calls) == _BEGUN)
    return stopping, running


async def test_a_stop_while_postgresql_hangs_is_over_within_the_grace(
    new_calling_applier: NewApplier, database_url: str
) -> None:
    outside, hangs, answered = Outside(), asyncio.Event(), asyncio.Event()

    async def pass_until_it_hangs(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(65_536):
            if hangs.is_set():
                await asyncio.Event().wait()
            writer.write(data)

    url = make_url(database_url)
    assert url.host
    ways = (pass_until_it_hangs, pass_until_it_hangs)
    async with proxy(url.host, url.port or 5432, ways=lambda: ways) as port:
        through = url.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)
        applier = await new_calling_applier(
            outside.handlers, topic=TOPIC, database_url=through, shutdown_grace=5
        )
        stopping, running = await run_calls(applier, outside, answered, seconds=2.0)
        hangs.set()
        answered.set()
        stopping.set()
        # A time limit for each lane, one after the other, would be minutes.
        await asyncio.wait_for(running, 60)


async def test_a_stop_that_cuts_calls_off_counts_as_no_death(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    outside, never = Outside(), asyncio.Event()
    applier = await new_calling_applier(outside.handlers, topic=TOPIC, shutdown_grace=20)
    stopping, running = await run_calls(applier, outside, never, seconds=8.0)
    stopping.set()
    await running
    assert await db.fetchval("SELECT sum(starts) FROM pipeline.backlog_lane") == 0


async def test_calls_of_a_paused_effect_wait_and_those_under_way_are_settled(
    new_calling_applier: NewApplier,
) -> None:
    outside, applier = await applier_of(new_calling_applier)
    goes_on = asyncio.Event()
    outside.waits = dict.fromkeys(range(5), goes_on.wait)
    await applier.apply(*(Deposit(number, f"of {number}") for number in range(5)))
    calling = asyncio.create_task(applier.call())
    await eventually(lambda: outside.under_way > 0)
    applier.consume.throttles._rates = {("consumer", "tell"): 0.0}
    begun = len(outside.calls)
    await applier.apply(*(Deposit(number, f"of {number}") for number in range(5, 9)))
    goes_on.set()
    await asyncio.wait_for(calling, PATIENCE)
    await applier.call()
    assert len(outside.calls) == begun
    rows = await applier.backlog()
    assert len(rows) == 9 - begun, "what was called is settled"
    assert {(row["reason"], row["attempts"]) for row in rows} == {("deferred", 0)}
    applier.consume.throttles._rates = {}
    await applier.call()
    assert sorted(outside.calls) == [*range(9)]
    assert await applier.backlog() == []


async def one_of_three_that_may_kill(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> tuple[Outside, Applier, list[str], asyncio.Event, asyncio.Task[None]]:
    """Begin a call in the lane of a worker that has died, while two others wait to be made alone.

    Return their accounts as well, what the first waits for, and the task.
    """
    outside, applier = await applier_of(new_calling_applier)
    goes_on, accounts = asyncio.Event(), of_one_lane(3, "tell")
    outside.waits = dict.fromkeys(range(3), goes_on.wait)
    await applier.apply(*(Deposit(number, account) for number, account in enumerate(accounts)))
    await db.execute("UPDATE pipeline.backlog_lane SET starts = 1")
    calling = asyncio.create_task(applier.call())
    await eventually(lambda: len(applier.caller._alone._waiters or ()) == 2)
    await eventually(lambda: len(outside.calls) == 1)
    return outside, applier, accounts, goes_on, calling


async def test_pausing_an_effect_skips_its_calls_that_wait_to_run_alone(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    outside, applier, _, goes_on, calling = await one_of_three_that_may_kill(
        new_calling_applier, db
    )
    applier.consume.throttles._rates = {("consumer", "tell"): 0.0}
    goes_on.set()
    await asyncio.wait_for(calling, PATIENCE)
    assert len(outside.calls) == 1
    rows = await applier.backlog()
    assert [(row["reason"], row["attempts"]) for row in rows] == [("deferred", 0)] * 2
    applier.consume.throttles._rates = {}
    await applier.call()
    assert sorted(outside.calls) == [0, 1, 2]
    assert await applier.backlog() == []


async def test_pausing_a_key_skips_its_call_that_waits_to_run_alone(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    begun = await one_of_three_that_may_kill(new_calling_applier, db)
    outside, applier, accounts, goes_on, calling = begun
    paused, other = (number for number in range(3) if number not in outside.calls)
    key = [Subject("key", "tell", CALLS, accounts[paused].encode())]
    await stopping.ask(db, key, lasts=None, who="ada", why="a test")
    goes_on.set()
    await asyncio.wait_for(calling, PATIENCE)
    assert outside.calls[1:] == [other]
    (row,) = [row for row in await applier.backlog() if row["topic"] == CALLS]
    assert (row["reason"], row["attempts"]) == ("deferred", 0)
    assert await stopping.resume(db, key, who="ada", why=None)
    await applier.call()
    assert outside.calls[1:] == [other, paused]
    assert await applier.backlog() == []


async def test_a_key_is_paused_for_calls_too(
    new_calling_applier: NewApplier, db: asyncpg.Connection
) -> None:
    outside, applier = await applier_of(new_calling_applier)
    key = [Subject("key", "tell", CALLS, b"ada")]
    await stopping.ask(db, key, lasts=None, who="ada", why="a test")
    await applier.apply(*(Deposit(number, ("ada", "bob")[number % 2]) for number in range(6)))
    await applier.call()
    assert outside.calls == [1, 3, 5]
    assert await stopping.resume(db, key, who="ada", why=None)
    await applier.call()
    assert outside.calls == [1, 3, 5, 0, 2, 4]
    assert await applier.backlog() == []


async def test_calls_of_a_throttled_effect_are_begun_at_its_rate(
    new_calling_applier: NewApplier,
) -> None:
    outside, applier = await applier_of(new_calling_applier)
    await applier.apply(*(Deposit(number, f"of {number}") for number in range(10)))
    rates = applier.consume.throttles
    rates._engine = applier.engine
    rates._looked_at = float("inf")
    rates._rates = {("consumer", "tell"): 0.001}
    for begun in range(1, 4):
        await applier.call()
        # The database knows of no throttle, so that the process keeps the rate by itself.
        assert len(outside.calls) == begun
        rates._until = {}
    rates._rates = {}
    await applier.call()
    assert sorted(outside.calls) == [*range(10)]
