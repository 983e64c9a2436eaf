"""Settings of the client at the OIDC provider: `OIDC_<FIELD>`.

They are read when `onceward.oidc.tokens` is named.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import SecretStr
from pydantic_settings import SettingsConfigDict

from onceward.server_settings import EnvironmentSettings, written


class OidcSettings(EnvironmentSettings):
    """Where tokens come from, and for which client."""

    model_config = SettingsConfigDict(env_prefix="OIDC_")

    token_url: Annotated[
        str,
        written(
            r"https://[^/\s@]\S*|http://(localhost|127\.0\.0\.1|\[::1\])[:/]\S*",
            "https://… (http:// only for the same machine)",
        ),
    ]
    """The provider's token endpoint: `token_endpoint` in `/.well-known/openid-configuration`."""
    client_id: str
    """The client's name."""
    client_secret: SecretStr
    """The client's secret."""
    client_auth: Literal["basic", "post"] = "basic"
    """`client_secret_basic` sends the secret in a header, `client_secret_post` in the form."""
    scope: str | None = None
    """Scopes to request, separated by spaces."""
    audience: str | None = None
    """The parameter `audience`, which some providers require, such as Auth0."""
    ca_file: Path | None = None
    """Authorities to trust, in PEM; unset: the usual ones."""
