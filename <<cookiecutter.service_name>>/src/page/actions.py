"""What the forms do: by the engine's operations, and never without a line of who asked for it."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus

from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from operate.dead import Selection, Store
from operate.dead_letters import DeadLetters
from operate.errors import Refused
from pipeline import Service
from pipeline.errors import describe_error
from pipeline.relay import scheduled
from pipeline.servers.database import autocommitting
from pipeline.settings import Settings

from . import parameters
from .copies import redrive_copy
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
        self, kind: type[Store], request: Request, operator: Operator, _: object
    ) -> Response:
        """Try a dead letter or event again."""
        async with autocommitting(self._engine) as connection:
            store = kind.of(connection, self._service, self._settings)
            id, selection = await _one(store, request)
            with _recorded(f"redrive {store.name}", operator, id):
                chunks = store.redrive(store.redrivable(selection))
                redriven = [one async for some in chunks for one in some]
                if not redriven:
                    raise Refused(
                        f"{id} was not redriven: it has left, or its consumer is not here"
                    )
            became = await store.follow(redriven, _REDRIVE_SECONDS)
        counts = ", ".join(f"{name}: {number}" for name, number in became.counts.items() if number)
        return self._templates.note(operator, f"{id} was redriven; by now {counts}.")

    async def redrive_copy(
        self, request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Redrive a copy of a dead letter with the payload of the form; the letter is discarded."""
        why, id = parameters.why(form), request.path_params["id"]
        value = parameters.payload(form)
        async with autocommitting(self._engine) as connection:
            store = DeadLetters.of(connection, self._service, self._settings)
            with _recorded("redrive an edited copy", operator, id, why=why):
                redriven = await redrive_copy(
                    store, self._service, id, value, operator=operator.name, why=why
                )
            became = await store.follow([redriven], _REDRIVE_SECONDS)
        counts = ", ".join(name for name, number in became.counts.items() if number)
        return self._templates.note(operator, f"A copy of {id} was redriven; by now {counts}.")

    async def discard(
        self, kind: type[Store], request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Give a dead letter or event up."""
        why = parameters.why(form)
        async with autocommitting(self._engine) as connection:
            store = kind.of(connection, self._service, self._settings)
            id, selection = await _one(store, request)
            with _recorded(f"discard {store.name}", operator, id):
                chunks = store.discard(selection, operator=operator.name, why=why)
                if not [one async for some in chunks for one in some]:
                    raise Refused(f"{id} has just left")
        return RedirectResponse(request.url.path.rpartition("/")[0], HTTPStatus.SEE_OTHER)

    async def redrive_many(
        self, kind: type[Store], request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Try all dead letters or events again that a preview has counted."""
        selection, search = parameters.previewed(form)
        async with autocommitting(self._engine) as connection:
            store = kind.of(connection, self._service, self._settings)
            with _recorded(f"redrive {store.name}s", operator, search[:1_000]):
                chunks = store.redrive(store.redrivable(selection))
                redriven = [one async for some in chunks for one in some]
                if not redriven:
                    raise Refused(f"no {store.name} was redriven: all have left meanwhile")
            became = await store.follow(redriven, _REDRIVE_SECONDS)
        counts = ", ".join(f"{name}: {one:,}" for name, one in became.counts.items() if one)
        said = [f"Redriven: {len(redriven):,}. By now {counts}."]
        said += [f"{one['id']} is dead again: {one['reason']}" for one in became.died[:5]]
        return self._templates.note(operator, "\n".join(said))

    async def discard_many(
        self, kind: type[Store], request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Give all dead letters or events up that a preview has counted."""
        (selection, search), why = parameters.previewed(form), parameters.why(form)
        async with autocommitting(self._engine) as connection:
            store = kind.of(connection, self._service, self._settings)
            with _recorded(f"discard {store.name}s", operator, search[:1_000]):
                chunks = store.discard(selection, operator=operator.name, why=why)
                discarded = sum([len(some) async for some in chunks])
        return self._templates.note(operator, f"Discarded: {discarded:,}.")

    async def cancel(
        self, request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Cancel an event that is scheduled."""
        name, why = form.get("name", ""), parameters.why(form)
        with _recorded("cancel", operator, name[:1_000], why=why):
            async with autocommitting(self._engine) as connection:
                if not await scheduled.cancel(connection, [name]):
                    raise Refused("not scheduled, or published already")
        return RedirectResponse("/scheduled", HTTPStatus.SEE_OTHER)


async def _one(store: Store, request: Request) -> tuple[str, Selection]:
    """Return the entry that a form is about. Raises `Refused` if it is not dead."""
    id = request.path_params["id"]
    entry = await store.show(id)
    if entry["state"] != "dead":
        raise Refused(f"{id} is {entry['state']}: it is no {store.name} any more")
    return entry["id"], Selection(keys=await store.keys_of([id]))


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
