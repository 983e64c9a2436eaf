"""The overview as time goes on: one look for all who watch, sent to each of them."""

import asyncio
import html
import logging
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from operate import status
from pipeline import Service
from pipeline.errors import describe_error
from pipeline.servers.database import autocommitting
from pipeline.servers.tasks import sleep_or_event
from pipeline.settings import Settings

from . import errors
from .overview import Course
from .rendering import Templates
from .sessions import Operator, Sessions
from .settings import PageSettings

log = logging.getLogger(__name__)

_STREAMS = 20
"""So many may watch at a time: each holds a connection as long as it does."""


class Watch:
    """Looks again and again, and tells whoever watches."""

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
        self._course = Course()
        self._places = asyncio.Semaphore(_STREAMS)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Let streams end."""
        self._stopping.set()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            try:
                await self._look()
            except Exception as error:
                said = errors.describe(error, self._settings)
                why = said or describe_error(error)
                if why != self._course.failed:  # else it was told
                    if said is None:
                        log.exception("the overview is not known")
                    else:
                        log.warning("the overview is not known: %s", why)
                self._course.failed = why
            await asyncio.sleep(self._page.interval)

    async def _look(self) -> None:
        async with autocommitting(self._engine) as connection:
            self._course.add(await status.look(connection, self._service, self._settings))

    async def now(self) -> dict[str, Any]:
        """Return what the last look has found, for templates."""
        if not self._course.looks:
            await self._look()
        return {"now": self._course.looks[-1], "course": self._course}

    async def stream(self, request: Request, operator: Operator) -> Response:
        """Send the overview again and again."""
        if self._places.locked():
            said = f"{_STREAMS} watch already: close some, or load the overview by hand."
            return self._templates.note(operator, said, 503)
        # A proxy of the kind of nginx would keep back what it is sent, to send it at once.
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._sent(request), 200, headers, "text/event-stream")

    async def _sent(self, request: Request) -> AsyncIterator[bytes]:
        # Not for ever: who may see it is asked again when the browser comes back.
        until = monotonic() + self._page.session
        async with self._places:
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
            said = errors.describe(error, self._settings)
            if said is None:
                raise
            text = f'<p role="alert" class="bad">{html.escape(said)}</p>'
        lines = "".join(f"data: {line}\n" for line in text.splitlines())
        return f"{lines}\n".encode("utf-8", "replace")
