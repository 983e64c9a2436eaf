"""The outside, a process of its own: takes calls, and fails in the way that it was told last.

It writes down every request before it answers: what it has taken is known, whatever becomes of the
answer.
"""

import argparse
import asyncio
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from chaos.errands import KEY, Request
from chaos.proxy import HOST
from chaos.schedule import MODES
from chaos.talk import say, words

HANGS = 3.0
"""Seconds without an answer; a call may take one."""


class Outside(ThreadingHTTPServer):
    """Answers POST, a call, and GET, the question whether a call took place."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, log: Path) -> None:
        super().__init__((HOST, 0), Visit)
        self.mode = ""
        """How it fails; not at all if nothing is said."""
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._lock = threading.Lock()
        self._taken: set[str] = set()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: who calls may hang up."""

    def note(self, consumer: str, id: str, parcel_id: str, scans: int) -> bool:
        """Write a call down; say whether it was taken."""
        is_taken = self.mode != "refuses"
        with self._lock:
            if is_taken:
                self._taken.add(id)
            self._write(Request(consumer, id, parcel_id, scans, "taken" if is_taken else "refused"))
        return is_taken

    def tell(self, consumer: str, id: str, parcel_id: str, scans: int) -> bool:
        """Write a question down; return its answer."""
        with self._lock:
            is_known = id in self._taken
            word = "asked: yes" if is_known else "asked: no"
            self._write(Request(consumer, id, parcel_id, scans, word))  # type: ignore[arg-type]
        return is_known

    def _write(self, request: Request) -> None:
        os.write(self._log, f"{json.dumps(request)}\n".encode())


class Visit(BaseHTTPRequestHandler):
    """A connection."""

    server: Outside
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Take a call, or not."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _, consumer = self.path.split("/")
        mode = self.server.mode
        is_taken = self.server.note(consumer, self.headers[KEY], **body)
        self._answer(mode, 200 if is_taken else 503, "taken")

    def do_GET(self) -> None:
        """Say whether a call was taken; only an answer that is sent has been one."""
        _, consumer, parcel_id, scans = self.path.split("/")
        mode = self.server.mode
        answer: Any = None
        if mode in ("", "stammers"):
            answer = self.server.tell(consumer, self.headers[KEY], parcel_id, int(scans))
        self._answer(mode, 503 if answer is None else 200, answer)

    def _answer(self, mode: str, status: int, content: object) -> None:
        if mode == "hangs":
            time.sleep(HANGS)
        if mode in ("hangs", "hangs up"):
            self.close_connection = True
            return
        for _ in range(2 if mode == "stammers" else 1):
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: what matters is written down."""


async def main() -> None:
    """Serve; every word that is told is how to fail from now on, `well` for not at all."""
    parser = argparse.ArgumentParser(prog="python -m chaos.outside", description=__doc__)
    parser.add_argument("--requests", type=Path, required=True)
    chosen = parser.parse_args()
    outside = Outside(chosen.requests)
    threading.Thread(target=outside.serve_forever, daemon=True).start()
    say(url=f"http://{HOST}:{outside.server_address[1]}")
    async for word in words():
        if word == "end":
            return
        outside.mode = word if word in MODES else ""


if __name__ == "__main__":
    asyncio.run(main())
