"""The test kit: messages are handled as in the service, and the outcome says what came of them."""

import asyncio
import json
import logging
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from time import time
from typing import Any, Generic, TypeVar
from unittest.mock import patch
from uuid import uuid4

import asyncpg
import pytest
import sqlalchemy as sa
from opentelemetry import metrics
from sqlalchemy.orm import Mapped, mapped_column
from tenacity import AsyncRetrying, retry_if_exception_type, wait_fixed
from typer import Typer
from typer.testing import CliRunner

from onceward import (
    Aggregate,
    Event,
    Gaps,
    Handlers,
    Park,
    Policy,
    Reject,
    Sequenced,
    Service,
    Tombstone,
    Transaction,
)
from onceward.cli.commands import command_line
from onceward.events.message import Message
from onceward.service import Misconfigured
from onceward.testing import Harness, HarnessMisused, Outcome, Sent, crashes
from onceward.testing.databases import Migrate, ResettableDatabase, resettable_database
from onceward.testing.explore import Scenario, scenarios
from onceward.testing.plugin import open_harness

from tests.contract.bank import Account, Base, Deposited
from tests.servers import databases
from tests.servers.databases import migrations_of_the_engine

log = logging.getLogger("tests.bank")
booked_cents = metrics.get_meter("tests").create_counter("bank.cents")
TOPIC = "deposits"


class Booked(Event, type="kit.booked", topic="bookings"):
    """A deposit was booked."""

    account: str
    balance: int


class Audited(Event, type="kit.audited"):
    """A deposit was looked at."""

    account: str


@Audited.upcast("kit.audited.before")
def _(data: dict[str, Any]) -> dict[str, Any]:
    return {"account": data["name"]}


@dataclass
class Rules:
    """What the bank of a test does with amounts."""

    raises: dict[int, list[Exception]] = field(default_factory=dict)
    """Errors by amount, one for each attempt."""
    audited: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


rules = Rules()
handlers = Handlers()


@handlers.on(
    Deposited,
    topic=TOPIC,
    consumer="book",
    loads=Account.by("account"),
    policy=Policy(attempts=3, schedule=(60, 600)),
)
async def book(event: Deposited, tx: Transaction) -> int:
    rules.messages.append(tx.message)
    account = await tx.load_or_create(Account, event.account)
    account.balance += event.amount
    account.history += f"{event.amount},"
    booked = Booked(account=account.id, balance=account.balance)
    tx.publish(booked, of=account)
    if event.amount >= 1_000:
        tx.publish(booked, after=timedelta(hours=1), name="reminder", headers={"tenant": "a"})
    log.warning("booked", extra={"cents": event.amount})
    booked_cents.add(event.amount, {"account": account.id})
    if errors := rules.raises.get(event.amount):
        raise errors.pop(0)
    return account.balance


@handlers.correct(Deposited, topic=TOPIC, of="book", consumer="unbook", loads=Account.by("account"))
async def unbook(event: Deposited, tx: Transaction) -> None:
    account = await tx.load_or_create(Account, event.account)
    account.balance -= event.amount
    tx.publish(Booked(account=account.id, balance=account.balance), of=account)


class Stubborn(Event, type="kit.stubborn"):
    """Its handler suppresses its cancellation."""

    account: str


@handlers.on(Stubborn, topic="stubborn", consumer="stubborn")
async def stubborn(event: Stubborn, tx: Transaction) -> None:
    account = await tx.load_or_create(Account, event.account)
    account.balance += 1
    try:
        await tx.session.flush()
    except BaseException:
        await tx.session.execute(sa.text("SELECT 1"))


class Careless(Event, type="kit.careless"):
    """Its handler awaits nothing."""

    account: str


@handlers.on(Careless, topic="careless", consumer="careless")
async def careless(event: Careless, tx: Transaction) -> None:
    tx.load(Account, event.account)  # type: ignore[unused-coroutine]


@handlers.on(Audited, topic="audits", consumer="audit", mode="deferred", takes_old=True)
async def audit(event: Audited, tx: Transaction) -> None:
    rules.audited.append(event.account)


@handlers.on(Audited, topic="audits-too", consumer="audit-too")
async def audit_too(event: Audited, tx: Transaction) -> None:
    rules.audited.append(event.account)


T = TypeVar("T")


class Noted(Event, Generic[T], type="kit.noted", topic="notes"):
    """Something was noted."""

    value: T


class Followed(Sequenced, Aggregate, Base):
    """A row that follows numbered events."""

    __tablename__ = "kit_followed"

    id: Mapped[str] = mapped_column(sa.Text, primary_key=True)


class Numbered(Event, type="kit.numbered"):
    """The next event of an account."""

    account: str


@handlers.on(
    Numbered,
    topic="numbered",
    consumer="follow",
    loads=Followed.by("account"),
    gaps=Gaps(wait=600, then="apply"),
)
async def follow(event: Numbered, tx: Transaction) -> int:
    await tx.load_or_create(Followed, event.account)
    return tx.gap


