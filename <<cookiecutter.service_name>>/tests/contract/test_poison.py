"""What can't be handled stops its own key at most, until a person has decided."""

import signal

from .bank import Deposit, histories
from .ledger import Ledger
from tests.servers.processes import Start
from tests.servers.waiting import eventually


async def test_a_failing_message_holds_its_key_until_redriven_in_order(
    ledger: Ledger, start: Start
) -> None:
    await ledger.send(
        Deposit(1, "ada", partition=0),
        Deposit(2, "ada", partition=0),
        Deposit(3, "bob", partition=0),
        Deposit(4, "ada", partition=0),
    )
    bad_release = await start("run", more_variables={"BANK_POISON": "2"})
    await eventually(lambda: is_dead(ledger, "2"))
    await ledger.send(Deposit(5, "bob", partition=0), Deposit(6, "ada", partition=0))
    await ledger.published.until(lambda: len(set(ledger.published.ids)) == 3)
    assert await histories(ledger.db) == {"ada": [1], "bob": [3, 5]}, "its neighbours go on"
    await eventually(lambda: is_parked(ledger, "2", "4", "6"))

    bad_release.send(signal.SIGTERM)
    assert await bad_release.ended() == 0
    await start("run")
    assert await is_parked(ledger, "2", "4", "6"), "the death is remembered"
    redriving = await start("dead", "redrive", "--all", "--yes")
    assert await redriving.ended() == 0, redriving.output
    assert "1 applied" in redriving.output
    await ledger.check()
    assert await histories(ledger.db) == {"ada": [1, 2, 4, 6], "bob": [3, 5]}


async def test_invalid_bytes_become_a_dead_letter_and_all_others_continue(
    ledger: Ledger, start: Start
) -> None:
    await ledger.send_portion()
    await ledger.producer.send_and_wait(ledger.deposits, b"\xff", key=b"account-1", partition=0)
    await ledger.send(Deposit(ledger.amount + 1, "eve", id="x", value=b"{", partition=0))
    ledger.amount -= 1
    await ledger.send_portion()
    await start("run")
    await ledger.published.until(lambda: len(set(ledger.published.ids)) == ledger.amount)
    reasons = {reason for _, reason in await ledger.waiting()}
    assert reasons == {"not CloudEvents", "invalid payload"}


async def is_dead(ledger: Ledger, id: str) -> bool:
    """Whether the message of this id has used up its attempts."""
    return (id, "attempts used up") in await ledger.waiting()


async def is_parked(ledger: Ledger, *ids: str) -> bool:
    """Whether these messages, in this order, and no others are in the backlog."""
    return tuple(id for id, _ in await ledger.waiting()) == ids
