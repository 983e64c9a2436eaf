"""Capacity: from messages a day to processes, partitions, connections, disk and WAL.

    python -m benchmarks.capacity 10_000_000 [--payload 250] [--peak 10] [--remembered 8] [--kept 2]

The constants are what `make bench` has measured on the machine of `docs/performance.md`; put your
own in their place.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

MESSAGES_A_SECOND = 15_000
"""Of one process with an ORM handler, with PostgreSQL and Kafka on the same two cores."""
HEADROOM = 0.5
"""Share of that to plan with: the rest catches up after an outage."""
MARKER_BYTES = 230
"""Of a marker in the inbox, with its index."""
EVENT_BYTES = 230
"""Of an event in the outbox beside its payload, with the indexes."""
WAL_BYTES = 850
"""Of a message that changes a row and publishes an event, beside the event's payload."""
FILTER_BYTES = 1.8
"""Of a marker in the filter of its generation."""

CONCURRENCY = 4
"""Partitions that a process works at, at once (PIPELINE_CONCURRENCY)."""
CONNECTIONS = 10
"""Of a process: one for each of these, two for the workers of the backlog, four beside them."""
AT_LEAST = 2
"""Processes, so that one may fail."""

_DAY = 86_400
_GB = 10**9
_MB = 10**6


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

    @property
    def peak_rate(self) -> float:
        """Messages a second in the busiest minutes."""
        return self.messages * self.peak / _DAY

    @property
    def processes(self) -> int:
        """Of the service."""
        return max(AT_LEAST, ceil(self.peak_rate / (MESSAGES_A_SECOND * HEADROOM)))

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
    def filter_mb(self) -> float:
        """Of memory in each process for the filters of the generations."""
        return self.messages * self.remembered * FILTER_BYTES / _MB

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
        )
        return f"| {' | '.join(cells)} |"


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
)
GUIDE = tuple(Demand(messages) for messages in (1_000_000, 10_000_000, 100_000_000, 1_000_000_000))
"""The rows of the guide."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table for one demand."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    parser.add_argument("messages", type=int, help="a day")
    parser.add_argument("--payload", type=int, default=Demand.payload, help="bytes of an event")
    parser.add_argument("--peak", type=float, default=Demand.peak, help="times the average")
    parser.add_argument("--remembered", type=int, default=Demand.remembered, help="days")
    parser.add_argument("--kept", type=int, default=Demand.kept, help="days of the outbox")
    demand = Demand(**vars(parser.parse_args(arguments)))
    print(f"| {' | '.join(COLUMNS)} |", demand.row(), sep="\n")


if __name__ == "__main__":
    main()
