"""A token of OAuth's client credentials grant (RFC 6749, section 4.4), kept while it is valid."""

import threading
import time

import requests
from pydantic import ValidationError

from .errors import TokenRefused
from .settings import OidcSettings

_ANSWER_SECONDS = 5.0
"""Time-out of connecting to the provider, and of each read."""
_RENEW_AT = 0.8
"""Share of its life after which a token is renewed, as Kafka's own clients do it."""
_LONGEST_REASON = 300


class Tokens:
    """The client's current token."""

    def __init__(self, settings: OidcSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._token = ""
        self._renew_at = self._ends_at = 0.0

    def current(self) -> str:
        """Return a token that is valid. Blocks while it is requested.

        A token is used to its end if its renewal fails. Raises `TokenRefused`, and
        `requests.RequestException` if the provider can't be reached.
        """
        with self._lock:
            if time.monotonic() >= self._renew_at:
                try:
                    self._request()
                except (TokenRefused, requests.RequestException):
                    if time.monotonic() >= self._ends_at:
                        raise
            return self._token

    def _request(self) -> None:
        chosen, began = self._settings, time.monotonic()
        secret = chosen.client_secret.get_secret_value()
        form = {"grant_type": "client_credentials"}
        form |= {"scope": chosen.scope} if chosen.scope else {}
        form |= {"audience": chosen.audience} if chosen.audience else {}
        if chosen.client_auth == "post":
            form |= {"client_id": chosen.client_id, "client_secret": secret}
        answer = requests.post(
            chosen.token_url,
            data=form,
            # Otherwise `requests` looks for a password in ~/.netrc.
            auth=(chosen.client_id, secret) if chosen.client_auth == "basic" else _no_header,
            headers={"Accept": "application/json"},
            timeout=_ANSWER_SECONDS,
            allow_redirects=False,
            verify=str(chosen.ca_file) if chosen.ca_file else True,
        )
        try:
            found = answer.json()
            token, lifetime = found["access_token"], float(found.get("expires_in", 0))
        except (ValueError, KeyError, TypeError, AttributeError):
            reason = answer.text[:_LONGEST_REASON] if answer.status_code >= 400 else "no token"
            raise TokenRefused(
                f"{chosen.token_url} has answered {answer.status_code}: {reason}"
            ) from None
        self._token = token
        # Without a lifetime it is requested for each connection.
        self._renew_at, self._ends_at = began + _RENEW_AT * lifetime, began + lifetime


def _no_header(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


def _from_the_environment() -> Tokens:
    try:
        return Tokens(OidcSettings())
    except ValidationError as error:
        mistakes = error.errors(include_url=False, include_input=False)
        texts = (f"OIDC_{str(one['loc'][0]).upper()}: {one['msg']}" for one in mistakes)
        raise ValueError("; ".join(texts)) from None


token = _from_the_environment().current
"""The provider for `PIPELINE_KAFKA_TOKEN_PROVIDER`."""
