"""The timeline of a key: what it has, in which order, and what it says that it has not."""

import re
from collections.abc import Callable
from datetime import datetime
from time import time
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward import Event, Handlers, Reject, Service, Transaction
from onceward.cli.commands import command_line
from onceward.history import timeline
from onceward.history.commands import app
from onceward.operators import stopping
from onceward.operators.stopping import Subject

from .conftest import Take, Tells
from tests.contract.bank import Account, Base, Deposit, Deposited
from tests.onceward.integration.applier import Applier, NewApplier
from tests.onceward.integration.bank import Bank
from tests.onceward.integration.conftest import Command, complaint
from tests.onceward.integration.test_bombs import send_bomb
from tests.servers.waiting import PATIENCE

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACED = (("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01".encode()),)
"""Headers of a record."""
HOSTILE = "<script>\u202e\nkey"
_LATER = """
INSERT INTO pipeline.scheduled
       (name, due_at, topic, key, event_id, source, type, content_type, traceparent)
VALUES ('later', '2030-01-02 03:04+00', 't', 'ada', 'a', '/s', 'x', 'y', $1)
"""
_REJECTED = """
INSERT INTO pipeline.outbox_rejected
       (id, created_at, topic, key, event_id, source, type, content_type, traceparent, died_at,
        reason)
VALUES (1, now(), 't', 'ada', 'b', '/s', 'x', 'y', $1, now(), 'too large')
"""


class Noticed(Event, type="timeline.noticed", topic="notices"):
    """Something that a message has caused, of another key."""

    what: int


@pytest.fixture
def entries(tells: Tells) -> Tells:
    """Call `service timeline` with `--json`, and return what it says without its last line."""

    async def call(*arguments: str) -> list[Any]:
        *found, last = await tells("timeline", *arguments)
        assert last.keys() == {"unknown", "not_searched"}
        return found

    return call


def minutes_ago(minutes: float) -> int:
    """Return a timestamp of a record."""
    return int((time() - 60 * minutes) * 1_000)


async def test_it_has_what_arrived_was_applied_staged_waits_and_is_dead(
    bank: Bank, applier: Applier, take: Take, producer: AIOKafkaProducer, entries: Tells
) -> None:
    bank.errors = {2: Reject("no"), 4: ValueError("later")}
    await take(applier, Deposit(1, headers=TRACED))
    await take(applier, Deposit(2), Deposit(3, "bob"), Deposit(4))
    for one in (Deposit(5, "bob"), Deposit(6)):
        await one.send(producer, bank.deposits)
    found = await entries("ada", "--seconds", str(PATIENCE))
    assert sorted((one["what"], one["place"] and one["place"][2]) for one in found) == [
        ("applied", 0),
        ("arrived", 0),
        ("arrived", 1),
        ("arrived", 3),
        ("dead", 1),
        ("not read", 5),
        ("staged", None),
        ("waits", 3),
    ]
    times = [datetime.fromisoformat(one["at"]) for one in found]
    assert times == sorted(times)
    by = {(one["what"], one["place"] and one["place"][2]): one for one in found}
    assert (by["arrived", 0]["trace"], by["arrived", 1]["trace"]) == (TRACE, None)
    assert by["arrived", 0]["event"] == "deposited 1"
    for what in (("applied", 0), ("staged", None), ("dead", 1), ("waits", 3)):
        assert by[what]["release"] == "1.4.2"
    assert "later" in by["waits", 3]["more"]
    assert "rejected" in by["dead", 1]["more"]
    assert by["staged", None]["more"] == "version 1"
    assert by["not read", 5]["more"] == "1 offsets are before it"


async def test_what_is_stored_has_its_trace_though_no_record_is_in_kafka(
    bank: Bank, applier: Applier, db: asyncpg.Connection, entries: Tells
) -> None:
    bank.errors = {2: Reject("no"), 3: ValueError("later")}
    await applier.apply(*(Deposit(number, headers=TRACED) for number in (1, 2, 3)))
    for statement in (_LATER, _REJECTED):
        await db.execute(statement, TRACED[0][1].decode())
    found = await entries("ada")
    whats = ["applied", "dead", "dead", "scheduled", "staged", "waits"]
    assert sorted(one["what"] for one in found) == whats
    assert {one["trace"] for one in found} == {TRACE}
    await db.execute("UPDATE pipeline.scheduled SET traceparent = 'nonsense'")
    (later,) = (one for one in await entries("ada") if one["what"] == "scheduled")
    assert later["trace"] is None


