"""Settings of the claim check: what is refused, and how it is said."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import settings_guide
import typer
from sqlalchemy import MetaData

from onceward import Handlers, Service
from onceward.archive import Archive, ArchiveSettings
from onceward.claims import ClaimSettings, open_claims
from onceward.cli.commands import command_line
from onceward.service import Misconfigured
from onceward.settings import Settings

from tests.onceward.integration.conftest import Command

GUIDE = Path(__file__).parents[3] / "docs" / "claims.md"


def test_the_guide_tells_of_every_setting_what_the_code_says() -> None:
    assert settings_guide.table(ClaimSettings) in GUIDE.read_text("utf-8"), settings_guide.__doc__


@pytest.fixture
def command(commands: Callable[[typer.Typer], Command]) -> Command:
    """Call `service …` of a service that has all of the packages."""
    service = Service(
        "applier",
        Handlers(),
        MetaData(),
        archive=Archive("applier"),
        claims=open_claims,
        settings=(ArchiveSettings, ClaimSettings),
    )
    app = command_line(service)
    assert isinstance(app, typer.Typer)
    return commands(app)


async def test_mistakes_of_all_packages_are_told_at_once_whatever_the_command(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {
        "BATCH_SIZE": "0",
        "ARCHIVE_URL": "s3://ann:hunter2@bucket",
        "CLAIM_URL": "nowhere",
        "CLAIM_LIMIT_BYTES": "0",
        "CLAIM_LIMTI": "1",
    }
    for name, value in wrong.items():
        monkeypatch.setenv(f"PIPELINE_{name}", value)
    for asked in ("migrate",), ("dead", "list"), ("doctor",):
        done = await command(*asked)
        assert done.exit_code == 2
        for name in wrong:
            assert f"  PIPELINE_{name}: " in done.stderr
        assert "hunter2" not in done.output


async def test_incompatible_settings_are_reported_before_any_server_is_contacted(
    command: Command, store_url: str, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    nowhere = f"postgresql+asyncpg://x:x@127.0.0.1:{unused_tcp_port}/x"
    monkeypatch.setenv("PIPELINE_ARCHIVE_URL", "file:///no/such/folder")
    monkeypatch.setenv("PIPELINE_CLAIM_AGE", "172800")
    monkeypatch.setenv("PIPELINE_HEALTH_PORT", "0")
    doctor = map(json.loads, (await command("doctor", "--json")).stdout.splitlines())
    (told,) = [one["found"] for one in doctor if one["check"] == "settings"]
    archive, claims = told.splitlines()
    assert archive.startswith("PIPELINE_ARCHIVE_URL: 'file:///no/such/folder'")
    assert claims.startswith("PIPELINE_CLAIM_AGE is 172800.0 s")
    monkeypatch.setenv("PIPELINE_DATABASE_URL", nowhere)
    done = await command("run")
    assert done.exit_code == 1
    assert "PIPELINE_ARCHIVE_URL: " in done.stderr
    assert "PIPELINE_CLAIM_AGE is " in done.stderr


def test_without_a_url_there_is_none(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPELINE_CLAIM_URL", raising=False)
    assert open_claims("applier", settings()) is None


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("URL", "nowhere", "PIPELINE_CLAIM_URL: write file:///folder, s3://bucket/prefix, gs"),
        ("URL", "file://relative", "PIPELINE_CLAIM_URL: "),
        ("URL", "http://169.254.169.254/claims", "PIPELINE_CLAIM_URL: "),
        ("URL", "s3://ann:hunter2@bucket/claims", "PIPELINE_CLAIM_URL: "),
        ("URL", "s3://bucket/claims?secret=hunter2", "PIPELINE_CLAIM_URL: "),
        (
            "URL",
            "file:///nowhere/at/all",
            "PIPELINE_CLAIM_URL: 'file:///nowhere/at/all': the folder does not exist",
        ),
        ("LIMIT_BYTES", "0", "PIPELINE_CLAIM_LIMIT_BYTES: "),
        (
            "LIMIT_BYTES",
            "5000",
            "^PIPELINE_CLAIM_LIMIT_BYTES <= PIPELINE_CLAIM_MEMORY_BYTES must hold; ",
        ),
        ("TIMEOUT", "2.6", r"at most half of PIPELINE_TRANSACTION_TIMEOUT \(5.0 s\)"),
        ("GRACE", "60", "PIPELINE_CLAIM_GRACE: "),
        ("AGE", "172800", r"longer than PIPELINE_OUTBOX_AGE \(172800.0 s\)"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_do(
    store_url: str,
    settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    complaint: str,
) -> None:
    monkeypatch.setenv("PIPELINE_CLAIM_MEMORY_BYTES", "4000")
    monkeypatch.setenv(f"PIPELINE_CLAIM_{name}", value)
    with pytest.raises(Misconfigured, match=complaint) as error:
        open_claims("applier", settings(transaction_timeout=5))
    assert "hunter2" not in str(error.value)


def test_the_limit_lies_below_what_may_be_sent(
    store_url: str, settings: Callable[..., Settings]
) -> None:
    assert open_claims("applier", settings(max_event_bytes=1_001)) is not None
    with pytest.raises(Misconfigured, match=r"less than PIPELINE_MAX_EVENT_BYTES \(1,000\)"):
        open_claims("applier", settings(max_event_bytes=1_000))


@pytest.mark.parametrize("name", ["a/b", "..", "", "a b"])
def test_a_service_whose_name_is_no_folder_has_no_store(
    store_url: str, settings: Callable[..., Settings], name: str
) -> None:
    with pytest.raises(Misconfigured, match="can't have an object store"):
        open_claims(name, settings())
