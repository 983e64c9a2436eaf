"""The example of cells, as its page has it: one topic split to two services on two databases."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4
from zlib import crc32

import asyncpg  # type: ignore[import-untyped]
import pytest
from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]
from aiokafka.admin import AIOKafkaAdminClient  # type: ignore[import-untyped]

from demo.evidence import Evidence
from demo.feed import headers
from demo.flights import Scan
from demo.ledger import audit
from demo.processes import Service
from demo.witness import read_tables, read_topic

from tests.baked import ROOT, BakedProject, Template

pytestmark = [pytest.mark.full, pytest.mark.integration]

PAGE = (ROOT / "docs" / "cells.md").read_text("utf-8")
BLOCKS = re.findall(r"(.*?)^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
"""What stands before each block, its language and its text."""
KAFKA, URL = "PIPELINE_KAFKA_BOOTSTRAP_SERVERS", "PIPELINE_DATABASE_URL"
CELLS = ("00", "01")
PARCELS = 40
PATIENCE = 120.0
START = datetime(2026, 1, 1, tzinfo=UTC)
SPLIT = "SELECT source, id FROM pipeline.inbox WHERE consumer = 'split'"
PARKED = "SELECT reason, consumer FROM pipeline.backlog"


def change(projects: dict[str, BakedProject], before: str, kind: str, text: str) -> None:
    """Do to the services what a block of the page says."""
    for name in re.findall(r"`(src/(?:parcel_tracker|scan_splitter)/\w+\.py)`", before):
        path = projects[name.split("/")[1]].path / name
        assert path.exists() == ("in a new file" not in before.lower())
        if kind == "python":
            path.write_text(text, "utf-8")
            continue
        lines = text.splitlines()
        old, new = (
            "\n".join(line[1:] for line in lines if line[:1] in ("", " ", sign)) for sign in "-+"
        )
        assert path.read_text("utf-8").count(old) == 1
        path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")


@dataclass
class Cells:
    """The three services, and where what they do can be seen."""

    splitter: Service
    services: dict[str, Service]
    databases: dict[str, str]
    """URLs by the name of a cell, and `split`."""
    scans: str
    """The topic that is split."""
    events: str
    """The topic that all cells publish to."""

    async def applied(self, cell: str) -> int:
        """Return how many scans a cell has applied."""
        return sum(row.scans for row in (await read_tables(self.databases[cell]))[0])


def project(template: Template, folder: Path) -> dict[str, BakedProject]:
    """Return both services, generated and changed as the page says."""
    without = dict.fromkeys(("outside_calls", "object_store", "operations_page"), "no")
    without["worked_example"] = "none"
    projects = {
        "parcel_tracker": template.bake(folder),
        "scan_splitter": template.bake(folder, service_name="scan-splitter", **without),
    }
    place = ""
    for before, kind, text in BLOCKS:
        place = before if "`src/" in before else place  # one file may have several blocks
        if kind in ("python", "diff"):
            change(projects, place, kind, text)
    return projects


@pytest.fixture
async def cells(template: Template, tmp_path: Path) -> AsyncIterator[Cells]:
    """The services with topics of the test's own; they do not run yet."""
    projects = await asyncio.to_thread(project, template, tmp_path)
    run = uuid4().hex[:8]
    for made in projects.values():
        for path in (made.path / "src" / made.package).glob("*.py"):
            text = re.sub(r'"(scans|parcel-events)\b', rf'"\1-{run}', path.read_text("utf-8"))
            path.write_text(text, "utf-8")
    async with databases(run) as urls:

        def of(package: str, database: str, **settings: str) -> Service:
            settings |= {URL: urls[database], "PYTHONDONTWRITEBYTECODE": "1"}
            files = (tmp_path / f"{database}.{kind}" for kind in ("log", "lock"))
            return Service(projects[package].path, settings, *files, module=package)

        services = {cell: of("parcel_tracker", cell, CELL=str(int(cell))) for cell in CELLS}
        splitter = of("scan_splitter", "split")
        plain = {name: url.replace("+asyncpg", "") for name, url in urls.items()}
        log = tmp_path / "prepared.log"
        for one in (splitter, *services.values()):
            await one.command("migrate", log=log)
            await one.command("topics", "create", "--partitions", "3", log=log)
        try:
            yield Cells(splitter, services, plain, f"scans-{run}", f"parcel-events-{run}")
        finally:
            for one in (splitter, *services.values()):
                await one.kill()
            await delete_topics(run)


