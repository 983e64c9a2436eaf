"""Programs that some tests need, and that a machine may lack: `dev/programs.py` lists them."""

import os
from pathlib import Path

import programs
import pytest


def program(name: str) -> Path:
    """Return where it is. Without it the test is skipped, and fails where CI is set."""
    wanted = programs.program(name)
    found = wanted.find()
    if found is None:
        # Behind a pooler every test would be skipped, which is easily overlooked.
        if os.environ.get("CI") or os.environ.get("TEST_POOLER"):
            pytest.fail(wanted.hint, pytrace=False)
        pytest.skip(wanted.hint)
    return found
