"""The live overview: one periodic query of the status, sent to all open streams."""

import asyncio
import html
import logging
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from onceward import Service
from onceward.cli import status
from onceward.errors import describe_error
from onceward.servers.database import autocommitting
from onceward.servers.tasks import sleep_or_event
from onceward.settings import Settings

from . import errors
from .overview import History
from .rendering import Templates
from .sessions import Operator, Sessions
from .settings import PageSettings

log = logging.getLogger(__name__)

_STREAMS = 20
"""Limit of open streams, each of which holds a connection of the server."""


class Watch:
    """Queries the status periodically, and sends it to the streams."""

    def __init__(
        self,
        service: Service,
        settings: Settings,
        page: PageSettings,
        engine: AsyncEngine,
        templates: Templates,
        sessions: Sessions,
    ) -> None:
        self._service = service
        self._settings = settings
        self._page = page
        self._engine = engine
        self._templates = templates
        self._sessions = sessions
        self._history = History()
        self._free_streams = asyncio.Semaphore(_STREAMS)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End the streams."""
        self._stopping.set()

    async def run(self) -> None:
        """Query the status until cancelled. An error is logged when it differs from the last."""
        while True:
            try:
                await self._query()
            except Exception as error:
                known = errors.describe(error, self._settings)
                text = known or describe_error(error)
                if text != self._history.error:
                    if known is None:
                        log.exception("the status can't be queried")
                    else:
                        log.warning("the status can't be queried: %s", text)
                self._history.error = text
            await asyncio.sleep(self._page.interval)

    async def _query(self) -> None:
        async with autocommitting(self._engine) as connection:
            self._history.add(await status.look(connection, self._service, self._settings))

    async def now(self) -> dict[str, Any]:
        """Return the latest snapshot and the history, for templates."""
        if not self._history.snapshots:
            await self._query()
        return {"now": self._history.snapshots[-1], "history": self._history}

    async def stream(self, request: Request, operator: Operator) -> Response:
        """Send the overview periodically, as server-sent events."""
        if self._free_streams.locked():
            note = (
                f"{_STREAMS} browsers show the live overview already, which is the limit: close"
                " one, or reload the overview by hand."
            )
            return self._templates.note(operator, note, 503)
        # nginx and similar proxies buffer answers without this header.
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._events(request), 200, headers, "text/event-stream")

    async def _events(self, request: Request) -> AsyncIterator[bytes]:
        # A stream ends at the latest after a session's time: the browser connects again, and the
        # new request is authenticated.
        until = monotonic() + self._page.session
        async with self._free_streams:
            while (
                not self._stopping.is_set()
                and monotonic() < until
                and self._sessions.operator(request)
            ):
                yield await self._event()
                await sleep_or_event(self._stopping, self._page.interval)

    async def _event(self) -> bytes:
        try:
            text = self._templates.text("now.html", **await self.now())
        except Exception as error:
            known = errors.describe(error, self._settings)
            if known is None:
                raise
            text = f'<p role="alert" class="bad">{html.escape(known)}</p>'
        lines = "".join(f"data: {line}\n" for line in text.splitlines())
        return f"{lines}\n".encode("utf-8", "replace")
