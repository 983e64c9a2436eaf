"""How often the service waits for a server: for a batch, not for a message."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import asyncpg
import pytest
from sqlalchemy import make_url

from pipeline.settings import Settings

from .bank import Bank, Deposit
from .desk import Desk, NewDesk
from .languages import Postgres
from .test_inbox import close_generation
from .wire import Wire

NEW = Counter(
    [
        "consume: begin",
        "consume: limit and lock",
        "consume: move the position",
        "consume: mark",
        "consume: look into the backlog",
        "consume: lock accounts",
        "consume: update accounts",
        "consume: begin to copy the outbox",
        "consume: end the copy",
        "consume: commit",
    ]
)
"""Of a batch of new messages about rows that are there."""


@pytest.fixture
async def wired(
    settings: Callable[..., Settings], new_desk: NewDesk
) -> AsyncIterator[tuple[Bank, Desk, Wire]]:
    """Return a bank, its desk, and what passes between them and PostgreSQL."""
    url = make_url(settings().database_url.get_secret_value())
    wire = Wire()
    wire.lead_to(lambda: None)
    async with AsyncExitStack() as stack:
        assert url.host is not None
        port = await wire.serve(stack, url.host, url.port or 5432, lambda _: Postgres())
        through = url.set(host="127.0.0.1", port=port, query={"ssl": "disable"})
        there = through.render_as_string(hide_password=False)
        bank = Bank(deposits="deposits", balances="balances", name="bank")
        changed = {"database_url": there, "concurrency": 1, "backlog_workers": 1}
        desk = await new_desk(bank.handlers, topic=bank.deposits, **changed)
        yield bank, desk, wire
        await desk.engine.dispose()


async def round_trips(wire: Wire, desk: Desk, deposits: list[Deposit]) -> Counter[str]:
    """Return what a batch asks PostgreSQL for, and how often."""
    position = await desk.position()
    before = wire.seen.copy()
    await desk.apply(*deposits, start=position)
    return wire.seen - before


def deposits(first: int, count: int) -> list[Deposit]:
    """Return deposits to ten accounts."""
    return [Deposit(number, account=f"of {number % 10}") for number in range(first, first + count)]


@pytest.mark.parametrize("count", [10, 1_000])
async def test_a_batch_of_any_size_takes_the_same_round_trips(
    wired: tuple[Bank, Desk, Wire], count: int
) -> None:
    _, desk, wire = wired
    await desk.apply(*deposits(0, 10))  # creates the accounts, and prepares the statements
    await desk.apply(*deposits(10, 10))
    assert await round_trips(wire, desk, deposits(20, count)) == NEW


async def test_closed_generations_cost_a_batch_none_while_their_filters_are_loaded(
    wired: tuple[Bank, Desk, Wire], db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    _, desk, wire = wired
    await desk.apply(*deposits(0, 500))
    await close_generation(db, settings)
    await desk.apply(*deposits(500, 500))
    await close_generation(db, settings)
    asked = Counter(["consume: look into closed generations"])
    assert await round_trips(wire, desk, deposits(1_000, 500)) == NEW + asked
    await desk.load_filters()
    assert await round_trips(wire, desk, deposits(1_500, 500)) == NEW
    # Old ones of two generations among new ones: in one statement.
    assert await round_trips(wire, desk, deposits(400, 2_000)) == NEW + asked + Counter(
        ["consume: look into the current generation", "consume: count duplicates"]
    )


async def test_a_batch_of_duplicates_takes_fewer(wired: tuple[Bank, Desk, Wire]) -> None:
    _, desk, wire = wired
    for _ in range(2):
        await desk.apply(*deposits(0, 1_000))
    assert await round_trips(wire, desk, deposits(0, 1_000)) == Counter(
        [
            "consume: begin",
            "consume: limit and lock",
            "consume: move the position",
            "consume: mark",
            "consume: look into the current generation",
            "consume: count duplicates",
            "consume: commit",
        ]
    )
