"""Capacity: from messages a day to processes, partitions, connections, disk and WAL.

    python -m benchmarks.capacity 10_000_000 [--payload 250] [--peak 10] [--remembered 8] [--kept 2]

In the root of the repository. The constants are rounded from what `make bench` measures on the
machine of `docs/performance.md`; a test holds them against the report of the run whose plots are
kept there. Give your own rate with --rate.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, log
from statistics import median
from typing import Any

MESSAGES_A_SECOND = 8_500
"""Of one process with an ORM handler, with PostgreSQL and Kafka on the same two cores."""
HEADROOM = 0.5
"""Share of that to plan with: the rest catches up after an outage."""
MARKER_BYTES = 230
"""Of a marker in the inbox, with its index."""
EVENT_BYTES = 230
"""Of an event in the outbox beside its payload, with the indexes."""
WAL_BYTES = 850
"""Of a message that changes a row and publishes an event, beside the event's payload."""
FILTER_BYTES = -log(0.001) / log(2) ** 2 / 8
"""Of a filter, for each marker that it can hold: 1.8. It and the next two are the engine's."""
FILTER_ROOM = 16
"""Times the markers of its first day that a filter holds, at most."""
FILTER_AT_LEAST = 65_536
"""Markers that the smallest filter holds."""
FILTER_MEBIBYTES = 128
"""Memory for filters (PIPELINE_INBOX_FILTER_MEBIBYTES); one takes half of it at most."""
FILTER_MEBIBYTES_AT_MOST = 1_000
"""That the setting takes."""

CONCURRENCY = 4
"""Partitions that a process works at, at once (PIPELINE_CONCURRENCY)."""
CONNECTIONS = 11
"""Of a process: one for each of these, two for the workers of the backlog, five beside them."""
AT_LEAST = 2
"""Processes, so that one may fail."""

_DAY = 86_400
_GB = 10**9
_MB = 10**6
_MIB = 2**20