async def test_an_event_leads_to_the_causing_message_of_another_key(
    bank: Bank, new_applier: NewApplier, commands: Callable[..., Command]
) -> None:
    handlers = Handlers()

    @handlers.on(Deposited, topic=bank.deposits, consumer="notice", loads=Account.by("account"))
    async def notice(event: Deposited, tx: Transaction) -> None:
        tx.publish(Noticed(what=0), key="nobody")
        tx.publish(Noticed(what=event.amount), key=f"of {event.account}")

    applier = await new_applier(handlers, topic=bank.deposits)
    await applier.apply(Deposit(1, "ada"), Deposit(2, "bob", headers=TRACED), Deposit(3, "cy"))
    service = Service("applier", handlers=handlers, metadata=Base.metadata)
    command = commands(command_line(service, app))
    done = await command("timeline", "of bob")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [re.split("  +", line)[1] for line in lines] == ["what", "applied", "staged"]
    assert "deposited 2" in lines[1]
    assert "notices" in lines[2]
    _, *lines = (await command("timeline", "bob")).stdout.splitlines()
    assert [re.split("  +", line)[1] for line in lines] == ["applied", "staged", "staged"]
    assert all(f"trace {TRACE}" in line for line in lines)


@pytest.mark.parametrize("seconds", [0.1, 0.5, PATIENCE])
async def test_an_unread_record_is_found_or_the_unsearched_part_is_reported(
    bank: Bank, command: Command, producer: AIOKafkaProducer, seconds: float
) -> None:
    sent = [
        await producer.send(bank.deposits, b"{}", key=b"bob", partition=0) for _ in range(20_000)
    ]
    for one in sent:
        await one
    await Deposit(1).send(producer, bank.deposits)
    done = await command("timeline", "ada", "--seconds", str(seconds))
    is_found = "not read" in done.stdout
    is_left = "--seconds gives more time" in done.stderr or "not known" in done.stderr
    assert is_found is not is_left
    assert is_found or seconds < PATIENCE


async def test_records_of_an_aborted_transaction_are_not_there(
    bank: Bank, kafka: str, entries: Tells
) -> None:
    for commits in (False, True):
        id = uuid4().hex
        async with AIOKafkaProducer(bootstrap_servers=kafka, transactional_id=id) as one:
            await one.begin_transaction()
            for amount in range(3):
                await Deposit(amount + 10 * commits).send(one, bank.deposits)
            await (one.commit_transaction() if commits else one.abort_transaction())
    found = await entries("ada", "--seconds", str(PATIENCE))
    assert [one["event"] for one in found] == [f"deposited {10 + n}" for n in range(3)]


async def test_the_longest_wait_is_marked_and_no_other(
    bank: Bank, applier: Applier, take: Take, entries: Tells, command: Command
) -> None:
    bank.errors = {2: ValueError("later")}
    await take(applier, Deposit(1, timestamp=minutes_ago(3)), Deposit(3, timestamp=minutes_ago(1)))
    await take(applier, Deposit(2, timestamp=minutes_ago(14)))
    found = await entries("ada", "--since", "2h")
    (longest,) = (one for one in found if one["is_longest"])
    assert (longest["what"], longest["event"]) == ("waits", "deposited 2")
    assert 13.9 * 60 < longest["waited"] < 14 * 60 + PATIENCE
    assert (await command("timeline", "ada")).stdout.count("<- ") == 1


async def test_what_people_have_asked_is_in_it_with_who_and_why(
    bank: Bank, applier: Applier, take: Take, db: asyncpg.Connection, entries: Tells
) -> None:
    await take(applier, Deposit(1))
    subjects = [
        Subject("topic", bank.deposits),
        Subject("topic", "another"),
        Subject("key", "deposit", bank.deposits, b"ada"),
        Subject("key", "deposit", bank.deposits, b"ada lovelace"),
    ]
    for one in subjects:
        await stopping.ask(db, [one], lasts=None, who="ann", why="a test")
    found = [one for one in await entries("ada") if one["what"] == "pause"]
    assert [one["where"] for one in found] == [str(subjects[0]), str(subjects[2])]
    assert {one["more"] for one in found} == {"ann: a test"}
    id = await db.fetchval("SELECT left(encode(key, 'hex'), 16) FROM pipeline.inbox")
    for subject in (f"dead letter 0123456789abcdef, {id}", "dead letter 0123456789abcdef"):
        note = "INSERT INTO pipeline.audit (who, action, subject) VALUES ('bob', 'redrive', $1)"
        await db.execute(note, subject)
    (redriven,) = (one for one in await entries("ada") if one["what"] == "redrive")
    assert (redriven["where"], redriven["more"]) == (f"dead letter {id} and 1 more", "bob")
    await db.execute("UPDATE pipeline.throttle SET since = now() - interval '2 days'")
    await db.execute("DELETE FROM pipeline.audit")
    still = [one for one in await entries("ada") if one["what"] == "paused"]
    assert {one["where"] for one in still} == {str(subjects[0]), str(subjects[2])}


