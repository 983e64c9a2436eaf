"""The press, which may die between its store and its database, or its reader, as a program."""

import os
import signal
from collections.abc import Mapping

from onceward.claims import open_claims
from onceward.claims.check import Claims, Stored
from onceward.claims.commands import app
from onceward.cli.commands import command_line
from onceward.settings import Settings

from .press import Press


class Dying(Claims):
    """Stores payloads, and dies by kill -9 before anything is noted of it."""

    async def put(self, payloads: Mapping[str, bytes]) -> Mapping[str, Stored]:
        """Store them, and die."""
        await super().put(payloads)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def opened(service: str, settings: Settings) -> Claims | None:
    """Open a claim check like any other, but one that dies."""
    claims = open_claims(service, settings)
    if claims is not None and "PRESS_DIES" in os.environ:
        claims.__class__ = Dying
    return claims


press = Press(
    orders=os.environ["PRESS_ORDERS"],
    books=os.environ["PRESS_BOOKS"],
    name=os.environ["PRESS_NAME"],
    claims=opened,
)

if __name__ == "__main__":
    command_line(press.reader if "PRESS_READS" in os.environ else press.printer, claims=app)()
