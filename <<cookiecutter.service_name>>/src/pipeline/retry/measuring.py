"""The metrics of the backlog's rows, which are counted now and then."""

import asyncio
import logging
from time import monotonic

from sqlalchemy.ext.asyncio import AsyncEngine

from pipeline.errors import describe_error
from pipeline.observe import metrics
from pipeline.servers.database import autocommitting

from . import lanes

log = logging.getLogger(__name__)

_SAMPLE_SECONDS = 30.0
"""Shortest time between two counts of the backlog."""
_COUNT_SECONDS = 60.0
"""Time-out of a count."""


async def measure(engine: AsyncEngine) -> None:
    """Set the metrics until cancelled. Counting a large backlog takes long."""
    counts: dict[str, tuple[int, int, float]] = {}
    while True:
        begun = monotonic()
        try:
            async with asyncio.timeout(_COUNT_SECONDS), autocommitting(engine) as driver:
                rows = await lanes.count(driver)
            # A consumer without rows is not among the results, and its gauges must become 0.
            counts = dict.fromkeys(counts, (0, 0, 0.0)) | rows
            for consumer, numbers in counts.items():
                metrics.observe_backlog(consumer, *numbers)
        except TimeoutError:
            log.warning("backlog: counting takes too long, its metrics keep their last values")
        except Exception as error:
            log.debug("backlog: not counted: %s", describe_error(error))
        rest = max(_SAMPLE_SECONDS, 20 * (monotonic() - begun))
        await asyncio.sleep(rest)
