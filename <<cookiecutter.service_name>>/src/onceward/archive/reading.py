"""Reads the archive: finds events, and verifies that nothing is missing or changed."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from hashlib import sha256
from typing import Any

from pydantic import ValidationError

from onceward.object_store import Missing, Store

from .days import Archive
from .files import MANIFEST, Damaged, Manifest, Part, events


@dataclass
class Verdict:
    """The result of verifying a day."""

    day: date
    rows: int = 0
    """Events of the intact parts."""
    size: int = 0
    """Compressed size of the intact parts in bytes."""
    wrong: list[str] = field(default_factory=list)
    """Descriptions of missing or changed objects; empty for an intact day."""


@dataclass(frozen=True)
class Listed:
    """A day, as described by its manifest."""

    day: date
    rows: int = 0
    """Number of events."""
    size: int = 0
    """Compressed size in bytes."""
    finished_at: datetime | None = None
    """None if the day is not finished, or its manifest is unreadable."""
    wrong: str | None = None
    """The error of the manifest."""


async def days(archive: Archive, store: Store) -> list[date]:
    """Return the days that have objects in the archive, the oldest first."""
    folder, found = archive.folder(), set[date]()
    async for page in store.pages(folder):
        for name in page:
            day, slash, _ = name.removeprefix(folder).partition("/")
            with suppress(ValueError):  # not a day's folder
                found |= {date.fromisoformat(day)} if slash else set()
    return sorted(found)


def gaps(found: Sequence[date]) -> list[Verdict]:
    """Return a verdict for each day between the first and the last that has no objects."""
    if not found:
        return []
    first, there = min(found), set(found)
    every = (first + timedelta(days=n) for n in range((max(found) - first).days))
    lost = "the day has no objects: they are lost, or the archive was not configured then"
    return [Verdict(day, wrong=[lost]) for day in every if day not in there]


async def manifest(archive: Archive, store: Store, day: date) -> Manifest:
    """Return the manifest of a day. Raises `Damaged`, and `Missing` if the day is not finished."""
    name = archive.folder(day) + MANIFEST
    try:
        found = Manifest.model_validate_json(await store.get(name))
    except ValidationError as error:
        raise Damaged(f"{name} is not a manifest: {error.errors()[0]['msg']}") from None
    if (found.service, found.day) != (archive.service, day):
        raise Damaged(f"{name} is the manifest of {found.service}, {found.day}")
    return found


async def listed(archive: Archive, store: Store, day: date) -> Listed:
    """Return the description of a day by its manifest, or the manifest's error."""
    try:
        found = await manifest(archive, store, day)
    except Missing:
        return Listed(day)
    except Damaged as error:
        return Listed(day, wrong=str(error))
    return Listed(day, found.rows, sum(part.size for part in found.parts), found.finished_at)


async def content(archive: Archive, store: Store, day: date, part: Part) -> bytes:
    """Return the content of a part. Raises `Damaged` if it differs from the manifest."""
    name = archive.folder(day) + part.name

    def check(size: int) -> None:
        if size != part.size:
            raise Damaged(f"{name} has {size:,} bytes instead of {part.size:,}")

    try:
        found = await store.get(name, check)
    except Missing:
        raise Damaged(f"{name} is missing") from None
    if await asyncio.to_thread(lambda: sha256(found).hexdigest()) != part.sha256:
        raise Damaged(f"{name} was changed: its checksum is wrong")
    return found


async def verify(archive: Archive, store: Store, day: date) -> Verdict:
    """Read all objects of a day, and return the verdict."""
    verdict = Verdict(day)
    try:
        written = await manifest(archive, store, day)
    except Missing:
        verdict.wrong.append(f"{MANIFEST} is missing: the day is not finished, or it is lost")
        return verdict
    except Damaged as error:
        verdict.wrong.append(str(error))
        return verdict
    for number, part in enumerate(written.parts):
        try:
            found = await content(archive, store, day, part)
            if await asyncio.to_thread(Part.of, number, found) != part:
                raise Damaged(f"{part.name} differs from its description in {MANIFEST}")
        except Damaged as error:
            verdict.wrong.append(str(error))
        else:
            verdict.rows += part.rows
            verdict.size += part.size
    return verdict


async def find(
    archive: Archive, store: Store, day: date, event_id: str
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a day that have this id. Raises `Damaged` and `Missing`."""
    for part in (await manifest(archive, store, day)).parts:
        found = await content(archive, store, day, part)
        for event in await asyncio.to_thread(list, events(found, event_id)):
            yield event