@asynccontextmanager
async def databases(run: str) -> AsyncIterator[dict[str, str]]:
    """Create a database for each cell and one for the splitter; give their URLs."""
    server = os.environ[URL]
    db = await asyncpg.connect(server.replace("+asyncpg", ""))
    names = {one: f"cells_{run}_{one}" for one in (*CELLS, "split")}
    try:
        for name in names.values():
            await db.execute(f"CREATE DATABASE {name}")
        yield {one: f"{server.rpartition('/')[0]}/{name}" for one, name in names.items()}
    finally:
        for name in names.values():
            await db.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await db.close()


async def delete_topics(run: str) -> None:
    """Delete the topics of a run of the test."""
    admin = AIOKafkaAdminClient(bootstrap_servers=os.environ[KAFKA])
    await admin.start()
    try:
        topics = [name for name in await admin.list_topics() if run in name]
        await admin.delete_topics(topics)
    finally:
        await admin.close()


def scan(number: int) -> Scan:
    """Return a scan: of one parcel after the other, some of them late."""
    at, parcel = START + timedelta(minutes=number), f"parcel-{number % PARCELS}"
    return Scan("scanner-1", number, parcel, f"place-{number % 7}", at, 5 * (number % 20))


def of_cell(cell: str, scans: list[Scan]) -> list[Scan]:
    """Return the scans of a cell, by the rule of the page."""
    return [one for one in scans if f"{crc32(one.parcel_id.encode()) % len(CELLS):02}" == cell]


async def send(topic: str, scans: list[Scan]) -> None:
    """Send scans, every tenth one twice."""
    async with AIOKafkaProducer(
        bootstrap_servers=os.environ[KAFKA], enable_idempotence=True
    ) as producer:
        for one in scans:
            for _ in range(1 + (one.number % 10 == 0)):
                key = one.parcel_id.encode()
                await producer.send(topic, one.payload(), key=key, headers=headers(one))


async def until(reached: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(PATIENCE):
        while not await reached():  # noqa: ASYNC110  # other processes do not tell us
            await asyncio.sleep(0.1)


async def test_two_cells_apply_their_messages_while_one_and_the_splitter_die(
    cells: Cells,
) -> None:
    first, last = cells.services.values()
    scans = [scan(number) for number in range(1, 601)]
    early, late = scans[:300], scans[300:]
    for service in (cells.splitter, first, last):
        await service.start()

    async def has(cell: str, wanted: list[Scan]) -> bool:
        return await cells.applied(cell) >= len(of_cell(cell, wanted))

    async def parked(database: str, wanted: list[tuple[str, str]]) -> bool:
        return await fetched(cells.databases[database], PARKED) == wanted

    await send(cells.scans, early)
    await until(lambda: has("00", early))
    await until(lambda: has("01", early))
    await last.kill()
    await send(cells.scans, late[:150])
    await until(lambda: has("00", scans[:450]))
    await send(cells.scans, late[150:])
    await cells.splitter.kill()
    await cells.splitter.start()
    await until(lambda: has("00", scans))
    assert await cells.applied("01") == len(of_cell("01", early)), "it is down"
    await last.start()
    await until(lambda: has("01", scans))
    stray = replace(of_cell("01", scans)[-1], number=len(scans) + 1)
    await send(f"{cells.scans}-00", [stray])
    await until(lambda: parked("00", [("rejected", "record-scan")]))
    for service in (cells.splitter, first, last):
        assert await service.stop()
    assert await parked("01", [])
    assert await parked("split", [])

    tables = {cell: await read_tables(cells.databases[cell]) for cell in CELLS}
    for cell, (parcels, markers) in tables.items():
        mine = of_cell(cell, scans)
        assert {row.id for row in parcels} == {one.parcel_id for one in mine}
        assert len(markers) == len(set(markers)) == len(mine) > 100
    verdict = audit(
        Evidence(
            sent=scans,
            duplicates=60,
            markers=await fetched(cells.databases["split"], SPLIT),
            parcels=[row for parcels, _ in tables.values() for row in parcels],
            output=await read_topic(os.environ[KAFKA], cells.events),
            seconds=1,
        )
    )
    assert verdict.findings == []
    assert verdict.ledger.applied == len(scans)


async def fetched(url: str, query: str) -> list[tuple[str, str]]:
    """Return the rows of a query of two texts."""
    db = await asyncpg.connect(url)
    try:
        return [(row[0], row[1]) for row in await db.fetch(query)]
    finally:
        await db.close()
