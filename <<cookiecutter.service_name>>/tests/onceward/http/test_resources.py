"""The receiver of requests opens the service's resources, as the processes of messages do."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from onceward import Transaction
from onceward.http import open_receiver
from onceward.settings import Settings

from .cashier import cashier, new_key
from tests.contract.bank import Deposited


@dataclass
class Resources:
    """The resources of the service."""

    rates: dict[str, int]


async def test_requests_are_handled_with_resources_that_are_closed_after_them(
    settings: Callable[..., Settings],
) -> None:
    bank, log, errors = cashier(), list[str](), [ConnectionError("cut off")]

    @asynccontextmanager
    async def open_resources() -> AsyncIterator[Resources]:
        if errors:
            raise errors.pop()
        log.append("opened")
        yield Resources({"usd": 92})
        log.append("closed")

    @bank.handlers.on(Deposited, topic=None, consumer="rate")
    async def rate(event: Deposited, tx: Transaction, rates: dict[str, int]) -> int:
        log.append("called")
        return rates["usd"]

    service = replace(bank.service, resources=open_resources)
    async with open_receiver(service, settings()) as receiver:
        deposit = Deposited(account="ada", amount=5)
        answer = await receiver.receive(deposit, key=new_key(), consumer="rate")
    assert answer.answer == 92
    assert log == ["opened", "called", "closed"]
