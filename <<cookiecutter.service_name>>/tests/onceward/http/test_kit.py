"""The test kit of requests: `harness.receive` applies a request as the API does."""

from functools import partial

import pytest

from onceward import Reject, Service
from onceward.http import KeyReused, Unavailable
from onceward.http.testing import RequestHarness, harness  # noqa: F401 (a fixture)
from onceward.testing.databases import Migrate

from .cashier import CASHIER, cashier
from tests.contract.bank import Account, Base, Deposited
from tests.servers import databases
from tests.servers.databases import migrations_of_the_engine

BANK = cashier()


@pytest.fixture(scope="session")
def harness_service() -> Service:
    return BANK.service


@pytest.fixture(scope="session")
def harness_migrate() -> Migrate:
    return lambda url: databases.build(url, migrations_of_the_engine(), Base.metadata)


def deposit(amount: int) -> Deposited:
    return Deposited(account="ada", amount=amount)


async def test_a_request_is_answered_and_a_repeat_gets_the_stored_answer(
    harness: RequestHarness,  # noqa: F811
) -> None:
    receive = partial(harness.receive, consumer=CASHIER)
    first = await receive(deposit(5), key="1")
    assert first.answer == {"account": "ada", "balance": 5}
    assert (first.applied, first.results) == ([CASHIER], [first.answer])
    (published,) = first.records
    assert (published.key, published.sequence) == ("ada", 1)
    assert [one.name for one in first.metrics if one.name == "pipeline.messages"]

    again = await receive(deposit(5), key="1")
    assert again.is_duplicate
    assert (again.answer, again.records, again.results) == (first.answer, [], [])
    assert not (await receive(deposit(5), key="2")).is_duplicate
    assert not (await receive(deposit(5), key="1", scope="bob")).is_duplicate
    assert (await harness.get(Account, "ada")).history == "5,5,5,"
    assert len(await harness.records()) == 3


async def test_a_request_that_fails_raises_its_error_and_stores_nothing(
    harness: RequestHarness,  # noqa: F811
) -> None:
    receive = partial(harness.receive, consumer=CASHIER, key="1")
    with pytest.raises(Reject, match="0 is no deposit"):
        await receive(deposit(0))
    with pytest.raises(TypeError, match="no handler of 'other' answers requests"):
        await harness.receive(deposit(1), consumer="other")
    await receive(deposit(5))
    with pytest.raises(KeyReused, match="a key of its own"):
        await receive(deposit(6))
    assert await harness.dead_letters() == []
    assert (await harness.get(Account, "ada")).history == "5,"


async def test_a_request_and_a_message_change_one_row(
    harness: RequestHarness,  # noqa: F811
) -> None:
    await harness.receive(deposit(5), consumer=CASHIER)
    outcome = await harness.handle(deposit(6))
    assert [one.sequence for one in outcome.records] == [2]


async def test_a_request_takes_effect_once_wherever_the_process_dies(
    harness: RequestHarness,  # noqa: F811
) -> None:
    crashes = 0
    async for crash in harness.each_crash():
        crashes += 1
        outcome = await harness.receive(deposit(5), consumer=CASHIER)
        assert outcome.answer == {"account": "ada", "balance": 5}, crash
        assert (await harness.get(Account, "ada")).history == "5,", crash
        assert len(await harness.records()) == 1, crash
    assert crashes > 8


async def test_another_process_begins_when_the_sessions_of_the_dead_one_have_ended(
    harness: RequestHarness,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    databases.end_sessions_late(monkeypatch, 0.1)
    async for crash in harness.each_crash():
        outcome = await harness.receive(deposit(5), consumer=CASHIER)
        assert outcome.answer == {"account": "ada", "balance": 5}, crash
        assert (await harness.get(Account, "ada")).history == "5,", crash


async def test_the_answer_of_a_server_away_is_the_error(
    harness: RequestHarness,  # noqa: F811
) -> None:
    async def cut_off() -> None:
        raise ConnectionError("no route")

    BANK.waits[7] = cut_off
    with pytest.raises(Unavailable):
        await harness.receive(deposit(7), consumer=CASHIER, seconds=0.3)
    del BANK.waits[7]
