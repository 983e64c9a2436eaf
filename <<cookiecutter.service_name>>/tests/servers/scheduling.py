"""Which tests pytest-xdist may run in different workers: all but those that belong together."""

from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling


class ByFiles(LoadScopeScheduling):  # type: ignore[misc]
    """Keeps the tests of a file together that shares fixtures, or has the mark `together`.

    xdist's own `loadgroup` has no effect under pytest 9.2, which computes node ids anew.
    """

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self._root = config.rootpath

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if _stays_together(self._root / file) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFiles:
    """Return what spreads the tests, as pytest-xdist asks for it."""
    return ByFiles(config, log)


@cache
def _stays_together(file: Path) -> bool:
    text = file.read_text("utf-8")
    return 'scope="module"' in text or "pytest.mark.together" in text
