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
COMMENTS = r"(?>\s|--[^\n]*|/\*(?s:.*?)\*/)*+"
"""What may precede a statement's first word. It does not backtrack, which takes exponential time in
a long comment."""
_FIRST_WORD = re.compile(
    COMMENTS
    + r"(BEGIN|COMMIT|COPY|DELETE|INSERT|LOCK|MERGE|ROLLBACK|SAVEPOINT|SELECT|UPDATE|WITH)\b",
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
    match = _FIRST_WORD.match(text)
    return {
        db_attributes.DB_SYSTEM_NAME: _POSTGRESQL,
        db_attributes.DB_QUERY_SUMMARY: match[1].upper() if match else "OTHER",
    }


def _type_of(error: BaseException) -> str:
    """Return the server's code of the error, or the name of its class."""
    return getattr(error, "sqlstate", None) or type(error).__qualname__