@handlers.on(Tombstone, topic="compacted", consumer="forget")
async def forget(event: Tombstone, tx: Transaction) -> tuple[str, bool]:
    return event.key, tx.message.data is None


@handlers.on(Audited, topic="audits-twice", consumer="note")
async def note(event: Audited, tx: Transaction) -> None:
    tx.publish(Noted[str](value=event.account), key=None)
    tx.publish(Noted[int](value=int(event.account)), key=None)


@pytest.fixture(autouse=True)
def no_rules() -> None:
    rules.messages.clear()
    rules.raises.clear()
    rules.audited.clear()


@pytest.fixture(scope="session")
def harness_service() -> Service:
    return Service("bank", handlers, Base.metadata, package=__package__)


@pytest.fixture(scope="session")
def harness_migrate() -> Migrate:
    return lambda url: databases.build(url, migrations_of_the_engine(), Base.metadata)


def deposit(amount: int, account: str = "ada") -> Deposited:
    return Deposited(account=account, amount=amount)


async def test_an_event_takes_effect_and_the_outcome_has_what_was_published(
    harness: Harness,
) -> None:
    outcome = await harness.handle(deposit(5))
    assert outcome.applied == ["book"]
    assert outcome.results == [5]
    assert outcome.published == [Booked(account="ada", balance=5)]
    assert [one[1:4] for one in outcome.records] == [("bookings", "ada", 1)]
    assert (outcome.failures, outcome.calls, outcome.scheduled) == ([], [], [])
    assert not outcome.is_duplicate
    assert (await harness.get(Account, "ada")).history == "5,"


async def test_an_equal_event_is_a_duplicate_unless_it_has_another_id(harness: Harness) -> None:
    await harness.handle(deposit(5))
    again = await harness.handle(deposit(5))
    assert again.is_duplicate
    assert again.published == []
    other = await harness.handle(deposit(5), id="another")
    assert other.results == [10]
    assert (await harness.handle(deposit(5), source="/elsewhere")).results == [15]


async def test_the_records_of_all_steps_are_in_the_outbox(harness: Harness) -> None:
    assert await harness.records() == []
    first = await harness.handle(deposit(5))
    await harness.handle(deposit(1_000, "bob"))
    later = await harness.advance(hours=2)
    records = await harness.records()
    assert [(one.event, one.key, one.sequence) for one in records] == [
        (Booked(account="ada", balance=5), "ada", 1),
        (Booked(account="bob", balance=1_000), "bob", 1),
        (Booked(account="bob", balance=1_000), None, None),
    ]
    assert (first.records, later.records) == (records[:1], records[2:])


async def test_messages_are_handed_to_a_correction_as_by_the_command(harness: Harness) -> None:
    await harness.handle(deposit(5))
    outcome = await harness.correct("unbook", deposit(5))
    assert outcome.applied == ["unbook"]
    assert [one.sequence for one in outcome.records] == [2]
    assert (await harness.get(Account, "ada")).balance == 0
    assert (await harness.correct("unbook", deposit(5))).is_duplicate
    with pytest.raises(HarnessMisused, match="corrections: unbook"):
        await harness.correct("book", deposit(5))
    with pytest.raises(HarnessMisused, match="does not take all"):
        await harness.correct("unbook", Stubborn(account="ada"))


async def test_one_id_with_two_payloads_is_a_mismatch(harness: Harness) -> None:
    await harness.handle(deposit(5), id="1")
    outcome = await harness.handle(deposit(6), id="1")
    (failure,) = outcome.failures
    assert (failure.reason, failure.decision, failure.id) == ("identity mismatch", "dead", "1")
    assert "came before with payload hash" in failure.error
    assert not outcome.is_duplicate
    assert [one.reason for one in await harness.dead_letters()] == ["identity mismatch"]


