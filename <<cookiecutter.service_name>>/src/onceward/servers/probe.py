"""The probe: an outage of the database is what it confirms, and no error by itself."""

import asyncio
from uuid import uuid4

import asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine

from onceward.errors import as_raised, is_infrastructure
from onceward.settings import Settings

from . import statements
from .database import autocommitting, create_engine

_SECONDS = 5.0
"""Time limit of a probe: an answer that comes later is none."""


class Probe:
    """Tells whether the database can be written, one question after the other."""

    def __init__(self, settings: Settings, pool: AsyncEngine, *, name: str) -> None:
        """`name` is that of its connections; those of the pool are used if there is no room."""
        self._engine = create_engine(settings, name=name, is_pooled=False, check=None)
        self._pool = pool
        self._asking = asyncio.Lock()

    async def write(self) -> None:
        """Commit a row of the backlog, and its deletion, on a new connection.

        Raises what prevents it if that is an outage.
        """
        try:
            async with self._asking, asyncio.timeout(_SECONDS):
                try:
                    await _write(self._engine)
                except Exception as error:
                    if not isinstance(as_raised(error), asyncpg.TooManyConnectionsError):
                        raise
                    await _write(self._pool)  # the server may serve those that it has
        except Exception as error:
            if is_infrastructure(error):
                raise


async def _write(engine: AsyncEngine) -> None:
    async with autocommitting(engine) as driver:
        await driver.execute(statements.PROBE_WRITING.format(key=uuid4().hex))
