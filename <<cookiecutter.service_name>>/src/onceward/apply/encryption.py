"""The interface of an encryption of payloads in tables, which the package `personal` implements."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import asyncpg

from onceward.handlers.policy import Decision
from onceward.handlers.staging import Outbox

from .item import Item, Row

Rows = Sequence[Mapping[str, Any]]
Decided = list[tuple[Item, Decision]]


class Encryption(Protocol):
    """Encrypts payloads before they are stored; methods raise `StoreUnavailable` without keys."""

    def check(self) -> None:
        """Raise `Misconfigured` for events that can't be encrypted, or wrong settings."""

    def redact(self, decided: Decided) -> Decided:
        """Return decisions, without values of the payloads in the texts of their errors."""

    async def encrypt(self, connection: asyncpg.Connection, rows: Sequence[Row]) -> list[Row]:
        """Return rows of the backlog as they are to be stored, in the transaction that does."""

    async def encrypt_events(self, connection: asyncpg.Connection, outbox: Outbox) -> None:
        """Replace staged events by what is to be stored, just before the outbox is written."""

    async def decrypt(self, connection: asyncpg.Connection, rows: Rows, column: str) -> Rows:
        """Return rows with plain payloads in `column`; or None, and the reason as "erased"."""