async def test_a_failure_parks_its_message_and_not_its_neighbours(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    rules.raises[2] = [ValueError("two")]
    outcome = await harness.handle_batch(
        [deposit(1), deposit(2), Sent(deposit(3), id="behind"), deposit(4, "bob")]
    )
    (failure,) = outcome.failures
    assert (failure.consumer, failure.error) == ("book", "ValueError: two")
    assert (failure.decision, failure.reason, failure.attempts) == ("parked", "failed", 1)
    assert failure.traceback is not None
    assert "in book\n" in failure.traceback
    assert failure.traceback in caplog.text
    assert failure.due_in == pytest.approx(60, rel=0.1)
    assert outcome.waiting == ["behind"]
    assert [str(one) for one in outcome.published] == [
        "account='ada' balance=1",
        "account='bob' balance=4",
    ]
    later = await harness.advance(seconds=70)
    assert later.results == [3, 6]
    assert not later.failures


async def test_time_passes_for_each_retry_until_the_message_is_dead(harness: Harness) -> None:
    rules.raises[2] = [ValueError("first"), ValueError("second"), ValueError("third")]
    await harness.handle(deposit(2))
    soon = await harness.advance(seconds=50)
    assert not soon.failures
    outcome = await harness.advance(hours=1)
    (failure,) = outcome.failures
    assert (failure.error, failure.decision) == ("ValueError: third", "dead")
    assert (failure.attempts, failure.due_in) == (3, None)
    (letter,) = await harness.dead_letters()
    assert (letter.reason, letter.error) == ("attempts used up", "ValueError: third")
    redriven = await harness.redrive(letter)
    assert redriven.results == [2]
    assert await harness.dead_letters() == []
    with pytest.raises(HarnessMisused, match="not there any more"):
        await harness.redrive(letter)


async def test_a_rejected_message_is_dead_with_its_reason(harness: Harness) -> None:
    rules.raises[2] = [Reject("never")]
    (failure,) = (await harness.handle(deposit(2))).failures
    assert (failure.decision, failure.reason) == ("dead", "rejected")
    assert failure.error == "Reject: never"


async def test_a_scheduled_event_is_published_when_its_time_has_come(harness: Harness) -> None:
    outcome = await harness.handle(deposit(1_000))
    (scheduled,) = outcome.scheduled
    assert (scheduled.name, scheduled.after) == ("reminder", 3_600)
    assert (await harness.advance(minutes=59)).published == []
    late = await harness.advance(minutes=1)
    assert late.published == [scheduled.event] == [Booked(account="ada", balance=1_000)]
    headers = late.records[0].headers
    assert (headers["tenant"], headers["ce_type"]) == (b"a", b"kit.booked")


async def test_a_gap_is_waited_for_until_its_time_has_passed(harness: Harness) -> None:
    async def handle(number: int) -> Outcome:
        headers = {"ce_sequence": f"{number:020}"}
        return await harness.handle(Numbered(account="ada"), id=str(number), headers=headers)

    (early,) = (await handle(2)).failures
    assert (early.reason, early.decision) == ("sequence gap", "parked")
    assert early.due_in == pytest.approx(600, rel=0.01)
    assert (await harness.advance(minutes=9)).applied == []
    assert (await handle(1)).results == [0, 0]
    await handle(5)
    assert (await harness.advance(minutes=11)).results == [2]
    assert (await handle(4)).superseded == 1


async def test_a_deferred_message_is_handled_in_the_same_step(harness: Harness) -> None:
    outcome = await harness.handle(Audited(account="ada"), topic="audits")
    assert outcome.applied == ["audit"]
    assert rules.audited == ["ada"]


async def test_what_is_parked_for_seconds_is_retried_for_hours(harness: Harness) -> None:
    rules.raises[2] = [Park("not yet", after=5) for _ in range(10_000)]
    await harness.handle(deposit(2))
    await harness.advance(minutes=5)
    assert 20 < len(rules.messages) < 72
    outcome = await harness.advance(hours=2)
    assert [one.decision for one in outcome.failures] == ["parked"]
    assert 110 < len(rules.messages) < 262
    rules.raises.clear()
    assert (await harness.advance(minutes=1)).applied == ["book"]


async def test_two_steps_at_once_are_refused(harness: Harness) -> None:
    both = (harness.handle(deposit(2)), harness.handle(deposit(3)))
    first, second = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(first, Outcome)
    assert first.results == [2]
    assert isinstance(second, HarnessMisused)
    assert "await one after the other" in str(second)
    assert (await harness.handle(deposit(3))).results == [5]


def test_a_table_without_a_migration_is_named(
    harness_server: str, harness_service: Service, harness_migrate: Migrate
) -> None:
    declared = sa.MetaData()
    sa.Table("account", declared, sa.Column("id", sa.Text), sa.Column("limit", sa.Integer))
    service = replace(harness_service, metadata=declared)
    lacking = "the table account of the code lacks limit: write the migration"
    with (
        pytest.warns(UserWarning, match=lacking),
        resettable_database(harness_server, service, harness_migrate),
    ):
        pass


async def test_time_does_not_pass_over_a_row_that_no_handler_takes(harness: Harness) -> None:
    rules.raises[2] = [ValueError("two")]
    await harness.handle(deposit(2))
    async with harness.session() as session:
        await session.execute(sa.text("UPDATE pipeline.backlog SET consumer = 'removed'"))
    async with asyncio.timeout(300):
        with pytest.raises(HarnessMisused, match=r"no row of pipeline\.backlog locked"):
            await harness.advance(hours=1)


async def test_a_raw_record_is_decoded_as_in_the_service(harness: Harness) -> None:
    outcome = await harness.handle_record(TOPIC, b"{}", key=b"ada", headers={"ce_id": "1"})
    (failure,) = outcome.failures
    assert (failure.consumer, failure.reason) == ("", "missing attribute")
    headers = {"ce_specversion": "1.0", "ce_id": "1", "ce_source": "/a", "ce_type": "deposited"}
    (failure,) = (await harness.handle_record(TOPIC, b"[]", headers=headers)).failures
    assert (failure.consumer, failure.reason) == ("book", "invalid payload")
    unknown = await harness.handle_record(TOPIC, b"{}", headers=headers | {"ce_type": "other"})
    assert (unknown.skipped, unknown.failures) == (1, [])
    assert (await harness.handle_record(TOPIC, None)).skipped == 1


async def test_each_partition_has_a_batch_of_its_own(harness: Harness) -> None:
    outcome = await harness.handle_batch(
        [Sent(deposit(amount, name), partition=amount % 2) for amount, name in enumerate("abcd", 1)]
    )
    assert outcome.results == [1, 3, 2, 4]
    assert (await harness.handle(deposit(5, "a"), partition=1)).results == [6]


async def test_rows_are_prepared_in_a_session(harness: Harness) -> None:
    async with harness.session() as session:
        account = Account("ada")
        account.balance = 7
        session.add(account)
    assert (await harness.handle(deposit(1))).results == [8]
    with pytest.raises(sa.exc.NoResultFound):
        await harness.get(Account, "bob")


async def test_a_row_that_is_missing_is_named(harness: Harness) -> None:
    with pytest.raises(sa.exc.NoResultFound) as missing:
        await harness.get(Account, "bob")
    assert missing.value.__notes__ == ["Account has no row ('bob',): see the failures of outcomes"]


async def test_a_message_has_the_headers_that_a_relay_sends(harness: Harness) -> None:
    await harness.handle(deposit(5))
    seen = rules.messages[-1]
    assert (seen.subject, seen.key, seen.content_type) == ("ada", b"ada", "application/json")
    assert seen.time is not None
    assert abs(datetime.now(UTC) - seen.time) < timedelta(minutes=1)
    await harness.handle(deposit(5), id="2", age=timedelta(days=1), headers={"ce_subject": "x"})
    earlier = rules.messages[-1]
    assert earlier.subject == "x"
    assert earlier.time is not None
    assert timedelta(hours=23) < seen.time - earlier.time < timedelta(hours=25)


async def test_text_is_taken_for_bytes(harness: Harness) -> None:
    headers = {"ce_specversion": "1.0", "ce_id": "1", "ce_source": "/a", "ce_type": "deposited"}
    text = '{"account": "ada", "amount": 3}'
    outcome = await harness.handle_record(TOPIC, text, key="ada", headers=headers | {"x": None})
    assert outcome.results == [3]
    again = await harness.handle_record(TOPIC, text.encode(), key=b"ada", headers=headers)
    assert again.is_duplicate
    assert (await harness.handle(deposit(4), key=b"ada")).results == [7]


async def test_a_tombstone_is_a_record_without_a_value(harness: Harness) -> None:
    assert (await harness.handle(Tombstone(key="ada"))).results == [["ada", True]]
    assert (await harness.handle(Tombstone(key="ada"))).is_duplicate
    assert (await harness.handle(Tombstone(key="bob"))).results == [["bob", True]]


async def test_a_generic_event_is_read_as_the_class_that_was_published(harness: Harness) -> None:
    outcome = await harness.handle(Audited(account="1"), topic="audits-twice")
    assert outcome.published == [Noted[str](value="1"), Noted[int](value=1)]


async def test_a_service_that_would_not_start_is_not_tested(
    harness_database: ResettableDatabase,
) -> None:
    wrong = Handlers()
    wrong.topic("unread", demands_types=True)
    service = Service("bank", wrong, Base.metadata)
    for _ in range(2):
        with pytest.raises(Misconfigured, match="'unread': no handler reads this topic"):
            async with open_harness(service, harness_database, Harness):
                pass


@pytest.mark.parametrize("number", range(3))
async def test_each_test_begins_with_what_the_migrations_have_made(
    harness: Harness, number: int
) -> None:
    assert (await harness.handle(deposit(5))).results == [5]
    async with harness.session() as session:
        ids = await session.execute(sa.text("SELECT id FROM pipeline.outbox"))
        assert [*ids.scalars()] == [1]
        lanes = await session.execute(sa.text("SELECT count(*) FROM pipeline.backlog_lane"))
        assert lanes.scalar() == 96
        await session.execute(sa.text("DELETE FROM pipeline.backlog_lane"))
        await session.execute(sa.text("INSERT INTO account VALUES ('x', 1, '', 0)"))


heard: list[int] = []


@pytest.mark.parametrize("number", range(2))
async def test_a_listener_ends_with_its_test(harness: Harness, number: int) -> None:
    heard.clear()
    engine = harness.engine.sync_engine
    sa.event.listen(engine, "before_cursor_execute", lambda *each: heard.append(number))
    await harness.handle(deposit(5))
    assert {*heard} == {number}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_test_in_another_event_loop_than_its_fixture_is_refused(harness: Harness) -> None:
    with pytest.raises(HarnessMisused, match="leave out loop_scope="):
        await harness.handle(deposit(5))


async def test_tests_may_have_event_loops_of_their_own(
    harness_service: Service, harness_database: ResettableDatabase
) -> None:
    async def test() -> list[object]:
        async with open_harness(harness_service, harness_database, Harness) as harness:
            return (await harness.handle(deposit(5))).results

    for _ in range(2):
        assert await asyncio.to_thread(asyncio.run, test()) == [5]


async def test_a_task_left_by_a_test_is_ended_and_named(
    harness: Harness, harness_service: Service, harness_database: ResettableDatabase
) -> None:
    async def deposit_forever() -> None:
        while True:
            await harness.handle(deposit(1))

    with pytest.raises(HarnessMisused, match=r"left tasks running \(.*deposit_forever\)"):
        async with open_harness(harness_service, harness_database, Harness):
            left = asyncio.create_task(deposit_forever())
            await asyncio.sleep(0.05)
    assert left.cancelled()


async def test_a_task_of_a_test_is_named_inside_of_a_library(
    harness: Harness, harness_service: Service, harness_database: ResettableDatabase
) -> None:
    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise ValueError

    retrying = AsyncRetrying(wait=wait_fixed(0), retry=retry_if_exception_type(ValueError))
    with pytest.raises(HarnessMisused, match=r"left tasks running \(.*fail\)"):
        async with open_harness(harness_service, harness_database, Harness):
            left: asyncio.Task[None] = asyncio.create_task(retrying(fail))
            await asyncio.sleep(0.005)
    assert left.cancelled()


async def test_what_is_set_by_the_pool_ends_with_the_test(
    harness_service: Service, harness_database: ResettableDatabase
) -> None:
    for _ in range(2):
        async with (
            open_harness(harness_service, harness_database, Harness) as harness,
            harness.engine.begin() as connection,
        ):
            await connection.execute(sa.text("CREATE TEMPORARY TABLE account (id text)"))
            await connection.execute(sa.text("SET search_path = pg_temp"))


async def test_an_error_is_raised_if_a_dead_process_still_runs_a_statement(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crashes, "_END_SECONDS", 0.2)
    databases.end_sessions_late(monkeypatch, 1)
    with pytest.raises(HarnessMisused, match="still run a statement"):
        async for _ in harness.each_crash():
            await harness.handle(deposit(5))


async def test_a_connection_that_a_test_has_kept_is_not_missing(
    harness_service: Service, harness_database: ResettableDatabase
) -> None:
    kept = []
    for _ in range(15):  # the pool has fewer
        async with open_harness(harness_service, harness_database, Harness) as harness:
            assert (await harness.handle(deposit(5))).results == [5]
            kept.append(await harness.engine.connect())
    for connection in kept:
        await connection.invalidate()


async def test_a_coroutine_not_awaited_by_a_handler_fails_its_message(
    harness: Harness,
) -> None:
    (failure,) = (await harness.handle(Careless(account="ada"), key="ada")).failures
    assert failure.error.endswith("was never awaited: write `await` before it")


async def test_what_a_session_sets_ends_with_it(harness: Harness) -> None:
    async with harness.session() as session:
        await session.execute(sa.text("CREATE TEMPORARY TABLE account (LIKE account)"))
        await session.execute(sa.text("SET search_path = pg_temp"))
    assert (await harness.handle(deposit(5))).results == [5]
    assert (await harness.get(Account, "ada")).balance == 5


async def test_connections_of_other_settings_end_with_the_test(
    harness_service: Service, harness_database: ResettableDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
    counts: list[int] = []
    for number in range(3):
        monkeypatch.setenv("PIPELINE_MAX_EVENT_BYTES", str(1_000 + number))
        async with open_harness(harness_service, harness_database, Harness) as harness:
            await harness.handle(deposit(5))

            async def connections(harness: Harness = harness) -> int:
                async with harness.session() as session:
                    return int(await session.scalar(query))

            counts.append(await connections())
            while counts[-1] > counts[0]:  # the server ends some of them a moment later
                await asyncio.sleep(0.02)
                counts[-1] = await connections()


async def test_the_database_is_reset_after_its_connections_were_closed(
    harness: Harness, harness_database: ResettableDatabase
) -> None:
    await harness.handle(deposit(5))
    async with harness.session() as session:
        closed = await session.scalars(
            sa.text(
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'harness'"
            )
        )
        assert [*closed] == [True]
    await harness_database.reset()
    assert await harness.records() == []


async def test_a_misused_harness_says_what_to_write(harness: Harness) -> None:
    with pytest.raises(HarnessMisused, match=r"no handler takes Booked: register one by @handlers"):
        await harness.handle(Booked(account="ada", balance=1))
    with pytest.raises(HarnessMisused, match=r"write handle\(…, topic='audits'\)"):
        await harness.handle(Audited(account="ada"))
    topics = "audits, audits-too, audits-twice, careless, compacted, deposits, numbered, stubborn"
    with pytest.raises(HarnessMisused, match=f"reads the topic 'x'; .* {topics}"):
        await harness.handle(deposit(1), topic="x")
    with pytest.raises(HarnessMisused, match=r"'audits' takes Deposited.*taken from: deposits"):
        await harness.handle(deposit(1), topic="audits")
    with pytest.raises(HarnessMisused, match="no handler reads the topic 'x'"):
        await harness.handle_record("x", b"")
    with pytest.raises(HarnessMisused, match="'book' is no effect; effects: none"):
        await harness.run_calls({"book": book})
    wrong: list[Any] = [{"account": "ada"}, deposit(1), 5, print]
    for misuse, text in (
        (harness.handle(wrong[0]), r"a message is an event or Sent.* this is \{'account'"),
        (harness.handle_batch(wrong[1]), r"several are a list of them; this is \('account'"),
        (harness.handle(deposit(1), key=wrong[2]), "key of a record is bytes, text or None, not 5"),
        (harness.handle_record(TOPIC, wrong[0]), "the value of a record is bytes"),
        (harness.handle(deposit(1), headers={"x": wrong[2]}), "the header 'x' of a record"),
        (harness.advance(hours=-1), "time does not pass backwards"),
        (harness.explore([], invariant=wrong[3]), "invariant as an `async def function"),
        (harness.explore([deposit(1)], invariant=sum_is_6, at_most=0), "at_most is 1 or more"),
    ):
        with pytest.raises(HarnessMisused, match=text):
            await misuse


async def test_an_internal_engine_error_is_raised_and_the_harness_continues(
    harness: Harness,
) -> None:
    async def rename(old: str, new: str) -> None:
        async with harness.session() as session:
            await session.execute(sa.text(f"ALTER TABLE pipeline.{old} RENAME TO {new}"))

    await rename("inbox_generation", "gone")
    with pytest.raises(asyncpg.UndefinedTableError):
        await harness.handle(deposit(2))
    await rename("gone", "inbox_generation")
    assert (await harness.handle(deposit(3))).results == [3]


async def sum_is_6(harness: Harness) -> None:
    account = await harness.get(Account, "ada")
    assert (account.balance, account.version) == (6, 3)
    assert account.history == "1,2,3,"


async def test_explore_finds_nothing_wrong_with_a_handler_that_keeps_its_invariant(
    harness: Harness,
) -> None:
    messages = [deposit(1), deposit(2), deposit(3), deposit(9, "bob")]
    # Four places for the deposit of bob; as they are, twice, in a batch, each failing or not.
    number = await harness.explore(messages, invariant=sum_is_6)
    assert number == 4 * (3 + 2 * 4)
    assert await harness.explore(messages, invariant=sum_is_6, at_most=7) == 7
    assert (await harness.handle(deposit(4), id="later")).applied == ["book"]


async def test_explore_names_the_scenario_in_which_an_invariant_is_violated(
    harness: Harness,
) -> None:
    async def bob_is_last(harness: Harness) -> None:
        async with harness.session() as session:
            keys = await session.scalars(sa.text("SELECT key FROM pipeline.outbox ORDER BY id"))
            assert [*keys] == [b"ada", b"bob"]

    with pytest.raises(AssertionError) as raised:
        await harness.explore([deposit(1), deposit(9, "bob")], invariant=bob_is_last)
    # The first is parked, and applied after the second.
    assert raised.value.__notes__ == [
        "scenario: messages in the order 0, 1; the first call for 0 fails"
    ]

    async def bob_is_there(harness: Harness) -> None:
        await harness.get(Account, "bob")

    with pytest.raises(sa.exc.NoResultFound) as wrong:
        await harness.explore([deposit(1)], invariant=bob_is_there)
    assert wrong.value.__notes__[-1] == "scenario: messages in the order 0"
    with pytest.raises(HarnessMisused, match="no handler takes Booked"):
        await harness.explore([Booked(account="a", balance=1)], invariant=bob_is_last)


async def test_every_order_that_keeps_that_of_a_key_is_explored() -> None:
    found = {one.order for one in await scenarios(["a", "b", "a"], 100)}
    assert found == {(0, 1, 2), (0, 2, 1), (1, 0, 2)}
    assert len(await scenarios(range(12), 50)) == 50
    assert Scenario((1, 0), repeats=True).sent == [1, 1, 0, 0, 1, 0]


async def statements_of(one: Scenario) -> int:
    """Return more statements for another order, and only one for a batch."""
    return 1 if one.is_batch else 3 + one.order[0]


async def test_the_process_dies_after_each_statement_of_each_order() -> None:
    found = [one for one in await scenarios("ab", 100, statements_of) if one.dies_after is not None]
    assert {(one.order[0], one.is_batch, one.dies_after) for one in found} == {
        *((0, False, number) for number in range(3)),
        *((1, False, number) for number in range(4)),
        (0, True, 0),
        (1, True, 0),
    }
    assert len(found) == 9
    # 14 scenarios without a crash: all are counted before some are chosen.
    assert len(await scenarios("ab", 20, statements_of)) == 20


async def test_a_chosen_crash_is_one_that_its_order_has() -> None:
    found = await scenarios("abcdefgh", 500, statements_of)
    crashes = [one for one in found if one.dies_after is not None]
    assert len(found) == len(set(found)) == 500
    for one in crashes:
        assert one.dies_after is not None
        assert one.dies_after < await statements_of(one)
    assert max(one.dies_after or 0 for one in crashes) > 3  # more than the first order has


async def test_the_outcome_has_what_was_logged_and_counted(harness: Harness) -> None:
    rules.raises[2] = [ValueError("two")] * 2
    outcome = await harness.handle_batch([deposit(1), deposit(2, "bob")])
    booked = [one for one in outcome.logs if one.name == "tests.bank"]
    assert {(one.getMessage(), one.levelname) for one in booked} == {("booked", "WARNING")}
    assert vars(booked[0])["cents"] == 1
    (parked,) = (one for one in outcome.logs if one.name.startswith("onceward."))
    assert (parked.levelname, vars(parked)["consumer"]) == ("WARNING", "book")
    counted = {
        one.attributes["pipeline.outcome"]: one.value
        for one in outcome.metrics
        if one.name == "pipeline.messages"
    }
    assert counted == {"applied": 1, "parked": 1}
    later = await harness.handle(deposit(7))
    (cents,) = (one for one in later.metrics if one.name == "bank.cents")
    assert (cents.attributes, cents.value) == ({"account": "ada"}, 7)


async def test_a_dead_letter_that_was_exported_is_handled_from_its_file(
    harness: Harness, harness_database: ResettableDatabase, harness_service: Service, tmp_path: Path
) -> None:
    await harness.handle(deposit(5), id="1")
    await harness.handle(deposit(6), id="1")
    await harness.handle_record(TOPIC, b"\xff", key=b"\xfe", headers={"ce_id": "2"})
    servers = {
        "PIPELINE_DATABASE_URL": harness_database.url,
        "PIPELINE_KAFKA_BOOTSTRAP_SERVERS": "unused:9092",
    }
    with patch.dict(os.environ, servers):
        program = command_line(harness_service)
        assert isinstance(program, Typer)
        run = partial(CliRunner().invoke, program, catch_exceptions=False)
        shown = [
            await asyncio.to_thread(run, ["dead", "show", one.id[:16], "--json"])
            for one in await harness.dead_letters()
        ]
    path = tmp_path / "letters.jsonl"
    path.write_text("\n".join(one.stdout for one in shown))
    async with open_harness(harness_service, harness_database, Harness) as another:
        outcome = await another.handle_file(path)
        assert outcome.results == [6], [one.output for one in shown]
        (failure,) = outcome.failures
        assert failure.reason == "missing attribute"
        (letter,) = await another.dead_letters()
        assert (letter.key, letter.value) == (b"\xfe", b"\xff")


async def test_a_record_from_a_file_has_the_current_time_unless_kept(
    harness: Harness, tmp_path: Path
) -> None:
    await harness.advance(days=20)  # the inbox forgets, so it knows what is too old
    headers = {"ce_specversion": "1.0", "ce_id": "1", "ce_source": "/a", "ce_type": "deposited"}
    line = {
        "topic": TOPIC,
        "headers": [*headers.items()],
        "value": {"json": {"account": "ada", "amount": 2}},
        "timestamp": round(1_000 * (time() - 60 * 86_400)),
    }
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps(line))
    rules.raises[2] = [Reject("as in production")]
    (too_old,) = (await harness.handle_file(path, keeps_times=True)).failures
    assert too_old.reason == "too old"
    line["headers"] = [*(headers | {"ce_id": "2"}).items()]
    path.write_text(json.dumps(line))
    (failure,) = (await harness.handle_file(path)).failures
    assert failure.error == "Reject: as in production"


async def test_a_file_is_written_by_hand_and_a_wrong_line_is_named(
    harness: Harness, tmp_path: Path
) -> None:
    headers = {"ce_specversion": "1.0", "ce_id": "1", "ce_source": "/a", "ce_type": "deposited"}
    line = {
        "topic": TOPIC,
        "key": "ada",
        "headers": [*headers.items()],
        "value": {"json": {"account": "ada", "amount": 3}},
    }
    path = tmp_path / "scans.jsonl"
    path.write_text(f"{json.dumps(line)}\n\n")
    assert (await harness.handle_file(path)).results == [3]
    assert (await harness.handle_file(str(path))).is_duplicate
    for wrong, text in (
        ('{"topic": "deposits"}', r"line 1: value: .*`dead list` leaves out the value"),
        ('{"topic": "deposits", "value": {"hex": "x"}}', "value: .*hexadecimal"),
        ('{"topic": "deposits", "value": {"a": 1}}', 'value: .*{"json": …}'),
        ("deposits", "line 1: it: Invalid JSON"),
        ('{"topic": "x", "value": null}', "no handler reads the topic 'x'"),
    ):
        path.write_text(wrong)
        with pytest.raises(HarnessMisused, match=text):
            await harness.handle_file(path)


async def test_only_a_line_feed_ends_a_line_of_a_file(harness: Harness, tmp_path: Path) -> None:
    headers = {"ce_specversion": "1.0", "ce_id": "1", "ce_source": "/a", "ce_type": "deposited"}
    account = "ada\x85\u2028\u2029"  # JSON need not escape these
    line = {
        "topic": TOPIC,
        "key": account,
        "headers": [*headers.items()],
        "value": {"json": {"account": account, "amount": 3}},
    }
    path = tmp_path / "separators.jsonl"
    path.write_text(f"{json.dumps(line, ensure_ascii=False)}\r\n", "utf-8", newline="")
    assert (await harness.handle_file(path)).results == [3]
    assert (await harness.get(Account, account)).balance == 3


async def test_markers_are_forgotten_as_retention_does(harness: Harness) -> None:
    await harness.handle(deposit(5))
    await harness.advance(days=7)
    assert (await harness.handle(deposit(5), age=timedelta(days=7))).is_duplicate
    await harness.advance(days=5)
    (failure,) = (await harness.handle(deposit(5), age=timedelta(days=12))).failures
    assert (failure.reason, failure.decision) == ("too old", "dead")
    assert "the inbox remembers since" in failure.error
    # A copy that says that it is new is not told from another event.
    assert (await harness.handle(deposit(5), id="now")).results == [10]
    (letter,) = await harness.dead_letters()
    assert (await harness.redrive(letter)).results == [15]
    old = Sent(Audited(account="ada"), topic="audits", age=timedelta(days=12))
    assert (await harness.handle_batch([old])).applied == ["audit"]


async def test_a_process_dies_after_each_statement_and_each_message_counts_once(
    harness: Harness,
) -> None:
    crashes = []
    async for crash in harness.each_crash():
        crashes.append(crash)
        rules.raises[7] = [ValueError("seven")] * 2
        await harness.handle_batch([deposit(7), deposit(1_000, "bob")])
        await harness.advance(hours=3)
        accounts = [await harness.get(Account, name) for name in ("ada", "bob")]
        assert [one.history for one in accounts] == ["7,", "1000,"], crash
        async with harness.session() as session:
            found = await session.scalars(sa.text("SELECT key FROM pipeline.outbox"))
            assert Counter(found) == {b"ada": 1, b"bob": 1, None: 1}, crash  # None: the reminder
        assert await harness.dead_letters() == [], crash
    assert crashes[0] == "no crash"
    text = "\n".join(crashes)
    for table in ("pipeline.inbox", "account", "pipeline.outbox"):
        assert f": INSERT INTO {table}" in text
    assert ": COMMIT" in text
    commits = text.count(": COMMIT;") / 3
    assert text.count("the connection is lost before statement") == commits > 1
    answers = [one.partition(": ")[2] for one in crashes if one.startswith("the answer is lost")]
    assert answers.count("COMMIT;") == commits
    # Claims and releases of lanes commit by themselves.
    assert sum(one.startswith(("WITH free AS", "WITH locked AS")) for one in answers) > 1
    assert not any(one.startswith(("BEGIN", "ROLLBACK", "INSERT INTO account")) for one in answers)
    assert (await harness.handle(deposit(1), id="later")).applied == ["book"]


async def test_effects_outside_of_the_transaction_happen_twice_in_a_crash(
    harness: Harness,
) -> None:
    times = set()
    async for _ in harness.each_crash():
        rules.audited.clear()
        await harness.handle(Audited(account="ada"), topic="audits")
        times.add(len(rules.audited))
    assert times == {1, 2}


async def test_a_handler_that_goes_on_after_its_cancellation_does_no_harm(
    harness: Harness,
) -> None:
    async for crash in harness.each_crash():
        outcome = await harness.handle(Stubborn(account="ada"))
        assert outcome.failures == [], crash
        assert (await harness.get(Account, "ada")).balance == 1, crash


async def test_explore_lets_the_process_die(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [deposit(1), deposit(2), deposit(3)]
    number = await harness.explore(messages, invariant=sum_is_6, crashes=True, at_most=50)
    deaths = [one for one in caplog.messages if one.startswith("the process has died after")]
    assert number == 50 > len(deaths) > 30
    crash = Scenario((0,), dies_after=2)
    assert str(crash).endswith("; the process dies after statement 3")
    assert crash in await scenarios(["a"], 100, statements_of)


async def test_a_transaction_that_a_test_has_left_open_is_named(
    harness: Harness, harness_service: Service, harness_database: ResettableDatabase
) -> None:
    async with harness.session() as session:
        await session.execute(sa.text(f"CREATE TABLE t_{uuid4().hex[:8]} ()"))
        await session.execute(sa.text("LOCK TABLE account"))
        with pytest.raises(HarnessMisused, match="has left a transaction open"):
            async with open_harness(harness_service, harness_database, Harness):
                pass


async def test_a_record_of_an_older_type_is_handled_from_the_backlog(
    harness: Harness,
) -> None:
    old = {"ce_specversion": "1.0", "ce_source": "/old", "ce_type": "kit.audited.before"}
    outcome = await harness.handle_record(
        "audits", b'{"name": "ada"}', headers=old | {"ce_id": "1"}
    )
    assert (outcome.applied, rules.audited) == (["audit"], ["ada"])
    assert (
        await harness.handle_record("audits", b'{"name": "ada"}', headers=old | {"ce_id": "1"})
    ).is_duplicate
    failed = await harness.handle_record("audits", b"{}", headers=old | {"ce_id": "2"})
    assert failed.applied == []
    (letter,) = await harness.dead_letters()
    assert (letter.reason, letter.message_id) == ("invalid payload", "2")
    assert letter.value == b"{}"
    assert letter.error.startswith("KeyError")
