"""Connections that TLS does not secure are told by what a socket is connected to."""

import ssl
from types import SimpleNamespace
from typing import Any

import pytest

from onceward.servers import peers

VERIFIED = ssl.create_default_context()
UNVERIFIED = ssl._create_unverified_context()
HERE, ELSEWHERE = ("127.0.0.1", 5432), ("10.0.0.5", 5432)


def transport(peer: object, context: ssl.SSLContext | None) -> Any:
    """Return what a transport says of its connection."""
    tls = context and SimpleNamespace(context=context)
    return SimpleNamespace(get_extra_info={"peername": peer, "ssl_object": tls}.get)


@pytest.mark.parametrize(
    ("peer", "context", "is_secured"),
    [
        (HERE, None, True),
        (("127.1.2.3", 5432), None, True),
        (("::1", 5432, 0, 0), None, True),
        (("::ffff:127.0.0.1", 5432, 0, 0), None, True),
        ("/run/postgresql/.s.PGSQL.5432", None, True),
        ("", None, True),
        (ELSEWHERE, None, False),
        (("2001:db8::1", 5432, 0, 0), None, False),
        (("fe80::1%2", 5432, 0, 2), None, False),
        (("::ffff:10.0.0.5", 5432, 0, 0), None, False),
        (ELSEWHERE, UNVERIFIED, False),
        (ELSEWHERE, VERIFIED, True),
    ],
)
def test_who_is_beyond_loopback_needs_tls_that_verifies(
    peer: object,
    context: ssl.SSLContext | None,
    is_secured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "unsecured", {})
    peers.note(transport(peer, context), "PostgreSQL at db:5432", "secure it")
    assert peers.unsecured == (
        {}
        if is_secured
        else {"connections to PostgreSQL at db:5432 are not secured by TLS": "secure it"}
    )


@pytest.mark.parametrize("warns", [True, False])
def test_processes_that_run_warn_of_each_server_once(
    warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "unsecured", {})
    monkeypatch.setattr(peers, "warns", warns)
    for server in ("Kafka at one:9092", "Kafka at two:9092", "Kafka at one:9092"):
        peers.note(transport(ELSEWHERE, None), server, "secure it")
    assert caplog.messages == [
        f"connections to Kafka at {one}:9092 are not secured by TLS: secure it"
        for one in ("one", "two")
        if warns
    ]
