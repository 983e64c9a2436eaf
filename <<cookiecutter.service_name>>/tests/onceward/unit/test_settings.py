"""Settings: where they come from, what is refused, and that secrets stay so."""

import os
import re
import subprocess
import sys
from contextlib import suppress
from inspect import signature
from itertools import product
from pathlib import Path

import pytest
import settings_guide
from pydantic import SecretStr, ValidationError
from pydantic_settings import BaseSettings
from sqlalchemy import MetaData

from onceward import Handlers, Policy, Service
from onceward.apply import backlog
from onceward.server_settings import over_http
from onceward.settings import Settings, available_memory, mistakes

URL = "postgresql+asyncpg://service:hunter2@db:5432/service"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what is required, and nothing else."""
    for name in list(os.environ):
        if name.upper().startswith("PIPELINE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIPELINE_DATABASE_URL", URL)
    monkeypatch.setenv("PIPELINE_KAFKA_BOOTSTRAP_SERVERS", "kafka:9092")


def test_two_variables_are_enough() -> None:
    settings = Settings()
    assert settings.database_url.get_secret_value() == URL
    assert settings.kafka_bootstrap_servers == "kafka:9092"
    assert settings.consumer_start == "earliest"


def test_the_delivery_guarantees_name_the_defaults() -> None:
    day = 86_400
    settings = Settings()
    assert (settings.inbox_age, settings.discarded_age) == (8 * day, 30 * day)
    assert not settings.inbox_must_cover_topics
    assert settings.consumer_start == "earliest"
    assert (settings.concurrency, settings.breaker_keys) == (4, 20)
    policy = Policy()
    assert (policy.attempts, policy.after_death) == (6, "go on")
    assert sum(policy.schedule[: policy.attempts - 1]) == pytest.approx(105 * 60, rel=0.05)
    assert not signature(Handlers.topic).parameters["demands_types"].default
    assert backlog._MOST_DUE == 10_000


MEBIBYTE = 2**20
UNLIMITED = 2**63 - 4096
"""What the first version of control groups says where there is no limit."""


@pytest.mark.parametrize(
    ("limits", "mebibytes"),
    [
        ({"memory.max": 768 * MEBIBYTE}, 768),
        ({"memory.max": "max"}, None),
        ({"memory/memory.limit_in_bytes": 768 * MEBIBYTE}, 768),
        ({"memory/memory.limit_in_bytes": UNLIMITED}, None),
        ({"memory.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_the_memory_is_that_of_the_container_or_the_machine(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    limits: dict[str, object],
    mebibytes: int | None,
) -> None:
    for name, limit in limits.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{limit}\n", "ascii")
    monkeypatch.setattr("onceward.settings._GROUP", tmp_path)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = available_memory.__wrapped__()
    assert found == (machine if mebibytes is None else mebibytes * MEBIBYTE)


@pytest.mark.parametrize(("memory", "largest"), [(64, 64 * MEBIBYTE // 6), (8_000, 128 * MEBIBYTE)])
def test_the_memory_that_is_set_bounds_the_largest_batch(
    monkeypatch: pytest.MonkeyPatch, memory: int, largest: int
) -> None:
    monkeypatch.setenv("PIPELINE_MEMORY_MEBIBYTES", f"{memory}")
    assert Settings().memory == memory * MEBIBYTE
    assert Settings().largest_batch == largest
    monkeypatch.setenv("PIPELINE_MEMORY_MEBIBYTES", "63")
    with pytest.raises(ValidationError, match="greater than or equal to 64"):
        Settings()


def test_every_field_is_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_BATCH_SIZE", "17")
    monkeypatch.setenv("PIPELINE_RETRY_PAUSE", "0.5")
    monkeypatch.setenv("PIPELINE_LOG_JSON", "false")
    settings = Settings()
    assert (settings.batch_size, settings.retry_pause, settings.log_json) == (17, 0.5, False)


def test_all_mistakes_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPELINE_KAFKA_BOOTSTRAP_SERVERS")
    monkeypatch.setenv("PIPELINE_BATCH_SIZE", "0")
    monkeypatch.setenv("PIPELINE_CONSUMER_START", "middle")
    monkeypatch.setenv("PIPELINE_HEALTH_PORT", "70000")
    with pytest.raises(ValidationError) as errors:
        Settings()
    assert {error["loc"][0] for error in errors.value.errors()} == {
        "kafka_bootstrap_servers",
        "batch_size",
        "consumer_start",
        "health_port",
    }


def test_each_mistake_names_its_variable_and_says_what_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {
        "KAFKA_BOOTSTRAP_SERVERS": "write host:port, several separated by commas, no protocol",
        "DEAD_LETTER_TOPIC": "write a name of letters, digits, '.', '_', '-'",
        "OTLP_ENDPOINT": "write http://host:port or https://host:port",
        "BATCH_SIZE": "Input should be greater than or equal to 1",
        "LOG_LEVEL": "Input should be 'DEBUG', 'INFO', 'WARNING' or 'ERROR'",
    }
    for name in told:
        monkeypatch.setenv(f"PIPELINE_{name}", "-1 /")
    monkeypatch.setenv("PIPELINE_BATCH_SIZE", "0")
    with pytest.raises(ValidationError) as errors:
        Settings()
    said = list(mistakes(errors.value, Settings))
    assert sorted(said) == sorted(f"PIPELINE_{name}: {text}" for name, text in told.items())


def test_nothing_is_said_of_how_a_wrong_setting_fits_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PIPELINE_DATABASE_URL")
    monkeypatch.setenv("PIPELINE_KAFKA_SECURITY_PROTOCOL", "TLS")
    monkeypatch.setenv("PIPELINE_KAFKA_USER", "ada")
    monkeypatch.setenv("PIPELINE_TRANSACTION_TIMEOUT", "-1")
    monkeypatch.setenv("PIPELINE_BACKLOG_LEASE", "1")
    with pytest.raises(ValidationError) as errors:
        Settings()
    assert [one.partition(": ")[0] for one in mistakes(errors.value, Settings)] == [
        "PIPELINE_DATABASE_URL",
        "PIPELINE_KAFKA_SECURITY_PROTOCOL",
        "PIPELINE_TRANSACTION_TIMEOUT",
    ]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://service:hunter2@db/service",
        "postgresql+psycopg://service:hunter2@db/service",
        "hunter2",
        "",
        # Of a password that is not percent-encoded the end is taken for the host, or the port.
        "postgresql+asyncpg://service:pass@hunter2@db/service",
        "postgresql+asyncpg://service:pass@db:hunter2/service",
        "postgresql+asyncpg://service:pa@ss:hunter2@db/service",
    ],
)
def test_another_kind_of_database_url_is_refused_and_not_quoted(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("PIPELINE_DATABASE_URL", url)
    with pytest.raises(ValidationError, match=r"postgresql\+asyncpg://user:password@") as error:
        Settings()
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("length", [2, pytest.param(3, marks=pytest.mark.full)])
def test_no_part_of_a_password_is_taken_for_the_host(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    named: dict[str, str] = {}
    for password in map("".join, product("s@:/?#[]%5= ", repeat=length)):
        url = f"postgresql+asyncpg://service:{password}@db:5432/service"
        monkeypatch.setenv("PIPELINE_DATABASE_URL", url)
        with suppress(ValidationError):
            named[password] = Settings().postgresql
    assert len(named) > 0.5 * 12**length
    assert {one: name for one, name in named.items() if name != "PostgreSQL at db:5432"} == {}


@pytest.mark.parametrize("host", ["a b", "db,db2", "#", "%40db", 'd"b'])
def test_what_cannot_be_a_host_is_refused_and_not_quoted(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("PIPELINE_DATABASE_URL", f"postgresql+asyncpg://me:x@{host}:5432/service")
    with pytest.raises(ValidationError, match="percent-encode special characters") as error:
        Settings()
    assert host not in str(error.value)


def test_the_password_is_never_printed() -> None:
    settings = Settings()
    assert "hunter2" not in f"{settings} {settings!r} {settings.model_dump()}"
    assert "hunter2" not in settings.model_dump_json()


def test_a_mistake_elsewhere_does_not_print_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_LOCK_TIMEOUT", "9")
    with pytest.raises(
        ValidationError, match="LOCK_TIMEOUT < PIPELINE_TRANSACTION_TIMEOUT"
    ) as error:
        Settings()
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("lock", "transaction", "session", "good"),
    [(1, 2, 3, True), (2, 2, 3, False), (1, 3, 3, False), (1, 4, 3, False), (3, 2, 4, False)],
)
def test_the_server_gives_up_before_the_group_does(
    monkeypatch: pytest.MonkeyPatch, lock: int, transaction: int, session: int, good: bool
) -> None:
    """Trap 35."""
    monkeypatch.setenv("PIPELINE_LOCK_TIMEOUT", str(lock))
    monkeypatch.setenv("PIPELINE_TRANSACTION_TIMEOUT", str(transaction))
    monkeypatch.setenv("PIPELINE_KAFKA_SESSION_TIMEOUT", str(session))
    if good:
        Settings()
    else:
        with pytest.raises(ValidationError, match="must hold"):
            Settings()


@pytest.mark.parametrize(("lease", "good"), [(8.5, True), (8, False), (2, False)])
def test_a_worker_of_the_backlog_is_given_up_after_its_transaction(
    monkeypatch: pytest.MonkeyPatch, lease: float, good: bool
) -> None:
    """Trap 35."""
    monkeypatch.setenv("PIPELINE_TRANSACTION_TIMEOUT", "8")
    monkeypatch.setenv("PIPELINE_BACKLOG_LEASE", str(lease))
    if good:
        Settings()
    else:
        with pytest.raises(
            ValidationError, match="TRANSACTION_TIMEOUT < PIPELINE_BACKLOG_LEASE must hold"
        ):
            Settings()


@pytest.mark.parametrize(
    "name", ["RETRY_PAUSE", "LOCK_TIMEOUT", "RELAY_POLL_MIN", "INBOX_AGE", "OUTBOX_AGE"]
)
@pytest.mark.parametrize("value", ["0", "-1", "soon", "inf", "nan", "1e11"])
def test_a_duration_is_more_than_nothing_and_ends(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"PIPELINE_{name}", value)
    with pytest.raises(ValidationError, match=name.lower()):
        Settings()


def test_settings_do_not_change_once_they_are_read() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().batch_size = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "servers", ["PLAINTEXT://kafka:9092", "kafka", "me:hunter2@kafka:9092", "kafka:9092,SSL://b:1"]
)
def test_a_broker_is_a_host_and_a_port(monkeypatch: pytest.MonkeyPatch, servers: str) -> None:
    monkeypatch.setenv("PIPELINE_KAFKA_BOOTSTRAP_SERVERS", servers)
    with pytest.raises(
        ValidationError, match="write host:port, several separated by commas, no protocol"
    ) as error:
        Settings()
    assert "hunter2" not in str(error.value)


def test_servers_are_named_without_the_user_and_the_password() -> None:
    settings = Settings()
    assert settings.postgresql == "PostgreSQL at db:5432"
    assert settings.kafka == "Kafka at kafka:9092"


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("postgresql+asyncpg://service:hunter2@db/service", "PostgreSQL at db:5432"),
        ("postgresql+asyncpg://service:hunter2@[::1]:6/service", "PostgreSQL at ::1:6"),
        ("postgresql+asyncpg:///service", "PostgreSQL at localhost:5432"),
        (
            "postgresql+asyncpg://me:hunter2@/service?host=db1:5432&host=db2:6432",
            "PostgreSQL at db1:5432, db2:6432",
        ),
        ("postgresql+asyncpg://me@/service?host=/run/postgresql", "PostgreSQL at /run/postgresql"),
    ],
)
def test_a_database_url_may_leave_out_where(
    monkeypatch: pytest.MonkeyPatch, url: str, named: str
) -> None:
    monkeypatch.setenv("PIPELINE_DATABASE_URL", url)
    assert Settings().postgresql == named


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Return a folder with a certificate, its locked key, another key, and what is neither."""
    for name, locked in (("own", ["-passout", "pass:hunter2"]), ("other", ["-noenc"])):
        made = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"]
        kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        subprocess.run(
            ["openssl", "req", "-x509", *kind, *locked, *made],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
    (tmp_path / "rubbish.pem").write_text("hunter2")
    return tmp_path


@pytest.mark.parametrize(
    ("chosen", "mistakes"),
    [
        ({"KAFKA_SECURITY_PROTOCOL": "SASL_SSL"}, ["KAFKA_USER is not set", "KAFKA_PASSWORD is"]),
        ({"KAFKA_USER": "u", "KAFKA_PASSWORD": "hunter2"}, ["USER is set, and", "PASSWORD is set"]),
        (
            {
                "KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
                "KAFKA_SASL_MECHANISM": "PLAIN",
                "KAFKA_USER": "u",
                "KAFKA_PASSWORD": "hunter2",
            },
            ["PLAIN, which sends the password as it is"],
        ),
        (
            {"KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT", "KAFKA_SASL_MECHANISM": "OAUTHBEARER"},
            ["KAFKA_TOKEN_PROVIDER is not set", "OAUTHBEARER, which sends the token as it is"],
        ),
        (
            {
                "KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
                "KAFKA_SASL_MECHANISM": "OAUTHBEARER",
                "KAFKA_TOKEN_PROVIDER": "getpass:getuser",
                "KAFKA_PASSWORD": "hunter2",
            },
            ["KAFKA_PASSWORD is set, and would not be used: .*_MECHANISM OAUTHBEARER"],
        ),
        (
            {"KAFKA_TOKEN_PROVIDER": "getpass:getuser", "KAFKA_TOKEN_EXTENSIONS": "a=b,c=d"},
            ["TOKEN_PROVIDER is set, and", "TOKEN_EXTENSIONS is set, and"],
        ),
        ({"DATABASE_PASSWORD_PROVIDER": "getpass:getuser"}, ["_URL has a password, and"]),
        (
            {"DATABASE_PASSWORD_PROVIDER": "nowhere:password"},
            ["nowhere:password can't be imported: ModuleNotFoundError: No module named 'nowhere'"],
        ),
        ({"DATABASE_PASSWORD_PROVIDER": "os:name"}, ["os:name is no function"]),
        ({"DATABASE_PASSWORD_PROVIDER": "getpass.getuser"}, ["write module:function"]),
        (
            {"KAFKA_TOKEN_PROVIDER": "onceward.oidc.tokens:token"},
            ["OIDC_TOKEN_URL: Field required"],
        ),
        (
            {"RELAY_TRANSACTIONAL": "yes", "RELAY_IDEMPOTENT": "no"},
            ["RELAY_TRANSACTIONAL needs PIPELINE_RELAY_IDEMPOTENT"],
        ),
        (
            {"KAFKA_CA_FILE": "own.pem", "DATABASE_CA_FILE": "own.pem", "BACKLOG_LEASE": "3"},
            [
                "KAFKA_CA_FILE is set, and",
                "DATABASE_TLS is not set",
                "< PIPELINE_BACKLOG_LEASE must hold",
            ],
        ),
        (
            {"DATABASE_TLS": "1", "DATABASE_CA_FILE": "none.pem"},
            ["none.pem can't be read: No such"],
        ),
        ({"DATABASE_TLS": "1", "DATABASE_CA_FILE": "rubbish.pem"}, ["rubbish.pem holds no cert"]),
        (
            {"DATABASE_TLS": "1", "DATABASE_CERTIFICATE_FILE": "own.pem"},
            ["DATABASE_KEY_FILE is not set, and"],
        ),
        (
            {"DATABASE_TLS": "1", "DATABASE_KEY_PASSWORD": "hunter2"},
            ["KEY_PASSWORD is set, and PIPELINE_DATABASE_KEY_FILE is not"],
        ),
        *(
            (
                {
                    "KAFKA_SECURITY_PROTOCOL": "SSL",
                    "KAFKA_CERTIFICATE_FILE": "own.pem",
                    "KAFKA_KEY_FILE": key,
                    **password,
                },
                [f"own.pem and .*{key} are not a certificate and its key"],
            )
            for key, password in (
                ("own.key", {}),
                ("own.key", {"KAFKA_KEY_PASSWORD": "wrong"}),
                ("other.key", {}),
                ("rubbish.pem", {}),
            )
        ),
    ],
)
def test_all_incompatible_tls_and_sasl_settings_are_reported(
    monkeypatch: pytest.MonkeyPatch, files: Path, chosen: dict[str, str], mistakes: list[str]
) -> None:
    monkeypatch.delitem(sys.modules, "onceward.oidc.tokens", raising=False)
    for name, value in chosen.items():
        is_file = name.endswith("_FILE")
        monkeypatch.setenv(f"PIPELINE_{name}", str(files / value) if is_file else value)
    with pytest.raises(ValidationError) as errors:
        Settings()
    text = str(errors.value)
    for mistake in mistakes:
        assert re.search(mistake, text), text
    assert "hunter2" not in text


def test_a_locked_key_is_opened_by_its_password(
    monkeypatch: pytest.MonkeyPatch, files: Path
) -> None:
    for server in "KAFKA", "DATABASE":
        monkeypatch.setenv(f"PIPELINE_{server}_CERTIFICATE_FILE", str(files / "own.pem"))
        monkeypatch.setenv(f"PIPELINE_{server}_KEY_FILE", str(files / "own.key"))
        monkeypatch.setenv(f"PIPELINE_{server}_KEY_PASSWORD", "hunter2")
    monkeypatch.setenv("PIPELINE_KAFKA_SECURITY_PROTOCOL", "SSL")
    monkeypatch.setenv("PIPELINE_DATABASE_TLS", "yes")
    settings = Settings()
    assert settings.kafka_context()
    assert settings.database_context()
    assert "hunter2" not in repr(settings)


def test_without_a_word_nothing_is_asked_of_the_servers() -> None:
    settings = Settings()
    assert settings.kafka_security_protocol == "PLAINTEXT"
    assert settings.kafka_context() is settings.database_context() is None


@pytest.mark.parametrize("query", ["ssl=require", "sslmode=verify-full&sslrootcert=ca.pem"])
def test_tls_is_not_told_in_the_url(monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    monkeypatch.setenv("PIPELINE_DATABASE_URL", f"{URL}?{query}")
    with pytest.raises(ValidationError, match=r"leave ssl.* out: PIPELINE_DATABASE_TLS"):
        Settings()


def test_that_tls_is_not_even_tried_is_told_in_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_DATABASE_URL", f"{URL}?ssl=disable")
    assert Settings().database_context() is None


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("http://collector:4318", "collector"),
        ("http://[2001:db8::1]:4318/otlp", "[2001:db8::1]"),
        ("http://127.0.0.1:4318", None),
        ("http://[::1]", None),
        ("http://[::ffff:127.0.0.1]", None),
        ("http://LOCALHOST.:4318", None),
        ("https://collector:4318", None),
    ],
)
def test_each_http_host_beyond_loopback_is_reported_with_its_setting(
    monkeypatch: pytest.MonkeyPatch, address: str, host: str | None
) -> None:
    monkeypatch.setenv("PIPELINE_OTLP_ENDPOINT", address)
    found = [one for one, _ in over_http(Settings())]
    assert found == [
        f"connections to {one} (PIPELINE_OTLP_ENDPOINT) are not secured by TLS"
        for one in [host]
        if one
    ]


