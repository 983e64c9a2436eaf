"""The crash matrix: the boundaries at which a process is killed, and the moments of each."""

from enum import Enum
from typing import NamedTuple


class Moment(Enum):
    """When the process dies, seen from a request on its way to a server."""

    BEFORE = "before"
    """The server never gets the request."""
    UNANSWERED = "unanswered"
    """The server gets the request, and behind it the end of the connection."""
    ANSWERED = "answered"
    """The server has answered, and the process never sees it."""


class Boundary(NamedTuple):
    """A kind of request between the service and its servers; the name is `room: request`."""

    name: str
    occurrence: int = 1
    """At which occurrence the process dies: a later one where it has begun to work by then."""
    is_farewell: bool = False
    """Whether it happens only after SIGTERM."""


class Point(NamedTuple):
    """Where a process dies."""

    boundary: Boundary
    moment: Moment

    def __str__(self) -> str:
        return f"{self.boundary.name}, {self.moment.value}"


BOUNDARIES = (
    Boundary("connection: open"),
    Boundary("connection: set up"),
    Boundary("connection: compare cluster"),
    Boundary("database: read id"),
    Boundary("database: read brokers"),
    Boundary("database: store brokers"),
    Boundary("schema: read owner"),
    Boundary("schema: read revisions"),
    Boundary("schema: compare columns"),
    Boundary("schema: find missing columns"),
    Boundary("schema: find shared defaults"),
    Boundary("retention: read generation"),
    Boundary("retention: check ownership"),
    Boundary("retention: begin"),
    Boundary("retention: begin round"),
    Boundary("retention: list closed generations"),
    Boundary("retention: list partitions"),
    Boundary("retention: reopen days"),
    Boundary("retention: close days"),
    Boundary("retention: list closed days"),
    Boundary("retention: read last event of day"),
    Boundary("retention: find shards behind"),
    Boundary("retention: find oldest writer"),
    Boundary("published: set lock timeout"),
    Boundary("published: lock cursor"),
    Boundary("published: mark day"),
    Boundary("published: commit"),
    Boundary("retention: check archive"),
    Boundary("retention: delete discarded rows"),
    Boundary("retention: summarize"),
    Boundary("retention: finish round"),
    Boundary("partition: lock"),
    Boundary("partition: list again"),
    Boundary("partition: set role"),
    Boundary("partition: create"),
    Boundary("partition: attach"),
    Boundary("partition: detach"),
    Boundary("partition: set lock timeout"),
    Boundary("partition: lock table"),
    Boundary("partition: drop"),
    Boundary("partition: commit"),
    Boundary("rotation: lock", 2),
    Boundary("rotation: close generation", 2),
    Boundary("rotation: forget generations"),
    Boundary("rotation: commit", 2),
    Boundary("rotation: rollback"),
    Boundary("consumers: register"),
    Boundary("throttle: look", 6),
    Boundary("throttle: move on"),
    Boundary("reader: read position"),
    Boundary("reader: store start"),
    Boundary("reader: count start"),
    Boundary("reader: undo start count", is_farewell=True),
    Boundary("consume: begin", 2),
    Boundary("consume: begin run", 2),
    Boundary("consume: end run"),
    Boundary("consume: undo run"),
    Boundary("consume: move position", 2),
    Boundary("consume: look up closed generations", 2),
    Boundary("consume: insert markers", 2),
    Boundary("consume: read existing markers"),
    Boundary("consume: look up backlog", 2),
    Boundary("consume: check inbox coverage"),
    Boundary("consume: lock accounts", 2),
    Boundary("consume: read catalog"),
    Boundary("consume: compare catalog", 2),
    Boundary("consume: insert accounts"),
    Boundary("consume: update accounts"),
    Boundary("consume: count duplicates"),
    Boundary("consume: store results"),
    Boundary("consume: delete markers"),
    Boundary("consume: add to backlog"),
    Boundary("consume: insert claims"),
    Boundary("consume: write outbox", 2),
    Boundary("consume: check for failed statement"),
    Boundary("consume: commit", 2),
    Boundary("consume: rollback"),
    Boundary("shared: move positions"),
    Boundary("shared: insert markers"),
    Boundary("shared: lock accounts"),
    Boundary("shared: write outbox"),
    Boundary("shared: commit"),
    Boundary("consume: cancel scheduled"),
    Boundary("consume: schedule"),
    Boundary("scheduled: poll"),
    Boundary("scheduled: begin"),
    Boundary("scheduled: lock"),
    Boundary("scheduled: move to outbox"),
    Boundary("scheduled: commit"),
    Boundary("backlog: take turn to count"),
    Boundary("backlog: count"),
    Boundary("backlog: store count"),
    Boundary("backlog: read count"),
    Boundary("backlog: claim lane", 2),
    Boundary("backlog: read due rows", 2),
    Boundary("backlog: extend lease", 2),
    Boundary("backlog: fence lane", 2),
    Boundary("backlog: compare heads"),
    Boundary("backlog: end pauses"),
    Boundary("backlog: delete settled rows"),
    Boundary("backlog: update failed rows"),
    Boundary("backlog: schedule heads", 2),
    Boundary("backlog: commit", 2),
    Boundary("backlog: rollback"),
    Boundary("backlog: release lane"),
    Boundary("relay: announce", 2),
    Boundary("relay: extend leases", 2),
    Boundary("relay: count relays", 2),
    Boundary("relay: find expired relays"),
    Boundary("relay: claim shards"),
    Boundary("relay: poll"),
    Boundary("relay: begin snapshot"),
    Boundary("relay: measure window"),
    Boundary("relay: read window", 3),
    Boundary("relay: commit"),
    Boundary("relay: read page", 2),
    Boundary("relay: write cursor", 2),
    Boundary("rejected: count"),
    Boundary("rejected: begin"),
    Boundary("rejected: add"),
    Boundary("rejected: read waiting events"),
    Boundary("rejected: set reason"),
    Boundary("rejected: delete sent events"),
    Boundary("rejected: commit"),
    Boundary("relay: release shards", is_farewell=True),
    Boundary("relay: leave", is_farewell=True),
    Boundary("producer: connect"),
    Boundary("producer: get id"),
    Boundary("producer: produce", 3),
    Boundary("member: connect"),
    Boundary("member: read topic retention"),
    Boundary("member: find coordinator"),
    Boundary("member: join group"),
    Boundary("member: get assignment"),
    Boundary("member: read offsets", 2),
    Boundary("member: look up offsets"),
    Boundary("member: fetch", 3),
    Boundary("member: heartbeat"),
    Boundary("member: commit offsets", 2),
    Boundary("member: describe group"),
    Boundary("member: leave group", is_farewell=True),
)
