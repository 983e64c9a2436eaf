"""Settings of a service, read from the environment once, at the start.

Every field is the variable `PIPELINE_<FIELD>`. All wrong values are reported at once; whether they
fit together is checked when each is valid by itself. Durations are in seconds.
"""

from collections.abc import Iterator
from datetime import timedelta
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

CLOCK_MARGIN = timedelta(hours=1)
"""How far clocks may be apart: those of producers and brokers, and the database's from itself."""


def mistakes(error: ValidationError, settings: type[BaseSettings]) -> Iterator[str]:
    """Yield what is wrong with settings, each mistake with its variable, and no value."""
    prefix = settings.model_config.get("env_prefix", "")
    for mistake in error.errors(include_url=False, include_input=False):
        name = "_".join(str(part) for part in mistake["loc"]).upper()
        text = mistake["msg"].removeprefix("Value error, ").replace("\n", "\n  ")
        if mistake["type"] == "missing":
            text = "is not set (for the servers of `make up`: `dev/stack.py env` prints it)"
        yield f"{f'{prefix}{name}: ' if name else ''}{text}"


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

    consumer_start: Literal["earliest", "latest"] = "earliest"
    """Where a partition begins that this service has never read; also one that is added later,
    so that `latest` misses what was written to it before it was noticed."""
    batch_size: Count = 3_000
    """Records of one partition that share a transaction, at most."""
    concurrency: Count = 4
    """Consume transactions that run at once, each on a connection of its own."""
    kafka_session_timeout: Annotated[Seconds, Field(ge=1)] = 10.0
    """After this long without a heartbeat the group gives the partitions of a process to others."""
    transaction_timeout: Seconds = 8.0
    """A consume transaction that lasts longer is ended by the server; below the session timeout."""
    lock_timeout: Seconds = 4.0
    """A statement that waits longer for a lock is ended and tried again."""
    offset_commit_interval: Seconds = 5.0
    """How often Kafka's committed offsets follow the positions; only lag tools read them."""
    retry_pause: Seconds = 5.0
    """A partition that stands still, and an open breaker, are tried again after this long."""
    breaker_keys: Count = 20
    """After so many keys in a row have failed alike at one consumer its breaker opens: its messages
    are not parked any more, and wait."""
    unclean_starts: Count = 3
    """After so many processes have died at one position the next parks the first records there, and
    tries each of them alone."""
    unpacked_mebibytes: Annotated[int, Field(ge=1, le=2_000)] = 128
    """What a compressed batch of a producer may unpack to, in MiB: 128 times what brokers take by
    default. A larger one could take all memory: its partition stands still until a person decides.
    To read one takes about twice its size."""
    hang_timeout: Annotated[Seconds, Field(ge=2)] = 30.0
    """A process whose event loop is blocked for this long ends, with its stack in the log; its
    supervisor has to start another. From then on `/health/live` fails, too."""
    gc_threshold: Annotated[int, Field(ge=700)] = 100_000
    """After so many more objects Python looks for cycles among the new ones: more than batches and
    pages hold, which need no search. Lower it where handlers leave much memory in cycles, as ORM
    objects that refer to each other do: at 40 objects and 50 kB a message this is 125 MB."""

    backlog_workers: Count = 2
    """Lanes of the backlog that the process works at, at once."""
    backlog_lease: Annotated[Seconds, Field(ge=1)] = 10.0
    """The lane of a worker that died is taken over after this long."""
    backlog_poll_min: Seconds = 0.02
    """Pause after something was found in the backlog, or was stored by this process."""
    backlog_poll_max: Seconds = 2.0
    """Pause that idle polls of the backlog grow to."""

    max_event_bytes: Count = 900_000
    """A larger event is refused when it is staged; stay below the topics' `max.message.bytes`."""
    relay_page: Count = 5_000
    """Events that the relay reads and sends at a time, at most. While about twice as many are not
    sent, each transaction beside it waits for it, for a second at most."""
    relay_lease: Annotated[Seconds, Field(ge=1)] = 10.0
    """The shards of a relay that died are taken over after this long."""
    relay_poll_min: Seconds = 0.01
    """Pause after a poll that found something, or after this process staged something."""
    relay_poll_max: Seconds = 0.25
    """Pause that idle polls grow to; only events that other processes stage wait for them."""
    relay_cursor_interval: Seconds = 0.25
    """The cursor is written this often; a crash repeats at most what was sent in between."""

    relay_transactional: bool = False
    """Publish in Kafka transactions, under a transactional id of each relay, which its successor
    fences: a relay that was stopped cannot send late. For consumers that can't drop repeats by id;
    they must read committed. Repeats after a crash remain."""

    dead_letter_topic: (
        Annotated[
            str,
            written(r"[a-zA-Z0-9._-]{1,249}", "a topic's name, of letters, digits, '.', '_', '-'"),
        ]
        | None
    ) = None
    """Dead letters are sent there too: records as they came, with the reason in more headers."""

    relay_topic_pause: Seconds = 5.0
    """A topic that is missing, or that may not be written, is tried again after this long; its
    events wait meanwhile, without a limit."""

    outbox_days_ahead: Count = 7
    """Daily outbox partitions that are made ahead."""
    inbox_generations_ahead: Count = 2
    """Inbox generations that are made ahead."""
    inbox_generation_age: Seconds = 86_400.0
    """A generation takes new markers for this long; then the next one does."""
    inbox_age: Annotated[Seconds, Field(ge=7_200)] = 691_200.0
    """An event is remembered for at least this long after it took effect: 8 days. Longer than the
    topics keep their records, or what is sent again may be too old to be told from a new one."""
    inbox_must_cover_topics: bool = False
    """Refuse to start where a topic keeps its records for longer than events are remembered;
    otherwise that is a warning. Brokers that don't answer are not waited for."""
    outbox_age: Annotated[Seconds, Field(ge=7_200)] = 172_800.0
    """A day of the outbox is dropped this long after its end, when all of it is published."""
    discarded_age: Seconds = 2_592_000.0
    """Dead letters are deleted this long after a person has discarded them: 30 days."""
    inbox_filter_mebibytes: Annotated[int, Field(ge=0, le=1_000)] = 128
    """Memory for filters of closed generations, by which new messages are known without a look-up,
    in MiB: 28 for 16 generations of a million messages each, as much for the 16 before them, and
    twice one's while it is loaded. A filter takes half of it at most. What does not fit is looked
    up in the database: a generation of more than 290,000 messages for each MiB, and older ones."""
    housekeeping_interval: Seconds = 3_600.0
    """How often those partitions and generations are dropped that are too old, by one process for
    all. New ones are made ahead as often, and at least every minute."""

    shutdown_grace: Seconds = 20.0
    """After SIGTERM the process has this long, for running batches, the relay, and telemetry. The
    time after which its supervisor kills it (Kubernetes: 30 s) must be 10 s longer."""
    health_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address of the health server; `0.0.0.0` for all, where something else protects it."""
    health_port: Annotated[int, Field(ge=0, le=65_535)] = 8_080
    """`/health/live`, `/health/ready` and `/metrics`; 0 picks a free port and logs it."""
    otlp_endpoint: (
        Annotated[str, written("https?://[^/@][^@]*", "http://host:port or https://host:port")]
        | None
    ) = None
    """Base URL of an OTLP/HTTP receiver; without it nothing is exported. Credentials belong into
    `OTEL_EXPORTER_OTLP_HEADERS`."""
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the traces started here that are recorded; a caller's decision is followed."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """What is less important is not written. There is no line for each message above DEBUG."""
    log_loggers: (
        Annotated[
            str, written(r"[^,\s]+(,[^,\s]+)*", "names of loggers, several separated by commas")
        ]
        | None
    ) = None
    """Libraries that log from the same level on, such as `httpx,sqlalchemy.engine`; of others only
    warnings and errors are logged. What they log may hold URLs and, at DEBUG, rows and payloads."""
    log_json: bool | None = None
    """JSON or readable lines; unset: JSON unless standard error is a terminal."""

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        # A stopped process must not hold locks after the group has given its partitions away.
        if not self.lock_timeout < self.transaction_timeout < self.kafka_session_timeout:
            yield (
                "PIPELINE_LOCK_TIMEOUT < PIPELINE_TRANSACTION_TIMEOUT <"
                f" PIPELINE_KAFKA_SESSION_TIMEOUT must hold; they are {self.lock_timeout},"
                f" {self.transaction_timeout} and {self.kafka_session_timeout} seconds"
            )
        if not self.transaction_timeout < self.backlog_lease:
            yield (
                "PIPELINE_TRANSACTION_TIMEOUT < PIPELINE_BACKLOG_LEASE must hold; they are"
                f" {self.transaction_timeout} and {self.backlog_lease} seconds"
            )


class WriterSettings(Settings):
    """Settings of a process that only writes to the database, and needs no Kafka."""

    kafka_bootstrap_servers: str = ""
