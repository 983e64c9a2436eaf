"""The object store, by its URL: whole objects, written so that they last, and read again."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from pipeline import durable
from pipeline.service import Misconfigured

SCHEMES = ("file", "s3", "gs", "az")

REQUEST_SECONDS = 60.0
"""A request that takes longer has failed. Large objects are many requests."""
RETRY_SECONDS = 30.0
"""For so long a request that failed is made again."""


class StoreFailed(OSError):
    """The object store can't be used, or does not do what it should; what is missing is said."""


class Missing(Exception):
    """There is no such object."""


def parsed(url: str) -> SplitResult:
    """Return the parts of the URL of an object store. Raises `ValueError` for another."""
    parts = urlsplit(url)
    if "@" in url or parts.query:
        raise ValueError(
            "it must hold no credentials: they belong into the store's own variables, such as"
            " AWS_ACCESS_KEY_ID"
        )
    if parts.scheme == "file":
        if parts.netloc or not Path(unquote(parts.path)).is_absolute():
            raise ValueError("write file:/// and an absolute path")
    elif parts.scheme not in SCHEMES or not parts.netloc:
        raise ValueError(
            "write file:///folder, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
        )
    return parts


class Store:
    """A folder, or what is below a prefix of a bucket."""

    def __init__(self, url: str) -> None:
        """Raise `Misconfigured` for a URL that is none of an object store. Connects to nothing."""
        try:
            parts = parsed(url)
        except ValueError as error:
            raise Misconfigured(f"PIPELINE_ARCHIVE_URL: {error}") from None
        self.url = url.rstrip("/")
        self._folder: Path | None = None
        if parts.scheme == "file":
            self._folder = Path(unquote(parts.path))
        try:
            self._store = self._open()
        except (BaseError, ValueError) as error:
            raise Misconfigured(f"PIPELINE_ARCHIVE_URL: {url!r}: {_told(error)}") from None

    def _open(self) -> ObjectStore:
        if self._folder is not None:
            if not self._folder.is_dir():
                # A mount that is missing must not become a folder on another disk.
                raise ValueError("there is no such folder: make it, or mount it")
            return LocalStore(self._folder)
        return from_url(
            self.url,
            client_options={
                "allow_http": True,  # of an endpoint that somebody has written so
                "connect_timeout": timedelta(seconds=5),
                "timeout": timedelta(seconds=REQUEST_SECONDS),
            },
            retry_config={"max_retries": 5, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
        )

    async def put(self, name: str, content: bytes) -> None:
        """Write an object, in place of another, and read it back. Raises `StoreFailed`."""
        with self._failing():
            await self._store.put_async(name, content)
        await self.settle(name)
        try:
            found = await self.get(name)
        except Missing:
            found = None
        if found != content:
            raise StoreFailed(f"{self.url}: {name} was written, and is not there as it was")

    async def settle(self, name: str) -> None:
        """Let what is there last, which another process may have written just before it died."""
        if self._folder is not None:
            with self._failing():
                await asyncio.to_thread(durable.sync, self._folder, name)

    async def get(self, name: str) -> bytes:
        """Return an object. Raises `Missing` or `StoreFailed`."""
        try:
            with self._failing():
                found = await self._store.get_async(name)
                return bytes(await found.bytes_async())
        except FileNotFoundError:
            raise Missing(name) from None

    async def size(self, name: str) -> int:
        """Return the bytes of an object. Raises `Missing` or `StoreFailed`."""
        try:
            with self._failing():
                return (await self._store.head_async(name))["size"]
        except FileNotFoundError:
            raise Missing(name) from None

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names of all objects below a prefix that ends with a slash."""
        with self._failing():
            async for page in self._store.list(prefix):
                for one in page:
                    yield one["path"]

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            # Not there: the object, or the bucket.
            if "NoSuchBucket" in str(error):
                raise StoreFailed(f"{self.url}: there is no such bucket") from None
            raise
        except (BaseError, OSError) as error:
            raise StoreFailed(f"{self.url}: {_told(error)}") from None


def _told(error: Exception) -> str:
    """Return its first sentence; the query of a URL can be a signature."""
    return re.sub(r"\?\S*", "", str(error).partition("\n")[0])
