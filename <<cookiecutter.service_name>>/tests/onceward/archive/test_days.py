"""Days of the outbox go into the archive, whole, before their tables are dropped."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from servers.s3proxy import S3Proxy

from onceward.archive import days
from onceward.archive.files import MANIFEST, Manifest
from onceward.object_store import Store
from onceward.object_store import store as stores
from onceward.retention import archive as retentions
from onceward.retention import partition_statements, partitions
from onceward.retention.maintenance import Round, begin_round, run_retention
from onceward.retention.partitions import Partition, State

from . import app
from .conftest import DAY, OLD, House, make_day
from tests.onceward.integration.conftest import Command
from tests.onceward.integration.outgoing import event
from tests.onceward.integration.tcp_proxy import TcpProxy
from tests.servers.databases import HOME
from tests.servers.waiting import PATIENCE, eventually

Connect = Callable[[], Awaitable[asyncpg.Connection]]

FOLDER = app.archive.folder(DAY)


async def manifest(store: Store) -> Manifest:
    """Return what the archive says of the old day."""
    return Manifest.model_validate_json(await store.get(FOLDER + MANIFEST))


async def names(store: Store) -> list[str]:
    """Return the names of what the archive has of the old day."""
    return sorted(
        [name.removeprefix(FOLDER) async for page in store.pages(FOLDER) for name in page]
    )


async def found(service: Command, id: str) -> dict[str, Any]:
    """Return the one event that the archive has of this id."""
    done = await service("find", id)
    assert done.exit_code == 0, done.stderr
    one: dict[str, Any] = json.loads(done.stdout)
    return one


async def test_what_is_dropped_is_in_the_archive_as_it_was(
    house: House, store: Store, service: Command
) -> None:
    awkward = [
        event("t", "plain", "ada", b'{"a": 1}', sequence=7, traceparent="00-ab", baggage="x=y"),
        event("t", 'a "quoted" \\ id', "schlüssel", "wörter 荷物\r\n\u2028".encode()),
        event("t", "bytes", None, b"\xff\x00 no text")._replace(key=b"\xfe"),
        event("t", "nothing", None)._replace(payload=None),
        event("t", "letter", "ada", b"{}", headers='[["reason", "too old"]]'),
        event("t", "large", "ada", b"x" * 6_000_000),
    ]
    await house.stage(*awkward)
    before = {row["event_id"]: row for row in await house.db.fetch("SELECT * FROM pipeline.outbox")}

    assert (await house.keep()).dropped == [OLD]

    assert await house.rows() is None
    for one in awkward:
        kept = await found(service, one.event_id)
        row = before[one.event_id]
        assert (kept["id"], kept["xid"]) == (row["id"], row["xid"])
        assert kept["created_at"] == "2020-01-01T12:00:00+00:00"
        told = {name: value for name, value in one._asdict().items() if type(value) is not bytes}
        assert {name: kept[name] for name in told} == told
    assert (await found(service, "plain"))["payload"] == '{"a": 1}'
    assert (await found(service, awkward[1].event_id))["payload"].encode() == awkward[1].payload
    assert (await found(service, "bytes"))["payload_base64"] == "/wAgbm8gdGV4dA=="
    assert (await found(service, "bytes"))["key_base64"] == "/g=="
    assert (await service("verify")).exit_code == 0


async def test_a_day_is_parts_of_consecutive_events_and_a_manifest(
    house: House, store: Store, service: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(days, "PART_BYTES", 150_000)  # more than a page, and less than two
    monkeypatch.setattr(days, "PAGE_ROWS", 100)
    await house.fill(1_000, payload=500)
    ids = [row["id"] for row in await house.db.fetch("SELECT id FROM pipeline.outbox ORDER BY id")]

    await house.keep()

    said = await manifest(store)
    assert await names(store) == [MANIFEST, *(part.name for part in said.parts)]
    assert len(said.parts) == 5
    assert said.rows == 1_000
    assert [said.parts[0].first_id, said.parts[-1].last_id] == [ids[0], ids[-1]]
    for part, following in zip(said.parts, said.parts[1:], strict=False):
        assert following.first_id == part.last_id + 1
    assert f"{DAY}  1,000 events" in (await service("list")).stdout
    assert "1,000 events" in (await service("verify", str(DAY))).stdout


async def test_a_day_without_events_is_archived_too(
    house: House, folder: str, service: Command
) -> None:
    await house.publish()
    assert (await house.keep()).dropped == [OLD]
    assert f"{DAY}  0 events" in (await service("verify")).stdout


async def test_without_a_place_for_it_nothing_is_archived(house: House, service: Command) -> None:
    await house.fill(3)
    assert (await house.keep()).dropped == [OLD]
    done = await service("verify")
    assert done.exit_code == 1
    assert "PIPELINE_ARCHIVE_URL is not set" in done.stderr


async def test_who_knows_of_no_archive_drops_no_day_that_others_archive(
    house: House, folder: str, retention: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.fill(3)
    later = DAY + timedelta(days=1)
    await house.keep(outbox_age=10 * 365 * 86_400)  # archives nothing yet
    monkeypatch.delenv("PIPELINE_ARCHIVE_URL")
    await make_day(house.db, later)  # nobody has closed it who has an archive
    await house.publish()

    told = {one.partition.name: one.needed_by or "" for one in (await house.keep()).held}
    assert told.keys() == {OLD, f"outbox_p{later:%Y%m%d}"}
    assert f"`service retention skip-archive {DAY}`" in told[OLD]
    assert await house.rows() == 3
    status = (await retention("status")).stdout
    assert status.count("has no archive in its settings") == 2

    assert (await retention("skip-archive", "2020-01-09")).exit_code != 0
    done = await retention("skip-archive", str(DAY))
    assert (done.exit_code, done.stdout) == (0, f"{DAY} is dropped without being archived\n")
    assert (await retention("status")).stdout.count("has no archive in its settings") == 1
    assert (await house.keep()).dropped == [OLD]
    assert (await retention("skip-archive", "--all")).exit_code == 0
    assert (await house.keep()).dropped == [f"outbox_p{later:%Y%m%d}"]


async def test_a_day_that_was_given_up_is_not_archived_by_anybody(
    house: House, folder: str, service: Command, retention: Command
) -> None:
    await house.fill(3)
    await house.keep(outbox_age=10 * 365 * 86_400)
    assert (await retention("skip-archive", str(DAY))).exit_code == 0
    assert (await house.keep()).dropped == [OLD]
    assert "nothing is archived yet" in (await service("list")).stdout


async def test_who_knows_the_archive_archives_what_others_have_closed(
    house: House, folder: str, service: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("PIPELINE_ARCHIVE_URL")
        await house.fill(3)
    assert (await house.keep()).dropped == [OLD]
    assert "3 events" in (await service("list")).stdout


async def test_a_page_of_large_events_is_short(house: House) -> None:
    await house.stage(*(event("t", id, payload=b"x" * 3_000_000) for id in range(5)))
    page = days._PAGE.format(table=OLD, columns="payload")
    sizes = [len(await house.db.fetch(page, 0, 2_000, limit)) for limit in (1, 4 * 2**20, 10**9)]
    assert sizes == [1, 2, 5]


@pytest.fixture
def obstacle(folder: str) -> Path:
    """Put something into the way of the manifest, which is written last."""
    path = Path(folder, FOLDER, MANIFEST)
    (path / "obstacle").mkdir(parents=True)
    return path


async def test_a_table_goes_only_when_all_of_it_is_in_the_archive(
    house: House, obstacle: Path, retention: Command
) -> None:
    await house.fill(10)

    (held,) = (await house.keep()).held

    assert held.name == OLD
    assert "it is not archived" in str(held.needed_by)
    assert await house.rows() == 10
    assert await partitions.like(house.db, OLD) == [Partition(OLD, State.DETACHED)]
    status = await retention("status")
    assert f"{OLD}  due since 2020-01-04 00:00Z: it is not archived" in status.stdout
    await asyncio.to_thread(shutil.rmtree, obstacle)
    assert (await house.keep()).dropped == [OLD]


async def test_what_does_not_last_is_not_taken_for_written(
    house: House, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that takes everything, and loses it."""
    await house.fill(10)
    written = stores._sync

    def lose(path: Path, name: str) -> None:
        written(path, name)
        if name.endswith(MANIFEST):
            (path / name).unlink()

    monkeypatch.setattr(stores, "_sync", lose)
    (held,) = (await house.keep()).held
    assert "it is not archived: StoreUnavailable" in str(held.needed_by)
    assert await house.rows() == 10


