"""The backlog: what a service has still to do, by its topics and tables."""

from collections.abc import Collection
from dataclasses import dataclass

import asyncpg  # type: ignore[import-untyped]

from demo import witness

POSITIONS = "SELECT partition, next_offset FROM pipeline.position WHERE topic = $1"
# Behind a dead letter that holds its key, messages wait for a person.
WAITING = """
SELECT count(*) FROM pipeline.backlog AS b
 WHERE died_at IS NULL AND NOT EXISTS (
       SELECT FROM pipeline.backlog AS before
        WHERE before.order_key = b.order_key AND before.holds
          AND (before.partition, before."offset") < (b.partition, b."offset"))
"""
# What waits for its topic is kept when its day of the outbox has gone.
STAGED = """
SELECT event_id FROM pipeline.outbox
 UNION
SELECT event_id FROM pipeline.outbox_rejected
"""


@dataclass(frozen=True)
class Backlog:
    """What the service has still to do."""

    unread: dict[int, int]
    """Records behind the position, of every partition that has some."""
    waiting: int
    """Messages in the backlog that no dead letter holds; known when nothing is unread."""
    unpublished: int
    """Events in the outbox that the output does not show; known when nothing waits either."""
    scheduled: int = 0
    """Scheduled events that are due soon; known likewise."""
    kept: int = 0
    """Days and generations that nobody needs any more; known likewise."""

    def __str__(self) -> str:
        """Say what is left, or nothing."""
        left = [f"partition {p}: {n} records unread" for p, n in sorted(self.unread.items())]
        if self.waiting:
            left.append(f"{self.waiting} messages of the backlog waiting")
        if self.unpublished:
            left.append(f"{self.unpublished} events of the outbox unpublished")
        if self.scheduled:
            left.append(f"{self.scheduled} scheduled events due")
        if self.kept:
            left.append(f"{self.kept} days and generations kept that nobody needs")
        return "; ".join(left)


async def look(
    kafka: str, connection: asyncpg.Connection, topic: str, published: Collection[str]
) -> Backlog:
    """Return what is left of what a topic holds; `published` are the events seen by now."""
    async with witness.reading(kafka, topic) as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
    positions = {row[0]: row[1] for row in await connection.fetch(POSITIONS, topic)}
    unread = {one.partition: end - positions.get(one.partition, 0) for one, end in ends.items()}
    unread = {partition: number for partition, number in unread.items() if number}
    waiting = 0 if unread else await connection.fetchval(WAITING)
    if unread or waiting:
        return Backlog(unread, waiting, 0)
    staged = {row[0] for row in await connection.fetch(STAGED)}
    return Backlog({}, 0, len(staged - {*published}))
