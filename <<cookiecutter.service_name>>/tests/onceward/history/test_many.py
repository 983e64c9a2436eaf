"""A hundred thousand markers are listed, and a key that has them, in little memory."""

import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from onceward.history import released, timeline
from onceward.history.released import Wanted
from onceward.settings import Settings

from .conftest import Take
from tests.contract.bank import Deposit
from tests.onceward.integration.applier import Applier
from tests.onceward.integration.bank import Bank
from tests.servers.waiting import PATIENCE

pytestmark = pytest.mark.full

NUMBER = 100_000
MEBIBYTE = 2**20
_COLUMNS = """
SELECT quote_ident(column_name) FROM information_schema.columns
 WHERE table_schema = 'pipeline' AND table_name = 'inbox'
"""


async def multiply(db: asyncpg.Connection) -> None:
    """Add so many markers like the only one."""
    columns = [row[0] for row in await db.fetch(_COLUMNS)]
    others = {
        "key": "substr(sha256(number::text::bytea), 1, octet_length(key))",
        "id": "number::text",
        '"offset"': "number",
        "xid": "pg_current_xact_id()",
    }
    await db.execute(
        f"INSERT INTO pipeline.inbox ({', '.join(columns)})"
        f" SELECT {', '.join(others.get(one, one) for one in columns)}"
        f"   FROM pipeline.inbox CROSS JOIN generate_series(1, {NUMBER - 1}) AS number"
    )


@contextmanager
def in_little_memory() -> Iterator[None]:
    """Require that what is done within takes less than 40 MiB, of which ten may be results."""
    tracemalloc.start()
    try:
        yield
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 40 * MEBIBYTE


@pytest.mark.parametrize("part", [released.markers, released.messages], ids=["markers", "messages"])
async def test_a_list_streams(
    applier: Applier,
    take: Take,
    db: asyncpg.Connection,
    part: Callable[[asyncpg.Connection, Wanted], AsyncIterator[Any]],
) -> None:
    await take(applier, Deposit(1))
    await multiply(db)
    ids: set[int] = set()
    with in_little_memory():
        async for rows in part(db, Wanted(release="1.4.2")):
            ids.update(row["offset"] for row in rows)
    assert len(ids) == NUMBER


async def test_the_timeline_of_a_key_with_many_messages_has_the_newest(
    bank: Bank,
    applier: Applier,
    take: Take,
    db: asyncpg.Connection,
    settings: Callable[..., Settings],
) -> None:
    await take(applier, Deposit(1))
    await multiply(db)
    since = datetime.now(UTC) - timedelta(hours=1)
    with in_little_memory():
        found = await timeline.look(
            db, bank.service, settings(), b"ada", since, limit=200, seconds=PATIENCE
        )
    assert found.unknown == {}
    assert len(found.entries) == 200
