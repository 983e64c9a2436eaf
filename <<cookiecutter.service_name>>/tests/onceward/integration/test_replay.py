"""A topic is read again from an earlier place: nothing takes effect twice, and nothing is lost."""

import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward import Park
from onceward.apply import inbox
from onceward.cli import moves
from onceward.cli.moves import Replay
from onceward.runtime import Part
from onceward.settings import Settings

from .bank import Bank
from .conftest import Command, position_of, position_reaches
from .test_inbox import close_generation
from tests.conftest import Running
from tests.contract.bank import Deposit, histories
from tests.servers.waiting import eventually


async def test_what_took_effect_is_skipped_and_what_did_not_is_applied(
    bank: Bank,
    command: Command,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
) -> None:
    for amount in range(1, 11):
        await Deposit(amount).send(producer, bank.deposits)
    async with running(bank.service, Part.CONSUME):
        await eventually(position_reaches(db, bank.deposits, 10))
        # As if it had been forgotten: only this one is new.
        await db.execute("DELETE FROM pipeline.inbox WHERE id = '7'")
        done = await command("replay", bank.deposits, "--from", "earliest")
    assert done.exit_code == 0, done.output
    assert f"{bank.deposits}/0 goes from 10 to 0" in done.stdout
    assert "10 of 10 offsets are read again" in done.stdout
    assert "1 messages took effect, 9 had done so before" in done.stdout
    assert (await histories(db))["ada"] == [*range(1, 11), 7]


async def test_deferred_messages_and_messages_of_an_older_generation_are_reported(
    bank: Bank,
    command: Command,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    settings: Callable[..., Settings],
    direct_url: str,
) -> None:
    bank.errors = {2: Park("not yet", after=600)}
    for amount in range(3):
        await Deposit(amount, f"of {amount}").send(producer, bank.deposits)
    await store_position(db, bank, 3)
    async with running(bank.service, Part.CONSUME):

        async def closes_generations(*given: Any) -> AsyncIterator[int]:
            async for one in followed(*given):
                yield one
            own = await asyncpg.connect(
                direct_url.replace("+asyncpg", "")
            )  # the command has a loop of its own
            for _ in range(3):
                await close_generation(own, settings)
            await own.close()

        followed = moves.follow
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moves, "follow", closes_generations)
            done = await command("replay", bank.deposits, "--from", "earliest")
    assert "2 messages took effect, 0 had done so before, 1 wait in the backlog" in done.stdout


async def test_two_at_once_read_all_that_either_wants(
    bank: Bank,
    command: Command,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    producer: AIOKafkaProducer,
) -> None:
    for amount in range(1, 11):
        await Deposit(amount).send(producer, bank.deposits)
    await store_position(db, bank, 10)
    planned = moves.plan_replay

    async def plan(*arguments: Any) -> Replay:
        found = await planned(*arguments)
        monkeypatch.setattr(moves, "plan_replay", planned)
        other = await command("replay", bank.deposits, "--from", "earliest", "--no-wait")
        assert other.exit_code == 0, other.output
        return found

    monkeypatch.setattr(moves, "plan_replay", plan)
    offset = ("--from", "5", "--partition", "0")
    done = await command("replay", bank.deposits, *offset, "--no-wait")
    assert done.exit_code == 0, done.output
    assert await position_of(db, bank.deposits) == 0


