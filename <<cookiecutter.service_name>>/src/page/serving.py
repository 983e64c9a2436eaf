"""The page's server: it listens, and ends when it is told to."""

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
from pipeline.servers.database import create_engine
from pipeline.settings import Settings

from .app import Page
from .settings import PageSettings

log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """Ends streams first, which would keep it from stopping."""

    def __init__(self, config: uvicorn.Config, page: Page) -> None:
        super().__init__(config)
        self._page = page

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop by a signal; unlike uvicorn's own, without dying of it in the end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then everything."""
        self._page.stop()
        await super().shutdown(sockets)


async def serve(service: Service, settings: Settings, chosen: PageSettings) -> None:
    """Serve the page until SIGTERM or SIGINT. Raises `CannotListen`."""
    logs.configure(
        level=settings.log_level, json=settings.log_json, loggers=service.loggers(settings)
    )
    engine = create_engine(settings, name=f"{service.name}-page")
    page = Page(service, settings, chosen, engine)
    config = uvicorn.Config(
        page.app(),
        log_config=None,
        access_log=False,
        # Whose word a proxy's header is depends on the connection's own address.
        proxy_headers=False,
        # Of the two that it may find, the one that bounds headers. The page has no web sockets.
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
