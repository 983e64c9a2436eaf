"""What a timeline consists of."""

from dataclasses import dataclass, field
from datetime import datetime

from aiokafka import TopicPartition

Place = tuple[str, int, int]
"""Topic, partition and offset of a record."""

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
    """The trace of the record."""
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
    begun: list[str] = field(default_factory=list)
    """Where the search in Kafka has begun."""
    left: dict[TopicPartition, tuple[int, int]] = field(default_factory=dict)
    """The offsets of each partition that are still to be searched: from, and before which."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing of the key was found but what people asked, and releases."""
        return not any(one.event or one.place for one in self.entries)

    @property
    def places(self) -> list[Place]:
        """The places of the records of what is found, the newest first."""
        newest = sorted(self.entries, key=lambda one: one.at, reverse=True)
        return [*dict.fromkeys(one.place for one in newest if one.place)]

    @property
    def not_searched(self) -> list[str]:
        """Which records of Kafka were not looked at."""
        left = [(one, *offsets) for one, offsets in self.left.items() if offsets[0] < offsets[1]]
        return [
            *(f"before {one}, but for the records of what is listed" for one in self.begun),
            *(
                f"{one.topic}/{one.partition} from offset {start:,} to before {beyond:,}:"
                " --seconds gives more time"
                for one, start, beyond in left
            ),
        ]