async def test_it_begins_at_a_time(
    bank: Bank, command: Command, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    now = time.time()
    for amount in range(6):
        one = Deposit(amount, timestamp=round((now - 600 + 60 * amount) * 1_000))
        await one.send(producer, bank.deposits)
    await store_position(db, bank, 6)
    since = datetime.fromtimestamp(now - 600 + 150, UTC).isoformat()
    done = await command("replay", bank.deposits, "--from", since, "--no-wait")
    assert done.exit_code == 0, done.output
    assert f"{bank.deposits}/0 goes from 6 to 3" in done.stdout
    done = await command("topics", "seek", bank.deposits, "--to", datetime.now(UTC).isoformat())
    assert f"{bank.deposits}/0 goes from 3 to 6" in done.stdout
    actions = await db.fetch("SELECT action FROM pipeline.audit ORDER BY id")
    assert [row["action"] for row in actions] == ["replay", "seek"]


async def store_position(db: asyncpg.Connection, bank: Bank, offset: int) -> None:
    """Let the service have read so far."""
    await db.execute(
        "INSERT INTO pipeline.position (consumer_group, topic, partition, next_offset)"
        " VALUES ($1, $2, 0, $3)",
        bank.name,
        bank.deposits,
        offset,
    )


async def test_messages_that_may_be_forgotten_are_replayed_only_on_request(
    bank: Bank, command: Command, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    second = int(time.time()) - 600
    for amount, after in enumerate((-90, 0.3, 1.5, 60)):
        one = Deposit(amount, timestamp=round((second + after) * 1_000))
        await one.send(producer, bank.deposits)
    await store_position(db, bank, 4)
    since = datetime.fromtimestamp(second + 0.7, UTC)
    await db.execute("UPDATE pipeline.inbox_generation SET since = $1", since)
    refused = await command("replay", bank.deposits, "--from", "earliest", "--no-wait")
    assert refused.exit_code == 1
    assert "2 of 4 offsets are from before" in refused.output
    assert await position_of(db, bank.deposits) == 4
    hint = f"{since + timedelta(seconds=1):%Y-%m-%dT%H:%M:%SZ}"
    assert f"--from {hint}" in refused.output
    assert (await command("replay", bank.deposits, "--from", hint, "--no-wait")).exit_code == 0
    assert await position_of(db, bank.deposits) == 2
    await command("replay", bank.deposits, "--from", "earliest", "--no-wait", "--too-old")
    assert await position_of(db, bank.deposits) == 0


async def test_what_is_forgotten_before_a_long_replay_ends_counts_as_forgotten(
    bank: Bank,
    command: Command,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
) -> None:
    now = time.time()
    for amount in range(4):
        one = Deposit(amount, timestamp=round((now - 86_400 * (9 - amount)) * 1_000))
        await one.send(producer, bank.deposits)
    await store_position(db, bank, 4)
    # Forgotten in an hour: eight days are remembered.
    closed_at = datetime.fromtimestamp(now - 8 * 86_400 + 3_600, UTC)
    await db.execute("INSERT INTO pipeline.inbox_closed VALUES (0, $1)", closed_at)
    refused = await command("replay", bank.deposits, "--from", "earliest", "--no-wait")
    assert refused.exit_code == 1
    assert "2 of 4 offsets are from before" in refused.output

    await db.execute("UPDATE pipeline.inbox_generation SET since = $1", closed_at)
    await db.execute("INSERT INTO pipeline.inbox_consumer VALUES ('deposit', 0)")
    async with running(bank.service, Part.CONSUME):
        done = await command("replay", bank.deposits, "--from", "earliest", "--too-old")
    assert "2 messages took effect" in done.stdout
    assert "2 messages were too old, and are dead letters now" in done.stdout


async def test_messages_never_taken_by_a_consumer_are_replayed_whatever_their_age(
    bank: Bank, command: Command, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    await Deposit(1, timestamp=1_700_000_000_000).send(producer, bank.deposits)
    await store_position(db, bank, 1)
    await db.execute("UPDATE pipeline.inbox_generation SET since = now(), oldest = 2, current = 3")
    await inbox.register(db, bank.handlers.consumers)
    begins = ("replay", bank.deposits, "--from", "earliest", "--no-wait")
    # It has begun in a generation that will be forgotten soon; and in none such.
    await db.execute("INSERT INTO pipeline.inbox_closed VALUES (3, now() - interval '8 days')")
    assert (await command(*begins)).exit_code == 1
    await db.execute("UPDATE pipeline.inbox_closed SET generation = 2")
    assert (await command(*begins)).exit_code == 0


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("yesterday", "is not earliest, latest, an offset, or a time"),
        ("2026-11-01T08:00", "has no zone"),
        ("latest", "nothing of"),
    ],
)
async def test_what_cannot_be_meant_is_refused(
    bank: Bank, command: Command, place: str, told: str
) -> None:
    refused = await command("replay", bank.deposits, "--from", place)
    assert refused.exit_code in (1, 2)
    assert told in refused.output