@dataclass(frozen=True)
class Demand:
    """What a service has to do. One event is published for a message."""

    messages: int
    """A day."""
    payload: int = 250
    """Bytes of an event."""
    peak: float = 10
    """Times the average of the day, in its busiest minutes."""
    remembered: int = 8
    """Days that the inbox remembers: more than the topics keep."""
    kept: int = 2
    """Days that the outbox is kept."""
    filters: int = FILTER_MEBIBYTES
    """MiB that filters may take."""
    rate: int = MESSAGES_A_SECOND
    """Messages a second of one process."""

    @property
    def peak_rate(self) -> float:
        """Messages a second in the busiest minutes."""
        return self.messages * self.peak / _DAY

    @property
    def processes(self) -> int:
        """Of the service."""
        return max(AT_LEAST, ceil(self.peak_rate / (self.rate * HEADROOM)))

    @property
    def partitions(self) -> int:
        """Of the topic: as many as the processes can work at, at once."""
        return self.processes * CONCURRENCY

    @property
    def connections(self) -> int:
        """To PostgreSQL."""
        return self.processes * CONNECTIONS

    @property
    def inbox_gb(self) -> float:
        """Of the inbox on disk."""
        return self.messages * self.remembered * MARKER_BYTES / _GB

    @property
    def outbox_gb(self) -> float:
        """Of the outbox on disk."""
        return self.messages * self.kept * (EVENT_BYTES + self.payload) / _GB

    @property
    def wal_gb(self) -> float:
        """Of write-ahead log a day."""
        return self.messages * (WAL_BYTES + self.payload) / _GB

    @property
    def filter_capacity(self) -> int:
        """Markers that a filter holds; 0 if a day has too many for one."""
        at_most = int(self.filters * _MIB / 2 / FILTER_BYTES)
        wanted = max(FILTER_ROOM * self.messages, FILTER_AT_LEAST)
        return min(wanted, at_most) if self.messages <= at_most else 0

    @property
    def filters_loaded(self) -> int:
        """Filters in the memory of each process: as many as there are, or as fit."""
        if not self.filter_capacity:
            return 0
        # The oldest may have only one day left that is remembered, the newest only one so far.
        there_are = ceil((self.remembered - 1) / self._days_in_filter) + 1
        return min(there_are, int(self.filters * _MIB // (self.filter_capacity * FILTER_BYTES)))

    @property
    def filter_mb(self) -> float:
        """Of memory in each process for filters, at most."""
        return self.filters_loaded * self.filter_capacity * FILTER_BYTES / _MB

    @property
    def filtered(self) -> int:
        """Days of those remembered that have a filter in memory, at least; others are looked up."""
        if not self.filters_loaded:
            return 0
        # The newest may have begun with the last day.
        return min(self.remembered, (self.filters_loaded - 1) * self._days_in_filter + 1)

    @property
    def _days_in_filter(self) -> int:
        return self.filter_capacity // self.messages

    def row(self) -> str:
        """Return it as a row of the guide's table."""
        cells = (
            f"{self.messages:,}",
            f"{self.messages / _DAY:,.0f}",
            f"{self.peak_rate:,.0f}",
            f"{self.processes}",
            f"{self.partitions}",
            f"{self.connections}",
            f"{self.inbox_gb:,.1f}",
            f"{self.outbox_gb:,.1f}",
            f"{self.wal_gb:,.1f}",
            f"{self.filter_mb:,.0f}",
            f"{self.filtered} of {self.remembered}",
        )
        return f"| {' | '.join(cells)} |"


_TOLERANCE = 1.15
"""The factor by which a constant may be off."""


def unlike(report: Mapping[str, Any]) -> list[str]:
    """Say which constants are not what a report of `make bench` has measured."""

    def measured(measure: str, contestant: str, of: str) -> float:
        found: list[float] = [
            run["values"][of]
            for run in report["runs"]
            if (run["measure"], run["contestant"]) == (measure, contestant)
            and run["round"]
            and run["counts"]
        ]
        return median(found)

    sizes = partial(measured, "growth", f"payload {Demand.payload}")
    constants = {
        "MESSAGES_A_SECOND": (
            MESSAGES_A_SECOND,
            measured("throughput", "ours, 1,000 keys", "rate"),
        ),
        "MARKER_BYTES": (MARKER_BYTES, sizes("marker_bytes")),
        "EVENT_BYTES": (EVENT_BYTES + Demand.payload, sizes("event_bytes")),
        "WAL_BYTES": (WAL_BYTES + Demand.payload, sizes("wal_bytes")),
    }
    return [
        f"{name} stands for {constant:,}, measured were {found:,.0f}"
        for name, (constant, found) in constants.items()
        if not 1 / _TOLERANCE < constant / found < _TOLERANCE
    ]


COLUMNS = (
    "messages a day",
    "average/s",
    "peak/s",
    "processes",
    "partitions",
    "connections",
    "inbox, GB",
    "outbox, GB",
    "WAL a day, GB",
    "filters, MB a process",
    "days in filters",
)
GUIDE = tuple(Demand(messages) for messages in (1_000_000, 10_000_000, 100_000_000, 1_000_000_000))
"""The rows of the guide."""


def between(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return what reads a whole number of an option, and refuses others."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text} is no whole number: write 50_000_000"
            ) from None
        if value < least or (most is not None and value > most):
            up_to = "" if most is None else f" and at most {most:,}"
            raise argparse.ArgumentTypeError(f"{text} is not at least {least:,}{up_to}")
        return value

    return number


def float_from_one(text: str) -> float:
    """Read a factor of an option, and refuse what is less than one."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no number: write 10 or 2.5") from None
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table for one demand."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    count, most = between(1), FILTER_MEBIBYTES_AT_MOST
    parser.add_argument("messages", type=count, help="a day")
    parser.add_argument("--payload", type=between(0), default=Demand.payload, help="bytes")
    parser.add_argument(
        "--peak", type=float_from_one, default=Demand.peak, help="times the average"
    )
    parser.add_argument("--remembered", type=count, default=Demand.remembered, help="days")
    parser.add_argument("--kept", type=count, default=Demand.kept, help="days of the outbox")
    parser.add_argument(
        "--filters", type=between(0, most), default=Demand.filters, help=f"MiB, at most {most:,}"
    )
    parser.add_argument(
        "--rate",
        type=count,
        default=Demand.rate,
        help="messages a second of a process (%(default)s)",
    )
    demand = Demand(**vars(parser.parse_args(arguments)))
    print(f"| {' | '.join(COLUMNS)} |", demand.row(), sep="\n")
    if demand.filtered < demand.remembered:
        print(
            "Days without a filter are looked up in the database for every message, at a rate that"
            " was not measured: see docs/capacity.md",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
