"""What a release has written, beside what others have."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from onceward import Reject
from onceward.cli.dead import CHUNK
from onceward.history import released
from onceward.history.released import AGGREGATES, Wanted

from .conftest import Tells
from tests.contract.bank import Deposit
from tests.onceward.integration.applier import NewApplier
from tests.onceward.integration.bank import Bank
from tests.onceward.integration.conftest import Command, complaint

RELEASES = "1.4.1", "1.4.2", "1.4.3"
NUMBER = 30
"""Messages of each release."""
_OTHERS = """
INSERT INTO pipeline.outbox (topic, key, event_id, source, type, content_type, sequence, release)
SELECT 'another', CASE WHEN n < 3 THEN n::text::bytea END, n, '/s', 'x', 'y', 1, '1.4.2'
  FROM generate_series(0, 3) AS n
"""
"""Events for another topic; an aggregate has a key."""


@pytest.fixture
async def three(bank: Bank, new_applier: NewApplier) -> None:
    """Let three releases apply messages in turns, each for ten accounts; some wait or are dead."""
    bank.errors = {101: ValueError("later"), 102: Reject("no")}
    appliers = [
        await new_applier(bank.handlers, topic=bank.deposits, release=one) for one in RELEASES
    ]
    for number in range(NUMBER):
        for place, applier in enumerate(appliers):
            await applier.apply(Deposit(1, f"{number % 10}", id=f"{place}-{number}"))
    await appliers[1].apply(Deposit(101, "late"), Deposit(102, "dead"))
    await appliers[1].apply(Deposit(3, "late"))


@pytest.mark.usefixtures("three")
async def test_it_counts_and_lists_what_is_of_one_release(bank: Bank, tells: Tells) -> None:
    groups = await tells("affected", "--release", "1.4.2")
    counts = {(one["what"], one["topic"]): one["count"] for one in groups}
    assert counts == {
        ("message", bank.deposits): NUMBER,
        ("aggregate", bank.balances): 10,
        ("event", bank.balances): NUMBER,
        ("waiting", bank.deposits): 2,
        ("dead", bank.deposits): 1,
    }
    messages = await tells("affected", "messages", "--release", "1.4.2")
    assert {one["id"] for one in messages} == {f"1-{number}" for number in range(NUMBER)}
    assert len(messages) == NUMBER
    assert {one["key"]["text"] for one in messages} == {str(n) for n in range(10)}
    aggregates = await tells("affected", "aggregates", "--release", "1.4.2")
    # Each account has nine events, of three releases in turns.
    found = {one["key"]["text"]: (one["first"], one["last"], one["events"]) for one in aggregates}
    assert found == {str(n): (2, 8, 3) for n in range(10)}
    events = await tells("affected", "events", "--release", "1.4.2")
    assert len({one["event_id"] for one in events}) == len(events) == NUMBER
    assert await tells("affected", "calls", "--release", "1.4.2") == []


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    ("options", "number"),
    [
        (("--consumer", "deposit"), NUMBER),
        (("--consumer", "another"), 0),
        (("--type", "deposited"), NUMBER),
        (("--type", "another"), 0),
        (("--topic", "another"), 0),
        (("--newer-than", "7d"), NUMBER),
        (("--limit", "7"), 7),
    ],
    ids=str,
)
async def test_what_is_listed_can_be_chosen(
    tells: Tells, options: tuple[str, ...], number: int
) -> None:
    found = await tells("affected", "messages", "--release", "1.4.1", *options)
    assert len(found) == number


@pytest.mark.usefixtures("three")
async def test_a_release_that_is_not_known_is_refused_with_those_that_are(
    command: Command, db: asyncpg.Connection
) -> None:
    await db.execute("INSERT INTO pipeline.release VALUES ('1.4.2'), ('1.4.4')")
    for what in ("counts", "messages"):
        done = await command("affected", what, "--release", "2")
        assert done.exit_code == 1
        said = complaint(done)
        assert "nothing is of release '2'; releases are" in said
        assert "1.4.2" in said
    # It was started, and has done nothing; and one that only relays is not in the table.
    assert (await command("affected", "--release", "1.4.4")).exit_code == 0
    assert (await command("affected", "messages", "--release", "1.4.3")).exit_code == 0


async def test_events_have_no_consumer(command: Command) -> None:
    done = await command("affected", "events", "--release", "1", "--consumer", "deposit")
    assert done.exit_code == 2
    assert "events have no consumer" in complaint(done)


@pytest.mark.usefixtures("three")
async def test_lists_are_read_in_chunks_without_gaps_over_any_period(
    db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await db.execute(
        "UPDATE pipeline.inbox"
        " SET created_at = created_at - interval '1 minute' * substr(id, 3)::integer"
        " WHERE id LIKE '_-%'"
    )
    for name in ("_LIST_MARKERS", "_LIST_EVENTS"):
        statement = getattr(released, name).replace(f"LIMIT {CHUNK}", "LIMIT 4")
        monkeypatch.setattr(released, name, statement)
    monkeypatch.setattr(released, "CHUNK", 4)
    wanted = Wanted(release="1.4.2")
    parts: dict[str, Callable[..., Any]] = {"id": released.markers, "event_id": released.events}
    for column, part in parts.items():
        found = [row[column] async for rows in part(db, wanted) for row in rows]
        assert len({*found}) == len(found) == NUMBER
    since = await db.fetchval("SELECT clock_timestamp()") + timedelta(days=1)
    later = Wanted(release="1.4.2", since=since)
    assert [rows async for rows in released.markers(db, later)] == []


@pytest.mark.usefixtures("three")
async def test_each_aggregate_is_listed_once_and_the_list_matches_the_count(
    bank: Bank, db: asyncpg.Connection, tells: Tells, monkeypatch: pytest.MonkeyPatch
) -> None:
    statement = released._LIST_AGGREGATES.replace(f"LIMIT {AGGREGATES}", "LIMIT 4")
    monkeypatch.setattr(released, "_LIST_AGGREGATES", statement)
    monkeypatch.setattr(released, "AGGREGATES", 4)
    await db.execute(_OTHERS)
    wanted = Wanted(release="1.4.2")
    chunks: list[Any] = [rows async for rows in released.aggregates(db, wanted)]
    assert [len(rows) for rows in chunks] == [4, 4, 4, 1]
    found = [(row["topic"], row["key"].decode()) for rows in chunks for row in rows]
    of_bank = {(bank.balances, str(number)) for number in range(10)}
    assert {*found} == of_bank | {("another", str(number)) for number in range(3)}
    listed = await tells("affected", "aggregates", "--release", "1.4.2")
    assert [(one["topic"], one["key"]["text"]) for one in listed] == found
    counts = await tells("affected", "--release", "1.4.2")
    assert sum(one["count"] for one in counts if one["what"] == "aggregate") == len(found)
