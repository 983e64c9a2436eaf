"""Inbox coverage: whether the inbox keeps markers for as long as the topics keep their records.

A record whose marker was dropped can't be distinguished from a new one. It becomes a dead letter
because of its age, unless its handler accepts old messages.
"""

import logging
import math
from collections.abc import Iterable, Mapping

from aiokafka.errors import KafkaError

from pipeline.errors import describe_error
from pipeline.servers.topics import Topic, describe
from pipeline.settings import CLOCK_MARGIN, Settings

log = logging.getLogger(__name__)


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
    longer = [f"{topic} ({kept})" for topic, kept in exceeding(settings, described).items()]
    if not longer:
        return
    text = (
        f"the inbox remembers events {format_days(settings.inbox_age)}, and some topics keep"
        f" records for longer: {', '.join(longer)}. Older records that are read again become dead"
        " letters (too old), unless their handler has takes_old=True: raise PIPELINE_INBOX_AGE, or"
        " lower the topics' retention.ms"
    )
    if settings.inbox_must_cover_topics:
        raise RemembersTooLittle(f"{text}, or unset PIPELINE_INBOX_MUST_COVER_TOPICS")
    log.warning("%s", text)


def exceeding(settings: Settings, described: Mapping[str, Topic]) -> dict[str, str]:
    """Return topics that keep records for longer than the inbox remembers, and for how long.

    Topics with an unreadable configuration are not among them.
    """
    found = {}
    for name, topic in described.items():
        if "retention.ms" not in topic.configs:
            continue
        kept = int(topic.configs["retention.ms"]) / 1_000
        if "delete" not in topic.configs.get("cleanup.policy", "delete") or kept < 0:
            kept = math.inf
        if kept > settings.inbox_age - CLOCK_MARGIN.total_seconds():
            found[name] = format_days(kept)
    return found


def format_days(seconds: float) -> str:
    """Return for how long something is kept."""
    return "for ever" if seconds == math.inf else f"for {seconds / 86_400:,.1f} days"
