"""The page's HTTP server."""

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn

from pipeline import Service
from pipeline.observe import logs
from pipeline.observe.health import listen
from pipeline.servers.cluster import read_only
from pipeline.servers.database import create_engine
from pipeline.settings import Settings

from .app import Page
from .settings import PageSettings

log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """A server that ends its event streams before it waits for open connections."""

    def __init__(self, config: uvicorn.Config, page: Page) -> None:
        super().__init__(config)
        self._page = page

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGTERM and SIGINT; unlike uvicorn, don't raise the signal again at the end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then shut down."""
        self._page.stop()
        await super().shutdown(sockets)


async def serve(service: Service, settings: Settings, chosen: PageSettings) -> None:
    """Serve the page until SIGTERM or SIGINT. Raises `CannotListen`."""
    logs.configure(
        level=settings.log_level,
        json=settings.log_json,
        loggers=service.loggers(settings),
        queues=True,
    )
    engine = create_engine(settings, name=service.name, check=read_only)
    page = Page(service, settings, chosen, engine)
    config = uvicorn.Config(
        page.app(),
        log_config=None,
        access_log=False,
        # A proxy's header is accepted by the connection's own address, which uvicorn would replace.
        proxy_headers=False,
        # Of uvicorn's two HTTP implementations, the one that limits the size of headers.
        http="h11",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=5,
        limit_concurrency=100,
    )
    try:
        bind = partial(listen, what="the page", prefix="PIPELINE_PAGE")
        listener, url = await asyncio.to_thread(bind, chosen.host, chosen.port)
        log.info("the page is at %s", url)
        with listener:
            await _Server(config, page).serve([listener])
    finally:
        await engine.dispose()
