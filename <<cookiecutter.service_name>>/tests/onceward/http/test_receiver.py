"""A request is applied as a message is: once for each key, as a whole, and with a stored answer."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa
from opentelemetry import context, propagate
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from onceward import Event, Gaps, Park, Reject, Retry, Transaction
from onceward.events.payload import payload_hash
from onceward.http import Answer, KeyReused, Receiver, Unavailable, UnderWay, open_receiver
from onceward.operators import adopting, stopping
from onceward.operators.stopping import Subject
from onceward.retention import generations
from onceward.servers.revisions import WrongDatabase
from onceward.settings import Settings
from onceward.testing.crashes import MortalEngine, crashes_of

from .cashier import CASHIER, NOTHING, ONE, cashier, new_key, stored
from tests.contract.bank import Account, Deposit, Deposited, histories
from tests.onceward.blocking import interrupting
from tests.onceward.integration.applier import NewApplier
from tests.onceward.integration.bank import Bank
from tests.onceward.integration.calling import take_calls
from tests.onceward.integration.conftest import new_applier  # noqa: F401 (a fixture)
from tests.onceward.integration.processes import forwarding
from tests.onceward.integration.test_session import ENDED, ENDINGS, REFUSED, SAVEPOINTS, Changed
from tests.servers.waiting import PATIENCE, eventually

KEY = "7c4a8d09-ca95-4c28-a1d5-3b7f0c1a4e10"


async def pay_in(receiver: Receiver, amount: int = 1, key: str = KEY, **options: Any) -> Answer:
    """Pay in for Ada."""
    event = Deposited(account="ada", amount=amount)
    chosen = {"seconds": PATIENCE, **options}
    return await receiver.receive(event, key=key, consumer=CASHIER, **chosen)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_repeat_gets_the_stored_answer_and_has_no_effect(
    receiver: Receiver, bank: Bank, db: asyncpg.Connection
) -> None:
    first = await pay_in(receiver, 5)
    await pay_in(receiver, 7, new_key())
    again = await pay_in(receiver, 5)

    assert first == Answer({"account": "ada", "balance": 5}, is_repeat=False)
    assert again == Answer({"account": "ada", "balance": 5}, is_repeat=True)
    assert bank.calls == [5, 7]
    assert await histories(db) == {"ada": [5, 7]}
    assert await stored(db) == ONE | {"pipeline.inbox": 2, "pipeline.outbox": 2}


async def test_an_answer_may_be_nothing(receiver: Receiver, db: asyncpg.Connection) -> None:
    event = Deposited(account="ada", amount=5)
    receive = partial(receiver.receive, event, key=KEY, consumer="deposit")
    assert await receive() == Answer(None, is_repeat=False)
    assert await receive() == Answer(None, is_repeat=True)
    assert await histories(db) == {"ada": [5]}


async def test_a_key_reused_for_another_event_is_refused_keeping_its_answer(
    receiver: Receiver, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await pay_in(receiver, 5)
    with pytest.raises(KeyReused, match="give each request a key of its own"):
        await pay_in(receiver, 6)
    assert f"deposited '{KEY}'" in caplog.text
    assert (await pay_in(receiver, 5)).answer["balance"] == 5
    assert await stored(db) == ONE


async def test_a_default_added_by_a_release_keeps_the_request_hash(
    receiver: Receiver, db: asyncpg.Connection
) -> None:
    await pay_in(receiver, 5)  # `failures` has its default
    before = payload_hash("deposited", "application/json", b'{"account": "ada", "amount": 5}')
    assert await db.fetchval("SELECT hash FROM pipeline.inbox") == before


async def test_nothing_is_applied_in_the_database_of_another_service(
    receiver: Receiver, db: asyncpg.Connection
) -> None:
    await db.execute("COMMENT ON SCHEMA pipeline IS 'another'")
    with pytest.raises(WrongDatabase, match="is that of service another"):
        await pay_in(receiver, 5)
    assert await stored(db) == NOTHING


@pytest.mark.parametrize("another", ["system_identifier = 1", "database_oid = 1"])
async def test_nothing_is_applied_in_a_database_that_is_not_adopted(
    receiver: Receiver, db: asyncpg.Connection, another: str
) -> None:
    await db.execute(f"UPDATE pipeline.outbox_cluster SET {another}")
    with pytest.raises(Unavailable, match="the database is not adopted"):
        await pay_in(receiver, 5, seconds=5.0)
    assert await stored(db) == NOTHING
    await adopting.adopt(db, keep_progress=True)
    await pay_in(receiver, 5)
    assert await stored(db) == ONE


async def test_keys_of_two_scopes_and_of_two_consumers_are_different_keys(
    receiver: Receiver, db: asyncpg.Connection
) -> None:
    event = Deposited(account="ada", amount=5)
    answers = [
        await pay_in(receiver, 5),
        await pay_in(receiver, 6, scope="bob"),
        await pay_in(receiver, 7, scope="carol"),
        await receiver.receive(event, key=KEY, consumer="deposit"),
    ]
    assert not any(one.is_repeat for one in answers)
    assert await histories(db) == {"ada": [5, 6, 7, 5]}
    sources = await db.fetch("SELECT source FROM pipeline.inbox WHERE id = $1", KEY)
    assert {row["source"] for row in sources} == {
        "/bank/requests",
        "/bank/requests/bob",
        "/bank/requests/carol",
    }


async def test_concurrent_requests_with_one_key_apply_once_without_blocking_each_other(
    receiver: Receiver, bank: Bank, db: asyncpg.Connection
) -> None:
    others_are_done = asyncio.Event()
    bank.waits[5] = partial(_wait, others_are_done)

    requests = [asyncio.create_task(pay_in(receiver, 5)) for _ in range(20)]
    await eventually(lambda: sum(one.done() for one in requests) == 19)
    others_are_done.set()
    results = await asyncio.gather(*requests, return_exceptions=True)

    (answer,) = (one for one in results if isinstance(one, Answer))
    assert sum(isinstance(one, UnderWay) for one in results) == 19
    assert answer == Answer({"account": "ada", "balance": 5}, is_repeat=False)
    assert bank.calls == [5]
    assert await stored(db) == ONE
    repeated = await asyncio.gather(*(_until_answered(receiver) for _ in range(20)))
    assert set(map(repr, repeated)) == {repr(Answer(answer.answer, is_repeat=True))}


async def _until_answered(receiver: Receiver, amount: int = 5, key: str = KEY) -> Answer:
    while True:
        try:
            return await pay_in(receiver, amount, key)
        except UnderWay:
            await asyncio.sleep(0.01)


async def test_clients_that_race_with_their_own_repeats_pay_in_once_each(
    receiver: Receiver, db: asyncpg.Connection
) -> None:
    amounts = range(1, 21)
    answers = await asyncio.gather(
        *(_until_answered(receiver, amount, f"key-{amount}") for amount in (*amounts,) * 4)
    )
    assert sorted((await histories(db))["ada"]) == list(amounts)
    assert sum(not one.is_repeat for one in answers) == len(amounts)
    assert len({repr(one.answer) for one in answers}) == len(amounts)


async def test_a_key_is_under_way_in_another_process_too(
    receiver: Receiver, bank: Bank, settings: Callable[..., Settings]
) -> None:
    other_is_done = asyncio.Event()
    bank.waits[5] = partial(_wait, other_is_done)
    async with open_receiver(bank.service, settings()) as other:
        first = asyncio.create_task(pay_in(receiver, 5))
        await eventually(lambda: bank.calls == [5])
        with pytest.raises(UnderWay, match="repeat it in a moment"):
            await pay_in(other, 5)
        other_is_done.set()
        assert not (await first).is_repeat
        assert (await pay_in(other, 5)).is_repeat


async def test_a_rejected_request_stores_nothing_and_may_come_again(
    receiver: Receiver, db: asyncpg.Connection
) -> None:
    with pytest.raises(Reject, match="0 is no deposit"):
        await pay_in(receiver, 0)
    assert await stored(db) == NOTHING
    await pay_in(receiver, 5)
    assert await stored(db) == ONE


@pytest.mark.parametrize(
    ("error", "after"), [(Retry("later"), 1), (Retry("later", after=7), 7), (Park("no"), 1)]
)
async def test_what_its_handler_puts_off_is_to_be_repeated(
    receiver: Receiver, bank: Bank, db: asyncpg.Connection, error: Retry | Park, after: float
) -> None:
    bank.errors[5] = error
    with pytest.raises(Unavailable, match=f"{error}; repeat it with its key") as raised:
        await pay_in(receiver, 5)
    assert raised.value.after == after
    assert await stored(db) == NOTHING


async def test_an_error_of_its_handler_is_raised_as_it_is(
    receiver: Receiver, bank: Bank, db: asyncpg.Connection
) -> None:
    bank.errors[5] = KeyError("a mistake")
    with pytest.raises(KeyError) as raised:
        await pay_in(receiver, 5)
    assert raised.value is bank.errors[5]
    assert await stored(db) == NOTHING


async def test_a_handler_that_takes_too_long_is_cut_off(
    settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    bank = cashier(timeout=0.1)
    bank.waits[5] = partial(_wait, asyncio.Event())
    async with open_receiver(bank.service, settings()) as receiver:
        with pytest.raises(Unavailable, match=r"pay in takes longer than 0\.1 s"):
            await pay_in(receiver, 5)
        assert await stored(db) == NOTHING
    # Another process, whose handler has as much time as it needs.
    async with open_receiver(cashier().service, settings()) as receiver:
        assert not (await pay_in(receiver, 5)).is_repeat


async def test_a_handler_that_blocks_the_event_loop_is_cut_off(
    receiver: Receiver, bank: Bank, db: asyncpg.Connection
) -> None:
    async def wait() -> None:
        block()

    bank.waits[5] = wait
    with (
        interrupting() as block,
        pytest.raises(Unavailable, match=r"pay in blocks the event loop: await, or use"),
    ):
        await pay_in(receiver, 5)
    assert await stored(db) == NOTHING
    del bank.waits[5]
    assert not (await pay_in(receiver, 5)).is_repeat


async def test_a_request_ends_after_its_time_whatever_it_waits_for(
    receiver: Receiver, bank: Bank, db: asyncpg.Connection
) -> None:
    bank.waits[5] = partial(_wait, asyncio.Event())
    with pytest.raises(Unavailable, match=r"it has taken longer than 0\.2 s"):
        await pay_in(receiver, 5, seconds=0.2)
    del bank.waits[5]
    await _until_answered(receiver)
    assert await stored(db) == ONE


class Named(Event, type="named"):
    """An account is opened by SQL of the handler's own."""

    account: str


