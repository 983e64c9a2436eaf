"""The interface of an encryption of payloads in tables: all that stores or reads them calls it.

The engine itself encrypts nothing; the optional package `personal` implements the interface. What
is published, hashed and given to handlers is the plain payload.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import asyncpg

from pipeline.handlers.policy import Decision
from pipeline.handlers.staging import Outbox

from .item import Item

if TYPE_CHECKING:
    from .backlog import Row

Rows = Sequence[Mapping[str, Any]]


class Erased(Exception):
    """A payload can't be decrypted any more; the text says why."""


class Encryption(Protocol):
    """Encrypts payloads before they are stored, and decrypts them after they are read.

    All methods but the first two raise `StoreUnavailable` if the keys can't be read now.
    """

    def check(self) -> None:
        """Raise `Misconfigured` for events that can't be encrypted, or wrong settings."""
        ...

    def redact(self, decided: Sequence[tuple[Item, Decision]]) -> list[tuple[Item, Decision]]:
        """Return the decisions, without values of the payloads in the texts of their errors."""
        ...

    async def encrypt(self, connection: asyncpg.Connection, rows: "Sequence[Row]") -> "list[Row]":
        """Return rows of the backlog as they are to be stored, in the transaction that does."""
        ...

    async def encrypt_events(self, connection: asyncpg.Connection, outbox: Outbox) -> None:
        """Replace staged events as they are to be stored, just before the outbox is written."""
        ...

    async def decrypt(self, connection: asyncpg.Connection, rows: Rows, column: str) -> Rows:
        """Return stored rows with the plain payload in `column`.

        Those that can't be decrypted any more have None there, and the reason as "erased".
        """
        ...


async def encrypted(
    connection: asyncpg.Connection, rows: "list[Row]", encryption: Encryption | None
) -> "list[Row]":
    """Return rows of the backlog as they are to be stored."""
    return rows if encryption is None or not rows else await encryption.encrypt(connection, rows)
