"""Databases of releases: made with rows in their tables, restored, and upgraded by this version.

`dumps.py make VERSION` writes the dump of a database that the contract suite's bank has used.
`dumps.py upgrade VERSION FILE` restores a dump, migrates it, and compares its schema with that of a
new database; with the folder of the release's code as a further argument that code runs meanwhile.
It runs with the folders of the raw tree on PYTHONPATH: see `tests/release.py`.
"""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from difflib import unified_diff
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch
from uuid import uuid4

import asyncpg  # type: ignore[import-untyped]
from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]
from servers.postgres import installation
from sqlalchemy import make_url

from onceward import Service
from onceward.apply import inbox
from onceward.retention import partitions
from onceward.retention.maintenance import run_retention
from onceward.servers.database import autocommitting, create_engine
from onceward.settings import Settings
from onceward.testing.databases import ResettableDatabase
from onceward.testing.harness import Harness

from tests.contract.bank import Base, Deposit
from tests.contract.ledger import Ledger
from tests.servers.databases import (
    administer,
    build,
    drop_databases,
    migrations_of_the_engine,
    url_of,
)
from tests.servers.fork_server import write_code
from tests.servers.processes import ROOT as NEW
from tests.servers.processes import Process, environment
from tests.servers.topics import administrator, create_topic, delete_topic, following
from tests.servers.waiting import eventually

MADE_ON = date(2026, 1, 1)
"""The day that every dump is from: days are moved there, and to today when it is restored."""
NEAR = timedelta(days=30)
"""Days that are further away stay."""
SENT = 1_699_920_000_000
"""The time of the records, in milliseconds: a midnight, as all times of a dump."""
KAFKA = "PIPELINE_KAFKA_BOOTSTRAP_SERVERS"
LOCATIONS = ("onceward:migrations/versions", "onceward.personal:migrations")
OLD_LOCATIONS = ("pipeline:migrations/versions", "personal:migrations")
"""Of version 1, whose packages had other names."""

ACCOUNTS = ("eve", "eve", "ada", "bob", "ada", "bob", "ada", "bob")
POISON, FAILING, ROTATED = 1, 7, 4
"""The deposit that is dead, that which is to be tried again, and the last before a rotation."""
DEPOSITS = [
    Deposit(amount, f"old-{account}", timestamp=SENT, failures=int(amount == FAILING))
    for amount, account in enumerate(ACCOUNTS, 1)
]
"""What the bank of a dump has got: all in partition 0, from its first offset on."""

OTHER_ROWS = """
INSERT INTO pipeline.scheduled (name, due_at, topic, event_id, source, type, content_type)
VALUES ('reminder', '2999-01-01 00:00+00', 'reminders', 'r', '/bank', 'reminder', 'y');
INSERT INTO pipeline.outbox_rejected
       (id, created_at, topic, event_id, source, type, content_type, died_at, reason)
VALUES (0, now(), 'reminders', 'd', '/bank', 'reminder', 'y', now(), 'too large');
INSERT INTO pipeline.claim (name, event_id) VALUES ('bank/c', 'c');
INSERT INTO pipeline.outbox_relay (owner, lease_until) VALUES ('relay', now() - interval '1 day');
INSERT INTO pipeline.personal_key (id, subject, wrapped) VALUES ('\\x00', 'ada', '\\x00');
INSERT INTO pipeline.personal_forgotten (subject, keys, forgotten_by) VALUES ('bob', 1, 'ann');
"""
"""Rows that the bank does not have."""
KEPT = ("claim", "outbox_rejected", "personal_forgotten", "personal_key", "scheduled")
"""Their tables, as far as a running bank leaves them alone."""

NO_SQL = ("--", "\\r", "\\u")
"""How lines of a dump begin that are comments, or for psql."""

_BEHIND = """
SELECT COALESCE(array_agg(key), '{}') FROM pipeline.backlog
 WHERE record_key = 'account-1' AND died_at IS NULL AND reason = 'follows another'
"""
_WAITS = f"SELECT cardinality(({_BEHIND})) > 0"
_ARE_GONE = "SELECT NOT EXISTS (SELECT FROM pipeline.backlog WHERE key = ANY ($1::bytea[]))"
"""The deposits that wait behind a paused key, of an account whose deposits never fail."""

# What differs from run to run and from machine to machine, beside times.
NEUTRAL = """
UPDATE pipeline.backlog SET traceback = 'Traceback', waited = 0 WHERE traceback IS NOT NULL;
UPDATE pipeline.backlog_lane SET token = 1, owner = NULL, lease_until = NULL, starts = 0;
UPDATE pipeline.inbox SET xid = '1000';
UPDATE pipeline.inbox_generation
   SET opening = '00000000-0000-4000-8000-000000000001',
       database_id = '00000000-0000-4000-8000-000000000002';
UPDATE pipeline.outbox SET xid = '1000';
UPDATE pipeline.outbox_closed SET xid = '1000';
UPDATE pipeline.outbox_cluster
   SET system_identifier = 1, database_oid = 1, kafka_cluster = NULL;
UPDATE pipeline.outbox_cursor SET seen = '1000:1000:';
"""


SCHEMA_ALONE = (
    "--schema-only",
    "--schema=pipeline",  # the bank's own tables may change
    "--exclude-table=pipeline.inbox_g[0-9]+",
    "--exclude-table=pipeline.outbox_p[0-9]+",
)
"""Options for a dump without rows and partitions."""


def name_of(version: str) -> str:
    """Return the name of a release's bank, which is that of its group, too."""
    return f"bank-{version}"


def variables(version: str) -> dict[str, str]:
    """Return what the program of a bank reads from its environment."""
    name = name_of(version)
    return {
        "BANK_NAME": name,
        "BANK_DEPOSITS": f"{name}-deposits",
        "BANK_BALANCES": f"{name}-balances",
    }


def move_days(dump: str, origin: date, to: date) -> str:
    """Return a dump with its days moved; those that are far from `origin` stay."""

    def move(found: re.Match[str]) -> str:
        day = date.fromisoformat(found[0])
        if abs(day - origin) > NEAR:
            return found[0]
        return format(day + (to - origin), "%Y-%m-%d" if "-" in found[0] else "%Y%m%d")

    return re.sub(r"(?<!\d)\d{4}-\d\d-\d\d(?!\d)|(?<=outbox_p)\d{8}", move, dump)


def today() -> date:
    """Return the day in UTC, as partitions have it."""
    return datetime.now(UTC).date()


def pg_dump(url: str, *options: str) -> str:
    """Return a dump without comments, its rows in order."""
    plain = ("--no-owner", "--no-privileges", "--restrict-key=release", *options)
    libpq = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    done = subprocess.run(
        [installation() / "bin" / "pg_dump", *plain, libpq],
        env={**os.environ, "PGTZ": "UTC"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line and line[:2] not in NO_SQL]
    rows = iter(sorted(line for line in lines if line.startswith("INSERT ")))
    return "".join(f"{next(rows) if line.startswith('INSERT ') else line}\n" for line in lines)


async def use(database: ResettableDatabase, version: str) -> None:
    """Let a bank use its database: deposits are applied, wait and are dead; retention runs."""
    url = database.url
    os.environ.update(variables(version) | {"BANK_POISON": str(POISON)})
    handlers = import_module("tests.contract.app").handlers
    service = Service(name_of(version), handlers=handlers, metadata=Base.metadata)
    unused = {"database_url": url, "kafka_bootstrap_servers": "unused:9092"}
    engine = create_engine(database.settings(), name="release", check=None)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.dispose)
        stack.enter_context(patch("onceward.testing.records.time", lambda: SENT / 1_000))
        folder = stack.enter_context(TemporaryDirectory())
        harness = Harness(service, engine, database, Path(folder))
        driver = await stack.enter_async_context(autocommitting(engine))
        await inbox.register(driver, handlers.consumers)
        for one in DEPOSITS:
            sent = one.record(os.environ["BANK_DEPOSITS"], 0)
            await harness.handle_record(
                sent.topic, sent.value, key=sent.key, headers=dict(sent.headers)
            )
            if one.amount == POISON:
                await harness.advance(hours=1)
            if one.amount == ROTATED:
                await driver.execute(
                    "UPDATE pipeline.inbox_generation SET opened_at = opened_at - interval '2 days'"
                )
                day = today() - timedelta(days=2)
                bounds = f"FROM ('{day} 00:00+00') TO ('{day + timedelta(days=1)} 00:00+00')"
                await partitions.attach(driver, "outbox", f"outbox_p{day:%Y%m%d}", bounds)
                await run_retention(driver, Settings.model_validate(unused))
        await driver.execute(OTHER_ROWS)
        await driver.execute(NEUTRAL)


