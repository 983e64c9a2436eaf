"""The page's application: its routes."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.applications import Starlette
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from onceward import Service
from onceward.cli.dead_events import DeadEvents
from onceward.cli.dead_letters import DeadLetters
from onceward.servers.tasks import in_background
from onceward.settings import Settings

from . import sending
from .actions import Actions
from .auth import Auth, Change, View
from .guard import Guard
from .reading import Reading
from .rendering import Templates
from .sessions import Sessions
from .settings import PageSettings
from .watching import Watch


class Page:
    """The operations page of a service."""

    def __init__(
        self,
        service: Service,
        settings: Settings,
        page: PageSettings,
        engine: AsyncEngine,
        modules: Sequence[ModuleType] = (),
    ) -> None:
        """Each of `modules` adds pages of an optional package.

        Its `NAMES` are those in the navigation, by path. Its class `Views` takes service, settings,
        engine and templates, and has `views` and `changes` by path. The templates are in the folder
        `templates` of its package.
        """
        if page.send:
            modules = [*modules, sending]
        templates = Templates(service.name, page, modules)
        sessions = Sessions(page, service.name)
        self._page = page
        self._auth = Auth(settings, page, templates, sessions)
        self._watch = Watch(service, settings, page, engine, templates, sessions)
        self._reading = Reading(service, settings, engine, templates, self._watch)
        self._actions = Actions(service, settings, engine, templates)
        self._more = [one.Views(service, settings, engine, templates) for one in modules]

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        reading, actions, auth = self._reading, self._actions, self._auth
        views: dict[str, View] = {
            "/": reading.overview,
            "/live": self._watch.stream,
            "/dead": partial(reading.entries, DeadLetters, "letters.html"),
            "/dead/preview": partial(reading.preview, DeadLetters),
            "/dead/{id}": partial(reading.entry, DeadLetters, "letter.html"),
            "/events": partial(reading.entries, DeadEvents, "events.html"),
            "/events/preview": partial(reading.preview, DeadEvents),
            "/events/{id}": partial(reading.entry, DeadEvents, "event.html"),
            "/backlog": reading.backlog,
            "/scheduled": reading.scheduled,
            "/stops": reading.stops,
            "/positions": reading.positions,
            "/retention": reading.retention,
            "/doctor": reading.doctor,
            "/words": reading.words,
        }
        changes: dict[str, Change] = {
            "/dead/redrive": partial(actions.redrive, DeadLetters),
            "/dead/discard": partial(actions.discard, DeadLetters),
            "/dead/{id}/redrive": partial(actions.redrive, DeadLetters),
            "/dead/{id}/copy": actions.redrive_copy,
            "/dead/{id}/discard": partial(actions.discard, DeadLetters),
            "/events/redrive": partial(actions.redrive, DeadEvents),
            "/events/discard": partial(actions.discard, DeadEvents),
            "/events/{id}/redrive": partial(actions.redrive, DeadEvents),
            "/events/{id}/discard": partial(actions.discard, DeadEvents),
            "/scheduled/cancel": actions.cancel,
            "/stops/pause": actions.pause,
            "/stops/resume": actions.resume,
            "/positions/move": actions.move,
            "/retention/skip-archive": actions.skip_archive,
            "/logout": auth.log_out,
        }
        for one in self._more:
            views |= one.views
            changes |= one.changes
        app = Starlette(
            routes=[
                Route("/login", auth.show_login, methods=["GET"]),
                Route("/login", auth.log_in, methods=["POST"]),
                *(Route(path, auth.protect_view(view)) for path, view in views.items()),
                *(
                    Route(path, auth.protect_change(change), methods=["POST"])
                    for path, change in changes.items()
                ),
                Mount("/static", StaticFiles(directory=Path(__file__).parent / "static")),
            ],
            exception_handlers={404: auth.missing},
            lifespan=self._lifespan,
        )
        # No redirects to an address that a client has chosen: each path has one spelling.
        app.router.redirect_slashes = False
        return Guard(app, self._page)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with in_background(self._watch.run()):
            yield

    def stop(self) -> None:
        """End the streams: a server that stops waits for them."""
        self._watch.stop()
