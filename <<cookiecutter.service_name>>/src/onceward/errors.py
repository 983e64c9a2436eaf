"""Errors: whether servers, the database or a message are at fault, and their text."""

import errno
import re
import traceback
from collections.abc import Iterator
from itertools import islice

import asyncpg
import sqlalchemy.exc
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    KafkaError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
)
from pydantic import ValidationError
from sqlalchemy.dialects.postgresql.asyncpg import AsyncAdapt_asyncpg_dbapi

from onceward.redaction import redact_error

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
"""Error codes of PostgreSQL (Appendix A) or the beginnings of some: a class has two characters."""
QUERY_CANCELED = "57014"
"""By a role's `statement_timeout`, or `pg_cancel_backend`."""
_CONTENTION = ("40001", "40P01", "55P03", QUERY_CANCELED)
_OF_SERVERS = ("08", "25", "53", "57", "58", "XX")
_OF_THE_PROCESS = (errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EROFS)
_OF_RESOURCES = ("53", "58")
"""Classes of errors: insufficient resources, and system error."""
_ACCESS_DENIED = ("28", "3D", "42501")
"""A wrong user, password or database, and a missing privilege."""
MISSING = (
    asyncpg.InsufficientPrivilegeError,
    asyncpg.InvalidSchemaNameError,
    asyncpg.UndefinedColumnError,
    asyncpg.UndefinedFunctionError,
    asyncpg.UndefinedObjectError,
    asyncpg.UndefinedTableError,
)
"""What the catalog lacks, or the role may not use: a migration was not written, or not applied."""
_OF_THE_DATABASE = (
    sqlalchemy.exc.SQLAlchemyError,
    AsyncAdapt_asyncpg_dbapi.Error,  # in a chain between the two, or by itself, of BEGIN
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)
_ACLS = {
    TopicAuthorizationFailedError: "Read on a topic that it reads, Write on one that it writes",
    GroupAuthorizationFailedError: "Read on the group",
    TransactionalIdAuthorizationFailed: "Write on the relay's transactional ids",
    ClusterAuthorizationFailedError: "Write on a topic, before Kafka 3.0 IdempotentWrite on the"
    " cluster",
}
"""What a user of the brokers lacks who gets the error; `docs/security.md` has the commands."""


_LONGEST = 4_000
"""Characters of an error's text: a payload can be wrong in a hundred thousand places."""
_MOST = 20
"""Errors of an exception group that are described."""
UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")
"""Characters that PostgreSQL's text type does not allow: NUL, and surrogates, which stand for bytes
that are not UTF-8."""
_VALUE = re.compile(r"""["']|: """)
"""What precedes a value that PostgreSQL or asyncpg quotes."""
_WHY = re.compile(r" \((value out of \w+ range|expected [\w.]+, got [\w.]+)\)$")
"""What follows such a value, and holds nothing of it."""


class OncewardError(Exception):
    """The base of all errors of Onceward and its packages: the text says what failed, and mostly
    what to do.

    `Retry`, `Park` and `Reject` do not derive from it: a handler that catches it does not catch its
    own decisions.
    """


class Repeat(Exception):
    """A transaction has shown what the next one has to do otherwise: the messages are applied again
    at once, and nothing counts."""


class Paused(OncewardError):
    """Messages or events have to wait: the transaction is rolled back, and nothing is stored."""

    reason: str
    after: float | None = None
    """Seconds until it is worth while to try again, if that is known."""


class SourceLost(OncewardError):
    """Another process has worked on, or may work on, what this one has read: that is dropped, and
    the database is asked where to continue."""


class Refused(OncewardError):
    """What a person asks for can't be done; the text says why, and what can be."""


class StoreUnavailable(OncewardError, ConnectionError):
    """A server can't be used, such as an object store: the text has its address, and why."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in an exception group, at any depth; the error itself if it is none."""
    left = [error]
    while left:
        error = left.pop()
        if isinstance(error, BaseExceptionGroup):
            left += reversed(error.exceptions)
        else:
            yield error


def is_infrastructure(error: BaseException) -> bool:
    """Return whether only servers or the network failed, and no message or handler."""
    return all(map(_is_infrastructure, leaves(error)))


def _is_infrastructure(error: BaseException) -> bool:
    if isinstance(error, sqlalchemy.exc.DBAPIError) and error.connection_invalidated:
        return True
    error = as_raised(error)
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        return True  # a migration has changed a table, and asyncpg has emptied its cache
    if lacks_partition(error):
        return True
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "").startswith(_INFRASTRUCTURE)
    if isinstance(error, asyncpg.InterfaceError):
        # A bug in the code that uses asyncpg, but for a connection that is lost already. That error
        # has no class of its own, and SQLAlchemy recognizes it by the text, too.
        return "connection is closed" in str(error)
    if isinstance(error, asyncpg.InternalClientError):
        # The class itself is raised for what asyncpg does not support, and for a connection whose
        # statement was cut off.
        is_bare = type(error) is asyncpg.InternalClientError
        return not is_bare or str(error).startswith("cannot switch to state")
    return isinstance(error, sqlalchemy.exc.TimeoutError | OSError | KafkaError)


