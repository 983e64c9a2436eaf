"""Tables that have aged: what has come and gone costs nothing, also before a vacuum."""

from itertools import count

import asyncpg
import pytest

from onceward.apply import backlog
from onceward.retry import lanes
from onceward.retry.lane_source import read_rows, take

from .applier import Applier, NewApplier
from .plans import Explaining
from .test_backlog import bank_with
from tests.contract.bank import Deposit

TURNS, SIZE, ATTEMPTS = 40, 500, 4

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


async def blocks(applier: Applier, db: asyncpg.Connection, number: int) -> dict[str, int]:
    """Return how many blocks the statements look at that handle a message from the backlog."""
    await applier.apply(Deposit(number, account=f"new {number}"))
    asked = Explaining(db)
    transaction = db.transaction()
    await transaction.start()
    await db.execute("SET LOCAL pipeline.handler = ''")  # as the engine begins one
    consumers = applier.handlers.consumers
    lane = await lanes.claim(db, "test", 10.0, consumers)
    assert lane is not None
    await lanes.claim(asked, "test", 10.0, consumers, {"without an answer"})
    await lanes.extend(asked, lane)
    await lanes.hold(asked, lane)
    rows = await take(asked, lane, consumers, 100)
    taken = await read_rows(lane, applier.handlers, rows)
    assert len(taken.items) == 1
    await backlog.find(asked, taken.items)
    (key,) = (item.row for item in taken.items)
    assert key is not None
    keys = taken.keys
    await lanes.settle(asked, lane, done=[key], changed=[], keys=keys, keys_with_progress=keys)
    await transaction.rollback()
    await applier.work_off()
    names = ["claim", "extend", "hold", "take", "find", "delete", "heads"]
    return dict(zip(names, (plan.blocks for plan in asked.plans), strict=True))


async def test_a_backlog_after_much_traffic_is_as_fast_as_new(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Trap 25: and nobody has vacuumed."""
    await db.execute(_NO_VACUUM)
    _, applier = await bank_with(new_applier, mode="deferred")
    numbers, found = count(1), list[tuple[dict[str, int], dict[str, int]]]()

    async def is_as_quick() -> bool:
        before = await blocks(applier, db, next(numbers))
        for _ in range(TURNS):
            some = [Deposit(next(numbers), account=f"of {n % 50}") for n in range(SIZE)]
            await applier.apply(*some)
            await applier.work_off()
        after = await blocks(applier, db, next(numbers))
        found.append((before, after))
        await db.execute("VACUUM pipeline.backlog")
        await db.execute("VACUUM pipeline.backlog_lane")
        return all(after[name] <= 2 * number + 20 for name, number in before.items())

    # Where another session, such as one that begins a replication slot, has an older snapshot,
    # what has gone stays visible: then it is measured again.
    for _ in range(ATTEMPTS):
        if await is_as_quick():
            return
    pytest.fail(f"blocks before and after, in each attempt: {found}")
