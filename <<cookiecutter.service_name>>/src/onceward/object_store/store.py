"""An object store: put, get, list and delete objects, each within a time limit."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError
from obstore.store import LocalStore, ObjectStore, from_url
from pydantic import AfterValidator

from onceward.errors import OncewardError, StoreUnavailable
from onceward.service import Misconfigured

T = TypeVar("T")

_BUCKETS = ("s3", "gs", "az")
_NO_FOLDER = "the folder does not exist: create it, or mount it"


class Missing(OncewardError):
    """The object does not exist; its bucket or folder does."""


def check_url(url: str) -> str:
    """Return the URL if it is that of an object store. Raises `ValueError` otherwise."""
    parts = urlsplit(url)
    if "@" in url or parts.query:
        raise ValueError(
            "it must not contain credentials: set the store's own variables, such as"
            " AWS_ACCESS_KEY_ID"
        )
    if parts.scheme == "file":
        if parts.netloc or parts.fragment or not Path(unquote(parts.path)).is_absolute():
            raise ValueError("write file:/// and an absolute path")
    elif parts.scheme not in _BUCKETS or not parts.netloc or parts.fragment:
        raise ValueError(
            "write file:///folder, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
        )
    return url


StoreUrl = Annotated[str, AfterValidator(check_url)]
"""Type of settings with the URL of a store."""


class Store:
    """A folder, or a prefix of a bucket. Names of objects are relative to its URL."""

    def __init__(
        self,
        url: str,
        *,
        setting: str,
        timeout: float,
        request_timeout: float,
        retries: int,
        concurrency: int = 8,
    ) -> None:
        """Open the store without connecting to it; `setting` is the variable that has its URL.

        `timeout` limits each operation and `request_timeout` each of its requests, in seconds.
        A failed request has up to `retries` retries, which begin within `request_timeout`.
        `concurrency` limits the simultaneous operations of each kind. Raises `Misconfigured` if the
        URL can't be used.
        """
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._folder: Path | None = None
        if url.startswith("file:"):
            self._folder = Path(unquote(urlsplit(url).path))
        try:
            self._store = _open(self.url, self._folder, timedelta(seconds=request_timeout), retries)
        except (BaseError, ValueError, OSError) as error:
            raise Misconfigured(f"{setting}: {url!r}: {_first_sentence(error)}") from None
        self._storing = asyncio.Semaphore(concurrency)
        self._deleting = asyncio.Semaphore(concurrency)
        self._reading = asyncio.Semaphore(concurrency)

    async def put(self, objects: Mapping[str, bytes]) -> None:
        """Store objects by their names, replacing existing ones, within one time limit for all.

        In a folder, they are flushed to disk. Raises `StoreUnavailable`.
        """

        async def put(name: str, content: bytes) -> None:
            async with self._storing:
                await obstore.put_async(self._store, name, content)
                await self._sync(name)

        async with self._in_time("storing"):
            if self._folder is not None:
                # Without the check, a missing mount would become a folder on another disk.
                await asyncio.to_thread(_require_folder, self._folder)
            await together(put(name, content) for name, content in objects.items())

    async def sync(self, name: str) -> None:
        """Flush an object that another process wrote to disk. Raises `StoreUnavailable`."""
        async with self._in_time("storing"):
            await self._sync(name)

    async def _sync(self, name: str) -> None:
        if self._folder is not None:
            await asyncio.to_thread(_sync, self._folder, name)

    async def get(self, name: str, check: Callable[[int], None] | None = None) -> bytes:
        """Return an object's content. `check` gets its size before it is read, and may raise.

        Raises `Missing` and `StoreUnavailable`.
        """
        async with self._reading, self._in_time("fetching"):
            try:
                found = await obstore.get_async(self._store, name)
            except FileNotFoundError:
                # The error is the same if the bucket or folder does not exist.
                await self._require_store()
                raise Missing(name) from None
            if check is not None:
                check(found.meta["size"])
            return bytes(await found.bytes_async())

    async def folders(self, name: str) -> list[str]:
        """Return the sorted folders in a folder. Raises `StoreUnavailable`."""
        async with self._in_time("listing"):
            found = await obstore.list_with_delimiter_async(self._store, name)
        return sorted(found["common_prefixes"])

    async def pages(self, folder: str) -> AsyncIterator[Mapping[str, datetime]]:
        """Yield pages of the objects below a folder: names and times of storing, by its clock.

        Raises `StoreUnavailable`.
        """
        pages = aiter(obstore.list(self._store, folder, chunk_size=1_000))
        while True:
            async with self._in_time("listing"):
                page = await anext(pages, None)
            if page is None:
                return
            yield {one["path"]: one["last_modified"] for one in page}

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; missing ones are skipped. Raises `StoreUnavailable`."""

        async def delete(name: str) -> None:
            async with self._deleting, self._in_time("deleting"):
                with suppress(FileNotFoundError):
                    await obstore.delete_async(self._store, name)

        await together(delete(name) for name in names)

    async def require_content(self) -> None:
        """Raise `StoreUnavailable` if the store is an empty folder: its mount may be missing."""
        async with self._in_time("fetching"):
            if self._folder is not None:
                await asyncio.to_thread(_require_content, self._folder)

    async def _require_store(self) -> None:
        """Raise `FileNotFoundError` if the bucket or folder does not exist."""
        if self._folder is not None:
            await asyncio.to_thread(_require_folder, self._folder)
            return
        # The list of an empty bucket is empty; that of a missing bucket fails.
        await anext(aiter(obstore.list(self._store, chunk_size=1)), None)

    @asynccontextmanager
    async def _in_time(self, what: str) -> AsyncIterator[None]:
        """Raise `StoreUnavailable` for errors of the store, and after the time limit."""
        place = f"the object store at {self.url}"
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError:
            text = f"{place}: {what} takes longer than {self._timeout:g} s"
            raise StoreUnavailable(f"{text}: check whether the server or the mount hangs") from None
        except (PermissionDeniedError, PermissionError):
            # Without permission to list, S3 gives this answer for a missing object, too.
            raise StoreUnavailable(
                f"{place}: {what} is forbidden: check the credentials, and grant the service the"
                " rights to read, write and list, and to delete payloads (for S3 s3:GetObject,"
                " s3:PutObject, s3:ListBucket and s3:DeleteObject)"
            ) from None
        except (BaseError, OSError) as error:
            text = _first_sentence(error)
            if "NoSuchBucket" in str(error):
                text = "the bucket does not exist"
            raise StoreUnavailable(f"{place}: {what} failed: {text}") from None


