"""Log lines of the whole process: JSON for machines, readable ones on a terminal.

Fields are given by `extra={…}`. Give identities (topic, offset, message id), never payloads. All
that a line is made of passes `redaction`.
"""

import logging
import math
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from json import dumps, loads
from sys import exc_info
from typing import Any

from aiokafka.errors import KafkaError
from opentelemetry import trace
from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from pipeline.errors import describe_error, format_traceback, summarize_error
from pipeline.redaction import redact, redact_error

log = logging.getLogger(__name__)

_HANDLER = "pipeline"
_RESERVED = {*RESERVED_ATTRS, "taskName"}  # of a LogRecord; the last since Python 3.12
_OURS = {"timestamp", "level", "logger", "message", "exception", "stack", "trace_id", "span_id"}
_PACKAGES = ("pipeline", "operate", "archive", "claims", "effects", "page")
"""Those of the engine and beside it, whose loggers are heard as the service's own are."""
_QUOTING = (
    "opentelemetry.baggage.propagation",
    "opentelemetry.trace.propagation",
    "opentelemetry.trace.span",
)
"""These warn by quoting the headers of incoming messages, which are anybody's."""

# These repeat themselves, up to ten times a second, as long as a server is away.
_REPEATING = {"aiokafka", "asyncio", "asyncpg", "opentelemetry", "sqlalchemy", "urllib3"}
_REPEATING_OURS = "pipeline.servers.retrying"
_PERIOD = 60.0


def configure(*, level: str, json: bool | None, loggers: Iterable[str] = ()) -> None:
    """Send log lines to standard error: from `level` on those of the engine and of `loggers`.

    All others are heard from warnings on: libraries log URLs and rows. `json=None` means JSON
    unless standard error is a terminal. Raises `ValueError` if there is no such level.
    """
    root = logging.getLogger()
    root.setLevel(level.upper())
    for name in (*_PACKAGES, *loggers):
        logging.getLogger(name).setLevel(root.level)
    root.setLevel(max(logging.WARNING, root.level))
    for name in _QUOTING:
        logging.getLogger(name).setLevel(logging.ERROR)
    for former in [handler for handler in root.handlers if handler.name == _HANDLER]:
        root.removeHandler(former)
    handler = _Handler(sys.stderr)
    handler.name = _HANDLER
    handler.addFilter(_tried_again)
    handler.addFilter(_Repetitions())
    handler.setFormatter(_Json() if is_json(json) else _Readable())
    root.addHandler(handler)
    # The standard one raises when a field is named like an attribute of LogRecord, and a handler
    # must not fail for its log line. Loggers exist before this runs: a logger class is too late.
    logging.Logger.makeRecord = _make_record  # type: ignore[method-assign]


def is_json(json: bool | None) -> bool:
    """Whether lines are JSON where `configure` is told this."""
    return not sys.stderr.isatty() if json is None else json


def _tried_again(record: logging.LogRecord) -> bool:
    """Make a warning of an error after which the client of Kafka that logs it tries again.

    There are some whenever brokers start or a group is new. What stands still says so itself.
    """
    given = record.args if isinstance(record.args, tuple) else ()
    tried_again = any(isinstance(one, KafkaError) and one.retriable for one in given)
    if not tried_again or record.levelno != logging.ERROR:
        return True
    record.levelno, record.levelname = logging.WARNING, "WARNING"
    return logging.getLogger().isEnabledFor(record.levelno)


class _Handler(logging.StreamHandler[Any]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Say which line is lost; the standard one would show its arguments."""
        if record.name != __name__:
            why, place = type(exc_info()[1]).__name__, f"{record.pathname}:{record.lineno}"
            log.error("a line of %s is lost, %s: %s", record.name, place, why)


class _Repetitions(logging.Filter):
    """Lets a message through once a minute, and the next time tells how often it was left out.

    Only messages of loggers that are known to repeat themselves; whatever their arguments are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left_out: dict[tuple[str, int, str], int] = {}
        self._until: dict[tuple[str, int, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] not in _REPEATING and record.name != _REPEATING_OURS:
            return True
        # asyncio's go on for lines, with what is different each time.
        key = record.name, record.levelno, str(record.msg).partition("\n")[0]
        now = time.monotonic()
        if now < self._until.get(key, now):
            self._left_out[key] = self._left_out.get(key, 0) + 1
            return False
        self._until[key] = now + _PERIOD
        if left_out := self._left_out.pop(key, 0):
            record.left_out = left_out
        return True


class _Json(JsonFormatter):
    """One JSON object a line."""

    def formatException(self, ei: Any) -> str:
        return _traceback(ei[1])

    def formatStack(self, stack_info: str) -> str:
        return redact(stack_info)

    def add_fields(
        self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]
    ) -> None:
        log_data["timestamp"] = _timestamp(record)
        log_data["level"] = record.levelname
        log_data["logger"] = record.name
        log_data["message"] = _message(record)
        log_data |= _fields(record)
        for field, key in ("exception", "exc_info"), ("stack", "stack_info"):
            if key in message_dict:
                log_data[field] = message_dict[key]


class _Readable(logging.Formatter):
    """One line for people, and below it the traceback if there is one."""

    def formatException(self, ei: Any) -> str:
        return _traceback(ei[1])

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_timestamp(record)} {record.levelname:<7} {record.name}"
        fields = "".join(f" {name}={_text(value)}" for name, value in _fields(record).items())
        lines = [f"{head}: {_printable(_message(record))}{fields}"]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        if record.stack_info:
            lines.append(redact(record.stack_info))
        return "\n".join(lines)


def _traceback(error: BaseException | None) -> str:
    return "" if error is None else format_traceback(error)


def _message(record: logging.LogRecord) -> str:
    text, args = str(record.msg), record.args
    if isinstance(args, tuple):
        args = tuple(
            summarize_error(one) if isinstance(one, BaseException) else one for one in args
        )
    if args:
        text %= args
    if record.exc_info and (error := record.exc_info[1]):
        text = text.replace(repr(error), describe_error(error))  # as asyncio has it of a task
    return redact_error(text)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Return what was given as `extra`, and the current span."""
    fields = {
        f"{name}_" if name in _OURS else name: _plain(value)
        for name, value in vars(record).items()
        if name not in _RESERVED
    }
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        fields["trace_id"] = trace.format_trace_id(span.trace_id)
        fields["span_id"] = trace.format_span_id(span.span_id)
    return fields


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict | list | tuple):
        # As JSON, where names of secret fields stand before their values.
        with suppress(TypeError, ValueError, RecursionError):
            text = dumps(value, default=_plain)
            return loads(redact(text), parse_constant=str)
    return redact_error(summarize_error(value) if isinstance(value, BaseException) else str(value))


def _timestamp(record: logging.LogRecord) -> str:
    return f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S.%f}Z"


def _text(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and text and " " not in text else repr(text)


def _printable(text: str) -> str:
    """Keep one line one line, whatever a message's id contains."""
    return text if text.isprintable() else repr(text)[1:-1]


_standard_make_record = logging.Logger.makeRecord


def _make_record(
    self: logging.Logger,
    name: str,
    level: int,
    fn: str,
    lno: int,
    msg: object,
    args: Any,
    exc_info: Any,
    func: str | None = None,
    extra: Mapping[str, object] | None = None,
    sinfo: str | None = None,
) -> logging.LogRecord:
    safe = {
        f"{key}_" if key in _RESERVED or key in _OURS else key: value
        for key, value in (extra or {}).items()
    }
    return _standard_make_record(self, name, level, fn, lno, msg, args, exc_info, func, safe, sinfo)
