"""Payouts and the bank. A pattern for calls to a service that repeats what it gets twice."""

from collections.abc import AsyncIterator
from typing import Literal

import httpx2
import pytest
from pydantic import SecretStr

from pipeline.testing import Harness, Outcome

from <<cookiecutter.package_name>> import handlers
from <<cookiecutter.package_name>>.events import PayoutMade, PayoutRefused, Reason, RequestPayout

from .test_payments import BOOKS, balance, fund, ledger_is_balanced

PAYOUT = RequestPayout(payout_id="payout:1", merchant=BOOKS, bank_account="bank:de-1", amount=300)
MADE = PayoutMade(payout_id="payout:1", merchant=BOOKS, amount=300)


def refused(reason: Reason) -> PayoutRefused:
    return PayoutRefused(payout_id="payout:1", merchant=BOOKS, amount=300, reason=reason)


class Bank:
    """A bank in the place of the network. It makes each transfer that it gets."""

    def __init__(self) -> None:
        self.transfers: list[str] = []
        """References, in the order of the requests."""
        self.next: Literal["accept", "refuse", "lose the request", "lose the answer"] = "accept"

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        """Answer a request as `next` says, which is for one transfer."""
        if request.method == "GET":
            reference = request.url.params["reference"]
            return httpx2.Response(200, json=[one for one in self.transfers if one == reference])
        what, self.next = self.next, "accept"
        if what == "refuse":
            return httpx2.Response(422)
        if what != "lose the request":
            self.transfers.append("payout:1")
        if what != "accept":
            raise httpx2.ReadError("cut off", request=request)
        return httpx2.Response(201)


@pytest.fixture
async def bank(no_bank: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bank]:
    """Return the bank that the handlers call."""
    one = Bank()
    monkeypatch.setattr(handlers, "bank", SecretStr("https://bank.example.org"))
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(one.answer)) as client:
        monkeypatch.setattr(handlers, "client", client)
        yield one


async def call_bank(harness: Harness) -> Outcome:
    return await harness.run_calls({"pay-out": handlers.pay_out})


async def test_money_is_reserved_before_the_call_and_at_the_bank_after_it(
    harness: Harness, bank: Bank
) -> None:
    await fund(harness, BOOKS, 500)
    assert (await harness.handle(PAYOUT)).calls == [PAYOUT]
    assert await balance(harness, BOOKS) == 200
    assert await balance(harness, "payout:1") == 300
    assert (await call_bank(harness)).published == [MADE]
    assert bank.transfers == ["payout:1"]
    assert await balance(harness, "payout:1") == 0
    assert await balance(harness, "bank:de-1") == 300
    await ledger_is_balanced(harness)


@pytest.mark.parametrize("lost", ["lose the request", "lose the answer"])
async def test_without_an_answer_the_bank_is_asked_before_the_transfer_is_repeated(
    harness: Harness, bank: Bank, lost: Literal["lose the request", "lose the answer"]
) -> None:
    await fund(harness, BOOKS, 500)
    await harness.handle(PAYOUT)
    bank.next = lost
    (failure,) = (await call_bank(harness)).failures
    assert (failure.decision, failure.reason) == ("parked", "outcome unknown")
    await harness.advance(minutes=1)
    assert (await call_bank(harness)).published == [MADE]
    assert bank.transfers == ["payout:1"]
    await ledger_is_balanced(harness)


async def test_the_merchant_has_the_money_back_if_the_bank_refuses(
    harness: Harness, bank: Bank
) -> None:
    await fund(harness, BOOKS, 500)
    await harness.handle(PAYOUT)
    bank.next = "refuse"
    assert (await call_bank(harness)).published == [refused("refused by the bank")]
    assert await balance(harness, BOOKS) == 500
    await ledger_is_balanced(harness)


async def test_a_payout_is_refused_without_money_or_the_second_time(
    harness: Harness, bank: Bank
) -> None:
    await fund(harness, BOOKS, 500)
    much = PAYOUT.model_copy(update={"payout_id": "payout:2", "amount": 501})
    (event,) = (await harness.handle(much)).published
    assert isinstance(event, PayoutRefused)
    assert event.reason == "insufficient funds"
    await harness.handle(PAYOUT)
    again = await harness.handle(PAYOUT, id="again")
    assert again.published == [refused("already requested")]
    assert again.calls == []
    await ledger_is_balanced(harness)


async def test_a_payout_is_refused_without_a_bank(harness: Harness) -> None:
    await fund(harness, BOOKS, 500)
    assert (await harness.handle(PAYOUT)).published == [refused("no bank")]
    assert await balance(harness, BOOKS) == 500


async def test_a_payout_is_made_once_wherever_the_process_dies(
    harness: Harness, bank: Bank
) -> None:
    async for crash in harness.each_crash():
        bank.transfers.clear()
        await fund(harness, BOOKS, 500)
        await harness.handle(PAYOUT)
        await call_bank(harness)
        if await balance(harness, "payout:1") > 0:  # the bank is asked after a while
            await harness.advance(hours=1)
            await call_bank(harness)
        assert bank.transfers == ["payout:1"], crash
        assert await balance(harness, "bank:de-1") == 300, crash
        await ledger_is_balanced(harness)
