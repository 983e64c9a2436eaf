"""What a person asks of a service: what was handled, and the outbox of a restored dump."""

import json
from collections.abc import AsyncIterator, Callable
from decimal import Decimal

import asyncpg
import pytest
from pydantic import BaseModel

from onceward import Reject, Transaction
from onceward.operators import adopting
from onceward.retention.generations import close_generation

from .applier import Applier, NewApplier
from .bank import Bank
from .outgoing import numbered, stage
from .processes import starting
from tests.contract.bank import Account, Deposit, Deposited
from tests.servers.databases import empty_database
from tests.servers.processes import Start
from tests.servers.topics import following
from tests.servers.waiting import eventually


class Receipt(BaseModel):
    """What the handler of these tests returns."""

    account: str
    balance: Decimal


@pytest.fixture
async def applier(bank: Bank, new_applier: NewApplier) -> Applier:
    """Return the applier of a bank with a second consumer, which returns receipts."""

    @bank.handlers.on(
        Deposited, topic=bank.deposits, consumer="receipt", loads=Account.by("account")
    )
    async def receipt(event: Deposited, tx: Transaction) -> Receipt:
        account = await tx.load_or_create(Account, event.account)
        return Receipt(account=account.id, balance=Decimal(account.balance))

    return await new_applier(bank.handlers, topic=bank.deposits)


@pytest.fixture
async def start(bank: Bank, database_url: str, kafka: str) -> AsyncIterator[Start]:
    """Start commands of the bank."""
    async with starting(bank, database_url=database_url, kafka_bootstrap_servers=kafka) as one:
        yield one


async def test_what_a_handler_returned_the_first_time_is_kept_beside_the_marker(
    applier: Applier, db: asyncpg.Connection
) -> None:
    first = await applier.apply(Deposit(5), Deposit(7), Deposit(5))
    receipts = [one for one in first if one.item.handler.consumer == "receipt"]
    told = [(one.is_new, one.result) for one in receipts]
    five = {"account": "ada", "balance": "5"}
    assert told == [(True, five), (True, {"account": "ada", "balance": "12"}), (False, five)]
    assert {one.result for one in first if one.item.handler.consumer == "deposit"} == {None}
    for _ in range(2):  # in the same generation, and in a closed one
        assert not any(one.is_new for one in await applier.apply(Deposit(5)))
        kept = await db.fetch("SELECT result FROM pipeline.inbox WHERE result IS NOT NULL")
        assert {json.loads(row["result"])["balance"] for row in kept} == {"5", "12"}
        current = await db.fetchval("SELECT current FROM pipeline.inbox_generation")
        assert await close_generation(db, current=current)


async def test_a_result_that_is_no_json_is_the_handlers_fault(
    bank: Bank, new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="odd")
    async def odd(event: Deposited, tx: Transaction) -> object:
        return object() if event.amount == 6 else event.amount

    applier = await new_applier(bank.handlers, topic=bank.deposits)
    await applier.apply(Deposit(5), Deposit(6), Deposit(7))
    assert await applier.park() == {("odd", 1): "failed", ("odd", 2): "follows another"}
    assert await db.fetchval("SELECT result FROM pipeline.inbox WHERE consumer = 'odd'") == "5"


async def test_inbox_show_tells_when_where_by_which_transaction_and_with_which_outcome(
    applier: Applier, db: asyncpg.Connection, start: Start
) -> None:
    await applier.apply(Deposit(5), Deposit(7, id="a b"), Deposit(8, id="a b", source="/other"))
    xid = await db.fetchval("SELECT xid FROM pipeline.inbox LIMIT 1")
    published = await db.fetchval(
        "SELECT event_id FROM pipeline.outbox ORDER BY id OFFSET 1 LIMIT 1"
    )
    plain = await start("inbox", "show", "a b")
    assert await plain.ended() == 0, plain.output
    for word in (
        "/tests",
        "/other",
        "deposit",
        "receipt",
        applier.slot.topic,
        str(xid),
        '{"account":"ada","balance":"12"}',
        f"published balance.changed {published} to ",
    ):
        assert word in plain.output
    exact = await start("inbox", "show", "a b", "--source", "/tests", "--json")
    assert await exact.ended() == 0, exact.output
    # By source only the consumers are looked for that the service has: the process has one.
    found = json.loads(exact.output)
    assert (found["consumer"], found["source"], found["transaction"]) == ("deposit", "/tests", xid)
    assert [one["event_id"] for one in found["events"]] == [published]


