"""A service with the ACLs of `docs/security.md`, and without each, before a broker that checks."""

import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.protocol.admin import CreateAclsRequest
from servers.network import LOOPBACK
from servers.state import StateDirectory

from onceward.cli import doctor
from onceward.cli.health import Finding
from onceward.observe.health import Health
from onceward.servers.database import autocommitting, create_engine
from onceward.settings import Settings

from .bank import Bank
from .brokers import ConfiguredKafka
from tests.conftest import Running
from tests.contract.bank import Deposit, histories
from tests.servers.programs import running as running_server
from tests.servers.topics import following
from tests.servers.waiting import eventually

pytestmark = pytest.mark.full

USER, PASSWORD = "parcels", "correct-horse"
ANOTHER = "describer"
"""A user that may write no topic at all."""
_SETTINGS = """
listeners=PLAINTEXT://{client},CONTROLLER://{controller},SASL://{sasl}
advertised.listeners=PLAINTEXT://{client},SASL://{sasl}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL:SASL_PLAINTEXT
sasl.enabled.mechanisms=SCRAM-SHA-512
listener.name.sasl.scram-sha-512.sasl.jaas.config=\
org.apache.kafka.common.security.scram.ScramLoginModule required;
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
"""
_TYPES = {"topic": 2, "group": 3, "transactional-id": 5}
_OPERATIONS = {"Read": 3, "Write": 4, "Describe": 8, "DescribeConfigs": 10}
_ALLOW = 3
"""Codes of Kafka's protocol."""


class CheckingKafka(ConfiguredKafka):
    """A broker that lets users do what ACLs allow, and those who come in plain text everything."""

    port_count = 3

    def more_settings(self, *addresses: str) -> str:
        """Check them."""
        client, controller, sasl = addresses
        return _SETTINGS.format(client=client, controller=controller, sasl=sasl)


@dataclass(frozen=True)
class Acl:
    """An ACL of the guide."""

    operation: str
    kind: str
    name: str
    is_prefix: bool

    async def create(self, admin: AIOKafkaAdminClient, user: str) -> None:
        """Let the user do it."""
        place = _TYPES[self.kind], self.name, 4 if self.is_prefix else 3
        operation = _OPERATIONS[self.operation]
        answer = await admin._send_request(
            CreateAclsRequest(*place, f"User:{user}", "*", operation, _ALLOW)
        )
        ((code, text),) = answer.creation_responses
        assert code == 0, text


Allow = Callable[..., Awaitable[None]]


def documented(bank: Bank) -> list[Acl]:
    """Return the ACLs that the guide's commands make, with the names of a bank."""
    guide = (Path(__file__).parents[3] / "docs" / "security.md").read_text("utf-8")
    names = {
        "parcels": bank.name,
        "scans": bank.deposits,
        "parcel-events": bank.balances,
        "parcels-relay-": f"{bank.name}-relay-",
    }
    found = []
    for line in re.findall(r"^kafka-acls\.sh (.*)$", guide, re.MULTILINE):
        words = shlex.split(line.replace("--add ", ""))
        options = [*zip(words[::2], words[1::2], strict=True)]
        given = {name.removeprefix("--"): value for name, value in options}
        assert given.pop("allow-principal") == f"User:{USER}"
        is_prefix = given.pop("resource-pattern-type", "literal") == "prefixed"
        operation = given.pop("operation")
        assert given.keys() <= _TYPES.keys()
        found += [
            Acl(operation, name.removeprefix("--"), names[value], is_prefix)
            for name, value in options
            if name.removeprefix("--") in _TYPES
        ]
    return found


@pytest.fixture(scope="module")
def broker() -> Iterator[CheckingKafka]:
    with TemporaryDirectory() as folder:
        directory = StateDirectory(Path(folder))
        kafka = CheckingKafka(directory, "kafka", directory.state.kafka)
        try:
            with running_server(kafka):
                for user in (USER, ANOTHER):
                    kafka.admit(user, PASSWORD, 512)
                yield kafka
        finally:
            kafka.remove()


@pytest.fixture
async def admin(broker: CheckingKafka) -> AsyncIterator[AIOKafkaAdminClient]:
    """Return a client that may do everything."""
    one = AIOKafkaAdminClient(bootstrap_servers=f"{LOOPBACK}:{broker.port}")
    await one.start()
    yield one
    await one.close()


@pytest.fixture
async def checked(unborn: Bank, admin: AIOKafkaAdminClient) -> Bank:
    """Return a bank whose topics are on the broker."""
    topics = [NewTopic(one, 1, 1) for one in (unborn.deposits, unborn.balances)]
    await admin.create_topics(topics)
    return unborn


@pytest.fixture
def allow(admin: AIOKafkaAdminClient) -> Allow:
    """Give the user an ACL. It stays, and is of topics and a group that only this test has."""

    async def give(acl: Acl, user: str = USER) -> None:
        await acl.create(admin, user)

    return give


@pytest.fixture
def options(broker: CheckingKafka) -> dict[str, object]:
    """Settings of the user."""
    return {
        "kafka_bootstrap_servers": f"{LOOPBACK}:{broker.record.ports[2]}",
        "kafka_security_protocol": "SASL_PLAINTEXT",
        "kafka_sasl_mechanism": "SCRAM-SHA-512",
        "kafka_user": USER,
        "kafka_password": PASSWORD,
    }


Serving = Callable[..., AbstractAsyncContextManager[Health]]


