"""The bank as a program, named by the environment: `python -m tests.pipeline.integration.app`."""

import asyncio
import os
import signal
from contextlib import suppress

from pydantic import field_validator

from pipeline import Event, Policy, Transaction
from pipeline.commands import command_line

from .bank import ATTEMPTS, Bank

bank = Bank(
    deposits=os.environ["BANK_DEPOSITS"],
    balances=os.environ["BANK_BALANCES"],
    name=os.environ["BANK_NAME"],
    options={"policy": Policy(attempts=ATTEMPTS, schedule=(0.05,))},
)


class Noted(Event, type="noted"):
    """Something that needs to be remembered, and changes and tells nothing."""


@bank.handlers.on(Noted, topic=bank.deposits, consumer="note")
async def note(event: Noted, tx: Transaction) -> str:
    """Do nothing, once, and say so."""
    return "noted"


class Struck(Event, type="struck"):
    """What nobody survives: the process dies of it, or hangs in a loop."""

    how: str

    @field_validator("how")
    @classmethod
    def _nobody_survives_its_validation(cls, how: str) -> str:
        if how == "validation":
            os.kill(os.getpid(), signal.SIGKILL)
        return how


@bank.handlers.on(
    Struck,
    topic=bank.deposits,
    consumer="strike",
    policy=Policy(attempts=3, schedule=(0.1,)),
    timeout=1,
    mode="deferred" if os.environ.get("BANK_STRIKES") == "deferred" else "immediate",
)
async def strike(event: Struck, tx: Transaction) -> None:
    """Die."""
    while event.how == "loop":
        pass
    while event.how == "deaf":
        with suppress(BaseException):
            await asyncio.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    command_line(bank.service)()
