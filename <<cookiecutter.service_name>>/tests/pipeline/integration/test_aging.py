"""Tables that have aged: what has come and gone costs nothing, also before a vacuum."""

from itertools import count

import asyncpg
import pytest

from pipeline.apply import backlog
from pipeline.retry import lanes
from pipeline.retry.lane_source import read_rows, take

from .desk import Desk, NewDesk
from .plans import Explaining
from .test_backlog import bank_with
from tests.contract.bank import Deposit
from tests.servers.waiting import eventually

TURNS, SIZE = 40, 500

pytestmark = pytest.mark.full

_NO_VACUUM = """
DO $$
DECLARE one regclass;
BEGIN
    FOR one IN SELECT oid FROM pg_class
                WHERE relnamespace IN ('pipeline'::regnamespace, 'public'::regnamespace)
                  AND relkind = 'r' LOOP
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
    numbers = count(10 + TURNS * SIZE)

    async def is_as_quick() -> bool:
        after = await blocks(desk, db, next(numbers))
        return all(after[name] <= 2 * found + 20 for name, found in before.items())

    # A snapshot of another session, such as that with which a replication slot begins, still sees
    # what has gone. Once it has ended, the next statement passes that for the last time.
    await eventually(is_as_quick)
