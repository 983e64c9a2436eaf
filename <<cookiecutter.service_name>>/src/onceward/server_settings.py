"""Settings of the connections to PostgreSQL and Kafka."""

import re
import ssl
from collections.abc import Iterator
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from .redaction import redact_error

_IN_THE_URL = {"ssl", "sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword"}
"""Parameters of the URL by which other clients configure TLS."""
_TLS_FIELDS = ("ca_file", "certificate_file", "key_file", "key_password")
_HOST = re.compile(r"[\w.:-]*")
"""A name or an address, as it is without the brackets around one of IPv6."""
_NO_TLS = ("ssl", "disable")
"""The only one that is allowed: no attempt at TLS, which asyncpg otherwise makes first."""
_HTTP = re.compile(r"(?i)http://(?:[^/@\s]*@)?(\[[^]]*\]|[^/:?#,\s]*)")
"""An address without TLS; its group is the host."""


def written(pattern: str, how: str) -> AfterValidator:
    """Refuse a text that does not fit the pattern as a whole; `how` says how to write it."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"write {how}")
        return text

    return AfterValidator(check)


def _refuse_unless_function(path: str) -> str:
    try:
        found = resolve_name(path)
    except Exception as error:
        why = redact_error(f"{type(error).__name__}: {error}")
        raise ValueError(f"{path} can't be imported: {why}") from None
    if not callable(found):
        raise ValueError(f"{path} is no function")
    return path


Function = Annotated[
    str,
    AfterValidator(_refuse_unless_function),
    written(r"[\w.]+:[\w.]+", "module:function"),
]
"""A function without parameters, by its name."""


class EnvironmentSettings(BaseSettings):
    """Settings that are read from the environment; errors about them never have their values."""

    model_config = SettingsConfigDict(
        frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )


def over_http(settings: BaseSettings) -> Iterator[tuple[str, str]]:
    """Yield a fault and advice for each host beyond loopback that a setting names by `http://`.

    Secrets are not searched.
    """
    prefix = settings.model_config.get("env_prefix", "")
    for name, value in settings:
        for host in _HTTP.findall(str(value)):
            if not _is_here(host.strip("[]").lower()):
                setting = f"{prefix}{name}".upper()
                yield f"connections to {host} ({setting}) are not secured by TLS", "use https://"


class ServerSettings(EnvironmentSettings):
    """Where the servers are, and how to connect to them."""

    model_config = SettingsConfigDict(env_prefix="PIPELINE_")

    database_url: SecretStr
    """`postgresql+asyncpg://user:password@host:port/database`"""
    database_password_provider: Function | None = None
    """`module:function` that returns the password for each new connection."""
    database_pooler: bool = False
    """The database is behind a pooler in transaction mode."""
    kafka_bootstrap_servers: Annotated[
        str,
        written(
            r"[^,\s/@]+:\d+(,[^,\s/@]+:\d+)*",
            "host:port, several separated by commas, no protocol",
        ),
    ]
    """`host:port`, several separated by commas"""

    database_tls: bool = False
    """Connect by TLS only, and verify the server's certificate and name."""
    database_ca_file: Path | None = None
    """Authorities to trust; unset: the system's."""
    database_certificate_file: Path | None = None
    """The service's certificate, if the server requests one."""
    database_key_file: Path | None = None
    """Its key; it may be in the same file."""
    database_key_password: SecretStr | None = None
    """If the key is encrypted."""

    kafka_security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """SSL verifies the brokers' certificates and names; SASL sends a user."""
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = (
        "SCRAM-SHA-512"
    )
    """`PLAIN` and `OAUTHBEARER` need `SASL_SSL`."""
    kafka_user: str | None = None
    """For SASL with a password."""
    kafka_password: SecretStr | None = None
    """For SASL with a password."""
    kafka_token_provider: Function | None = None
    """`module:function` that returns a token for OAUTHBEARER."""
    kafka_token_extensions: (
        Annotated[
            str, written("[A-Za-z]+=[^,]+(,[A-Za-z]+=[^,]+)*", "name=value, separated by commas")
        ]
        | None
    ) = None
    """SASL extensions for the token: `name=value`, separated by commas."""
    kafka_ca_file: Path | None = None
    """Authorities to trust; unset: the system's."""
    kafka_certificate_file: Path | None = None
    """The service's certificate, if brokers request one (mTLS)."""
    kafka_key_file: Path | None = None
    """Its key; it may be in the same file."""
    kafka_key_password: SecretStr | None = None
    """If the key is encrypted."""

    @cached_property
    def postgresql(self) -> str:
        """Return the database's server for messages, without the user."""
        url = make_url(self.database_url.get_secret_value())
        hosts = url.normalized_query.get("host", [f"{url.host or 'localhost'}:{url.port or 5432}"])
        return f"PostgreSQL at {', '.join(hosts)}"

    @property
    def kafka(self) -> str:
        """Return the brokers for messages."""
        return f"Kafka at {self.kafka_bootstrap_servers}"

    def database_context(self) -> ssl.SSLContext | None:
        """Return how to connect to PostgreSQL by TLS; None without TLS."""
        return self._tls_files("database").context() if self.database_tls else None

    def kafka_context(self) -> ssl.SSLContext | None:
        """Return how to connect to Kafka by TLS; None without TLS."""
        is_tls = self.kafka_security_protocol.endswith("SSL")
        return self._tls_files("kafka").context() if is_tls else None

    def _tls_files(self, server: str) -> "_TlsFiles":
        ca, certificate, key, password = (getattr(self, f"{server}_{name}") for name in _TLS_FIELDS)
        return _TlsFiles(ca, certificate, key, _revealed(password))

    @field_validator("database_url")
    @classmethod
    def _is_an_asyncpg_url(cls, value: SecretStr) -> SecretStr:
        try:
            url = make_url(value.get_secret_value())
            driver = url.drivername
            query = {name for name, how in url.query.items() if (name, how) != _NO_TLS}
            # Otherwise the password goes on in what was taken for the host or what follows it.
            is_whole = value.get_secret_value().count("@") < 2 and _HOST.fullmatch(url.host or "")
        except (ArgumentError, ValueError):  # the latter quotes what was taken for the port
            driver, query, is_whole = None, set(), None
        if driver != "postgresql+asyncpg" or not is_whole:
            raise ValueError(
                "write it as postgresql+asyncpg://user:password@host:port/database"
                " (percent-encode special characters of user and password)"
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
        if (
            self.database_password_provider
            and make_url(self.database_url.get_secret_value()).password
        ):
            yield (
                "PIPELINE_DATABASE_URL has a password, and PIPELINE_DATABASE_PASSWORD_PROVIDER"
                " is set: leave one of them out"
            )
        unused = None if self.database_tls else "PIPELINE_DATABASE_TLS is not set"
        yield from self._tls_files("database").mistakes("PIPELINE_DATABASE", unused)
        is_plain = not protocol.endswith("SSL")
        unused = f"PIPELINE_KAFKA_SECURITY_PROTOCOL is {protocol}" if is_plain else None
        yield from self._tls_files("kafka").mistakes("PIPELINE_KAFKA", unused)

    def _mistakes_of_sasl(self) -> Iterator[str]:
        protocol = f"PIPELINE_KAFKA_SECURITY_PROTOCOL is {self.kafka_security_protocol}"
        is_sasl = self.kafka_security_protocol.startswith("SASL")
        mechanism, by_token = self.kafka_sasl_mechanism, self.kafka_sasl_mechanism == "OAUTHBEARER"
        why = f"{protocol}, PIPELINE_KAFKA_SASL_MECHANISM {mechanism}" if is_sasl else protocol
        for name, value, is_of_token in (
            ("USER", self.kafka_user, False),
            ("PASSWORD", _revealed(self.kafka_password), False),
            ("TOKEN_PROVIDER", self.kafka_token_provider, True),
            ("TOKEN_EXTENSIONS", self.kafka_token_extensions, True),
        ):
            is_used = is_sasl and is_of_token == by_token
            if is_used and not value and name != "TOKEN_EXTENSIONS":
                yield f"PIPELINE_KAFKA_{name} is not set: {why}"
            elif value and not is_used:
                yield f"PIPELINE_KAFKA_{name} is set, and would not be used: {why}"
        if protocol.endswith(" SASL_PLAINTEXT") and mechanism in ("PLAIN", "OAUTHBEARER"):
            yield (
                f"PIPELINE_KAFKA_SASL_MECHANISM is {mechanism}, which sends the"
                f" {'token' if by_token else 'password'} as it is: set"
                " PIPELINE_KAFKA_SECURITY_PROTOCOL to SASL_SSL"
            )


def _revealed(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret else None


def is_loopback(address: str) -> bool:
    """Return whether the address of IPv4 or IPv6 is this machine's own."""
    found = ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def _is_here(host: str) -> bool:
    try:
        return is_loopback(host)
    except ValueError:
        return host.rstrip(".") in ("", "localhost")


class _TlsFiles(NamedTuple):
    """The authorities to trust, and the client's certificate, of one server."""

    ca: Path | None
    certificate: Path | None
    key: Path | None
    password: str | None
    """That of the key."""

    def mistakes(self, prefix: str, unused: str | None) -> Iterator[str]:
        """Yield what is wrong with the settings; `unused` is why they are not used."""
        _, certificate, key, password = names = [f"{prefix}_{one}".upper() for one in _TLS_FIELDS]
        if unused:
            for name in (name for name, value in zip(names, self, strict=True) if value):
                yield f"{name} is set, and would not be used: {unused}"
        if bool(self.certificate) != bool(self.key):
            missing, other = (key, certificate) if self.certificate else (certificate, key)
            yield f"{missing} is not set, and {other} is"
        elif self.password and not self.key:
            yield f"{password} is set, and {key} is not"
        if not unused:
            try:
                self.context()
            except ValueError as error:
                yield f"{prefix}_…_FILE: {error}"

    def context(self) -> ssl.SSLContext:
        """Return the context of connections, which verify the server's certificate and name.

        Raises `ValueError`, with the file and the reason.
        """
        for file in filter(None, (self.ca, self.certificate, self.key)):
            try:
                file.read_bytes()
            except OSError as error:
                raise ValueError(f"{file} can't be read: {error.strerror}") from None
        try:
            found = ssl.create_default_context(cafile=self.ca)
        except ssl.SSLError:
            raise ValueError(f"{self.ca} holds no certificates in PEM") from None
        if self.certificate and self.key:
            try:
                # Without a callback OpenSSL prompts for the password on the terminal.
                password = self.password or ""
                found.load_cert_chain(self.certificate, self.key, password=lambda: password)
            except (ssl.SSLError, ValueError):
                raise ValueError(
                    f"{self.certificate} and {self.key} are not a certificate and its key in PEM,"
                    " or the key's password is another"
                ) from None
        return found
