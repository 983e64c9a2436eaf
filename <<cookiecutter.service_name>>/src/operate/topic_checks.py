"""Kafka's topics: those that a service uses, and checks of their existence and configuration."""

import math
from collections.abc import Callable, Iterator

from pipeline.servers.topics import MAY_NOT_DESCRIBE, Topics
from pipeline.service import Service
from pipeline.settings import CLOCK_MARGIN, Settings

from .health import Finding

_ENVELOPE = 10_000
"""Bytes of a record beside the payload, at most: its headers, and Kafka's own."""


def used(service: Service, settings: Settings) -> set[str]:
    """Return the topics that a service reads, declares events for, or sends dead letters to."""
    return {*service.topics, *filter(None, [settings.dead_letter_topic])}


def topics(service: Service, settings: Settings, described: Topics) -> Iterator[Finding]:
    """Every topic that the service uses exists, and its configuration can be read."""
    for name in sorted(used(service, settings).difference(described, described.hidden)):
        found = f"there is no topic {name}"
        yield Finding("wrong", found, "create it, in development by `service topics create`")
    for name in sorted(described.hidden):
        found, _, advice = MAY_NOT_DESCRIBE.partition(": ")
        yield Finding("wrong", f"topic {name} {found}", advice)
    for topic in described.values():
        if topic.unreadable:
            found = f"the configuration of {topic.name} can't be read: {topic.unreadable}"
            advice = f"allow this user its DescribeConfigs: {topic.name} (docs/security.md)"
            yield Finding("warning", found, advice)


def topic_retention(service: Service, settings: Settings, described: Topics) -> Iterator[Finding]:
    """The inbox remembers for as long as a topic keeps its records."""
    longest = settings.inbox_age - CLOCK_MARGIN.total_seconds()
    for name, topic in described.items():
        kept = topic.retention
        if name in service.handlers.topics and kept > longest:
            how_long = "for ever" if kept == math.inf else f"for {kept / 86_400:,.1f} days"
            yield Finding(
                "wrong" if settings.inbox_must_cover_topics else "warning",
                f"{name} keeps records {how_long}, and the inbox remembers for"
                f" {settings.inbox_age / 86_400:,.1f} days",
                "raise PIPELINE_INBOX_AGE, or lower the topic's retention.ms",
            )


def compaction(service: Service, settings: Settings, described: Topics) -> Iterator[Finding]:
    """No topic is compacted, which deletes events."""
    for name, topic in described.items():
        if "compact" in topic.configs.get("cleanup.policy", ""):
            yield Finding(
                "warning",
                f"{name} is compacted: it rejects events without a key, and may lose all but the"
                " last event of each key",
                f"set cleanup.policy=delete for {name}, if every event is needed",
            )


def message_size(service: Service, settings: Settings, described: Topics) -> Iterator[Finding]:
    """Topics that the service publishes to accept its largest event."""
    needed = settings.max_event_bytes + _ENVELOPE
    published = service.declared_topics | {settings.dead_letter_topic}
    for topic in (described[name] for name in sorted(described.keys() & published)):
        largest = int(topic.configs.get("max.message.bytes", needed))
        if largest < needed:
            yield Finding(
                "wrong",
                f"{topic.name} accepts records of {largest:,} bytes, and PIPELINE_MAX_EVENT_BYTES"
                f" allows events of {settings.max_event_bytes:,}",
                f"set max.message.bytes={needed} for {topic.name},"
                " or lower PIPELINE_MAX_EVENT_BYTES",
            )


CHECKS: tuple[Callable[[Service, Settings, Topics], Iterator[Finding]], ...] = (
    topics,
    topic_retention,
    compaction,
    message_size,
)
