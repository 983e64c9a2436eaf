"""Settings of the connections to PostgreSQL and Kafka."""

import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from . import tls

_IN_THE_URL = {"ssl", "sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword"}
"""Parameters of the URL by which other clients configure TLS."""
_NO_TLS = ("ssl", "disable")
"""The only one that is allowed: no attempt at TLS, which asyncpg otherwise makes first."""


def written(pattern: str, how: str) -> AfterValidator:
    """Refuse a text that does not fit the pattern as a whole; `how` says how to write it."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"write {how}")
        return text

    return AfterValidator(check)


class ServerSettings(BaseSettings):
    """Where the servers are, and how to connect to them."""

    model_config = SettingsConfigDict(
        env_prefix="PIPELINE_",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    database_url: SecretStr
    """`postgresql+asyncpg://user:password@host:port/database`"""
    database_pooler: bool = False
    """A pooler in transaction mode (PgBouncer) stands before the database. Set `jit = off` for the
    role then: a session can't."""
    kafka_bootstrap_servers: Annotated[
        str,
        written(r"[^,\s]+:\d+(,[^,\s]+:\d+)*", "host:port, several separated by commas"),
    ]
    """`host:port`, several separated by commas"""

    database_tls: bool = False
    """Connect by TLS only, and verify the server's certificate and name. Unset: by TLS where the
    server offers it, and nothing is verified."""
    database_ca_file: Path | None = None
    """Authorities to trust, in PEM; unset: the system's."""
    database_certificate_file: Path | None = None
    """Our certificate, in PEM, for a server that requests one."""
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
    """Our certificate, in PEM, for brokers that request one (mTLS)."""
    kafka_key_file: Path | None = None
    """Its key, in PEM; it may be the same file."""
    kafka_key_password: SecretStr | None = None
    """If the key is encrypted."""

    @property
    def postgresql(self) -> str:
        """Return the database's server for messages, without the user."""
        url = make_url(self.database_url.get_secret_value())
        return f"PostgreSQL at {url.host or 'localhost'}:{url.port or 5432}"

    @property
    def kafka(self) -> str:
        """Return the brokers for messages."""
        return f"Kafka at {self.kafka_bootstrap_servers}"

    @property
    def _database_files(self) -> tls.Files:
        return tls.Files(
            self.database_ca_file,
            self.database_certificate_file,
            self.database_key_file,
            _revealed(self.database_key_password),
        )

    @property
    def _kafka_files(self) -> tls.Files:
        return tls.Files(
            self.kafka_ca_file,
            self.kafka_certificate_file,
            self.kafka_key_file,
            _revealed(self.kafka_key_password),
        )

    def database_context(self) -> ssl.SSLContext | None:
        """Return how to connect to PostgreSQL by TLS; None without TLS."""
        return tls.context(self._database_files) if self.database_tls else None

    def kafka_context(self) -> ssl.SSLContext | None:
        """Return how to connect to Kafka by TLS; None without TLS."""
        is_tls = self.kafka_security_protocol.endswith("SSL")
        return tls.context(self._kafka_files) if is_tls else None

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
        if of_tls := sorted(query & _IN_THE_URL):
            raise ValueError(
                f"leave {', '.join(of_tls)} out: PIPELINE_DATABASE_TLS and"
                " PIPELINE_DATABASE_CA_FILE say how to connect by TLS"
            )
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if mistakes := list(self._mistakes()):
            raise ValueError("\n".join(mistakes))
        return self

    def _mistakes(self) -> Iterator[str]:
        """Yield what is wrong with settings that are valid by themselves."""
        protocol = self.kafka_security_protocol
        yield from self._mistakes_of_sasl()
        unused = None if self.database_tls else "PIPELINE_DATABASE_TLS is not set"
        yield from tls.mistakes("PIPELINE_DATABASE", self._database_files, unused)
        is_plain = not protocol.endswith("SSL")
        unused = f"PIPELINE_KAFKA_SECURITY_PROTOCOL is {protocol}" if is_plain else None
        yield from tls.mistakes("PIPELINE_KAFKA", self._kafka_files, unused)

    def _mistakes_of_sasl(self) -> Iterator[str]:
        protocol = self.kafka_security_protocol
        needed = {
            "PIPELINE_KAFKA_USER": self.kafka_user,
            "PIPELINE_KAFKA_PASSWORD": _revealed(self.kafka_password),
        }
        for name, value in needed.items():
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


def _revealed(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret else None
