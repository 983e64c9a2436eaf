"""Connections: a client that sends nothing, or half a request, keeps no other out.

uvicorn limits how long a connection may be idle between two requests, and nothing before. Of its
implementations of HTTP, h11 is the one that limits the size of headers.
"""

import asyncio
import resource
from http import HTTPStatus
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .problems import problem

_DESCRIPTORS_SHARE = 0.5
"""Share of the process's file descriptors that connections take. The rest is left for databases,
files, health, and connections that are just accepted."""


class Connection(H11Protocol):
    """A connection with a deadline for each request.

    One too many takes the place of that which has waited longest for its request.
    """

    most = min(1_000, int(_DESCRIPTORS_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    """Connections of a process."""
    receiving = 30.0
    """Seconds in which a request has to arrive, from the connection or the answer before."""
    waiting: ClassVar[dict["Connection", asyncio.TimerHandle]] = {}
    """Those whose request has not arrived, the first of them for the longest time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        if len(self.connections) > self.most and self.waiting:
            next(iter(self.waiting))._end()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._wait_no_longer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Wait no longer if the request has arrived."""
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._wait_no_longer()

    def on_response_complete(self) -> None:
        """Wait for the next request, if it has not arrived yet."""
        super().on_response_complete()
        self._wait_no_longer()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing():
            self._wait()

    def _wait(self) -> None:
        self.waiting[self] = self.loop.call_later(self.receiving, self._end)

    def _wait_no_longer(self) -> None:
        if timer := self.waiting.pop(self, None):
            timer.cancel()

    def _end(self) -> None:
        """Close the connection; a request of which the head has arrived gets an answer."""
        self._wait_no_longer()
        if self.conn.our_state is h11.SEND_RESPONSE:
            self.cycle.disconnected = True  # what the application sends now comes too late
            self.cycle.message_event.set()
            text = f"the request did not arrive within {self.receiving:g} s: repeat it"
            late = problem(HTTPStatus.REQUEST_TIMEOUT, text)
            headers: list[Any] = [*late.raw_headers, (b"connection", b"close")]
            head = h11.Response(status_code=late.status_code, headers=headers)
            self.transport.write(self.conn.send(head) or b"")
            if self.scope["method"] != "HEAD":
                self.transport.write(self.conn.send(h11.Data(data=bytes(late.body))) or b"")
        self.transport.close()