async def test_a_handler_with_its_own_statements_answers_and_fails_atomically(
    bank: Bank, settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    @bank.handlers.on(Named, topic=None, consumer="open")
    async def open_account(event: Named, tx: Transaction) -> str:
        values = {"id": event.account, "balance": 0, "history": "", "version": 0}
        await tx.session.execute(sa.insert(Account).values(values))
        return f"{event.account} is open"

    async with open_receiver(bank.service, settings()) as receiver:
        open_it = partial(receiver.receive, Named(account="ada"), consumer="open")
        assert (await open_it(key="1")).answer == "ada is open"
        with pytest.raises(Reject, match="does not accept a value"):
            await open_it(key="2")
        assert (await open_it(key="1")).is_repeat
    assert await stored(db) == ONE | {"pipeline.outbox": 0}


_EARLY = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))


@pytest.mark.parametrize(
    "statement",
    [
        sa.select(sa.literal("a\0b")),
        sa.select(sa.literal(_EARLY)),
        sa.select(sa.cast(10**12, sa.Integer)),
        sa.text("SELECT 'x'::integer"),
        sa.text("SELECT '\"\\u0000\"'::jsonb ->> 0"),
        sa.text("DO $$ BEGIN RAISE EXCEPTION 'too young'; END $$"),
        sa.text("DO $$ BEGIN RAISE check_violation; END $$"),
        sa.text("SELECT repeat('a', 2000000000)"),
    ],
    ids=["NUL", "time", "number", "text", "JSON", "trigger", "constraint", "length"],
)
async def test_what_the_database_does_not_accept_is_rejected(
    bank: Bank, settings: Callable[..., Settings], db: asyncpg.Connection, statement: Any
) -> None:
    @bank.handlers.on(Named, topic=None, consumer="open")
    async def open_account(event: Named, tx: Transaction) -> None:
        await tx.session.execute(statement)

    async with open_receiver(bank.service, settings()) as receiver:
        with pytest.raises(Reject, match="does not accept a value"):
            await receiver.receive(Named(account="ada"), key="1", consumer="open", seconds=PATIENCE)
    assert await stored(db) == NOTHING


