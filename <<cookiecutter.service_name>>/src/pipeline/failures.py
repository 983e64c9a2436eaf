"""Whose fault an error is, and the one policy by which infrastructure is tried again."""

import logging
from collections.abc import Callable

import asyncpg
import sqlalchemy.exc
from aiokafka.errors import KafkaError
from pydantic import ValidationError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_exponential_jitter

log = logging.getLogger(__name__)

# PostgreSQL, Appendix A. A class is two characters, a condition five.
_INFRASTRUCTURE = (
    "08",  # connection exception
    "25006",  # read-only transaction: a failover has left us on a standby
    "25P03",  # idle_in_transaction_session_timeout
    "25P04",  # transaction_timeout
    "40001",  # serialization failure
    "40P01",  # deadlock detected
    "53",  # insufficient resources: connections, memory, disk
    "55P03",  # lock_timeout
    "57P",  # operator intervention: shutdown, crash, starting up
    "58",  # system error
)


def is_infrastructure(error: BaseException) -> bool:
    """Whether the servers or the way to them failed, and not a record or a handler."""
    if isinstance(error, sqlalchemy.exc.DBAPIError):
        if error.connection_invalidated:
            return True
        error = getattr(error.orig, "__cause__", None) or error
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        return True  # a migration has changed a table beside us; the cache is empty now
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "").startswith(_INFRASTRUCTURE)
    if isinstance(error, asyncpg.InterfaceError):
        return not isinstance(error, ValueError)  # those are arguments that asyncpg can't encode
    return isinstance(
        error, asyncpg.InternalClientError | sqlalchemy.exc.TimeoutError | OSError | KafkaError
    )


_CONTENTION = ("40001", "40P01", "55P03")


def is_contention(error: BaseException) -> bool:
    """Whether others' locks were in the way: an outage if it passes, and else the batch's doing."""
    if isinstance(error, sqlalchemy.exc.DBAPIError):
        error = getattr(error.orig, "__cause__", None) or error
    return isinstance(error, asyncpg.PostgresError) and error.sqlstate in _CONTENTION


def is_of_the_database(error: BaseException) -> bool:
    """Whether PostgreSQL or SQLAlchemy raised it, so that it may belong to an earlier record.

    A statement that fails may be the flush of what another record's handler has left behind.
    """
    return isinstance(
        error, sqlalchemy.exc.SQLAlchemyError | asyncpg.PostgresError | asyncpg.InterfaceError
    )


def told(error: BaseException) -> str:
    """Return the error's text in a line, without values of payloads or rows, and without SQL."""
    if isinstance(error, ValidationError):
        return "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'payload'}: {one['msg']}"
            for one in error.errors(include_url=False, include_input=False, include_context=False)
        )
    text = str(error)
    return text.partition("\n")[0] if is_of_the_database(error) else text


def named(error: BaseException) -> str:
    """Return the error's type and what `told` says of it."""
    text = told(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def patiently(what: str, unless: Callable[[], bool], away: Callable[[str], None]) -> AsyncRetrying:
    """Attempts that go on while infrastructure fails, with jitter, at most 5 s apart.

    `away` is told the reason before every pause; after `unless` turns true the error is raised.
    """

    def tell(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        reason = named(error) if error else "unknown"
        away(reason)
        if state.attempt_number == 1:
            log.warning("%s failed, trying again: %s", what, reason)

    return AsyncRetrying(
        retry=retry_if_exception(lambda error: is_infrastructure(error) and not unless()),
        wait=wait_exponential_jitter(multiplier=0.05, max=5, jitter=0.5),
        before_sleep=tell,
        reraise=True,
    )
