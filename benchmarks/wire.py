"""Messages that asyncpg sends to PostgreSQL, counted by type."""

from collections import Counter
from typing import Any, ClassVar

from asyncpg import connect_utils  # type: ignore[import-untyped]

EXCHANGES = b"SQHc"
"""What PostgreSQL answers at once: Sync, Query, Flush, and CopyDone, which ends a second answer."""
STATEMENTS = b"QE"
"""Query and Execute."""


class Wire:
    """A transport to PostgreSQL that counts the messages sent."""

    sent: ClassVar = Counter[int]()
    """By type, of all connections."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._rest = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Count the messages, each of a byte and the length of the rest, and send them."""
        self._rest += bytes(data)
        while len(self._rest) >= 5:
            if self._rest[0] == 0:  # the first message of a session has no type
                self._rest = self._rest[int.from_bytes(self._rest[:4]) :]
                continue
            if len(self._rest) < (end := 1 + int.from_bytes(self._rest[1:5])):
                break
            self.sent[self._rest[0]] += 1
            self._rest = self._rest[end:]
        self._transport.write(data)

    def writelines(self, parts: list[bytes]) -> None:
        """Send several messages."""
        for part in parts:
            self.write(part)


class _Protocol(connect_utils.protocol.Protocol):  # type: ignore[misc]  # it has no types
    """asyncpg's protocol on such a transport."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(Wire(transport))


def count_messages() -> None:
    """Count the messages of all connections that are made from now on."""
    connect_utils.protocol.Protocol = _Protocol
