import io
import json
import logging
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest
import sqlalchemy.exc
import typer
from aiokafka.errors import GroupAuthorizationFailedError, GroupCoordinatorNotAvailableError
from asyncpg.exceptions._base import DataError as ArgumentError
from opentelemetry import propagate, trace
from pydantic import BaseModel
from sqlalchemy.dialects.postgresql.asyncpg import AsyncAdapt_asyncpg_dbapi

from onceward import errors
from onceward.cli.terminal import run_to_end, serving
from onceward.observe import logs
from onceward.redaction import Redactor
from onceward.relay.rejected import _log_dead
from onceward.relay.rejections import Rejection

from tests.servers.waiting import PATIENCE

RFC3339 = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"
log = logging.getLogger("onceward.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr(logs, "sys", SimpleNamespace(stderr=stream))
    return stream


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(logs, "sys", SimpleNamespace(stderr=stream))
    return stream


def only_line(stream: io.StringIO) -> dict[str, Any]:
    (line,) = stream.getvalue().splitlines()

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    found: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return found


def test_a_line_is_json_with_its_fields(stderr: io.StringIO) -> None:
    logs.configure(level="INFO", json=None)
    log.info("applied %d", 3, extra={"topic": "scans", "partition": 3, "key": b"p-\xff"})
    line = only_line(stderr)
    assert re.fullmatch(RFC3339, line.pop("timestamp"))
    assert line == {
        "level": "INFO",
        "logger": "onceward.test",
        "message": "applied 3",
        "topic": "scans",
        "partition": 3,
        "key": "p-\\xff",
    }


def test_a_terminal_gets_a_readable_line(terminal: Terminal) -> None:
    logs.configure(level="INFO", json=None)
    log.warning("stuck", extra={"topic": "scans", "reason": "two words", "empty": ""})
    head, _, rest = terminal.getvalue().partition(" ")
    assert re.fullmatch(RFC3339, head)
    assert rest == "WARNING onceward.test: stuck topic=scans reason='two words' empty=''\n"


def test_the_form_can_be_chosen_whatever_standard_error_is(terminal: Terminal) -> None:
    logs.configure(level="INFO", json=True)
    log.info("hello")
    assert only_line(terminal)["message"] == "hello"


def test_a_message_cannot_forge_a_line_on_the_terminal(terminal: Terminal) -> None:
    logs.configure(level="INFO", json=None)
    log.info("id %s", "a\n2026-01-01 forged\x1b[31m", extra={"key": "b\r\nforged"})
    (line,) = terminal.getvalue().splitlines()
    assert "\x1b" not in line


def test_a_traceback_cannot_control_the_terminal(terminal: Terminal) -> None:
    logs.configure(level="INFO", json=None)
    try:
        raise LookupError("no parcel \x1b[2J\x9b2J\u202e")
    except LookupError:
        log.exception("failed", stack_info=True)
    written = terminal.getvalue()
    assert r"LookupError: no parcel \u001b[2J\u009b2J\u202e" in written
    assert not {"\x1b", "\x9b", "\u202e"} & {*written}


@pytest.mark.parametrize("json", [True, False])
def test_a_line_carries_the_current_span(stderr: io.StringIO, json: bool) -> None:
    logs.configure(level="INFO", json=json)
    span = trace.NonRecordingSpan(trace.SpanContext(0xAB, 0xCD, is_remote=True))
    with trace.use_span(span):
        log.info("inside")
    assert f"{'0' * 30}ab" in stderr.getvalue()
    assert f"{'0' * 14}cd" in stderr.getvalue()


@pytest.mark.parametrize("json", [True, False])
def test_an_exception_is_told_with_its_traceback(stderr: io.StringIO, json: bool) -> None:
    logs.configure(level="INFO", json=json)
    try:
        raise LookupError("no parcel p-1")
    except LookupError:
        log.exception("handler failed")
    text = only_line(stderr)["exception"] if json else stderr.getvalue()
    assert "Traceback (most recent call last)" in text
    assert "LookupError: no parcel p-1" in text


@pytest.mark.parametrize("json", [True, False])
def test_the_rows_that_postgresql_quotes_are_left_out(stderr: io.StringIO, json: bool) -> None:
    logs.configure(level="INFO", json=json)
    secret = "-".join(["secret", "iban"])
    try:
        raise ValueError(f"null value in column\nDETAIL: Failing row contains ({secret}).")
    except ValueError:
        log.exception("stands still")
    assert "null value in column" in stderr.getvalue()
    assert secret not in stderr.getvalue()


class Transfer(BaseModel):
    """A payload."""

    amount: int


KINDS = ["validation", "argument", "syntax", "row"]


def fail(kind: str, secret: str) -> None:
    """Raise an error that quotes a secret of the payload."""
    if kind == "validation":
        Transfer.model_validate({"amount": secret})
    if kind == "argument":
        raise ArgumentError(f"null value in column $1: {secret!r} (expected int)")
    if kind == "syntax":
        raise asyncpg.InvalidTextRepresentationError(f'null value in column "{secret}\nis wrong')
    row = asyncpg.NotNullViolationError("null value in column")
    row.detail = f"Failing row contains (7, first\n{secret})."
    if kind == "row":
        raise row
    if kind == "translated":
        text = f'invalid input syntax for type integer: "{secret}"'
        error = asyncpg.InvalidTextRepresentationError(text)
        raise AsyncAdapt_asyncpg_dbapi.Error(text, error) from error  # type: ignore[no-untyped-call]
    statement = sqlalchemy.exc.IntegrityError("INSERT …", (secret,), row)
    statement.__cause__ = row
    raise statement


@pytest.mark.parametrize("json", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "translated", "statement"])
@pytest.mark.parametrize("way", ["itself", "cause", "context", "group"])
def test_no_error_of_a_chain_quotes_a_payload(
    stderr: io.StringIO, json: bool, kind: str, way: str
) -> None:
    logs.configure(level="INFO", json=json)
    secret = "-".join(["secret", "iban"])
    try:
        try:
            fail(kind, secret)
        except Exception as error:
            if way == "itself":
                raise
            if way == "cause":
                raise RuntimeError("the handler") from error
            if way == "context":
                raise RuntimeError("the handler")  # noqa: B904 (that is what is tried)
            raise ExceptionGroup("the handler", [ValueError("another"), error]) from None
    except Exception:
        log.exception("stands still")
    text = stderr.getvalue()
    assert secret not in text
    said = {"validation": "amount: Input should be", "translated": "for type integer"}
    assert said.get(kind, "null value in column") in text
    assert "in fail\n" in text or "in fail\\n" in text, "the way there is told"


