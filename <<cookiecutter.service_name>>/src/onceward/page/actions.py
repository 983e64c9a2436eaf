"""The changes that forms make, by the engine's operations. Each is logged with its operator."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from onceward import Service
from onceward.cli.dead import Selection, Store
from onceward.cli.dead_letters import DeadLetters
from onceward.cli.errors import Refused
from onceward.cli.topic_commands import moved
from onceward.errors import describe_error
from onceward.operators import archive, offsets, scheduled, stopping
from onceward.operators.audit import Change
from onceward.operators.copies import Copy
from onceward.servers.database import autocommitting
from onceward.settings import Settings

from . import parameters
from . import positions as planning
from .rendering import Templates
from .sessions import Operator

log = logging.getLogger(__name__)

_REDRIVE_SECONDS = 2.0
"""Longest time, in seconds, that an answer waits for the outcome of a redrive."""
_FOLLOWED = 1_000
"""Largest number of redriven entries whose outcome is reported."""


class Actions:
    """Redrive, discard, cancel, pause, resume, move positions, and skip the archive."""

    def __init__(
        self, service: Service, settings: Settings, engine: AsyncEngine, templates: Templates
    ) -> None:
        self._service = service
        self._settings = settings
        self._engine = engine
        self._templates = templates

    async def redrive(
        self,
        kind: type[Store],
        request: Request,
        operator: Operator,
        form: Mapping[str, str],
        copy: Copy | None = None,
    ) -> Response:
        """Redrive a dead letter or event, or all that a preview has counted; or a letter's copy."""
        why = parameters.because(form)
        more = {} if copy is None else {"copy": "edited"}
        more |= {"why": why} if why else {}
        by = Change(operator.name, "edit" if copy else "redrive", why)
        async with autocommitting(self._engine) as connection:
            store = kind(connection, self._service, self._settings)
            selection, named = await _chosen(store, request, form)
            with logged(f"redrive {store.name}s", operator, named, **more):
                number, followed = 0, list[Any]()
                async for some in store.redrive(store.redrivable(selection), by, copy):
                    number += len(some)
                    followed += some[: _FOLLOWED - len(followed)]
                if not number:
                    raise Refused(
                        f"no {store.name} was redriven: none of them is dead any more, or this"
                        " service does not have their consumers"
                    )
            became = await store.follow(followed, _REDRIVE_SECONDS)
        counts = ", ".join(f"{name}: {one:,}" for name, one in became.counts.items() if one)
        of = f" of the first {len(followed):,}" if number > len(followed) else ""
        note = [f"Redriven: {number:,}. Result so far{of}: {counts}."]
        note += [f"{one['id']} is dead again: {one['reason']}" for one in became.died[:5]]
        return self._templates.note(operator, "\n".join(note))

    async def redrive_copy(
        self, request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Redrive a copy of a dead letter with the payload of the form; the letter is discarded."""
        copy = Copy(parameters.payload(form), operator.name, parameters.why(form))
        return await self.redrive(DeadLetters, request, operator, form, copy)

    async def discard(
        self, kind: type[Store], request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Discard a dead letter or event, or all that a preview has counted."""
        why, state = parameters.why(form), parameters.discarded_from(kind, form)
        async with autocommitting(self._engine) as connection:
            store = kind(connection, self._service, self._settings)
            selection, named = await _chosen(store, request, form)
            with logged(f"discard {store.name}s", operator, named):
                chunks = store.discard(selection, Change(operator.name, "discard", why), state)
                discarded = sum([len(some) async for some in chunks])
        return self._templates.note(operator, f"Discarded: {discarded:,}.")

    async def cancel(
        self, request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Cancel a scheduled event."""
        name, why = form.get("name", ""), parameters.why(form)
        with logged("cancel", operator, name[:1_000], why=why):
            async with autocommitting(self._engine) as connection:
                named = [name]
                if not await scheduled.cancel(connection, named, operator=operator.name, why=why):
                    raise Refused("not scheduled, or published already")
        return RedirectResponse("/scheduled", HTTPStatus.SEE_OTHER)

    async def pause(
        self, request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Pause or throttle what the form names."""
        what, key = form.get("what", ""), form.get("key", "")
        why, lasts, rate = parameters.why(form), parameters.lasts(form), parameters.rate(form)
        handlers, events = self._service.handlers, self._service.declared_topics
        found = stopping.pausable(handlers, events, key).get(what, [])
        if not found or (found[0].kind == "key") is not bool(key) or (key and rate):
            raise Refused("choose what is to be paused; a key is for a key, which has no rate")
        action = f"throttle to {rate:g}/s" if rate else "pause"
        with logged(action, operator, f"{what} {key}".strip()[:1_000], why=why):
            async with autocommitting(self._engine) as connection:
                await stopping.ask(
                    connection, found, per_second=rate, lasts=lasts, who=operator.name, why=why
                )
        return RedirectResponse("/stops", HTTPStatus.SEE_OTHER)

    async def resume(
        self, request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Resume what is paused."""
        subject, why = parameters.subject(form), parameters.why(form)
        with logged("resume", operator, str(subject)[:1_000], why=why):
            async with autocommitting(self._engine) as connection:
                if not await stopping.resume(connection, [subject], who=operator.name, why=why):
                    raise Refused("not paused any more")
        return RedirectResponse("/stops", HTTPStatus.SEE_OTHER)

    async def move(self, request: Request, operator: Operator, form: Mapping[str, str]) -> Response:
        """Set positions as a preview has shown; a replay goes back only."""
        wanted = {name: parameters.searched(form, name) for name in planning.FIELDS}
        why, what = parameters.why(form), "replay" if wanted["what"] == "replay" else "seek"
        change = Change(operator.name, what, why)
        set_position = offsets.rewind if what == "replay" else offsets.seek
        with logged(what, operator, wanted["topic"][:1_000], why=why), _needing("service"):
            async with autocommitting(self._engine) as connection:
                planned = await planning.plan(connection, self._service, self._settings, wanted)
                planned = planning.as_shown(planned, form.get("shown", ""))
                for one in planned:
                    await set_position(connection, one.slot, one.new, change)
        return self._templates.note(operator, "\n".join(moved(one, "goes") for one in planned))

    async def skip_archive(
        self, request: Request, operator: Operator, form: Mapping[str, str]
    ) -> Response:
        """Let a day of the outbox be dropped without being archived."""
        day, why = parameters.day(form), parameters.why(form)
        change = Change(operator.name, "skip-archive", why)
        with logged("skip-archive", operator, str(day), why=why), _needing("retention"):
            async with autocommitting(self._engine) as connection:
                if not await archive.skip(connection, [day], change):
                    raise Refused(f"{day}: the outbox has no such day that is over")
        return RedirectResponse("/retention", HTTPStatus.SEE_OTHER)


async def _chosen(store: Store, request: Request, form: Mapping[str, str]) -> tuple[Selection, str]:
    """Return what a form is about: the dead entry in the path, or what a preview has counted."""
    id = request.path_params.get("id")
    if id is None:
        selection, search = parameters.previewed(form)
        return selection, search[:1_000]
    return Selection(keys=await store.chosen([id], "dead")), id


@contextmanager
def _needing(role: str) -> Iterator[None]:
    """Raise `Refused`, which names the role, where roles are apart and the page's may not do it."""
    try:
        yield
    except asyncpg.InsufficientPrivilegeError as error:
        raise Refused(
            f"{describe_error(error)}. This takes the {role}'s role of the database: use the"
            " command, see docs/security.md"
        ) from error


@contextmanager
def logged(what: str, operator: Operator, id: str, **more: str) -> Iterator[None]:
    """Log a change with its operator before it is made, and its result, beside the audit.

    The level is warning, which no setting disables.
    """
    fields = {"operator": operator.name, "id": id, **more}
    log.warning("requested on the page: %s", what, extra=fields)
    try:
        yield
    except Exception as error:
        log.warning("failed on the page: %s: %s", what, describe_error(error), extra=fields)
        raise
    log.warning("done on the page: %s", what, extra=fields)