@pytest.mark.parametrize("options", [(), ("--json",)], ids=str)
async def test_inbox_show_says_so_when_nothing_is_remembered(
    start: Start, options: tuple[str, ...]
) -> None:
    process = await start("inbox", "show", "nobody", *options)
    assert await process.ended() == 1
    assert "no event 'nobody' is remembered" in process.output


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("", "it is dead, see `service dead list --event-id 5`"),
        ("SET died_at = NULL", "it is waiting, see `service dead list --event-id 5 --waiting`"),
        (
            "SET discarded_at = died_at WHERE consumer = 'receipt'",
            (
                "it is dead and discarded, see `service dead list --event-id 5` and"
                " `service dead list --event-id 5 --discarded`"
            ),
        ),
    ],
    ids=["dead", "waiting", "one discarded"],
)
async def test_inbox_show_says_where_an_event_is_that_was_not_applied(
    applier: Applier, db: asyncpg.Connection, start: Start, statement: str, said: str
) -> None:
    await applier.apply(Deposit(5, value=b"{}"))
    if statement:
        await db.execute(f"UPDATE pipeline.backlog {statement}")
    process = await start("inbox", "show", "5")
    assert await process.ended() == 1
    assert f"event '5' was not applied: {said}\n" in process.output


async def test_inbox_show_says_that_an_event_is_dead_for_another_consumer(
    bank: Bank, applier: Applier, start: Start
) -> None:
    bank.errors = {5: Reject("no")}  # of the consumer `deposit`; `receipt` applies it
    await applier.apply(Deposit(5, id="a 'b'"))
    process = await start("inbox", "show", "a 'b'")
    assert await process.ended() == 0
    assert "receipt" in process.output
    advice = """is also dead, see `service dead list --event-id 'a '"'"'b'"'"''`"""
    assert advice in process.output


async def test_relay_reset_publishes_a_restored_outbox_again_with_the_same_ids(
    bank: Bank,
    db: asyncpg.Connection,
    kafka: str,
    settings: Callable[..., object],
    start: Start,
) -> None:
    await stage(db, numbered(bank.balances, range(3)))
    await db.execute("UPDATE pipeline.outbox_cluster SET system_identifier = 1")
    async with following(kafka, bank.balances) as tail:
        relay = await start("relay")
        await eventually(lambda: "service adopt" in relay.output)
        asked = await start("relay", "reset")
        assert await asked.ended() == 1  # nobody is there to say yes
        assert ", 3 events again?" in asked.output
        assert tail.ids == []
        reset = await start("relay", "reset", "--yes")
        assert await reset.ended() == 0, reset.output
        await tail.until_ids(range(3))
        assert tail.ids == ["0", "1", "2"]


async def test_inbox_show_knows_what_was_published_after_a_reset_too(
    applier: Applier, db: asyncpg.Connection, start: Start
) -> None:
    await applier.apply(Deposit(5))
    await adopting.adopt(db, keep_progress=False)
    process = await start("inbox", "show", "5")
    assert await process.ended() == 0, process.output
    assert "published balance.changed" in process.output


@pytest.mark.parametrize(
    "arguments", [("inbox", "show", "x"), ("relay", "reset", "--yes")], ids="-".join
)
async def test_without_tables_a_command_says_so(
    bank: Bank,
    server_url: str,
    used_databases: list[str],
    kafka: str,
    arguments: tuple[str, ...],
) -> None:
    url = await empty_database(server_url, used_databases)
    async with starting(bank, database_url=url, kafka_bootstrap_servers=kafka) as start:
        process = await start(*arguments, database_pooler=False)
        assert await process.ended() == 1
    assert "run `service migrate` first" in process.output
    assert "Traceback" not in process.output
