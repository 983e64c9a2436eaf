"""Login, the checks before each page and each change, and the answers to errors."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from onceward.cli.errors import Refused
from onceward.errors import describe_error
from onceward.settings import Settings

from . import errors, parameters
from .rendering import Templates
from .sessions import Operator, Sessions, is_name
from .settings import PageSettings

log = logging.getLogger(__name__)

_VIEW_SECONDS = 20.0
"""Time limit of a page that changes nothing."""

Endpoint = Callable[[Request], Awaitable[Response]]
View = Callable[[Request, Operator], Awaitable[Response]]
Change = Callable[[Request, Operator, Mapping[str, str]], Awaitable[Response]]


class Auth:
    """Serves pages to logged-in operators only, and accepts changes from the page's forms only."""

    def __init__(
        self, settings: Settings, page: PageSettings, templates: Templates, sessions: Sessions
    ) -> None:
        self._settings = settings
        self._page = page
        self._templates = templates
        self._sessions = sessions

    def protect_view(self, view: View) -> Endpoint:
        """Return a view's endpoint, which requires a login and has a time limit."""

        async def answer(request: Request) -> Response:
            operator = self._sessions.operator(request)
            if operator is None:
                return self._not_logged_in()
            work = asyncio.wait_for(view(request, operator), _VIEW_SECONDS)
            return await self._describe_errors(operator, work)

        return answer

    def protect_change(self, change: Change) -> Endpoint:
        """Return a change's endpoint, which requires a login and a form of the session's pages."""

        async def answer(request: Request) -> Response:
            operator = self._sessions.operator(request)
            if operator is None:
                return self._not_logged_in()
            if not self._sessions.is_same_origin(request):
                return self._wrong_origin(request, operator)
            form = await parameters.form(request)
            if form is None or not self._sessions.is_csrf_valid(operator, form.get("csrf", "")):
                note = "This form does not belong to your session: go back and load the page again."
                return self._templates.note(operator, note, HTTPStatus.FORBIDDEN)
            return await self._describe_errors(operator, change(request, operator, form))

        return answer

    async def _describe_errors(self, operator: Operator, work: Awaitable[Response]) -> Response:
        try:
            return await work
        except Refused as error:
            return self._templates.note(operator, f"Refused: {error}", HTTPStatus.CONFLICT)
        except Exception as error:
            note = errors.describe(error, self._settings)
            if note is None:
                raise
            log.warning("PostgreSQL does not answer the page: %s", describe_error(error))
            return self._templates.note(operator, note, HTTPStatus.SERVICE_UNAVAILABLE)

    def _not_logged_in(self) -> Response:
        if self._page.token is None:
            note = (
                "This request has no user name from the proxy: log in at the proxy, and open the"
                " page through it."
            )
            return self._templates.note(None, note, HTTPStatus.FORBIDDEN)
        return RedirectResponse("/login", HTTPStatus.SEE_OTHER)

    def _wrong_origin(self, request: Request, operator: Operator | None) -> Response:
        origin = request.headers.get("origin", "")[:200]
        log.warning("a form of another origin was rejected", extra={"origin": origin})
        note = (
            f"The origin of this form is {origin or 'unknown'}, which is not this page's. If it is"
            " the page's URL in your browser, set PIPELINE_PAGE_ORIGIN to it."
        )
        return self._templates.note(operator, note, HTTPStatus.FORBIDDEN)

    async def missing(self, request: Request, _: Exception) -> Response:
        """Answer a path that does not exist."""
        operator = self._sessions.operator(request)
        return self._templates.note(operator, "This page does not exist.", HTTPStatus.NOT_FOUND)

    async def show_login(self, request: Request) -> Response:
        """Show the form for name and token."""
        if self._page.token is None:
            return RedirectResponse("/", HTTPStatus.SEE_OTHER)
        return self._templates.page("login.html", None, wrong="")

    async def log_in(self, request: Request) -> Response:
        """Begin a session if the form has the token and a name."""
        if not self._sessions.is_same_origin(request):
            return self._wrong_origin(request, None)
        form = await parameters.form(request)
        if self._page.token is None or form is None:
            return self._templates.note(
                None, "Log in with the page's own form.", HTTPStatus.FORBIDDEN
            )
        name = form.get("name", "").strip()
        client = _client(request)
        if not self._sessions.is_token(form.get("token", "")):
            log.warning("a login to the page was rejected", extra={"client": client})
            wrong = "The token is wrong."
        elif not is_name(name):
            wrong = "Enter your name: letters, digits, spaces and . @ + ' - _, 80 at most."
        else:
            # A warning, like all actions of operators: settings may disable lower levels.
            log.warning("logged in to the page", extra={"operator": name, "client": client})
            answer = RedirectResponse("/", HTTPStatus.SEE_OTHER)
            self._sessions.open(name, request, answer)
            return answer
        return self._templates.page("login.html", None, HTTPStatus.FORBIDDEN, wrong=wrong)

    async def log_out(self, request: Request, operator: Operator, _: object) -> Response:
        """End the session."""
        client = _client(request)
        log.warning("logged out of the page", extra={"operator": operator.name, "client": client})
        self._sessions.end(request)
        return RedirectResponse("/login", HTTPStatus.SEE_OTHER)


def _client(request: Request) -> str:
    return request.client.host if request.client else ""
