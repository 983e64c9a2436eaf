"""What is missing or changed in the archive is found, and so is an event."""

import gzip
import json
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from typer.testing import Result

from onceward import Event
from onceward.archive import days
from onceward.archive.files import MANIFEST

from . import app
from .conftest import DAY, House, make_day
from tests.onceward.integration.conftest import Command
from tests.onceward.integration.outgoing import event

FOLDER = app.archive.folder(DAY)


@pytest.fixture
async def kept(house: House, folder: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Archive 300 events in three parts, and return where they are."""
    monkeypatch.setattr(days, "PART_BYTES", 1)
    monkeypatch.setattr(days, "PAGE_ROWS", 100)
    await house.fill(300, payload=100)
    await house.keep()
    return Path(folder, FOLDER)


def parts(kept: Path) -> list[Path]:
    """Return the parts, in order."""
    return sorted(kept.glob("part-*"))


def lose_a_part(kept: Path) -> None:
    parts(kept)[1].unlink()


def change_a_byte(kept: Path) -> None:
    content = bytearray(parts(kept)[1].read_bytes())
    content[len(content) // 2] ^= 1
    parts(kept)[1].write_bytes(content)


def cut_a_part_short(kept: Path) -> None:
    parts(kept)[1].write_bytes(parts(kept)[1].read_bytes()[:-1])


def put_one_for_another(kept: Path) -> None:
    parts(kept)[1].write_bytes(parts(kept)[2].read_bytes())


def lose_the_manifest(kept: Path) -> None:
    (kept / MANIFEST).unlink()


def cut_the_manifest_short(kept: Path) -> None:
    (kept / MANIFEST).write_bytes((kept / MANIFEST).read_bytes()[:-5])


def take_a_part_out_of_the_manifest(kept: Path) -> None:
    said = json.loads((kept / MANIFEST).read_bytes())
    del said["parts"][1]
    (kept / MANIFEST).write_text(json.dumps(said))


def miscount(kept: Path) -> None:
    said = json.loads((kept / MANIFEST).read_bytes())
    said["rows"] += 1
    said["parts"][1]["rows"] += 1
    (kept / MANIFEST).write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lose_a_part, "part-00001-"),
        (lose_a_part, "is missing"),
        (change_a_byte, "its checksum is wrong"),
        (cut_a_part_short, "bytes instead of"),
        (put_one_for_another, "part-00001-"),
        (lose_the_manifest, "manifest.json is missing: the day is not finished, or it is lost"),
        (cut_the_manifest_short, "manifest.json is not a manifest"),
        (take_a_part_out_of_the_manifest, "its parts do not add up to its rows, or overlap"),
        (miscount, "part-00001-"),
    ],
)
async def test_what_is_missing_or_changed_is_told_of(
    kept: Path, service: Command, damage: Callable[[Path], None], said: str
) -> None:
    assert (await service("verify")).exit_code == 0
    damage(kept)
    for arguments in (), (str(DAY),):
        done = await service("verify", *arguments)
        assert done.exit_code == 1
        assert said in done.stdout
    assert (await service("list")).exit_code == 0


async def test_a_day_that_is_not_there_is_not_whole(kept: Path, service: Command) -> None:
    done = await service("verify", "2020-01-02")
    assert done.exit_code == 1
    assert "2020-01-02  manifest.json is missing" in done.stdout


async def test_a_day_that_is_wholly_gone_is_told_of(
    house: House, kept: Path, service: Command
) -> None:
    for number in (1, 2, 3):
        await make_day(house.db, DAY + timedelta(days=number))
    await house.publish()
    await house.keep()
    assert (await service("verify")).exit_code == 0
    shutil.rmtree(kept.parent / "2020-01-02")
    shutil.rmtree(kept.parent / "2020-01-03")
    done = await service("verify")
    assert done.exit_code == 1
    gone = [line[:10] for line in done.stdout.splitlines() if "  the day has no objects" in line]
    assert gone == ["2020-01-02", "2020-01-03"]
    assert (await service("verify", "2020-01-01", "2020-01-04")).exit_code == 0


async def test_programs_are_told_of_days_in_a_line_each(
    house: House, kept: Path, service: Command
) -> None:
    later = DAY + timedelta(days=2)
    await make_day(house.db, later)
    await house.publish()
    await house.keep()
    lose_a_part(kept)
    manifest = kept.parent / str(later) / MANIFEST
    manifest.rename(manifest.with_name("part-begun"))

    listed = lines(await service("list", "--json"))

    size = sum(part.stat().st_size for part in parts(kept))
    assert [one["day"] for one in listed] == [str(DAY), str(later)]
    assert [(one["rows"], one["wrong"]) for one in listed] == [(300, None), (0, None)]
    assert listed[0]["size"] > size
    assert listed[0]["finished_at"]
    assert listed[1]["finished_at"] is None

    done = await service("verify", "--json")
    assert done.exit_code == 1
    gap, damaged, unfinished = lines(done)
    assert gap["day"] == "2020-01-02"
    assert gap["wrong"] == [
        "the day has no objects: they are lost, or the archive was not configured then",
    ]
    assert (damaged["day"], damaged["rows"], damaged["size"]) == (str(DAY), 200, size)
    assert "is missing" in damaged["wrong"][0]
    assert "manifest.json is missing" in unfinished["wrong"][0]

    (kept / MANIFEST).write_text("{")
    assert "is not a manifest" in lines(await service("list", "--json"))[0]["wrong"]


def lines(done: Result) -> list[dict[str, Any]]:
    """Return the objects that a command has written, each in a line."""
    return [json.loads(line) for line in done.stdout.splitlines()]


async def test_an_event_is_found_by_its_whole_id_only(kept: Path, service: Command) -> None:
    done = await service("find", "e150")
    assert json.loads(done.stdout)["event_id"] == "e150"
    assert (await service("find", "e150", str(DAY))).stdout == done.stdout
    assert json.loads((await service("find", "e15")).stdout)["event_id"] == "e15"
    missing = await service("find", "e301")
    assert missing.exit_code == 1
    assert "no event 'e301' is in the archive" in missing.stderr


async def test_a_found_event_is_shown_without_secrets_that_the_archive_contains(
    house: House, folder: str, service: Command
) -> None:
    class Sealed(Event, type="sealed"):
        combination_of_the_archive: SecretStr

    payload = b'{"combination_of_the_archive": "17-4-32", "place": "Graz"}'
    await house.stage(event("seals", "sealed-1", payload=payload))
    await house.keep()
    found = json.loads((await service("find", "sealed-1")).stdout)
    assert json.loads(found["payload"]) == {
        "combination_of_the_archive": "**********",
        "place": "Graz",
    }
    (part,) = parts(Path(folder, FOLDER))
    assert b"17-4-32" in gzip.decompress(part.read_bytes())


async def test_a_search_for_an_event_reports_what_could_not_be_searched(
    kept: Path, service: Command
) -> None:
    lose_a_part(kept)
    before = await service("find", "e1")
    assert json.loads(before.stdout)["event_id"] == "e1"
    assert before.exit_code == 1
    behind = await service("find", "e299")
    assert behind.exit_code == 1
    assert "is missing; the rest of the day was not searched" in behind.stderr
    assert "no event 'e299' is in the readable part of the archive" in behind.stderr


async def test_an_archive_that_holds_nothing_is_told_of(folder: str, service: Command) -> None:
    assert (await service("list")).stdout == "nothing is archived yet\n"
    assert (await service("verify")).exit_code == 0
    for command in "list", "verify":
        assert (await service(command, "--json")).stdout == ""


async def test_what_others_keep_beside_the_days_is_left_alone(kept: Path, service: Command) -> None:
    (kept.parent / "notes").mkdir()
    (kept.parent / "notes" / "read.me").touch()
    (kept.parent / "read.me").touch()
    assert (await service("verify")).exit_code == 0
    assert len((await service("list")).stdout.splitlines()) == 1
