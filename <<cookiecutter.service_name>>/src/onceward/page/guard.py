"""ASGI middleware: checks each request's host, and sets security headers on each answer."""

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
_MISDIRECTED = (
    "The page does not serve this host name. Use an IP address or localhost; or set"
    " PIPELINE_PAGE_ORIGIN to the URL in the browser, and let the proxy pass the Host header on.\n"
)


class Guard:
    """Limits what browsers do with the page, and rejects requests for other host names."""

    def __init__(self, app: ASGIApp, settings: PageSettings) -> None:
        self._app = app
        self._names = {"localhost", settings.host.lower()}
        if settings.origin is not None:
            self._names.add(urlsplit(settings.origin).hostname or "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by the page, or with status 421 if the host is not the page's."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if not scope["path"].startswith("/static/"):
                    headers["cache-control"] = "no-store"
            await send(message)

        is_allowed = scope["type"] != "http" or self._is_host_allowed(
            Headers(scope=scope).getlist("host")
        )
        app = self._app if is_allowed else PlainTextResponse(_MISDIRECTED, 421)
        await app(scope, receive, guarded)

    def _is_host_allowed(self, hosts: list[str]) -> bool:
        """Whether the host is an address or one of the page's names.

        An attacker's name may be changed to resolve to a loopback address: a browser then treats
        the attacker's page and this one as the same origin (DNS rebinding). An address can't.
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
