"""The bank of the program in `app.py`, named by the environment."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from .cashier import with_cashier
from tests.onceward.integration.bank import Bank

bank = with_cashier(
    Bank(
        deposits=os.environ["BANK_DEPOSITS"],
        balances=os.environ["BANK_BALANCES"],
        name=os.environ["BANK_NAME"],
    )
)


@dataclass
class Resources:
    """The resources of the service."""

    token: str


@asynccontextmanager
async def open_resources() -> AsyncIterator[Resources]:
    """Read the file that the environment names, if it names one."""
    path = os.environ.get("BANK_TOKEN")
    yield Resources(read(Path(path)) if path else "")


def read(path: Path) -> str:
    """Return the token."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError as error:
        raise ConnectionError("no token yet") from error


service = replace(bank.service, resources=open_resources)
