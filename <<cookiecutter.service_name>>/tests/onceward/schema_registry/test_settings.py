"""Settings of the schema registry."""

from pathlib import Path

import pytest
import settings_guide
from pydantic import ValidationError

from onceward.schema_registry import RegistrySettings
from onceward.server_settings import over_http
from onceward.settings import mistakes

GUIDE = Path(__file__).parents[3] / "docs" / "schema-registry.md"


def test_the_guide_has_the_settings() -> None:
    assert settings_guide.table(RegistrySettings) in GUIDE.read_text("utf-8")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"URL": "https://ada:word@registry"}, "no credentials"),
        ({"URL": "registry:8081"}, "write https://"),
        ({"URL": "https://one:8081,two"}, "write https://"),
        ({"USER": "ada"}, "need each other"),
        ({"PASSWORD": "word"}, "need each other"),
        ({"USER": "ada", "PASSWORD": "word", "TOKEN": "word"}, "and not both"),
        ({"CERTIFICATE_FILE": "/x"}, "need each other"),
        ({"TIMEOUT": "0"}, "greater than 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_and_no_secret_is_shown(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], text: str
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(f"PIPELINE_SCHEMA_REGISTRY_{name}", value)
    with pytest.raises(ValidationError) as caught:
        RegistrySettings()
    said = "; ".join(mistakes(caught.value, RegistrySettings))
    assert text in said
    assert "word" not in said.lower().replace("password", "")


def test_secrets_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_URL", "https://a:1/x, https://b:2")
    monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_USER", "ada")
    monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_PASSWORD", "hidden")
    settings = RegistrySettings()
    assert "hidden" not in f"{settings!r} {settings} {settings.model_dump_json()}"
    assert settings.client_options()["basic.auth.user.info"] == "ada:hidden"


def test_each_registry_that_tls_does_not_secure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = "http://localhost:8081, HTTP://one:8081/apis,https://two,http://three"
    monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_URL", urls)
    assert [one for one, _ in over_http(RegistrySettings())] == [
        f"connections to {host} (PIPELINE_SCHEMA_REGISTRY_URL) are not secured by TLS"
        for host in ("one", "three")
    ]
