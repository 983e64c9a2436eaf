"""An OIDC provider of the tests' own, on loopback: a token endpoint and its keys."""

import base64
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from servers.network import LOOPBACK

from tests.servers.programs import program

CLIENT, SECRET, AUDIENCE = "teller", "correct-horse-battery", "kafka"


class Issuer(ThreadingHTTPServer):
    """Signs tokens (RS256) for the one client that it knows."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__((LOOPBACK, 0), _Handler)
        self._key = folder / "issuer.key"
        _openssl("genrsa", "-out", str(self._key), "2048")
        self.lifetime = 3_600
        """Of a token, in seconds."""
        self.fails = False
        """Whether it answers 503."""
        self.passes = threading.Event()
        """Cleared: it does not answer requests for tokens."""
        self.passes.set()
        self.granted: list[str] = []
        """Tokens that were issued."""

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{LOOPBACK}:{self.server_port}"

    def keys(self) -> dict[str, object]:
        """Return its public key, as a JSON Web Key Set."""
        modulus = _openssl("rsa", "-in", str(self._key), "-noout", "-modulus").strip()
        n = _encoded(bytes.fromhex(modulus.decode().partition("=")[2]))
        return {"keys": [{"kty": "RSA", "kid": "1", "alg": "RS256", "use": "sig",
                          "n": n, "e": "AQAB"}]}  # fmt: skip

    def grant(self) -> dict[str, object]:
        """Issue a token."""
        now = int(time.time())
        claims = {
            "iss": self.url,
            "sub": CLIENT,
            "aud": AUDIENCE,
            "scope": "records",
            "iat": now,
            "exp": now + self.lifetime,
            "jti": str(len(self.granted)),
        }
        parts = [{"alg": "RS256", "kid": "1"}, claims]
        text = ".".join(_encoded(json.dumps(one).encode()) for one in parts)
        signature = _openssl("dgst", "-sha256", "-sign", str(self._key), given=text.encode())
        self.granted.append(f"{text}.{_encoded(signature)}")
        return {"access_token": self.granted[-1], "token_type": "Bearer",
                "expires_in": self.lifetime}  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    server: Issuer

    def do_GET(self) -> None:
        self._answer(200, self.server.keys())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.passes.wait()
        allowed = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        if self.server.fails:
            self._answer(503, {"error": "temporarily_unavailable"})
        elif self.headers["Authorization"] != f"Basic {allowed}":
            self._answer(401, {"error": "invalid_client"})
        else:
            self._answer(200, self.server.grant())

    def _answer(self, status: int, found: dict[str, object]) -> None:
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no line for each request."""


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _openssl(*arguments: str, given: bytes = b"") -> bytes:
    done = subprocess.run([program("openssl"), *arguments], input=given, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def issuing(folder: Path) -> Iterator[Issuer]:
    """Start an issuer, and stop it at the end of the block."""
    with Issuer(folder) as issuer:
        threading.Thread(target=issuer.serve_forever, args=(0.05,), daemon=True).start()
        yield issuer
        issuer.passes.set()
        issuer.shutdown()
