"""Tokens of Kafka and passwords of PostgreSQL that expire while the service runs."""

import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from servers.network import LOOPBACK
from servers.state import StateDirectory
from sqlalchemy import make_url, text

from onceward.errors import is_infrastructure
from onceward.servers.credentials import CredentialsUnavailable
from onceward.servers.database import create_engine
from onceward.settings import Settings

from .bank import Bank
from .brokers import ConfiguredKafka
from .certificates import authority
from .issuer import AUDIENCE, CLIENT, SECRET, Issuer, issuing
from .processes import starting
from tests.contract.bank import Deposit
from tests.servers.databases import administer
from tests.servers.processes import Process, Start
from tests.servers.programs import require_what_it_needs
from tests.servers.topics import following
from tests.servers.waiting import eventually

_LISTENERS = """
listeners=PLAINTEXT://{client},CONTROLLER://{controller},OAUTH://{token}
advertised.listeners=PLAINTEXT://{client},OAUTH://{token}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,OAUTH:SASL_SSL
sasl.enabled.mechanisms=OAUTHBEARER
listener.name.oauth.oauthbearer.sasl.jaas.config=\
org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;
listener.name.oauth.oauthbearer.sasl.server.callback.handler.class=\
org.apache.kafka.common.security.oauthbearer.OAuthBearerValidatorCallbackHandler
sasl.oauthbearer.jwks.endpoint.url={issuer}/keys
sasl.oauthbearer.expected.issuer={issuer}
sasl.oauthbearer.expected.audience={audience}
ssl.keystore.type=PEM
ssl.keystore.location={own}
"""
PROVIDER = "tests.onceward.integration.passwords:from_file"
LIFETIME = 4
"""Seconds after which a token expires, and brokers close connections that were opened with it."""


class TokenKafka(ConfiguredKafka):
    """A broker that also listens where one needs a token of the issuer."""

    port_count = 3
    own: Path
    issuer: Issuer

    def more_settings(self, *addresses: str) -> str:
        """Listen there."""
        client, controller, token = addresses
        return _LISTENERS.format(
            client=client,
            controller=controller,
            token=token,
            own=self.own,
            issuer=self.issuer.url,
            audience=AUDIENCE,
        )

    def java_command(self, main_class: str, *arguments: str) -> list[str]:
        """Allow the issuer's URL."""
        java, *rest = super().java_command(main_class, *arguments)
        allowed = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self.issuer.url}/keys"
        return [java, allowed, *rest]


@pytest.fixture(scope="module")
def broker() -> Iterator[TokenKafka]:
    with TemporaryDirectory() as name, TemporaryDirectory() as state:
        folder = Path(name)
        with issuing(folder) as issuer:
            directory = StateDirectory(Path(state))
            kafka = TokenKafka(directory, "kafka", directory.state.kafka)
            ours = authority(folder, "ours")
            kafka.own, kafka.issuer = ours.vouch("broker", host=f"IP:{LOOPBACK}").together, issuer
            require_what_it_needs(kafka)
            try:
                kafka.start()
                kafka.wait_until_serving()
                yield kafka
            finally:
                kafka.stop()
                kafka.remove()


@pytest.fixture
def issuer(broker: TokenKafka) -> Iterator[Issuer]:
    broker.issuer.lifetime = LIFETIME
    yield broker.issuer
    broker.issuer.fails = False
    broker.issuer.passes.set()


@pytest.fixture
def plaintext(broker: TokenKafka) -> str:
    """Where the broker lets the test in without a token."""
    return f"{LOOPBACK}:{broker.port}"


@pytest.fixture
async def teller(unborn: Bank, plaintext: str) -> Bank:
    """Return a bank with topics at the broker."""
    admin = AIOKafkaAdminClient(bootstrap_servers=plaintext)
    await admin.start()
    try:
        await admin.create_topics(
            [NewTopic(one, 1, 1) for one in (unborn.deposits, unborn.balances)]
        )
    finally:
        await admin.close()
    return unborn