@pytest.mark.parametrize("json", [True, False])
@pytest.mark.parametrize("name", [*sorted(logs._OURS - logs._RESERVED), "_private"])
def test_a_field_may_be_named_like_one_of_every_line(
    stderr: io.StringIO, name: str, json: bool
) -> None:
    logs.configure(level="INFO", json=json)
    log.info("hello", extra={name: "given"})
    assert "hello" in stderr.getvalue()
    assert "given" in stderr.getvalue()
    assert "onceward.test" in stderr.getvalue()


class Unprintable:
    """What can't be written."""

    def __str__(self) -> str:
        raise ArithmeticError

    __repr__ = __str__


@pytest.mark.parametrize("json", [True, False])
def test_values_of_any_kind_are_written(stderr: io.StringIO, json: bool) -> None:
    values = {"nan": math.nan, "set": {1}, "error": KeyError("x"), "odd": "\ud800\u2028"}
    logs.configure(level="INFO", json=json)
    log.info("hello", extra=values)
    log.info({"not": "a text"})
    assert len(stderr.getvalue().splitlines()) == 2
    assert "Logging error" not in stderr.getvalue()
    log.info("bye", extra={"unprintable": Unprintable()})  # lost at worst; it does not raise


LONG = 200_000 * "x"


def fail_at_length() -> None:
    raise LookupError(f"it begins {LONG} and ends")


