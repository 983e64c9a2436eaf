"""The archive: keeps the days of the outbox when their tables are dropped. A seam."""

from collections.abc import Awaitable, Callable
from datetime import date
from typing import Protocol

import asyncpg

Tell = Callable[[str], Awaitable[None]]


class Archive(Protocol):
    """Keeps the days of the outbox when their tables go."""

    def check(self) -> None:
        """Raise `Misconfigured` for settings that can't have been meant."""

    @property
    def is_on(self) -> bool:
        """Whether this process has been told where days are kept."""

    async def keep(self, connection: asyncpg.Connection, table: str, day: date, tell: Tell) -> None:
        """Keep all rows of a table of the schema `pipeline`; return when that is certain to last.

        Nobody writes to it any more. The connection is in no transaction. `tell` is to be awaited
        every few seconds, and uses the connection; what it raises ends the work. It can be cut off
        at any point, called again, and by two at once. Whatever else it raises holds the table
        until the next round.
        """
