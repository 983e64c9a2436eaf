"""What the forms do: by the engine's operations, and never without a line of who asked for it."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus

import asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from operate import dead, dead_events
from operate.dead import Which
from operate.operations import Refused
from pipeline import Service
from pipeline.errors import describe_error
from pipeline.relay import scheduled
from pipeline.servers.database import autocommitting
from pipeline.settings import Settings

from . import asked
from .rendering import Templates
from .sessions import Operator

log = logging.getLogger(__name__)

_REDRIVE_SECONDS = 2.0
"""For so long a redrive waits for what becomes of it."""


class Actions:
    """What a person decides on."""

    def __init__(
        self, service: Service, settings: Settings, engine: AsyncEngine, templates: Templates
    ) -> None:
        self._service = service
        self._settings = settings
        self._engine = engine
        self._templates = templates

    async def redrive(
        self, request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Try a dead letter again."""
        async with autocommitting(self._engine) as connection:
            id, which = await _one(connection, request)
            with _recorded("redrive", operator, id):
                changed = dead.redrive(
                    connection,
                    self._service.handlers,
                    dead.redrivable(which, self._service.handlers),
                    patience=self._settings.backlog_lease,
                )
                redriven = [one async for some in changed for one in some]
                if not redriven:
                    raise Refused(
                        f"{id} was not redriven: it has left, or its consumer is not here"
                    )
            became = await dead.follow(connection, redriven, _REDRIVE_SECONDS)
        counts = ", ".join(f"{name}: {number}" for name, number in became.counts.items() if number)
        return self._templates.note(operator, f"{id[:16]} was redriven; by now {counts}.")

    async def discard(
        self, request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Give a dead letter up."""
        why = asked.why(form)
        async with autocommitting(self._engine) as connection:
            id, which = await _one(connection, request)
            with _recorded("discard", operator, id):
                numbers = dead.discard(
                    connection,
                    which,
                    operator=operator.name,
                    why=why,
                    patience=self._settings.backlog_lease,
                )
                if not sum([number async for number in numbers]):
                    raise Refused(f"{id} has just left the backlog")
        return RedirectResponse(f"/dead/{id}", HTTPStatus.SEE_OTHER)

    async def redrive_event(
        self, request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Try to publish a dead event again."""
        id = asked.number(request)
        with _recorded("redrive event", operator, str(id)):
            async with autocommitting(self._engine) as connection:
                changed = dead_events.redrive(
                    connection,
                    dead_events.Which(ids=[id]),
                    patience=dead_events.patience_of(self._settings),
                )
                if not [one async for some in changed for one in some]:
                    raise Refused(f"{id} is no dead event")
        return self._templates.note(operator, f"{id} was redriven: a relay tries it again.")

    async def discard_event(
        self, request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Give a dead event up."""
        id, why = asked.number(request), asked.why(form)
        with _recorded("discard event", operator, str(id)):
            async with autocommitting(self._engine) as connection:
                changed = dead_events.discard(
                    connection,
                    dead_events.Which(ids=[id]),
                    operator=operator.name,
                    why=why,
                    patience=dead_events.patience_of(self._settings),
                )
                if not [one async for some in changed for one in some]:
                    raise Refused(f"{id} is no dead event")
        return RedirectResponse(f"/events/{id}", HTTPStatus.SEE_OTHER)

    async def cancel(
        self, request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Cancel an event that is scheduled."""
        name, why = form.get("name", ""), asked.why(form)
        with _recorded("cancel", operator, name[:1_000], why=why):
            async with autocommitting(self._engine) as connection:
                if not await scheduled.cancel(connection, [name]):
                    raise Refused("not scheduled, or published already")
        return RedirectResponse("/scheduled", HTTPStatus.SEE_OTHER)


async def _one(connection: asyncpg.Connection, request: Request) -> tuple[str, Which]:
    """Return the dead letter that a form is about. Raises `Refused` if it is none."""
    letter = (await dead.detail(connection, request.path_params["id"])).letter
    if letter.state != "dead":
        raise Refused(f"{letter.id} is {letter.state}: it is no dead letter any more")
    return letter.id, Which(keys=[bytes.fromhex(letter.id)])


@contextmanager
def _recorded(what: str, operator: Operator, id: str, **more: str) -> Iterator[None]:
    """Tell who does what: before it is done, so that nothing is done without, and how it ended.

    As a warning, which the settings don't leave out: there is no other record of most.
    """
    fields = {"operator": operator.name, "id": id, **more}
    log.warning("asked for on the page: %s", what, extra=fields)
    try:
        yield
    except Exception as error:
        log.warning("not done on the page: %s: %s", what, describe_error(error), extra=fields)
        raise
    log.warning("done on the page: %s", what, extra=fields)
