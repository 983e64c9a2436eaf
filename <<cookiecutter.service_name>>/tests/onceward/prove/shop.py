"""A shop whose handler is right, or wrong in the way that SHOP_WRONG names, and its proof."""

import asyncio
import os
from datetime import UTC, datetime
from itertools import count
from random import Random, random

import asyncpg
from sqlalchemy import Text, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from onceward import Aggregate, Event, Handlers, Policy, Service, Transaction
from onceward.prove import Proof

WRONG = os.environ["SHOP_WRONG"]
SALES, STOCK = os.environ["SHOP_SALES"], os.environ["SHOP_STOCK"]
ITEMS, FAULTY = 12, "item-0"
numbers = count()
tasks = set[asyncio.Task[None]]()


class Base(DeclarativeBase):
    """The shop's tables."""


class Stock(Aggregate, Base):
    """How much of an item was sold, and in which portions."""

    __tablename__ = "stock"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    sold: Mapped[int] = mapped_column(default=0)
    portions: Mapped[str] = mapped_column(Text, default="")


class Sale(Base):
    """A sale; `note` is what a wrong handler writes."""

    __tablename__ = "sale"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    note: Mapped[str] = mapped_column(Text)


class Mention(Base):
    """How often a sale was mentioned by a connection of the handler's own."""

    __tablename__ = "mention"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    times: Mapped[int]


class Sold(Event, type="sold"):
    """Something was sold."""

    item: str
    amount: int


class StockChanged(Event, type="stock.changed", topic=STOCK):
    """So much of an item has been sold by now."""

    item: str
    sold: int


handlers = Handlers()


@handlers.on(
    Sold,
    topic=SALES,
    consumer="count",
    loads=Stock.by("item"),
    policy=Policy(attempts=3, schedule=(30.0,)),
)
async def sell(sold: Sold, tx: Transaction) -> None:
    """Count what was sold; what is sold in 13s of the first item is refused."""
    stock = await tx.load_or_create(Stock, sold.item)
    if sold.item == FAULTY and sold.amount % 13 == 0:
        raise ValueError(f"{sold.amount} can't be sold")
    stock.sold = (stock.sold or 0) + sold.amount
    stock.portions = f"{stock.portions or ''}{sold.amount},"
    tx.publish(StockChanged(item=stock.id, sold=stock.sold), of=stock)
    id, note = f"{sold.item}/{sold.amount}", "-"
    match WRONG:
        case "random":
            note = str(random())
        case "now":
            id = f"{id} at {datetime.now(UTC)}"
        case "counter":
            note = str(next(numbers))
        case "unlocked":
            note = str(await tx.session.scalar(select(func.sum(Stock.sold))))
        case "task":
            tasks.add(task := asyncio.create_task(mention(id)))
            task.add_done_callback(tasks.discard)
        case "connection":
            await mention(id)
    tx.add(Sale(id=id, note=note))


async def mention(id: str) -> None:
    """Write outside of the transaction."""
    url = os.environ["PIPELINE_DATABASE_URL"].replace("+asyncpg", "")
    connection = await asyncpg.connect(url)
    await connection.execute(
        "INSERT INTO mention VALUES ($1, 1)"
        " ON CONFLICT (id) DO UPDATE SET times = mention.times + 1",
        id,
    )
    await connection.close()


def messages(chance: Random) -> list[Event]:
    """Return sales of all items."""
    return [Sold(item=f"item-{chance.randrange(ITEMS)}", amount=one) for one in range(1, 301)]


async def create(session: AsyncSession) -> None:
    """Create the tables, as migrations would."""
    await session.run_sync(lambda sync: Base.metadata.create_all(sync.connection()))


async def counts_are_sums(session: AsyncSession) -> None:
    """What was sold is the sum of the portions."""
    for one in await session.scalars(select(Stock)):
        assert one.sold == sum(int(part) for part in one.portions.split(",") if part)


proof = Proof(
    Service("shop", handlers=handlers, metadata=Base.metadata),
    messages=messages,
    prepare=create,
    invariants=[counts_are_sums],
)
