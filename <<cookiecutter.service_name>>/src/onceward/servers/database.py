"""Connections: SQLAlchemy's pool, and asyncpg's own connection below it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

import asyncpg
import sqlalchemy as sa
from asyncpg.connection import LoggedQuery
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from onceward.errors import describe_error
from onceward.observe import statements
from onceward.settings import Settings

from . import peers, revisions
from .cluster import gate
from .credentials import Credentials, CredentialsUnavailable
from .guard import CURRENT_GUARD, GUARD, NOT_ITS_CONNECTION, GuardedConnection, HandlerFault

Check = Callable[[asyncpg.Connection, str], Awaitable[None]]
"""Raises if a new connection is not to be used by the service of that name."""

IDLE_LIMIT = "set_config('idle_in_transaction_session_timeout', '5s', true)"
"""For a transaction that locks what others wait for: a process that stops in it loses its locks."""

_BESIDE_TRANSACTIONS = 5
"""Connections for the relay, retention, positions, looks, and the lanes of calls."""

_LONGER = 10
"""A lease of another process may be this many times as long as one's own: settings may differ."""

_CONNECT_SECONDS = 5.0
"""Time-out of a connection attempt, after which the server counts as unavailable."""

_KEEPALIVE_SECONDS = 60
"""Pause after which the system sends something on an idle connection. Load balancers drop those
that are idle for four minutes or more without closing them for either side."""

_COMMAND_SECONDS = 60.0
"""Time-out of a statement, longer than any takes; a dead connection is detected by it."""


def lease_ended(seconds: str) -> str:
    """Return the SQL condition that a lease has ended; `seconds` is the parameter with its length.

    A lease that would last much longer was taken before the database's clock was set back, and not
    extended since.
    """
    return f"""(lease_until < clock_timestamp()
               OR lease_until > clock_timestamp() + {_LONGER} * make_interval(secs => {seconds}))"""


def create_engine(
    settings: Settings, *, name: str, is_pooled: bool = True, check: Check | None = gate
) -> AsyncEngine:
    """Return a pool of as many connections as the process needs, or one that keeps none."""
    size = settings.concurrency + settings.backlog_workers + _BESIDE_TRANSACTIONS
    # At ordinary rates a few sessions of the server do all the work, with warm caches.
    pool = {"pool_size": size, "max_overflow": 0, "pool_use_lifo": True}
    engine = create_async_engine(
        settings.database_url.get_secret_value(),
        **(pool if is_pooled else {"poolclass": NullPool}),
        # Parameters are payloads, and errors are logged.
        hide_parameters=True,
        isolation_level="READ COMMITTED",
        connect_args=connect_args(settings, name=name)
        | {"command_timeout": _COMMAND_SECONDS, "timeout": _CONNECT_SECONDS}
        | {"connection_class": GuardedConnection},
    )
    sa.event.listen(engine.sync_engine, "connect", keep_alive)
    sa.event.listen(engine.sync_engine, "checkout", _refuse_if_closed)
    _watch_statements(engine.sync_engine)
    if check is not None:
        sa.event.listen(engine.sync_engine, "connect", partial(_check, check, name))
    return engine


def _check(check: Check, name: str, connection: Any, _: object) -> None:
    try:
        connection.run_async(lambda driver: check(driver, name))
    except BaseException:
        connection.terminate()  # it is not in the pool yet
        raise


def _watch_statements(engine: sa.Engine) -> None:
    """Time each statement, and let the guard of its message check it.

    SQLAlchemy's events report those that it prepares, asyncpg's query log reports all others, and
    those of `executemany`.
    """
    sa.event.listen(engine, "connect", _watch)
    sa.event.listen(engine, "before_cursor_execute", _begin_statement)
    sa.event.listen(engine, "after_cursor_execute", _end_statement)
    sa.event.listen(engine, "handle_error", _fail_statement)
    sa.event.listen(engine, "commit", lambda each: _refuse("COMMIT", each))
    # A handler must not return the connection to the pool.
    sa.event.listen(engine, "reset", lambda _, each, __: _refuse("connection.close()", each))


def _watch(connection: Any, record: Any) -> None:
    driver = connection.driver_connection
    driver.info = record.info
    driver.add_query_logger(_log_query)


def _log_query(query: LoggedQuery) -> None:
    statements.executed(query.query, query.elapsed, query.exception)
    # In the context of the task that has sent the statement.
    if guard := CURRENT_GUARD.get():
        guard.check(query.query)
        guard.fail(query.exception)


def _begin_statement(
    connection: sa.Connection, _: object, text: str, values: Any, context: Any, is_many: bool
) -> None:
    guard, current = connection.info.get(GUARD), CURRENT_GUARD.get()
    if current is not None and current is not guard:
        # A task of a handler that has returned sends it, or a handler uses another connection.
        current.stray = HandlerFault(NOT_ITS_CONNECTION)
        raise current.stray
    if guard:
        driver: Any = connection.connection.driver_connection
        guard.before(text, context, driver)
    context.pipeline_statement = statements.Statement(
        text, has_values=bool(values), is_timed=not is_many
    )


