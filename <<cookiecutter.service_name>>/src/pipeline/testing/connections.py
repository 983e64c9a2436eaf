"""Connections of tests: each test opens some, as its event loop is new, and so does a crash."""

from functools import cache
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from pipeline.servers.database import create_engine
from pipeline.servers.guard import GuardedConnection
from pipeline.settings import Settings


class KnowingConnection(GuardedConnection):
    """A connection that knows the types which an earlier one of its database has looked up.

    The query of asyncpg takes 5 ms, and two of the engine's statements need it.
    """

    __slots__ = ()
    _known: ClassVar[dict[tuple[str, *tuple[int, ...]], Any]] = {}

    async def _introspect_types(self, oids: set[int], *options: Any) -> Any:
        place = (self._params.database, *sorted(oids))
        if place not in self._known:
            self._known[place] = await super()._introspect_types(oids, *options)
        return self._known[place]


@cache  # so that the service's statements are compiled once
def shared_engine(settings: Settings, name: str) -> AsyncEngine:
    """Return the pool of all tests with these settings; each closes its connections."""
    engine = create_engine(settings, name=name)

    @sa.event.listens_for(engine.sync_engine, "do_connect")
    def connect(dialect: object, record: object, positional: Any, options: Any) -> None:
        options["connection_class"] = KnowingConnection

    return engine
