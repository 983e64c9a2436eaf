"""The fixtures of the engine's tests, with appliers that also make calls."""

from dataclasses import fields
from pathlib import Path

import pytest

from onceward import Handlers

from .applier import Applier, NewApplier
from tests.onceward.integration import applier as engine
from tests.onceward.integration.conftest import bank, new_applier  # noqa: F401 (fixtures)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.path.stem != "test_registration":
            item.add_marker(pytest.mark.integration)


@pytest.fixture
def new_calling_applier(new_applier: engine.NewApplier) -> NewApplier:  # noqa: F811
    """Make appliers that also make the calls that are staged there."""

    async def make(handlers: Handlers, *, topic: str, **changes: object) -> Applier:
        applier = await new_applier(handlers, topic=topic, **changes)
        return Applier(*(getattr(applier, one.name) for one in fields(applier)))

    return make
