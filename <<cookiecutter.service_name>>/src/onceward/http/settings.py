"""Settings of the HTTP API: `PIPELINE_HTTP_<FIELD>`, read when it starts."""

from typing import Annotated

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from onceward.server_settings import EnvironmentSettings
from onceward.settings import Count, Seconds


class HttpSettings(EnvironmentSettings):
    """Where the API is served, and its limits."""

    model_config = SettingsConfigDict(env_prefix="PIPELINE_HTTP_")

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """`0.0.0.0` for all addresses, behind a proxy with TLS."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8_000
    """0 picks a free port and logs it."""
    request_timeout: Seconds = 10.0
    """Time after which a request is answered with 503."""
    max_body_bytes: Count = 900_000
    """A larger request is answered with 413."""
