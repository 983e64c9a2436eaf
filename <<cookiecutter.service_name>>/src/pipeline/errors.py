"""Whose fault an error is, and the one policy by which infrastructure is tried again."""

import logging
import re
import traceback
from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

import asyncpg
import sqlalchemy.exc
from aiokafka.errors import KafkaError
from pydantic import ValidationError
from sqlalchemy.dialects.postgresql.asyncpg import AsyncAdapt_asyncpg_dbapi

from pipeline.redaction import redact_error

log = logging.getLogger(__name__)

T = TypeVar("T")

# PostgreSQL, Appendix A. A class is two characters, a condition five.
_INFRASTRUCTURE = (
    "08",  # connection exception
    "25006",  # read-only transaction: a failover has left us on a standby
    "25P03",  # idle_in_transaction_session_timeout
    "25P04",  # transaction_timeout
    "40001",  # serialization failure
    "40P01",  # deadlock detected
    "530",  # insufficient resources
    "531",  # disk full
    "532",  # out of memory
    "533",  # too many connections
    "55P03",  # lock_timeout
    "57014",  # statement_timeout, or pg_cancel_backend
    "57P",  # operator intervention: shutdown, crash, starting up
    "58",  # system error
)


class StoreUnavailable(ConnectionError):
    """The object store can't be used; the text names it and says why."""


_LONGEST = 4_000
"""Characters of an error's text: a payload can be wrong in a hundred thousand places."""
_MOST = 20
"""Errors of an exception group that are described."""
_UNUSABLE = re.compile(r"[\x00\ud800-\udfff]")
"""What PostgreSQL's text does not hold."""
_VALUE = re.compile(r"""["']|: """)
"""What comes before a value in a text of PostgreSQL or asyncpg about it."""
_WHY = re.compile(r" \((value out of \w+ range|expected [\w.]+, got [\w.]+)\)$")
"""What stands behind a value, and has nothing of it."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield what an exception group contains, however nested; the error itself if it is none."""
    left = [error]
    while left:
        error = left.pop()
        if isinstance(error, BaseExceptionGroup):
            left += reversed(error.exceptions)
        else:
            yield error


def is_infrastructure(error: BaseException) -> bool:
    """Whether the servers or the way to them failed, and not a record or a handler.

    Of an exception group: whether nothing else did.
    """
    return all(map(_is_infrastructure, leaves(error)))


def _is_infrastructure(error: BaseException) -> bool:
    if isinstance(error, sqlalchemy.exc.DBAPIError) and error.connection_invalidated:
        return True
    error = as_raised(error)
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        return True  # a migration has changed a table beside us; the cache is empty now
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "").startswith(_INFRASTRUCTURE) or _lacks_a_partition(error)
    if isinstance(error, asyncpg.InterfaceError):
        # "Improper use of asyncpg API". Of an outage it tells when the connection is lost already;
        # that has neither a class nor a cause of its own, and SQLAlchemy knows it by the text, too.
        return "connection is closed" in str(error)
    if isinstance(error, asyncpg.InternalClientError):
        # The class itself is for what asyncpg can't do, and for the state of a connection that was
        # cut off in the middle.
        is_bare = type(error) is asyncpg.InternalClientError
        return not is_bare or str(error).startswith("cannot switch to state")
    return isinstance(error, sqlalchemy.exc.TimeoutError | OSError | KafkaError)


def _lacks_a_partition(error: asyncpg.PostgresError) -> bool:
    """Whether a table of the engine has no partition for a row, which retention makes ahead."""
    is_a_check = isinstance(error, asyncpg.CheckViolationError)
    return is_a_check and error.schema_name == "pipeline" and error.constraint_name is None


def as_raised(error: BaseException) -> BaseException:
    """Return what asyncpg has raised, if this is what SQLAlchemy has made of it."""
    if isinstance(error, sqlalchemy.exc.DBAPIError) and error.orig and error.orig.__cause__:
        return error.orig.__cause__
    return error


