"""What every request and every answer goes through, whoever asks."""

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .settings import PageSettings

_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self';"
    " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not no-referrer: browsers would send `Origin: null` with forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_NOT_HERE = (
    "Nothing is served by this name. Come by an address or by localhost; or set"
    " PIPELINE_PAGE_ORIGIN to what browsers see, and let the proxy pass on the Host header.\n"
)


class Guard:
    """Keeps browsers from doing more than the page means."""

    def __init__(self, app: ASGIApp, settings: PageSettings) -> None:
        self._app = app
        self._names = {"localhost", settings.host.lower()}
        if settings.origin is not None:
            self._names.add(urlsplit(settings.origin).hostname or "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by the page, where the request can be meant for it."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if not scope["path"].startswith("/static/"):
                    headers["cache-control"] = "no-store"
            await send(message)

        is_ours = scope["type"] != "http" or self._is_ours(Headers(scope=scope).getlist("host"))
        await (self._app if is_ours else PlainTextResponse(_NOT_HERE, 421))(scope, receive, guarded)

    def _is_ours(self, hosts: list[str]) -> bool:
        """Whether no other's name can have led here.

        A name that somebody else owns may lead to a loopback address all of a sudden, and makes his
        page ours in the eyes of a browser (DNS rebinding). An address can't.
        """
        try:
            [host] = hosts
            name = urlsplit(f"//{host}").hostname or ""
            if name in self._names:
                return True
            ip_address(name)
        except ValueError:
            return False
        return True
