"""Receivers of requests, on the test's own database."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from onceward.http import Receiver, open_receiver
from onceward.settings import Settings

from .cashier import cashier
from tests.onceward.integration.bank import Bank


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.path.stem not in ("test_keys", "test_settings"):
            item.add_marker(pytest.mark.integration)


@pytest.fixture
def bank() -> Bank:
    """Return a bank that takes requests."""
    return cashier()


@pytest.fixture
async def receiver(bank: Bank, settings: Callable[..., Settings]) -> AsyncIterator[Receiver]:
    """Return the bank's receiver."""
    async with open_receiver(bank.service, settings(concurrency=8)) as one:
        yield one
