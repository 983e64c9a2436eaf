"""What a timeline consists of."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from aiokafka import TopicPartition

Place = tuple[str, int, int]
"""Topic, partition and offset of a record."""

Range = tuple[int, int]
"""Offsets of a partition: the first, and the one before which they end."""

READ = 50
"""The newest messages of a key whose records and events are read, too."""


@dataclass
class Entry:
    """Something that happened to a key."""

    at: datetime
    what: str
    where: str
    event: str = ""
    """Type and id."""
    more: str = ""
    release: str | None = None
    """The release that has written it."""
    trace: str | None = None
    """The id of the trace that its message or event belongs to."""
    place: Place | None = None
    since: datetime | None = None
    """When its message was stored; of a record that is not read yet, when that arrived."""
    until: datetime | None = None
    """When its message had its effect, died or was discarded; None: it waits, or is no message."""
    waited: float | None = None
    """Seconds from the record's arrival to then, or to now; None: it is no message."""
    is_longest: bool = False
    """Whether it is the longest wait of a second or more."""


@dataclass
class Timeline:
    """What is known of a key, and of which parts nothing is known."""

    entries: list[Entry] = field(default_factory=list)
    """In the order of time."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Why a part could not be read, by its name."""
    searches: dict[TopicPartition, "Search"] = field(default_factory=dict)
    """How far each partition was searched in Kafka; empty until it is known where to search."""
    unreadable: list[str] = field(default_factory=list)
    """The batches in Kafka that can't be read: where, and why."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing of the key was found but what people asked, and releases."""
        return not any(one.event or one.place for one in self.entries)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What programs read: each entry, and last what is not known and was not searched."""
        left = {"unknown": self.unknown, "not_searched": self.not_searched}
        return [*map(asdict, self.entries), left]

    @property
    def places(self) -> list[Place]:
        """The places of the records of what is found, the newest first."""
        newest = sorted(self.entries, key=lambda one: one.at, reverse=True)
        return [*dict.fromkeys(one.place for one in newest if one.place)]

    @property
    def not_searched(self) -> list[str]:
        """Which records of Kafka were not looked at."""
        said: list[str] = []
        for partition, search in self.searches.items():
            where = f"{partition.topic}/{partition.partition}"
            if left := [*gaps((0, search.end), search.planned)]:
                but = ", but for the records of what is listed"
                is_all = left == [(0, left[-1][1])]
                said.append(f"before {where} at offset {left[-1][1]:,}{'' if is_all else but}")
            said += [
                f"{where} from offset {start:,} to before {beyond:,}: --seconds gives more time"
                for planned in search.planned
                for start, beyond in gaps(planned, search.read)
            ]
        return said + self.unreadable


@dataclass
class Search:
    """Where a partition is searched for records of the key, and how far it was."""

    position: int
    """The offset from which on the service has not read yet."""
    end: int
    """The offset before which no producer's transaction was open when the search began."""
    planned: list[Range] = field(default_factory=list)
    """What is to be read."""
    read: list[Range] = field(default_factory=list)
    """What was read, and all of the key in it is listed."""


def gaps(of: Range, without: Iterable[Range]) -> Iterator[Range]:
    """Yield the parts of a range that are in none of the others."""
    at, end = of
    for start, beyond in sorted(without):
        if at < min(start, end):
            yield at, min(start, end)
        at = max(at, beyond)
    if at < end:
        yield at, end
