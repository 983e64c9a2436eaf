"""Payouts and the bank. A pattern for calls that must not be made twice."""

from collections.abc import AsyncIterator
from typing import Literal

import httpx2
import pytest

from onceward import Event
from onceward.testing import Harness, Outcome

from <<cookiecutter.package_name>>.events import PayoutMade, PayoutRefused, Reason, RequestPayout
from <<cookiecutter.package_name>>.handlers import Bank, pay_out

from .test_payments import BOOKS, balance, fund, ledger_is_balanced, locked, rows

PAYOUT = RequestPayout(payout_id="payout:1", merchant=BOOKS, bank_account="bank:de-1", amount=300)
MADE = PayoutMade(payout_id="payout:1", merchant=BOOKS, amount=300)


def refused(reason: Reason) -> PayoutRefused:
    return PayoutRefused(payout_id="payout:1", merchant=BOOKS, amount=300, reason=reason)


What = Literal["accept", "refuse", "lose the request", "lose the answer", "delay the request"]


class FakeBank:
    """A bank in the place of the network. It makes the transfer of each key once."""

    def __init__(self) -> None:
        self.next: What = "accept"
        self.delayed: httpx2.Request | None = None
        self.forget()

    def forget(self) -> None:
        """Begin again."""
        self.requests = 0
        """Number of requests for a transfer."""
        self.transfers: list[str] = []
        """References, in the order of the requests."""
        self._status: dict[str, int] = {}
        """By key, so that a request that comes again is answered as it was."""

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        """Answer a request as `next` says, which is for one transfer."""
        if request.method == "GET":
            reference = request.url.params["reference"]
            return httpx2.Response(200, json=[one for one in self.transfers if one == reference])
        self.requests += 1
        what, self.next = self.next, "accept"
        if what == "delay the request":
            self.delayed = request
        elif what != "lose the request":
            answer = self.transfer(request, 422 if what == "refuse" else 201)
            if what != "lose the answer":
                return answer
        raise httpx2.ReadTimeout("no answer", request=request)

    def transfer(self, request: httpx2.Request, status: int = 201) -> httpx2.Response:
        """Make a transfer, or refuse it, unless its key is known."""
        key = request.headers["Idempotency-Key"]
        if key not in self._status:
            self._status[key] = status
            self.transfers += ["payout:1"] if status == 201 else []
        return httpx2.Response(self._status[key])


@pytest.fixture
async def bank(harness: Harness) -> AsyncIterator[FakeBank]:
    """Return the bank that the handlers call."""
    one = FakeBank()
    transport = httpx2.MockTransport(one.answer)
    async with httpx2.AsyncClient(transport=transport, base_url="https://bank") as client:
        harness.with_resources(bank=Bank(client))
        yield one


async def call_bank(harness: Harness) -> Outcome:
    return await harness.run_calls({"pay-out": pay_out})


async def test_money_is_reserved_before_the_call_and_at_the_bank_after_it(
    harness: Harness, bank: FakeBank
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


async def test_a_payout_ends_while_others_change_the_account_of_its_merchant(
    harness: Harness, bank: Bank
) -> None:
    await fund(harness, BOOKS, 500)
    await harness.handle(PAYOUT)
    async with locked(harness, BOOKS):
        assert (await call_bank(harness)).published == [MADE]


@pytest.mark.parametrize(("lost", "requests"), [("lose the request", 2), ("lose the answer", 1)])
async def test_without_an_answer_the_bank_is_asked_before_the_transfer_is_repeated(
    harness: Harness, bank: FakeBank, lost: What, requests: int
) -> None:
    await fund(harness, BOOKS, 500)
    await harness.handle(PAYOUT)
    bank.next = lost
    (failure,) = (await call_bank(harness)).failures
    assert (failure.decision, failure.reason) == ("parked", "outcome unknown")
    await harness.advance(minutes=1)
    assert (await call_bank(harness)).published == [MADE]
    assert (bank.transfers, bank.requests) == (["payout:1"], requests)
    await ledger_is_balanced(harness)


@pytest.mark.parametrize(
    ("then", "event", "transfers"),
    [("accept", MADE, ["payout:1"]), ("refuse", refused("refused by the bank"), [])],
)
async def test_a_request_that_arrives_after_the_next_one_is_no_other_transfer(
    harness: Harness, bank: FakeBank, then: What, event: Event, transfers: list[str]
) -> None:
    await fund(harness, BOOKS, 500)
    await harness.handle(PAYOUT)
    bank.next = "delay the request"
    assert (await call_bank(harness)).failures
    await harness.advance(minutes=1)
    bank.next = then
    assert (await call_bank(harness)).published == [event]
    assert bank.delayed is not None
    bank.transfer(bank.delayed)
    assert bank.transfers == transfers


async def test_the_merchant_has_the_money_back_if_the_bank_refuses(
    harness: Harness, bank: FakeBank
) -> None:
    await fund(harness, BOOKS, 500)
    await harness.handle(PAYOUT)
    bank.next = "refuse"
    assert (await call_bank(harness)).published == [refused("refused by the bank")]
    assert await balance(harness, BOOKS) == 500
    await ledger_is_balanced(harness)


@pytest.mark.parametrize("funds", [0, 299])
async def test_a_payout_is_refused_without_money_and_adds_no_rows(
    harness: Harness, bank: FakeBank, funds: int
) -> None:
    if funds:
        await fund(harness, BOOKS, funds)
    counts = await rows(harness)
    assert (await harness.handle(PAYOUT)).published == [refused("insufficient funds")]
    assert await rows(harness) == counts


@pytest.mark.parametrize("is_made", [False, True])
async def test_of_a_payout_that_is_requested_again_nothing_is_published(
    harness: Harness, bank: FakeBank, is_made: bool
) -> None:
    await fund(harness, BOOKS, 500)
    await harness.handle(PAYOUT)
    if is_made:
        await call_bank(harness)
    again = await harness.handle(PAYOUT, id="again")
    assert (again.results, again.published) == (["already requested"], [])
    assert again.calls == []
    await ledger_is_balanced(harness)


async def test_a_payout_is_refused_without_a_bank(harness: Harness) -> None:
    harness.with_resources(bank=None)
    await fund(harness, BOOKS, 500)
    assert (await harness.handle(PAYOUT)).published == [refused("no bank")]
    assert await balance(harness, BOOKS) == 500


async def test_a_payout_is_made_once_wherever_the_process_dies(
    harness: Harness, bank: FakeBank
) -> None:
    async for crash in harness.each_crash():
        bank.forget()
        await fund(harness, BOOKS, 500)
        await harness.handle(PAYOUT)
        await call_bank(harness)
        if await balance(harness, "payout:1") > 0:  # the bank is asked after a while
            await harness.advance(hours=1)
            await call_bank(harness)
        assert (bank.transfers, bank.requests) == (["payout:1"], 1), crash
        assert await balance(harness, "bank:de-1") == 300, crash
        await ledger_is_balanced(harness)
