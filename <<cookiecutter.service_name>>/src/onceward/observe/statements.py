"""Statements of SQL: how long each one takes, and a span for each one that a handler sends."""

import re
from time import perf_counter

from opentelemetry import metrics, trace
from opentelemetry.semconv.attributes import db_attributes, error_attributes
from opentelemetry.semconv.metrics import db_metrics
from opentelemetry.util.types import AttributeValue

from . import traces
from .buffer import record

_POSTGRESQL = db_attributes.DbSystemNameValues.POSTGRESQL.value
# None of these backtracks, which takes exponential time in a long text.
_EDGE = re.compile(r"/\*|\*/")
_QUOTED = re.compile(
    # Each begins with a literal, which is found fast. A constant is continued in the next line, and
    # `a$b$` is a name.
    r"'(?<=E')(?<![\w$]E')(?:\\.|[^'\\]|'(?:\s|--[^\n\r]*+)*+')*+(?:'|\Z)|'[^']*+(?:'|\Z)"
    r"|\"[^\"]*+(?:\"|\Z)|\$(?<![\w$]\$)(?:[^\W\d]\w*+)?\$|--[^\n\r]*+|/\*",
    re.IGNORECASE | re.DOTALL,
)
_FIRST_WORD = re.compile(
    r"[\s;]*+(BEGIN|COMMIT|COPY|DELETE|INSERT|LOCK|MERGE|ROLLBACK|SAVEPOINT|SELECT|UPDATE|WITH)\b",
    re.IGNORECASE,
)
"""Others are rare, and summarized as `OTHER`."""

_duration = metrics.get_meter("pipeline").create_histogram(
    db_metrics.DB_CLIENT_OPERATION_DURATION,
    "s",
    "Duration of a statement, by its first word.",
    # The convention's own boundaries.
    explicit_bucket_boundaries_advisory=[0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0],
)


class Statement:
    """A statement that begins when this object is made, and is recorded when it ends.

    It is a span where a recording span is current, as in a handler; in the engine's own
    transactions none is.
    """

    __slots__ = ("_begun", "_is_timed", "_span", "_text")

    def __init__(self, text: str, *, has_values: bool = False, is_timed: bool = True) -> None:
        """`text` is shown in the span if its values are apart from it. `is_timed` is false if
        `executed` is called for the statement as well."""
        self._text = text
        self._is_timed = is_timed
        self._span = None
        if trace.get_current_span().is_recording():
            attributes = _attributes(text)
            if has_values:
                attributes[db_attributes.DB_QUERY_TEXT] = text
            name = str(attributes[db_attributes.DB_QUERY_SUMMARY])
            self._span = traces.start_span(name, trace.SpanKind.CLIENT, attributes)
        self._begun = perf_counter()

    def end(self, error: BaseException | None = None) -> None:
        """Record it, with its error if it has failed."""
        if self._is_timed:
            executed(self._text, perf_counter() - self._begun, error)
        if self._span is not None:
            if isinstance(error, Exception):
                self._span.set_attribute(error_attributes.ERROR_TYPE, _type_of(error))
                self._span.set_status(trace.StatusCode.ERROR)
            self._span.end()


def executed(text: str, seconds: float, error: BaseException | None) -> None:
    """Record how long a statement took."""
    attributes = _attributes(text)
    if error is not None:
        attributes[error_attributes.ERROR_TYPE] = _type_of(error)
    record(_duration.record, seconds, attributes)


def _attributes(text: str) -> dict[str, AttributeValue]:
    return {
        db_attributes.DB_SYSTEM_NAME: _POSTGRESQL,
        db_attributes.DB_QUERY_SUMMARY: first_word_of(text),
    }


def first_word_of(text: str) -> str:
    """Return the first word of a statement, or `OTHER`."""
    word = _FIRST_WORD.match(text) or _FIRST_WORD.match(code_of(text))
    return word[1].upper() if word else "OTHER"


def code_of(text: str) -> str:
    """Return statements with a space for each comment and quoted part."""
    parts, place = [], 0
    while found := _QUOTED.search(text, place):
        parts.append(text[place : found.start()])
        place = found.end()
        if (quote := found[0]) == "/*":
            place = _end_of_comment(text, place)
        elif quote[0] == "$":
            end = text.find(quote, place)
            place = len(text) if end < 0 else end + len(quote)
    return " ".join((*parts, text[place:]))


def _end_of_comment(text: str, place: int) -> int:
    """Return where the comment ends that begins before a place: in PostgreSQL they nest."""
    depth = 1
    for edge in _EDGE.finditer(text, place):
        depth += 1 if edge[0] == "/*" else -1
        if not depth:
            return edge.end()
    return len(text)


def _type_of(error: BaseException) -> str:
    """Return the server's code of the error, or the name of its class."""
    return getattr(error, "sqlstate", None) or type(error).__qualname__
