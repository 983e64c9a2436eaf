"""The limit of the size of a request's body."""

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onceward.http_server.problems import problem


class BodyLimit:
    """Answers larger requests with 413: at once if their headers tell, else when it is exceeded.

    The limits of FastAPI and Starlette answer with plain text.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        """`most`: bytes of a body."""
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        size, text = 0, f"the body is larger than {self._most:,} bytes"

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._most:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
            return message

        declared = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        is_too_large = declared.isdecimal() and int(declared) > self._most
        app = problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text) if is_too_large else self._app
        await app(scope, limited, send)
