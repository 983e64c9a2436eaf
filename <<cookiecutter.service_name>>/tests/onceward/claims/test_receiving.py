"""Events that refer to their data: fetched and verified; and what becomes of those without."""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from onceward import Policy
from onceward.apply.batch import read
from onceward.apply.breaker import BreakerOpen
from onceward.apply.claim_check import DataUnavailable, resolve_batch
from onceward.claims.check import Claims
from onceward.cli.dead_letters import REASONS
from onceward.errors import StoreUnavailable
from onceward.events.message import Reference
from onceward.events.payload import payload_hash

from .conftest import FOLDER_AND_S3, LOST, Counter, Objects, Outage, referring
from tests.contract.bank import Deposit, histories
from tests.onceward.integration.applier import NewApplier
from tests.onceward.integration.bank import Bank
from tests.onceward.integration.test_dead import redrive
from tests.servers.waiting import eventually


def payload(amount: int, account: str = "ada", size: int = 0) -> bytes:
    """Return what a deposit of this amount brings, of so many bytes at least."""
    return json.dumps({"account": account, "amount": amount}).ljust(size).encode()


def stored(objects: Objects, deposit: Deposit, size: int = 0) -> Deposit:
    """Store what the deposit brings, and return it with the reference."""
    content = payload(deposit.amount, deposit.account, size)
    uri = objects.put(f"elsewhere/{deposit.amount}", content)
    checksum = sha256(content).hexdigest()
    return referring(deposit, uri, length=len(content), checksum=checksum)


def place(deposit: Deposit) -> str:
    """Return the name under which `stored` has stored it."""
    return f"elsewhere/{deposit.amount}"


NewCounter = Callable[..., Awaitable[Counter]]


@pytest.fixture
def new_counter(new_applier: NewApplier, opened: Callable[..., Claims]) -> NewCounter:
    """Open counters for deposits whose handler has the options that are given."""

    async def open_one(**options: Any) -> Counter:
        bank = Bank(deposits="deposits", balances="balances", name="applier", options=options)
        applier = await new_applier(bank.handlers, topic=bank.deposits)
        applier.consume.claims = opened()
        return Counter(applier, opened())

    return open_one


@FOLDER_AND_S3
async def test_handlers_get_data_as_if_it_had_come_with_the_event(
    counter: Counter, objects: Objects, db: asyncpg.Connection
) -> None:
    outcomes = await counter.apply(Deposit(1), stored(objects, Deposit(2)), Deposit(3))
    assert [one.is_new for one in outcomes] == [True, True, True]
    assert await histories(db) == {"ada": [1, 2, 3]}
    message = outcomes[1].item.message
    assert (message.data, message.reference) == (payload(2), None)


async def test_the_same_event_with_its_data_and_by_reference_is_one(
    counter: Counter, objects: Objects, db: asyncpg.Connection
) -> None:
    await counter.apply(Deposit(1), stored(objects, Deposit(2)))
    again = await counter.apply(stored(objects, Deposit(1)), Deposit(2))
    assert [one.is_new for one in again] == [False, False]
    assert await counter.applier.park() == {}
    assert await histories(db) == {"ada": [1, 2]}


async def test_another_payload_by_reference_is_an_identity_mismatch(
    counter: Counter, objects: Objects
) -> None:
    await counter.apply(Deposit(1, id="one"))
    await counter.apply(stored(objects, Deposit(2, id="one")))
    assert await counter.applier.park() == {("", 1): "identity mismatch"}


async def test_data_is_fetched_for_a_batch_as_far_as_there_is_memory(
    counter: Counter, objects: Objects, db: asyncpg.Connection
) -> None:
    large = [stored(objects, Deposit(number), size=4_000) for number in range(1, 8)]
    await counter.apply(Deposit(0), *large, Deposit(8))
    assert await histories(db) == {"ada": list(range(9))}
    transactions = await db.fetchval("SELECT count(DISTINCT xid) FROM pipeline.inbox")
    assert transactions == 4, "two at a time"


async def test_data_exceeding_a_readers_share_is_left_until_it_is_allowed(
    counter: Counter, objects: Objects
) -> None:
    sizes = [1_000, 1_000, 1_000, 9_000]
    deposits = [stored(objects, Deposit(n), size=size) for n, size in enumerate(sizes)]
    deposits.append(referring(Deposit(4), objects.put("plain", payload(4))))

    async def end(start: int, memory: float) -> int:
        """Return up to where the data fits into the memory."""
        batch = await counter.applier.read(*deposits[start:], start=start)
        return (await resolve_batch(batch, counter.claims, memory)).end

    assert [await end(start, 2_500) for start in (0, 2)] == [2, 3]
    assert await end(3, 2_500) == 3, "nothing of it is fetched"
    assert await end(3, inf) == 4
    assert [await end(4, memory) for memory in (2_500, inf)] == [4, 5], "it may be the largest"


