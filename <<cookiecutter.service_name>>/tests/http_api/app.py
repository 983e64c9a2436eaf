"""The bank as a program with an HTTP API: `python -m tests.http_api.app`."""

import os
import signal

from fastapi import Request, Response
from starlette.middleware.base import RequestResponseEndpoint

from http_api.commands import group as api_commands
from operate.commands import command_line

from .cashier import with_cashier
from .routes import app_of
from tests.pipeline.integration.bank import Bank

bank = with_cashier(
    Bank(
        deposits=os.environ["BANK_DEPOSITS"],
        balances=os.environ["BANK_BALANCES"],
        name=os.environ["BANK_NAME"],
    )
)
app = app_of(bank.service)


@app.middleware("http")
async def die_before_the_answer(request: Request, answer: RequestResponseEndpoint) -> Response:
    """Die by kill -9 when a request is applied and not answered yet, if it says so."""
    response = await answer(request)
    if os.environ.get("BANK_DIES") and "x-die" in request.headers:
        os.kill(os.getpid(), signal.SIGKILL)
    return response


if __name__ == "__main__":
    command_line(bank.service, api=api_commands(bank.service, __name__))()
