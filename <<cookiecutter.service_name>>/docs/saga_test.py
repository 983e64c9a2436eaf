"""The test of `saga.py`, with a stand-in for the provider of payments."""

from collections import Counter
from functools import partial

from saga import (
    OrderCancelled,
    OrderOverdue,
    OrderPlaced,
    OrderShipped,
    PaymentRequested,
    PaymentTaken,
    RefundRequested,
    StockReleased,
    StockReserved,
)

from onceward.effects import Call
from onceward.testing import Harness, Sent

PLACED = OrderPlaced(order_id="o-1", article="book", pieces=2, cents=900)
RESERVED, OVERDUE = StockReserved(order_id="o-1"), OrderOverdue(order_id="o-1")
TAKEN = PaymentTaken(order_id="o-1", payment_id="p-o-1")


class Provider:
    """The provider of payments: what it took and gave back, by idempotency key."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}
        self.refunded: dict[str, int] = {}
        self.is_down = False  # a test sets it, to lose answers

    async def take(self, asked: PaymentRequested, call: Call) -> str:
        self.taken[call.id] = asked.cents
        if self.is_down:  # the answer is lost
            raise ConnectionError("cut off")
        return f"p-{asked.order_id}"

    async def refund(self, asked: RefundRequested, call: Call) -> None:
        self.refunded[call.id] = asked.cents

    async def answer_calls(self, harness: Harness) -> None:
        await harness.run_calls({"take-payment": self.take, "refund": self.refund})


async def is_settled(harness: Harness, *, taken: int = 0, reserved: int = 0) -> None:
    """Check that the order has ended, and that money and stock are accounted for."""
    provider = Provider()
    await provider.answer_calls(harness)
    published = Counter(type(one.event) for one in await harness.records())
    shipped, cancelled = published[OrderShipped], published[OrderCancelled]
    assert shipped + cancelled == 1
    assert len(provider.refunded) + shipped == taken
    assert published[StockReleased] + shipped == reserved
    assert await harness.dead_letters() == []


async def test_an_order_is_settled_in_whatever_way_its_answers_come(harness: Harness) -> None:
    settled = partial(is_settled, taken=1, reserved=1)
    messages = [Sent(one, "o-1") for one in (PLACED, RESERVED, TAKEN, OVERDUE)]
    await harness.explore(messages, invariant=settled, at_most=100)
    await harness.explore(messages, invariant=settled, crashes=True, at_most=20)
