"""The metrics of the backlog: one process counts it now and then, and all report its count."""

import asyncio
import json
import logging

import asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine

from onceward.errors import describe_error
from onceward.observe import metrics
from onceward.servers.database import autocommitting

from . import count_statements, lanes
from .lanes import Waiting

log = logging.getLogger(__name__)

_SAMPLE_SECONDS = 30.0
"""Time between two counts of the backlog."""
_COUNT_SECONDS = 60.0
"""Time-out of a count."""
_AT_MOST = 100_000
"""Rows that wait, and dead rows, that are counted: more take long."""


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
    if await connection.fetchval(count_statements.TAKE_TURN_TO_COUNT, _SAMPLE_SECONDS):
        counted = await lanes.waiting(connection, _AT_MOST, _SAMPLE_SECONDS)
        await connection.execute(count_statements.STORE_COUNT, json.dumps(counted))
    return [
        Waiting(*one) for one in json.loads(await connection.fetchval(count_statements.READ_COUNT))
    ]
