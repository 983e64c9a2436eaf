"""A real schema registry on loopback."""

from collections.abc import Iterator
from uuid import uuid4

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from servers.apicurio import Apicurio
from servers.state import Record, StateDirectory

from .proxy import Proxy
from tests.servers.programs import running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and "apicurio" in item.fixturenames:
            item.add_marker(pytest.mark.full)


@pytest.fixture(scope="module")
def apicurio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apicurio]:
    """Run a registry."""
    server = Apicurio(StateDirectory(tmp_path_factory.mktemp("registry")), "apicurio", Record())
    with running(server):
        yield server


@pytest.fixture
def proxy(apicurio: Apicurio, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Return the way to the registry that the environment names."""
    with Proxy.to(apicurio.url) as one:
        monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_URL", one.url)
        yield one


@pytest.fixture
def client(apicurio: Apicurio) -> Iterator[SchemaRegistryClient]:
    """Return Confluent's own client."""
    with SchemaRegistryClient({"url": apicurio.url}) as one:
        yield one


@pytest.fixture
def topic() -> str:
    """Return the name of a topic whose subjects are new to the registry."""
    return f"orders-{uuid4().hex[:12]}"
