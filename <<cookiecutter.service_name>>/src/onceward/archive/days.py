"""Writes days of the outbox to the archive."""

import asyncio
from collections.abc import Awaitable, Sequence
from datetime import UTC, date, datetime
from typing import NamedTuple, TypeVar

import asyncpg
from pydantic import ValidationError
from pydantic_settings import SettingsConfigDict

from onceward.errors import OncewardError, StoreUnavailable
from onceward.handlers.staged import COLUMNS
from onceward.object_store import Missing, Store, StoreUrl
from onceward.retention.archive import Report
from onceward.server_settings import EnvironmentSettings
from onceward.service import Misconfigured
from onceward.settings import mistakes

from .files import MANIFEST, Damaged, Manifest, Part, PartWriter

T = TypeVar("T")

PART_BYTES = 32 * 2**20
"""A part ends when it has this size before compression. It is held in memory."""
PAGE_ROWS = 2_000
PAGE_BYTES = 4 * 2**20
"""Limits of one query. The bytes may be exceeded by one row."""
BEAT_SECONDS = 2.0
"""Interval of progress reports during an operation on the store."""
STORE_SECONDS = 600.0
"""Time limit of an operation on the store; a large object takes many requests."""
REQUEST_SECONDS = 60.0
"""Time limit of a request with its retries."""
OPEN_SECONDS = 30.0
"""Time limit of the check that the folder exists: a mount may hang."""

# `octet_length` gets a size without reading the value.
_PAGE = """
SELECT id, xid, created_at, {columns}
  FROM (SELECT *, sum(COALESCE(octet_length(payload), 0) + COALESCE(octet_length(headers), 0))
                  OVER (ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
          FROM (SELECT * FROM pipeline.{table} WHERE id > $1 ORDER BY id LIMIT $2) AS page) AS page
 WHERE COALESCE(before, 0) < $3
 ORDER BY id
"""

_SPAN = """
SELECT count(*) AS rows, min(id) AS first_id, max(id) AS last_id
  FROM pipeline.{table} WHERE id > $1 AND id <= $2
"""

_ENDS = "SELECT min(id) AS first_id, max(id) AS last_id FROM pipeline.{table}"

_EVENT_ID = "SELECT event_id FROM pipeline.{table} WHERE id = $1"


class ArchiveSettings(EnvironmentSettings):
    """Location of the archive."""

    model_config = SettingsConfigDict(env_prefix="PIPELINE_ARCHIVE_", env_ignore_empty=True)

    url: StoreUrl | None = None
    """Object store of the archive, such as `s3://bucket/prefix`; unset: nothing is archived."""


class ArchiveDiffers(OncewardError):
    """The archived day differs from the database."""


class Archive:
    """Days of a service's outbox, each a manifest and parts below `<service>/outbox/<day>/`."""

    def __init__(self, service: str) -> None:
        self.service = service

    def check(self) -> None:
        """Raise `Misconfigured` if the URL is not that of a usable object store."""
        self.open()

    @property
    def is_on(self) -> bool:
        """Whether an archive is configured."""
        return _url() is not None

    def open(self) -> Store | None:
        """Return the store; None if no archive is configured. Raises `Misconfigured`."""
        url = _url()
        if url is None:
            return None
        return Store(
            url,
            setting="PIPELINE_ARCHIVE_URL",
            timeout=STORE_SECONDS,
            request_timeout=REQUEST_SECONDS,
            retries=5,
        )

    def folder(self, day: date | None = None) -> str:
        """Return the prefix of a day, or of all days."""
        return f"{self.service}/outbox/" + (f"{day}/" if day else "")

    async def keep(
        self, connection: asyncpg.Connection, table: str, day: date, report: Report
    ) -> None:
        """Write a day, or continue an unfinished one, and read it back from the store.

        Finished parts are not written again. An archive must be configured. Raises
        `ArchiveDiffers` and `StoreUnavailable`.
        """
        # In a thread, because a hanging mount would block the event loop.
        try:
            store = await asyncio.wait_for(asyncio.to_thread(self.open), OPEN_SECONDS)
        except TimeoutError:
            raise StoreUnavailable(
                f"the object store at {_url()}: opening takes longer than {OPEN_SECONDS:g} s: check"
                " whether the mount hangs"
            ) from None
        assert store is not None
        await _Day(store, self, connection, table, day, report).keep()


def _url() -> str | None:
    try:
        return ArchiveSettings().url
    except ValidationError as error:
        raise Misconfigured("; ".join(mistakes(error, ArchiveSettings))) from None


class _Ids(NamedTuple):
    """The first and the last id of a table; None if it has no rows."""

    first: int | None
    last: int | None