async def test_an_event_of_unknown_data_length_has_a_batch_to_itself(
    counter: Counter, objects: Objects, db: asyncpg.Connection
) -> None:
    uris = [objects.put(f"plain/{number}", payload(number)) for number in range(3)]
    await counter.apply(*(referring(Deposit(n), uri) for n, uri in enumerate(uris)))
    assert await histories(db) == {"ada": [0, 1, 2]}
    assert await db.fetchval("SELECT count(DISTINCT xid) FROM pipeline.inbox") == 3


async def test_a_reference_without_a_value_is_no_tombstone(
    counter: Counter, objects: Objects, db: asyncpg.Connection
) -> None:
    record = stored(objects, Deposit(1)).record("deposits", 0)
    record = replace(record, value=None)
    batch = await resolve_batch(
        await read(counter.applier.handlers, await counter.applier.position(), [record]),
        counter.claims,
    )
    await counter.applier.apply_batch(batch)
    assert await histories(db) == {"ada": [1]}


@FOLDER_AND_S3
@pytest.mark.parametrize("harm", ["missing", "shorter", "longer", "changed"])
async def test_missing_or_changed_data_is_a_dead_letter_until_restored(
    counter: Counter, objects: Objects, db: asyncpg.Connection, harm: str
) -> None:
    event = stored(objects, Deposit(1))
    content = objects.get(place(event))
    if harm == "missing":
        objects.delete(place(event))
    else:
        other = {"shorter": content[:-1], "longer": content + b" ", "changed": content[:-2] + b"2}"}
        objects.put(place(event), other[harm])
    await counter.apply(event, Deposit(2, account="bob"))
    reason = "data missing" if harm == "missing" else "data changed"
    assert reason in REASONS
    assert await counter.applier.park() == {("deposit", 0): reason}
    (row,) = await counter.applier.backlog()
    assert (row["value"], row["attempts"]) == (b"", 0)
    assert await histories(db) == {"bob": [2]}

    # It is known again, with whatever it comes.
    (again,) = await counter.apply(event)
    assert not again.is_new
    (again,) = await counter.apply(Deposit(1))
    assert not again.is_new
    assert len(await counter.applier.backlog()) == 1

    objects.put(place(event), content)
    await redrive(counter.applier)
    await counter.applier.work_off()
    assert await histories(db) == {"ada": [1], "bob": [2]}
    assert await counter.applier.backlog() == []
    # From now on its payload is known too.
    await counter.apply(Deposit(3, id="1"))
    assert list((await counter.applier.park()).values()) == ["identity mismatch"]


@pytest.mark.parametrize(("length", "checksum"), [(1, None), (None, "00" * 32)])
async def test_the_length_and_the_checksum_each_tell_that_it_is_something_else(
    counter: Counter, objects: Objects, length: int | None, checksum: str | None
) -> None:
    uri = objects.put("a", payload(1))
    await counter.apply(referring(Deposit(1), uri, length=length, checksum=checksum))
    assert await counter.applier.park() == {("deposit", 0): "data changed"}


async def test_changed_backlog_data_is_a_dead_letter_even_without_a_checksum(
    new_counter: NewCounter, objects: Objects, db: asyncpg.Connection
) -> None:
    counter = await new_counter(mode="deferred")
    applier = counter.applier
    uri = objects.put("a", payload(1))
    await counter.apply(referring(Deposit(1), uri), Deposit(2, account="bob"))
    objects.put("a", payload(7))
    await applier.work_off()
    assert await applier.park() == {("deposit", 0): "data changed"}
    assert await histories(db) == {"bob": [2]}
    (row,) = await applier.backlog()
    assert uri in row["error"]

    objects.put("a", payload(1))
    await redrive(applier)
    await applier.work_off()
    assert await histories(db) == {"ada": [1], "bob": [2]}
    assert await applier.backlog() == []


