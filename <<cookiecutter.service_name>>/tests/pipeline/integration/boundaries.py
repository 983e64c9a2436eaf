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
    Boundary("schema: look at its revisions"),
    Boundary("schema: compare its columns"),
    Boundary("retention: read the generation"),
    Boundary("retention: ask who owns the tables"),
    Boundary("retention: begin"),
    Boundary("retention: begin the round"),
    Boundary("retention: list closed generations"),
    Boundary("retention: list partitions"),
    Boundary("retention: forget days"),
    Boundary("retention: close days"),
    Boundary("retention: list closed days"),
    Boundary("retention: ask whose the outbox is"),
    Boundary("retention: look for the last event of a day"),
    Boundary("retention: look for who needs a day"),
    Boundary("retention: look for who holds back relays"),
    Boundary("published: limit the wait"),
    Boundary("published: hold the progress"),
    Boundary("published: note it"),
    Boundary("published: commit"),
    Boundary("retention: ask whether a day is archived"),
    Boundary("retention: delete what is discarded"),
    Boundary("retention: finish the round"),
    Boundary("partition: lock"),
    Boundary("partition: look again"),
    Boundary("partition: become the owner"),
    Boundary("partition: create"),
    Boundary("partition: attach"),
    Boundary("partition: detach"),
    Boundary("partition: limit the wait"),
    Boundary("partition: hold"),
    Boundary("partition: drop"),
    Boundary("partition: commit"),
    Boundary("rotation: lock", 2),
    Boundary("rotation: close the generation", 2),
    Boundary("rotation: forget generations"),
    Boundary("rotation: commit", 2),
    Boundary("rotation: rollback"),
    Boundary("filters: forget"),
    Boundary("filters: lock"),
    Boundary("filters: look for a generation without"),
    Boundary("filters: count the keys"),
    Boundary("filters: look for one with room"),
    Boundary("filters: open a cursor"),
    Boundary("filters: read keys", 2),
    Boundary("filters: store", 2),
    Boundary("filters: commit", 2),
    Boundary("filters: begin a snapshot"),
    Boundary("filters: read the generation"),
    Boundary("filters: list"),
    Boundary("filters: load"),
    Boundary("consumers: register"),
    Boundary("reader: read the position"),
    Boundary("reader: store the start"),
    Boundary("reader: count the start"),
    Boundary("reader: forgive the start", is_farewell=True),
    Boundary("consume: begin", 2),
    Boundary("consume: limit and lock", 2),
    Boundary("consume: move the position", 2),
    Boundary("consume: look into closed generations", 2),
    Boundary("consume: mark", 2),
    Boundary("consume: look into the current generation"),
    Boundary("consume: look into the backlog", 2),
    Boundary("consume: look for who has forgotten nothing"),
    Boundary("consume: lock accounts", 2),
    Boundary("consume: insert accounts"),
    Boundary("consume: update accounts"),
    Boundary("consume: count duplicates"),
    Boundary("consume: keep results"),
    Boundary("consume: unmark"),
    Boundary("consume: add to the backlog"),
    Boundary("consume: note what is kept elsewhere"),
    Boundary("consume: begin to copy the outbox", 2),
    Boundary("consume: end the copy", 2),
    Boundary("consume: ask for a swallowed error"),
    Boundary("consume: commit", 2),
    Boundary("consume: rollback"),
    Boundary("consume: cancel what is scheduled"),
    Boundary("consume: schedule"),
    Boundary("scheduled: look whether any is due"),
    Boundary("scheduled: begin"),
    Boundary("scheduled: lock"),
    Boundary("scheduled: move into the outbox"),
    Boundary("scheduled: commit"),
    Boundary("backlog: count"),
    Boundary("backlog: claim a lane", 2),
    Boundary("backlog: take what is due", 2),
    Boundary("backlog: hold the lane", 2),
    Boundary("backlog: delete what is done"),
    Boundary("backlog: change what is not"),
    Boundary("backlog: let heads be due", 2),
    Boundary("backlog: commit", 2),
    Boundary("backlog: rollback"),
    Boundary("backlog: give the lane back"),
    Boundary("relay: announce", 2),
    Boundary("relay: extend the leases", 2),
    Boundary("relay: count the relays", 2),
    Boundary("relay: look for relays that are gone"),
    Boundary("relay: claim shards"),
    Boundary("relay: look whether anything is new"),
    Boundary("relay: begin a snapshot"),
    Boundary("relay: read a fresh window", 3),
    Boundary("relay: commit"),
    Boundary("relay: read a page", 2),
    Boundary("relay: write the cursor", 2),
    Boundary("rejected: count"),
    Boundary("rejected: begin"),
    Boundary("rejected: add"),
    Boundary("rejected: read what is due"),
    Boundary("rejected: set the reason"),
    Boundary("rejected: delete what is sent"),
    Boundary("rejected: commit"),
    Boundary("relay: give shards back", is_farewell=True),
    Boundary("relay: leave", is_farewell=True),
    Boundary("producer: connect"),
    Boundary("producer: get an id"),
    Boundary("producer: produce", 3),
    Boundary("member: connect"),
    Boundary("member: ask for how long topics keep records"),
    Boundary("member: find the coordinator"),
    Boundary("member: join the group"),
    Boundary("member: get an assignment"),
    Boundary("member: read offsets"),
    Boundary("member: look up offsets"),
    Boundary("member: fetch", 3),
    Boundary("member: heartbeat"),
    Boundary("member: commit offsets", 2),
    Boundary("member: leave the group", is_farewell=True),
)
