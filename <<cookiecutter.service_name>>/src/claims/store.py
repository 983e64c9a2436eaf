"""The object store: put, get, list and delete, each in good time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError
from obstore.store import ObjectStore, from_url

from pipeline import durable
from pipeline.errors import StoreSlow, StoreUnavailable
from pipeline.service import Misconfigured

if TYPE_CHECKING:
    from obstore import GetResult  # there is none when it runs

T = TypeVar("T")


class Missing(Exception):
    """There is no such object, in a store that is there."""


class Store:
    """A folder, or a part of a bucket. Names in it are those below its URL."""

    def __init__(self, url: str, *, timeout: float, concurrency: int) -> None:
        """`timeout`, in seconds, is of each request; `concurrency` of those of a kind. Raises
        `Misconfigured` for a place that can't be used."""
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._store = _opened(self.url, timedelta(seconds=timeout))
        self._folder: Path | None = None
        if self.url.startswith("file:"):
            self._folder = Path(self.url.removeprefix("file://"))
        self._storing = asyncio.Semaphore(concurrency)
        self._deleting = asyncio.Semaphore(concurrency)
        self._reading = asyncio.Semaphore(concurrency)

    async def put(self, objects: Mapping[str, bytes]) -> None:
        """Store all of them in the time of one request. Raises `StoreUnavailable`."""

        async def put(name: str, content: bytes) -> None:
            async with self._storing:
                await obstore.put_async(self._store, name, content)
                if self._folder is not None:
                    # Before the event is committed that refers to it; the library does not.
                    await asyncio.to_thread(durable.sync, self._folder, name)

        async with self._in_time("storing"):
            if self._folder is not None and not await asyncio.to_thread(self._folder.is_dir):
                # A mount that is missing must not become a folder on another disk.
                raise FileNotFoundError(_NO_FOLDER)
            await together(put(name, content) for name, content in objects.items())

    @asynccontextmanager
    async def get(self, name: str) -> AsyncIterator["GetResult"]:
        """Lend what is known of an object, and a way to its bytes. The block is the request.

        Raises `Missing`, and `StoreUnavailable`.
        """
        async with self._reading, self._in_time("fetching"):
            try:
                found = await obstore.get_async(self._store, name)
            except FileNotFoundError:
                # The same is answered for every name where the store itself is not there.
                await self._demand_store()
                raise Missing(name) from None
            yield found

    async def folders(self, name: str) -> list[str]:
        """Return the folders in a folder, in order. Raises `StoreUnavailable`."""
        async with self._in_time("listing"):
            found = await obstore.list_with_delimiter_async(self._store, name)
        return sorted(found["common_prefixes"])

    async def pages(self, folder: str) -> AsyncIterator[Mapping[str, datetime]]:
        """Yield objects of a folder, with their times by the store. Raises `StoreUnavailable`."""
        pages = aiter(obstore.list(self._store, folder, chunk_size=1_000))
        while True:
            async with self._in_time("listing"):
                page = await anext(pages, None)
            if page is None:
                return
            yield {one["path"]: one["last_modified"] for one in page}

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are gone already are no matter. Raises `StoreUnavailable`."""

        async def delete(name: str) -> None:
            async with self._deleting, self._in_time("deleting"):
                with suppress(FileNotFoundError):
                    await obstore.delete_async(self._store, name)

        await together(delete(name) for name in names)

    async def _demand_store(self) -> None:
        """Raise `FileNotFoundError` if there is no such bucket, or the folder is not mounted."""
        if self._folder is not None:
            await asyncio.to_thread(_demand_folder, self._folder)
            return
        # Empty is a bucket too from which all was swept; a list of one that is not there fails.
        await anext(aiter(obstore.list(self._store, chunk_size=1)), None)

    @asynccontextmanager
    async def _in_time(self, what: str) -> AsyncIterator[None]:
        """Raise `StoreUnavailable` for errors, and `StoreSlow` after the time-out."""
        place = f"the object store at {self.url}"
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError:
            raise StoreSlow(f"{place}: {what} takes longer than {self._timeout} s") from None
        except (PermissionDeniedError, PermissionError):
            # Also of what is not there: S3 tells only those who may list.
            raise StoreUnavailable(
                f"{place}: {what} is forbidden: grant the service to read, write, delete and list"
                " there (for S3 s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket);"
                " without the right to list, what is missing is answered like this too"
            ) from None
        except (BaseError, OSError) as error:
            raise StoreUnavailable(f"{place}: {what} failed: {_first_line(error)}") from None


_NO_FOLDER = "there is no such folder: make it, or mount it"


def _demand_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(_NO_FOLDER)
    # Sweeps leave the days' folders, so one that was used is never empty.
    if not any(folder.iterdir()):
        raise FileNotFoundError(
            "the folder is empty: mount it, or, if all that was there is lost, make a file in it"
        )


def _opened(url: str, timeout: timedelta) -> ObjectStore:
    try:
        if url.startswith("file:"):
            return from_url(url)
        return from_url(
            url,
            client_options={
                "allow_http": True,  # of an endpoint that somebody has written so
                "timeout": timeout,
                "connect_timeout": timeout,
            },
            # Who asks tries again, together with all that belongs to it, and tells of it.
            retry_config={"max_retries": 1, "retry_timeout": timeout},
        )
    except (BaseError, ValueError, OSError) as error:
        text = f"no object store can be opened at {url} (PIPELINE_CLAIM_URL): {_first_line(error)}"
        raise Misconfigured(text) from None


def _first_line(error: Exception) -> str:
    # The others show the library's insides.
    return str(error).partition("\n")[0]


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """Return what all have come to; when all have ended, raise the error of one that failed."""
    results: list[T] = []
    for one in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(one, BaseException):
            raise one
        results.append(one)
    return results