def sqlstate_of(error: BaseException) -> str | None:
    """Return PostgreSQL's code of the error, if it has raised it."""
    return getattr(as_raised(error), "sqlstate", None)


_CONTENTION = ("40001", "40P01", "55P03", "57014")


def is_contention(error: BaseException) -> bool:
    """Whether others' locks were in the way: an outage if it passes, and else the batch's doing."""
    raised = map(as_raised, leaves(error))
    return any(isinstance(e, asyncpg.PostgresError) and e.sqlstate in _CONTENTION for e in raised)


_OF_THE_DATABASE = (
    sqlalchemy.exc.SQLAlchemyError,
    AsyncAdapt_asyncpg_dbapi.Error,  # between the two, in a chain
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)


def is_of_the_database(error: BaseException) -> bool:
    """Whether PostgreSQL or SQLAlchemy raised it, so that it may belong to an earlier record.

    A statement that fails may be the flush of what another record's handler has left behind.
    """
    return any(isinstance(one, _OF_THE_DATABASE) for one in leaves(error))


def summarize_error(error: BaseException) -> str:
    """Return the error's text in a line, without secrets, values of payloads or rows, and SQL.

    It can be stored, and ends where nobody reads on, whatever the payload has brought into it.
    """
    try:
        text = _text(error)
    except Exception as unspeakable:  # of a class of the handler's author
        text = f"its text can't be had: {type(unspeakable).__name__}"
    # A secret that is cut through is not found.
    text = redact_error(text[: 2 * _LONGEST])[:_LONGEST]
    return _UNUSABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _text(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        inner = [*islice(leaves(error), _MOST)]
        return "; ".join(
            [str(error), *(describe_error(one)[: _LONGEST // len(inner)] for one in inner)]
        )
    if isinstance(error, ValidationError):
        return "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'payload'}: {one['msg']}"
            for one in error.errors(include_url=False, include_input=False, include_context=False)
        )
    text = str(error)
    if "Unable to bootstrap from" in text:  # aiokafka shows a list of its own, and no why
        return "no broker answers, or not by PIPELINE_KAFKA_SECURITY_PROTOCOL"
    if is_of_the_database(error):
        text = text.partition("\n")[0]
        if _is_about_a_value(as_raised(error)):
            before, *value = _VALUE.split(text, maxsplit=1)
            why = _WHY.search(text)
            text = f"{before.rstrip()} …{why[0] if why else ''}" if value else text
    return text


def _is_about_a_value(error: BaseException) -> bool:
    """Whether PostgreSQL can't read a value, or asyncpg can't encode one: both quote it."""
    return (getattr(error, "sqlstate", None) or "").startswith("22") or isinstance(
        error, ValueError
    )


def describe_error(error: BaseException) -> str:
    """Return the error's type and what `told` says of it."""
    error = as_raised(error)
    kind, text = type(error).__name__, summarize_error(error)
    # aiokafka's texts begin with the type.
    return f"{kind}: {text}" if text and not text.startswith(kind) else text or kind


def format_traceback(error: BaseException) -> str:
    """Return it without secrets, and the values of rows and payloads that errors quote."""
    whole = traceback.TracebackException.from_exception(error)
    pairs: list[tuple[traceback.TracebackException | None, BaseException | None]]
    pairs = [(whole, error)]
    while pairs:
        found, one = pairs.pop()
        if found is None or one is None:
            continue
        if is_of_the_database(one) or isinstance(one, ValidationError):
            found._str = summarize_error(one)  # type: ignore[attr-defined]  # nothing public sets it
        pairs += [(found.__cause__, one.__cause__), (found.__context__, one.__context__)]
        pairs += zip(found.exceptions or (), getattr(one, "exceptions", ()), strict=False)
    return redact_error("".join(whole.format())).rstrip("\n")