def is_of_a_server(error: BaseException) -> bool:
    """Return whether `is_infrastructure` is true, and no file, disk or descriptor is to blame.

    Those are the process's own, as where a migration opens a file that is missing.
    """
    return is_infrastructure(error) and not any(
        isinstance(one, OSError) and (one.filename is not None or one.errno in _OF_THE_PROCESS)
        for one in leaves(error)
    )


def lacks_partition(error: BaseException) -> bool:
    """Return whether a table of the engine lacks a partition, which retention creates ahead."""
    error = as_raised(error)
    return (
        isinstance(error, asyncpg.CheckViolationError)
        and error.schema_name == "pipeline"
        and error.constraint_name is None
    )


def as_raised(error: BaseException) -> BaseException:
    """Return asyncpg's error if this is SQLAlchemy's translation of it; else the error itself."""
    adapted: BaseException | None = None
    if isinstance(error, sqlalchemy.exc.DBAPIError):
        adapted = error.orig
    elif isinstance(error, AsyncAdapt_asyncpg_dbapi.Error):
        adapted = error
    return (adapted and adapted.__cause__) or error


def sqlstate_of(error: BaseException) -> str | None:
    """Return PostgreSQL's error code; None if PostgreSQL did not raise the error."""
    return getattr(as_raised(error), "sqlstate", None)


def is_contention(error: BaseException) -> bool:
    """Return whether locks or changed tables were in the way: if that does not pass, the messages
    are at fault.
    """
    return any(
        isinstance(e, asyncpg.InvalidCachedStatementError)
        or (isinstance(e, asyncpg.PostgresError) and e.sqlstate in _CONTENTION)
        for e in map(as_raised, leaves(error))
    )


def may_be_outage(error: BaseException) -> bool:
    """Return whether the error's class is that of a server which can't be used. `Probe` tells."""
    return _has_class(error, _OF_SERVERS) and not is_contention(error)


def is_of_resources(error: BaseException) -> bool:
    """Return whether the server lacks disk, memory or connections for this statement."""
    return _has_class(error, _OF_RESOURCES)


def is_access_denied(error: BaseException) -> bool:
    """Return whether the user, password or database is wrong, or the role lacks a privilege."""
    return _has_class(error, _ACCESS_DENIED)


def _has_class(error: BaseException, classes: tuple[str, ...]) -> bool:
    return any((sqlstate_of(one) or "").startswith(classes) for one in leaves(error))


def is_of_the_database(error: BaseException) -> bool:
    """Return whether PostgreSQL or SQLAlchemy raised it: an earlier message may be at fault.

    The statement that fails may flush the changes of that message's handler.
    """
    return any(isinstance(one, _OF_THE_DATABASE) for one in leaves(error))


def summarize_error(error: BaseException) -> str:
    """Return the error's text without secrets, values of payloads and rows, and SQL.

    It can be stored in PostgreSQL, and has at most 4,000 characters.
    """
    try:
        text = _text(error)
    except Exception as failed:  # in a class of the handler's author
        text = f"its text is not available: {type(failed).__name__}"
    # Longer than the result: a secret that is cut in two is not found.
    text = redact_error(text[: 2 * _LONGEST])[:_LONGEST]
    return UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _text(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        inner = [*islice(leaves(error), _MOST)]
        texts = (describe_error(one)[: _LONGEST // len(inner)] for one in inner)
        return "; ".join([str(error), *texts])
    if isinstance(error, ValidationError):
        return "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'payload'}: {one['msg']}"
            for one in error.errors(include_url=False, include_input=False, include_context=False)
        )
    text = str(error)
    if "Unable to bootstrap from" in text:  # followed by addresses, without a reason
        return "no broker answers, or not by PIPELINE_KAFKA_SECURITY_PROTOCOL"
    if is_of_the_database(error):
        text, raised = text.partition("\n")[0], as_raised(error)
        # PostgreSQL can't parse a value, or asyncpg can't encode it: both quote it.
        if (sqlstate_of(raised) or "").startswith("22") or isinstance(raised, ValueError):
            before, *value = _VALUE.split(text, maxsplit=1)
            why = _WHY.search(text)
            text = f"{before.rstrip()} …{why[0] if why else ''}" if value else text
    return text


def missing_acl(kind: type[BaseException]) -> str:
    """Return what the user of the brokers lacks who gets this kind of error."""
    return f"the user of this service needs the ACL {_ACLS[kind]} (docs/security.md)"


def describe_error(error: BaseException) -> str:
    """Return the error's type and its text, as `summarize_error` has it."""
    error = as_raised(error)
    if type(error) is KafkaError and isinstance(error.__cause__, KafkaError):
        error = error.__cause__  # aiokafka says no more than that it was not expected
    kind, text = type(error).__name__, summarize_error(error)
    if type(error) in _ACLS:
        text = f"{text}: {missing_acl(type(error))}"
    # aiokafka's texts begin with the type.
    return f"{kind}: {text}" if text and not text.startswith(kind) else text or kind


def format_traceback(error: BaseException) -> str:
    """Return the traceback without secrets, and without values of rows and payloads."""
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
        if isinstance(one, BaseExceptionGroup):
            pairs += zip(found.exceptions or (), one.exceptions, strict=False)
    return redact_error("".join(whole.format())).rstrip("\n")
