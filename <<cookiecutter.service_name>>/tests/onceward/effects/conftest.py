"""The fixtures of the engine's tests, with desks that also make calls."""

from dataclasses import fields
from pathlib import Path

import pytest

from onceward import Handlers

from .desk import Desk, NewDesk
from tests.onceward.integration import desk as engine
from tests.onceward.integration.conftest import bank, new_desk  # noqa: F401 (fixtures)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.path.stem != "test_registration":
            item.add_marker(pytest.mark.integration)


@pytest.fixture
def new_calling_desk(new_desk: engine.NewDesk) -> NewDesk:  # noqa: F811
    """Make desks that also make the calls that are staged there."""

    async def make(handlers: Handlers, *, topic: str, **changes: object) -> Desk:
        desk = await new_desk(handlers, topic=topic, **changes)
        return Desk(*(getattr(desk, one.name) for one in fields(desk)))

    return make