def _open(url: str, folder: Path | None, timeout: timedelta, retries: int) -> ObjectStore:
    if folder is not None:
        _require_folder(folder)
        return LocalStore(folder)
    return from_url(
        url,
        client_options={
            "allow_http": True,  # only if an endpoint without TLS is configured
            "connect_timeout": min(timeout, timedelta(seconds=5)),
            "timeout": timeout,
        },
        retry_config={"max_retries": retries, "retry_timeout": timeout},
    )


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(_NO_FOLDER)


def _require_content(folder: Path) -> None:
    _require_folder(folder)
    # Deleting objects leaves their folders, so a store that was used is never empty.
    if not any(folder.iterdir()):
        raise FileNotFoundError(
            "the folder is empty: mount it, or, if its content is lost, create a file in it"
        )


def _sync(folder: Path, name: str) -> None:
    """Flush a file to disk, with its folders up to `folder`."""
    path = folder / name
    for one in (path, *path.parents):
        descriptor = os.open(one, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if one == folder:
            return


def _first_sentence(error: Exception) -> str:
    """Return the first line of an error without the queries of URLs, which may have secrets."""
    return re.sub(r"\?\S*", "", str(error).partition("\n")[0])


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results; if any failed, raise one of the errors after all have ended."""
    results: list[T] = []
    for one in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(one, BaseException):
            raise one
        results.append(one)
    return results