def test_packages_are_asked_too_and_nothing_is_named_twice_nor_any_secret() -> None:
    class Partners(BaseSettings):
        partners: str = "HTTP://me:hunter2@one:80/x, https://two,http://three?x,http://localhost"
        partner_key: SecretStr = SecretStr("http://hunter2/")

    service = Service("bank", Handlers(), MetaData(), settings=[Partners, Partners])
    faults, advice = zip(*service.plaintext(Settings()), strict=True)
    assert faults == tuple(
        f"connections to {host} are not secured by TLS"
        for host in (
            "one (PARTNERS)",
            "three (PARTNERS)",
        )
    )
    assert advice == ("use https://", "use https://")


def test_the_page_on_security_names_every_setting_of_it_and_no_other() -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text("utf-8")
    named = {name.lower() for name in re.findall(r"PIPELINE_(\w+)", page)}
    secured = re.compile(
        r"database_(tls|ca_file|certificate_file|key_\w+)"
        r"|kafka_(security_protocol|sasl_mechanism|user|password|ca_file|certificate_file|key_\w+)"
    )
    ours = {name for name in Settings.model_fields if secured.fullmatch(name)}
    assert ours <= named <= set(Settings.model_fields)


def test_the_guide_tells_of_every_setting_what_the_code_says() -> None:
    written = (Path(__file__).parents[3] / "docs" / "settings.md").read_text("utf-8")
    assert written == settings_guide.page(), settings_guide.__doc__
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []
