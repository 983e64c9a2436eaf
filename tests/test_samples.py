"""The samples on the page of commands: what a generated service prints, and where it is shown.

`WRITE_SAMPLES=1` with `-m full` keeps what the service prints now.
"""

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]

from demo.feed import headers
from demo.flights import Scan
from demo.processes import Service, Stack
from website import samples

from tests.baked import BakedProject

PATIENCE = 120.0
VARYING = {
    r"\b[0-9a-f]{16}(?:[0-9a-f]{16})?\b": "ID",
    r"\b\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|\+00:00)?)?": "TIME",
    r"\boutbox_p\d{8}\b": "DAY",
    r"\b\d+ (?:s|min|h|d)\b": "SPAN",
    r"127\.0\.0\.1:\d+": "KAFKA",
    r"PostgreSQL \d+\.\d+": "POSTGRESQL",
    r"(?<=^timestamp) +\d+$": "MILLISECONDS",
    r"(?<=^transaction) +\d+$": "TRANSACTION",
    r"(?<=sizes) .*$": "SIZES",
    r"\d+(?= +failed )": "ATTEMPTS",
    r"^(?:.* offsets are read again.*\n)+": "PROGRESS\n",
    r" +": " ",
    r"^(?:DAY .*\n)+": "DAYS\n",
}
"""What differs from run to run, and what stands for it in comparisons."""


def comparable(sample: str) -> str:
    """Return what two runs have in common."""
    for pattern, name in VARYING.items():
        sample = re.sub(pattern, name, sample, flags=re.MULTILINE)
    return sample


def test_two_runs_are_compared_by_what_does_not_vary() -> None:
    first = "50329d8c7f50833a  2026-12-01 03:09:10Z         2  failed  tell-webhook\n"
    second = "1dec85a20e2d9b24  2026-12-02 13:09:42Z         1  failed  tell-webhook\n"
    assert comparable(first) == comparable(second)
    assert comparable(first) != comparable(first.replace("failed", "rejected"))
    assert comparable("reads  lag 0, moved 8 s ago") == comparable("reads  lag 0, moved 3 min ago")
    assert comparable("reads  lag 0") != comparable("reads  lag 1")


def test_a_sample_stands_at_the_end_of_its_command() -> None:
    page = "# Commands\n\n## `service dead`\n\nLetters.\n\n### `service dead list`\n\nList.\n"
    whole = samples.added(page, {"service dead list --waiting": "1 waiting\n"})
    assert whole.endswith("List.\n\n```text\n$ service dead list --waiting\n1 waiting\n```\n\n")
    assert whole.partition("\n\n```text")[0] == page.rstrip()
    with pytest.raises(LookupError, match="service walk, which is no command"):
        samples.added(page, {"service walk": "\n"})


def test_the_main_commands_have_samples() -> None:
    commands = {" ".join(shlex.split(line)[1:3]) for line in samples.read()}
    assert {"status", "doctor", "inbox show", "dead list", "dead show"} <= commands
    assert {"dead redrive", "dead discard", "topics seek", "replay scans"} <= commands


@pytest.mark.full
@pytest.mark.integration
def test_the_samples_are_what_a_service_prints(
    default_project: BakedProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With servers of its own: other tests have services of this name, on other databases.
    for name in [one for one in os.environ if one.startswith("PIPELINE_")]:
        monkeypatch.delenv(name)
    found = asyncio.run(capture(default_project.path, tmp_path))
    if os.environ.get("WRITE_SAMPLES"):
        samples.write(found)
    kept = samples.read()
    assert [*map(comparable, found)] == [*map(comparable, kept)]
    for line, expected in zip(found, kept.values(), strict=True):
        assert comparable(found[line]) == comparable(expected), line


async def capture(project: Path, folder: Path) -> dict[str, str]:
    """Return what the commands of a service print that has applied, waiting and dead messages."""
    stack, log = Stack(project, folder / "stack"), folder / "log"
    await stack.up(log)
    # Nothing listens there, so that a call waits.
    settings = stack.addresses | {"DELAY_WEBHOOK": "http://127.0.0.1:9/delays"}
    files = (folder / "service.log", folder / "service.lock")
    service = Service(project, settings, *files, defaults={})
    try:
        await service.prepare(log)
        await service.start()
        await service.ready()
        await furnish(service, stack.kafka)
        environment = {**os.environ, **settings, "PYTHONPATH": str(project / "src")}
        return {
            line: await asyncio.to_thread(printed, line, project, environment)
            for line in await lines(service)
        }
    finally:
        await service.kill()
        await stack.remove(log)


def printed(line: str, project: Path, environment: dict[str, str]) -> str:
    """Return what a command prints, as in a terminal with its errors, whatever its exit code is."""
    return subprocess.run(
        [sys.executable, "-m", "parcel_tracker", *shlex.split(line)[1:]],
        cwd=project,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ).stdout


async def letters(service: Service, *options: str) -> list[dict[str, str]]:
    """Return dead letters, or messages that wait."""
    text = await service.ask("dead", "list", "--json", *options)
    return [json.loads(one) for one in text.splitlines()]


async def furnish(service: Service, kafka: str) -> None:
    """Send a late scan, then one with a known id, then one that does not fit its model."""

    def scan(number: int, parcel: str, place: str, late: int = 0) -> Scan:
        at = datetime(2026, 1, 1, 12, tzinfo=UTC) + timedelta(minutes=number)
        return Scan("JFK-3", number, parcel, place, at, late)

    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:

        async def sent(one: Scan, value: bytes, *options: str) -> None:
            key = one.parcel_id.encode()
            await producer.send_and_wait("scans", value, key=key, headers=headers(one))
            async with asyncio.timeout(PATIENCE):
                while options and not await letters(service, *options):  # noqa: ASYNC110
                    await asyncio.sleep(1)

        for one in (scan(1, "N14228", "JFK"), scan(2, "N14228", "LAX"), scan(4, "N619AA", "JFK")):
            await sent(one, one.payload())
        late, again = scan(3, "N24211", "JFK", 90), scan(2, "N14228", "SFO")
        await sent(late, late.payload(), "--waiting", "--reason", "failed")
        await sent(again, again.payload(), "--reason", "identity mismatch")
        invalid = scan(5, "N804JB", "JFK")
        value = invalid.payload().replace(b'"JFK"', b"3")
        await sent(invalid, value, "--reason", "invalid payload")


async def lines(service: Service) -> list[str]:
    """Return the command lines of the samples, in their order."""
    [letter] = await letters(service, "--reason", "identity mismatch")
    return [
        *("service status", "service doctor", "service inbox show 2"),
        *("service dead list", "service dead list --summary", "service dead list --waiting"),
        f"service dead show {letter['id']}",
        'service dead redrive --reason "invalid payload" --yes',
        'service dead discard --reason "identity mismatch" --because "sent by hand" --yes',
        *("service topics create", "service topics seek scans --partition 0 --to 1 --dry-run"),
        *("service replay scans --from earliest", "service retention status"),
    ]
