"""Log lines of the whole process: JSON for machines, readable ones on a terminal.

Fields are given by `extra={…}`: identities (topic, offset, message id), never payloads. `logging`
itself rejects those that are named like an attribute of its records, such as `name`. Everything
that a line is made of passes `redaction`, and has a bound.

A process that serves writes its lines from a thread of its own: a pipe that nothing reads blocks
only that thread. Then further lines are dropped, and counted.
"""

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from json import dumps, loads
from queue import SimpleQueue
from sys import exc_info
from typing import Any

from aiokafka.errors import KafkaError
from opentelemetry import trace

from onceward.errors import describe_error, format_traceback, summarize_error
from onceward.redaction import harmless, redact, redact_error

from . import metrics

log = logging.getLogger(__name__)

_LONGEST_MESSAGE, _LONGEST_FIELD, _LONGEST_STACK = 8_000, 1_000, 20_000
"""Characters of a line's parts, without the middle of longer ones. Until secrets are removed, four
times as many are kept: a secret that is cut in two is not found."""

_HANDLER = "pipeline"
_RESERVED = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
"""Attributes of a LogRecord, whose last one is there since Python 3.12."""
_OURS = {"timestamp", "level", "logger", "message", "exception", "stack", "trace_id", "span_id"}
_ENGINE = "onceward"
_QUOTING = (
    "opentelemetry.baggage.propagation",
    "opentelemetry.trace.propagation",
    "opentelemetry.trace.span",
)
"""Loggers whose warnings quote the headers of incoming messages, which may hold anything."""

_REPEATING = {"aiokafka", "asyncio", "asyncpg", "opentelemetry", "sqlalchemy", "urllib3"}
"""Libraries that repeat themselves, up to ten times a second, while a server is unavailable."""
_REPEATING_OURS = "onceward.servers.retrying"
_PERIOD = 60.0
_MOST_REMEMBERED = 1_000
"""Repeated messages that are remembered: with one more all are forgotten."""

_MOST_QUEUED = 10_000
"""Lines that wait to be written, at most."""
_STDERR = 2
_FLUSH_SECONDS = 1.0
"""Time that the end of the process waits for lines to be written."""


def configure(
    *, level: str, json: bool | None, loggers: Iterable[str] = (), queues: bool = False
) -> bool:
    """Send log lines to standard error: from `level` on those of the engine and of `loggers`.

    Of all others warnings and errors are sent: libraries log URLs and rows. `json=None` means JSON
    unless standard error is a terminal. `queues`: a thread writes them, and no caller ever waits.
    Returns whether they are JSON. Raises `ValueError` if there is no such level.
    """
    root = logging.getLogger()
    root.setLevel(level.upper())
    for name in (_ENGINE, *loggers):
        logging.getLogger(name).setLevel(root.level)
    root.setLevel(max(logging.WARNING, root.level))
    for name in _QUOTING:
        logging.getLogger(name).setLevel(logging.ERROR)
    for former in [handler for handler in root.handlers if handler.name == _HANDLER]:
        root.removeHandler(former)
        former.close()
    handler = _QueueHandler() if queues else _StreamHandler(sys.stderr)
    handler.name = _HANDLER
    handler.addFilter(_lower_if_retried)
    handler.addFilter(_Repetitions())
    is_json = not sys.stderr.isatty() if json is None else json
    handler.setFormatter(JsonLines() if is_json else _Readable())
    root.addHandler(handler)
    return is_json


def _lower_if_retried(record: logging.LogRecord) -> bool:
    """Make a warning of an error after which the Kafka client that logs it tries again.

    There are some whenever brokers start or a group is new. A partition that is blocked is
    reported anyway.
    """
    given = record.args if isinstance(record.args, tuple) else ()
    is_retried = any(isinstance(one, KafkaError) and one.retriable for one in given)
    if not is_retried or record.levelno != logging.ERROR:
        return True
    record.levelno, record.levelname = logging.WARNING, "WARNING"
    return logging.getLogger().isEnabledFor(record.levelno)


