"""Who may see and do what, and how it is told where something is in the way."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from operate.errors import Refused
from pipeline.errors import describe_error
from pipeline.settings import Settings

from . import errors, parameters
from .rendering import Templates
from .sessions import Operator, Sessions, is_name
from .settings import PageSettings

log = logging.getLogger(__name__)

_SHOWN_SECONDS = 20.0
"""What takes longer to find is not waited for."""

Answers = Callable[[Request], Awaitable[Response]]
Shows = Callable[[Request, Operator], Awaitable[Response]]
Changes = Callable[[Request, Operator, Mapping[str, str]], Awaitable[Response]]


class Auth:
    """Lets in who is known, and changes only what a form of the page asks for."""

    def __init__(
        self, settings: Settings, page: PageSettings, templates: Templates, sessions: Sessions
    ) -> None:
        self._settings = settings
        self._page = page
        self._templates = templates
        self._sessions = sessions

    def showing(self, does: Shows) -> Answers:
        """Return what shows something to who may see it."""

        async def answer(request: Request) -> Response:
            operator = self._sessions.operator(request)
            if operator is None:
                return self._stranger()
            work = asyncio.wait_for(does(request, operator), _SHOWN_SECONDS)
            return await self._in_words(operator, work)

        return answer

    def changing(self, does: Changes) -> Answers:
        """Return what changes something, if who may do it means it."""

        async def answer(request: Request) -> Response:
            operator = self._sessions.operator(request)
            if operator is None:
                return self._stranger()
            if not self._sessions.is_own(request):
                return self._foreign(request, operator)
            form = await parameters.form(request)
            if form is None or not self._sessions.is_meant(operator, form.get("csrf", "")):
                said = "This form is not of your session: go back, load the page again."
                return self._templates.note(operator, said, HTTPStatus.FORBIDDEN)
            return await self._in_words(operator, does(request, operator, form))

        return answer

    async def _in_words(self, operator: Operator, work: Awaitable[Response]) -> Response:
        try:
            return await work
        except Refused as error:
            return self._templates.note(operator, f"Refused: {error}", HTTPStatus.CONFLICT)
        except Exception as error:
            said = errors.describe(error, self._settings)
            if said is None:
                raise
            log.warning("PostgreSQL does not answer the page: %s", describe_error(error))
            return self._templates.note(operator, said, HTTPStatus.SERVICE_UNAVAILABLE)

    def _stranger(self) -> Response:
        if self._page.token is None:
            said = "The proxy has not said who you are: come by it, logged in."
            return self._templates.note(None, said, HTTPStatus.FORBIDDEN)
        return RedirectResponse("/login", HTTPStatus.SEE_OTHER)

    def _foreign(self, request: Request, operator: Operator | None) -> Response:
        origin = request.headers.get("origin", "")[:200]
        log.warning("a form that is not the page's was refused", extra={"origin": origin})
        said = (
            f"This form comes from {origin or 'nowhere'}, which is not this page's origin. If you"
            " have come that way, PIPELINE_PAGE_ORIGIN has to say so."
        )
        return self._templates.note(operator, said, HTTPStatus.FORBIDDEN)

    async def missing(self, request: Request, _: Exception) -> Response:
        """Say that there is no such page."""
        operator = self._sessions.operator(request)
        return self._templates.note(operator, "There is no such page.", HTTPStatus.NOT_FOUND)

    async def ask_login(self, request: Request) -> Response:
        """Ask for name and token."""
        if self._page.token is None:
            return RedirectResponse("/", HTTPStatus.SEE_OTHER)
        return self._templates.page("login.html", None, wrong="")

    async def log_in(self, request: Request) -> Response:
        """Begin a session for who has the token."""
        if not self._sessions.is_own(request):
            return self._foreign(request, None)
        form = await parameters.form(request)
        if self._page.token is None or form is None:
            return self._templates.note(
                None, "Log in on the page's own form.", HTTPStatus.FORBIDDEN
            )
        name = form.get("name", "").strip()
        client = _client(request)
        if not self._sessions.admits(form.get("token", "")):
            log.warning("a login to the page was refused", extra={"client": client})
            wrong = "That is not the token."
        elif not is_name(name):
            wrong = "Say who you are: letters, digits and . @ + ' - _, 80 at most."
        else:
            # A warning, as all that people do here: the settings leave out what is less.
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
