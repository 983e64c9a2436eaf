"""Settings of the schema registry: `PIPELINE_SCHEMA_REGISTRY_<FIELD>`, read at the first use."""

from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from onceward.server_settings import EnvironmentSettings
from onceward.settings import Count, Seconds


def _check_urls(text: str) -> str:
    for url in text.split(","):
        parts = urlsplit(url.strip())
        if "@" in parts.netloc or parts.query:
            raise ValueError(
                "it must hold no credentials: they belong into PIPELINE_SCHEMA_REGISTRY_USER and"
                " PIPELINE_SCHEMA_REGISTRY_PASSWORD"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.fragment:
            raise ValueError("write https://host:port/path, several with commas between them")
    return text


class RegistrySettings(EnvironmentSettings):
    """Where the schema registry is, and how it is used."""

    model_config = SettingsConfigDict(env_prefix="PIPELINE_SCHEMA_REGISTRY_", env_ignore_empty=True)

    url: Annotated[str, AfterValidator(_check_urls)] | None = None
    """`https://host:port`, with the path of its Confluent API, such as `/apis/ccompat/v7` for
    Apicurio. Several, separated by commas, are tried in order."""
    user: str | None = None
    """User, or for Confluent Cloud the API key."""
    password: SecretStr | None = None
    """Password of the user."""
    token: SecretStr | None = None
    """Bearer token, instead of user and password."""
    ca_file: Path | None = None
    """Authorities to trust, in PEM; unset: the public ones."""
    certificate_file: Path | None = None
    """The service's certificate, if the registry requests one."""
    key_file: Path | None = None
    """Its key."""
    key_password: SecretStr | None = None
    """If the key is encrypted."""
    timeout: Seconds = 3.0
    """Time for a request to each URL."""
    concurrency: Count = 4
    """Concurrent requests for each codec."""
    schemas: Count = 1_000
    """Schemas that a codec keeps in memory."""
    unknown_age: Seconds = 30.0
    """A missing schema id is not requested again for this long, except for the backlog."""
    auto_register: bool = False
    """Register the code's schemas at the start, for development."""

    @model_validator(mode="after")
    def _credentials_fit(self) -> Self:
        if (self.user is None) != (self.password is None):
            raise ValueError(
                "PIPELINE_SCHEMA_REGISTRY_USER and PIPELINE_SCHEMA_REGISTRY_PASSWORD need each"
                " other"
            )
        if self.token is not None and self.user is not None:
            raise ValueError(
                "set PIPELINE_SCHEMA_REGISTRY_TOKEN, or user and password, and not both"
            )
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError(
                "PIPELINE_SCHEMA_REGISTRY_CERTIFICATE_FILE and PIPELINE_SCHEMA_REGISTRY_KEY_FILE"
                " need each other"
            )
        return self

    @property
    def urls(self) -> int:
        """How many there are."""
        return len((self.url or "").split(","))

    def client_options(self) -> dict[str, Any]:
        """Return the configuration of confluent-kafka's client."""
        options = {
            "url": self.url,
            "timeout": self.timeout,
            "max.retries": 0,  # the batch is retried as a whole
            "ssl.ca.location": _path(self.ca_file),
            "ssl.certificate.location": _path(self.certificate_file),
            "ssl.key.location": _path(self.key_file),
            "ssl.key.password": _revealed(self.key_password),
        }
        if self.password is not None:
            options["basic.auth.user.info"] = f"{self.user}:{_revealed(self.password)}"
        if self.token is not None:
            options |= {
                "bearer.auth.credentials.source": "STATIC_TOKEN",
                "bearer.auth.token": _revealed(self.token),
                "bearer.auth.logical.cluster": "",
            }
        return {name: value for name, value in options.items() if value is not None}


def _path(file: Path | None) -> str | None:
    return None if file is None else str(file)


def _revealed(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
