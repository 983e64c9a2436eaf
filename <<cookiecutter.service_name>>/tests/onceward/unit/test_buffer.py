"""Measurements are recorded many at once, and none is missing when they are collected."""

from opentelemetry.context import Context, attach, detach, get_current, set_value
from opentelemetry.metrics import CallbackOptions

from onceward.observe import buffer, metrics

Call = tuple[float, object, Context | None]


def test_measurements_are_recorded_in_their_order_and_context() -> None:
    buffer.flush()
    calls: list[Call] = []
    before = get_current()
    buffer.record(lambda *call: calls.append(call), 1, {"of": "first"})
    token = attach(set_value("traced", "yes"))
    within = get_current()
    buffer.record(lambda *call: calls.append(call), 2)
    detach(token)
    assert calls == []
    buffer.flush()
    assert calls == [(1, {"of": "first"}, before), (2, None, within)]
    buffer.flush()
    assert len(calls) == 2


def test_no_more_than_64_measurements_wait() -> None:
    buffer.flush()
    values: list[float] = []
    for value in range(130):
        buffer.record(lambda value, *_: values.append(value), value)
    assert values == [*range(128)]
    buffer.flush()
    assert values == [*range(130)]


def test_what_is_collected_is_complete() -> None:
    values: list[float] = []
    buffer.record(lambda value, *_: values.append(value), 1)
    metrics._ready.observe(CallbackOptions())
    assert values == [1]
