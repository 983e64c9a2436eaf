"""The programs of the service's own table, and what the template's tests need besides.

`python -m tests.programs TIER` installs what the tests of a tier lack, as
`<<cookiecutter.service_name>>/dev/programs.py` describes.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.baked import RAW

sys.path.insert(0, str(RAW / "dev"))
import programs as service

PROGRAMS = (
    *service.PROGRAMS,
    # What searches the models.
    service.Program("spin", "test-full", debian=("spin",)),
    service.Program("gcc", "test-full", debian=("gcc", "libc6-dev")),
    # What a page of the service reads an archive with.
    service.Program("jq", "test-full", debian=("jq",)),
    # A browser for the operations page.
    service.Program("chromium", "test-full", debian=("chromium",)),
    # What builds the manifests and merges the compose files: Debian has no such package, or an
    # old one.
    service.Program(
        "kustomize",
        "test-full",
        go=service.GoModule("sigs.k8s.io/kustomize/kustomize/v5", "v5.7.1"),
    ),
    service.Program(
        "docker-compose",
        "test-full",
        go=service.GoModule("github.com/docker/compose/v2/cmd", "v2.29.7"),
    ),
)


def require(name: str) -> Path:
    """Return where a program is. Without it the test is skipped, and fails where CI is set."""
    program = service.program(name, PROGRAMS)
    found = program.find()
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(program.hint, pytrace=False)
        pytest.skip(program.hint)
    return found


if __name__ == "__main__":
    service.main(PROGRAMS)
