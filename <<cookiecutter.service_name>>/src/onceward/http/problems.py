"""The problem details of errors, with the status codes of the header Idempotency-Key.

Those are of the IETF's draft "The Idempotency-Key HTTP Header Field", 2.7: 400 for a missing key,
422 for one with another body, 409 for one whose request is under way.
"""

import math
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from onceward import Reject
from onceward.errors import StoreUnavailable, summarize_error
from onceward.http_server.problems import problem

from .receiver import Unavailable
from .source import InvalidKey, KeyReused, UnderWay

DRAFT = "https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/"
"""Type of the problems that the draft names."""
_SECONDS = 1
"""Seconds after which to repeat a request whose key is in use."""


def answer(error: Exception) -> Response:
    """Return the response to a request that has failed."""
    match error:
        case InvalidKey():
            title = "Idempotency-Key is missing or invalid"
            return problem(HTTPStatus.BAD_REQUEST, str(error), type=DRAFT, title=title)
        case KeyReused():
            title = "Idempotency-Key is already used"
            return problem(HTTPStatus.UNPROCESSABLE_ENTITY, str(error), type=DRAFT, title=title)
        case UnderWay():
            title = "A request with this Idempotency-Key is under way"
            headers = {"Retry-After": f"{_SECONDS}"}
            return problem(
                HTTPStatus.CONFLICT, str(error), type=DRAFT, title=title, headers=headers
            )
        case Unavailable() | StoreUnavailable():
            after = error.after if isinstance(error, Unavailable) else _SECONDS
            headers = {"Retry-After": f"{math.ceil(after)}"}
            detail = "the request was not applied now: repeat it, with the same Idempotency-Key"
            return problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, headers=headers)
        case Reject():
            return problem(HTTPStatus.UNPROCESSABLE_ENTITY, summarize_error(error))
        case RequestValidationError():
            errors = [{"loc": one["loc"], "msg": one["msg"]} for one in error.errors()]
            detail = "the request is not as the API describes it"
            return problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail, errors=errors)
        case ClientDisconnect():
            return problem(HTTPStatus.BAD_REQUEST, "the body of the request did not arrive")
        case HTTPException():
            return problem(error.status_code, str(error.detail), headers=error.headers)
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "the request has failed; the log says why")


_ANSWERED = (
    *(InvalidKey, KeyReused, UnderWay, Unavailable, StoreUnavailable, Reject),
    *(RequestValidationError, ClientDisconnect, HTTPException, Exception),
)


def register(app: FastAPI) -> None:
    """Answer errors of the routes of an app with problem details."""

    async def handle(_: Request, error: Exception) -> Response:
        return answer(error)

    for kind in _ANSWERED:
        app.add_exception_handler(kind, handle)
