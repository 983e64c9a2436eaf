"""What is committed is published: in order per key, whatever becomes of the relays."""

import signal

from .ledger import Ledger
from tests.servers.processes import Start
from tests.servers.waiting import eventually

BACKLOG = 1_500
"""Events that wait for a relay."""


async def staged(ledger: Ledger, start: Start) -> None:
    """Let a consumer stage events without a relay, and end."""
    await ledger.send_portion(BACKLOG)
    consumer = await start("consume", batch_size=500)

    async def all_are() -> bool:
        count = await ledger.db.fetchval("SELECT count(*) FROM pipeline.outbox")
        return bool(count == ledger.amount)

    await eventually(all_are)
    assert ledger.published.records == [], "a consumer publishes nothing"
    consumer.send(signal.SIGTERM)
    assert await consumer.ended() == 0


async def test_another_relay_takes_over_from_one_that_was_killed_and_publishes_everything(
    ledger: Ledger, start: Start
) -> None:
    await staged(ledger, start)
    killed = await start("relay", relay_batch_events=7)
    await ledger.progresses()
    await killed.kill()
    assert await holds_leases(ledger), "the leases are still recorded"
    await start("relay")
    await ledger.check()


async def test_a_relay_frozen_longer_than_its_lease_skips_and_reorders_nothing(
    ledger: Ledger, start: Start
) -> None:
    await staged(ledger, start)
    # However long a busy machine lets it stand still, it does not end itself.
    frozen = await start("relay", relay_batch_events=7, hang_timeout=600)
    await ledger.progresses()
    frozen.send(signal.SIGSTOP)
    other = await start("relay")
    await ledger.check()
    frozen.send(signal.SIGCONT)
    async with ledger.traffic():
        await start("consume")
        await ledger.progresses()
        assert frozen.is_running
        other.send(signal.SIGTERM)
        assert await other.ended() == 0
        await ledger.progresses()


async def holds_leases(ledger: Ledger) -> bool:
    """Whether some relay owns shards of the outbox."""
    return bool(await ledger.db.fetchval("SELECT count(owner) FROM pipeline.outbox_cursor"))