@pytest.fixture
async def start(
    teller: Bank, broker: TokenKafka, issuer: Issuer, database_url: str
) -> AsyncIterator[Start]:
    """Start processes that get their tokens from the issuer."""
    async with starting(
        teller,
        database_url=database_url,
        kafka_bootstrap_servers=f"{LOOPBACK}:{broker.record.ports[2]}",
        kafka_security_protocol="SASL_SSL",
        kafka_ca_file=broker.own.with_name("ours.pem"),
        kafka_sasl_mechanism="OAUTHBEARER",
        kafka_token_provider="onceward.oidc.tokens:token",
        kafka_session_timeout=6,
        transaction_timeout=5,
        lock_timeout=2,
        retry_pause=0.2,
    ) as one:

        async def begin(*command: str, secret: str = SECRET, **settings: object) -> Process:
            variables = {
                "OIDC_TOKEN_URL": f"{issuer.url}/token",
                "OIDC_CLIENT_ID": CLIENT,
                "OIDC_CLIENT_SECRET": secret,
            }
            return await one(*command, more_variables=variables, **settings)

        yield begin


def says_no_secret(process: Process, issuer: Issuer) -> None:
    """Look for the secret and for tokens."""
    assert SECRET not in process.output
    assert not [one for one in issuer.granted if one in process.output]
    assert "Traceback" not in process.output


@pytest.mark.full
async def test_a_service_continues_without_loss_or_repetition_while_its_tokens_expire(
    teller: Bank, start: Start, issuer: Issuer, plaintext: str
) -> None:
    """The broker closes each connection whose token has expired."""
    service = await start("run")
    granted, amount = len(issuer.granted), 0
    async with (
        AIOKafkaProducer(bootstrap_servers=plaintext) as producer,
        following(plaintext, teller.balances) as balances,
    ):
        while len(issuer.granted) < granted + 5:
            amount += 1
            await Deposit(amount).send(producer, teller.deposits)
            await balances.until(lambda: len(set(balances.ids)) == amount)  # noqa: B023
        assert amount > 1
        assert len(balances.first_ids()[b"ada"]) == amount
    assert service.is_running
    await eventually(service.is_ready)
    for command in (
        ("topics", "create"),
        ("replay", teller.deposits, "--from", "earliest", "--partition", "0", "--no-wait"),
    ):
        done = await start(*command)
        assert await done.ended() == 0, done.output
        says_no_secret(done, issuer)
    says_no_secret(service, issuer)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["fails", "hangs"])
async def test_a_failing_token_provider_is_reported_as_an_outage_until_recovery(
    teller: Bank, start: Start, issuer: Issuer, plaintext: str, fault: str
) -> None:
    service = await start("run")
    async with (
        AIOKafkaProducer(bootstrap_servers=plaintext) as producer,
        following(plaintext, teller.balances) as balances,
    ):
        await Deposit(1).send(producer, teller.deposits)
        await eventually(lambda: len(balances.records) == 1)
        issuer.fails = fault == "fails"
        if fault == "hangs":
            issuer.passes.clear()
        reason = "has answered 503" if fault == "fails" else "timed out"

        async def is_told() -> bool:
            reasons = str(await service.reasons())
            return "PIPELINE_KAFKA_TOKEN_PROVIDER (onceward.oidc.tokens:token)" in reasons and (
                reason in reasons
            )

        await eventually(is_told)
        # A process that starts meanwhile waits, and a command ends with a sentence.
        second, command = await start("relay"), await start("topics", "create")
        assert await command.ended() == 1
        last = command.output.strip().splitlines()[-1]
        assert "PIPELINE_KAFKA_TOKEN_PROVIDER" in last
        assert reason in last
        await Deposit(2).send(producer, teller.deposits)
        issuer.fails = False
        issuer.passes.set()
        await eventually(lambda: len(set(balances.ids)) == 2)
        await eventually(service.is_ready)
        await eventually(second.is_ready)
    for process in (service, second, command):
        says_no_secret(process, issuer)


@pytest.mark.full
async def test_a_secret_that_the_issuer_refuses_is_named_with_its_answer(
    start: Start, issuer: Issuer
) -> None:
    command = await start("topics", "create", secret="another-secret")
    assert await command.ended() == 1
    last = command.output.strip().splitlines()[-1]
    assert "has answered 401" in last
    assert "invalid_client" in last
    assert "another-secret" not in command.output


async def alter(server_url: str, role: str, password: str) -> None:
    """Give the role another password."""
    await administer(server_url, f"ALTER ROLE {role} PASSWORD '{password}'")


@pytest.fixture
async def role(server_url: str) -> AsyncIterator[str]:
    """Return a role of the database with the password `first`."""
    name = f"teller_{uuid4().hex[:12]}"
    await administer(server_url, f"CREATE ROLE {name} LOGIN SUPERUSER PASSWORD 'first'")
    yield name
    await administer(server_url, f"DROP ROLE {name}")


@pytest.fixture
def password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Change what the provider returns, which is `first`."""
    file = tmp_path / "password"
    file.write_text("first")
    monkeypatch.setenv("TELLERS_PASSWORD", str(file))
    return file.write_text


def without_password(direct_url: str, role: str) -> str:
    """Return the URL of the database for the role."""
    return make_url(direct_url).set(username=role)._replace(password=None).render_as_string()


async def test_each_new_connection_has_the_password_of_that_moment(
    settings: Callable[..., Settings],
    direct_url: str,
    server_url: str,
    role: str,
    password: Callable[[str], object],
) -> None:
    chosen = settings(
        database_url=without_password(direct_url, role),
        database_pooler=False,
        database_password_provider=PROVIDER,
    )
    engine = create_engine(chosen, name="test")

    async def user() -> object:
        async with engine.connect() as connection:
            return await connection.scalar(text("SELECT session_user"))

    try:
        assert await user() == role
        await alter(server_url, role, "second")
        assert await user() == role  # by the connection of before
        await engine.dispose()
        with pytest.raises(CredentialsUnavailable, match="password authentication failed") as old:
            await user()
        assert is_infrastructure(old.value)
        assert "PIPELINE_DATABASE_PASSWORD_PROVIDER" in str(old.value)
        password("second")
        assert await user() == role
    finally:
        await engine.dispose()


@pytest.mark.full
async def test_a_service_goes_on_when_its_password_changes_while_it_runs(
    bank: Bank,
    kafka: str,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    direct_url: str,
    server_url: str,
    role: str,
    password: Callable[[str], object],
    following_balances: Callable[[int], Awaitable[None]],
) -> None:
    async with starting(
        bank,
        database_url=without_password(direct_url, role),
        database_pooler=False,
        database_password_provider=PROVIDER,
        kafka_bootstrap_servers=kafka,
        retry_pause=0.2,
    ) as start:
        service = await start("run")
        await Deposit(1).send(producer, bank.deposits)
        await following_balances(1)
        await alter(server_url, role, "n3w-s3cret")
        await db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1", role
        )
        await Deposit(2).send(producer, bank.deposits)

        async def is_told() -> bool:
            return "PIPELINE_DATABASE_PASSWORD_PROVIDER" in str(await service.reasons())

        await eventually(is_told)
        assert service.is_running
        password("n3w-s3cret")
        await following_balances(2)
        await eventually(service.is_ready)
        assert service.is_running
        service.send(signal.SIGTERM)
        assert await service.ended() == 0
        assert "n3w-s3cret" not in service.output


@pytest.fixture
def following_balances(bank: Bank, kafka: str) -> Callable[[int], Awaitable[None]]:
    """Wait until so many balances have been published."""

    async def wait(count: int) -> None:
        async with following(kafka, bank.balances) as balances:
            await eventually(lambda: len(set(balances.ids)) == count)

    return wait
