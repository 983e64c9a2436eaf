"""Liveness, readiness and metrics over HTTP, on a port and in a thread of their own.

The thread also answers while the event loop is blocked, and reports that it is.
"""

import errno
import json
import logging
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from onceward.errors import OncewardError

log = logging.getLogger(__name__)

_REMIND_SECONDS, _REST_SECONDS = 60.0, 10.0
_PARTS_NAMED = 3
_POLL_SECONDS = 0.5
"""Interval at which the server's thread checks whether it has to stop, and the age of requests."""
_REQUEST_SECONDS = 10.0
"""Time limit of a request, from its connection to the end of its answer."""
MOST_REQUESTS = 32
"""Requests, and so threads and connections, at once. One too many takes the place of the oldest."""


class Health:
    """State of the process; written by the event loop, read by the server's threads.

    The process is ready if all its parts are: "database", "relay", "partition scans/3". It is alive
    if its event loop has heartbeats, so that an outage elsewhere never causes a restart.
    """

    def __init__(self, *, stall_after: float) -> None:
        """`stall_after`: seconds without a heartbeat after which the process is not alive, and the
        watchdog ends it."""
        self.stall_after = stall_after
        self._parts: dict[str, str | None] = {}
        self.paused: Sequence[str] = ()
        """What people have paused or throttled; the process is ready."""
        self._beat = time.monotonic()

    def ready(self, part: str) -> None:
        """Report that the part can do its work."""
        self._parts[part] = None

    def not_ready(self, part: str, reason: str) -> None:
        """Report that the part cannot do its work, and why."""
        self._parts[part] = reason

    def forget(self, part: str) -> None:
        """Remove a part of the process, such as a partition that was revoked."""
        self._parts.pop(part, None)

    def beat(self) -> None:
        """Report that the event loop is not blocked; about once a second."""
        self._beat = time.monotonic()

    @property
    def reasons(self) -> dict[str, str]:
        """Return why the process is not ready, by part; empty when it is."""
        parts = self._parts.copy()  # atomic, while the event loop may add some
        found = {part: reason for part, reason in parts.items() if reason is not None}
        if not parts:
            found["process"] = "no part has reported yet"
        if not self.is_alive:
            found["event loop"] = f"blocked for {self.seconds_since_beat:.0f} s"
        return found

    @property
    def is_ready(self) -> bool:
        """Whether every part can do its work, and there is one."""
        return not self.reasons

    @property
    def seconds_since_beat(self) -> float:
        """Return the age of the last heartbeat."""
        return time.monotonic() - self._beat

    @property
    def is_alive(self) -> bool:
        """Whether the last heartbeat is not older than `stall_after`."""
        return self.seconds_since_beat <= self.stall_after


class ReadinessLog:
    """Logs why the process is not ready, when that changes and every minute, and when it is.

    A process that was ready is so again when all its parts have stayed ready for ten seconds: one
    that comes and goes would fill the log.
    """

    def __init__(self, health: Health) -> None:
        self._health = health
        self._logged: set[str] = set()
        """Reasons, without their numbers."""
        self._remind_at = 0.0
        self._since, self._until = time.monotonic(), math.inf
        """When it was ready no longer, and when it is again, as far as is known."""
        self._is_ready, self._rest = False, 0.0

    def announce(self) -> None:
        """Log what has changed; about once a second."""
        reasons, now = self._health.reasons, time.monotonic()
        if not reasons:
            self._until = min(self._until, now)
            if not self._is_ready and now >= self._until + self._rest:
                log.info("ready, after %.0f s", self._until - self._since)
                self._logged.clear()
                self._is_ready, self._rest = True, _REST_SECONDS
            return
        if self._is_ready:
            self._since = now
        self._is_ready, self._until = False, math.inf
        kinds = {re.sub(r"\d+", "", reason) for reason in reasons.values()}
        if not kinds <= self._logged or now >= self._remind_at:
            log.info("not ready: %s", _summary(reasons))
            self._remind_at = now + _REMIND_SECONDS
        self._logged |= kinds


def _summary(reasons: Mapping[str, str]) -> str:
    """Return the reasons as text, each one with some of the parts that have it."""
    parts: dict[str, list[str]] = {}
    for part, reason in reasons.items():
        parts.setdefault(reason, []).append(part)
    return "; ".join(
        f"{', '.join(some[:_PARTS_NAMED])}"
        + (f" and {len(some) - _PARTS_NAMED} more" if len(some) > _PARTS_NAMED else "")
        + f": {reason}"
        for reason, some in parts.items()
    )


