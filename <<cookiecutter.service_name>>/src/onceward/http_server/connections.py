"""Connections: a client that stands still keeps no other out.

It sends nothing or half a request, or does not take what is sent. uvicorn limits how long a
connection may be idle between two requests, and nothing else. Of its implementations of HTTP, h11
is the one that limits the size of headers.
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
    """A connection with one deadline, for each request and for each part of an answer.

    One too many takes the place of that which has waited longest for its client.
    """

    most = min(1_000, int(_DESCRIPTORS_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    """Connections of a process."""
    patience = 30.0
    """Seconds in which a client has to send a request, from the connection or the answer before,
    and to take what is sent."""
    waiting: ClassVar[dict["Connection", asyncio.TimerHandle]] = {}
    """Those that wait for their clients, the first of them for the longest time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # writing is paused while anything is left to be taken
        if len(self.connections) > self.most and self.waiting:
            next(iter(self.waiting))._end()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._wait_no_longer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Wait no longer if the request has arrived."""
        super().data_received(data)
        self._look()

    def pause_writing(self) -> None:
        """Wait until the client has taken what is sent."""
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        """Wait no longer if the request has arrived."""
        super().resume_writing()
        self._look()

    def on_response_complete(self) -> None:
        """Wait for the next request, if it has not arrived yet."""
        super().on_response_complete()
        self._wait_no_longer()
        self._look()

    def _look(self) -> None:
        """Wait for the client if it is its turn to send or to take something."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY) and not self.flow.write_paused:
            self._wait_no_longer()
        elif self not in self.waiting:
            self.waiting[self] = self.loop.call_later(self.patience, self._end)

    def _wait_no_longer(self) -> None:
        if timer := self.waiting.pop(self, None):
            timer.cancel()

    def _end(self) -> None:
        """End the connection; a request of which the head has arrived gets an answer."""
        if self.conn.our_state is h11.SEND_RESPONSE:
            self.cycle.disconnected = True  # what the application sends now comes too late
            self.cycle.message_event.set()
            text = f"the request did not arrive within {self.patience:g} s: repeat it"
            late = problem(HTTPStatus.REQUEST_TIMEOUT, text)
            headers: list[Any] = [*late.raw_headers, (b"connection", b"close")]
            head = h11.Response(status_code=late.status_code, headers=headers)
            self.transport.write(self.conn.send(head) or b"")
            if self.scope["method"] != "HEAD":
                self.transport.write(self.conn.send(h11.Data(data=bytes(late.body))) or b"")
        self._wait_no_longer()
        self.transport.abort()  # close() would wait until the client has taken everything
