"""The settings of the page: what is refused, and what the guide says of them."""

from ipaddress import ip_address
from pathlib import Path

import pytest
import settings_guide
from pydantic import ValidationError

from onceward.page.settings import PageSettings

from .conftest import TOKEN

GUIDE = Path(__file__).parents[3] / "docs/operations-page.md"
PROXY = {"proxy_header": "X-User", "proxies": ["10.0.0.1"]}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "PIPELINE_PAGE_TOKEN"),
        ({"token": "x" * 15}, "token"),
        ({"token": TOKEN, **PROXY}, "not both"),
        ({"proxy_header": "X-User"}, "PIPELINE_PAGE_PROXIES"),
        ({"token": TOKEN, "proxies": ["10.0.0.1"]}, "PIPELINE_PAGE_PROXY_HEADER"),
        ({**PROXY, "proxies": ["*"]}, "proxies"),
        ({**PROXY, "proxies": "10.0.0.1,*"}, "'*' does not appear to be an IPv4 or IPv6 address"),
        ({"token": TOKEN, "host": ""}, "host"),
        ({**PROXY, "proxy_header": "X User"}, "proxy_header"),
        ({"token": TOKEN, "origin": "ops.test"}, "origin"),
        ({"token": TOKEN, "origin": "https://ops.test/"}, "origin"),
        ({"token": TOKEN, "origin": "https://ann@ops.test"}, "origin"),
        ({"token": TOKEN, "origin": "https://[ops.test"}, "origin"),
        ({"token": TOKEN, "trace_url": "javascript:{trace_id}"}, "trace_url"),
        ({"token": TOKEN, "trace_url": "https://traces.test/"}, "trace_url"),
        ({"token": TOKEN, "port": 65_536}, "port"),
        ({"token": TOKEN, "session": 0}, "session"),
    ],
)
def test_wrong_settings_are_refused_and_named(given: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError) as refused:
        PageSettings.model_validate(given)
    said = str(refused.value)
    assert named in said
    assert TOKEN not in said


def test_proxies_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_PAGE_PROXY_HEADER", "X-User")
    monkeypatch.setenv("PIPELINE_PAGE_PROXIES", "10.0.0.1, ::1")
    assert PageSettings().proxies == {ip_address("10.0.0.1"), ip_address("::1")}


def test_the_guide_tells_of_every_setting_what_the_code_says() -> None:
    assert settings_guide.table(PageSettings) in GUIDE.read_text("utf-8"), settings_guide.__doc__
