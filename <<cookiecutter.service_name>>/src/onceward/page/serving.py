"""The page's HTTP server."""

import asyncio
import logging
import signal
import socket
from collections.abc import Sequence
from functools import partial
from types import ModuleType

from onceward import Service
from onceward.http_server.connections import Connection
from onceward.http_server.server import Server
from onceward.observe import logs
from onceward.observe.health import listen
from onceward.servers import peers
from onceward.servers.database import create_engine
from onceward.settings import Settings

from .app import Page
from .settings import PageSettings

log = logging.getLogger(__name__)

_GRACE = 5
"""Seconds in which requests that are being answered may end."""


class PageServer(Server):
    """A server that ends its event streams before it waits for open connections."""

    def __init__(self, page: Page, protocol: type[Connection] = Connection) -> None:
        super().__init__(page.app(), grace=_GRACE, protocol=protocol)
        self._page = page

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then shut down."""
        self._page.stop()
        await super().shutdown(sockets)


async def serve(
    service: Service, settings: Settings, chosen: PageSettings, modules: Sequence[ModuleType] = ()
) -> None:
    """Serve the page until SIGTERM or SIGINT. Raises `CannotListen`."""
    logs.configure(
        level=settings.log_level,
        json=settings.log_json,
        loggers=service.loggers(settings),
        queues=True,
    )
    for found in service.plaintext(settings):
        log.warning("%s: %s", *found)
    peers.warns = True
    engine = create_engine(settings, name=service.name)
    server = PageServer(Page(service, settings, chosen, engine, modules))
    try:
        bind = partial(listen, what="the page", prefix="PIPELINE_PAGE")
        listener, url = await asyncio.to_thread(bind, chosen.host, chosen.port)
        log.info("the page is at %s", url)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.handle_exit, number, None)
        with listener:
            await server.serve([listener])
    finally:
        await engine.dispose()