def make(server_url: str, version: str) -> str:
    """Return the dump of a database that a bank of this version has used."""
    url = new_database(server_url, version)
    try:
        made_on = today()
        with closing(ResettableDatabase(url)) as database:
            asyncio.run(use(database, version))
        dump = pg_dump(url, "--column-inserts")
        if today() != made_on:
            raise SystemExit("the day has changed meanwhile: run it again")
    finally:
        drop(server_url, url)
    dump = re.sub(r"(\d{4}-\d\d-\d\d) \d\d:\d\d:\d\d(\.\d+)?\+00", r"\1 00:00:00+00", dump)
    return move_days(dump, made_on, MADE_ON)


def empty_database(server_url: str) -> str:
    """Create a database without tables, and return its URL."""
    name = f"release_{uuid4().hex[:12]}"
    asyncio.run(administer(server_url, f"CREATE DATABASE {name}"))
    return str(url_of(server_url, name))


def new_database(server_url: str, version: str) -> str:
    """Create a database, migrated to the newest schema, with the tables of the bank."""
    url = empty_database(server_url)
    config = migrations_of_the_engine(*LOCATIONS[1:])
    config.attributes["service"] = name_of(version)
    build(url, config, Base.metadata)
    return url


def drop(server_url: str, *urls: str) -> None:
    """Drop databases."""
    asyncio.run(drop_databases(server_url, [str(make_url(url).database) for url in urls]))


async def restore(url: str, dump: str) -> None:
    """Restore a dump, as of today, into an empty database."""
    db = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        await db.execute(move_days(dump, MADE_ON, today()))
    finally:
        await db.close()


