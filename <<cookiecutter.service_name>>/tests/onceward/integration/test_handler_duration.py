"""How long handlers take is told: the longest call of each transaction, by consumer and type."""

import asyncio

import pytest

from onceward import EventBatch, Handlers, Reject, Transaction
from onceward.observe import metrics

from .applier import Applier, NewApplier
from .bank import Bank
from tests.contract.bank import Account, Deposit, Deposited

TOPIC = "deposits"
SLOW = 0.05
"""Seconds that a slow call takes at least."""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[tuple[str, str], float]]:
    """Return what telemetry is told, without what is empty."""
    all_told: list[dict[tuple[str, str], float]] = []

    def handled(longest: dict[tuple[str, str], float]) -> None:
        if longest:
            all_told.append(dict(longest))

    monkeypatch.setattr(metrics, "handled", handled)
    return all_told


async def slowly() -> None:
    await asyncio.sleep(SLOW)


async def test_a_transaction_tells_its_longest_call_once(
    ledger: tuple[Bank, Applier], told: list[dict[tuple[str, str], float]]
) -> None:
    bank, applier = ledger
    bank.waits[2] = slowly
    await applier.apply(*(Deposit(amount) for amount in range(1, 20)))
    (longest,) = told
    assert set(longest) == {("deposit", "deposited")}
    assert longest["deposit", "deposited"] >= SLOW


async def test_a_call_that_fails_is_told_though_its_transaction_is_rolled_back(
    ledger: tuple[Bank, Applier], told: list[dict[tuple[str, str], float]]
) -> None:
    bank, applier = ledger
    bank.waits[1], bank.errors[1] = slowly, Reject("no")
    await applier.apply(Deposit(1))
    (longest,) = told
    assert longest["deposit", "deposited"] >= SLOW


async def test_a_transaction_that_calls_nobody_tells_nothing(
    ledger: tuple[Bank, Applier], told: list[dict[tuple[str, str], float]]
) -> None:
    _, applier = ledger
    await applier.apply(Deposit(1))
    told.clear()
    await applier.apply(Deposit(1))  # a duplicate
    assert told == []


async def test_two_consumers_are_told_apart_and_a_batch_is_one_call(
    new_applier: NewApplier, told: list[dict[tuple[str, str], float]]
) -> None:
    handlers = Handlers()

    @handlers.on_batch(Deposited, topic=TOPIC, consumer="sum")
    async def sum_up(events: EventBatch[Deposited]) -> None:
        await slowly()

    @handlers.on(Deposited, topic=TOPIC, consumer="open", loads=Account.by("account"))
    async def open_account(event: Deposited, tx: Transaction) -> None:
        await tx.load_or_create(Account, event.account)

    applier = await new_applier(handlers, topic=TOPIC)
    await applier.apply(Deposit(1), Deposit(2))
    (longest,) = told
    assert set(longest) == {("sum", "deposited"), ("open", "deposited")}
    assert longest["sum", "deposited"] >= SLOW