class _Handler(logging.Handler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Log which line is lost; the standard handler would print its arguments."""
        if record.name != __name__:
            why, place = type(exc_info()[1]).__name__, f"{record.pathname}:{record.lineno}"
            log.error("a line of %s is lost, %s: %s", record.name, place, why)


class _StreamHandler(_Handler, logging.StreamHandler[Any]):
    pass


class _QueueHandler(_Handler):
    """Formats records where they are logged, in their span; a thread writes their lines.

    A finalizer may log while the queue is used, in any thread. So it is a `SimpleQueue`, which is
    reentrant, and no lock is taken, of a metric or of `logging`: an interruption may leave it so.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._put: Callable[[str], None] = self._lines.put
        self._dropped = 0
        metrics.observe_log(lambda: self._dropped)
        threading.Thread(target=self._write_all, name="log", daemon=True).start()
        os.register_at_fork(after_in_child=self._write_directly)

    def handle(self, record: logging.LogRecord) -> bool:
        """Queue a line; drop it if there is no room."""
        passes = bool(self.filter(record))
        if passes and self._lines.qsize() >= _MOST_QUEUED:
            self._dropped += 1
        elif passes:
            try:
                self._put(f"{self.format(record)}\n")
            except Exception:
                self.handleError(record)
        return passes

    def flush(self) -> None:
        """Wait until all lines are written, for a second at most."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(_FLUSH_SECONDS)

    def close(self) -> None:
        """Flush. The thread ends with the process."""
        self.flush()
        super().close()

    def _write_all(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, str):
                self._write(line)
            else:
                line.set()

    def _write(self, line: str) -> None:
        """Write a line to the descriptor: the lock of `sys.stderr`, held while a write is blocked,
        would keep the interpreter from ending."""
        data = line.encode("utf-8", "backslashreplace")
        try:
            while data:
                data = data[os.write(_STDERR, data) :]
        except OSError:  # as to a closed pipe
            self._dropped += 1

    def _write_directly(self) -> None:
        # A forked process has no thread that writes.
        self._put = self._write
        self.flush = lambda: None  # type: ignore[method-assign]


class _Repetitions(logging.Filter):
    """Lets a message of a logger that repeats itself through once a minute, whatever its arguments.

    The next one that comes through says how many were left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[str, int, str], tuple[float, int]] = {}
        """Until when a message is left out, and how often it was."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] not in _REPEATING and record.name != _REPEATING_OURS:
            return True
        # Messages of asyncio have further lines, which differ each time.
        key = record.name, record.levelno, str(record.msg).partition("\n")[0][:_LONGEST_FIELD]
        now = time.monotonic()
        until, left_out = self._last.get(key, (now, 0))
        if now < until:
            self._last[key] = until, left_out + 1
            return False
        if len(self._last) >= _MOST_REMEMBERED:
            self._last.clear()
        self._last[key] = now + _PERIOD, 0
        if left_out:
            record.left_out = left_out
        return True


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object in a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "timestamp": _timestamp(record),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
        }
        return dumps(line | _fields(record) | _stacks(record))


class _Readable(logging.Formatter):
    """Formats a record as one readable line, with the traceback and the stack below it."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_timestamp(record)} {record.levelname:<7} {record.name}"
        fields = "".join(f" {name}={_text(value)}" for name, value in _fields(record).items())
        message = _message(record)
        # In one line, whatever a message's id contains.
        line = message if message.isprintable() else repr(message)[1:-1]
        stacks = map(harmless, _stacks(record).values())
        return "\n".join([f"{head}: {line}{fields}", *stacks])


def _stacks(record: logging.LogRecord) -> dict[str, str]:
    found = {}
    if record.exc_info:
        error = record.exc_info[1]
        found["exception"] = _bounded(format_traceback(error), _LONGEST_STACK) if error else ""
    if record.stack_info:
        found["stack"] = _bounded(redact(record.stack_info), _LONGEST_STACK)
    return found


def _message(record: logging.LogRecord) -> str:
    text, args = str(record.msg), record.args
    if isinstance(args, tuple):
        args = tuple(
            summarize_error(one) if isinstance(one, BaseException) else one for one in args
        )
    if args:
        text %= args
    if record.exc_info and (error := record.exc_info[1]):
        text = text.replace(repr(error), describe_error(error))  # as in asyncio's messages
    return _bounded(redact_error(_bounded(text, 4 * _LONGEST_MESSAGE)), _LONGEST_MESSAGE)


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
    """Return the value as JSON has it, without secrets; as text if its JSON is too long."""
    if isinstance(value, bytes):
        value = value[: 4 * _LONGEST_FIELD].decode("utf-8", "backslashreplace")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict | list | tuple):
        # As JSON text, where names of secret fields stand before their values.
        with suppress(TypeError, ValueError, RecursionError):
            value = redact(_bounded(dumps(value, default=_plain), 4 * _LONGEST_FIELD))
            if len(value) <= _LONGEST_FIELD:
                return loads(value, parse_constant=str)
    text = summarize_error(value) if isinstance(value, BaseException) else str(value)
    return _bounded(redact_error(_bounded(text, 4 * _LONGEST_FIELD)), _LONGEST_FIELD)


def _bounded(text: str, longest: int) -> str:
    """Return the text, without its middle if it is longer: the end of an error says what it is."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


def _timestamp(record: logging.LogRecord) -> str:
    return f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S.%f}Z"


def _text(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and text and " " not in text else repr(text)
