"""The first connection to a server: SQLAlchemy asks the server about itself before it is used."""

from collections.abc import Callable

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg

from onceward.errors import is_infrastructure
from onceward.servers.database import create_engine
from onceward.settings import Settings


async def test_a_server_that_ends_while_it_is_asked_is_an_outage(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(_: object, connection: sa.Connection) -> None:
        connection.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")

    monkeypatch.setattr(PGDialect_asyncpg, "_set_backslash_escapes", ask)
    engine = create_engine(settings(), name="bank")
    with pytest.raises(sa.exc.DBAPIError) as failed:
        async with engine.connect():
            pass
    assert is_infrastructure(failed.value)
    await engine.dispose()
