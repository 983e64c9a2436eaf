"""The pages of this package on the operations page."""

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from onceward import Service
from onceward.cli.dead_commands import ago
from onceward.cli.errors import Refused
from onceward.cli.output import json_line
from onceward.errors import describe_error
from onceward.page import parameters
from onceward.page.auth import Change, View
from onceward.page.rendering import Templates
from onceward.page.sessions import Operator
from onceward.servers.database import autocommitting
from onceward.settings import Settings

from . import released, timeline
from .correcting import RATE, Correcting, Group, Progress
from .entries import Timeline
from .released import Wanted

log = logging.getLogger(__name__)

NAMES = {"/timeline": "Timeline", "/affected": "Affected", "/correct": "Correct"}

_TIMELINE = {"key": "", "since": "6h", "seconds": "5"}
"""The form of a timeline, as it is at first."""
_MOST_SECONDS = 15.0
"""Longest time to read records in Kafka: a page has little more for everything."""
_LISTED = 500
_FASTEST = 1_000
"""Messages that are handed in a second, at most."""


class Views:
    """The timeline of a key, what a release has written, and its correction."""

    def __init__(
        self, service: Service, settings: Settings, engine: AsyncEngine, templates: Templates
    ) -> None:
        self._service = service
        self._settings = settings
        self._engine = engine
        self._templates = templates
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        """Held by a form that begins or cancels: of two clicks the second finds the task."""
        self._name = self._begun = ""
        """The correction that was begun last; it with the release."""
        self._progress = Progress()
        self._failed = ""
        self.views: Mapping[str, View] = {
            "/timeline": self.timeline,
            "/timeline.json": self.timeline_lines,
            "/affected": self.affected,
            "/correct": self.correct,
        }
        self.changes: Mapping[str, Change] = {
            "/correct/begin": self.begin,
            "/correct/cancel": self.cancel,
        }

    async def timeline(self, request: Request, operator: Operator) -> Response:
        """Show what happened to a key."""
        wanted = _timeline_of(request)
        found = await self._look(wanted) if wanted["key"] else None
        return self._templates.page(
            "timeline.html", operator, wanted=wanted, found=found, most=_MOST_SECONDS
        )

    async def timeline_lines(self, request: Request, operator: Operator) -> Response:
        """Return what happened to a key as a file, whose lines are those of the command."""
        wanted = _timeline_of(request)
        if not wanted["key"]:
            raise Refused("name the key")
        found = await self._look(wanted)
        return Response(
            b"".join(map(json_line, found.lines)),
            media_type="application/x-ndjson",
            headers={"content-disposition": 'attachment; filename="timeline.jsonl"'},
        )

    async def _look(self, wanted: Mapping[str, str]) -> Timeline:
        since = parameters.span(wanted["since"])
        seconds = parameters.seconds(wanted["seconds"], _MOST_SECONDS)
        async with autocommitting(self._engine) as connection:
            return await timeline.look(
                connection,
                self._service,
                self._settings,
                wanted["key"].encode(errors="surrogateescape"),
                await ago(connection, since),
                limit=_LISTED,
                seconds=seconds,
            )

    async def affected(self, request: Request, operator: Operator) -> Response:
        """Show the releases, and count what one has written."""
        release = parameters.searched(request.query_params, "release")
        groups: list[dict[str, Any]] = []
        async with autocommitting(self._engine) as connection:
            known = await released.known(connection)
            if release:
                groups = await released.count(connection, Wanted(release=release))
        return self._templates.page(
            "affected.html", operator, known=known, release=release, groups=groups
        )

    async def correct(self, request: Request, operator: Operator) -> Response:
        """Show the corrections, and count what would be handed to one."""
        name, release = (
            parameters.searched(request.query_params, "name"),
            parameters.searched(request.query_params, "release"),
        )
        newer = parameters.age(request.query_params, "newer")
        groups: list[Group] = []
        wanted: Wanted | None = None
        async with autocommitting(self._engine) as connection:
            if name and release:
                one = Correcting(connection, self._service, self._settings, name)
                wanted = await one.wanted(release, newer)
                groups = await one.plan(wanted)
        return self._templates.page(
            "correct.html",
            operator,
            corrections=sorted(self._service.handlers.corrections.items()),
            name=name,
            release=release,
            newer=request.query_params.get("newer", ""),
            rate=RATE,
            groups=groups,
            wanted=wanted,
            begun=self._begun,
            progress=self._progress,
            failed=self._failed,
            is_running=self._task is not None and not self._task.done(),
        )

    async def begin(
        self, request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Begin to hand messages, in this process. If it ends meanwhile, begin again."""
        name, release, why = form.get("name", ""), form.get("release", ""), parameters.why(form)
        newer, rate = parameters.age(form, "newer"), parameters.rate(form) or RATE
        if not 1 <= rate <= _FASTEST:
            raise Refused(f"the rate is from 1 to {_FASTEST:,} messages in a second")
        async with self._turn:
            if self._task is not None and not self._task.done():
                raise Refused(
                    f"{self._begun} is not handed to its end: the page does one at a time"
                )
            async with autocommitting(self._engine) as connection:
                one = Correcting(connection, self._service, self._settings, name)
                wanted = await one.wanted(release, newer)
                await one.begin(wanted, who=operator.name, why=why)
            self._name, self._begun = name, f"{name} of {release}"
            self._progress, self._failed = Progress(), ""
            fields = {"operator": operator.name, "id": self._begun, "why": why}
            log.warning("requested on the page: correct", extra=fields)
            self._task = asyncio.create_task(self._hand(name, wanted, round(rate)))
        return RedirectResponse("/correct", HTTPStatus.SEE_OTHER)

    async def _hand(self, name: str, wanted: Wanted, rate: int) -> None:
        try:
            async with autocommitting(self._engine) as connection:
                one = Correcting(connection, self._service, self._settings, name)
                async for progress in one.hand(wanted, rate):
                    self._progress = progress
        except Exception as error:
            self._failed = describe_error(error)
            log.warning("failed on the page: correct: %s", self._failed, exc_info=error)

    async def cancel(
        self, request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Delete what waits for a correction."""
        name, why = form.get("name", ""), parameters.why(form)
        async with self._turn, autocommitting(self._engine) as connection:
            one = Correcting(connection, self._service, self._settings, name)
            if self._task is not None and self._name == name:
                self._task.cancel()
                await asyncio.wait({self._task})
                self._begun = ""
            number = await one.cancel(who=operator.name, why=why)
        log.warning("done on the page: cancel", extra={"operator": operator.name, "id": name})
        return self._templates.note(operator, f"Cancelled: {number:,}. They can be handed again.")


def _timeline_of(request: Request) -> Mapping[str, str]:
    """Return the fields of a timeline's form. Raises `Refused` for NUL."""
    given = request.query_params
    return {name: parameters.searched(given, name) or first for name, first in _TIMELINE.items()}
