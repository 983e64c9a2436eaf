"""The programs of the service's own table, and what the template's tests need besides.

`python -m tests.programs TIER` installs what the tests of a tier lack, as
`<<cookiecutter.service_name>>/dev/programs.py` describes.
"""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from tests.baked import RAW

sys.path.insert(0, str(RAW / "dev"))
import programs as service

PROGRAMS = (
    *service.PROGRAMS,
    # What makes the system on which the README is followed.
    service.Program("debootstrap", "test-full", debian=("debootstrap",)),
    # What searches the models.
    service.Program("spin", "test-full", debian=("spin",)),
    service.Program("gcc", "test-full", debian=("gcc", "libc6-dev")),
    # What counts instructions.
    service.Program("valgrind", "test-full", debian=("valgrind",)),
    # What a page of the service reads an archive with.
    service.Program("jq", "test-full", debian=("jq",)),
    # A browser for the operations page.
    service.Program("chromium", "test-full", debian=("chromium",)),
    # What installs and runs `NODE_PACKAGES`.
    service.Program("npm", "test-full", debian=("npm",)),
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

NODE_PACKAGES = ("@asyncapi/parser@3.6.6", "@asyncapi/react-component@3.2.1")
"""What reads and shows AsyncAPI documents, from npm."""


def node_packages() -> Path:
    """Return the folder in which these packages are installed, once for all projects of this user.

    Without npm the test is skipped, and fails where CI is set.
    """
    npm = require("npm")
    folder = service.CACHE / "-".join(each.rpartition("/")[2] for each in NODE_PACKAGES)
    service.CACHE.mkdir(parents=True, exist_ok=True)
    with (service.CACHE / "npm-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(prefix="npm-", dir=service.CACHE) as work:
                options = ("--no-audit", "--no-fund", "--ignore-scripts", "--prefix", work)
                subprocess.run([npm, "install", *options, *NODE_PACKAGES], check=True)
                Path(work).rename(folder)
                Path(work).mkdir()
    return folder / "node_modules"


@dataclass(frozen=True)
class GoSource:
    """The source of a Go module, without that of the modules which it requires."""

    module: str
    version: str
    sum: str
    """Its hash, as go.sum has it."""

    def folder(self) -> Path:
        """Return the folder of its files, which Go downloads once for all projects of this user.

        If it can't be downloaded the test is skipped, and fails where CI is set.
        """
        try:
            go = service.require_go()
        except service.ProgramError as error:
            lacking(str(error))
        command = [str(go), "mod", "download", "-json", f"{self.module}@{self.version}"]
        with tempfile.TemporaryDirectory() as elsewhere:
            done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True)
        if done.returncode != 0:
            lacking(f"{self.module} can't be downloaded: {done.stdout}{done.stderr}")
        downloaded = json.loads(done.stdout)
        assert downloaded["Sum"] == self.sum, self.module
        return Path(downloaded["Dir"])


def require(name: str) -> Path:
    """Return where a program is. Without it the test is skipped, and fails where CI is set."""
    program = service.program(name, PROGRAMS)
    return program.find() or lacking(program.hint)


def lacking(what: str) -> NoReturn:
    """Skip the test; fail it where CI is set."""
    if os.environ.get("CI"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


if __name__ == "__main__":
    service.main(PROGRAMS)
