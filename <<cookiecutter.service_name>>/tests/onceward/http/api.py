"""The HTTP API of that program, as a service has it in its own `api.py`."""

import os
import signal

from fastapi import Request, Response
from starlette.middleware.base import RequestResponseEndpoint

from .routes import app_of
from .served import service

app = app_of(service)


@app.middleware("http")
async def die_before_the_answer(request: Request, answer: RequestResponseEndpoint) -> Response:
    """Die by kill -9 when a request is applied and not answered yet, if it says so."""
    response = await answer(request)
    if os.environ.get("BANK_DIES") and "x-die" in request.headers:
        os.kill(os.getpid(), signal.SIGKILL)
    return response
