"""The page's server: it listens, and ends when it is told to."""

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from pipeline import Service
from pipeline.observe import logs
from pipeline.observe.health import CannotListen
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
        listener = await asyncio.to_thread(_bound, chosen)
        host = f"[{chosen.host}]" if ":" in chosen.host else chosen.host
        log.info("the page is at http://%s:%s/", host, listener.getsockname()[1])
        with listener:
            await _Server(config, page).serve([listener])
    finally:
        await engine.dispose()


def _bound(chosen: PageSettings) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in chosen.host else socket.AF_INET
        return socket.create_server((chosen.host, chosen.port), family=family)
    except OSError as error:
        raise CannotListen(
            f"cannot serve the page on {chosen.host}, port {chosen.port}: {error.strerror};"
            " check PIPELINE_PAGE_HOST and PIPELINE_PAGE_PORT"
        ) from error
