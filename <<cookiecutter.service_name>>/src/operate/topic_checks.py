"""Checks of Kafka's topics: that they exist, and that their configuration fits the settings."""

from collections.abc import Callable, Mapping

from pipeline.servers.topics import Topic
from pipeline.service import Service
from pipeline.settings import CLOCK_MARGIN, Settings

from .health import Finding, Findings

_FOR_EVER = -1
_ENVELOPE = 10_000
"""Bytes that an event's headers and its record take beside the payload, with room."""

Described = Mapping[str, Topic]


def topics(service: Service, settings: Settings, described: Described) -> Findings:
    """Every topic that the service uses exists."""
    used = service.topics | {settings.dead_letter_topic or ""}
    for name in sorted(used.difference(described, {""})):
        yield Finding(
            "wrong",
            f"there is no topic {name} that this user may see",
            "create it, in development by `service topics create`; or allow its Describe",
        )


def topic_retention(service: Service, settings: Settings, described: Described) -> Findings:
    """The inbox remembers for as long as a topic keeps its records."""
    for topic in _chosen(described, service.handlers.topics):
        if topic.unreadable:
            yield _unreadable(topic)
            continue
        policy = topic.configs.get("cleanup.policy", "delete")
        if "compact" in policy:
            yield Finding(
                "warning",
                f"{topic.name} is compacted: what is overwritten before it is read is never seen",
                f"set cleanup.policy=delete for {topic.name}, if every event counts",
            )
        kept = int(topic.configs.get("retention.ms", "0"))
        is_for_ever = "delete" not in policy or kept == _FOR_EVER
        if is_for_ever or kept / 1_000 > settings.inbox_age - CLOCK_MARGIN.total_seconds():
            how_long = "for ever" if is_for_ever else f"for {kept / 86_400_000:,.1f} days"
            yield Finding(
                "wrong" if settings.inbox_must_cover_topics else "warning",
                f"{topic.name} keeps records {how_long}, and the inbox remembers for"
                f" {settings.inbox_age / 86_400:,.1f} days",
                "raise PIPELINE_INBOX_AGE, or lower the topic's retention.ms",
            )


def compaction(service: Service, settings: Settings, described: Described) -> Findings:
    """Topics that the service publishes to keep every event."""
    for topic in _chosen(described, service.declared_topics | {settings.dead_letter_topic}):
        if "compact" in topic.configs.get("cleanup.policy", ""):
            yield Finding(
                "warning",
                f"{topic.name} is compacted: it rejects events without a key, and keeps the last"
                " event of each key",
                f"give all events that are published to {topic.name} a key; or set"
                " cleanup.policy=delete for it",
            )


def message_size(service: Service, settings: Settings, described: Described) -> Findings:
    """Topics that the service publishes to take its largest event."""
    for topic in _chosen(described, service.declared_topics | {settings.dead_letter_topic}):
        if topic.unreadable:
            yield _unreadable(topic)
            continue
        largest = int(topic.configs.get("max.message.bytes", 1_048_588))
        if (needed := settings.max_event_bytes + _ENVELOPE) > largest:
            yield Finding(
                "wrong",
                f"{topic.name} takes records of {largest:,} bytes, and PIPELINE_MAX_EVENT_BYTES"
                f" lets events have {settings.max_event_bytes:,}",
                f"set max.message.bytes={needed} for {topic.name},"
                " or lower PIPELINE_MAX_EVENT_BYTES",
            )


def _chosen(described: Described, names: frozenset[str | None]) -> list[Topic]:
    return [described[name] for name in sorted(described.keys() & names)]


def _unreadable(topic: Topic) -> Finding:
    return Finding(
        "warning",
        f"the configuration of {topic.name} can't be read: {topic.unreadable}",
        f"allow this user DescribeConfigs of the topic {topic.name}",
    )


CHECKS: tuple[Callable[[Service, Settings, Described], Findings], ...] = (
    topics,
    topic_retention,
    compaction,
    message_size,
)
