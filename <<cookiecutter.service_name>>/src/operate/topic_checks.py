"""Kafka's topics: those that a service uses, and checks of their existence and configuration."""

from collections.abc import Callable, Iterator

from pipeline.consume import inbox_coverage
from pipeline.servers.topics import MAY_NOT_DESCRIBE, Topics
from pipeline.service import Service
from pipeline.settings import Settings

from .health import Finding, Level

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
    consumed = {name: described[name] for name in described if name in service.handlers.topics}
    level: Level = "wrong" if settings.inbox_must_cover_topics else "warning"
    for found in inbox_coverage.exceeding(settings, consumed):
        yield Finding(level, *found)


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
