"""The horizon: whether the inbox remembers for as long as the topics can send again.

What a topic still holds when the inbox has forgotten it can't be told from what is new, and becomes
a dead letter for its age, unless its handler takes it.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping

from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError

from pipeline.errors import describe_error
from pipeline.servers import clients
from pipeline.settings import CLOCK_MARGIN, Settings

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 5.0
_FOR_EVER = -1


class RemembersTooLittle(Exception):
    """Topics keep their records for longer than the inbox remembers what it has handled."""


async def check(settings: Settings, topics: Iterable[str]) -> None:
    """Compare `inbox_age` with what the brokers tell of the topics; they may not tell.

    Warns of topics that keep their records for longer, or raises `RemembersTooLittle`.
    """
    try:
        async with asyncio.timeout(2 * _ANSWER_SECONDS):
            kept = await _retention(settings, sorted(topics))
    except (KafkaError, OSError, TimeoutError) as error:
        log.info("how long topics keep their records is not known: %s", describe_error(error))
        return
    longer = [
        f"{topic} ({_days(seconds)})"
        for topic, seconds in kept.items()
        if seconds is None or seconds > settings.inbox_age - CLOCK_MARGIN.total_seconds()
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


async def _retention(settings: Settings, topics: list[str]) -> Mapping[str, float | None]:
    """Return for how many seconds topics keep records, None for ever; of those that exist."""
    async with clients.managing(settings, answer_within=_ANSWER_SECONDS) as admin:
        answers = await admin.describe_configs(
            [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in topics]
        )
    found: dict[str, float | None] = {}
    for code, _, _, topic, entries in (one for answer in answers for one in answer.resources):
        configs = {entry[0]: entry[1] for entry in entries}
        if code == 0 and "retention.ms" in configs:
            found[topic] = _seconds(configs)
    return found


def _seconds(configs: Mapping[str, str]) -> float | None:
    milliseconds = int(configs["retention.ms"])
    if "delete" not in configs.get("cleanup.policy", "delete") or milliseconds == _FOR_EVER:
        return None
    return milliseconds / 1_000


def _days(seconds: float | None) -> str:
    return "for ever" if seconds is None else f"{seconds / 86_400:,.1f} days"