@pytest.mark.parametrize("away", ["shut", "hold"])
async def test_a_store_that_is_away_holds_the_day_and_nothing_else(
    house: House, proxy: TcpProxy, away: str, retention: Command
) -> None:
    await make_day(house.db, date(2020, 1, 2))
    await house.fill(10)
    getattr(proxy, away)()

    done = await house.keep()

    assert [one.name for one in done.held] == [OLD, "outbox_p20200102"]
    assert await house.rows() == 10
    await house.db.execute("SELECT FROM pipeline.outbox")
    assert "StoreUnavailable: the object store at s3://" in (await retention("status")).stdout
    proxy.restore()
    assert (await house.keep()).dropped == [OLD, "outbox_p20200102"]


async def test_after_a_store_outage_parts_already_stored_are_not_sent_again(
    house: House, proxy: TcpProxy, service: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(days, "PART_BYTES", 50_000)
    monkeypatch.setattr(days, "PAGE_ROWS", 100)
    await house.fill(1_000, payload=500)
    store = app.archive.open()
    assert store is not None
    put: list[str] = []

    async def note(self: Store, objects: Mapping[str, bytes]) -> None:
        put.extend(name.removeprefix(FOLDER) for name in objects)
        await as_before(self, objects)

    async def note_three(self: Store, objects: Mapping[str, bytes]) -> None:
        if len(put) == 3:
            proxy.shut()
        await note(self, objects)

    as_before = Store.put
    monkeypatch.setattr(Store, "put", note_three)
    assert [one.name for one in (await house.keep()).held] == [OLD]
    proxy.restore()
    before = await names(store)
    assert 0 < len(before) < 11

    put.clear()
    monkeypatch.setattr(Store, "put", note)
    assert (await house.keep()).dropped == [OLD]
    assert set(put) == {*await names(store)} - {*before}
    assert "1,000 events" in (await service("verify")).stdout


async def test_a_store_that_refuses_access_is_reported_without_the_secret(
    house: House, s3: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.fill(10)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "guessed-secret")
        (held,) = (await house.keep()).held
    assert "fetching is forbidden: check the credentials" in str(held.needed_by)
    assert "secret" not in str(held.needed_by)
    with monkeypatch.context() as patch:
        patch.setenv("PIPELINE_ARCHIVE_URL", "s3://no-such-bucket/archives")
        (held,) = (await house.keep()).held
    assert "the bucket does not exist" in str(held.needed_by)
    assert (await house.keep()).dropped == [OLD]


async def start(
    url: str, *command: str, part_bytes: int = 50_000, die_after: int = 0
) -> asyncio.subprocess.Process:
    """Start a command of the service as a process of its own, which may die after so many parts."""
    environment = {**os.environ, "PIPELINE_DATABASE_URL": url}
    environment |= {"PART_BYTES": str(part_bytes), "DIE_AFTER": str(die_after)}
    root = Path(__file__).parents[3]
    environment["PYTHONPATH"] = f"{root / 'src'}{os.pathsep}{root}"
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.onceward.archive.app", *command),
        cwd=HOME,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_who_is_killed_is_followed_by_one_who_goes_on(
    house: House,
    store: Store,
    service: Command,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await house.fill(20_000, payload=500)
    process = await start(database_url, "retention", "run", die_after=4)
    await process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert await house.rows() == 20_000
    before = await names(store)
    assert MANIFEST not in before, "it was killed in the middle"

    # In parts of another size, as of a newer version.
    assert (await house.keep()).dropped == [OLD]

    said = await manifest(store)
    assert [part.name for part in said.parts[: len(before)]] == before
    assert "20,000 events" in (await service("verify")).stdout


async def test_an_unfinished_archive_that_is_damaged_or_foreign_is_rewritten(
    house: House, folder: str, service: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(days, "PART_BYTES", 50_000)
    monkeypatch.setattr(days, "PAGE_ROWS", 100)
    await house.fill(1_000, payload=500)
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "model_dump_json", None)
        assert "it is not archived" in str((await house.keep()).held[0].needed_by)
    first, second, *_ = await asyncio.to_thread(lambda: sorted(Path(folder, FOLDER).iterdir()))
    second.write_bytes(second.read_bytes()[:-1])
    await house.db.execute(
        f"UPDATE pipeline.{OLD} SET event_id = 'changed' WHERE event_id = 'e100'"
    )
    assert (await house.keep()).dropped == [OLD]
    assert (await service("verify")).exit_code == 0
    assert (await found(service, "changed"))["id"]
    assert first.exists(), "it is nobody's, and in nobody's way"


async def test_two_at_once_do_no_harm(
    house: House, connect: Connect, store: Store, service: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(days, "PART_BYTES", 50_000)
    monkeypatch.setattr(days, "PAGE_ROWS", 100)
    await house.fill(1_000, payload=500)
    keepers = [await connect() for _ in range(3)]
    await asyncio.gather(
        *(run_retention(one, house.settings(), archive=app.archive) for one in keepers)
    )
    await house.keep()
    assert await house.rows() is None
    assert "1,000 events" in (await service("verify")).stdout


async def test_a_day_of_which_the_archive_has_something_else_stays(
    house: House, store: Store, service: Command
) -> None:
    await house.fill(10)
    await house.keep()
    await make_day(house.db)
    await house.fill(11)
    (held,) = (await house.keep()).held
    assert "differ" in str(held.needed_by)
    assert "elsewhere" in str(held.needed_by)
    assert await house.rows() == 11
    assert "10 events" in (await service("verify")).stdout, "it is not written over"


async def test_an_archived_day_that_was_not_dropped_is_dropped_without_rewriting(
    house: House, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.fill(10)
    with monkeypatch.context() as patch:
        patch.setattr(partition_statements, "LIMIT_WAIT_FOR_LOCK", "SELECT 1 / 0")
        assert (await house.keep()).held[0].needed_by == "division by zero"
    before = await manifest(store)
    assert (await house.keep()).dropped == [OLD]
    assert await manifest(store) == before


async def test_events_of_one_id_are_not_lost_between_two_pages(
    house: House, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when somebody has restarted the sequence, which nobody may."""
    monkeypatch.setattr(days, "PAGE_ROWS", 5)
    await house.fill(10)
    columns = "id, topic, event_id, source, type, content_type, created_at"
    await house.db.execute(
        f"INSERT INTO pipeline.outbox ({columns}) OVERRIDING SYSTEM VALUE"
        f" SELECT {columns} FROM pipeline.{OLD} WHERE id = 5"
    )
    await house.publish()
    (held,) = (await house.keep()).held
    assert "has an id twice" in str(held.needed_by)
    assert await house.rows() == 11


async def held_up(
    house: House, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> asyncio.Task[Round]:
    """Begin a round of retention that waits for the store, in the middle of ten events."""
    monkeypatch.setattr(days, "REQUEST_SECONDS", 30)
    monkeypatch.setattr(days, "BEAT_SECONDS", 0.1)
    await house.fill(10)
    proxy.hold()
    keeping = asyncio.create_task(house.keep())
    await eventually(lambda: proxy.attempts > 0)
    return keeping


async def test_no_other_process_begins_a_round_while_it_takes_long(
    house: House, connect: Connect, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await connect()
    keeping = await held_up(house, proxy, monkeypatch)
    just_now = "SELECT started_at > now() - interval '1 hour' FROM pipeline.retention_round"
    for _ in range(3):
        await eventually(lambda: other.fetchval(just_now))
        assert not await begin_round(other, 3_600)
        # As if it had begun long ago: it says again that it goes on.
        await other.execute("UPDATE pipeline.retention_round SET started_at = '2020-01-01'")
    assert not keeping.done()
    proxy.restore()
    assert (await keeping).dropped == [OLD]


async def test_the_command_tells_how_far_it_is(
    house: House, folder: str, retention: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retentions, "_REPORT_SECONDS", 0)
    monkeypatch.setattr(days, "PAGE_ROWS", 10)
    await house.fill(30)
    done = await retention("run")
    told = [line for line in done.stdout.splitlines() if line.startswith("archiving")]
    assert told[:3] == [f"archiving {OLD}: {n} events" for n in (10, 20, 30)]
    assert f"dropped  {OLD}" in done.stdout


async def test_a_mount_that_hangs_is_given_up_until_the_next_round(
    house: House, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(days, "BEAT_SECONDS", 0.1)
    await house.fill(1)
    manifest = Path(folder, app.archive.folder(DAY), MANIFEST)
    manifest.parent.mkdir(parents=True)
    os.mkfifo(manifest)  # who opens it waits for who writes into it
    with monkeypatch.context() as patch:
        patch.setattr(days, "STORE_SECONDS", 0.5)
        async with asyncio.timeout(PATIENCE):
            (held,) = (await house.keep()).held
    os.close(os.open(manifest, os.O_WRONLY | os.O_NONBLOCK))
    assert held.needed_by is not None
    assert f"{folder.replace(' ', '%20')}: fetching takes longer than 0.5 s" in held.needed_by
    assert await house.rows() == 1

    os.unlink(manifest)
    assert (await house.keep()).dropped == [OLD]
