"""Real servers for the engine's tests: a database and topics of its own for every test."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest
import typer
from sqlalchemy.ext.asyncio import AsyncEngine
from typer.testing import CliRunner, Result

from onceward import Handlers
from onceward.apply.breaker import Breaker
from onceward.apply.outcome import BatchOutcome
from onceward.apply.positions import Slot
from onceward.apply.transactions import ConsumeTransactions, Signals
from onceward.cli.commands import command_line
from onceward.observe.health import Health
from onceward.retry.workers import BacklogWorkers
from onceward.servers.database import create_engine
from onceward.settings import Settings

from .applier import Applier, NewApplier
from .bank import Bank
from .clock import Clock
from tests.contract.bank import Base
from tests.servers import databases
from tests.servers.databases import HOME, migrations_of_the_engine
from tests.servers.pooler import POOLED
from tests.servers.waiting import PATIENCE

BEHIND_A_POOLER = (
    # Sessions, prepared statements and cursors.
    *("pooler", "statements", "round_trips", "transactional", "session", "writer"),
    # Advisory locks.
    *("inbox_races", "dropping", "retention", "migrations"),
    # Leases, and what is written under them.
    *("lanes", "ownership", "relays", "scheduled"),
    # Whose transaction it was, when a connection is lost.
    *("interrupted", "window"),
)
"""Tests that could come out otherwise behind a pooler, where they run a second time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.integration)
            if item.path.stem.removeprefix("test_") in BEHIND_A_POOLER:
                item.add_marker(pytest.mark.pooler)


def build(url: str) -> None:
    """Make the engine's and the bank's tables in an empty database."""
    databases.build(url, migrations_of_the_engine(), Base.metadata)


@pytest.fixture
def quick(settings: Callable[..., Settings]) -> Callable[..., Settings]:
    """Make settings of a relay that soon tries again what Kafka refuses."""

    def make(**changes: object) -> Settings:
        return settings(**{"relay_topic_pause": 0.1, "relay_lease": 3, **changes})

    return make


@pytest.fixture
async def clock(db: asyncpg.Connection) -> Clock:
    """Return the clock of the test's database, which can be set."""
    one = Clock(db)
    await one.put_up()
    return one


@pytest.fixture
async def bank(new_topic: Callable[..., Awaitable[str]]) -> Bank:
    """Return a bank with topics and a group of its own, of one partition each."""
    return Bank(
        deposits=await new_topic(), balances=await new_topic(), name=f"bank-{uuid4().hex[:8]}"
    )


@pytest.fixture
def unborn() -> Bank:
    """Return a bank whose topics do not exist."""
    name = uuid4().hex[:12]
    return Bank(deposits=f"test-{name}-in", balances=f"test-{name}-out", name=f"bank-{name}")


@pytest.fixture
def missing() -> str:
    """Return the name of a topic that does not exist."""
    return f"test-{uuid4().hex[:12]}"


Command = Callable[..., Awaitable[Result]]


@pytest.fixture
def commands(
    database_url: str, kafka: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Command]:
    """Call commands in a thread, as a process would."""
    monkeypatch.setenv("PIPELINE_DATABASE_URL", database_url)
    monkeypatch.setenv("PIPELINE_DATABASE_POOLER", str(POOLED))
    monkeypatch.setenv("PIPELINE_KAFKA_BOOTSTRAP_SERVERS", kafka)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(HOME)

    def of(group: object, *first: str) -> Command:
        assert isinstance(group, typer.Typer)

        async def command(*arguments: str, input: str | None = None) -> Result:
            line = [*first, *arguments]
            return await asyncio.to_thread(CliRunner().invoke, group, line, input=input)

        return command

    return of


@pytest.fixture
def command(bank: Bank, commands: Callable[..., Command]) -> Command:
    """Call `service …` of the bank."""
    return commands(command_line(bank.service))


@pytest.fixture
def service(bank: Bank, commands: Callable[..., Command]) -> Command:
    """Call `service dead …` of a service that has this bank's handlers."""
    return commands(command_line(bank.service), "dead")


def complaint(done: Result) -> str:
    """Return what a command has complained of, without the frame around it."""
    return " ".join(done.stderr.replace("│", " ").split())


class Waking(Signals):
    """Wakes the workers of an applier."""

    lanes: BacklogWorkers

    def committed(self, outcome: BatchOutcome) -> None:
        if outcome.has_due:
            self.lanes.wake()


@pytest.fixture
async def new_applier(settings: Callable[..., Settings]) -> AsyncIterator[NewApplier]:
    """Make appliers: partitions whose batches the test applies itself, without Kafka."""
    engines: list[AsyncEngine] = []

    async def make(
        handlers: Handlers,
        *,
        topic: str,
        partition: int = 0,
        **changes: object,
    ) -> Applier:
        group = "applier"
        chosen = settings(**changes)
        engines.append(create_engine(chosen, name=group))
        health = Health(stall_after=PATIENCE)
        breaker = Breaker(keys=chosen.breaker_keys, pause=chosen.retry_pause, health=health)
        signals = Waking()
        consume = ConsumeTransactions(
            engines[-1],
            group=group,
            source=f"/{group}",
            settings=chosen,
            breaker=breaker,
            handlers=handlers,
            signals=signals,
        )
        lanes = BacklogWorkers(consume, health)
        signals.lanes = lanes
        slot = Slot(group, topic, partition)
        return Applier(engines[-1], consume, lanes, health, handlers, slot)

    yield make
    for engine in engines:
        await engine.dispose()


@pytest.fixture
async def ledger(new_applier: NewApplier) -> tuple[Bank, Applier]:
    """Return a bank without topics, and the applier of its one partition."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    return bank, await new_applier(bank.handlers, topic=bank.deposits)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what the engine tells telemetry, by outcome."""
    counted: Counter[str] = Counter()

    def processed(topic: str, consumer: str, outcome: str, count: int, group: str) -> None:
        counted[outcome] += count

    monkeypatch.setattr("onceward.observe.metrics.processed", processed)
    return counted


async def position_of(db: asyncpg.Connection, topic: str, partition: int = 0) -> int | None:
    """Return the position stored of a partition; tests have one group in a database."""
    position: int | None = await db.fetchval(
        "SELECT next_offset FROM pipeline.position WHERE topic = $1 AND partition = $2",
        topic,
        partition,
    )
    return position


def position_reaches(
    db: asyncpg.Connection, topic: str, offset: int, partition: int = 0
) -> Callable[[], Awaitable[bool]]:
    """Return the question whether the position stored is at `offset`, for `eventually`."""

    async def is_there() -> bool:
        return await position_of(db, topic, partition) == offset

    return is_there
