"""Settings of the claim check: what is refused, and how it is said."""

from collections.abc import Callable
from pathlib import Path

import pytest
import settings_guide

from claims import open_claims
from claims.settings import ClaimSettings
from pipeline.service import Misconfigured
from pipeline.settings import Settings

GUIDE = Path(__file__).parents[2] / "docs" / "claims.md"


def test_the_guide_tells_of_every_setting_what_the_code_says() -> None:
    assert settings_guide.table(ClaimSettings) in GUIDE.read_text("utf-8"), settings_guide.__doc__


def test_without_a_url_there_is_none(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPELINE_CLAIM_URL", raising=False)
    assert open_claims("desk", settings()) is None


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("URL", "nowhere", "PIPELINE_CLAIM_URL: "),
        ("URL", "file://relative", "PIPELINE_CLAIM_URL: "),
        ("URL", "http://169.254.169.254/claims", "PIPELINE_CLAIM_URL: "),
        ("URL", "s3://ann:hunter2@bucket/claims", "PIPELINE_CLAIM_URL: "),
        ("URL", "s3://bucket/claims?secret=hunter2", "PIPELINE_CLAIM_URL: "),
        ("URL", "file:///nowhere/at/all", r"\(PIPELINE_CLAIM_URL\): .*/nowhere/at/all"),
        ("LIMIT", "0", "PIPELINE_CLAIM_LIMIT: "),
        ("LIMIT", "5000", "limit <= memory must hold; they are 5000 and 4000"),
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
    monkeypatch.setenv("PIPELINE_CLAIM_MEMORY", "4000")
    monkeypatch.setenv(f"PIPELINE_CLAIM_{name}", value)
    with pytest.raises(Misconfigured, match=complaint) as error:
        open_claims("desk", settings())
    assert "hunter2" not in str(error.value)


def test_the_limit_lies_below_what_may_be_sent(
    store_url: str, settings: Callable[..., Settings]
) -> None:
    assert open_claims("desk", settings(max_event_bytes=1_001)) is not None
    with pytest.raises(Misconfigured, match=r"less than PIPELINE_MAX_EVENT_BYTES \(1,000\)"):
        open_claims("desk", settings(max_event_bytes=1_000))


@pytest.mark.parametrize("name", ["a/b", "..", "", "a b"])
def test_a_service_whose_name_is_no_folder_has_no_store(
    store_url: str, settings: Callable[..., Settings], name: str
) -> None:
    with pytest.raises(Misconfigured, match="can't have an object store"):
        open_claims(name, settings())