async def test_a_mistake_in_a_handlers_statement_is_raised_as_it_is(
    bank: Bank, settings: Callable[..., Settings]
) -> None:
    @bank.handlers.on(Named, topic=None, consumer="open")
    async def open_account(event: Named, tx: Transaction) -> None:
        await tx.session.execute(sa.text("SELECT nothing FROM nowhere"))

    async with open_receiver(bank.service, settings()) as receiver:
        with pytest.raises(DBAPIError, match="nowhere"):
            await receiver.receive(Named(account="ada"), key="1", consumer="open", seconds=PATIENCE)


@pytest.mark.parametrize(
    "swallows", [False, pytest.param(True, marks=pytest.mark.full)], ids=["", "swallowed"]
)
@pytest.mark.parametrize("end", [*ENDINGS, *SAVEPOINTS])
async def test_a_handler_that_ends_its_transaction_stores_nothing_and_says_so(
    bank: Bank,
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    end: Callable[..., Awaitable[None]],
    swallows: bool,
) -> None:
    @bank.handlers.on(Named, topic=None, consumer="open")
    async def open_account(event: Named, tx: Transaction) -> str:
        values = {"id": event.account, "balance": 0, "history": "", "version": 0}
        await tx.session.execute(sa.insert(Account).values(values))
        tx.publish(Changed(cents=0))
        if event.account == "ada":
            with suppress(Exception) if swallows else nullcontext():
                await end(tx, "ada")
        return "open"

    async with open_receiver(bank.service, settings(concurrency=1)) as receiver:
        open_it = partial(receiver.receive, consumer="open")
        for key in ("1", "2"):
            with pytest.raises(ENDED, match=REFUSED):
                await open_it(Named(account="ada"), key=key)
            assert await stored(db) == NOTHING
        assert await db.fetchval("SELECT count(*) FROM note") == 0
        assert (await open_it(Named(account="bob"), key="1")).answer == "open"
    assert await db.fetchval("SELECT count(*) FROM pipeline.guarded_transaction") == 0


