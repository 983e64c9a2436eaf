"""The metrics of the backlog: one process counts it now and then, and all report its count."""

import asyncio
import json
import logging

import asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine

from pipeline.errors import describe_error
from pipeline.observe import metrics
from pipeline.servers.database import autocommitting

from . import lanes
from .lanes import Waiting

log = logging.getLogger(__name__)

_SAMPLE_SECONDS = 30.0
"""Time between two counts of the backlog."""
_COUNT_SECONDS = 60.0
"""Time-out of a count."""
_AT_MOST = 100_000
"""Rows that wait, and dead rows, that are counted: more take long."""

# Rather too early than half of the time too late: the clocks of processes are not in step. A count
# from the future, as after a jump of the clock, is none.
_TAKE_TURN = """
UPDATE pipeline.backlog_count SET counted_at = clock_timestamp()
 WHERE counted_at NOT BETWEEN clock_timestamp() - make_interval(secs => 0.8 * $1::float)
                          AND clock_timestamp()
RETURNING true
"""

_STORE = "UPDATE pipeline.backlog_count SET counts = $1::text::json"

_READ = "SELECT counts::text FROM pipeline.backlog_count"


async def measure(engine: AsyncEngine) -> None:
    """Set the metrics until cancelled."""
    known: dict[tuple[str, bool], dict[str, float]] = {}  # zeros by topic, of what had rows once
    while True:
        try:
            async with asyncio.timeout(_COUNT_SECONDS), autocommitting(engine) as driver:
                counted = await _counted(driver)
            now = {(one.consumer, one.has_calls): one for one in counted}
            for place, one in now.items():
                known.setdefault(place, {}).update(dict.fromkeys(one.oldest_by_topic, 0.0))
            # What has no rows is not among the results, and its gauges must become 0.
            for place, zeros in known.items():
                one = now.get(place) or Waiting(*place, 0, 0, 0, 0.0, 0.0, {})
                oldest = zeros | one.oldest_by_topic
                metrics.observe_backlog(
                    one.consumer, one.waiting, one.dead, oldest, has_calls=one.has_calls
                )
        except TimeoutError:
            log.warning("backlog: counting takes too long, its metrics keep their last values")
        except Exception as error:
            log.debug("backlog: not counted: %s", describe_error(error))
        await asyncio.sleep(_SAMPLE_SECONDS)


async def _counted(connection: asyncpg.Connection) -> list[Waiting]:
    """Return the latest count of any process, which this one makes if it is its turn."""
    if await connection.fetchval(_TAKE_TURN, _SAMPLE_SECONDS):
        counted = await lanes.waiting(connection, _AT_MOST, _SAMPLE_SECONDS)
        await connection.execute(_STORE, json.dumps(counted))
    return [Waiting(*one) for one in json.loads(await connection.fetchval(_READ))]
