"""Dead letters are sent to a topic too, where one is set: once each, as they came, and why."""

from collections.abc import Awaitable, Callable, Sequence

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward import Policy, Reject
from onceward.events.message import headers_of

from .applier import Applier, NewApplier
from .bank import Bank
from tests.conftest import Records, Running
from tests.contract.bank import Deposit, histories

TOPIC = "dead"


@pytest.fixture
async def applier_and_bank(new_applier: NewApplier) -> tuple[Bank, Applier]:
    """Return an applier whose dead letters are sent."""
    policy = Policy(attempts=2, schedule=(0,))
    bank = Bank(deposits="deposits", balances="balances", name="bank", options={"policy": policy})
    return bank, await new_applier(bank.handlers, topic=bank.deposits, dead_letter_topic=TOPIC)


async def sent(db: asyncpg.Connection) -> list[tuple[str, str]]:
    """Return what is staged for the topic of dead letters: ids and reasons."""
    rows = await db.fetch("SELECT * FROM pipeline.outbox WHERE topic = $1 ORDER BY id", TOPIC)
    return [(row["event_id"], reason_in(headers_of(row["headers"]))) for row in rows]


def reason_in(headers: Sequence[tuple[str, bytes | None]]) -> str:
    """Return why a record is dead, by its headers."""
    reason = dict(headers)["dead-letter-reason"]
    assert reason is not None
    return reason.decode()


async def dead(applier: Applier) -> list[tuple[str, str]]:
    """Return the dead letters that are stored, likewise."""
    return [
        (row["key"].hex(), row["reason"])
        for row in await applier.backlog()
        if row["died_at"] is not None
    ]


async def test_whatever_dies_is_staged_once_in_the_transaction_in_which_it_dies(
    applier_and_bank: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = applier_and_bank
    bank.refused = {1, 7}
    bank.errors = {2: Reject("never")}
    await applier.apply(
        Deposit(1),
        Deposit(2, "bob"),
        Deposit(3, "cyd"),
        Deposit(4, "cyd", id="3"),
        Deposit(5, "dan", value=b"{}"),
        Deposit(6, "eve", type=""),
        Deposit(7, "flo"),
    )
    reasons = {"identity mismatch", "invalid payload", "missing attribute", "rejected"}
    assert {reason for _, reason in await sent(db)} == reasons
    await applier.make_due()
    await db.execute("UPDATE pipeline.backlog SET headers = '[]' WHERE id = '7'")
    await applier.work_off()
    await applier.make_due()
    await applier.work_off()
    assert sorted(await sent(db)) == sorted(await dead(applier))
    assert {reason for _, reason in await sent(db)} == {
        *reasons,
        "attempts used up",
        "not CloudEvents",
    }
    assert await histories(db) == {"cyd": [3]}


async def test_nothing_is_staged_for_what_waits_or_is_rolled_back(
    applier_and_bank: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = applier_and_bank
    bank.refused = {1}
    await applier.apply(Deposit(1), Deposit(2), Deposit(3, "bob"))
    assert await sent(db) == []


async def test_a_dead_letter_arrives_as_it_came_with_its_reason(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    records: Records,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()
    bank.errors = {1: Reject("never")}
    letter = Deposit(1, headers=(("x", b"\xff\0"), ("x", b"twice")))
    await letter.send(producer, bank.deposits)
    await producer.send_and_wait(bank.deposits, b"\xff", key=b"k", headers=[("none", None)])
    async with running(bank.service, dead_letter_topic=topic):
        first, second = await records(topic, 2)
    came = letter.record(bank.deposits, 0)
    assert (first.key, first.value) == (came.key, came.value)
    before = len(came.headers)
    assert first.headers[:before] == came.headers
    why = dict(first.headers[before:])
    assert {name: why[f"dead-letter-{name}"] for name in ("reason", "error", "consumer")} == {
        "reason": b"rejected",
        "error": b"Reject: never",
        "consumer": b"deposit",
    }
    assert {name: why[f"dead-letter-{name}"] for name in ("topic", "partition", "offset")} == {
        "topic": bank.deposits.encode(),
        "partition": b"0",
        "offset": b"0",
    }
    assert (second.key, second.value, second.headers[0]) == (b"k", b"\xff", ("none", None))
    assert reason_in(second.headers) == "not CloudEvents"
