"""A message takes effect once, however often it comes, and only the one that came first."""

import json
import signal

from .bank import Deposit, histories
from .ledger import Ledger
from tests.servers.processes import Start


async def test_a_message_that_is_sent_twice_takes_effect_once(ledger: Ledger, start: Start) -> None:
    for _ in range(2):
        await ledger.send(*(Deposit(n, "ada", partition=0) for n in range(1, 21)))
        # On two partitions, which two processes may read at once.
        for partition in (1, 2):
            await ledger.send(
                *(Deposit(n, f"account-{n}", partition=partition) for n in range(21, 61))
            )
    await start("run")
    await start("run")
    await ledger.check()
    assert (await histories(ledger.db))["ada"] == list(range(1, 21))


async def test_what_was_read_before_takes_no_effect_when_it_is_read_again(
    ledger: Ledger, start: Start
) -> None:
    await ledger.send_portion(100)
    process = await start("run")
    await ledger.check()
    process.send(signal.SIGTERM)
    assert await process.ended() == 0
    rewinding = await start("topics", "seek", ledger.deposits, "--to", "earliest")
    assert await rewinding.ended() == 0, rewinding.output
    await start("run")
    await ledger.send_portion(20)
    await ledger.check()


async def test_the_same_id_with_another_payload_is_quarantined_with_both_hashes(
    ledger: Ledger, start: Start
) -> None:
    await ledger.send(
        Deposit(1, "ada", id="one", partition=0),
        Deposit(1_000_000, "eve", id="one", partition=0),
        Deposit(2, "bob", partition=0),
    )
    await start("run")
    await ledger.published.until(lambda: len(set(ledger.published.ids)) == 2)
    assert await ledger.waiting() == [("one", "identity mismatch")]
    assert await histories(ledger.db) == {"ada": [1], "bob": [2]}
    listing = await start("dead", "list", "--json")
    assert await listing.ended() == 0, listing.output
    showing = await start("dead", "show", json.loads(listing.output)["id"], "--json")
    assert await showing.ended() == 0, showing.output
    letter = json.loads(showing.output)
    assert letter["hash"] != letter["remembered_hash"]
