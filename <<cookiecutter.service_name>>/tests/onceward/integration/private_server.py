"""Fixtures of tests on a database server of their own: the module's fixture `cluster`."""

import asyncio

import pytest

from .clusters import Cluster
from .conftest import build
from tests.servers.databases import administer


@pytest.fixture(scope="module")
def server_url(cluster: Cluster) -> str:
    """URL of that server, in the place of the one that all tests share."""
    return cluster.url("postgres")


@pytest.fixture(scope="module")
def way_in(server_url: str) -> str:
    """URL of the server, past any pooler."""
    return server_url


@pytest.fixture(scope="module")
def template(cluster: Cluster, server_url: str) -> str:
    """Name of a migrated database that every test gets a copy of."""
    name = "template_of_tests"
    asyncio.run(administer(server_url, f"CREATE DATABASE {name}"))
    build(cluster.url(name))
    return name


@pytest.fixture(scope="module")
def used_databases() -> list[str]:
    """Databases that go with their server."""
    return []
