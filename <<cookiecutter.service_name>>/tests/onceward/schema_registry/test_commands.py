"""`service registry check` with a real registry."""

import json
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from sqlalchemy import MetaData
from typer.testing import CliRunner

from onceward import Applied, Event, Handlers, Service, Tombstone, Transaction
from onceward.schema_registry import Confluent, Strategy
from onceward.schema_registry import commands as registry_commands

from .proxy import Proxy
from .shop import record

pytestmark = pytest.mark.full

ORDER_ID = {"name": "order_id", "type": "string"}
PLACE = {"name": "place", "type": "string"}
NOTE = {"name": "note", "type": "string", "default": ""}
V1 = record("shop.Ordered", ORDER_ID)
OPTIONAL = record("shop.Ordered", ORDER_ID, NOTE)
REQUIRED = record("shop.Ordered", ORDER_ID, PLACE)


class Shop:
    """A service that takes or publishes an event in a topic of its own."""

    def __init__(self, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.topic = topic
        self.subject = f"{topic}-value"
        self.handlers = Handlers()
        self.service = Service("shop", self.handlers, MetaData())

        class Ordered(Event, type="ordered", topic=topic):
            """An order of the shop."""

            order_id: str

        self.event = Ordered
        monkeypatch.setattr(registry_commands, "declared_events", lambda: [Ordered])

    def has(self, schema: Schema | None, **options: Any) -> None:
        """Declare the topic's codec, with a schema of the code's own or without."""
        own: dict[type[Event], Schema] = {} if schema is None else {self.event: schema}
        types = {"shop.Ordered": self.event}
        self.handlers.topic(self.topic, codec=Confluent(types=types, schemas=own, **options))

    def check(self, *arguments: str) -> tuple[int, str, str]:
        """Run the command; return its exit code, standard output and standard error."""
        done = CliRunner().invoke(registry_commands.group(self.service), ["check", *arguments])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def shop(topic: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """Return a shop that reaches the registry through the proxy."""
    return Shop(topic, monkeypatch)


@pytest.fixture
def registered(shop: Shop, client: SchemaRegistryClient) -> SchemaRegistryClient:
    """Return a client, after a first version with the level BACKWARD was registered."""
    client.register_schema(shop.subject, V1)
    client.set_compatibility(shop.subject, "BACKWARD")
    return client


def test_a_compatible_schema_is_reported_and_not_registered(
    shop: Shop, registered: SchemaRegistryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_AUTO_REGISTER", "true")
    shop.has(OPTIONAL)
    code, out, _ = shop.check()
    text = "the schema is compatible (level BACKWARD, latest version 1)"
    assert (code, out) == (0, f"{shop.subject}, ordered: {text}\n")
    assert registered.get_versions(shop.subject) == [1]


def test_an_incompatible_schema_ends_with_exit_code_1_and_the_registrys_reasons(
    shop: Shop, registered: SchemaRegistryClient
) -> None:
    shop.has(REQUIRED)
    code, out, _ = shop.check()
    start = (
        f"{shop.subject}, ordered: the schema is incompatible (level BACKWARD, latest version 1)"
    )
    assert code == 1
    assert out.startswith(f"{start}: ")
    assert "place at /fields/1" in out
    code, out, _ = shop.check("--json")
    found = json.loads(out)
    assert "place at /fields/1" in found.pop("text")
    assert code == 1
    assert found == {
        "topic": shop.topic,
        "type": "ordered",
        "subject": shop.subject,
        "is_break": True,
    }


def test_the_level_of_the_subject_decides(shop: Shop, registered: SchemaRegistryClient) -> None:
    shop.has(REQUIRED)
    registered.set_compatibility(shop.subject, "FORWARD")
    code, out, _ = shop.check()
    assert code == 0
    assert "is compatible (level FORWARD" in out
    registered.set_compatibility(shop.subject, "NONE")
    code, out, _ = shop.check()
    assert code == 0
    assert "with NONE nothing but a global level is applied" in out


def test_a_global_level_decides_where_the_subject_has_none(
    shop: Shop, client: SchemaRegistryClient
) -> None:
    client.register_schema(shop.subject, V1)
    shop.has(REQUIRED)
    try:
        client.set_compatibility(level="BACKWARD")
        assert shop.check()[0] == 1
        client.set_compatibility(level="FORWARD")
        assert shop.check()[0] == 0
    finally:
        client.set_compatibility(level="NONE")


def test_a_transitive_level_compares_with_every_version(
    shop: Shop, registered: SchemaRegistryClient
) -> None:
    registered.register_schema(shop.subject, OPTIONAL)
    # Compatible with version 2, whose field it has, and not with version 1.
    shop.has(record("shop.Ordered", ORDER_ID, {"name": "note", "type": "string"}))
    assert shop.check()[0] == 0
    registered.set_compatibility(shop.subject, "BACKWARD_TRANSITIVE")
    assert shop.check()[0] == 1


def test_a_registered_schema_is_no_break_whatever_the_later_versions_are(
    shop: Shop, registered: SchemaRegistryClient
) -> None:
    registered.set_compatibility(shop.subject, "FORWARD")
    registered.register_schema(shop.subject, REQUIRED)
    shop.has(V1)
    code, out, _ = shop.check()
    assert (code, out) == (0, f"{shop.subject}, ordered: the schema is registered, as version 1\n")


def test_a_subject_without_versions_gets_its_first(shop: Shop) -> None:
    name = f"shop.R{uuid4().hex}"
    shop.handlers.topic(
        shop.topic,
        codec=Confluent(
            types={name: shop.event},
            schemas={shop.event: record(name, ORDER_ID)},
            strategy=Strategy.TOPIC_RECORD,
        ),
    )
    code, out, _ = shop.check()
    assert code == 0
    assert out.startswith(
        f"{shop.topic}-{name}, ordered: the schema would be the subject's first version"
    )


def test_events_taken_are_compared_too_and_those_without_a_schema_are_named(
    shop: Shop, registered: SchemaRegistryClient
) -> None:
    class Seen(Event, type="seen"):
        """An event that the shop only takes."""

    async def note(event: Event, tx: Transaction) -> None:
        """Do nothing."""

    shop.handlers.on(Seen, topic=shop.topic, consumer="note")(note)
    shop.handlers.on(Tombstone, topic=shop.topic, consumer="note")(note)
    shop.handlers.correct(Applied, topic=shop.topic, of="note", consumer="repair")(note)
    shop.has(None)
    code, out, _ = shop.check()
    lines = out.splitlines()
    assert code == 0
    assert [one.split(":")[0] for one in lines] == [
        f"{shop.subject}, ordered",
        f"{shop.subject}, seen",
    ]
    assert all("whether the event class fits that one is not checked" in one for one in lines)


def test_a_registry_that_is_unavailable_is_a_sentence_and_exit_code_1(
    shop: Shop, proxy: Proxy
) -> None:
    shop.has(V1)
    proxy.answer = (503, b"")
    code, out, err = shop.check()
    assert (code, out) == (1, "")
    assert err.startswith("schema registry")
    assert "it answers 503" in err
    assert len(err.splitlines()) == 1


def test_without_a_registry_and_without_such_topics_it_says_so(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shop.check() == (0, "No topic with the codec Confluent has events.\n", "")
    monkeypatch.delenv("PIPELINE_SCHEMA_REGISTRY_URL")
    code, _, err = shop.check()
    assert code == 1
    assert "PIPELINE_SCHEMA_REGISTRY_URL is not set" in err
