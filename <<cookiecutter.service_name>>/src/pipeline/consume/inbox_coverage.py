"""Inbox coverage: whether the inbox keeps markers for as long as the topics keep their records.

A record whose marker was dropped can't be distinguished from a new one. It becomes a dead letter
because of its age, unless its handler accepts old messages.
"""

import logging
import math
from collections.abc import Iterable, Mapping

from aiokafka.errors import KafkaError

from pipeline.errors import describe_error
from pipeline.servers.topics import describe
from pipeline.settings import CLOCK_MARGIN, Settings

log = logging.getLogger(__name__)

_FOR_EVER = -1


class RemembersTooLittle(Exception):
    """Topics keep their records for longer than the inbox remembers messages."""


async def check(settings: Settings, topics: Iterable[str]) -> None:
    """Compare `inbox_age` with the topics' retention, where the brokers permit reading it.

    Logs a warning about topics that keep their records for longer, or raises `RemembersTooLittle`.
    """
    try:
        described = await describe(settings, topics)
    except (KafkaError, OSError, TimeoutError) as error:
        log.info("how long topics keep their records is not known: %s", describe_error(error))
        return
    covered = settings.inbox_age - CLOCK_MARGIN.total_seconds()
    longer = [
        f"{topic} ({_days(seconds)})"
        for topic, one in described.items()
        if (seconds := _seconds(one.configs)) > covered
    ]
    if not longer:
        return
    text = (
        f"the inbox remembers events for {_days(settings.inbox_age)}, and some topics keep records"
        f" for longer: {', '.join(longer)}. What is sent or read again after that is a dead letter"
        " as too old, unless its handler takes it: raise PIPELINE_INBOX_AGE, or lower the topics'"
        " retention.ms"
    )
    if settings.inbox_must_cover_topics:
        raise RemembersTooLittle(f"{text}, or unset PIPELINE_INBOX_MUST_COVER_TOPICS")
    log.warning("%s", text)


def _seconds(configs: Mapping[str, str]) -> float:
    milliseconds = int(configs.get("retention.ms", 0))  # brokers may not permit reading it
    if "delete" not in configs.get("cleanup.policy", "delete") or milliseconds == _FOR_EVER:
        return math.inf
    return milliseconds / 1_000


def _days(seconds: float) -> str:
    return "for ever" if seconds == math.inf else f"{seconds / 86_400:,.1f} days"
