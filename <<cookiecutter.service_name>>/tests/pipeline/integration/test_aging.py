"""Tables that have aged: what has come and gone costs nothing, also before a vacuum."""

import asyncpg
import pytest

from pipeline.apply import backlog
from pipeline.retry import lanes
from pipeline.retry.lane_source import read_rows, take

from .desk import Desk, NewDesk
from .plans import Explaining
from .test_backlog import bank_with
from tests.contract.bank import Deposit

TURNS, SIZE = 40, 500

pytestmark = pytest.mark.full

_NO_VACUUM = """
DO $$
DECLARE one regclass;
BEGIN
    FOR one IN SELECT oid FROM pg_class
                WHERE relnamespace = 'pipeline'::regnamespace AND relkind = 'r' LOOP
        EXECUTE format('ALTER TABLE %s SET (autovacuum_enabled = off)', one);
    END LOOP;
END $$
"""


async def blocks(desk: Desk, db: asyncpg.Connection, number: int) -> dict[str, int]:
    """Return how many blocks the statements look at that handle a message from the backlog."""
    await desk.apply(Deposit(number, account=f"new {number}"))
    asked = Explaining(db)
    transaction = db.transaction()
    await transaction.start()
    consumers = desk.handlers.consumers
    lane = await lanes.claim(db, "test", 10.0, consumers)
    assert lane is not None
    await lanes.claim(asked, "test", 10.0, consumers, {"without an answer"})
    await lanes.extend(asked, lane)
    await lanes.hold(asked, lane)
    rows = await take(asked, lane, consumers, 100)
    taken = await read_rows(lane, desk.handlers, rows)
    assert len(taken.items) == 1
    await backlog.find(asked, taken.items)
    (key,) = (item.row for item in taken.items)
    assert key is not None
    keys = taken.keys
    await lanes.settle(asked, lane, done=[key], changed=[], keys=keys, keys_with_progress=keys)
    await transaction.rollback()
    await desk.work_off()
    names = ["claim", "extend", "hold", "take", "find", "delete", "heads"]
    return dict(zip(names, (plan.blocks for plan in asked.plans), strict=True))


async def test_a_backlog_through_which_much_has_gone_is_as_quick_as_a_new_one(
    new_desk: NewDesk, db: asyncpg.Connection
) -> None:
    """Trap 25: and nobody has vacuumed."""
    await db.execute(_NO_VACUUM)
    _, desk = await bank_with(new_desk, mode="deferred")
    before = await blocks(desk, db, 1)
    for turn in range(TURNS):
        deposits = [Deposit(10 + turn * SIZE + n, account=f"of {n % 50}") for n in range(SIZE)]
        await desk.apply(*deposits)
        await desk.work_off()
    after = await blocks(desk, db, 2)
    for name, count in after.items():
        assert count <= 2 * before[name] + 20, (name, before, after)
