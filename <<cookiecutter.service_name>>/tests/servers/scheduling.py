"""Which tests pytest-xdist may run in different workers: all but those that share a fixture."""

from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling


class ByFixtures(LoadScopeScheduling):  # type: ignore[misc]
    """Keeps the tests of a file together if fixtures of it last as long as the module.

    xdist's own `loadgroup` has no effect under pytest 9.2, which computes node ids anew.
    """

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self._root = config.rootpath

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if _shares_fixtures(self._root / file) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFixtures:
    """Return what spreads the tests, as pytest-xdist asks for it."""
    return ByFixtures(config, log)


@cache
def _shares_fixtures(file: Path) -> bool:
    return 'scope="module"' in file.read_text("utf-8")
