"""Settings of a service, read from the environment once, at the start.

Every field is the variable `PIPELINE_<FIELD>`. Wrong values are refused, all mistakes at once.
Durations are in seconds.
"""

import re
import ssl
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from . import tls

SECONDS = "s"
"""The unit of durations, for the guide that is made of the fields."""


def _ends(seconds: float) -> float:
    if not seconds <= 100 * 365 * 86_400:
        raise ValueError("at most a hundred years, in seconds: times end somewhere")
    return seconds


def written(pattern: str, how: str) -> AfterValidator:
    """Refuse a text that does not fit the pattern as a whole; `how` says how to write it."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"write {how}")
        return text

    return AfterValidator(check)


Seconds = Annotated[float, Field(gt=0), AfterValidator(_ends), SECONDS]
Count = Annotated[int, Field(ge=1)]

_IN_THE_URL = {"ssl", "sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword"}
"""What other clients read there about TLS."""
_NO_TLS = ("ssl", "disable")
"""The one that may: no attempt at TLS, which asyncpg else makes first."""

CLOCK_MARGIN = timedelta(hours=1)
"""How far clocks may be apart: those of producers and brokers, and the database's from itself."""


def mistakes(error: ValidationError, settings: type[BaseSettings]) -> Iterator[str]:
    """Say what is wrong with settings, each mistake with its variable, and no value."""
    prefix = settings.model_config.get("env_prefix", "")
    found = error.errors(include_url=False, include_input=False)
    for mistake in found:
        name = "_".join(str(part) for part in mistake["loc"]).upper()
        text = mistake["msg"].removeprefix("Value error, ").replace("\n", "\n  ")
        if mistake["type"] == "missing":
            text = "is not set (for the servers of `make up`: `dev/stack.py env` prints it)"
        yield f"{f'{prefix}{name}: ' if name else ''}{text}"
    # How the others fit together has not been looked at yet: it is, with something right in place
    # of what is wrong, of which nothing is said then.
    names = {str(one["loc"][0]) for one in found if one["loc"]}
    wrong = {name: settings.model_fields[name] for name in names}
    if wrong and all(field.examples or not field.is_required() for field in wrong.values()):
        try:
            settings(**{name: _right(field) for name, field in wrong.items()})
        except ValidationError as more:
            variables = {f"{prefix}{name}".upper() for name in wrong}
            for told in "\n".join(mistakes(more, settings)).splitlines():
                if variables.isdisjoint(re.findall(r"[A-Z_]+", told)):
                    yield told.strip()


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


def _right(field: FieldInfo) -> Any:
    return field.examples[0] if field.examples else field.get_default(call_default_factory=True)


