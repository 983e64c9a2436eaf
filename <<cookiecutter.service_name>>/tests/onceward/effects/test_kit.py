"""The test kit makes calls by stand-ins, and never the real ones."""

import pytest
import sqlalchemy as sa

from onceward import Event, Handlers, Policy, Reject, Service, Transaction
from onceward.effects import Call, Effects, EffectWorkers
from onceward.testing import Harness, HarnessMisused
from onceward.testing.databases import Migrate

from tests.contract.bank import Account, Base, Deposited
from tests.servers import databases
from tests.servers.databases import migrations_of_the_engine

pytestmark = pytest.mark.integration


class Noticed(Event, type="kit.noticed"):
    """What a customer is to be notified of."""

    account: str
    amount: int


class Confirmed(Event, type="kit.confirmed", topic="confirmations"):
    """The customer was notified."""

    account: str
    answer: str


handlers = Handlers()
effects = Effects(handlers)


@handlers.on(Deposited, topic="deposits", consumer="book", loads=Account.by("account"))
async def book(event: Deposited, tx: Transaction) -> None:
    account = await tx.load_or_create(Account, event.account)
    tx.call(Noticed(account=account.id, amount=event.amount), of=account)


async def confirm(event: Noticed, tx: Transaction, answer: str) -> None:
    tx.publish(Confirmed(account=event.account, answer=answer))


@effects.on(Noticed, consumer="notify", per_second=50, then=confirm, policy=Policy(schedule=(60,)))
async def notify(event: Noticed, call: Call) -> str:
    pytest.fail("a test has made the real call")


@pytest.fixture(scope="session")
def harness_service() -> Service:
    return Service("bank", handlers, Base.metadata, workers=[EffectWorkers])


@pytest.fixture(scope="session")
def harness_migrate() -> Migrate:
    return lambda url: databases.build(url, migrations_of_the_engine(), Base.metadata)


async def test_calls_are_staged_and_made_by_their_stand_in(harness: Harness) -> None:
    outcome = await harness.handle(Deposited(account="ada", amount=5))
    await harness.handle(Deposited(account="ada", amount=6))
    assert outcome.calls == [Noticed(account="ada", amount=5)]
    calls: list[tuple[int, int]] = []

    async def stand_in(event: Noticed, call: Call) -> str:
        calls.append((event.amount, call.attempt))
        return f"told {event.amount}"

    made = await harness.run_calls({"notify": stand_in})
    assert calls == [(5, 1), (6, 1)]
    assert made.applied == ["notify", "notify"]
    assert made.results == ["told 5", "told 6"]
    assert made.published == [
        Confirmed(account="ada", answer="told 5"),
        Confirmed(account="ada", answer="told 6"),
    ]
    assert (await harness.run_calls()).applied == []


async def test_a_stand_in_need_not_be_a_coroutine_function(harness: Harness) -> None:
    await harness.handle(Deposited(account="ada", amount=5))
    made = await harness.run_calls({"notify": lambda event, call: f"told {event.amount}"})
    assert made.results == ["told 5"]


async def test_a_call_that_fails_is_made_again_when_it_is_due(harness: Harness) -> None:
    await harness.handle(Deposited(account="ada", amount=5))
    ids = []

    async def fails_once(event: Noticed, call: Call) -> str:
        ids.append(call.id)
        if call.attempt == 1:
            raise ConnectionError("cut off")
        return "told"

    (failure,) = (await harness.run_calls({"notify": fails_once})).failures
    assert (failure.consumer, failure.error) == ("notify", "ConnectionError: cut off")
    assert (failure.decision, failure.attempts) == ("parked", 1)
    assert failure.due_in == pytest.approx(60, rel=0.1)
    assert (await harness.run_calls()).applied == []
    assert (await harness.advance(minutes=2)).applied == []
    assert (await harness.run_calls({"notify": fails_once})).applied == ["notify"]
    assert len(ids) == 2
    assert len(set(ids)) == 1


async def test_a_call_is_repeated_with_its_id_after_a_process_death(
    harness: Harness,
) -> None:
    times = set()
    async for crash in harness.each_crash():
        ids: list[str] = []

        async def stand_in(event: Noticed, call: Call, ids: list[str] = ids) -> str:
            ids.append(call.id)
            return "told"

        await harness.handle(Deposited(account="ada", amount=5))
        await harness.run_calls({"notify": stand_in})
        await harness.advance(minutes=5)
        await harness.run_calls({"notify": stand_in})
        assert len(set(ids)) == 1, crash
        async with harness.session() as session:
            found = await session.scalars(sa.text("SELECT type FROM pipeline.outbox"))
            assert [*found] == ["kit.confirmed"], crash
        times.add(len(ids))
    # The second time, it has died between the call and the commit of its result.
    assert times == {1, 2}


async def test_a_dead_call_is_redriven(harness: Harness) -> None:
    await harness.handle(Deposited(account="ada", amount=5))

    async def rejects(event: Noticed, call: Call) -> str:
        raise Reject("unknown customer")

    (failure,) = (await harness.run_calls({"notify": rejects})).failures
    assert (failure.decision, failure.reason) == ("dead", "rejected")
    (letter,) = await harness.dead_letters()
    assert letter.consumer == "notify"
    assert (await harness.redrive()).applied == []
    with pytest.raises(HarnessMisused, match=r"run_calls\(\{'notify': function\}\)"):
        await harness.run_calls()
    with pytest.raises(HarnessMisused, match="Noticed is a call to the outside: handle an event"):
        await harness.handle(Noticed(account="ada", amount=5))
    with pytest.raises(HarnessMisused, match="'book' is no effect; effects: notify"):
        await harness.run_calls({"book": rejects})