class CannotListen(OncewardError):
    """A server did not get its address; the text has the reason and the setting."""


def listen(host: str, port: int, *, what: str, prefix: str) -> tuple[socket.socket, str]:
    """Return a socket that listens, and the URL it has; `prefix` is that of the settings' names.

    Port 0 picks a free one. Raises `CannotListen`.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise CannotListen(
            f"cannot serve {what} on {host}, port {port}: {error.strerror};"
            f" check {prefix}_HOST and {prefix}_PORT"
        ) from error
    _close_in_children(listener)
    name = f"[{host}]" if ":" in host else host
    return listener, f"http://{name}:{listener.getsockname()[1]}/"


def _close_in_children(listener: socket.socket) -> None:
    """Let no forked process keep the port when this one has ended."""

    def close() -> None:
        # `listener.close` leaves the descriptor open while uvloop refers to it.
        if (number := listener.detach()) >= 0:
            os.close(number)

    os.register_at_fork(after_in_child=close)


@contextmanager
def serving(
    health: Health, *, host: str, port: int, request_seconds: float = _REQUEST_SECONDS
) -> Iterator[int]:
    """Serve `/health/live`, `/health/ready` and `/metrics` from a daemon thread; yield the port.

    Port 0 picks a free one. A connection is closed after `request_seconds`. Raises `CannotListen`.
    """
    try:
        server = _Server(host, port, health, request_seconds)
    except OSError as error:
        why = f"{error.strerror}; check PIPELINE_HEALTH_HOST and PIPELINE_HEALTH_PORT"
        if error.errno == errno.EADDRINUSE:
            why = "the port is in use; set PIPELINE_HEALTH_PORT to a free one, or to 0"
        raise CannotListen(
            f"cannot serve health and metrics on {host}, port {port}: {why}"
        ) from error
    _close_in_children(server.socket)
    threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def __init__(self, host: str, port: int, health: Health, request_seconds: float) -> None:
        self.health = health
        self._request_seconds = request_seconds
        self._free = threading.BoundedSemaphore(MOST_REQUESTS)
        self._begun: dict[socket.socket, float] = {}
        """When each request began, the oldest one first."""
        self.scrape = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer's resolves our own name, which can take many seconds.
        TCPServer.server_bind(self)
        self.server_port = self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self._end(next(iter([*self._begun]), None))
            if not self._free.acquire(timeout=_POLL_SECONDS):
                self.shutdown_request(request)
                return
        self._begun[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._has_ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._has_ended(request)

    def service_actions(self) -> None:
        latest = time.monotonic() - self._request_seconds
        for request, begun in [*self._begun.items()]:
            if begun < latest:
                self._end(request)

    def _end(self, request: socket.socket | None) -> None:
        """Make the thread of the request end: nothing arrives any more, and sending fails."""
        if request is not None:
            self._begun.pop(request, None)
            with suppress(OSError):  # it has ended by itself
                request.shutdown(socket.SHUT_RDWR)

    def _has_ended(self, request: socket.socket) -> None:
        self._begun.pop(request, None)
        self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # those are connections that clients have closed
            log.error("a request for health or metrics failed", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 5.0  # for clients that connect and send nothing
    server_version = "pipeline"
    sys_version = ""

    def do_GET(self) -> None:
        health = self.server.health
        match self.path.partition("?")[0]:
            case "/health/live":
                age = health.seconds_since_beat
                self._answer(
                    health.is_alive, alive=health.is_alive, seconds_since_beat=round(age, 3)
                )
            case "/health/ready":
                reasons = health.reasons
                paused = {"paused": health.paused} if health.paused else {}
                self._answer(not reasons, ready=not reasons, reasons=reasons, **paused)
            case "/metrics":
                with self.server.scrape:  # concurrent ones mix in OpenTelemetry's collector
                    text = generate_latest()
                self._send(HTTPStatus.OK, CONTENT_TYPE_PLAIN_0_0_4, text)
            case _:
                body = {"error": "ask /health/live, /health/ready, /metrics"}
                self._send(HTTPStatus.NOT_FOUND, "application/json", json.dumps(body).encode())

    do_HEAD = do_GET  # _send leaves the body out

    def _answer(self, is_good: bool, **body: object) -> None:
        status = HTTPStatus.OK if is_good else HTTPStatus.SERVICE_UNAVAILABLE
        self._send(status, "application/json", json.dumps(body).encode())

    def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write no access log: probes come every few seconds."""
