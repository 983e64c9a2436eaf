"""Programs that some tests need, and that a machine may lack: `dev/programs.py` lists them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

import programs
import pytest
from servers.console import StackError
from servers.process import LocalServer

S = TypeVar("S", bound=LocalServer)


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


@contextmanager
def running(server: S) -> Iterator[S]:
    """Start a server and stop it at the end; the test ends as in `program` if it lacks one."""
    require_what_it_needs(server)
    try:
        server.start()
        server.wait_until_serving()
        yield server
    finally:
        server.stop()


def lacking(what: str) -> NoReturn:
    """End the test. It fails in CI, and behind a pooler, where else all tests would be skipped."""
    if os.environ.get("CI") or os.environ.get("TEST_POOLER"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what)
