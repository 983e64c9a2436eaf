"""Settings of a service, read from the environment once, at the start.

Every field is the variable `PIPELINE_<FIELD>`. All wrong values are reported at once; whether they
fit together is checked when each is valid by itself. Durations are in seconds.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from .server_settings import ServerSettings, written

SECONDS = "s"
"""The unit of durations, for the guide that is generated from the fields."""


def _at_most_a_century(seconds: float) -> float:
    if not seconds <= 100 * 365 * 86_400:
        raise ValueError("at most a hundred years, in seconds")
    return seconds


Seconds = Annotated[float, Field(gt=0), AfterValidator(_at_most_a_century), SECONDS]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, written(r"[a-zA-Z0-9._-]{1,249}", "a name of letters, digits, '.', '_', '-'")]
"""What Kafka allows as the name of a topic, and of a member of a group."""

CLOCK_MARGIN = timedelta(hours=1)
"""How far clocks may be apart: those of producers and brokers, and the database's from itself."""

_PARTS = 16
"""Parts of the process's memory: the partitions' batches have six, and about as much again as
objects, see `LARGEST_SHARE` in `consume/reader.py`; the events that transactions stage have one.
The rest is the process's own."""

_GROUP = Path("/sys/fs/cgroup")
"""The control group of the container, as it is seen in there."""


def mistakes(error: ValidationError, settings: type[BaseSettings]) -> Iterator[str]:
    """Yield what is wrong with settings, each mistake with its variable, and no value."""
    prefix = settings.model_config.get("env_prefix", "")
    for mistake in error.errors(include_url=False, include_input=False):
        name = "_".join(str(part) for part in mistake["loc"]).upper()
        text = mistake["msg"].removeprefix("Value error, ").replace("\n", "\n  ")
        if mistake["type"] == "missing":
            text = "is not set (for the servers of `make up`: `dev/stack.py env` prints it)"
        yield f"{f'{prefix}{name}: ' if name else ''}{text}"


