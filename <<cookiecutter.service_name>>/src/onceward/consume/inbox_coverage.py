"""Inbox coverage: whether the inbox keeps markers for as long as the topics keep their records.

A record whose marker was dropped can't be distinguished from a new one. It becomes a dead letter
because of its age, unless its handler accepts old messages.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping

from aiokafka.errors import KafkaError

from onceward.errors import OncewardError, describe_error
from onceward.servers.topics import Topic, describe
from onceward.settings import CLOCK_MARGIN, Settings

log = logging.getLogger(__name__)


class RemembersTooLittle(OncewardError):
    """Topics keep their records for longer than the inbox remembers messages."""


async def check(settings: Settings, topics: Iterable[str]) -> None:
    """Compare `inbox_age` with the topics' retention, where the brokers permit reading it.

    Logs a warning about topics that keep their records for longer, or raises `RemembersTooLittle`.
    """
    try:
        described = await describe(settings, topics)
    except (KafkaError, OSError) as error:
        log.info("how long topics keep their records is not known: %s", describe_error(error))
        return
    longer = [f"{found}: {advice}" for found, advice in exceeding(settings, described)]
    if longer and settings.inbox_must_cover_topics:
        longer.append("To start nevertheless, unset PIPELINE_INBOX_MUST_COVER_TOPICS")
        raise RemembersTooLittle("\n".join(longer))
    for text in longer:
        log.warning("%s", text)


def exceeding(settings: Settings, described: Mapping[str, Topic]) -> Iterator[tuple[str, str]]:
    """Yield a fault and advice for each topic that keeps records for longer than the inbox
    remembers them, if its configuration can be read."""
    for name, topic in described.items():
        kept = int(topic.configs.get("retention.ms", 0)) / 1_000
        if "delete" not in topic.configs.get("cleanup.policy", "delete") or kept < 0:
            kept = math.inf
        if kept > settings.inbox_age - CLOCK_MARGIN.total_seconds():
            how_long = "for ever" if kept == math.inf else f"for {kept / 86_400:,.1f} days"
            found = (
                f"{name} keeps records {how_long}, and the inbox remembers for"
                f" {settings.inbox_age / 86_400:,.1f} days: older ones that are read again become"
                " dead letters (too old), unless their handler has takes_old=True"
            )
            yield found, "raise PIPELINE_INBOX_AGE, or lower the topic's retention.ms"
