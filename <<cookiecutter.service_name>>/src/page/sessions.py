"""Who asks, and whether a change was asked for by a form of this page."""

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
_MOST = 1_000
"""Sessions at a time; the oldest makes room."""


@dataclass(frozen=True)
class Operator:
    """A person who is logged in."""

    name: str
    csrf: str
    """What the forms of this session carry."""


@dataclass(frozen=True, slots=True)
class _Session:
    operator: Operator
    until: float


class Sessions:
    """Knows who has logged in, as long as this process lives."""

    def __init__(self, settings: PageSettings, service: str) -> None:
        self._settings = settings
        self._key = secrets.token_bytes(32)
        self._is_secure = (settings.origin or "").startswith("https:")
        # Ports share cookies, so another service's page on this host needs another name. The
        # prefix has browsers refuse what a neighbouring domain sets.
        self._cookie = f"{'__Host-' if self._is_secure else ''}page-{service}"
        self._open: dict[str, _Session] = {}

    def admits(self, token: str) -> bool:
        """Whether this is the token; how long that takes tells nothing of it."""
        wanted = self._settings.token
        if wanted is None:
            return False
        # Signed, so that not even the length is compared.
        known = self._signed("token", wanted.get_secret_value())
        return _same(self._signed("token", token), known)

    def open(self, name: str, request: Request, answer: Response) -> None:
        """Begin a session, with an id that is new, and end the one that the browser had."""
        self.end(request)
        now = monotonic()
        self._open = {id: one for id, one in self._open.items() if now < one.until}
        while len(self._open) >= _MOST:
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
        """End the session for everyone who has its cookie."""
        self._open.pop(self._id(request), None)

    def operator(self, request: Request) -> Operator | None:
        """Return who asks, or None if nobody knows."""
        if self._settings.proxy_header is not None:
            return self._introduced(request, self._settings.proxy_header)
        session = self._open.get(self._id(request))
        return None if session is None or monotonic() >= session.until else session.operator

    def _id(self, request: Request) -> str:
        # Looked up by what nobody can foresee, so that its time tells nothing.
        return self._signed("session", request.cookies.get(self._cookie, ""))

    def _introduced(self, request: Request, header: str) -> Operator | None:
        """Believe a proxy, and nobody else; the address is the connection's own."""
        if request.client is None or _address(request.client.host) not in self._settings.proxies:
            return None
        names = request.headers.getlist(header)
        if len(names) != 1 or not is_name(names[0]):
            return None
        return Operator(names[0], self._signed("form", names[0]))

    def is_own(self, request: Request) -> bool:
        """Whether the browser says that a page of ours asks; those that say nothing are refused."""
        origin = request.headers.get("origin", "")
        if self._settings.origin is not None:
            return origin == self._settings.origin
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and parts.netloc == request.headers.get("host")

    def is_meant(self, operator: Operator, csrf: str) -> bool:
        """Whether a form carries what only this session's forms do."""
        return _same(csrf, operator.csrf)

    def _signed(self, purpose: str, text: str) -> str:
        said = f"{purpose}:{text}".encode("utf-8", "replace")
        return hmac.new(self._key, said, hashlib.sha256).hexdigest()


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    # Where one socket serves both, IPv4 comes as this.
    return getattr(address, "ipv4_mapped", None) or address


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def is_name(text: str) -> bool:
    """Whether this can be a person's name, to be kept with what he decides."""
    return _NAME.fullmatch(text) is not None and bool(text.strip())
