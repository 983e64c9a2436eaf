"""A way to the registry that counts requests, can be broken, and answers for GUIDs.

Apicurio has no ids that are the same in all registries: here such an id is its own id as a number.
"""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import UUID

_GUIDS = "/schemas/guids/"


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the registry."""

    daemon_threads = True

    def __init__(self, registry: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.registry = registry
        self.paths: list[str] = []
        """Of the requests so far."""
        self.answer: tuple[int, bytes] | None = None
        """Status and body that all requests get; None: those of the registry."""
        self.lacks: str | None = None
        """Start of the paths that are not found."""
        self.knows_guids = True
        self.authorization: str | None = None
        """The header of the last request."""
        self.at_once = 0
        self.most_at_once = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_port}"

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request for the time of a block."""
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            yield
        finally:
            with self._lock:
                self.at_once -= 1

    @classmethod
    @contextmanager
    def to(cls, registry: str) -> Iterator["Proxy"]:
        """Serve for the time of a block."""
        with cls(registry) as one:
            thread = threading.Thread(target=one.serve_forever, args=[0.02])
            thread.start()
            try:
                yield one
            finally:
                one.shutdown()
                thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["content-length"])))

    def _answer(self, body: bytes | None) -> None:
        # Not counted while it is answered: a client that has read the answer sends the next one.
        with self.server.counted():
            status, answer = self._pass_on(body)
        self.send_response(status)
        self.send_header("content-type", "application/vnd.schemaregistry.v1+json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _pass_on(self, body: bytes | None) -> tuple[int, bytes]:
        proxy = self.server
        proxy.paths.append(self.path)
        proxy.authorization = self.headers["authorization"]
        path = self.path
        if path.startswith(_GUIDS) and proxy.knows_guids:
            path = f"/schemas/ids/{UUID(path.removeprefix(_GUIDS)).int}"
        answered = proxy.answer
        if proxy.lacks and path.startswith(proxy.lacks):
            answered = 404, b'{"error_code": 40402, "message": "Version not found."}'
        return answered or _with_guid(_asked(proxy.registry + path, body), proxy.knows_guids)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _with_guid(answered: tuple[int, bytes], knows_guids: bool) -> tuple[int, bytes]:
    status, body = answered
    contents = json.loads(body) if status == 200 and knows_guids else None
    if not isinstance(contents, dict) or not contents.keys() >= {"id", "schema"}:
        return answered
    return status, json.dumps({**contents, "guid": str(UUID(int=contents["id"]))}).encode()


def _asked(url: str, body: bytes | None) -> tuple[int, bytes]:
    kind = {"content-type": "application/vnd.schemaregistry.v1+json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, kind), timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
