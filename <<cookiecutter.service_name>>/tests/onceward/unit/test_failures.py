"""Whose fault an error is, and how infrastructure is tried again."""

import asyncio
import errno
import gc
import logging
import re
import weakref
from pathlib import Path

import asyncpg
import pytest
import sqlalchemy.exc
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
)
from pydantic import BaseModel, ValidationError

from onceward.errors import (
    describe_error,
    format_traceback,
    is_contention,
    is_infrastructure,
    is_of_the_database,
    leaves,
    summarize_error,
)
from onceward.servers.retrying import Retrying, pause


def wrapped(cause: BaseException) -> sqlalchemy.exc.DBAPIError:
    """Return asyncpg's error as SQLAlchemy hands it on."""
    translated = Exception("translated")
    translated.__cause__ = cause
    return sqlalchemy.exc.DBAPIError("SELECT", {}, translated)


def invalidated() -> sqlalchemy.exc.DBAPIError:
    """Return an error after which SQLAlchemy has given the connection up."""
    return sqlalchemy.exc.DBAPIError("SELECT", {}, Exception(), connection_invalidated=True)


OUTAGES = [
    asyncpg.ConnectionDoesNotExistError(),
    asyncpg.ConnectionFailureError(),
    asyncpg.ReadOnlySQLTransactionError(),
    asyncpg.IdleInTransactionSessionTimeoutError(),
    asyncpg.SerializationError(),
    asyncpg.DeadlockDetectedError(),
    asyncpg.TooManyConnectionsError(),
    asyncpg.DiskFullError(),
    asyncpg.LockNotAvailableError(),
    asyncpg.QueryCanceledError(),
    asyncpg.AdminShutdownError(),
    asyncpg.CrashShutdownError(),
    asyncpg.CannotConnectNowError(),
    asyncpg.PostgresIOError(),
    asyncpg.InvalidCachedStatementError(),
    asyncpg.InterfaceError("connection is closed"),
    asyncpg.InterfaceError("cannot perform operation: connection is closed"),
    asyncpg.InterfaceError(
        "cannot call Transaction.rollback(): the underlying connection is closed"
    ),
    asyncpg.OutdatedSchemaCacheError("a type has changed"),
    asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress"),
    asyncpg.ProtocolError("unexpected data"),
    asyncpg.TargetServerAttributeNotMatched("no primary"),
    sqlalchemy.exc.TimeoutError(),
    invalidated(),
    KafkaConnectionError(),
    KafkaTimeoutError(),
    ConnectionResetError(),
    TimeoutError(),
]
FAULTS = [
    asyncpg.UniqueViolationError(),
    asyncpg.CheckViolationError(),
    asyncpg.NumericValueOutOfRangeError(),
    asyncpg.CharacterNotInRepertoireError(),
    asyncpg.InFailedSQLTransactionError(),
    asyncpg.UndefinedTableError(),
    asyncpg.InsufficientPrivilegeError(),
    asyncpg.DataError("invalid input for query argument $1"),
    asyncpg.InterfaceError("cannot perform operation: another operation is in progress"),
    asyncpg.InterfaceError("cannot use Connection.transaction() in a manually started transaction"),
    asyncpg.UnsupportedClientFeatureError("not supported"),
    asyncpg.InternalClientError("no binary format encoder for type x"),
]


def name(error: object) -> str:
    """Name a parameter."""
    return type(error).__name__


@pytest.mark.parametrize("error", OUTAGES, ids=name)
def test_the_servers_and_the_way_to_them_are_infrastructure(error: Exception) -> None:
    assert is_infrastructure(error)


@pytest.mark.parametrize("error", FAULTS, ids=name)
def test_what_a_record_can_cause_is_not(error: Exception) -> None:
    assert not is_infrastructure(error)


@pytest.mark.parametrize("error", [KeyError(), ValueError(), RuntimeError(), Exception()], ids=name)
def test_what_a_handler_can_raise_is_neither_infrastructure_nor_the_databases(
    error: Exception,
) -> None:
    assert not is_infrastructure(error)
    assert not is_of_the_database(error)


@pytest.mark.parametrize(
    "error",
    [one for one in OUTAGES + FAULTS if isinstance(one, asyncpg.PostgresError)],
    ids=name,
)
def test_sqlalchemys_wrapping_changes_nothing(error: Exception) -> None:
    assert is_infrastructure(wrapped(error)) == is_infrastructure(error)
    assert is_of_the_database(wrapped(error))
    assert is_of_the_database(error)


def interface_errors() -> set[str]:
    """Return the texts of all errors of its interface that asyncpg raises."""
    found: set[str] = set()
    for path in Path(asyncpg.__file__).parent.rglob("*.py*"):
        if path.suffix in (".py", ".pyx"):
            raised = re.findall(
                r"InterfaceError\(((?:\s*f?(?:'[^']*'|\"[^\"]*\"))+)", path.read_text()
            )
            found |= {"".join(re.findall(r"['\"]([^'\"]*)['\"]", text)) for text in raised}
    return found