@dataclass(frozen=True)
class Upgrade:
    """The bank of a release, whose dump is restored and migrated by the code of this version."""

    version: str
    url: str
    folder: Path
    """Takes the configuration of processes."""
    old: Path | None = None
    """The raw tree of the release, if its code is to run meanwhile."""

    async def run(self, kafka: str) -> None:
        """Migrate. The release's processes handle deposits meanwhile, and then those of this one.

        All deposits take effect once and in order: those of the dump, of which some wait and one is
        dead, and those that come during the upgrade. Raises `AssertionError`.
        """
        before = await self.kept_rows()
        if self.old is None:
            await self.succeed(NEW, "migrate")
        else:
            await self.run_beside(kafka, self.old)
        after = await self.kept_rows()
        assert before == {
            table: [
                {column: row[column] for column in old}
                for old, row in zip(rows, after[table], strict=True)
            ]
            for table, rows in before.items()
        }

    async def run_beside(self, kafka: str, old: Path) -> None:
        """Migrate while the release's code runs, and replace it."""
        topics = [variables(self.version)[f"BANK_{one}"] for one in ("DEPOSITS", "BALANCES")]
        deposits, balances = topics
        async with AsyncExitStack() as stack:
            for topic in topics:
                await delete_left_over(kafka, topic)
                await create_topic(kafka, topic, 4)
                stack.push_async_callback(delete_topic, kafka, topic)
            producer = await stack.enter_async_context(
                AIOKafkaProducer(bootstrap_servers=kafka, enable_idempotence=True)
            )
            db = await asyncpg.connect(self.url.replace("+asyncpg", ""))
            stack.push_async_callback(db.close)
            published = await stack.enter_async_context(following(kafka, balances))
            ledger = Ledger(
                name_of(self.version), deposits, balances, kafka, db, producer, published
            )
            await ledger.send(*DEPOSITS)
            await self.succeed(old, "relay", "reset", "--yes")
            async with ledger.traffic():
                replaced = await stack.enter_async_context(self.process(old, "run"))
                await ledger.progresses()
                await self.succeed(NEW, "migrate")
                await ledger.progresses()
                for _ in range(2):  # the release makes a dead letter of the first one
                    await self.pause_and_resume(ledger)
                await stack.enter_async_context(self.process(NEW, "run"))
                replaced.send(signal.SIGTERM)
                assert await replaced.ended() == 0, replaced.output
                await ledger.progresses()
                # What took effect before the release is known.
                await ledger.send(*(replace(one, timestamp=None) for one in DEPOSITS))
                redriven = await self.succeed(NEW, "dead", "redrive", "--all", "--yes")
                assert "1 applied" in redriven, redriven

    async def pause_and_resume(self, ledger: Ledger) -> None:
        """Pause a key, resume it, and wait until the release's workers handle what has waited."""
        key = "key", "account-1"
        await self.succeed(NEW, "pause", *key, "--because", "a test", "--yes")
        await eventually(lambda: ledger.db.fetchval(_WAITS))
        behind = await ledger.db.fetchval(_BEHIND)
        await self.succeed(NEW, "resume", *key)
        await eventually(lambda: ledger.db.fetchval(_ARE_GONE, behind))

    async def kept_rows(self) -> dict[str, list[dict[str, object]]]:
        """Return the rows that no process has to change, by their tables.

        Migrations may add columns, and compute shards anew.
        """
        db = await asyncpg.connect(self.url.replace("+asyncpg", ""))
        try:
            rows = {
                table: await db.fetch(
                    f"SELECT (to_jsonb(x) - 'shard')::text AS row FROM pipeline.{table} AS x"
                )
                for table in KEPT
            }
        finally:
            await db.close()
        return {table: [json.loads(one["row"]) for one in found] for table, found in rows.items()}

    @asynccontextmanager
    async def process(self, code: Path, *command: str) -> AsyncIterator[Process]:
        """Start the bank's program with the code of a raw tree; it is killed at the end."""
        home = self.folder / ("new" if code == NEW else "old")
        home.mkdir(exist_ok=True)
        is_old = (code / "src" / "pipeline").exists()
        locations = "".join(f"\n    {one}" for one in (OLD_LOCATIONS if is_old else LOCATIONS))
        (home / "alembic.ini").write_text(
            f"[alembic]\nscript_location = {code / 'tests/servers/alembic'}\n"
            f"path_separator = newline\nversion_locations ={locations}\n",
            "utf-8",
        )
        chosen = environment(
            variables(self.version),
            database_url=self.url,
            kafka_bootstrap_servers=os.environ.get(KAFKA, "unused:9092"),
            health_port=0,
            log_json=False,
            kafka_session_timeout=6,
            transaction_timeout=5,
            lock_timeout=4,
            relay_lease=2,
            retry_pause=0.2,
        )
        chosen["PYTHONPATH"] = os.pathsep.join(map(str, (code / "src", code / "dev", code)))
        log = self.folder / uuid4().hex
        with log.open("wb") as output:
            started = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.contract.app", *command),
                cwd=home,
                env=chosen,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
            )
        process = Process(started.pid, log)

        async def note_end() -> None:
            write_code(log, await started.wait())

        noting = asyncio.create_task(note_end())
        try:
            yield process
        finally:
            await process.kill()
            await noting
            print(process.output)

    async def succeed(self, code: Path, *command: str) -> str:
        """Run a command of the bank's program to its end, and return what it wrote."""
        async with self.process(code, *command) as process:
            assert await process.ended() == 0, process.output
            return str(process.output)


async def delete_left_over(kafka: str, topic: str) -> None:
    """Delete a topic, if a run that was killed has left it."""
    async with administrator(kafka) as admin:
        is_left = topic in await admin.list_topics()
    if is_left:
        await delete_topic(kafka, topic)


def upgrade(server_url: str, version: str, dump: str, old: Path | None) -> None:
    """Restore and upgrade a dump; its schema is then that of a new database."""
    url = empty_database(server_url)
    try:
        asyncio.run(restore(url, dump))
        with TemporaryDirectory() as folder:
            asyncio.run(Upgrade(version, url, Path(folder), old).run(os.environ.get(KAFKA, "")))
        new = new_database(server_url, version)
        upgraded, expected = (pg_dump(one, *SCHEMA_ALONE).splitlines() for one in (url, new))
        drop(server_url, new)
        assert upgraded == expected, "\n".join(unified_diff(upgraded, expected, lineterm=""))
    finally:
        drop(server_url, url)


def main(command: str, version: str, *files: str) -> None:
    """Do what the command line says."""
    server_url = os.environ["PIPELINE_DATABASE_URL"]
    if command == "make":
        logging.disable()  # what fails is to fail
        sys.stdout.write(make(server_url, version))
    else:
        dump, *code = map(Path, files)
        upgrade(server_url, version, dump.read_text("utf-8"), code[0] if code else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
