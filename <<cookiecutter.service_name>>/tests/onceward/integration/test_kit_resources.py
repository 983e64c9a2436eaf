"""The test kit gives functions the resources of a test, and opens none."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from unittest.mock import Mock

import pytest

from onceward import Handlers, Misconfigured, Service, Transaction
from onceward.testing import Harness, HarnessMisused, Sent
from onceward.testing.databases import Migrate, ResettableDatabase
from onceward.testing.plugin import open_harness

from tests.contract.bank import Account, Base, Deposited
from tests.servers import databases
from tests.servers.databases import migrations_of_the_engine


class Rates:
    """A client of another service."""

    async def factor(self) -> int:
        pytest.fail("a test has called the real one")


class Clock(Protocol):
    """What tells the time."""

    def now(self) -> int: ...


@dataclass
class Resources:
    """The resources of the service."""

    rates: Rates
    clock: Clock
    limit: int | None


@asynccontextmanager
async def open_resources() -> AsyncIterator[Resources]:
    pytest.fail("a test has opened the real ones")
    yield


handlers = Handlers()


@handlers.on(Deposited, topic="deposits", consumer="book", loads=Account.by("account"))
async def book(event: Deposited, tx: Transaction, rates: Rates) -> int:
    account = await tx.load_or_create(Account, event.account)
    account.balance += event.amount * await rates.factor()
    return account.balance


@handlers.on(Deposited, topic="timed", consumer="time")
async def time(event: Deposited, tx: Transaction, clock: Clock, limit: int | None) -> list[Any]:
    return [clock.now(), limit]


@handlers.on(Deposited, topic="plain", consumer="note")
async def note(event: Deposited, tx: Transaction) -> str:
    return "noted"


class Fake(Rates):
    """A stand-in."""

    def __init__(self, factor: int) -> None:
        self._factor = factor

    async def factor(self) -> int:
        return self._factor


class Fixed:
    """A clock."""

    def now(self) -> int:
        return 7


@pytest.fixture(scope="session")
def harness_service() -> Service:
    return Service("bank", handlers, Base.metadata, resources=open_resources)


@pytest.fixture(scope="session")
def harness_migrate() -> Migrate:
    return lambda url: databases.build(url, migrations_of_the_engine(), Base.metadata)


DEPOSIT = Deposited(account="ada", amount=5)


async def test_handlers_take_the_resources_of_the_test(harness: Harness) -> None:
    harness.with_resources(rates=Fake(2))
    assert (await harness.handle(DEPOSIT, topic="deposits")).results == [10]
    assert harness.with_resources(rates=Fake(3)) is harness
    assert (await harness.handle(DEPOSIT, topic="deposits", id="2")).results == [25]


async def test_a_protocol_and_a_union_are_types_of_resources(harness: Harness) -> None:
    harness.with_resources(clock=Fixed(), limit=None)
    assert (await harness.handle(DEPOSIT, topic="timed")).results == [[7, None]]
    harness.with_resources(limit=3)
    assert (await harness.handle(DEPOSIT, topic="timed", id="2")).results == [[7, 3]]


async def test_only_what_is_called_needs_them(harness: Harness) -> None:
    assert (await harness.handle(DEPOSIT, topic="plain")).results == ["noted"]
    text = r"book takes resources, and tests open none: call harness\.with_resources\(rates=…\)"
    with pytest.raises(HarnessMisused, match=text):
        await harness.handle(DEPOSIT, topic="deposits")
    harness.with_resources(rates=Fake(2))
    assert (await harness.handle(DEPOSIT, topic="plain", id="2")).results == ["noted"]


async def test_a_name_that_is_no_resource_is_refused(harness: Harness) -> None:
    with pytest.raises(HarnessMisused, match="'rate' is no resource of the service; it has: rates"):
        harness.with_resources(rate=Fake(2))


@pytest.mark.parametrize(
    ("name", "value"), [("rates", Fixed()), ("rates", None), ("rates", Fake), ("limit", "3")]
)
async def test_a_value_of_another_type_is_refused(
    harness: Harness, name: str, value: object
) -> None:
    with pytest.raises(HarnessMisused, match=f"the resource '{name}' is .*: derive the class"):
        harness.with_resources(**{name: value})


async def test_a_mock_with_a_spec_is_a_value_of_that_type(harness: Harness) -> None:
    rates = Mock(spec=Rates)
    rates.factor.return_value = 4
    harness.with_resources(rates=rates)
    assert (await harness.handle(DEPOSIT, topic="deposits")).results == [20]


async def test_every_process_of_a_scenario_has_them(harness: Harness) -> None:
    harness.with_resources(rates=Fake(2))
    async for crash in harness.each_crash():
        await harness.handle(DEPOSIT, topic="deposits")
        assert (await harness.get(Account, "ada")).balance == 10, crash

    async def is_booked(harness: Harness) -> None:
        assert (await harness.get(Account, "ada")).balance == 10

    assert await harness.explore([Sent(DEPOSIT, topic="deposits")], invariant=is_booked) > 1


async def test_a_service_whose_handlers_take_what_it_lacks_is_not_tested(
    harness_database: ResettableDatabase,
) -> None:
    service = Service("bank", handlers, Base.metadata)
    with pytest.raises(Misconfigured, match=r"book takes rates: .*, and the service has no res"):
        async with open_harness(service, harness_database, Harness):
            pytest.fail("it was tested")
