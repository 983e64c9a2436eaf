"""The saga of `sagas.md`: an order that needs stock and a payment."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

import httpx2
from sqlalchemy import Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from onceward import Aggregate, Event, Handlers, Park, Policy, Reject, Transaction
from onceward.effects import Call, Effects

handlers = Handlers()
effects = Effects(handlers)


class OrderPlaced(Event, type="order.placed.v1"):
    order_id: str
    article: str
    pieces: int
    cents: int


class StockRequested(Event, type="stock.requested.v1", topic="stock-requests"):
    order_id: str
    article: str
    pieces: int


class StockReleased(Event, type="stock.released.v1", topic="stock-requests"):
    order_id: str
    article: str
    pieces: int


class StockReserved(Event, type="stock.reserved.v1", topic="stock-answers"):
    order_id: str


class StockRefused(Event, type="stock.refused.v1", topic="stock-answers"):
    order_id: str


class PaymentRequested(Event, type="payment.requested.v1"):
    order_id: str
    cents: int


class PaymentTaken(Event, type="payment.taken.v1", topic="payments"):
    order_id: str
    payment_id: str


class PaymentRefused(Event, type="payment.refused.v1", topic="payments"):
    order_id: str


class RefundRequested(Event, type="refund.requested.v1"):
    order_id: str
    payment_id: str
    cents: int


class OrderOverdue(Event, type="order.overdue.v1", topic="order-timeouts"):
    order_id: str


class OrderShipped(Event, type="order.shipped.v1", topic="order-events"):
    order_id: str
    article: str
    pieces: int


class OrderCancelled(Event, type="order.cancelled.v1", topic="order-events"):
    order_id: str
    reason: str


class Base(DeclarativeBase):
    """Tables of the example."""


class Order(Aggregate, Base):
    """An order, and how far it is: reserving, paying, shipped or cancelled."""

    __tablename__ = "order"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    article: Mapped[str] = mapped_column(Text)
    pieces: Mapped[int]
    cents: Mapped[int]
    state: Mapped[str] = mapped_column(Text)


async def order_of(order_id: str, tx: Transaction, *, too_early: str | None = None) -> Order:
    """Return the order, locked; the message waits while there is none, or it is too early."""
    order = await tx.load(Order, order_id)
    if order is None or order.state == too_early:
        raise Park(f"order {order_id} is not that far", after=5)
    return order


def release(order: Order, tx: Transaction) -> None:
    """Give back the pieces that are set aside."""
    released = StockReleased(order_id=order.id, article=order.article, pieces=order.pieces)
    tx.publish(released, of=order)


def cancel(order: Order, tx: Transaction, reason: str) -> None:
    """End the order without goods."""
    order.state = "cancelled"
    tx.cancel(f"overdue-{order.id}")
    tx.publish(OrderCancelled(order_id=order.id, reason=reason), of=order)


@handlers.on(OrderPlaced, topic="orders", consumer="saga", loads=Order.by("order_id"))
async def begin(placed: OrderPlaced, tx: Transaction) -> None:
    """Request stock, and limit the time for everything."""
    if await tx.load(Order, placed.order_id) is not None:
        raise Reject(f"order {placed.order_id} was placed before, by another event")
    order = Order(
        id=placed.order_id,
        article=placed.article,
        pieces=placed.pieces,
        cents=placed.cents,
        state="reserving",
    )
    tx.add(order)
    requested = StockRequested(order_id=order.id, article=order.article, pieces=order.pieces)
    tx.publish(requested, of=order)
    overdue, name = OrderOverdue(order_id=order.id), f"overdue-{order.id}"
    tx.publish(overdue, key=order.id, after=timedelta(minutes=15), name=name)


@handlers.on(StockReserved, topic="stock-answers", consumer="saga", loads=Order.by("order_id"))
async def pay(reserved: StockReserved, tx: Transaction) -> None:
    """Request the payment."""
    order = await order_of(reserved.order_id, tx)
    match order.state:
        case "reserving":
            order.state = "paying"
            tx.call(PaymentRequested(order_id=order.id, cents=order.cents), of=order)
        case "cancelled":  # it came too late
            release(order, tx)
        case _:
            raise Reject(f"stock was reserved twice, for an order that is {order.state}")


@handlers.on(StockRefused, topic="stock-answers", consumer="saga", loads=Order.by("order_id"))
async def give_up(refused: StockRefused, tx: Transaction) -> None:
    """Cancel: there is nothing to undo yet."""
    order = await order_of(refused.order_id, tx)
    if order.state == "reserving":
        cancel(order, tx, "out of stock")


@handlers.on(PaymentTaken, topic="payments", consumer="saga", loads=Order.by("order_id"))
async def ship(taken: PaymentTaken, tx: Transaction) -> None:
    """Ship the order, or give the money back."""
    order = await order_of(taken.order_id, tx, too_early="reserving")
    match order.state:
        case "paying":
            order.state = "shipped"
            tx.cancel(f"overdue-{order.id}")
            shipped = OrderShipped(order_id=order.id, article=order.article, pieces=order.pieces)
            tx.publish(shipped, of=order)
        case "cancelled":  # it came too late
            refund = RefundRequested(
                order_id=order.id, payment_id=taken.payment_id, cents=order.cents
            )
            tx.call(refund, of=order)
        case _:
            raise Reject(f"it was paid twice, the second time by {taken.payment_id}")


@handlers.on(PaymentRefused, topic="payments", consumer="saga", loads=Order.by("order_id"))
async def undo(refused: PaymentRefused, tx: Transaction) -> None:
    """Undo what was done before the payment."""
    order = await order_of(refused.order_id, tx, too_early="reserving")
    if order.state == "paying":
        release(order, tx)
        cancel(order, tx, "payment refused")


@handlers.on(OrderOverdue, topic="order-timeouts", consumer="saga", loads=Order.by("order_id"))
async def time_out(overdue: OrderOverdue, tx: Transaction) -> None:
    """Cancel an order that has not ended; what is still unanswered is undone by its answer."""
    order = await order_of(overdue.order_id, tx)
    if order.state == "paying":
        release(order, tx)
    if order.state in ("reserving", "paying"):
        cancel(order, tx, "it took too long")


@dataclass
class Resources:
    """What a process has open while it runs."""

    client: httpx2.AsyncClient


@asynccontextmanager
async def open_resources() -> AsyncIterator[Resources]:
    """Open the client of the provider."""
    async with httpx2.AsyncClient(base_url="https://pay.example.org", timeout=5) as client:
        yield Resources(client)


async def answered(asked: PaymentRequested, tx: Transaction, payment_id: str | None) -> None:
    """Publish the provider's answer."""
    if payment_id is None:
        tx.publish(PaymentRefused(order_id=asked.order_id), key=asked.order_id)
    else:
        tx.publish(PaymentTaken(order_id=asked.order_id, payment_id=payment_id), key=asked.order_id)


@effects.on(PaymentRequested, consumer="take-payment", policy=Policy(attempts=20), then=answered)
async def take_payment(
    asked: PaymentRequested, call: Call, client: httpx2.AsyncClient
) -> str | None:
    """Take the money; return the payment's id, or None if the provider refuses."""
    body = {"reference": asked.order_id, "cents": asked.cents}
    answer = await client.post("/payments", json=body, headers={"Idempotency-Key": call.id})
    if answer.status_code == 402:
        return None
    answer.raise_for_status()
    return str(answer.json()["id"])


@effects.on(RefundRequested, consumer="refund", policy=Policy(attempts=20))
async def refund(asked: RefundRequested, call: Call, client: httpx2.AsyncClient) -> None:
    """Give the money back."""
    path, body = f"/payments/{asked.payment_id}/refunds", {"cents": asked.cents}
    answer = await client.post(path, json=body, headers={"Idempotency-Key": call.id})
    answer.raise_for_status()