async def test_an_unreadable_part_is_named_and_the_others_are_shown(
    applier: Applier,
    take: Take,
    db: asyncpg.Connection,
    command: Command,
    tells: Tells,
    monkeypatch: pytest.MonkeyPatch,
    unused_tcp_port: int,
) -> None:
    await take(applier, Deposit(1))
    monkeypatch.setenv("PIPELINE_KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{unused_tcp_port}")
    async with db.transaction():
        await db.execute("LOCK TABLE pipeline.scheduled IN ACCESS EXCLUSIVE MODE")
        monkeypatch.setattr(timeline, "_PART_SECONDS", 5.0)
        done = await command("timeline", "ada", "--seconds", "5")
    assert done.exit_code == 0, done.output
    assert "applied" in done.stdout
    unknown = re.findall(r"^not known: (\w+): ", done.stderr, re.MULTILINE)
    assert unknown == ["scheduled", "kafka"]
    monkeypatch.setattr(timeline, "_PART_SECONDS", PATIENCE)
    *found, last = await tells("timeline", "ada", "--seconds", "5")
    assert {one["what"] for one in found} == {"applied", "staged"}
    assert (last["unknown"].keys(), last["not_searched"]) == ({"kafka"}, [])


async def test_nothing_that_is_found_is_an_error(command: Command, bank: Bank) -> None:
    done = await command("timeline", "nobody", "--seconds", str(PATIENCE))
    assert done.exit_code == 1
    assert "nothing of key nobody is known" in complaint(done)
    assert "not searched" not in done.stderr, "the topic is empty"


async def test_only_parts_that_were_not_read_are_reported_as_not_searched(
    bank: Bank, applier: Applier, take: Take, command: Command, tells: Tells
) -> None:
    line = "--seconds", str(PATIENCE)
    await take(applier, Deposit(1))
    done = await command("timeline", "ada", *line)
    assert "arrived" in done.stdout
    assert "not searched" not in done.stderr, done.stderr
    *_, last = await tells("timeline", "ada", *line)
    assert last == {"unknown": {}, "not_searched": []}
    for amount in range(2, 5):
        await take(applier, Deposit(amount, "bob"))
    await take(applier, Deposit(5))
    # Between its records all are read, and those behind the last one are not yet.
    done = await command("timeline", "bob", *line)
    where = f"not searched: before {bank.deposits}/0 at offset"
    found = re.findall(r"^not searched: .*", done.stderr, re.MULTILINE)
    assert found == [f"{where} 5, but for the records of what is listed"]
    done = await command("timeline", "nobody", *line)
    assert re.findall(r"^not searched: .*", done.stderr, re.MULTILINE) == [f"{where} 5"]
    (last,) = await tells("timeline", "nobody", *line, code=1)
    assert last == {"unknown": {}, "not_searched": [f"before {bank.deposits}/0 at offset 5"]}


async def test_a_batch_that_can_not_be_read_was_not_searched(
    bank: Bank,
    producer: AIOKafkaProducer,
    kafka: str,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await send_bomb(kafka, bank.deposits, 2)
    await Deposit(1).send(producer, bank.deposits)
    monkeypatch.setenv("PIPELINE_UNPACKED_MEBIBYTES", "1")
    done = await command("timeline", "ada", "--seconds", str(PATIENCE))
    assert "deposited 1" in done.stdout, done.output
    where = f"not searched: {bank.deposits}/0: the batch of the offsets 0 to 0 ("
    assert where in done.stderr


async def test_a_record_that_time_did_not_suffice_for_is_named(
    bank: Bank, applier: Applier, take: Take, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    await take(applier, Deposit(1), Deposit(2))
    add = timeline._Arrivals._add

    async def cut(arrivals: Any, record: Any, before: int | None = None) -> None:
        if record.offset == 1:
            raise TimeoutError
        await add(arrivals, record, before)

    monkeypatch.setattr(timeline._Arrivals, "_add", cut)
    done = await command("timeline", "ada", "--seconds", str(PATIENCE))
    found = re.findall(r"^not searched: .*", done.stderr, re.MULTILINE)
    assert found == [
        f"not searched: {bank.deposits}/0 from offset 1 to before 2: --seconds gives more time"
    ]


async def test_a_hostile_key_is_one_line(
    bank: Bank, applier: Applier, take: Take, command: Command, entries: Tells
) -> None:
    bank.errors = {1: ValueError(HOSTILE)}
    await take(applier, Deposit(1, HOSTILE, id=HOSTILE))
    done = await command("timeline", HOSTILE, "--seconds", str(PATIENCE))
    lines = done.stdout.splitlines()
    assert (done.exit_code, len(lines)) == (0, 3)
    assert "\u202e" not in done.stdout
    found: list[Any] = await entries(HOSTILE)
    assert {one["event"] for one in found} == {f"deposited {HOSTILE}"}
