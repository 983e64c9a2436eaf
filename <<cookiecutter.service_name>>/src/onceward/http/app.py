"""The FastAPI application: its life, and what its routes get."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Request, Response
from opentelemetry import context, propagate, trace
from starlette.types import ASGIApp

from onceward import Event, Service
from onceward.events.payload import payload_hash
from onceward.settings import Settings

from . import problems
from .limits import BodyLimit
from .receiver import Receiver, open_receiver
from .settings import HttpSettings
from .source import InvalidKey

REPLAYED = "Idempotency-Replayed"
"""Response header of an answer that was stored before."""

_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\]){1,255})"')
_BARE = re.compile(r"[!#-~]{1,255}")
_KEY = "Identifies the request: a UUID, new for each request and the same when it is repeated."


class _App(FastAPI):
    """An application that limits the size of bodies before anything else sees them."""

    def build_middleware_stack(self) -> ASGIApp:
        """Return what answers requests."""
        return BodyLimit(super().build_middleware_stack(), self.state.max_body_bytes)


def create_app(service: Service, settings: Settings | None = None) -> FastAPI:
    """Return an application whose routes can `receive` requests for the service.

    By default the settings are read from the environment, when the application starts. Its errors
    are answered with problem details (RFC 9457).
    """
    http = HttpSettings()

    @asynccontextmanager
    async def living(app: FastAPI) -> AsyncIterator[None]:
        async with open_receiver(service, settings) as app.state.receiver:
            yield

    app = _App(
        title=service.name,
        lifespan=living,
        # Exporters are those of the engine.
        telemetry={"auto_configure": False, "operation_spans": False, "logs": False},
    )
    app.state.seconds, app.state.max_body_bytes = http.request_timeout, http.max_body_bytes
    problems.register(app)
    return app


class IdempotentRequest:
    """A request with an Idempotency-Key, which a handler of the service answers."""

    def __init__(
        self,
        request: Request,
        response: Response,
        idempotency_key: Annotated[str | None, Header(description=_KEY)] = None,
    ) -> None:
        """Called by FastAPI. Raises `InvalidKey`, which is answered with 400."""
        if len(request.headers.getlist("idempotency-key")) > 1:
            raise InvalidKey("this request has several headers Idempotency-Key: send one")
        self._request = request
        self._response = response
        self._key = _key_of(idempotency_key)

    @property
    def key(self) -> str:
        """The key that the client has sent, without quotes."""
        return self._key

    async def receive(self, event: Event, *, consumer: str, scope: str = "") -> Any:
        """Apply an event by the consumer's handler, once for the key; return its result, as JSON.

        `scope` separates the keys of callers: give the name that the caller is authenticated by. A
        repeated request gets the stored result and the header `Idempotency-Replayed: true`. It is
        one with the same method, path, query and body; JSON may be formatted otherwise. Errors are
        those of `Receiver.receive`; the application answers them.
        """
        state = self._request.app.state
        receiver: Receiver = state.receiver
        token = context.attach(_context(self._request))
        try:
            answer = await receiver.receive(
                event,
                key=self._key,
                consumer=consumer,
                scope=scope,
                seconds=state.seconds,
                sent=await _sent(self._request),
            )
        finally:
            context.detach(token)
        if answer.is_repeat:
            self._response.headers[REPLAYED] = "true"
        return answer.answer


Idempotent = Annotated[IdempotentRequest, Depends()]
"""Type of a route's parameter that is an `IdempotentRequest`."""


async def _sent(request: Request) -> bytes | None:
    """Return what the client has sent; None if the body is not at hand, as that of a form."""
    try:
        body = await request.body()
    except RuntimeError:  # it was read as a stream
        return None
    content_type = request.headers.get("content-type")
    hashed = payload_hash("", content_type, body).hex()
    scope = request.scope
    line = [scope["method"], scope["path"], scope["query_string"].decode("latin-1")]
    return json.dumps([*line, hashed]).encode()


def _context(request: Request) -> context.Context:
    """Return the trace context of the request, also if spans are not recorded here."""
    if trace.get_current_span().get_span_context().is_valid:
        return context.get_current()
    return propagate.extract(request.headers)


def _key_of(header: str | None) -> str:
    """Return the key in a header: a string of RFC 9651, or without its quotes as many send it."""
    if header is None:
        raise InvalidKey("this request needs the header Idempotency-Key, such as a new UUID")
    if quoted := _QUOTED.fullmatch(header):
        return re.sub(r"\\(.)", r"\1", quoted[1])
    if _BARE.fullmatch(header):
        return header
    raise InvalidKey("Idempotency-Key is a string of 1 to 255 visible ASCII characters, in quotes")
