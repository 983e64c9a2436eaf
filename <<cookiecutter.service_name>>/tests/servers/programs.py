"""Programs that some tests need, and that a machine may lack: `dev/programs.py` lists them."""

import os
from pathlib import Path
from typing import NoReturn

import programs
import pytest
from servers.console import StackError
from servers.process import LocalServer


def program(name: str) -> Path:
    """Return where it is. Without it the test is skipped, and fails where CI is set."""
    wanted = programs.program(name)
    return wanted.find() or lacking(wanted.hint)


def require_what_it_needs(server: LocalServer) -> None:
    """Find or install the programs of a server; the test ends as in `program` without them."""
    try:
        server.check_requirements()
    except StackError as error:
        lacking(str(error))


def lacking(what: str) -> NoReturn:
    """End the test. It fails in CI, and behind a pooler, where else all tests would be skipped."""
    if os.environ.get("CI") or os.environ.get("TEST_POOLER"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what)
