"""The test kit makes calls with the resources of a test: by stand-ins, or the effects' own ones."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from onceward import Event, Handlers, Policy, Service, Transaction
from onceward.effects import Call, Effects, EffectWorkers
from onceward.testing import Harness, HarnessMisused
from onceward.testing.databases import Migrate

from tests.contract.bank import Base, Deposited
from tests.servers import databases
from tests.servers.databases import migrations_of_the_engine

pytestmark = pytest.mark.integration


class Noticed(Event, type="kit.resources.noticed"):
    """What a customer is to be notified of."""

    amount: int


class Gateway:
    """The client of another service."""

    async def send(self, amount: int, key: str) -> str:
        pytest.fail("a test has made the real call")

    async def has(self, key: str) -> bool:
        pytest.fail("a test has made the real call")


@dataclass
class Resources:
    """The resources of the service."""

    gateway: Gateway


@asynccontextmanager
async def open_resources() -> AsyncIterator[Resources]:
    yield Resources(Gateway())


handlers = Handlers()
effects = Effects(handlers)


@handlers.on(Deposited, topic="deposits", consumer="book")
async def book(event: Deposited, tx: Transaction) -> None:
    tx.call(Noticed(amount=event.amount), key=event.account)


async def has(event: Noticed, call: Call, gateway: Gateway) -> bool:
    return await gateway.has(call.id)


async def confirm(event: Noticed, tx: Transaction, answer: str | None, gateway: Gateway) -> None:
    assert isinstance(gateway, Fake)
    gateway.confirmed.append(answer)


@effects.on(
    Noticed,
    consumer="notify",
    repeatable=False,
    ask=has,
    then=confirm,
    policy=Policy(schedule=(60,)),
)
async def notify(event: Noticed, call: Call, gateway: Gateway) -> str:
    return await gateway.send(event.amount, call.id)


class Fake(Gateway):
    """A stand-in that loses its first answer."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}
        self.confirmed: list[str | None] = []

    async def send(self, amount: int, key: str) -> str:
        self.sent[key] = amount
        raise ConnectionError("cut off")

    async def has(self, key: str) -> bool:
        return key in self.sent


@pytest.fixture(scope="session")
def harness_service() -> Service:
    workers = [EffectWorkers]
    return Service("bank", handlers, Base.metadata, workers=workers, resources=open_resources)


@pytest.fixture(scope="session")
def harness_migrate() -> Migrate:
    return lambda url: databases.build(url, migrations_of_the_engine(), Base.metadata)


async def test_an_effect_is_its_own_stand_in_with_resources_of_the_test(harness: Harness) -> None:
    gateway = Fake()
    harness.with_resources(gateway=gateway)
    await harness.handle(Deposited(account="ada", amount=5))
    (failure,) = (await harness.run_calls({"notify": notify})).failures
    assert failure.error == "ConnectionError: cut off"
    await harness.advance(minutes=2)
    assert (await harness.run_calls({"notify": notify})).applied == ["notify"]
    assert [*gateway.sent.values()] == [5]
    assert gateway.confirmed == [None], "known by `ask` alone"


async def test_a_stand_in_may_take_resources_and_need_not_be_a_coroutine_function(
    harness: Harness,
) -> None:
    def stand_in(event: Noticed, call: Call, gateway: Gateway) -> str:
        return type(gateway).__name__

    harness.with_resources(gateway=Fake())
    await harness.handle(Deposited(account="ada", amount=5))
    assert (await harness.run_calls({"notify": stand_in})).results == ["Fake"]


async def test_a_call_without_the_resource_that_it_takes_is_a_fault_of_the_test(
    harness: Harness,
) -> None:
    await harness.handle(Deposited(account="ada", amount=5))
    with pytest.raises(HarnessMisused, match=r"notify takes resources.*with_resources\(gateway=…"):
        await harness.run_calls({"notify": notify})