@pytest.mark.parametrize("json", [True, False])
def test_a_line_has_a_bound_whatever_it_is_made_of(stderr: io.StringIO, json: bool) -> None:
    logs.configure(level="INFO", json=json)
    fields = {"id": LONG, "key": LONG.encode(), "all": [LONG, {"x": LONG}], "error": KeyError(LONG)}
    event = {"topic": "scans", "event_id": LONG, "type": LONG, "key": LONG.encode()}
    try:
        fail_at_length()
    except LookupError as error:
        log.exception("it begins %s and ends", LONG, extra=fields)
        logging.getLogger("asyncio").error(f"it begins {error!r}", exc_info=error)  # noqa: G004
    logging.getLogger("parcels.handlers").warning("it begins %s and ends", LONG)
    _log_dead(event | {"traceparent": None}, Rejection("too large", "it is too large and ends"))
    if not json:
        assert len(stderr.getvalue()) < 4 * 32_768
        return
    assert max(map(len, stderr.getvalue().splitlines())) < 32_768
    first, second, third, fourth = lines(stderr)
    for line in (first, third):
        assert line["message"].startswith("it begins x")
        assert line["message"].endswith("x and ends")
    for line in (first, second):
        assert "in fail_at_length" in line["exception"]
        assert line["exception"].endswith("x and ends")
    assert fourth["message"].startswith("relay: event x")
    assert fourth["message"].endswith("it is too large and ends")


def test_a_secret_where_a_line_is_cut_is_not_written(stderr: io.StringIO) -> None:
    logs.configure(level="INFO", json=True)
    message, field = (f"{LONG} Bearer {10 * 's3cr3t'} {end * 'x'}" for end in (3_970, 470))
    log.info("%s", message, extra={"header": field})
    assert "s3cr3t" not in stderr.getvalue()


