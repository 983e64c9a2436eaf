"""TLS, SASL and client certificates, with servers that take nothing else."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLCertVerificationError
from tempfile import TemporaryDirectory

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from alembic import command
from servers.network import LOOPBACK
from servers.state import StateDirectory
from sqlalchemy import URL, make_url

from .bank import Bank
from .brokers import ConfiguredKafka
from .certificates import Authority, Certificate, authority, give_to_pooler
from .conftest import build
from .guarded import guarding
from .processes import starting
from tests.contract.bank import Deposit
from tests.servers.databases import administer, migrations_of_the_engine
from tests.servers.pooler import pooling
from tests.servers.processes import Process, Start
from tests.servers.programs import require_what_it_needs
from tests.servers.topics import following
from tests.servers.waiting import eventually

pytestmark = pytest.mark.full

PASSWORD = "correct-horse"
KEY_PASSWORD = "battery-staple"

_LISTENERS = """
listeners=PLAINTEXT://{client},CONTROLLER://{controller},SCRAM://{scram},MUTUAL://{mutual}
advertised.listeners=PLAINTEXT://{client},SCRAM://{scram},MUTUAL://{mutual}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SCRAM:SASL_SSL,MUTUAL:SSL
sasl.enabled.mechanisms=SCRAM-SHA-256,SCRAM-SHA-512,PLAIN
listener.name.scram.scram-sha-256.sasl.jaas.config=\
org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.scram.scram-sha-512.sasl.jaas.config=\
org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.scram.plain.sasl.jaas.config=\
org.apache.kafka.common.security.plain.PlainLoginModule required user_teller="{password}";
listener.name.mutual.ssl.client.auth=required
ssl.keystore.type=PEM
ssl.keystore.location={own}
ssl.truststore.type=PEM
ssl.truststore.location={trusted}
"""

_TLS = """
client_tls_sslmode = require
client_tls_key_file = {key}
client_tls_cert_file = {certificate}
client_tls_ca_file = {trusted}
"""


class GuardedKafka(ConfiguredKafka):
    """A broker that also listens where one needs a password, and where one needs a certificate."""

    port_count = 4
    own: Path
    trusted: Path

    def more_settings(self, *addresses: str) -> str:
        """Listen there."""
        client, controller, scram, mutual = addresses
        return _LISTENERS.format(
            client=client,
            controller=controller,
            scram=scram,
            mutual=mutual,
            own=self.own,
            trusted=self.trusted,
            password=PASSWORD,
        )


@dataclass(frozen=True)
class Servers:
    """Where they are, and whom they trust."""

    folder: Path
    ours: Authority
    theirs: Authority
    plaintext: str
    scram: str
    mutual: str
    """Where the broker listens."""
    by_password: URL
    """Where the database is found by TLS: behind PgBouncer."""
    database: Certificate
    """Of who stands before the database."""
    secrets: tuple[str, ...]


@pytest.fixture(scope="module")
def servers(server_url: str) -> Iterator[Servers]:
    with TemporaryDirectory() as name, TemporaryDirectory() as state:
        folder = Path(name)
        folder.chmod(0o755)
        ours, theirs = authority(folder, "ours"), authority(folder, "theirs")
        broker = ours.vouch("broker", host=f"IP:{LOOPBACK}")
        database = ours.vouch("database", host=f"IP:{LOOPBACK}")
        ours.vouch("teller", password=KEY_PASSWORD)
        ours.vouch("late", days=0)
        theirs.vouch("stranger")
        guarded = _TLS.format(
            key=give_to_pooler(database.key), certificate=database.file, trusted=ours.file
        )
        directory = StateDirectory(Path(state))
        kafka = GuardedKafka(directory, "kafka", directory.state.kafka)
        kafka.own, kafka.trusted = broker.together, ours.file
        require_what_it_needs(kafka)
        try:
            kafka.start()
            with pooling(server_url, guarded) as pooler:
                kafka.wait_until_serving()
                kafka.admit("teller", PASSWORD, 256, 512)
                plaintext, _, scram, mutual = (f"{LOOPBACK}:{port}" for port in kafka.record.ports)
                yield Servers(
                    folder,
                    ours,
                    theirs,
                    plaintext,
                    scram,
                    mutual,
                    make_url(pooler.url),
                    database,
                    (PASSWORD, KEY_PASSWORD, make_url(server_url).password or ""),
                )
        finally:
            kafka.stop()
            kafka.remove()


@pytest.fixture(scope="module")
def by_certificate_only(servers: Servers) -> Iterator[URL]:
    """Where the teller finds a database of a PostgreSQL that wants to see a certificate."""
    with guarding(servers.database, servers.ours) as postgres:
        asyncio.run(administer(postgres.url, "CREATE ROLE teller LOGIN SUPERUSER"))
        build(postgres.url)
        yield make_url(postgres.url).set(username="teller")._replace(password=None)


@pytest.fixture
async def guarded(servers: Servers, unborn: Bank) -> Bank:
    """Return a bank with topics behind the guarded listeners."""
    admin = AIOKafkaAdminClient(bootstrap_servers=servers.plaintext)
    await admin.start()
    try:
        await admin.create_topics(
            [NewTopic(one, 1, 1) for one in (unborn.deposits, unborn.balances)]
        )
    finally:
        await admin.close()
    return unborn


Known = Callable[..., dict[str, object]]

NO_CERTIFICATE: dict[str, str | None] = {
    "database_certificate_file": None,
    "database_key_file": None,
    "database_key_password": None,
}


@pytest.fixture
def by_password(servers: Servers, direct_url: str) -> Known:
    """Make settings of somebody who is known to both servers by a password."""

    def make(**changes: object) -> dict[str, object]:
        database = make_url(direct_url).database
        url = servers.by_password.set(database=database)
        return {
            "database_url": url.render_as_string(hide_password=False),
            "database_pooler": True,
            "database_tls": True,
            "database_ca_file": servers.ours.file,
            "kafka_bootstrap_servers": servers.scram,
            "kafka_security_protocol": "SASL_SSL",
            "kafka_user": "teller",
            "kafka_password": PASSWORD,
            "kafka_ca_file": servers.ours.file,
            **changes,
        }

    return make


@pytest.fixture
def by_certificate(servers: Servers, by_certificate_only: URL) -> Known:
    """Make settings of somebody who is known to both servers by a certificate."""

    def make(**changes: object) -> dict[str, object]:
        certificate = {
            "ca_file": servers.ours.file,
            "certificate_file": servers.folder / "teller.pem",
            "key_file": servers.folder / "teller.key",
            "key_password": KEY_PASSWORD,
        }
        return {
            "database_url": by_certificate_only.render_as_string(),
            "database_tls": True,
            "kafka_bootstrap_servers": servers.mutual,
            "kafka_security_protocol": "SSL",
            **{f"database_{part}": value for part, value in certificate.items()},
            **{f"kafka_{part}": value for part, value in certificate.items()},
            **changes,
        }

    return make


@pytest.fixture
def known(request: pytest.FixtureRequest, way: str) -> Known:
    """Make settings of somebody who is known in that way; the other's servers need not be there."""
    found: Known = request.getfixturevalue(way)
    return found