async def test_what_fails_only_when_it_is_written_is_raised_and_stores_nothing(
    bank: Bank, settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    @bank.handlers.on(Named, topic=None, consumer="open")
    async def open_account(event: Named, tx: Transaction) -> None:
        tx.add(Account(event.account))

    async with open_receiver(bank.service, settings()) as receiver:
        await receiver.receive(Named(account="ada"), key="1", consumer="open")
        with pytest.raises(Reject, match="does not accept a value"):
            await receiver.receive(Named(account="ada"), key="2", consumer="open")
    assert await stored(db) == ONE | {"pipeline.outbox": 0}


async def test_without_a_database_a_request_is_unavailable_and_goes_on_with_it(
    bank: Bank, settings: Callable[..., Settings], db: asyncpg.Connection, unused_tcp_port: int
) -> None:
    url = make_url(settings().database_url.get_secret_value())
    away = url.set(host="127.0.0.1", port=unused_tcp_port).render_as_string(hide_password=False)
    async with open_receiver(bank.service, settings(database_url=away)) as receiver:
        with pytest.raises(Unavailable, match=f"PostgreSQL at 127.0.0.1:{unused_tcp_port}"):
            await pay_in(receiver, 5, seconds=1)
        assert bank.calls == []
        assert await stored(db) == NOTHING
        async with forwarding(unused_tcp_port, f"{url.host}:{url.port}"):
            assert not (await pay_in(receiver, 5)).is_repeat
            assert await stored(db) == ONE
            await receiver.engine.dispose()


async def test_a_request_during_an_outage_is_applied_when_that_ends_in_time(
    bank: Bank, settings: Callable[..., Settings], unused_tcp_port: int
) -> None:
    url = make_url(settings().database_url.get_secret_value())
    away = url.set(host="127.0.0.1", port=unused_tcp_port).render_as_string(hide_password=False)
    async with open_receiver(bank.service, settings(database_url=away)) as receiver:
        begun = asyncio.create_task(pay_in(receiver, 5, seconds=60))
        async with forwarding(unused_tcp_port, f"{url.host}:{url.port}"):
            assert (await begun).answer == {"account": "ada", "balance": 5}
            await receiver.engine.dispose()


async def test_a_request_over_which_connections_die_is_not_repeated_until_its_deadline(
    bank: Bank, settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    calls = 0

    @bank.handlers.on(Named, topic=None, consumer="open")
    async def open_account(event: Named, tx: Transaction) -> None:
        nonlocal calls
        calls += 1
        await tx.session.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    async with open_receiver(bank.service, settings()) as receiver:
        with pytest.raises(Unavailable, match=r"repeat it with its key"):
            await receiver.receive(Named(account="ada"), key="1", consumer="open", seconds=PATIENCE)
    assert calls == 1 + 3, "the first shows that it needs a session of its own"
    assert await stored(db) == NOTHING


async def test_a_request_is_answered_once_wherever_its_process_or_connection_dies(
    bank: Bank, receiver: Receiver, settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    """Trap 19, at every statement: the client repeats, and another process answers."""
    mortal, wanted = MortalEngine(settings(), receiver.engine, name="bank"), 1
    dying = Receiver(bank.service, mortal.engine, settings())
    answers: list[Answer] = []

    async def ask() -> None:
        answers.append(await _until_answered(dying, wanted, f"key-{wanted}"))

    mortal.begin(None)
    await mortal.run(ask)  # it also reads the catalog
    wanted += 1
    mortal.begin(None)
    await mortal.run(ask)
    crashes = [*crashes_of(mortal)]
    assert len(crashes) > 8
    lost = 0
    for crash, text in crashes:
        wanted += 1
        mortal.begin(crash)
        if not await mortal.run(ask):
            lost += 1
            mortal.begin(None)
            await mortal.run(ask)
        assert len(answers) == wanted, text
        assert answers[-1].answer["balance"] == wanted * (wanted + 1) // 2, text
    await mortal.engine.dispose()
    assert lost == len({crash.number for crash, _ in crashes})
    assert await histories(db) == {"ada": [*range(1, wanted + 1)]}
    rows = "SELECT count(*), count(DISTINCT event_id) FROM pipeline.outbox"
    assert set(await db.fetchrow(rows)) == {wanted}
    assert any(one.is_repeat for one in answers), "an answer was lost behind the COMMIT"


async def close_generation(db: asyncpg.Connection) -> int:
    """Close the current generation of the inbox."""
    current = await db.fetchval("SELECT current FROM pipeline.inbox_generation")
    assert await generations.close_generation(db, current=current)
    return int(current) + 1


async def test_an_answer_is_found_in_a_closed_generation_until_that_is_forgotten(
    receiver: Receiver, db: asyncpg.Connection
) -> None:
    first = await pay_in(receiver, 5)
    current = await close_generation(db)
    assert await pay_in(receiver, 5) == Answer(first.answer, is_repeat=True)
    with pytest.raises(KeyReused):
        await pay_in(receiver, 6)
    since = datetime.now(UTC) - timedelta(minutes=1)
    await db.execute("UPDATE pipeline.inbox_generation SET oldest = $1, since = $2", current, since)
    assert (await pay_in(receiver, 5)).answer["balance"] == 10, "as the guide says"


async def test_a_clock_that_is_behind_loses_no_request(
    receiver: Receiver, db: asyncpg.Connection
) -> None:
    await close_generation(db)
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    await db.execute("UPDATE pipeline.inbox_generation SET oldest = 2, since = $1", tomorrow)
    assert (await pay_in(receiver, 5)).answer["balance"] == 5


async def test_messages_and_requests_change_one_account_and_its_events_have_one_order(
    bank: Bank,
    receiver: Receiver,
    new_applier: NewApplier,  # noqa: F811
    db: asyncpg.Connection,
) -> None:
    applier = await new_applier(bank.handlers, topic=bank.deposits)

    async def messages() -> None:
        for first in range(100, 200, 10):
            await applier.apply(*(Deposit(first + number) for number in range(10)))

    async def requests() -> None:
        for amount in range(1, 41):
            await pay_in(receiver, amount, f"key-{amount}")

    await asyncio.gather(messages(), requests(), requests_of(receiver, range(41, 81)))

    history = (await histories(db))["ada"]
    assert sorted(history) == [*range(1, 81), *range(100, 200)]
    rows = await db.fetch(
        "SELECT sequence, convert_from(payload, 'UTF8')::json AS event FROM pipeline.outbox"
        " WHERE key = 'ada' ORDER BY id"
    )
    assert [row["sequence"] for row in rows] == [*range(1, 181)]
    assert [_amount(row["event"]) for row in rows] == history
    assert await db.fetchval("SELECT version FROM account") == 180


async def requests_of(receiver: Receiver, amounts: range) -> None:
    """Pay in these amounts, one after the other."""
    for amount in amounts:
        await pay_in(receiver, amount, f"key-{amount}")


def _amount(event: str) -> int:
    return int(json.loads(event)["amount"])


async def test_a_message_waiting_in_the_backlog_does_not_delay_a_request(
    bank: Bank,
    receiver: Receiver,
    new_applier: NewApplier,  # noqa: F811
    db: asyncpg.Connection,
) -> None:
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    bank.refused.add(100)
    await applier.apply(Deposit(100))
    assert (await pay_in(receiver, 5)).answer["balance"] == 5
    assert [row["reason"] for row in await applier.backlog()] == ["failed"]


async def test_what_a_handler_calls_and_schedules_belongs_to_the_request(
    bank: Bank, settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    class Reminded(Event, type="reminded", topic="reminders"):
        pass

    take_calls(bank.handlers, Named, "tell")

    @bank.handlers.on(Named, topic=None, consumer="open")
    async def open_account(event: Named, tx: Transaction) -> None:
        tx.call(event, key=event.account)
        tx.publish(Reminded(), after=timedelta(days=1), name="remind")

    async with open_receiver(bank.service, settings()) as receiver:
        for _ in range(2):
            await receiver.receive(Named(account="ada"), key="1", consumer="open")
    assert await db.fetchval("SELECT array_agg(consumer) FROM pipeline.backlog") == ["tell"]
    assert await db.fetchval("SELECT array_agg(name) FROM pipeline.scheduled") == ["remind"]


async def test_the_trace_of_a_request_goes_on_in_its_events(
    receiver: Receiver, db: asyncpg.Connection
) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    token = context.attach(propagate.extract({"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}))
    try:
        await pay_in(receiver, 5)
    finally:
        context.detach(token)
    for table in ("inbox", "outbox"):
        assert trace_id in await db.fetchval(f"SELECT traceparent FROM pipeline.{table}")


async def test_a_marker_shows_the_request(receiver: Receiver, db: asyncpg.Connection) -> None:
    await pay_in(receiver, 5)
    row = await db.fetchrow(
        "SELECT consumer, source, id, type, topic, result::text FROM pipeline.inbox"
    )
    assert tuple(row or ())[:5] == (CASHIER, "/bank/requests", KEY, "deposited", "(requests)")
    assert row is not None
    assert row["result"] == '{"account":"ada","balance":5}'


async def test_requests_are_counted_beside_messages(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[str, str, str]] = []

    def processed(topic: str, consumer: str, outcome: str, count: int, group: str) -> None:
        counted.append((topic, consumer, outcome))

    monkeypatch.setattr("onceward.observe.metrics.processed", processed)
    await pay_in(receiver, 5)
    await pay_in(receiver, 5)
    with pytest.raises(KeyReused):
        await pay_in(receiver, 6)
    outcomes = ("applied", "duplicate", "identity mismatch")
    assert counted == [("(requests)", CASHIER, outcome) for outcome in outcomes]


async def test_a_handler_that_exits_fails_its_request_alone(
    bank: Bank, settings: Callable[..., Settings]
) -> None:
    @bank.handlers.on(Named, topic=None, consumer="open")
    async def open_account(event: Named, tx: Transaction) -> None:
        raise SystemExit(event.account)

    async with open_receiver(bank.service, settings()) as receiver:
        with pytest.raises(RuntimeError, match="SystemExit: ada"):
            await receiver.receive(Named(account="ada"), key="1", consumer="open")


async def test_an_event_that_is_no_json_is_rejected(
    bank: Bank, settings: Callable[..., Settings]
) -> None:
    class Weighed(Event, type="weighed"):
        grams: float

    @bank.handlers.on(Weighed, topic=None, consumer="weigh")
    async def weigh(event: Weighed, tx: Transaction) -> None:
        raise AssertionError("never")

    async with open_receiver(bank.service, settings()) as receiver:
        with pytest.raises(Reject, match="Weighed"):
            await receiver.receive(Weighed(grams=float("nan")), key="1", consumer="weigh")


@pytest.mark.parametrize(("key", "scope"), [("", ""), ("a\0", ""), ("a", "\0")])
async def test_a_key_that_can_not_be_stored_is_refused(
    receiver: Receiver, key: str, scope: str
) -> None:
    with pytest.raises(ValueError, match="text without NUL"):
        await pay_in(receiver, 5, key, scope=scope)


async def test_what_can_not_answer_at_once_takes_no_requests(
    receiver: Receiver, bank: Bank
) -> None:
    handlers = bank.handlers

    @handlers.on(Named, topic="names", consumer="later", mode="deferred")
    async def later(event: Named, tx: Transaction) -> None:
        raise AssertionError("never")

    take_calls(handlers, Named, "tell")
    for consumer in ("later", "tell", "unknown"):
        with pytest.raises(TypeError, match=f"no handler of '{consumer}' answers requests"):
            await receiver.receive(Named(account="ada"), key="1", consumer=consumer)
    for options in ({"mode": "deferred"}, {"gaps": Gaps()}):
        with pytest.raises(TypeError, match="a request is answered at once"):
            handlers.on(Named, topic=None, consumer="open", **options)


async def test_a_handler_of_requests_reads_no_topic(bank: Bank) -> None:
    assert bank.handlers.topics == {"deposits"}
    assert bank.service.topics >= {"deposits"}
    renamed = bank.handlers.with_topics(lambda name: f"my-{name}")
    assert renamed.topics == {"my-deposits"}
    assert {one.topic for one in renamed} == {"my-deposits", "(requests)"}


async def test_a_request_of_a_paused_consumer_is_refused(
    receiver: Receiver, bank: Bank, db: asyncpg.Connection
) -> None:
    cashiers = [Subject("consumer", CASHIER)]
    await stopping.ask(db, cashiers, lasts=None, who="ada", why="a test")
    with pytest.raises(Unavailable, match=f"{CASHIER} is paused; repeat it with its key") as raised:
        await pay_in(receiver, 5)
    assert raised.value.after == 5.0
    assert bank.calls == []
    assert await db.fetchval("SELECT count(*) FROM pipeline.inbox") == 0
    assert await stopping.resume(db, cashiers, who="ada", why=None)

    async def is_applied() -> bool:
        with suppress(Unavailable):
            return (await pay_in(receiver, 5)).answer is not None
        return False

    await eventually(is_applied)
    assert bank.calls == [5]


_FAIL_ONCE = """
CREATE SEQUENCE tries;
CREATE FUNCTION fail_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('tries') = 1 THEN
        RAISE EXCEPTION 'try again' USING ERRCODE = '40001';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER fail_once BEFORE INSERT ON account FOR EACH ROW EXECUTE FUNCTION fail_once()
"""


async def test_a_throttled_consumer_takes_as_many_requests_as_it_may_each_once(
    receiver: Receiver, bank: Bank, db: asyncpg.Connection
) -> None:
    await db.execute(_FAIL_ONCE)
    cashiers = [Subject("consumer", CASHIER)]
    await stopping.ask(db, cashiers, per_second=0.01, lasts=None, who="ada", why="a test")
    assert (await pay_in(receiver, 1)).answer == {"account": "ada", "balance": 1}
    assert bank.calls == [1, 1], "a second attempt is no second request"
    with pytest.raises(Unavailable, match=f"{CASHIER} is throttled") as raised:
        await pay_in(receiver, 2, new_key())
    assert raised.value.after == 5.0
    assert len(bank.calls) == 2
    left = "SELECT extract(epoch FROM next_at - clock_timestamp()) FROM pipeline.throttle"
    assert await db.fetchval(left) > 50, "other processes know of it"


async def test_pausing_a_consumer_refuses_requests_waiting_for_a_slot(
    receiver: Receiver, bank: Bank, db: asyncpg.Connection
) -> None:
    async with receiver._slots.all():
        paying = asyncio.create_task(pay_in(receiver, 5))
        await eventually(lambda: bool(receiver._slots._entrance._waiters))
        cashiers = [Subject("consumer", CASHIER)]
        await stopping.ask(db, cashiers, lasts=None, who="ada", why="a test")
    with pytest.raises(Unavailable, match=f"{CASHIER} is paused"):
        await paying
    assert bank.calls == []
    assert await stored(db) == NOTHING