def test_of_asyncpgs_misuse_errors_only_a_lost_connection_is_an_outage() -> None:
    texts = interface_errors()
    assert len(texts) > 30
    assert {text for text in texts if is_infrastructure(asyncpg.InterfaceError(text))} == {
        "connection is closed",
        "cannot perform operation: connection is closed",
        "cannot call {}.{}(): the underlying connection is closed",
    }
    assert {text for text in texts if "closed" in text and "connection" in text} == {
        "connection is closed",
        "cannot perform operation: connection is closed",
        "cannot call {}.{}(): the underlying connection is closed",
    }


def test_an_exception_group_is_what_it_contains() -> None:
    lost, late, bug = ConnectionResetError(), asyncpg.DeadlockDetectedError(), KeyError("a")
    outage = ExceptionGroup("all", [lost, ExceptionGroup("inner", [wrapped(late)])])
    assert is_infrastructure(outage)
    assert is_contention(outage)
    assert is_of_the_database(outage)
    assert not is_infrastructure(ExceptionGroup("all", [outage, bug]))
    assert not is_of_the_database(ExceptionGroup("all", [lost, bug]))
    assert not is_contention(ExceptionGroup("all", [lost, bug]))
    assert [*leaves(ExceptionGroup("all", [bug, outage]))][:2] == [bug, lost]


def test_an_exception_group_is_summarized_with_each_error_and_without_values() -> None:
    class Amount(BaseModel):
        cents: int

    with pytest.raises(ValidationError) as invalid:
        Amount.model_validate_json('{"cents": "secret"}')
    row = asyncpg.CheckViolationError("new row violates\nDETAIL: Failing row contains (secret).")
    group = ExceptionGroup("all", [ValueError("no"), ExceptionGroup("in", [invalid.value, row])])
    assert summarize_error(group) == (
        "all (2 sub-exceptions); ValueError: no;"
        " ValidationError: cents: Input should be a valid integer, unable to parse string as an"
        " integer; CheckViolationError: new row violates"
    )


def test_an_exception_groups_summary_is_bounded_and_shows_later_errors() -> None:
    group = ExceptionGroup("all", [ValueError("x" * 10_000), KeyError("second")] * 1_000)
    for _ in range(2_000):
        group = ExceptionGroup("nested", [group])
    assert len(summarize_error(group)) <= 4_000
    assert "KeyError: 'second'" in summarize_error(group)


def test_a_missing_partition_is_infrastructure_only_for_the_engines_own_tables() -> None:
    error = asyncpg.CheckViolationError('no partition of relation "outbox" found for row')
    error.schema_name, error.constraint_name = "pipeline", None
    assert is_infrastructure(error)
    error.constraint_name = "backlog_is_whole"
    assert not is_infrastructure(error)
    error.schema_name, error.constraint_name = "public", None
    assert not is_infrastructure(error), "no region of that name: another attempt changes nothing"


def test_what_sqlalchemy_raises_may_belong_to_an_earlier_record() -> None:
    assert is_of_the_database(sqlalchemy.exc.PendingRollbackError())
    assert not is_infrastructure(sqlalchemy.exc.PendingRollbackError())


async def work(attempts: Retrying, *errors: Exception) -> int:
    """Raise the errors one after the other, then succeed; returns the number of tries."""
    left = list(errors)

    async def fail() -> None:
        if left:
            raise left.pop(0)

    await attempts(fail)
    return len(errors) - len(left) + 1


async def test_attempts_go_on_while_infrastructure_fails_and_tell_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    reasons: list[str] = []
    attempts = Retrying(
        "the work", "PostgreSQL at db:5432", unless=lambda: False, report=reasons.append
    )
    errors = [ConnectionResetError(f"try {n}") for n in range(1, 21)]
    assert await work(attempts, *errors) == 21
    said = "PostgreSQL at db:5432: ConnectionResetError: try"
    assert reasons == [f"{said} {n}" for n in range(1, 21)]
    assert pauses[0] < 1
    assert max(pauses) <= 5
    assert len(set(pauses[-8:])) > 1, "without jitter all come back at the same time"
    warnings = [line for line in caplog.records if line.levelno == logging.WARNING]
    assert [line.getMessage() for line in warnings] == [f"the work failed, trying again: {said} 1"]


def test_retries_are_frequent_after_short_outages_and_rare_in_long_ones() -> None:
    assert all(0.1 <= pause(1) <= 0.2 for _ in range(100))
    assert all(2.5 <= pause(failures) <= 5 for failures in (10, 10_000) for _ in range(100))
    assert len({pause(10) for _ in range(10)}) == 10


