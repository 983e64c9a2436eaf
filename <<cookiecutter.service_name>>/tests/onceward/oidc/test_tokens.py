"""Tokens of an OIDC provider: kept, renewed in time, and used to their end while it fails."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import pytest
import requests
from pydantic import ValidationError

from onceward.oidc.errors import TokenRefused
from onceward.oidc.settings import OidcSettings

LOOPBACK = "127.0.0.1"


class Provider(HTTPServer):
    """Answers what the test wants, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__((LOOPBACK, 0), _Handler)
        self.status = 200
        self.answer: dict[str, Any] = {"access_token": "t", "expires_in": 100}
        self.asked: list[tuple[dict[str, list[str]], str | None]] = []

    @property
    def url(self) -> str:
        """The token endpoint."""
        return f"http://{LOOPBACK}:{self.server_port}/token"


class _Handler(BaseHTTPRequestHandler):
    server: Provider

    def do_POST(self) -> None:
        form = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.asked.append((parse_qs(form), self.headers["Authorization"]))
        body = json.dumps(self.server.answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no line for each request."""


@pytest.fixture
def provider() -> Iterator[Provider]:
    with Provider() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def tokens(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a maker of tokens, and a clock to move."""
    monkeypatch.setenv("OIDC_TOKEN_URL", provider.url)
    monkeypatch.setenv("OIDC_CLIENT_ID", "teller")
    monkeypatch.setenv("OIDC_CLIENT_SECRET", "correct-horse")
    from onceward.oidc import tokens as module

    clock = SimpleNamespace(now=time.monotonic())
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def make(**changes: object) -> Any:
        settings = {"token_url": provider.url, "client_id": "teller", "client_secret": "secret"}
        return module.Tokens(OidcSettings.model_validate(settings | changes))

    return SimpleNamespace(make=make, clock=clock)


def test_a_token_is_kept_renewed_in_time_and_used_to_its_end(
    provider: Provider, tokens: SimpleNamespace
) -> None:
    ours = tokens.make()
    assert [ours.current(), ours.current()] == ["t", "t"]
    assert len(provider.asked) == 1
    provider.answer["access_token"] = "u"
    tokens.clock.now += 81
    assert ours.current() == "u"
    provider.status, provider.answer = 500, {"error": "down"}
    tokens.clock.now += 99
    assert ours.current() == "u"
    tokens.clock.now += 2
    with pytest.raises(TokenRefused, match=r"has answered 500.*down"):
        ours.current()
    assert len(provider.asked) == 4


def test_a_token_without_a_lifetime_is_requested_each_time(
    provider: Provider, tokens: SimpleNamespace
) -> None:
    del provider.answer["expires_in"]
    ours = tokens.make()
    assert [ours.current(), ours.current()] == ["t", "t"]
    assert len(provider.asked) == 2


@pytest.mark.parametrize("answer", [{}, {"access_token": "t", "expires_in": "soon"}, [], "t"])
def test_an_answer_that_has_no_token_is_refused(
    provider: Provider, tokens: SimpleNamespace, answer: Any
) -> None:
    provider.answer = answer
    with pytest.raises(TokenRefused, match="has answered 200: no token"):
        tokens.make().current()


def test_a_provider_that_is_not_there_is_an_error_of_requests(tokens: SimpleNamespace) -> None:
    with pytest.raises(requests.ConnectionError):
        tokens.make(token_url=f"http://{LOOPBACK}:9/token").current()


def test_the_secret_goes_where_the_setting_says(
    provider: Provider, tokens: SimpleNamespace
) -> None:
    tokens.make(scope="a b", audience="kafka").current()
    tokens.make(client_auth="post").current()
    (first, header), (second, nothing) = provider.asked
    grant = {"grant_type": ["client_credentials"]}
    assert first == grant | {"scope": ["a b"], "audience": ["kafka"]}
    assert header == "Basic dGVsbGVyOnNlY3JldA=="
    assert second == grant | {"client_id": ["teller"], "client_secret": ["secret"]}
    assert nothing is None


@pytest.mark.parametrize("url", ["http://id.example.org/token", "id.example.org", "https://"])
def test_the_secret_is_not_sent_without_tls_to_another_machine(url: str) -> None:
    with pytest.raises(ValidationError, match="write https://"):
        OidcSettings.model_validate({"token_url": url, "client_id": "a", "client_secret": "b"})