async def test_the_hash_of_a_large_payload_does_not_keep_the_loop(
    counter: Counter,
    opened: Callable[..., Claims],
    objects: Objects,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter.applier.consume.claims = opened(memory_bytes=1_000_000)
    threads: list[int] = []

    def look(*parts: str | bytes | None) -> bytes:
        threads.append(threading.get_ident())
        return payload_hash(*parts)  # type: ignore[arg-type]

    monkeypatch.setattr("onceward.claims.fetching.payload_hash", look)
    await counter.apply(stored(objects, Deposit(1)), stored(objects, Deposit(2), size=300_000))
    small, large = threads
    assert small == threading.get_ident() != large
    assert await histories(db) == {"ada": [1, 2]}


async def test_a_known_event_whose_data_has_gone_is_a_duplicate(
    counter: Counter, objects: Objects
) -> None:
    event = stored(objects, Deposit(1))
    await counter.apply(event)
    objects.delete(place(event))
    (again,) = await counter.apply(event)
    assert not again.is_new
    assert await counter.applier.park() == {}


async def test_a_key_that_holds_waits_for_its_data_and_keeps_its_order(
    new_counter: NewCounter, objects: Objects, db: asyncpg.Connection
) -> None:
    counter = await new_counter(policy=Policy(after_death="hold"))
    first = stored(objects, Deposit(1))
    content = objects.get(place(first))
    objects.delete(place(first))
    await counter.apply(first, Deposit(2), Deposit(9, account="bob"), stored(objects, Deposit(3)))
    assert await counter.applier.park() == {
        ("deposit", 0): "data missing",
        ("deposit", 1): "follows another",
        ("deposit", 3): "follows another",
    }
    assert await histories(db) == {"bob": [9]}
    await counter.applier.work_off()
    assert await histories(db) == {"bob": [9]}

    objects.put(place(first), content)
    await redrive(counter.applier)
    await counter.applier.work_off()
    assert await histories(db) == {"ada": [1, 2, 3], "bob": [9]}


async def test_deferred_messages_are_stored_by_reference_and_fetched_in_their_turn(
    new_counter: NewCounter, objects: Objects, db: asyncpg.Connection
) -> None:
    counter = await new_counter(mode="deferred")
    applier = counter.applier
    # More than there is memory for at once.
    await counter.apply(*(stored(objects, Deposit(n), size=4_000) for n in range(1, 8)))
    assert {row["value"] for row in await applier.backlog()} == {b""}
    await applier.work_off()
    assert await histories(db) == {"ada": list(range(1, 8))}
    (again,) = await counter.apply(Deposit(1))
    assert not again.is_new
    assert await applier.backlog() == []


async def test_a_backlog_row_waits_for_the_store_without_spending_an_attempt(
    counter: Counter, objects: Objects, db: asyncpg.Connection, outage: Outage
) -> None:
    first, second = stored(objects, Deposit(1)), stored(objects, Deposit(2, account="bob"))
    content = objects.get(place(first))
    objects.delete(place(first))
    await counter.apply(first, second)
    await redrive(counter.applier)
    objects.put(place(first), content)
    async with outage():
        working = asyncio.create_task(counter.applier.work_off())
        await eventually(
            lambda: "object store" in counter.applier.health.reasons.get("backlog", "")
        )
        (row,) = await counter.applier.backlog()
        assert (row["reason"], row["attempts"]) == ("redriven", 0)
    await working
    await counter.applier.work_off()
    assert await histories(db) == {"ada": [1], "bob": [2]}


async def test_what_could_be_fetched_does_not_wait_for_the_rest(
    counter: Counter, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (stored(objects, Deposit(number)) for number in (1, 2, 3))
    fetch = Claims.fetch

    async def all_but_the_third(self: Claims, reference: Reference) -> bytes:
        if reference.uri.endswith("/3"):
            raise StoreUnavailable("it is on its way")
        return await fetch(self, reference)

    monkeypatch.setattr(Claims, "fetch", all_but_the_third)
    claims = counter.applier.consume.claims
    batch = await resolve_batch(await counter.applier.read(first, second, third, start=0), claims)
    assert [item.event for item in batch.items].count(None) == 0
    assert (len(batch.items), batch.end) == (2, 2)
    with pytest.raises(StoreUnavailable):
        await resolve_batch(await counter.applier.read(third, start=2), claims)


async def test_data_suspected_of_a_process_death_is_fetched_after_counting_an_attempt(
    counter: Counter, objects: Objects, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    deposit = stored(objects, Deposit(1))
    content = objects.get(place(deposit))
    objects.delete(place(deposit))
    await counter.apply(deposit)
    await redrive(counter.applier)
    objects.put(place(deposit), content)
    await db.execute("UPDATE pipeline.backlog SET reason = 'process died'")
    spent: list[int] = []
    fetch = Claims.fetch

    async def look(self: Claims, reference: Reference) -> bytes:
        spent.append(await db.fetchval("SELECT attempts FROM pipeline.backlog"))
        if len(spent) == 1:
            raise StoreUnavailable("it is on its way")
        return await fetch(self, reference)

    monkeypatch.setattr(Claims, "fetch", look)
    assert await counter.applier.lanes.work_off()
    assert await db.fetchval("SELECT attempts FROM pipeline.backlog") == 0, "an outage spends none"
    await counter.applier.make_due()
    await counter.applier.work_off()
    assert spent == [1, 1]
    assert await counter.applier.backlog() == []


@pytest.mark.parametrize(
    "uri",
    [
        "{url}/../secret",
        "{url}/a/../../secret",
        "{url}/%2e%2e/secret",
        "{url}/a//b",
        "{url}/./a",
        "{url}/",
        "{url}",
        "{url}-of-others/a",
        "{url}/a?b=c",
        "{url}/a#b",
        "{url}/a\nb",
        "file:///etc/passwd",
        "/etc/passwd",
        "../secret",
        "s3://bucket/a",
        "http://127.0.0.1:{port}/a",
        "//127.0.0.1:{port}/a",
        "FILE://{path}/a",
    ],
)
async def test_what_lies_elsewhere_is_never_fetched(
    counter: Counter, objects: Objects, tmp_path: Path, uri: str
) -> None:
    (tmp_path / "secret").write_bytes(payload(1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        where = uri.format(
            url=objects.url, port=listener.getsockname()[1], path=objects.url.partition("://")[2]
        )
        await counter.apply(referring(Deposit(1), where))
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert await counter.applier.park() == {("deposit", 0): "data elsewhere"}
    (row,) = await counter.applier.backlog()
    assert "PIPELINE_CLAIM_URL" in row["error"]


@pytest.mark.parametrize("says", [True, False])
async def test_data_that_is_larger_than_the_memory_is_a_dead_letter(
    counter: Counter, objects: Objects, says: bool
) -> None:
    event = stored(objects, Deposit(1), size=10_001)
    if not says:
        event = referring(Deposit(1), f"{objects.url}/{place(event)}")
    await counter.apply(event)
    assert await counter.applier.park() == {("deposit", 0): "data too large"}
    assert not counter.applier.outages


async def test_a_length_that_is_no_number_is_the_producers_mistake(
    counter: Counter, objects: Objects
) -> None:
    uri = objects.put("a", payload(1))
    headers = (("ce_dataref", uri.encode()), ("ce_datalength", b"-1"))
    await counter.apply(Deposit(1, value=b"", headers=headers))
    assert await counter.applier.park() == {("", 0): "invalid attribute"}


async def test_a_service_without_a_store_says_what_to_do(
    new_applier: NewApplier, objects: Objects
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="applier")
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    await Counter(applier, None).apply(stored(objects, Deposit(1)))  # type: ignore[arg-type]
    assert await applier.park() == {("deposit", 0): "data elsewhere"}
    (row,) = await applier.backlog()
    assert "set PIPELINE_CLAIM_URL" in row["error"]


async def test_a_store_that_has_lost_everything_opens_the_breaker_and_buries_nothing(
    counter: Counter, objects: Objects, db: asyncpg.Connection
) -> None:
    events = [stored(objects, Deposit(n, account=f"of {n}")) for n in range(30)]
    for name in objects.names():
        objects.delete(name)
    with pytest.raises(BreakerOpen):
        await counter.apply(*events)
    assert await counter.applier.backlog() == []


@LOST
async def test_a_lost_store_makes_no_dead_letters_while_small_events_continue(
    counter: Counter, objects: Objects, db: asyncpg.Connection, loss: Outage
) -> None:
    """It answers for everything that it is missing, and the breaker sees that others succeed."""
    large = [stored(objects, Deposit(number, account="large")) for number in range(30)]
    async with loss():
        for number, event in enumerate(large):
            await counter.apply(Deposit(100 + number, account="small"))
            with pytest.raises(StoreUnavailable, match=f"the object store at {objects.url}: "):
                await counter.apply(event)
        assert await counter.applier.backlog() == []
    await counter.apply(*large)
    assert await histories(db) == {"large": [*range(30)], "small": [*range(100, 130)]}


async def test_references_of_other_stores_are_compared_by_all_of_the_url(
    opened: Callable[..., Claims],
) -> None:
    with pytest.raises(DataUnavailable, match="reads only below"):
        await opened().fetch(Reference("file:///tmp/a"))
