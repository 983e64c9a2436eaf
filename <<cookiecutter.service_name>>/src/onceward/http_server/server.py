"""The server of an application: uvicorn's, with connections that have deadlines."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onceward.service import Misconfigured

from .connections import Connection
from .problems import problem

log = logging.getLogger(__name__)

_BACKLOG = 128
"""Connections that wait to be accepted; so many may come at once beyond the limit."""


class _Answering:
    """Logs what the application raises, so that uvicorn does not cut the client's next request.

    Beyond `most` requests at once further ones get 503.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._free = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":

            async def tell(message: Message) -> None:
                """Pass a message on; a start that is cancelled failed by no error to log."""
                task = asyncio.current_task()
                if task is not None and task.cancelling() and "message" in message:
                    message = {**message, "message": ""}
                await send(message)

            await self._app(scope, receive, tell)
        elif not self._free:
            text, headers = "too many requests at once: repeat it", {"Retry-After": "1"}
            full = problem(HTTPStatus.SERVICE_UNAVAILABLE, text, headers=headers)
            await full(scope, receive, send)
        else:
            self._free -= 1
            try:
                await self._app(scope, receive, send)
            except Exception as error:  # it is answered already; uvicorn cuts half an answer off
                log.error("a request has failed", exc_info=error)
            finally:
                self._free += 1


class Server(uvicorn.Server):
    """The server of an application, for a process that handles signals itself."""

    def __init__(
        self, app: ASGIApp, *, grace: int, protocol: type[Connection] = Connection
    ) -> None:
        """`grace`: seconds in which requests that are being answered may end."""
        config = uvicorn.Config(
            _Answering(app, protocol.most),
            lifespan="on",
            log_config=None,
            access_log=False,
            # The page reads a proxy's header by the address of the connection, which uvicorn would
            # replace.
            proxy_headers=False,
            http=protocol,
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=grace,
            backlog=_BACKLOG,
        )
        super().__init__(config)
        self.has_started = asyncio.Event()
        """Set when the application has started, and is served."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start. Raises `Misconfigured` if the application fails, where uvicorn exits."""
        try:
            await super().startup(sockets)
            self.has_started.set()
        except SystemExit:
            text = "the server did not start: the error before this says why"
            raise Misconfigured(text) from None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield
