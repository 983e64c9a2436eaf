"""The probe: an outage of the database is what it confirms, and no error by itself."""

import asyncio
from uuid import uuid4

from pipeline.errors import is_infrastructure, sqlstate_of
from pipeline.settings import Settings

from .database import autocommitting, create_engine

_SECONDS = 5.0
"""Time limit of a probe: an answer that comes later is none."""
_TOO_MANY_CONNECTIONS = "53300"
"""PostgreSQL's code: a server without room for the probe serves the connections that it has."""
_WRITE = """
INSERT INTO pipeline.backlog (key, lane, order_key, consumer, topic, partition, "offset", timestamp,
                              headers, hash_version, reason, attempts, waited, holds)
VALUES ('\\x{key}', 0, '\\x{key}', '', '', 0, 0, 0, '[]', 0, 'probe', 0, 0, false);
DELETE FROM pipeline.backlog WHERE key = '\\x{key}'
"""
"""One transaction, so that nobody else sees the row."""


class Probe:
    """Tells whether the database can be written, one question after the other."""

    def __init__(self, settings: Settings, *, name: str) -> None:
        """`name` is that of its connections."""
        self._engine = create_engine(settings, name=name, is_pooled=False)
        self._asking = asyncio.Lock()

    async def write(self) -> None:
        """Commit a row of the backlog, and its deletion, on a new connection.

        Raises what prevents it if that is an outage.
        """
        try:
            async with (
                self._asking,
                asyncio.timeout(_SECONDS),
                autocommitting(self._engine) as driver,
            ):
                await driver.execute(_WRITE.format(key=uuid4().hex))
        except Exception as error:
            if is_infrastructure(error) and sqlstate_of(error) != _TOO_MANY_CONNECTIONS:
                raise
