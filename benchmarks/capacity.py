"""Capacity: from messages a day to processes, partitions, connections, disk and WAL.

    python -m benchmarks.capacity 10_000_000 [--payload 250] [--peak 10] [--remembered 8] [--kept 2]

In the root of the repository. The constants are rounded from what `make bench` measures on the
machine of `docs/performance.md`; a test holds them against the report of the run whose plots are
kept there. Give your own rate with --rate.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from statistics import median
from typing import Any

MESSAGES_A_SECOND = 8_000
"""Of one process with an ORM handler, with PostgreSQL and Kafka on the same two cores."""
HEADROOM = 0.5
"""Share of that to plan with: the rest catches up after an outage."""
MARKER_BYTES = 230
"""Of a marker in the inbox, with its index."""
EVENT_BYTES = 230
"""Of an event in the outbox beside its payload, with the indexes."""
WAL_BYTES = 850
"""Of a message that changes a row and publishes an event, beside the event's payload."""
GENERATION_DAYS = 4
"""Days for which a generation of the inbox takes markers (PIPELINE_INBOX_GENERATION_AGE)."""

CONCURRENCY = 4
"""Partitions that a process works at, at once (PIPELINE_CONCURRENCY)."""
CONNECTIONS = 11
"""Of a process: one for each of these, two for the workers of the backlog, five beside them."""
AT_LEAST = 2
"""Processes, so that one may fail."""

_DAY = 86_400
_GB = 10**9


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
        """Of the inbox on disk, at most: a generation is kept after it was closed."""
        return self.messages * (self.remembered + GENERATION_DAYS) * MARKER_BYTES / _GB

    @property
    def outbox_gb(self) -> float:
        """Of the outbox on disk."""
        return self.messages * self.kept * (EVENT_BYTES + self.payload) / _GB

    @property
    def wal_gb(self) -> float:
        """Of write-ahead log a day."""
        return self.messages * (WAL_BYTES + self.payload) / _GB

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
)
GUIDE = tuple(Demand(messages) for messages in (1_000_000, 10_000_000, 100_000_000, 1_000_000_000))
"""The rows of the guide."""


def at_least(least: int) -> Callable[[str], int]:
    """Return what reads a whole number of an option, and refuses others."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text} is no whole number: write 50_000_000"
            ) from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is not at least {least:,}")
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
    count = at_least(1)
    parser.add_argument("messages", type=count, help="a day")
    parser.add_argument("--payload", type=at_least(0), default=Demand.payload, help="bytes")
    parser.add_argument(
        "--peak", type=float_from_one, default=Demand.peak, help="times the average"
    )
    parser.add_argument("--remembered", type=count, default=Demand.remembered, help="days")
    parser.add_argument("--kept", type=count, default=Demand.kept, help="days of the outbox")
    parser.add_argument(
        "--rate",
        type=count,
        default=Demand.rate,
        help="messages a second of a process (%(default)s)",
    )
    demand = Demand(**vars(parser.parse_args(arguments)))
    print(f"| {' | '.join(COLUMNS)} |", demand.row(), sep="\n")


if __name__ == "__main__":
    main()
