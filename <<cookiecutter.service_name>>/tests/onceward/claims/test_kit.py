"""The test kit has a folder in the place of the object store."""

import pytest

from onceward import Event, Handlers, Service, Transaction
from onceward.claims import open_claims
from onceward.testing import Harness
from onceward.testing.databases import Migrate

from tests.contract.bank import Base
from tests.servers import databases
from tests.servers.databases import migrations_of_the_engine

pytestmark = pytest.mark.integration

LARGE = "x" * 600_000
"""More than PIPELINE_CLAIM_LIMIT_BYTES."""


class Written(Event, type="kit.written"):
    """An author has written a book."""

    text: str


class Printed(Event, type="kit.printed", topic="prints"):
    """The book was printed."""

    text: str


handlers = Handlers()


@handlers.on(Written, topic="texts", consumer="print")
async def print_it(event: Written, tx: Transaction) -> int:
    tx.publish(Printed(text=event.text), key="book")
    return len(event.text)


@pytest.fixture(scope="session")
def harness_service() -> Service:
    return Service("press", handlers, Base.metadata, claims=open_claims)


@pytest.fixture(scope="session")
def harness_migrate() -> Migrate:
    return lambda url: databases.build(url, migrations_of_the_engine(), Base.metadata)


async def test_a_large_payload_is_published_by_reference(harness: Harness) -> None:
    outcome = await harness.handle(Written(text=LARGE))
    assert outcome.results == [len(LARGE)]
    assert outcome.published == [Printed(text=LARGE)]
    (stored,) = (one for one in harness.object_store.rglob("*") if one.is_file())
    assert stored.read_bytes() == Printed(text=LARGE).model_dump_json().encode()


async def test_a_reference_is_resolved(harness: Harness) -> None:
    (harness.object_store / "author").mkdir()
    path = harness.object_store / "author" / "book-1"
    headers = {
        "ce_specversion": "1.0",
        "ce_id": "1",
        "ce_source": "/author",
        "ce_type": "kit.written",
        "ce_dataref": path.as_uri(),
    }
    (failure,) = (await harness.handle_record("texts", b"", headers=headers)).failures
    assert failure.reason == "data missing"
    path.write_text(Written(text="a book").model_dump_json())
    assert (await harness.redrive()).results == [len("a book")]
    again = headers | {"ce_id": "2"}
    assert (await harness.handle_record("texts", b"", headers=again)).results == [len("a book")]