def test_secrets_are_removed_from_little_more_than_is_written(
    stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def redact(text: str) -> str:
        lengths.append(len(text))
        return text

    monkeypatch.setattr(logs, "redact", redact)
    monkeypatch.setattr(logs, "redact_error", redact)
    logs.configure(level="INFO", json=True)
    log.info("%s", LONG, extra={"id": LONG, "key": LONG.encode(), "all": [LONG]})
    assert max(lengths) < 32_768


def test_a_field_keeps_its_form_unless_it_is_too_long(stderr: io.StringIO) -> None:
    logs.configure(level="INFO", json=True)
    log.info("hello", extra={"order": {"id": 1, "lines": ["a", 2]}, "long": {"id": LONG}})
    assert only_line(stderr)["order"] == {"id": 1, "lines": ["a", 2]}
    assert only_line(stderr)["long"].startswith('{"id": "xxx')


def test_a_level_keeps_lower_lines_away(stderr: io.StringIO) -> None:
    logs.configure(level="warning", json=True)
    log.info("not this")
    log.warning("this")
    assert only_line(stderr)["message"] == "this"


def test_libraries_are_heard_from_warnings_on(stderr: io.StringIO) -> None:
    logs.configure(level="DEBUG", json=True)
    for library in ("aiokafka.consumer.fetcher", "sqlalchemy.engine.Engine", "httpx2", "any.other"):
        logging.getLogger(library).info("chatter")
    logging.getLogger("any.other").warning("this")
    assert only_line(stderr)["message"] == "this"


def test_the_log_level_applies_to_service_engine_packages_and_named_loggers(
    stderr: io.StringIO,
) -> None:
    logs.configure(level="DEBUG", json=True, loggers=["parcels", "sqlalchemy.engine"])
    ours = [
        "onceward.relay.relay",
        "onceward.archive.days",
        "onceward.claims",
        "onceward.debezium.following",
        "onceward.effects",
        "onceward.history.timeline",
        "onceward.http",
        "onceward.http_server.server",
        "onceward.page.gate",
        "parcels.handlers",
    ]
    for name in (*ours, "sqlalchemy.engine.Engine", "sqlalchemy.pool", "parcelsize"):
        logging.getLogger(name).debug("this")
    heard = [line["logger"] for line in lines(stderr)]
    assert heard == [*ours, "sqlalchemy.engine.Engine"]


@pytest.mark.parametrize("json", [True, False])
def test_no_part_of_a_line_holds_a_secret(
    stderr: io.StringIO, json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "-".join(["correct", "horse's", '"staple"'])
    redactor = Redactor()
    redactor.learn({"PASSWORD": secret})
    for module in (logs, errors):
        for name in {"redact", "redact_error"} & set(vars(module)):
            monkeypatch.setattr(module, name, getattr(redactor, name))
    logs.configure(level="INFO", json=json)
    fields: dict[str, object] = {"plain": secret, "bytes": secret.encode()}
    fields |= {"list": [{secret: secret}], "error": KeyError(secret)}
    fields |= {"other": SimpleNamespace(one=secret)}
    try:
        raise LookupError(f"no {secret}") from RuntimeError(secret)
    except LookupError:
        log.exception("sent %s", secret, extra=fields, stack_info=True)
    log.info({"not": secret})
    assert "horse" not in stderr.getvalue()
    assert "Logging error" not in stderr.getvalue()


@pytest.mark.parametrize("json", [True, False])
def test_an_error_in_a_message_is_logged_without_quoted_values(
    stderr: io.StringIO, json: bool
) -> None:
    logs.configure(level="INFO", json=json)
    secret = "-".join(["secret", "iban"])
    for kind in KINDS:
        try:
            fail(kind, secret)
        except Exception as error:
            log.warning("it was %s, %r", error, error)
            log.warning(f"it was {error!r}", exc_info=error)  # noqa: G004 (as asyncio does)
    assert secret not in stderr.getvalue()
    assert "Failing row" not in stderr.getvalue()


def test_a_line_that_cannot_be_written_is_missed_and_not_shown_piecemeal(
    stderr: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(level="INFO", json=True)
    log.info("%s", "secret", extra={"unprintable": Unprintable()})
    line = only_line(stderr)
    assert line["message"].startswith("a line of onceward.test is lost, ")
    assert line["message"].endswith("ArithmeticError")
    assert "secret" not in str(capsys.readouterr())


def test_headers_that_cannot_be_read_are_not_quoted(stderr: io.StringIO) -> None:
    logs.configure(level="INFO", json=True)
    headers = {
        "traceparent": f"00-{'1' * 32}-{'2' * 16}-00",
        "tracestate": "SECRET",
        "baggage": "SECRET",
    }
    propagate.extract(headers)
    assert stderr.getvalue() == ""


def test_libraries_keep_to_a_higher_level_too(stderr: io.StringIO) -> None:
    logs.configure(level="ERROR", json=True)
    logging.getLogger("aiokafka").warning("chatter")
    assert stderr.getvalue() == ""


def test_configuring_again_replaces_the_former_lines(stderr: io.StringIO) -> None:
    logs.configure(level="INFO", json=True)
    logs.configure(level="INFO", json=True)
    log.info("once")
    assert only_line(stderr)["message"] == "once"


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="Unknown level: 'LOUD'"):
        logs.configure(level="loud", json=True)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(logs, "time", clock)
    return clock


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_what_a_library_repeats_is_told_once_a_minute_and_counted(
    stderr: io.StringIO, clock: Clock
) -> None:
    logs.configure(level="INFO", json=None)
    library = logging.getLogger("aiokafka.consumer.fetcher")
    for number in range(61):
        library.error("no answer from %s: %s", "node 1", f"try {number}")
        clock.now += 1
    first, second = lines(stderr)
    assert first["message"] == "no answer from node 1: try 0"
    assert "left_out" not in first
    assert second["message"] == "no answer from node 1: try 60"
    assert second["left_out"] == 59


def test_any_number_of_messages_of_any_length_is_remembered_within_bounds() -> None:
    repetitions = logs._Repetitions()
    for number in range(3 * logs._MOST_REMEMBERED):
        made = logging.makeLogRecord({"name": "asyncio", "msg": f"{number} {'x' * 10_000}"})
        assert repetitions.filter(made)
        assert not repetitions.filter(made)
    assert len(repetitions._last) <= logs._MOST_REMEMBERED
    assert max(len(text) for *_, text in repetitions._last) <= logs._LONGEST_FIELD


def test_another_message_or_level_or_logger_is_told_at_once(
    stderr: io.StringIO, clock: Clock
) -> None:
    logs.configure(level="INFO", json=None)
    for name in "aiokafka", "sqlalchemy.pool":
        for _ in range(3):
            logging.getLogger(name).error("lost")
            logging.getLogger(name).warning("lost")
            logging.getLogger(name).warning("found")
    assert len(lines(stderr)) == 6


def test_what_nobody_has_retrieved_is_one_message_however_it_goes_on(
    stderr: io.StringIO, clock: Clock
) -> None:
    logs.configure(level="INFO", json=None)
    for number in range(3):
        message = f"Task exception was never retrieved\nfuture: <Task-{number}>"
        logging.getLogger("asyncio").error(message)
    assert len(lines(stderr)) == 1


@pytest.mark.parametrize(
    ("error", "level"),
    [
        pytest.param(GroupCoordinatorNotAvailableError(), "WARNING", id="it will be asked again"),
        pytest.param(GroupAuthorizationFailedError("group"), "ERROR", id="nobody asks again"),
        pytest.param(ValueError("broken"), "ERROR", id="no error of Kafka's"),
    ],
)
def test_what_a_client_of_kafka_tries_again_is_no_error(
    stderr: io.StringIO, error: Exception, level: str
) -> None:
    logs.configure(level="INFO", json=None)
    library = logging.getLogger("aiokafka.consumer.group_coordinator")
    library.error("Group Coordinator Request failed: %s", error)
    assert [line["level"] for line in lines(stderr)] == [level]
    logs.configure(level="ERROR", json=None)
    library.error("Group Coordinator Request failed: %s", error)
    assert len(lines(stderr)) == (1 if level == "WARNING" else 2)


@pytest.mark.parametrize("name", ["onceward.consume.reader", "parcels.handlers", "aiokafkas"])
def test_what_the_service_says_itself_is_always_told(
    stderr: io.StringIO, clock: Clock, name: str
) -> None:
    logs.configure(level="INFO", json=None)
    for _ in range(3):
        logging.getLogger(name).warning("applied")
    assert len(lines(stderr)) == 3


def test_at_process_end_the_log_form_follows_the_variable_however_spelt(
    stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPELINE_LOG_JSON", raising=False)
    monkeypatch.setenv("pipeline_log_json", "false")
    with serving() as report:
        report("that is\n  all")
    assert stderr.getvalue().count("Z CRITICAL onceward.cli.terminal: ") == 2


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), ValueError("wrong")])
def test_what_ends_a_process_that_serves_is_logged_whatever_it_is(
    stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setenv("PIPELINE_LOG_JSON", "true")
    with pytest.raises((typer.Exit, KeyboardInterrupt)), serving():
        raise error
    assert type(error).__name__ in only_line(stderr)["exception"]


def test_a_system_error_that_ends_a_process_is_logged_with_place(
    stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setenv("PIPELINE_LOG_JSON", "true")
    with pytest.raises(typer.Exit), serving() as tell:
        run_to_end(fail(), tell)
    line = only_line(stderr)
    assert "in fail" in line["exception"]
    assert line["message"] == "OSError: [Errno 24] Too many open files"


WRITES = """
import logging
from prometheus_client import generate_latest
from onceward.observe import exporters, logs

exporters.configure(service_name="parcel-tracker", otlp_endpoint=None, sample_ratio=1)
logs.configure(level="INFO", json=False, queues=True)
for number in range({lines}):
    logging.getLogger("onceward").info("%s %s", 1_000 * "x", number)
print(generate_latest().decode())
"""


LOCKED = """
import logging, threading
from onceward.observe import logs

logs.configure(level="INFO", json=False, queues=True)
(handler,) = logging.getLogger().handlers
handler.acquire()  # as does a call that is interrupted before it releases it
log = logging.getLogger("onceward")
thread = threading.Thread(target=log.info, args=("all is well",), daemon=True)
thread.start()
thread.join(10)
"""


def test_an_interrupted_thread_leaves_no_lock_that_others_wait_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOCKED],
        env=os.environ | {"PYTHONPATH": str(Path(logs.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert "all is well" in done.stderr


@pytest.mark.parametrize(("lines", "is_any_dropped"), [(1_000, False), (30_000, True)])
def test_an_unread_pipe_blocks_nothing_and_dropped_lines_are_counted(
    lines: int, is_any_dropped: bool
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITES.format(lines=lines)],
        env=os.environ | {"PYTHONPATH": str(Path(logs.__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            found = re.search(
                r"^pipeline_log_dropped_total\S* (\S+)$", process.stdout.read(), re.MULTILINE
            )
            assert found
            assert (float(found[1]) > 0) is is_any_dropped
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def test_all_lines_are_written_in_order_before_the_process_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITES.format(lines=1_000)],
        env=os.environ | {"PYTHONPATH": str(Path(logs.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    numbers = [line.rpartition(" ")[2] for line in done.stderr.splitlines()]
    assert numbers == [str(number) for number in range(1_000)]
