"""The bank as a program, named by the environment: `python -m tests.pipeline.integration.app`."""

import os

from pipeline.commands import command_line

from .bank import Bank

bank = Bank(
    deposits=os.environ["BANK_DEPOSITS"],
    balances=os.environ["BANK_BALANCES"],
    name=os.environ["BANK_NAME"],
)

if __name__ == "__main__":
    command_line(bank.service)()