async def test_attempts_leave_nothing_to_the_collector() -> None:
    async def succeed() -> int:
        return 1

    attempts = Retrying("it", "a server", unless=lambda: False, report=lambda _: None)
    freed = weakref.ref(attempts)
    gc.disable()
    try:
        assert await attempts(succeed) == 1
        del attempts
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(111, "refused"), "PostgreSQL at db: ConnectionRefusedError"),
        (TimeoutError(), "PostgreSQL at db: TimeoutError"),
        (asyncpg.CannotConnectNowError("starting up"), "PostgreSQL at db: CannotConnectNow"),
        (OSError("Multiple exceptions: refused, refused"), "PostgreSQL at db: OSError"),
        # A Unix socket that is missing. The error has no name of a file.
        (FileNotFoundError(2, "No such file"), "PostgreSQL at db: FileNotFoundError"),
        (FileNotFoundError(2, "No such file", "rates.csv"), "FileNotFoundError"),
        (PermissionError(13, "denied", "/var/rates"), "PermissionError"),
        (OSError(errno.ENOSPC, "No space left on device"), "OSError"),
        (OSError(errno.EMFILE, "Too many open files"), "OSError"),
    ],
)
async def test_only_server_and_connection_errors_are_reported_with_the_servers_name(
    error: Exception, reason: str
) -> None:
    reasons: list[str] = []
    attempts = Retrying(
        "working", "PostgreSQL at db", unless=lambda: bool(reasons), report=reasons.append
    )

    async def work() -> None:
        if not reasons:
            raise error

    await attempts(work)
    (told,) = reasons
    assert told.startswith(reason)


async def test_a_fault_is_raised_at_once_and_tells_nobody() -> None:
    reasons: list[str] = []
    attempts = Retrying(
        "the work", "PostgreSQL at db:5432", unless=lambda: False, report=reasons.append
    )
    with pytest.raises(asyncpg.UniqueViolationError):
        await work(attempts, asyncpg.UniqueViolationError("twice"))
    assert reasons == []


async def test_an_outage_is_raised_when_there_is_no_more_reason_to_wait() -> None:
    attempts = Retrying(
        "the work", "PostgreSQL at db:5432", unless=lambda: True, report=lambda reason: None
    )
    with pytest.raises(ConnectionResetError):
        await work(attempts, ConnectionResetError())


def test_what_a_database_adds_to_its_message_is_not_told() -> None:
    error = asyncpg.CheckViolationError("new row violates\nDETAIL: Failing row contains (secret).")
    assert summarize_error(error) == "new row violates"
    assert summarize_error(ValueError("one\ntwo")) == "one\ntwo"


def test_values_quoted_by_a_database_are_visibly_left_out() -> None:
    unreadable = asyncpg.CharacterNotInRepertoireError(
        'invalid byte sequence for encoding "UTF8": 0x00'
    )
    assert summarize_error(unreadable) == "invalid byte sequence for encoding …"
    no_number = asyncpg.InvalidTextRepresentationError(
        'invalid input syntax for type integer: "secret"'
    )
    assert summarize_error(no_number) == "invalid input syntax for type integer …"
    assert summarize_error(asyncpg.DivisionByZeroError("division by zero")) == "division by zero"


def test_an_error_is_named_as_the_driver_has_raised_it() -> None:
    full = asyncpg.TooManyConnectionsError("sorry, too many clients already")
    assert (
        describe_error(wrapped(full)) == "TooManyConnectionsError: sorry, too many clients already"
    )
    assert describe_error(TimeoutError()) == "TimeoutError"
    assert describe_error(KafkaConnectionError("closed")) == "KafkaConnectionError: closed"


@pytest.mark.parametrize(
    ("error", "acl"),
    [
        (TopicAuthorizationFailedError("scans"), "Read on a topic that it reads, Write on one"),
        (GroupAuthorizationFailedError("parcels"), "Read on the group"),
        (TransactionalIdAuthorizationFailed("parcels-1"), "Write on the relay's transactional"),
        (ClusterAuthorizationFailedError(), "Write on a topic"),
    ],
)
def test_an_error_of_authorization_names_the_acl_that_is_missing(
    error: KafkaError, acl: str
) -> None:
    unexpected = KafkaError("Unexpected error during batch delivery")
    unexpected.__cause__ = error
    for one in (error, unexpected):
        text = describe_error(one)
        assert text.startswith(type(error).__name__)
        assert f"needs the ACL {acl}" in text
        assert "docs/security.md" in text


def test_brokers_that_are_not_reached_are_told_in_words() -> None:
    unreached = KafkaConnectionError("Unable to bootstrap from [('db', 9092, <AddressFamily...>)]")
    assert (
        summarize_error(unreached)
        == "no broker answers, or not by PIPELINE_KAFKA_SECURITY_PROTOCOL"
    )


def test_a_traceback_of_however_many_errors_is_written_without_values() -> None:
    error: Exception = asyncpg.CheckViolationError("new row violates\nDETAIL:  Failing (secret).")
    for number in range(3_000):
        another = RuntimeError(f"again {number}")
        another.__cause__, error = error, another
    text = format_traceback(error)
    assert "new row violates" in text
    assert "secret" not in text


def test_a_text_that_is_cut_shows_no_part_of_a_secret() -> None:
    text = summarize_error(ValueError(f"{'x' * 3_980} Bearer {'secret' * 1_000} and more"))
    assert len(text) <= 4_000
    assert "secret" not in text


def test_why_a_value_does_not_fit_is_told_without_the_value() -> None:
    text = "invalid input for query argument $1: 3000000000 (value out of int32 range)"
    assert summarize_error(asyncpg.DataError(text)) == (
        "invalid input for query argument $1 … (value out of int32 range)"
    )
