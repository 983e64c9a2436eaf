"""The metrics of a service: every instrument that its modules make, and its name in Prometheus."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
from opentelemetry.sdk.metrics import MeterProvider as RealProvider
from prometheus_client import REGISTRY

Made = tuple[str, str, str, str, Callable[[], None]]
"""Kind, name, unit and description of an instrument, and what records a value with it."""


class Recorder(MeterProvider):
    """Makes the SDK's instruments, and keeps what was made."""

    def __init__(self) -> None:
        self.real = RealProvider([PrometheusMetricReader()])
        self.made: list[Made] = []

    def get_meter(self, name: str, *options: Any, **named: Any) -> Meter:
        """Return a meter whose instruments are kept."""
        real = self.real.get_meter(name)
        for method in [one for one in dir(real) if one.startswith("create_")]:
            setattr(real, method, self._recorded(method, getattr(real, method)))
        return real

    def _recorded(self, method: str, create: Callable[..., Any]) -> Callable[..., Any]:
        kind = method.removeprefix("create_").removeprefix("observable_").replace("_", " ")

        def recorded(name: str, *given: Any, **options: Any) -> Any:
            if "observable" not in method:
                (unit, description) = _described(given, options)
                instrument = create(name, unit, description, **options)
                record = getattr(
                    instrument, {"gauge": "set", "histogram": "record"}.get(kind, "add")
                )
                self.made.append((kind, name, unit, description, lambda: record(1)))
                return instrument
            (_, *rest) = given
            (unit, description) = _described(rest, options)
            values: list[Observation] = []

            def observe(_: CallbackOptions) -> Sequence[Observation]:
                return values

            show = lambda: values.append(Observation(1))  # noqa: E731
            self.made.append((kind, name, unit, description, show))
            return create(name, [observe], unit, description)

        return recorded


def _described(given: Sequence[Any], options: dict[str, Any]) -> tuple[str, str]:
    unit, description = (*given, "", "")[:2]
    return options.pop("unit", unit), options.pop("description", description)


def _families() -> set[str]:
    return {
        f"{one.name}_total" if one.type == "counter" else one.name
        for one in REGISTRY.collect()
        if one.samples and one.type != "info"  # of the resource, which comes with the first value
    }


def table(recorder: Recorder, alerts: Mapping[str, str]) -> str:
    """Return each metric by its names, with its kind, unit, alerts and meaning.

    `alerts` has the expression of each alert.
    """
    rows = [("metric", "kind", "alerts", "meaning"), ("---",) * 4]
    known = _families()
    found = []
    for kind, name, unit, description, record in recorder.made:
        record()
        if not (new := next(iter(_families() - known), None)):
            continue  # one of a library, under the same name
        known.add(new)
        uses = re.compile(rf"\b{new}(_bucket|_count|_sum)?\b")
        links = (
            f"[{alert}](runbook.md#{alert.lower()})"
            for alert, expression in alerts.items()
            if uses.search(expression)
        )
        names = f"`{new}`<br>`{name}`"
        found.append((names, f"{kind}, `{unit}`", ", ".join(links), description))
    rows += sorted(found)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