@cache
def available_memory() -> int:
    """Return the limit of the process's container, or the machine's memory, in bytes."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # it is not there, or says "max"
            sizes.append(int((_GROUP / name).read_text("ascii")))
    return min(sizes)


def variables(settings: type[BaseSettings] = BaseSettings) -> dict[str, FieldInfo]:
    """Return the settings of the engine, and of what else is imported, by their variables."""
    found: dict[str, FieldInfo] = {}
    for one in settings.__subclasses__():
        prefix = one.model_config.get("env_prefix", "")
        found |= {f"{prefix}{name}".upper(): field for name, field in one.model_fields.items()}
        found |= variables(one)
    return found


def is_secret(field: FieldInfo) -> bool:
    """Whether a setting is a secret, by its type."""
    return "Secret" in str(field.annotation)


class Settings(ServerSettings):
    """What may differ between two deployments of the same service."""

    release: Annotated[
        str, written("[a-zA-Z0-9._+-]{0,40}", "up to 40 letters, digits, '.', '_', '+', '-'")
    ] = ""
    """Name of the release, which is stored with all that it writes."""

    consumer_start: Literal["earliest", "latest"] = "earliest"
    """Start of a partition that was never read; `latest` misses the first records of new
    partitions."""
    batch_size: Count = 3_000
    """Most records in a transaction."""
    concurrency: Count = 4
    """Concurrent consume transactions."""
    kafka_session_timeout: Annotated[Seconds, Field(ge=1)] = 10.0
    """Time without a heartbeat after which partitions are reassigned."""
    kafka_group_instance_id: Name | None = None
    """Static membership: a process that restarts with the same id keeps its partitions."""
    kafka_client_rack: str | None = None
    """Rack or zone, to read from a replica there."""
    transaction_timeout: Seconds = 8.0
    """Longest consume transaction; below the session timeout."""
    lock_timeout: Seconds = 4.0
    """Longest wait for a lock; then the transaction is rolled back and repeated."""
    offset_commit_interval: Seconds = 5.0
    """Interval of offset commits to Kafka, for lag tools."""
    retry_pause: Seconds = 5.0
    """Pause between attempts of a blocked partition or open breaker."""
    breaker_keys: Count = 20
    """Keys in a row that fail alike before a consumer's breaker opens."""
    unclean_starts: Count = 3
    """Crashes at the same offset after which the records there are tried one by one."""
    unpacked_mebibytes: Annotated[int, Field(ge=1, le=2_000)] = 128
    """Most MiB to which a producer's batch may unpack, if that is no more than a sixth of the
    process's memory. A larger batch blocks its partition."""
    memory_mebibytes: Annotated[int | None, Field(ge=64)] = None
    """MiB of memory of the process, of which each partition has a share; larger batches are read
    one at a time. Unset: the limit of its container, or else the machine's memory."""
    hang_timeout: Annotated[Seconds, Field(ge=2)] = 30.0
    """A process whose event loop is blocked for this long ends."""
    gc_threshold: Annotated[int, Field(ge=700)] = 100_000
    """New objects after which Python's garbage collector runs."""

    backlog_workers: Count = 2
    """Lanes of the backlog that the process handles concurrently."""
    backlog_lease: Annotated[Seconds, Field(ge=1)] = 10.0
    """Time after which a dead worker's lane is taken over."""
    backlog_poll_min: Seconds = 0.02
    """Pause after a poll that found messages."""
    backlog_poll_max: Seconds = 2.0
    """Longest pause between idle polls."""

    max_event_bytes: Count = 900_000
    """A larger event is rejected when it is staged; below the topics' `max.message.bytes`."""
    relay_batch_events: Count = 5_000
    """Most events that the relay sends at a time; while twice as many are unsent, transactions of
    its process wait."""
    relay_lease: Annotated[Seconds, Field(ge=1)] = 10.0
    """Time after which a dead relay's shards are taken over."""
    relay_poll_min: Seconds = 0.01
    """Pause after a poll that found events of other processes."""
    relay_poll_max: Seconds = 0.25
    """Longest pause between idle polls; it delays only events of other processes."""
    relay_cursor_interval: Seconds = 0.25
    """Interval of cursor writes; a crash repeats what was sent in it."""

    relay_compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "zstd"
    """`zstd` needs Kafka 2.1 or newer."""
    relay_idempotent: bool = True
    """Brokers drop a batch that is sent again; `false` is for brokers that can't."""
    relay_transactional: bool = False
    """Publish in Kafka transactions: a paused relay can't send late to consumers that read
    committed."""

    dead_letter_topic: Name | None = None
    """Dead letters are also sent to this topic."""

    relay_topic_pause: Seconds = 5.0
    """Pause between attempts to publish to a topic that accepts no events."""

    outbox_days_ahead: Count = 7
    """Daily outbox partitions that are created ahead."""
    inbox_generations_ahead: Count = 2
    """Inbox generations that are created ahead."""
    inbox_generation_age: Seconds = 345_600.0
    """Time for which a generation takes new markers: 4 days. Each message is looked up in all that
    are kept."""
    inbox_age: Annotated[Seconds, Field(ge=7_200)] = 691_200.0
    """Shortest time for which an event is remembered: 8 days. It must exceed the topics'
    retention."""
    inbox_must_cover_topics: bool = False
    """Refuse to start, instead of warning, if a topic's retention exceeds `PIPELINE_INBOX_AGE`."""
    outbox_age: Annotated[Seconds, Field(ge=7_200)] = 172_800.0
    """A published day of the outbox is dropped this long after its end."""
    discarded_age: Seconds = 2_592_000.0
    """Discarded dead letters are deleted after this long: 30 days."""
    retention_interval: Seconds = 3_600.0
    """Interval at which one process drops old partitions."""

    shutdown_grace: Seconds = 20.0
    """Time after SIGTERM to finish work. The supervisor's time-out must be 15 s longer."""
    health_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address of the health server; `0.0.0.0` for all."""
    health_port: Annotated[int, Field(ge=0, le=65_535)] = 8_080
    """`/health/live`, `/health/ready` and `/metrics`; 0 picks a free port and logs it."""
    otlp_endpoint: (
        Annotated[str, written("https?://[^/@][^@]*", "http://host:port or https://host:port")]
        | None
    ) = None
    """Base URL of an OTLP/HTTP receiver; credentials belong into `OTEL_EXPORTER_OTLP_HEADERS`."""
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the traces started here that are recorded."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Only DEBUG has a line for each message."""
    log_loggers: (
        Annotated[
            str, written(r"[^,\s]+(,[^,\s]+)*", "names of loggers, several separated by commas")
        ]
        | None
    ) = None
    """Libraries that log from the same level on, such as `httpx2,sqlalchemy.engine`; others log
    only warnings."""
    log_json: bool | None = None
    """JSON or readable lines; unset: JSON except on a terminal."""

    @property
    def memory(self) -> int:
        """Bytes of memory of the process."""
        return self.memory_mebibytes * 2**20 if self.memory_mebibytes else available_memory()

    def share(self, number: int) -> int:
        """Bytes that each has of so many that have like parts of the memory together."""
        return self.memory // (_PARTS * max(1, number))

    @property
    def largest_batch(self) -> int:
        """Bytes to which a producer's batch may unpack: it is copied, and others have shares."""
        return min(self.unpacked_mebibytes * 2**20, self.memory // 6)

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        # A stopped process must not hold locks after the group has given its partitions away.
        if not self.lock_timeout < self.transaction_timeout < self.kafka_session_timeout:
            yield (
                "PIPELINE_LOCK_TIMEOUT < PIPELINE_TRANSACTION_TIMEOUT <"
                f" PIPELINE_KAFKA_SESSION_TIMEOUT must hold; they are {self.lock_timeout},"
                f" {self.transaction_timeout} and {self.kafka_session_timeout} seconds"
            )
        if self.relay_transactional and not self.relay_idempotent:
            yield "PIPELINE_RELAY_TRANSACTIONAL needs PIPELINE_RELAY_IDEMPOTENT, which is off"
        if not self.transaction_timeout < self.backlog_lease:
            yield (
                "PIPELINE_TRANSACTION_TIMEOUT < PIPELINE_BACKLOG_LEASE must hold; they are"
                f" {self.transaction_timeout} and {self.backlog_lease} seconds"
            )


class WriterSettings(Settings):
    """Settings of a process that only writes to the database, and needs no Kafka."""

    kafka_bootstrap_servers: str = ""
