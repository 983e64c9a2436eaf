"""Object stores for the tests, beside the servers that those of the engine use."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import obstore
import pytest
from obstore.store import ObjectStore, from_url
from servers.s3proxy import S3Proxy

from onceward.apply.claim_check import resolve_batch
from onceward.claims import open_claims
from onceward.claims.check import Claims
from onceward.claims.settings import ClaimSettings
from onceward.settings import Settings

from tests.contract.bank import Deposit
from tests.onceward.archive.conftest import s3proxy  # noqa: F401 (fixture)
from tests.onceward.integration.applier import Applier, NewApplier, Outcome
from tests.onceward.integration.bank import Bank
from tests.onceward.integration.conftest import commands, new_applier  # noqa: F401 (fixtures)

LIMIT = 1_000
"""Bytes that a payload of these tests may have to travel with its event."""

SETTINGS = {"limit_bytes": LIMIT, "memory_bytes": 10_000, "timeout": 2}


FOLDER_AND_S3 = pytest.mark.parametrize(
    "store_url", ["folder", pytest.param("s3", marks=pytest.mark.full)], indirect=True
)
"""Of tests that are to have each of the stores."""


@pytest.fixture(params=["folder"])
def store_url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """URL of a store of the test's own, empty, which services find in their environment."""
    if request.param == "s3":
        server: S3Proxy = request.getfixturevalue("s3proxy")
        for name, text in server.environment().items():
            monkeypatch.setenv(name, text)
        url = f"{server.bucket(f'test-{uuid4().hex[:12]}')}/large"
    else:
        (tmp_path / "store").mkdir()
        url = f"file://{tmp_path}/store"
    monkeypatch.setenv("PIPELINE_CLAIM_URL", url)
    for name, value in SETTINGS.items():
        monkeypatch.setenv(f"PIPELINE_CLAIM_{name.upper()}", str(value))
    return url


@dataclass(frozen=True)
class Objects:
    """What lies in a store, past the claim check."""

    url: str
    store: ObjectStore

    def names(self) -> set[str]:
        """Return the names of all objects."""
        return {one["path"] for page in obstore.list(self.store) for one in page}

    def get(self, name: str) -> bytes:
        """Return an object."""
        return bytes(obstore.get(self.store, name).bytes())

    def put(self, name: str, content: bytes) -> str:
        """Store an object, and return where it is."""
        obstore.put(self.store, name, content)
        return f"{self.url}/{name}"

    def delete(self, name: str) -> None:
        """Delete an object."""
        obstore.delete(self.store, name)


@pytest.fixture
def objects(store_url: str) -> Objects:
    """Return what lies in the store."""
    return Objects(store_url, from_url(store_url))


@pytest.fixture
def opened(store_url: str, settings: Callable[..., Settings]) -> Callable[..., Claims]:
    """Open the claim check of a service; changes may be such as no environment is allowed."""

    def open_one(service: str = "applier", **changes: object) -> Claims:
        claims = open_claims(service, settings())
        assert claims is not None
        return Claims(service, ClaimSettings().model_copy(update=changes)) if changes else claims

    return open_one


GONE = {"grace": -7_200.0}
"""A setting with which any grace is over."""


@dataclass
class Counter:
    """An applier that has a claim check."""

    applier: Applier
    claims: Claims

    async def apply(self, *deposits: Deposit) -> Sequence[Outcome]:
        """Fetch what the deposits refer to, and apply them as batches, as the reader does."""
        outcomes: list[Outcome] = []
        while deposits:
            start = await self.applier.position()
            batch = await resolve_batch(
                await self.applier.read(*deposits, start=start), self.applier.consume.claims
            )
            outcomes += await self.applier.apply_batch(batch)
            deposits = deposits[batch.end - start :]
        return outcomes


@pytest.fixture
async def counter(
    new_applier: NewApplier,  # noqa: F811
    opened: Callable[..., Claims],
) -> Counter:
    """Return the applier of a bank that takes deposits by reference."""
    one = Bank(deposits="deposits", balances="balances", name="applier")
    applier = await new_applier(one.handlers, topic=one.deposits)
    applier.consume.claims = opened()
    return Counter(applier, opened())


def referring(
    deposit: Deposit, uri: str, *, length: int | None = None, checksum: str | None = None
) -> Deposit:
    """Return the deposit with a reference in the place of its payload."""
    said = {"ce_dataref": uri, "ce_datalength": length, "ce_datachecksum": checksum}
    headers = [(name, str(value).encode()) for name, value in said.items() if value is not None]
    return replace(deposit, value=b"", headers=(*deposit.headers, *headers))


Outage = Callable[[], AbstractAsyncContextManager[None]]


@pytest.fixture
def outage(store_url: str, tmp_path: Path) -> Outage:
    """Take the store away for the time of a block."""

    @asynccontextmanager
    async def take_away() -> AsyncIterator[None]:
        folder = tmp_path / "store"
        folder.rename(tmp_path / "away")
        folder.touch()
        try:
            yield
        finally:
            folder.unlink()
            (tmp_path / "away").rename(folder)

    return take_away


@pytest.fixture
def loss(request: pytest.FixtureRequest, store_url: str, tmp_path: Path) -> Outage:
    """Take all of the store away for the time of a block: its folder or bucket is not there.

    With the parameter "unmounted" an empty folder stays behind, as of a mount point.
    """
    folder = tmp_path / "store"
    if store_url.startswith("s3:"):
        server: S3Proxy = request.getfixturevalue("s3proxy")
        folder = server.home / "data" / store_url.split("/")[2]

    @asynccontextmanager
    async def take_away() -> AsyncIterator[None]:
        folder.rename(tmp_path / "lost")
        if getattr(request, "param", "gone") == "unmounted":
            folder.mkdir()
        try:
            yield
        finally:
            # In place of what is empty; anything else would be an error.
            (tmp_path / "lost").rename(folder)

    return take_away


LOST = pytest.mark.parametrize(
    ("store_url", "loss"),
    [
        ("folder", "gone"),
        ("folder", "unmounted"),
        pytest.param("s3", "gone", marks=pytest.mark.full),
    ],
    indirect=True,
)
"""Of tests that are to see each way in which a store may not be there."""
