"""Programs that some tests need, and that a machine may lack."""

import os
import shutil
from typing import NoReturn

import pytest


def program(name: str, package: str) -> str:
    """Return where it is. Without it a person's test is skipped, and one of CI fails."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") or lacking(
        f"{name} is not on PATH (Debian: apt-get install {package})"
    )


def lacking(what: str) -> NoReturn:
    """End the test. It fails where all programs have to be there: in CI, and behind a pooler."""
    if os.environ.get("CI") or os.environ.get("TEST_POOLER"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what)
