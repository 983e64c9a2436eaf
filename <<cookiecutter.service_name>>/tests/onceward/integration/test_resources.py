"""Resources of a process: open from before the first call until after the last, or it waits."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward import Service, Transaction
from onceward.runtime import Part

from .bank import Bank
from .test_consume import balance
from tests.conftest import Refusing, Running
from tests.contract.bank import Deposit, Deposited
from tests.servers.waiting import eventually


class Rates:
    """A client, of the process that has opened it."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass
class Resources:
    """The resources of these tests."""

    rates: Rates


@dataclass
class World:
    """What the processes of a test have done, and what happens to them."""

    service: Service
    log: list[str] = field(default_factory=list)
    error: Exception | None = None
    """Raised when resources are opened."""
    may_open: asyncio.Event = field(default_factory=asyncio.Event)
    may_return: asyncio.Event = field(default_factory=asyncio.Event)
    """Until then a call lasts."""
    opened: int = 0

    def note(self, what: str) -> None:
        """Note what is done, once: a transaction may be repeated."""
        if what not in self.log:
            self.log.append(what)

    @asynccontextmanager
    async def open_resources(self) -> AsyncIterator[Resources]:
        """Note that they are opened and closed."""
        await self.may_open.wait()
        if self.error is not None:
            raise self.error
        self.opened += 1
        rates = Rates(self.opened)
        self.note(f"opened {rates.number}")
        yield Resources(rates)
        self.note(f"closed {rates.number}")


@pytest.fixture
def world(bank: Bank) -> World:
    """Return a service whose handler takes a resource."""
    one = World(bank.service)

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="rate", timeout=60)
    async def rate(event: Deposited, tx: Transaction, rates: Rates) -> None:
        one.note(f"called {rates.number}")
        await one.may_return.wait()
        one.note(f"returned {rates.number}")

    one.may_open.set()
    one.service = replace(bank.service, resources=one.open_resources)
    return one


async def test_each_process_opens_them_before_its_first_call_and_closes_them_after_its_last(
    bank: Bank, world: World, running: Running, producer: AIOKafkaProducer
) -> None:
    await Deposit(1).send(producer, bank.deposits)
    async with running(world.service):
        await eventually(lambda: "called 1" in world.log)
        asyncio.get_running_loop().call_later(0.5, world.may_return.set)
    assert world.log == ["opened 1", "called 1", "returned 1", "closed 1"]
    await Deposit(2).send(producer, bank.deposits)
    async with running(world.service):
        await eventually(lambda: "returned 2" in world.log)
    assert world.log[4:] == ["opened 2", "called 2", "returned 2", "closed 2"]


async def test_a_message_from_the_backlog_is_handled_with_them(
    bank: Bank, world: World, running: Running, producer: AIOKafkaProducer
) -> None:
    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="later", mode="deferred")
    async def later(event: Deposited, tx: Transaction, rates: Rates) -> None:
        world.note(f"later {rates.number}")

    world.may_return.set()
    await Deposit(1).send(producer, bank.deposits)
    async with running(world.service):
        await eventually(lambda: "later 1" in world.log)
    assert world.log[-1] == "closed 1"


async def test_a_process_is_not_ready_while_they_can_not_be_opened_and_loses_nothing(
    bank: Bank, world: World, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    world.error = ConnectionError("no route to the rates")
    world.may_return.set()
    await Deposit(5).send(producer, bank.deposits)
    async with running(world.service) as health:
        reason = "open_resources: ConnectionError: no route to the rates"
        await eventually(lambda: health.reasons.get("resources") == reason)
        assert (health.is_ready, world.log) == (False, [])
        world.error = None
        await eventually(lambda: "returned 1" in world.log)
        await eventually(lambda: health.is_ready)
    assert await balance(db) == 5
    assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0
    assert world.log == ["opened 1", "called 1", "returned 1", "closed 1"]


async def test_a_process_stops_while_they_are_being_opened(world: World, running: Running) -> None:
    world.may_open.clear()
    async with running(world.service) as health:
        await eventually(
            lambda: health.reasons.get("resources") == "the resources are not open yet"
        )
    assert world.log == []


async def test_an_error_that_is_no_outage_ends_the_process(
    world: World, refusing: Refusing
) -> None:
    world.error = LookupError("RATES_URL is not set")
    with pytest.raises(LookupError, match="RATES_URL is not set"):
        await refusing(world.service, Part.CONSUME | Part.RELAY)
    assert world.log == []


async def test_an_error_of_what_runs_among_them_ends_the_process_after_its_calls(
    bank: Bank, world: World, refusing: Refusing, producer: AIOKafkaProducer
) -> None:
    async def refresh() -> None:
        await eventually(lambda: "called 1" in world.log)
        asyncio.get_running_loop().call_later(0.5, world.may_return.set)
        raise PermissionError("the token was revoked")

    @asynccontextmanager
    async def refreshing() -> AsyncIterator[Resources]:
        async with asyncio.TaskGroup() as tasks, world.open_resources() as resources:
            tasks.create_task(refresh())
            yield resources

    await Deposit(1).send(producer, bank.deposits)
    service = replace(world.service, resources=refreshing)
    with pytest.raises(ExceptionGroup) as raised:
        await refusing(service, Part.CONSUME | Part.RELAY)
    assert raised.group_contains(PermissionError, match="the token was revoked")
    assert world.log == ["opened 1", "called 1", "returned 1"]


async def test_what_hangs_when_it_is_closed_is_cancelled(
    world: World, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    opening: Callable[[], AbstractAsyncContextManager[Resources]] = world.open_resources

    @asynccontextmanager
    async def hanging() -> AsyncIterator[Resources]:
        async with opening() as resources:
            yield resources
            await asyncio.Event().wait()

    async with running(replace(world.service, resources=hanging), shutdown_grace=5) as health:
        await eventually(lambda: health.is_ready)
    assert "resources are not closed after 0.2 s: cancelling that" in caplog.text


async def test_a_relay_opens_none(world: World, running: Running) -> None:
    async with running(world.service, Part.RELAY) as health:
        await eventually(lambda: health.is_ready)
    assert world.log == []