def _end_statement(connection: sa.Connection, _cursor: object, _text: str, *rest: Any) -> None:
    _values, context, _is_many = rest
    if guard := connection.info.get(GUARD):
        guard.under_way.discard(context)
    context.pipeline_statement.end()


def _fail_statement(failed: sa.ExceptionContext) -> None:
    statement = getattr(failed.execution_context, "pipeline_statement", None)
    if statement is not None:
        statement.end(failed.original_exception)
    guard = None
    with suppress(NotImplementedError):  # SQLAlchemy's first look at a server has no info
        guard = failed.connection and failed.connection.info.get(GUARD)
    if guard:
        guard.under_way.discard(failed.execution_context)
        guard.fail(failed.original_exception)
        guard.was_cancelled |= not isinstance(failed.original_exception, Exception)


def _refuse(text: str, connection: Any) -> None:
    if connection is not None and (guard := connection.info.get(GUARD)):
        (CURRENT_GUARD.get() or guard).refuse(text)


def keep_alive(connection: Any, _: object) -> None:
    """Enable TCP keepalive, as asyncpg does not: github.com/MagicStack/asyncpg/issues/606.

    Also note a connection that TLS does not secure.
    """
    driver = connection.driver_connection
    link = driver._transport.get_extra_info("socket")
    if link.family in (socket.AF_INET, socket.AF_INET6):
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):  # macOS has another name
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
        host, port = driver._addr
        server = f"PostgreSQL at {host}:{port}"
        peers.note(driver._transport, server, "set PIPELINE_DATABASE_TLS=true")


def _refuse_if_closed(connection: Any, *_: object) -> None:
    """Make the pool reconnect after the server has closed its connections, as in a restart."""
    if connection.driver_connection.is_closed():
        raise InvalidatePoolError


def connect_args(settings: Settings, *, name: str) -> dict[str, Any]:
    """Return the options of a connection, direct or through a pooler."""
    options: dict[str, Any] = {"server_settings": {"application_name": name}}
    if context := settings.database_context():
        options["ssl"] = context
    if function := settings.database_password_provider:
        passwords = Credentials("PIPELINE_DATABASE_PASSWORD_PROVIDER", function)
        options["async_creator_fn"] = partial(_connect_by_password, passwords)
    if settings.database_pooler:
        # The next transaction may run in another session, without this one's statements.
        return options | {
            "statement_cache_size": 0,
            "prepared_statement_cache_size": 0,
            "prepared_statement_name_func": lambda: "",
        }
    # Compiling the query of a page of the outbox takes longer than running it.
    options["server_settings"] |= {"jit": "off"}
    return options


async def _connect_by_password(passwords: Credentials, **options: Any) -> asyncpg.Connection:
    password = await passwords.token()
    try:
        return await asyncpg.connect(**options, password=password)
    except asyncpg.InvalidAuthorizationSpecificationError as error:
        # It may have expired on its way: an outage, which the next attempt may end.
        raise CredentialsUnavailable(f"{passwords.name}: {describe_error(error)}") from error


@asynccontextmanager
async def autocommitting(engine: AsyncEngine) -> AsyncIterator[asyncpg.Connection]:
    """Yield a connection of asyncpg on which each statement is a transaction of its own."""
    async with aclosing(await _connect(engine)) as transactional:
        connection = await transactional.execution_options(isolation_level="AUTOCOMMIT")
        try:
            yield await driver_of(connection)
        except BaseException:
            # A statement may be under way: the connection must not be used again.
            await connection.invalidate()
            raise


async def _connect(engine: AsyncEngine) -> AsyncConnection:
    try:
        return await engine.connect()
    except AssertionError as error:  # SQLAlchemy can't read the version of another engine
        revisions.refuse_engine(str(error))
        raise
    except Exception as error:
        # While it connects for the first time, SQLAlchemy raises other errors in place of a
        # cancellation. A loop that outlives errors would never end then.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError from error
        raise


async def begin(connection: AsyncConnection, statements: str) -> None:
    """Begin a transaction and execute `statements` in one round trip; SQLAlchemy needs two."""
    raw = cast(Any, connection.sync_connection).connection
    await connection.begin()
    raw.driver_connection.first_statements = statements
    try:
        await raw.dbapi_connection._start_transaction()
    except BaseException:
        await connection.invalidate()  # it may have begun, unknown to SQLAlchemy
        raise


async def driver_of(connection: AsyncConnection) -> asyncpg.Connection:
    """Return asyncpg's own connection, for what SQLAlchemy does not support."""
    driver = cast(Any, connection.sync_connection).connection.driver_connection  # no greenlet
    if not isinstance(driver, asyncpg.Connection):
        raise TypeError(f"the engine needs asyncpg, not {type(driver).__name__}")
    return driver
