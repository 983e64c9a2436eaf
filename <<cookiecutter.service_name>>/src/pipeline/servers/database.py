"""Connections: SQLAlchemy's pool, and asyncpg's own connection below it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import sqlalchemy as sa
from asyncpg.connection import LoggedQuery
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from pipeline.observe import telemetry
from pipeline.settings import Settings

from .guard import CALL, GUARD

_BESIDE_TRANSACTIONS = 5
"""For the relay, housekeeping, reading a position, loading filters, and the lanes of calls."""

_LONGER = 10
"""How many times its own lease a process takes another's to be: they may be set apart."""

_CONNECT_SECONDS = 5.0
"""Enough for a server that is there; one that says nothing is told of, and tried again."""

_COMMAND_SECONDS = 60.0
"""Longer than any statement takes: a connection that died without a word is noticed by it."""


def lease_ended(seconds: str) -> str:
    """SQL condition: a lease has run out; `seconds` is the parameter that says how long ours last.

    One that would last for much longer was taken before the database's clock was set back, by
    somebody who has not extended it since.
    """
    return f"""(lease_until < clock_timestamp()
               OR lease_until > clock_timestamp() + {_LONGER} * make_interval(secs => {seconds}))"""


def create_engine(settings: Settings, *, name: str) -> AsyncEngine:
    """Return a pool that is as large as the process needs, and no larger."""
    engine = create_async_engine(
        settings.database_url.get_secret_value(),
        pool_size=settings.concurrency + settings.backlog_workers + _BESIDE_TRANSACTIONS,
        max_overflow=0,
        # Errors are logged, and parameters are payloads.
        hide_parameters=True,
        isolation_level="READ COMMITTED",
        connect_args=connect_args(settings, name=name)
        | {"command_timeout": _COMMAND_SECONDS, "timeout": _CONNECT_SECONDS},
    )
    sa.event.listen(engine.sync_engine, "checkout", _refuse_if_closed)
    _time_statements(engine.sync_engine)
    return engine


def _time_statements(engine: sa.Engine) -> None:
    """Have each statement timed once: SQLAlchemy prepares most of its own, and asyncpg tells only
    of what it runs unprepared, and of many at once. COPY is told of by neither."""

    def watch(connection: Any, _: object) -> None:
        connection.driver_connection.add_query_logger(_tell)

    sa.event.listen(engine, "connect", watch)
    sa.event.listen(engine, "before_cursor_execute", _begin)
    sa.event.listen(engine, "after_cursor_execute", _end)
    sa.event.listen(engine, "handle_error", _fail)
    sa.event.listen(engine, "commit", _refuse_commit)


def _tell(query: LoggedQuery) -> None:
    telemetry.executed(query.query, query.elapsed, query.exception)
    # It is told in the context of who has sent it.
    if call := CALL.get():
        call.after(query.query)


def _begin(
    connection: sa.Connection,
    cursor: object,
    text: str,
    values: Any,
    context: Any,
    is_many: bool,
) -> None:
    guard, call = connection.info.get(GUARD), CALL.get()
    if call is not None:
        call.refuse_strays(guard)
    if guard:
        driver: Any = connection.connection.driver_connection
        guard.before(text, context, driver)
    context.pipeline_statement = telemetry.Statement(
        text, has_values=bool(values), is_timed=not is_many
    )


def _end(
    connection: sa.Connection,
    cursor: object,
    text: str,
    values: Any,
    context: Any,
    is_many: bool,
) -> None:
    if guard := connection.info.get(GUARD):
        guard.under_way.discard(context)
    context.pipeline_statement.end()


def _fail(failed: sa.ExceptionContext) -> None:
    statement = getattr(failed.execution_context, "pipeline_statement", None)
    if statement is not None:
        statement.end(failed.original_exception)
    if failed.connection is not None and (guard := failed.connection.info.get(GUARD)):
        guard.under_way.discard(failed.execution_context)
        guard.was_cancelled |= isinstance(failed.original_exception, asyncio.CancelledError)


def _refuse_commit(connection: sa.Connection) -> None:
    if guard := connection.info.get(GUARD):
        guard.refuse("COMMIT")


def _refuse_if_closed(connection: Any, *_: object) -> None:
    """Make the pool connect anew after the server has ended its connections, as in a restart."""
    if connection.driver_connection.is_closed():
        raise InvalidatePoolError


def connect_args(settings: Settings, *, name: str) -> dict[str, Any]:
    """Return what connections are made with, on the way that the settings name."""
    way: dict[str, Any] = {"server_settings": {"application_name": name}}
    if context := settings.database_context():
        way["ssl"] = context
    if settings.database_pooler:
        # The next transaction may run in another session: no prepared statement has a name.
        return way | {
            "statement_cache_size": 0,
            "prepared_statement_cache_size": 0,
            "prepared_statement_name_func": lambda: "",
        }
    # Compiling a page of the outbox takes longer than reading it.
    way["server_settings"]["jit"] = "off"
    return way


@asynccontextmanager
async def autocommitting(engine: AsyncEngine) -> AsyncIterator[asyncpg.Connection]:
    """Lend asyncpg's connection, on which every statement is a transaction of its own."""
    async with engine.connect() as transactional:
        connection = await transactional.execution_options(isolation_level="AUTOCOMMIT")
        try:
            yield await driver_of(connection)
        except BaseException:
            # Lost, cut off or cancelled in the middle: nobody else may get it.
            await connection.invalidate()
            raise


async def driver_of(connection: AsyncConnection) -> asyncpg.Connection:
    """Return asyncpg's own connection, for what SQLAlchemy has no words for."""
    driver = (await connection.get_raw_connection()).driver_connection
    if not isinstance(driver, asyncpg.Connection):
        raise TypeError(f"the engine needs asyncpg, not {type(driver).__name__}")
    return driver