class Settings(BaseSettings):
    """What may differ between two deployments of the same service."""

    model_config = SettingsConfigDict(
        env_prefix="PIPELINE_",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    database_url: Annotated[SecretStr, Field(examples=["postgresql+asyncpg://host/database"])]
    """`postgresql+asyncpg://user:password@host:port/database`"""
    database_pooler: bool = False
    """A pooler in transaction mode (PgBouncer) stands before the database. Set `jit = off` for the
    role then: a session can't."""
    kafka_bootstrap_servers: Annotated[
        str,
        Field(examples=["host:9092"]),
        written(r"[^,\s]+:\d+(,[^,\s]+:\d+)*", "host:port, several separated by commas"),
    ]
    """`host:port`, several separated by commas"""

    database_tls: bool = False
    """Connect by TLS only, and verify the server's certificate and name. Unset: by TLS where the
    server offers it, and nothing is verified."""
    database_ca_file: Path | None = None
    """Authorities to trust, in PEM; unset: the system's."""
    database_certificate_file: Path | None = None
    """Our certificate, in PEM, for a server that asks for one."""
    database_key_file: Path | None = None
    """Its key, in PEM; it may be the same file."""
    database_key_password: SecretStr | None = None
    """If the key is encrypted."""

    kafka_security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """As Kafka names them. SSL verifies the brokers' certificates and names; SASL sends a user."""
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    """How the password is proved; PLAIN only with SASL_SSL, as it sends it as it is."""
    kafka_user: str | None = None
    """For SASL."""
    kafka_password: SecretStr | None = None
    """For SASL."""
    kafka_ca_file: Path | None = None
    """Authorities to trust, in PEM; unset: the system's."""
    kafka_certificate_file: Path | None = None
    """Our certificate, in PEM, for brokers that ask for one (mTLS)."""
    kafka_key_file: Path | None = None
    """Its key, in PEM; it may be the same file."""
    kafka_key_password: SecretStr | None = None
    """If the key is encrypted."""

    consumer_start: Literal["earliest", "latest"] = "earliest"
    """Where a partition begins that this service has never read; also one that is added later,
    so that `latest` misses what was written to it before it was noticed."""
    batch_size: Count = 3_000
    """Records of one partition that share a transaction, at most."""
    concurrency: Count = 4
    """Consume transactions that run at once, each on a connection of its own."""
    kafka_session_timeout: Annotated[Seconds, Field(ge=1)] = 10.0
    """After this long without a heartbeat the group gives our partitions to others."""
    transaction_timeout: Seconds = 8.0
    """A consume transaction that lasts longer is ended by the server; below the session timeout."""
    lock_timeout: Seconds = 4.0
    """A statement that waits longer for a lock is ended and tried again."""
    offset_commit_interval: Seconds = 5.0
    """How often Kafka's committed offsets follow the positions; only lag tools read them."""
    retry_pause: Seconds = 5.0
    """A partition that stands still, and an open breaker, are tried again after this long."""
    breaker_keys: Count = 20
    """So many keys in a row that fail alike at one consumer stop the setting aside of messages."""
    unclean_starts: Count = 3
    """So many processes that die at one position are followed by one that takes records singly."""
    unpacked_mebibytes: Annotated[int, Field(ge=1, le=2_000)] = 128
    """What a compressed batch of a producer may unpack to, in MiB: 128 times what brokers take by
    default. A larger one could take all memory: its partition stands still until a person decides.
    To read one takes about twice its size."""
    hang_timeout: Annotated[Seconds, Field(ge=2)] = 30.0
    """A process whose event loop is blocked for this long ends, with its stack in the log; what
    supervises it is to start another."""
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

    unsent_pause: Seconds = 5.0
    """What Kafka refuses (a missing topic, an event too large) is tried again after this long, and
    then after twice as long as before, up to twelve times this."""
    unsent_attempts: Count = 100
    """An event that is refused so often is a dead letter, and those behind it go on: about an hour
    and a half. Attempts that Kafka does not answer don't count."""
    unsent_age: Seconds = 86_400.0
    """An event that has waited so long, and is refused once more, is a dead letter; also where its
    topic is refused."""

    outbox_days_ahead: Count = 7
    """Daily outbox partitions that stand ready."""
    inbox_generations_ahead: Count = 2
    """Inbox generations that stand ready."""
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
    """How often those partitions and generations are dropped that are too old, by one process at a
    time. New ones are made ahead as often, and at least every minute."""

    shutdown_grace: Seconds = 20.0
    """After SIGTERM the process has this long: half of it for running batches, half for the relay.
    Keep what kills it later (Kubernetes: 30 s) above."""
    health_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address that the next one listens on; `0.0.0.0` for all, where something else protects it."""
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
    """Libraries that are heard from the same level on, such as `httpx,sqlalchemy.engine`; others
    are from warnings on. What they log may hold URLs and, at DEBUG, rows and payloads."""
    log_json: bool | None = None
    """JSON or readable lines; unset: JSON unless standard error is a terminal."""

    @property
    def postgresql(self) -> str:
        """Name the database's server in sentences for people, without the user."""
        url = make_url(self.database_url.get_secret_value())
        return f"PostgreSQL at {url.host or 'localhost'}:{url.port or 5432}"

    @property
    def kafka(self) -> str:
        """Name the brokers in sentences for people."""
        return f"Kafka at {self.kafka_bootstrap_servers}"

    @field_validator("database_url")
    @classmethod
    def _is_an_asyncpg_url(cls, value: SecretStr) -> SecretStr:
        try:
            url = make_url(value.get_secret_value())
            driver = url.drivername
            query = {name for name, how in url.query.items() if (name, how) != _NO_TLS}
            # More than one means that the password goes on in what was taken for the host.
            is_split = "@" in (url.host or "")
        except (ArgumentError, ValueError):  # the latter quotes what was taken for the port
            driver, query, is_split = None, set(), True
        if driver != "postgresql+asyncpg" or is_split:
            raise ValueError(
                "write it as postgresql+asyncpg://user:password@host:port/database"
                " (percent-encode special characters of the password)"
            )
        if told := sorted(query & _IN_THE_URL):
            raise ValueError(
                f"leave {', '.join(told)} out: PIPELINE_DATABASE_TLS and PIPELINE_DATABASE_CA_FILE"
                " say how to connect by TLS"
            )
        return value

    def database_context(self) -> ssl.SSLContext | None:
        """Return how to connect to PostgreSQL by TLS; None unless that is asked for."""
        if not self.database_tls:
            return None
        return tls.context(
            self.database_ca_file,
            self.database_certificate_file,
            self.database_key_file,
            _told(self.database_key_password),
        )

    def kafka_context(self) -> ssl.SSLContext | None:
        """Return how to connect to Kafka by TLS; None unless that is asked for."""
        if not self.kafka_security_protocol.endswith("SSL"):
            return None
        return tls.context(
            self.kafka_ca_file,
            self.kafka_certificate_file,
            self.kafka_key_file,
            _told(self.kafka_key_password),
        )

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        mistakes = [*self._of_time_outs(), *self._of_sasl()]
        for server, is_asked_for, how in (
            ("database", self.database_tls, "PIPELINE_DATABASE_TLS is not set"),
            (
                "kafka",
                self.kafka_security_protocol.endswith("SSL"),
                f"PIPELINE_KAFKA_SECURITY_PROTOCOL is {self.kafka_security_protocol}",
            ),
        ):
            mistakes += self._of_files(server, how if not is_asked_for else None)
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return self

    def _of_sasl(self) -> Iterator[str]:
        protocol = self.kafka_security_protocol
        told = {
            "PIPELINE_KAFKA_USER": self.kafka_user,
            "PIPELINE_KAFKA_PASSWORD": _told(self.kafka_password),
        }
        for name, value in told.items():
            if protocol.startswith("SASL") and not value:
                yield f"{name} is not set: PIPELINE_KAFKA_SECURITY_PROTOCOL is {protocol}"
            elif value and not protocol.startswith("SASL"):
                yield (
                    f"{name} is set, and would not be used: PIPELINE_KAFKA_SECURITY_PROTOCOL is"
                    f" {protocol}"
                )
        if protocol == "SASL_PLAINTEXT" and self.kafka_sasl_mechanism == "PLAIN":
            yield (
                "PIPELINE_KAFKA_SASL_MECHANISM is PLAIN, which sends the password as it is: set"
                " PIPELINE_KAFKA_SECURITY_PROTOCOL to SASL_SSL"
            )

    def _of_files(self, server: str, unasked: str | None) -> Iterator[str]:
        """Say what is wrong with the files for TLS, and why they are not used, if they are not."""
        prefix = f"PIPELINE_{server.upper()}"
        parts = ("ca_file", "certificate_file", "key_file", "key_password")
        ca, certificate, key, password = (getattr(self, f"{server}_{part}") for part in parts)
        for part, value in zip(parts, (ca, certificate, key, password), strict=True):
            if unasked and value:
                yield f"{prefix}_{part.upper()} is set, and would not be used: {unasked}"
        if bool(certificate) != bool(key):
            missing, other = ("KEY", "CERTIFICATE") if certificate else ("CERTIFICATE", "KEY")
            yield f"{prefix}_{missing}_FILE is not set, and {prefix}_{other}_FILE is"
        elif password and not key:
            yield f"{prefix}_KEY_PASSWORD is set, and {prefix}_KEY_FILE is not"
        if not unasked:
            try:
                tls.context(ca, certificate, key, _told(password))
            except tls.Unusable as error:
                yield f"{prefix}_…_FILE: {error}"

    def _of_time_outs(self) -> Iterator[str]:
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


def _told(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret else None


class WriterSettings(Settings):
    """Those of a process that only writes to the database, and needs no Kafka."""

    kafka_bootstrap_servers: str = ""
