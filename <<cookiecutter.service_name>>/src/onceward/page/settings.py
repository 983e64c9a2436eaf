"""Settings of the operations page: `PIPELINE_PAGE_<FIELD>`, read when it starts."""

from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, Self

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from onceward.server_settings import EnvironmentSettings, written
from onceward.settings import Seconds

_ORIGIN = r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]+)?"


def _check_length(token: SecretStr) -> SecretStr:
    if len(token.get_secret_value()) < 16:
        raise ValueError("at least 16 characters (create one with `openssl rand -hex 24`)")
    return token


class PageSettings(EnvironmentSettings):
    """Address, login and intervals of the page."""

    model_config = SettingsConfigDict(env_prefix="PIPELINE_PAGE_")

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on. Put TLS before one that other machines can reach."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8_081
    """0 picks a free port and logs it."""
    token: Annotated[SecretStr, AfterValidator(_check_length)] | None = None
    """Shared token of all users, at least 16 characters."""
    proxy_header: (
        Annotated[str, written(r"[A-Za-z0-9-]+", "a header's name, of letters, digits and '-'")]
        | None
    ) = None
    """Header in which an authenticating proxy sends the user's name; instead of the token."""
    proxies: Annotated[frozenset[IPv4Address | IPv6Address], NoDecode] = frozenset()
    """Addresses of that proxy, separated by commas."""
    origin: (
        Annotated[str, written(_ORIGIN, "https://host or https://host:port, and no path")] | None
    ) = None
    """The page's URL in the browser, if a proxy is before it: `https://ops.example.org`."""
    trace_url: (
        Annotated[str, written(r"https?://.*\{trace_id\}.*", "a URL with {trace_id} in it")] | None
    ) = None
    """URL of a trace: `https://traces.example.org/trace/{trace_id}`."""
    send: bool = False
    """The page has a form that sends messages to the service, for development."""
    session: Seconds = 28_800.0
    """Users log in again after this long."""
    interval: Annotated[Seconds, Field(ge=0.1)] = 5.0
    """Time between two queries of PostgreSQL and Kafka."""

    @field_validator("proxies", mode="before")
    @classmethod
    def _split(cls, given: object) -> object:
        if not isinstance(given, str):
            return given
        return [ip_address(one.strip()) for one in given.split(",")]

    @model_validator(mode="after")
    def _require_login(self) -> Self:
        if (self.token is None) == (self.proxy_header is None):
            raise ValueError(
                "set PIPELINE_PAGE_TOKEN for a login by token (create one with"
                " `openssl rand -hex 24`), or PIPELINE_PAGE_PROXY_HEADER if a proxy authenticates"
                " users; not both"
            )
        if (self.proxy_header is None) != (not self.proxies):
            raise ValueError(
                "set PIPELINE_PAGE_PROXY_HEADER and PIPELINE_PAGE_PROXIES together: the header's"
                " name, and the addresses of the proxies that send it"
            )
        return self
