"""The pages that change nothing."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.requests import Request
from starlette.responses import Response

from onceward import Service
from onceward.cli import doctor
from onceward.cli.dead import STATES, Store
from onceward.cli.dead_events import DeadEvents
from onceward.cli.dead_letters import DeadLetters
from onceward.cli.health import Finding
from onceward.cli.moves import Move
from onceward.cli.output import content_of
from onceward.cli.topic_commands import moved
from onceward.operators import scheduled, stopping
from onceward.retention import days, maintenance
from onceward.servers.database import autocommitting
from onceward.settings import Settings

from . import errors, overview, parameters, positions
from .rendering import Templates
from .sessions import Operator
from .watching import Watch

_LISTED = 100


class Reading:
    """The views of the page."""

    def __init__(
        self,
        service: Service,
        settings: Settings,
        engine: AsyncEngine,
        templates: Templates,
        watch: Watch,
    ) -> None:
        self._service = service
        self._settings = settings
        self._engine = engine
        self._templates = templates
        self._watch = watch

    async def overview(self, request: Request, operator: Operator) -> Response:
        """Show the status of the service."""
        return self._templates.page("overview.html", operator, **await self._watch.now())

    async def entries(
        self, kind: type[Store], template: str, request: Request, operator: Operator
    ) -> Response:
        """Show the newest dead letters or events that a search finds."""
        wanted = parameters.search(request.query_params)
        state = parameters.state(request)
        until = parameters.until(request.query_params)
        selection = parameters.selection(wanted)
        if until is not None:
            before = until if selection.until is None else min(until, selection.until)
            selection = replace(selection, until=before)
        after = parameters.after(request.query_params, kind) if until else None
        async with autocommitting(self._engine) as connection:
            store = kind(connection, self._service, self._settings)
            entries, last = await store.page(state, selection, _LISTED, after)
            groups = Counter[tuple[str, str | None]]()
            if state == "dead" and until is None:
                with suppress(TimeoutError):  # the list is shown without them
                    for one in await store.count(state, selection):
                        groups[one["reason"], one["consumer"]] += one["count"]
        older = None
        if last is not None:
            # Many may have got into this state at one time.
            key = last.hex() if isinstance(last, bytes) else last
            older = {"state": state, "until": entries[-1]["since"].isoformat(), "after": key}
        return self._templates.page(
            template,
            operator,
            entries=entries,
            older=older,
            groups=groups.most_common(),
            parameters=wanted,
            state=state,
            states=STATES,
            reasons=list(kind.reasons),
        )

    async def preview(self, kind: type[Store], request: Request, operator: Operator) -> Response:
        """Count the dead letters or events that a search finds, before a redrive or discard."""
        wanted = parameters.search(request.query_params)
        state = parameters.discarded_from(kind, request.query_params)
        async with autocommitting(self._engine) as connection:
            until = await connection.fetchval("SELECT clock_timestamp()")
            store = kind(connection, self._service, self._settings)
            selection = parameters.selection(wanted, until)
            if state == "dead":
                groups = await store.preview(selection)
            else:
                waiting = await store.count(state, selection)
                groups = [(one, "it is published by itself") for one in waiting]
        return self._templates.page(
            "preview.html",
            operator,
            groups=groups,
            total=sum(one["count"] for one, _ in groups),
            redriven=sum(one["count"] for one, why in groups if not why),
            parameters=wanted,
            until=until,
            state=state,
            at=request.url.path.rpartition("/")[0],
        )

    async def entry(
        self, kind: type[Store], template: str, request: Request, operator: Operator
    ) -> Response:
        """Show a dead letter or event with its payload and error."""
        async with autocommitting(self._engine) as connection:
            store = kind(connection, self._service, self._settings)
            entry = await store.show(request.path_params["id"])
        return self._templates.page(template, operator, one=entry)

    async def backlog(self, request: Request, operator: Operator) -> Response:
        """Show the keys of the backlog."""
        async with autocommitting(self._engine) as connection:
            found = await overview.waiting(connection, _LISTED + 1)
        keys = []
        for one in found[:_LISTED]:
            key = content_of(one.record_key)
            consumer = one.consumer or parameters.NO_CONSUMER
            link = parameters.link("waiting", key, consumer=consumer, topic=one.topic)
            keys.append((one, key, link))
        are_more = len(found) > _LISTED
        return self._templates.page("backlog.html", operator, keys=keys, are_more=are_more)

    async def scheduled(self, request: Request, operator: Operator) -> Response:
        """Show scheduled events."""
        async with autocommitting(self._engine) as connection:
            found = await scheduled.waiting(connection, _LISTED + 1)
        return self._templates.page(
            "scheduled.html",
            operator,
            waiting=found[:_LISTED],
            are_more=len(found) > _LISTED,
        )

    async def stops(self, request: Request, operator: Operator) -> Response:
        """Show what is paused, and what can be."""
        async with autocommitting(self._engine) as connection:
            stops = await stopping.listed(connection)
        choices = stopping.pausable(self._service.handlers, self._service.declared_topics)
        return self._templates.page("stops.html", operator, stops=stops, choices=choices)

    async def positions(self, request: Request, operator: Operator) -> Response:
        """Show where a seek or a replay would let partitions go on."""
        asked = request.query_params
        wanted = {name: parameters.searched(asked, name) for name in positions.FIELDS}
        planned: Sequence[Move] = []
        if wanted["topic"]:
            async with autocommitting(self._engine) as connection:
                planned = await positions.plan(connection, self._service, self._settings, wanted)
        return self._templates.page(
            "positions.html",
            operator,
            topics=sorted(self._service.handlers.topics),
            wanted=wanted,
            shown=positions.shown(planned),
            lines=[moved(one, "would go") for one in planned],
        )

    async def retention(self, request: Request, operator: Operator) -> Response:
        """Show each partition with its end and what keeps it."""
        async with autocommitting(self._engine) as connection:
            found = [one async for one in maintenance.list_partitions(connection, self._settings)]
        return self._templates.page("retention.html", operator, partitions=found, day_of=days.of)

    async def doctor(self, request: Request, operator: Operator) -> Response:
        """Run the checks of `service doctor`, and show their findings."""
        checked = self._service, self._settings
        try:
            async with autocommitting(self._engine) as connection:
                found = await doctor.examine(connection, *checked)
        except Exception as error:
            text = errors.describe(error, self._settings)
            if text is None:
                raise
            wrong = Finding("wrong", text, check="postgresql")
            found = [wrong, *await doctor.examine(None, *checked)]
        found.sort(key=lambda one: ("wrong", "warning", "ok").index(one.level))
        return self._templates.page("doctor.html", operator, findings=found)

    async def words(self, request: Request, operator: Operator) -> Response:
        """Show the glossary of the page, and every reason with its advice."""
        reasons = (DeadLetters.reasons, DeadEvents.reasons)
        return self._templates.page("words.html", operator, reasons=reasons)