@pytest.fixture
async def start(guarded: Bank) -> AsyncIterator[Start]:
    """Start processes of the bank."""
    async with starting(guarded) as one:
        yield one


@pytest.mark.parametrize(
    ("way", "changes"),
    [
        ("by_password", {}),
        ("by_password", {"kafka_sasl_mechanism": "SCRAM-SHA-256"}),
        ("by_password", {"kafka_sasl_mechanism": "PLAIN"}),
        ("by_certificate", {}),
    ],
    ids=["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN", "certificate"],
)
async def test_a_service_works_where_only_known_ones_are_let_in(
    known: Known,
    servers: Servers,
    guarded: Bank,
    start: Start,
    changes: dict[str, object],
) -> None:
    settings = known(**changes)
    service = await start("run", **settings)
    async with AIOKafkaProducer(bootstrap_servers=servers.plaintext) as producer:
        for amount in range(1, 4):
            await Deposit(amount, guarded.name).send(producer, guarded.deposits)
    async with following(servers.plaintext, guarded.balances) as told:
        await eventually(lambda: len(told.records) == 3)
    assert await service.is_ready()
    # What commands ask the brokers for goes the same way.
    again = await start(
        "replay",
        guarded.deposits,
        "--from",
        "earliest",
        "--partition",
        "0",
        "--no-wait",
        **settings,
    )
    assert await again.ended() == 0, again.output
    created = await start("topics", "create", **settings)
    assert await created.ended() == 0, created.output
    for process in (service, again, created):
        says_no_secret(process, servers)


def says_no_secret(process: Process, servers: Servers) -> None:
    """Look for passwords, and for what only an author of the engine would read."""
    assert "Traceback" not in process.output
    for secret in servers.secrets:
        assert secret not in process.output


@pytest.mark.parametrize(
    ("way", "changes", "complaint"),
    [
        ("by_password", {"kafka_password": "guess"}, "Authentication failed"),
        ("by_password", {"kafka_user": "nobody"}, "Authentication failed"),
        ("by_password", {"kafka_ca_file": "theirs.pem"}, "certificate verify failed"),
        ("by_password", {"kafka_ca_file": None}, "certificate verify failed"),
        ("by_password", {"kafka_host": "localhost"}, "Hostname mismatch"),
        (
            "by_certificate",
            {"kafka_certificate_file": None, "kafka_key_file": None, "kafka_key_password": None},
            "bad certificate",
        ),
        (
            "by_certificate",
            {
                "kafka_certificate_file": "late.pem",
                "kafka_key_file": "late.key",
                "kafka_key_password": None,
            },
            "alert",
        ),
        (
            "by_certificate",
            {
                "kafka_certificate_file": "stranger.pem",
                "kafka_key_file": "stranger.key",
                "kafka_key_password": None,
            },
            "alert",
        ),
    ],
    ids=[
        "password",
        "user",
        "other authority",
        "system's authorities",
        "other name",
        "no certificate",
        "expired",
        "other's certificate",
    ],
)
async def test_brokers_that_do_not_let_us_in_are_named_with_the_reason(
    known: Known,
    servers: Servers,
    start: Start,
    changes: dict[str, str | None],
    complaint: str,
) -> None:
    command = await start("topics", "create", **changed(servers, known(), changes))
    assert await command.ended() == 1
    says_no_secret(command, servers)
    last = command.output.strip().splitlines()[-1]
    assert "PIPELINE_KAFKA_BOOTSTRAP_SERVERS" in last
    assert complaint.lower() in last.lower()