@pytest.fixture
def serve(checked: Bank, running: Running, options: dict[str, object]) -> Serving:
    """Run the bank as the user."""
    return partial(running, checked.service, **options)


@pytest.fixture
def examine(
    checked: Bank, settings: Callable[..., Settings], options: dict[str, object]
) -> Callable[[], Awaitable[list[Finding]]]:
    """Return what the doctor finds about the brokers."""

    async def ask() -> list[Finding]:
        chosen = settings(**options)
        engine = create_engine(chosen, name="bank")
        async with autocommitting(engine) as connection:
            found = await doctor.examine(connection, checked.service, chosen)
        await engine.dispose()
        named = (checked.deposits, checked.balances, checked.name)
        return [
            one
            for one in found
            if one.level != "ok" and any(name in one.found + one.advice for name in named)
        ]

    return ask


async def send(broker: CheckingKafka, bank: Bank) -> None:
    """Send a deposit, as somebody else."""
    async with AIOKafkaProducer(bootstrap_servers=f"{LOOPBACK}:{broker.port}") as producer:
        await Deposit(5).send(producer, bank.deposits)


async def is_applied(db: asyncpg.Connection) -> bool:
    return await histories(db) == {"ada": [5]}


@pytest.mark.parametrize("transactional", [False, True], ids=["", "transactional"])
async def test_a_service_with_exactly_the_documented_acls_works(
    checked: Bank,
    broker: CheckingKafka,
    allow: Allow,
    serve: Serving,
    examine: Callable[[], Awaitable[list[Finding]]],
    transactional: bool,
) -> None:
    acls = [one for one in documented(checked) if transactional or one.kind != "transactional-id"]
    assert len(acls) == 5 + transactional
    for acl in acls:
        await allow(acl)
    await send(broker, checked)
    async with (
        following(f"{LOOPBACK}:{broker.port}", checked.balances) as tail,
        serve(relay_transactional=transactional) as health,
    ):
        await eventually(lambda: sum(map(len, tail.first_ids().values())) == 1)
        await eventually(lambda: health.is_ready)
        assert await examine() == []


@pytest.mark.parametrize(
    ("kind", "of", "part", "text"),
    [
        ("group", "", "retention", "the ACL Read on the group"),
        ("topic", "deposits", "topic {deposits}", "the ACL Read on a topic that it reads"),
        ("topic", "balances", "relay to {balances}", "allow this service's user to Describe and W"),
        ("transactional-id", "", "relay", "the ACL Write on the relay's transactional ids"),
    ],
)
async def test_without_one_of_them_the_reason_names_it_until_it_is_given(
    checked: Bank,
    broker: CheckingKafka,
    allow: Allow,
    serve: Serving,
    kind: str,
    of: str,
    part: str,
    text: str,
) -> None:
    def is_omitted(one: Acl) -> bool:
        is_it = one.operation != "DescribeConfigs" and one.kind == kind
        return is_it and (not of or one.name == getattr(checked, of))

    (omitted,) = [one for one in documented(checked) if is_omitted(one)]
    for acl in documented(checked):
        if acl != omitted:
            await allow(acl)
    await send(broker, checked)
    named = part.format(deposits=checked.deposits, balances=checked.balances)
    async with (
        following(f"{LOOPBACK}:{broker.port}", checked.balances) as tail,
        serve(relay_transactional=kind == "transactional-id", relay_topic_pause=0.2) as health,
    ):
        await eventually(lambda: text in health.reasons.get(named, ""))
        await allow(omitted)
        await eventually(lambda: sum(map(len, tail.first_ids().values())) == 1)
        await eventually(lambda: health.is_ready)


async def test_describe_alone_on_an_output_topic_is_reported_with_the_acl(
    checked: Bank,
    broker: CheckingKafka,
    allow: Allow,
    serve: Serving,
) -> None:
    for acl in documented(checked):
        if acl.kind != "transactional-id":
            describes = acl.name == checked.balances and acl.operation == "Write"
            changed = replace(acl, operation="Describe") if describes else acl
            await allow(changed, ANOTHER)
    await send(broker, checked)
    async with serve(kafka_user=ANOTHER) as health:
        await eventually(lambda: "the ACL Write on a topic" in health.reasons.get("relay", ""))


async def test_without_describe_configs_the_service_works_and_the_doctor_reports_it(
    checked: Bank,
    broker: CheckingKafka,
    db: asyncpg.Connection,
    allow: Allow,
    serve: Serving,
    examine: Callable[[], Awaitable[list[Finding]]],
) -> None:
    for acl in documented(checked):
        if acl.operation != "DescribeConfigs" and acl.kind != "transactional-id":
            await allow(acl)
    await send(broker, checked)
    async with serve():
        await eventually(lambda: is_applied(db))
        advice = [one.advice for one in await examine()]
    assert sorted(advice) == sorted(
        f"allow this user its DescribeConfigs: {name} (docs/security.md)"
        for name in (checked.deposits, checked.balances)
    )


async def test_the_doctor_tells_topics_that_may_not_be_described_from_missing_ones(
    checked: Bank, examine: Callable[[], Awaitable[list[Finding]]]
) -> None:
    hidden = "may not be described, whether it exists or not"
    found = [one for one in await examine() if hidden in one.found]
    assert [one.check for one in found] == ["topics"] * 2
    for one in found:
        assert "needs the ACL Read on a topic that it reads, Write on one" in one.advice
