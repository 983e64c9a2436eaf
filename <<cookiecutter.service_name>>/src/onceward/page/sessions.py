"""Sessions of operators, and the checks that a form was sent by this page."""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from time import monotonic
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from .settings import PageSettings

_NAME = re.compile(r"[\w.@+' -]{1,80}")
_MAX_SESSIONS = 1_000
"""Limit of open sessions; a new one ends the oldest."""


@dataclass(frozen=True)
class Operator:
    """A logged-in user."""

    name: str
    csrf: str
    """Token that the forms of this session contain, against cross-site requests."""


@dataclass(frozen=True, slots=True)
class _Session:
    operator: Operator
    until: float


class Sessions:
    """The open sessions, in this process's memory."""

    def __init__(self, settings: PageSettings, service: str) -> None:
        self._settings = settings
        self._key = secrets.token_bytes(32)
        self._is_secure = (settings.origin or "").startswith("https:")
        # The ports of a host share cookies, so the name has the service's in it. With the prefix,
        # browsers reject a cookie of this name that another subdomain sets.
        self._cookie = f"{'__Host-' if self._is_secure else ''}page-{service}"
        self._open: dict[str, _Session] = {}

    def is_token(self, token: str) -> bool:
        """Whether this is the token, compared in constant time."""
        wanted = self._settings.token
        if wanted is None:
            return False
        # Signatures are compared, so that the time does not depend on the length either.
        known = self._signed("token", wanted.get_secret_value())
        return _is_equal(self._signed("token", token), known)

    def open(self, name: str, request: Request, answer: Response) -> None:
        """Begin a session with a new id, set its cookie, and end the browser's former session."""
        self.end(request)
        now = monotonic()
        self._open = {id: one for id, one in self._open.items() if now < one.until}
        while len(self._open) >= _MAX_SESSIONS:
            del self._open[next(iter(self._open))]
        value = secrets.token_urlsafe(32)
        operator = Operator(name, self._signed("form", value))
        self._open[self._signed("session", value)] = _Session(
            operator, now + self._settings.session
        )
        answer.set_cookie(
            self._cookie, value, httponly=True, samesite="strict", secure=self._is_secure
        )

    def end(self, request: Request) -> None:
        """End the request's session, in every browser that has its cookie."""
        self._open.pop(self._id(request), None)

    def operator(self, request: Request) -> Operator | None:
        """Return the operator of a request; None without a valid session or proxy header."""
        if self._settings.proxy_header is not None:
            return self._from_proxy(request, self._settings.proxy_header)
        session = self._open.get(self._id(request))
        return None if session is None or monotonic() >= session.until else session.operator

    def _id(self, request: Request) -> str:
        # A signature can't be predicted, so the time of the lookup discloses nothing.
        return self._signed("session", request.cookies.get(self._cookie, ""))

    def _from_proxy(self, request: Request, header: str) -> Operator | None:
        """Return the header's operator if the connection's own address is one of the proxies."""
        if request.client is None or _address(request.client.host) not in self._settings.proxies:
            return None
        names = request.headers.getlist(header)
        if len(names) != 1 or not is_name(names[0]):
            return None
        return Operator(names[0], self._signed("form", names[0]))

    def is_same_origin(self, request: Request) -> bool:
        """Whether the header `Origin` is the page's; False without the header."""
        origin = request.headers.get("origin", "")
        if self._settings.origin is not None:
            return origin == self._settings.origin
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and parts.netloc == request.headers.get("host")

    def is_csrf_valid(self, operator: Operator, csrf: str) -> bool:
        """Whether a form's token is that of the operator's session."""
        return _is_equal(csrf, operator.csrf)

    def _signed(self, purpose: str, text: str) -> str:
        message = f"{purpose}:{text}".encode("utf-8", "replace")
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    # A socket for both IPv6 and IPv4 gives IPv4 addresses in this form.
    return getattr(address, "ipv4_mapped", None) or address


def _is_equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def is_name(text: str) -> bool:
    """Whether a text is valid as an operator's name, which is stored with changes."""
    return _NAME.fullmatch(text) is not None and bool(text.strip())
