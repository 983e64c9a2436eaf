"""The changes that forms make, by the engine's operations. Each is logged with its operator."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

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
"""Longest time, in seconds, that an answer waits for the outcome of a redrive."""
_FOLLOWED = 1_000
"""Largest number of redriven entries whose outcome is reported."""


class Actions:
    """Redrive, discard and cancel."""

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
        """Redrive a dead letter or event."""
        async with autocommitting(self._engine) as connection:
            store = kind.of(connection, self._service, self._settings)
            id, selection = await _dead_entry(store, request)
            with _logged(f"redrive {store.name}", operator, id):
                chunks = store.redrive(store.redrivable(selection))
                redriven = [one async for some in chunks for one in some]
                if not redriven:
                    raise Refused(
                        f"{id} was not redriven: it is not dead any more, or this service does not"
                        " have its consumer"
                    )
            became = await store.follow(redriven, _REDRIVE_SECONDS)
        counts = ", ".join(f"{name}: {number}" for name, number in became.counts.items() if number)
        return self._templates.note(operator, f"{id} was redriven; result so far: {counts}.")

    async def redrive_copy(
        self, request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Redrive a copy of a dead letter with the payload of the form; the letter is discarded."""
        why, id = parameters.why(form), request.path_params["id"]
        value = parameters.payload(form)
        async with autocommitting(self._engine) as connection:
            store = DeadLetters.of(connection, self._service, self._settings)
            with _logged("redrive an edited copy", operator, id, why=why):
                redriven = await redrive_copy(
                    store, self._service, id, value, operator=operator.name, why=why
                )
            became = await store.follow([redriven], _REDRIVE_SECONDS)
        counts = ", ".join(name for name, number in became.counts.items() if number)
        note = f"A copy of {id} was redriven; result so far: {counts}."
        return self._templates.note(operator, note)

    async def discard(
        self, kind: type[Store], request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Discard a dead letter or event."""
        why = parameters.why(form)
        async with autocommitting(self._engine) as connection:
            store = kind.of(connection, self._service, self._settings)
            id, selection = await _dead_entry(store, request)
            with _logged(f"discard {store.name}", operator, id):
                chunks = store.discard(selection, operator=operator.name, why=why)
                if not [one async for some in chunks for one in some]:
                    raise Refused(f"{id} is not dead any more")
        return RedirectResponse(request.url.path.rpartition("/")[0], HTTPStatus.SEE_OTHER)

    async def redrive_many(
        self, kind: type[Store], request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Redrive all dead letters or events that a preview has counted."""
        selection, search = parameters.previewed(form)
        async with autocommitting(self._engine) as connection:
            store = kind.of(connection, self._service, self._settings)
            with _logged(f"redrive {store.name}s", operator, search[:1_000]):
                number, followed = 0, list[Any]()
                async for some in store.redrive(store.redrivable(selection)):
                    number += len(some)
                    followed += some[: _FOLLOWED - len(followed)]
                if not number:
                    raise Refused(f"no {store.name} was redriven: none of them is dead any more")
            became = await store.follow(followed, _REDRIVE_SECONDS)
        counts = ", ".join(f"{name}: {one:,}" for name, one in became.counts.items() if one)
        of = f" of the first {len(followed):,}" if number > len(followed) else ""
        note = [f"Redriven: {number:,}. Result so far{of}: {counts}."]
        note += [f"{one['id']} is dead again: {one['reason']}" for one in became.died[:5]]
        return self._templates.note(operator, "\n".join(note))

    async def discard_many(
        self, kind: type[Store], request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Discard all dead letters or events that a preview has counted."""
        (selection, search), why = parameters.previewed(form), parameters.why(form)
        async with autocommitting(self._engine) as connection:
            store = kind.of(connection, self._service, self._settings)
            with _logged(f"discard {store.name}s", operator, search[:1_000]):
                chunks = store.discard(selection, operator=operator.name, why=why)
                discarded = sum([len(some) async for some in chunks])
        return self._templates.note(operator, f"Discarded: {discarded:,}.")

    async def cancel(
        self, request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Cancel a scheduled event."""
        name, why = form.get("name", ""), parameters.why(form)
        with _logged("cancel", operator, name[:1_000], why=why):
            async with autocommitting(self._engine) as connection:
                if not await scheduled.cancel(connection, [name]):
                    raise Refused("not scheduled, or published already")
        return RedirectResponse("/scheduled", HTTPStatus.SEE_OTHER)


async def _dead_entry(store: Store, request: Request) -> tuple[str, Selection]:
    """Return the id of the entry in the path, and its selection. Raises `Refused` if not dead."""
    id = request.path_params["id"]
    entry = await store.show(id)
    if entry["state"] != "dead":
        raise Refused(f"{id} is {entry['state']}: it is not a {store.name} any more")
    return entry["id"], Selection(keys=await store.keys_of([id]))


@contextmanager
def _logged(what: str, operator: Operator, id: str, **more: str) -> Iterator[None]:
    """Log a change with its operator before it is made, and its result.

    The log is the only record of most changes, so the level is warning, which no setting disables.
    """
    fields = {"operator": operator.name, "id": id, **more}
    log.warning("requested on the page: %s", what, extra=fields)
    try:
        yield
    except Exception as error:
        log.warning("failed on the page: %s: %s", what, describe_error(error), extra=fields)
        raise
    log.warning("done on the page: %s", what, extra=fields)