class _Day:
    """A day that is being archived."""

    def __init__(
        self,
        store: Store,
        archive: Archive,
        connection: asyncpg.Connection,
        table: str,
        day: date,
        report: Report,
    ) -> None:
        self._store = store
        self._service = archive.service
        self._folder = archive.folder(day)
        self._connection = connection
        self._table = table
        self._day = day
        self._report = report
        self._rows = 0

    async def keep(self) -> None:
        ids = _Ids(*await self._connection.fetchrow(_ENDS.format(table=self._table)))
        manifest = await self._manifest()
        if manifest is not None:
            await self._compare(manifest, ids)
            return
        parts = await self._finished_parts(ids)
        while ids.last is not None and (not parts or parts[-1].last_id < ids.last):
            parts.append(await self._write(len(parts), _end(parts, ids)))
        manifest = Manifest(
            service=self._service,
            day=self._day,
            rows=sum(part.rows for part in parts),
            finished_at=datetime.now(UTC),
            parts=tuple(parts),
        )
        text = manifest.model_dump_json(indent=2).encode()
        await self._put(MANIFEST, text)

    async def _manifest(self) -> Manifest | None:
        name = self._folder + MANIFEST
        try:
            text = await self._reporting(self._store.get(name))
            await self._reporting(self._store.sync(name))
            return Manifest.model_validate_json(text)
        except Missing:
            return None
        except ValidationError as error:
            raise self._differs(f"{name} is not a manifest") from error

    async def _compare(self, manifest: Manifest, ids: _Ids) -> None:
        """Raise `ArchiveDiffers` unless the finished day has exactly the events of the table."""
        parts: list[Part] = []
        for part in manifest.parts:
            if await self._valid_part(part.name, _end(parts, ids)) != part:
                raise self._differs(f"{part.name} is missing or has other events")
            parts.append(part)
        if (parts[-1].last_id if parts else None) != ids.last:
            raise self._differs("the last events are not the same")

    def _differs(self, how: str) -> ArchiveDiffers:
        return ArchiveDiffers(
            f"{self._store.url}/{self._folder} and the table pipeline.{self._table} differ: {how}."
            " Move the folder's objects elsewhere; then the table is archived again"
        )

    async def _finished_parts(self, ids: _Ids) -> list[Part]:
        """Return the parts of an unfinished day that match this table."""
        names = await self._reporting(self._names())
        parts: list[Part] = []
        for name in names:  # several of one number if several processes wrote the day
            if name.startswith(f"part-{len(parts):05}-"):
                part = await self._valid_part(name, _end(parts, ids))
                parts += [part] if part else []
        return parts

    async def _names(self) -> Sequence[str]:
        pages = self._store.pages(self._folder)
        return sorted([name.removeprefix(self._folder) async for page in pages for name in page])

    async def _valid_part(self, name: str, after: int) -> Part | None:
        """Return a part if its content matches its name and the table's rows after an id."""
        try:
            content = await self._reporting(self._store.get(self._folder + name))
            await self._reporting(self._store.sync(self._folder + name))
            part = await asyncio.to_thread(Part.of, int(name.split("-")[1]), content)
        except (Missing, Damaged):
            return None
        if part.name != name or not await self._is_in_table(part, after):
            return None
        self._rows += part.rows
        return part

    async def _is_in_table(self, part: Part, after: int) -> bool:
        """Whether the table has the same number of events in the range, and the same last one."""
        span = await self._connection.fetchrow(_SPAN.format(table=self._table), after, part.last_id)
        event_id = await self._connection.fetchval(
            _EVENT_ID.format(table=self._table), part.last_id
        )
        return (*span, event_id) == (part.rows, part.first_id, part.last_id, part.last_event_id)

    async def _write(self, number: int, after: int) -> Part:
        """Write the part that begins after an id."""
        writer, last = PartWriter(), after
        page = _PAGE.format(table=self._table, columns=COLUMNS)
        while writer.bytes < PART_BYTES:
            rows = await self._connection.fetch(page, last, PAGE_ROWS, PAGE_BYTES)
            if not rows:
                break
            await asyncio.to_thread(writer.add, [row.items() for row in rows])
            last = rows[-1]["id"]
            self._rows += len(rows)
            await self._beat()
        content = writer.end()
        part = await asyncio.to_thread(Part.of, number, content)
        if not await self._is_in_table(part, after):
            raise ArchiveDiffers(
                f"the table pipeline.{self._table} was changed while it was archived, or has an id"
                f" twice, between {after + 1} and {last}"
            )
        await self._put(part.name, content)
        return part

    async def _put(self, name: str, content: bytes) -> None:
        """Store an object of the day, and read it back. Raises `StoreUnavailable`."""
        name = self._folder + name
        await self._reporting(self._store.put({name: content}))
        try:
            found = await self._reporting(self._store.get(name))
        except Missing:
            found = None
        if found != content:
            raise StoreUnavailable(
                f"the object store at {self._store.url}: {name} was written, but is missing or"
                " different when read back"
            )

    async def _reporting(self, work: Awaitable[T]) -> T:
        """Return the result of an operation on the store, and report progress meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=BEAT_SECONDS))[0]:
                await self._beat()
        except BaseException:
            task.cancel()
            raise
        return task.result()

    async def _beat(self) -> None:
        await self._report(f"{self._rows:,} events")


def _end(parts: Sequence[Part], ids: _Ids) -> int:
    """Return the id after which the next part begins."""
    return parts[-1].last_id if parts else (ids.first or 0) - 1