@pytest.mark.parametrize(
    ("way", "changes", "complaint"),
    [
        (
            "by_password",
            {"database_password": "guess"},
            "PostgreSQL at .*SASL authentication failed",
        ),
        ("by_password", {"database_ca_file": "theirs.pem"}, "certificate verify failed"),
        ("by_password", {"database_ca_file": None}, "certificate verify failed"),
        ("by_password", {"database_host": "localhost"}, "Hostname mismatch"),
        ("by_certificate", {"database_ca_file": "theirs.pem"}, "certificate verify failed"),
        ("by_certificate", {"database_ca_file": None}, "certificate verify failed"),
        ("by_certificate", {"database_host": "localhost"}, "Hostname mismatch"),
        ("by_certificate", NO_CERTIFICATE, "PIPELINE_DATABASE_URL.*valid client certificate"),
        (
            "by_certificate",
            {
                "database_certificate_file": "late.pem",
                "database_key_file": "late.key",
                "database_key_password": None,
            },
            "PostgreSQL at",
        ),
        (
            "by_certificate",
            {
                "database_certificate_file": "stranger.pem",
                "database_key_file": "stranger.key",
                "database_key_password": None,
            },
            "PostgreSQL at",
        ),
        ("by_certificate", {"database_user": "somebody"}, "PIPELINE_DATABASE_URL"),
        (
            "by_certificate",
            {
                **NO_CERTIFICATE,
                "database_ca_file": None,
                "database_tls": None,
                "database_ssl": "disable",
            },
            "PIPELINE_DATABASE_URL.*no encryption",
        ),
    ],
    ids=[
        "password",
        "other authority",
        "system's authorities",
        "other name",
        "other authority of PostgreSQL",
        "system's authorities for PostgreSQL",
        "other name of PostgreSQL",
        "no certificate",
        "expired",
        "certificate of another authority",
        "other's certificate",
        "no TLS",
    ],
)
async def test_a_refused_database_connection_is_reported_with_its_reason(
    known: Known,
    servers: Servers,
    start: Start,
    changes: dict[str, str | None],
    complaint: str,
) -> None:
    command = await start("dead", "list", **changed(servers, known(), changes))
    assert await command.ended() == 1
    says_no_secret(command, servers)
    assert re.search(complaint, command.output.strip().splitlines()[-1], re.IGNORECASE)


def changed(
    servers: Servers, known: dict[str, object], changes: dict[str, str | None]
) -> dict[str, object]:
    """Return the settings with other files, or another host, user or password."""
    url = make_url(str(known["database_url"]))
    for name, value in changes.items():
        match name:
            case "kafka_host":
                port = str(known["kafka_bootstrap_servers"]).rpartition(":")[2]
                known["kafka_bootstrap_servers"] = f"{value}:{port}"
            case "database_host":
                url = url.set(host=value)
            case "database_user":
                url = url.set(username=value)
            case "database_password":
                url = url.set(password=value)
            case "database_ssl":
                url = url.update_query_dict({"ssl": str(value)})
            case _:
                is_file = value and name.endswith("_file")
                known[name] = servers.folder / str(value) if is_file else value
    return {**known, "database_url": url.render_as_string(hide_password=False)}


async def test_the_service_waits_for_brokers_that_refuse_it_and_says_why(
    servers: Servers, start: Start, by_password: Known
) -> None:
    service = await start("run", **by_password(kafka_password="guess"))
    await service.says("retention failed, trying again: Kafka at")
    reasons = await service.reasons()
    assert "Authentication failed" in reasons["retention"]
    says_no_secret(service, servers)
    assert "guess" not in service.output


async def test_migrations_go_the_same_way(
    monkeypatch: pytest.MonkeyPatch, servers: Servers, by_certificate: Known, start: Start
) -> None:
    settings = by_certificate()
    empty = make_url(str(settings["database_url"])).set(database="postgres")
    settings["database_url"] = empty.render_as_string()
    for name, value in settings.items():
        monkeypatch.setenv(f"PIPELINE_{name.upper()}", str(value))
    await asyncio.to_thread(command.upgrade, migrations_of_the_engine(), "heads")
    status = await start("retention", "status", **settings)
    assert await status.ended() == 0, status.output
    monkeypatch.setenv("PIPELINE_DATABASE_CA_FILE", str(servers.theirs.file))
    with pytest.raises(SSLCertVerificationError):
        await asyncio.to_thread(command.upgrade, migrations_of_the_engine(), "heads")
