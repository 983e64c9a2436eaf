"""Where the archive is, is said by a URL; a wrong one is a clear error at start."""

import asyncio
import json
import os
import re
import sys
from datetime import date, timedelta
from pathlib import Path

import pytest
import settings_guide

from onceward.archive import Archive, ArchiveSettings
from onceward.errors import StoreUnavailable
from onceward.object_store import EndpointSettings
from onceward.server_settings import over_http
from onceward.service import Misconfigured

from .conftest import DAY, House, make_day
from .test_days import start


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "write file:///folder, s3://bucket/prefix"),
        ("/var/archive", "write file:///folder, s3://bucket/prefix"),
        ("ftp://host/x", "write file:///folder, s3://bucket/prefix"),
        ("memory:///", "write file:///folder, s3://bucket/prefix"),
        ("s3:bucket", "write file:///folder, s3://bucket/prefix"),
        ("s3:///prefix", "write file:///folder, s3://bucket/prefix"),
        ("file://host/x", "write file:/// and an absolute path"),
        ("file:relative", "write file:/// and an absolute path"),
        ("file:///no/such/folder", "the folder does not exist"),
        ("file:///etc/passwd", "the folder does not exist"),
        ("az://container/x", "Account must be specified"),
        ("s3://bucket:port/x", "PIPELINE_ARCHIVE_URL"),
        ("s3://[bucket/x", "PIPELINE_ARCHIVE_URL"),
    ],
)
def test_a_url_that_is_none_of_a_store_is_refused(
    url: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    monkeypatch.setenv("PIPELINE_ARCHIVE_URL", url)
    with pytest.raises(Misconfigured, match=re.escape(said)) as refused:
        Archive("orders").check()
    assert "PIPELINE_ARCHIVE_URL" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["s3://key:s3cret@bucket/x", "s3://key:s3cret/x@bucket/x", "az://c/x?sv=2026&sig=s3cret"]
)
def test_credentials_are_not_taken_from_a_url_and_not_shown(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_ARCHIVE_URL", url)
    with pytest.raises(Misconfigured, match="must not contain credentials") as refused:
        Archive("orders").check()
    assert "s3cret" not in str(refused.value)


def test_addresses_of_stores_that_tls_does_not_secure_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in EndpointSettings.model_fields:
        monkeypatch.setenv(name.upper(), f"http://{name}.example:9000")
    named = [one for one, _ in over_http(EndpointSettings())]
    assert named == [
        f"connections to {name}.example ({name.upper()}) are not secured by TLS"
        for name in EndpointSettings.model_fields
    ]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://minio.example")
    assert len([*over_http(EndpointSettings())]) == len(named) - 2


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/some/prefix/", "gs://bucket/prefix"])
def test_a_url_of_a_store_is_accepted_before_anything_answers(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_ARCHIVE_URL", url)
    Archive("orders").check()


@pytest.mark.parametrize("url", [None, ""])
def test_without_a_url_there_is_no_archive(
    url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPELINE_ARCHIVE_URL", raising=False)
    if url is not None:
        monkeypatch.setenv("PIPELINE_ARCHIVE_URL", url)
    assert Archive("orders").open() is None


def test_the_guide_tells_of_every_setting_what_the_code_says() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "archive.md").read_text("utf-8")
    assert settings_guide.table(ArchiveSettings) in guide, settings_guide.__doc__


async def test_a_service_does_not_start_with_a_wrong_url(
    database_url: str, kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_ARCHIVE_URL", "file:///no/such/folder")
    process = await start(database_url, "run")
    _, said = await process.communicate()
    assert process.returncode == 1
    line = json.loads(said.splitlines()[-1])["message"]
    assert line.startswith("Misconfigured: PIPELINE_ARCHIVE_URL: 'file:///no/such/folder'")


async def test_what_the_store_says_is_a_sentence(folder: str, tmp_path: Path) -> None:
    store = Archive("orders").open()
    assert store is not None
    await store.put({"a": b"1"})
    with pytest.raises(StoreUnavailable, match="storing failed: ") as failed:
        await store.put({"a/b": b"2"})
    assert "\n" not in str(failed.value)
    assert await store.get("a") == b"1"


MEASURE = """
import asyncio, resource, sys
import asyncpg
from datetime import date
from onceward.archive import Archive, days

days.PART_BYTES = days.PAGE_BYTES = 1_000_000

async def tell(progress):
    pass

async def main():
    connection = await asyncpg.connect(sys.argv[1])
    await Archive("orders").keep(connection, sys.argv[2], date.fromisoformat(sys.argv[3]), tell)

asyncio.run(main())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.full
async def test_a_day_of_any_size_takes_the_same_memory(
    house: House, folder: str, direct_url: str
) -> None:
    async def kibibytes(day: date) -> int:
        root = Path(__file__).parents[3]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", MEASURE, direct_url.replace("+asyncpg", "")),
            *(f"outbox_p{day:%Y%m%d}", str(day)),
            env={**os.environ, "PYTHONPATH": str(root / "src")},
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await process.communicate()
        return int(printed)

    following = DAY + timedelta(days=1)
    await make_day(house.db, following)
    await house.insert(DAY, 1_000, 2_000)
    await house.insert(following, 20_000, 2_000)
    before, after = await kibibytes(DAY), await kibibytes(following)
    assert after - before < 10_000, "the large one has 40 MB more"
