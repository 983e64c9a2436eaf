"""How often the service waits for a server: for a batch, not for a message."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import asyncpg
import pytest
from sqlalchemy import make_url

from onceward import Policy
from onceward.settings import Settings

from .applier import Applier, NewApplier
from .bank import Bank
from .languages import Postgres
from .outgoing import numbered, relaying, stage
from .test_inbox import close_generation
from .wire import Wire
from tests.contract.bank import Deposit
from tests.servers.topics import following
from tests.servers.waiting import eventually

NEW = Counter(
    [
        "consume: begin",
        "consume: move position",
        "consume: insert markers",
        "consume: look up backlog",
        "consume: lock accounts",
        "consume: update accounts",
        "consume: compare catalog",
        "consume: write outbox",
        "consume: commit",
    ]
)
"""Of a batch of new messages about rows that are there."""


@asynccontextmanager
async def wiring(settings: Settings, wire: Wire) -> AsyncIterator[str]:
    """Lead to PostgreSQL through the wire, as long as the block lasts; says by which URL."""
    url = make_url(settings.database_url.get_secret_value())
    wire.lead_to(lambda: None)
    async with AsyncExitStack() as stack:
        assert url.host is not None
        port = await wire.serve(stack, url.host, url.port or 5432, lambda _: Postgres())
        through = url.set(host="127.0.0.1", port=port, query={"ssl": "disable"})
        yield through.render_as_string(hide_password=False)


@pytest.fixture
async def wired(
    settings: Callable[..., Settings], new_applier: NewApplier
) -> AsyncIterator[tuple[Bank, Applier, Wire]]:
    """Return a bank, its applier, and what passes between them and PostgreSQL."""
    wire = Wire()
    async with wiring(settings(), wire) as there:
        bank = Bank(
            deposits="deposits",
            balances="balances",
            name="bank",
            options={"policy": Policy(schedule=(0,))},
        )
        changed = {"database_url": there, "concurrency": 1, "backlog_workers": 1}
        applier = await new_applier(bank.handlers, topic=bank.deposits, **changed)
        yield bank, applier, wire
        await applier.engine.dispose()


async def round_trips(wire: Wire, applier: Applier, deposits: list[Deposit]) -> Counter[str]:
    """Return what a batch asks PostgreSQL for, and how often."""
    position = await applier.position()
    before = wire.seen.copy()
    await applier.apply(*deposits, start=position)
    return wire.seen - before


def deposits(first: int, count: int) -> list[Deposit]:
    """Return deposits to ten accounts."""
    return [Deposit(number, account=f"of {number % 10}") for number in range(first, first + count)]


@pytest.mark.parametrize("count", [10, 1_000])
async def test_a_batch_of_any_size_takes_the_same_round_trips(
    wired: tuple[Bank, Applier, Wire], count: int
) -> None:
    _, applier, wire = wired
    await applier.apply(*deposits(0, 10))  # creates the accounts, and prepares the statements
    await applier.apply(*deposits(10, 10))
    assert await round_trips(wire, applier, deposits(20, count)) == NEW


async def test_closed_generations_cost_a_batch_one_statement(
    wired: tuple[Bank, Applier, Wire], db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    _, applier, wire = wired
    await applier.apply(*deposits(0, 500))
    await close_generation(db, settings)
    await applier.apply(*deposits(500, 500))
    await close_generation(db, settings)
    asked = Counter(["consume: look up closed generations"])
    assert await round_trips(wire, applier, deposits(1_000, 500)) == NEW + asked
    # Old ones of two generations among new ones: in one statement.
    assert await round_trips(wire, applier, deposits(400, 2_000)) == NEW + asked + Counter(
        ["consume: read existing markers", "consume: count duplicates"]
    )


async def test_a_batch_of_duplicates_takes_fewer(wired: tuple[Bank, Applier, Wire]) -> None:
    _, applier, wire = wired
    for _ in range(2):
        await applier.apply(*deposits(0, 1_000))
    assert await round_trips(wire, applier, deposits(0, 1_000)) == Counter(
        [
            "consume: begin",
            "consume: move position",
            "consume: insert markers",
            "consume: read existing markers",
            "consume: count duplicates",
            "consume: commit",
        ]
    )


PAGE = 100
"""Events of a page of the relay."""
SELDOM = dict.fromkeys(
    ("relay_cursor_interval", "relay_lease", "relay_poll_min", "relay_poll_max"), 3_600
)
"""So often the relay does beside it what it does by the clock."""


def of_relay(wire: Wire) -> Counter[str]:
    """Return what relays have asked for so far, beside what is due by the clock."""
    seen = Counter({what: n for what, n in wire.seen.items() if what.startswith("relay: ")})
    del seen["relay: measure window"]
    return seen


@pytest.mark.parametrize("pages", [0, 1, 10])
async def test_a_relay_page_takes_one_statement_for_any_number_of_events(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    pages: int,
) -> None:
    topic = await new_topic()
    numbers = range(pages * PAGE + PAGE // 2)
    wire = Wire()
    async with (
        wiring(settings(), wire) as there,
        following(kafka, topic) as tail,
        relaying(settings(database_url=there, relay_batch_events=PAGE, **SELDOM)) as one,
    ):
        await eventually(lambda: not one.health.reasons)
        before = of_relay(wire)
        await stage(db, numbered(topic, numbers))
        one.relay.wake(len(numbers))
        await tail.until_ids(numbers)
        # Behind the last page of a window it looks for what was committed meanwhile.
        asked = Counter({"relay: read window": 2 if pages else 1})
        asked += Counter({"relay: read page": pages})
        await eventually(lambda: of_relay(wire) - before >= asked)
        await one.stop()
    # To stop, it looks once more.
    asked += Counter(["relay: read window", "relay: release shards", "relay: leave"])
    assert of_relay(wire) - before == asked


PARKED = Counter(
    [
        *["backlog: claim lane", "backlog: read due rows"],
        *["backlog: extend lease", "consume: begin"],
        "backlog: fence lane",
        "consume: insert markers",
        "backlog: compare heads",
        "consume: lock accounts",
        "consume: update accounts",
        "consume: compare catalog",
        "consume: write outbox",
        "backlog: delete settled rows",
        "backlog: schedule heads",
        "backlog: commit",
        # Nothing more is due.
        *["backlog: release lane", "backlog: claim lane"],
    ]
)
"""Of rows of one key that are due, and succeed; the first has failed before."""


@pytest.mark.parametrize("count", [10, 99])
async def test_backlog_transactions_take_the_same_round_trips_for_any_row_count(
    wired: tuple[Bank, Applier, Wire], count: int
) -> None:
    bank, applier, wire = wired

    async def work_off(first: int, count: int) -> Counter[str]:
        bank.refused = {first}  # and the others follow it
        await applier.apply(*(Deposit(number) for number in range(first, first + count)))
        bank.refused = set()
        before = wire.seen.copy()
        await applier.work_off()
        return wire.seen - before

    await work_off(0, 10)
    assert await work_off(10, count) == PARKED
