"""A bank whose applier applies what is in Kafka, and its commands."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from aiokafka import AIOKafkaProducer

from onceward.cli.commands import command_line
from onceward.history import timeline
from onceward.history.commands import app

from tests.contract.bank import Deposit
from tests.onceward.integration.applier import Applier, NewApplier
from tests.onceward.integration.bank import Bank
from tests.onceward.integration.conftest import Command, commands, new_applier  # noqa: F401
from tests.servers.waiting import PATIENCE

Tells = Callable[..., Awaitable[list[Any]]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session", autouse=True)
def slow_parts() -> None:
    """Let parts be read slowly; a test of their time limit sets its own."""
    timeline._PART_SECONDS = PATIENCE


@pytest.fixture
async def bank(new_topic: Callable[..., Awaitable[str]]) -> Bank:
    """Return a bank with topics of its own, in the group of the applier."""
    return Bank(deposits=await new_topic(), balances=await new_topic(), name="applier")


@pytest.fixture
async def applier(bank: Bank, new_applier: NewApplier) -> Applier:  # noqa: F811
    """Return the applier of the bank, of a release."""
    return await new_applier(bank.handlers, topic=bank.deposits, release="1.4.2")


Take = Callable[..., Awaitable[None]]


@pytest.fixture
def take(bank: Bank, producer: AIOKafkaProducer) -> Take:
    """Send deposits, and let an applier apply them, as many as it reads at once."""

    async def of(applier: Applier, *deposits: Deposit) -> None:
        for one in deposits:
            await one.send(producer, bank.deposits)
        await applier.apply(*deposits)

    return of


@pytest.fixture
def command(bank: Bank, commands: Callable[..., Command]) -> Command:  # noqa: F811
    """Call `service …` of the bank."""
    line = command_line(bank.service, app)
    assert isinstance(line, typer.Typer)
    return commands(line)


@pytest.fixture
def tells(command: Command) -> Tells:
    """Call a command with `--json`, and return what each line on standard output says."""

    async def call(*arguments: str, code: int = 0) -> list[Any]:
        done = await command(*arguments, "--json")
        assert done.exit_code == code, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    return call
