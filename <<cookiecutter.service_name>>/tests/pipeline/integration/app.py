"""The bank as a program, named by the environment: `python -m tests.pipeline.integration.app`."""

import os

from pipeline import Event, Transaction
from pipeline.commands import command_line

from .bank import Bank

bank = Bank(
    deposits=os.environ["BANK_DEPOSITS"],
    balances=os.environ["BANK_BALANCES"],
    name=os.environ["BANK_NAME"],
)


class Noted(Event, type="noted"):
    """Something that needs to be remembered, and changes and tells nothing."""


@bank.handlers.on(Noted, topic=bank.deposits, consumer="note")
async def note(event: Noted, tx: Transaction) -> str:
    """Do nothing, once, and say so."""
    return "noted"


if __name__ == "__main__":
    command_line(bank.service)()
