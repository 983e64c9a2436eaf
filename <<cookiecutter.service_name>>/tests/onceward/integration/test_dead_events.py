"""Dead events: a person lists those that Kafka rejects, redrives them, or discards them."""

import asyncio
import getpass
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from types import SimpleNamespace

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward.cli import advice, dead, dead_commands, dead_events
from onceward.cli.dead import Selection, State
from onceward.cli.dead_events import DeadEvents
from onceward.operators import statements as operator_statements
from onceward.operators.audit import Change
from onceward.relay import brokers, publisher
from onceward.relay.publisher import Publisher
from onceward.settings import Settings

from .applier import store_of
from .bank import Bank
from .conftest import Command, complaint
from .outgoing import (
    EVERYTHING,
    LARGE,
    REDRIVES,
    SMALL,
    allow,
    are_dead,
    bury,
    died,
    discard,
    event,
    numbered,
    redrive,
    relaying,
    stage,
    waits,
)
from .processes import starting
from tests.servers.processes import Start
from tests.servers.topics import create_topic, following
from tests.servers.waiting import PATIENCE, eventually

Connect = Callable[[], Awaitable[asyncpg.Connection]]
NewSettings = Callable[..., Settings]
NewTopic = Callable[..., Awaitable[str]]


async def listed(
    db: asyncpg.Connection, state: State = "dead", which: Selection = EVERYTHING, limit: int = 1_000
) -> list[SimpleNamespace]:
    found = store_of(DeadEvents, db).chunks(state, which, limit)
    return [SimpleNamespace(**one) async for some in found for one in some]


async def numbers(
    db: asyncpg.Connection, state: State = "dead", which: Selection = EVERYTHING
) -> set[int]:
    return {int(one.id) for one in await listed(db, state, which)}


@pytest.fixture
async def start(bank: Bank, database_url: str, kafka: str) -> AsyncIterator[Start]:
    """Start commands of the bank."""
    async with starting(
        bank,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
        relay_lease=3,
    ) as one:
        yield one


async def test_an_oversized_event_dies_and_a_later_redrive_sends_it(
    quick: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    service: Command,
) -> None:
    topic = await new_topic(**{"max.message.bytes": "4000"})
    async with following(kafka, topic) as tail, relaying(quick()):
        large = {1, 3}
        await stage(db, [event(topic, n, payload=LARGE if n in large else SMALL) for n in range(5)])
        await tail.until_ids([0, 2, 4])
        await eventually(are_dead(db, [1, 3]))
        first, second = await died(db)
        assert (await service("list")).stdout == "0 dead\n"
        vain = await service("events", "redrive", "--all", "--yes")
        assert vain.exit_code == 3
        assert "redriven 2 of 2" in vain.stderr
        said = vain.stdout.splitlines()
        assert said[-3] == "2 dead"
        assert said[-2].startswith(f"  {first.id} is dead again: too large: event 1 is larger than")
        assert said[-1].startswith(f"  {second.id} is dead again: too large: event 3 is larger")
        await allow(kafka, topic, 100_000)
        done = await service("events", "redrive", "--yes", "--topic", topic, "--json")
        assert done.exit_code == 0
        assert json.loads(done.stdout) == {
            "found": 2,
            "redriven": 2,
            "became": {"waiting": 0, "dead": 0, "sent": 2},
            "died": [],
        }
        await stage(db, numbered(topic, [5]))
        await tail.until_ids([5])
    assert tail.ids == ["0", "2", "4", "1", "3", "5"]
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox_rejected") == 0


@pytest.fixture
async def first_is_dead(quick: NewSettings, db: asyncpg.Connection, missing: str) -> None:
    """Stage the first event for a topic that is missing, and let it die."""
    await stage(db, numbered(missing, [0]))
    async with relaying(quick()) as one:
        await eventually(waits(db, [0]))
        await one.stop()
    await db.execute(
        "UPDATE pipeline.outbox_rejected SET died_at = clock_timestamp(), reason = 'too large'"
    )


@pytest.mark.usefixtures("first_is_dead")
async def test_a_redriven_event_goes_before_those_of_its_topic_that_wait(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, missing: str
) -> None:
    async with relaying(quick(relay_lease=3_600)) as one:
        await eventually(lambda: bool(one.relay._cursor.progress))
        # From now on the relay does not look for what was redriven.
        await stage(db, numbered(missing, [1]))
        await eventually(waits(db, [1]))
        assert len(await redrive(db)) == 1
        await stage(db, numbered(missing, [2]))
        await eventually(waits(db, [0, 1, 2]))

        def is_tried() -> bool:
            trial = one.relay._trial
            sent = trial and trial.sent
            return sent is not None and sent[0]["event_id"] == "0"

        await eventually(is_tried)
        await create_topic(kafka, missing)
        async with following(kafka, missing) as tail:
            await tail.until_ids(range(3))
            await stage(db, numbered(missing, [3]))
            await tail.until_ids([3])
    assert tail.ids == list("0123")


class Held:
    """Lookups of topics by one of a relay's publishers: from `hold` on they wait for `end`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._ended = asyncio.Event(), asyncio.Event()
        self._by: Publisher | None = None
        self._look_up = brokers.look_up_topics
        monkeypatch.setattr(publisher, "look_up_topics", self)

    async def __call__(self, producer: AIOKafkaProducer, topics: Collection[str]) -> None:
        """Look topics up."""
        if self._by is not None and producer is self._by._producer:
            self.begun.set()
            await self._ended.wait()
        await self._look_up(producer, topics)

    def hold(self, by: Publisher) -> None:
        """Let those that begin from now on wait."""
        self._by = by

    def end(self) -> None:
        """Let them go on."""
        self._ended.set()


@pytest.mark.usefixtures("first_is_dead")
async def test_events_redriven_while_a_topic_is_tried_precede_those_that_wait(
    quick: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(monkeypatch)
    async with relaying(quick(relay_lease=3_600)) as one:
        await stage(db, numbered(missing, [1]))
        await eventually(waits(db, [1]))
        held.hold(one.relay._trials)
        await asyncio.wait_for(held.begun.wait(), PATIENCE)
        assert len(await redrive(db)) == 1
        await create_topic(kafka, missing)
        async with following(kafka, missing) as tail:
            held.end()
            await tail.until_ids([0, 1])
    assert tail.ids == ["0", "1"]


@pytest.mark.usefixtures("first_is_dead")
async def test_events_redriven_while_a_topic_is_drained_precede_those_that_wait(
    quick: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trial sends a hundred, and the others follow from another producer."""
    held, later = Held(monkeypatch), range(1, 151)
    async with relaying(quick(relay_lease=3_600)) as one:
        await stage(db, numbered(missing, later))
        await eventually(waits(db, later))
        held.hold(one.relay._publisher)
        await create_topic(kafka, missing)
        async with following(kafka, missing) as tail:
            await asyncio.wait_for(held.begun.wait(), PATIENCE)
            assert len(await redrive(db)) == 1
            held.end()
            await tail.until_ids([0, *later])
    assert tail.ids == [str(n) for n in (*range(1, 101), 0, *range(101, 151))]


async def test_a_redriven_event_that_is_rejected_again_has_a_known_reason(
    quick: NewSettings, db: asyncpg.Connection, missing: str
) -> None:
    await bury(db, 2)
    await db.execute("UPDATE pipeline.outbox_rejected SET topic = $1", missing)
    await redrive(db)
    assert {one.reason for one in await listed(db, "waiting")} == {"redriven"}
    async with relaying(quick()):

        async def is_known() -> bool:
            return {one.reason for one in await listed(db, "waiting")} == {"topic missing"}

        await eventually(is_known)
    (one, _) = await listed(db, "waiting")
    assert f"topic {missing} is not known to the brokers" in str(one.error)


async def test_concurrent_operators_and_relays_lose_nothing_and_keep_key_order(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic, connect: Connect
) -> None:
    topic = await new_topic(2, **{"max.message.bytes": "4000"})
    operators = [await connect(), await connect()]
    large = set(range(3, 200, 24))
    given_up: list[int] = []
    stopped = asyncio.Event()

    async def redrive_often() -> None:
        # Ever less often: those behind an event come to turn while it is dead, and whether that is
        # long enough must not depend on how fast the machine is.
        pause = 0.1
        while not stopped.is_set():
            await redrive(operators[0])
            await asyncio.sleep(pause)
            pause *= 1.1

    async def discard_often() -> None:
        while not stopped.is_set():
            given_up.extend(await discard(operators[1], Selection(record_key=b"key 3")))
            await asyncio.sleep(0.02)

    chosen = quick(relay_lease=1, relay_batch_events=20, relay_topic_pause=0.02)
    async with following(kafka, topic) as tail, relaying(chosen), relaying(chosen):
        tasks = [asyncio.create_task(redrive_often()), asyncio.create_task(discard_often())]
        for n in range(200):
            await stage(db, [event(topic, n, f"key {n % 5}", LARGE if n in large else SMALL)])
        await tail.until_ids(set(range(200)) - large)
        await eventually(lambda: len(given_up) > 0)
        await allow(kafka, topic, 100_000)
        await eventually(lambda: _nothing_is_left(db))
        stopped.set()
        await asyncio.gather(*tasks)
    discarded = await numbers(db, "discarded")
    assert sorted(given_up) == sorted(discarded), "each is given up once"
    lost = {one.event_id for one in await listed(db, "discarded")}
    assert set(tail.ids) == {str(n) for n in range(200)} - lost
    assert len(lost) > 0
    for ids in tail.first_ids().values():
        straight = [int(id) for id in ids if int(id) not in large]
        assert straight == sorted(straight), "what never died is in order"


async def _nothing_is_left(db: asyncpg.Connection) -> bool:
    return not await db.fetchval(
        "SELECT EXISTS (SELECT FROM pipeline.outbox_rejected WHERE discarded_at IS NULL)"
    )


class Stopped:
    """The connection of a process that is stopped as soon as it holds a shard."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)

    async def execute(self, statement: str, *arguments: object) -> None:
        await self._connection.execute(statement, *arguments)
        if statement == operator_statements.HOLD_SHARD:
            await eventually(self._connection.is_closed)


async def test_a_command_that_changes_events_waits_for_relays_and_ends_when_stalled(
    db: asyncpg.Connection, connect: Connect
) -> None:
    """Trap 35: a stopped process must not hold the cursor of a relay."""
    await bury(db, 1)
    relay, operator = await connect(), await connect()
    for change in (
        store_of(DeadEvents, operator, patience=0.2).redrive(EVERYTHING, REDRIVES),
        store_of(DeadEvents, operator, patience=0.2).discard(EVERYTHING, Change("ann", "discard")),
    ):
        async with relay.transaction():
            await relay.execute("UPDATE pipeline.outbox_cursor SET token = token")
            with pytest.raises(asyncpg.LockNotAvailableError):
                await asyncio.wait_for(anext(change), PATIENCE)
    stopped = Stopped(operator)
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
        await anext(store_of(DeadEvents, stopped, patience=0.2).redrive(EVERYTHING, REDRIVES))
    assert await numbers(db) == {1}
    assert await discard(db) == [1]


@pytest.mark.parametrize(
    ("command", "participle"),
    [(["redrive", "--wait", "0"], "redriven"), (["discard", "--because", "a test"], "discarded")],
    ids=["redrive", "discard"],
)
async def test_a_killed_command_has_done_a_part_and_the_next_continues(
    db: asyncpg.Connection, connect: Connect, start: Start, command: list[str], participle: str
) -> None:
    count = 3_500
    await bury(db, count)
    line = ("dead", "events", *command, "--all", "--yes", "--json")
    shards = "SELECT DISTINCT shard FROM pipeline.outbox_rejected ORDER BY 1"
    last = [row["shard"] for row in await db.fetch(shards)][-1]
    blocker = await connect()
    async with blocker.transaction():
        await blocker.execute(operator_statements.HOLD_SHARD, last)
        killed = await start(*line)
        await eventually(lambda: _somebody_waits(db, blocker.get_server_pid()))
        await killed.kill()
    left = len(await numbers(db))
    assert 0 < left < count
    again = await start(*line)
    assert await again.ended() == 0, again.output
    done = json.loads(again.output.splitlines()[-1])
    assert (done["found"], done[participle]) == (left, left)
    assert await numbers(db) == set()


async def _somebody_waits(db: asyncpg.Connection, pid: int) -> bool:
    blocked = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid)))"
    waits: bool = await db.fetchval(blocked, pid)
    return waits


async def test_events_are_chosen_by_what_they_are(db: asyncpg.Connection) -> None:
    await bury(db, 7)
    await db.execute(
        "UPDATE pipeline.outbox_rejected SET died_at = now() - interval '2 h' WHERE id < 3;"
        " UPDATE pipeline.outbox_rejected SET reason = 'not valid', topic = 'gone' WHERE id = 4;"
        " UPDATE pipeline.outbox_rejected SET type = 'closed', release = '1.4.2' WHERE id = 5;"
        " UPDATE pipeline.outbox_rejected SET died_at = NULL, reason = NULL WHERE id = 7"
    )
    hour_ago = await db.fetchval("SELECT now() - interval '1 h'")
    for which, chosen in (
        (EVERYTHING, {1, 2, 3, 4, 5, 6}),
        (Selection(keys=[2, 3, 7, 99]), {2, 3}),
        (Selection(reasons=["not valid"]), {4}),
        (Selection(reasons=["not valid", "too large"]), {1, 2, 3, 4, 5, 6}),
        (Selection(event_id="event 6"), {6}),
        (Selection(type="closed"), {5}),
        (Selection(topic="gone"), {4}),
        (Selection(record_key=b"key 3"), {3}),
        (Selection(release="1.4.2"), {5}),
        (Selection(since=hour_ago), {3, 4, 5, 6}),
        (Selection(until=hour_ago), {1, 2}),
    ):
        assert await numbers(db, which=which) == chosen, which
        assert sum(
            one["count"] for one in await store_of(DeadEvents, db).count("dead", which)
        ) == len(chosen)
    assert await numbers(db, "waiting", Selection(reasons=["follows another"])) == {7}
    assert await discard(db, Selection(topic="gone")) == [4]
    assert await numbers(db, "discarded") == {4}
    assert set(await redrive(db, Selection(until=hour_ago))) == {1, 2}
    assert await numbers(db, "waiting") == {1, 2, 7}
    # Neither is done twice.
    assert await discard(db, Selection(keys=[1, 4, 7])) == []
    assert await redrive(db, Selection(keys=[1, 4, 7])) == []
    assert await discard(db, Selection(keys=[3, 7]), "waiting") == [7]
    assert await numbers(db) == {3, 5, 6}


async def test_events_come_newest_first_over_as_many_pages_as_there_are(
    db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead, "CHUNK", 4)
    await bury(db, 10)
    found = [int(one.id) for one in await listed(db)]
    assert found == [9, 6, 3, 10, 7, 4, 1, 8, 5, 2]
    assert [int(one.id) for one in await listed(db, limit=5)] == found[:5]
    # What is changed is changed in the order of its key.
    shard = "SELECT shard FROM pipeline.outbox_rejected WHERE id = $1"
    changed = await redrive(db)
    assert sorted(changed) == list(range(1, 11))
    assert changed == sorted(
        changed, key=[await db.fetchval(shard, n) for n in range(11)].__getitem__
    )


async def test_list_and_show_tell_what_there_is(
    quick: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    missing: str,
    service: Command,
) -> None:
    topic = await new_topic(**{"max.message.bytes": "4000"})
    hostile = b"\x1b[2J" + LARGE
    await stage(
        db,
        [
            event(topic, "one", "ada\nstate", hostile, sequence=7),
            event(topic, "two", None, b"\xff" + LARGE),
            *numbered(missing, ["three", "four"]),
        ],
    )
    async with relaying(quick()):
        await eventually(are_dead(db, ["one", "two"]))
        await eventually(waits(db, ["three", "four"]))
    one, two = await died(db)
    lines = (await service("events", "list")).stdout.splitlines()
    assert {line.split()[0] for line in lines} == {"id", one.id, two.id, "2"}
    assert any(line.split()[-3:] == ["one", topic, r"ada\nstate"] for line in lines)
    assert "1 dead, the newest of 2" in (await service("events", "list", "--limit", "1")).stdout
    (line,) = (await service("events", "list", "--event-id", "two", "--json")).stdout.splitlines()
    times = ("created_at", "parked_at", "died_at", "since")
    varying = {"error": None} | dict.fromkeys(times)
    assert json.loads(line) | varying == {
        "id": two.id,
        "state": "dead",
        "reason": "too large",
        "event_id": "two",
        "source": "/bank",
        "type": "balance.changed",
        "topic": topic,
        "key": None,
        "size": len(LARGE) + 1,
        "discarded_at": None,
        "release": None,
        **varying,
    }
    summary = await service("events", "list", "--summary", "--waiting", "--json")
    (group,) = [json.loads(line) for line in summary.stdout.splitlines()]
    assert (group["reason"], group["topic"], group["count"]) == ("topic missing", missing, 2)
    assert "2 dead" in (await service("events", "list", "--summary")).stdout

    told = (await service("events", "show", one.id)).stdout
    assert "\x1b" not in told
    for text in (
        "too large",
        dead_events.REASONS["too large"],
        "event one is larger than topic",
        r"ada\nstate",
        "9004",
        "application/json",
        r"\u001b[2Jxxx",
    ):
        assert text in told
    exact = json.loads((await service("events", "show", two.id, "--json")).stdout)
    assert exact["payload"] == {"hex": "ff" + LARGE.hex()}
    assert exact["advice"] == dead_events.REASONS["too large"]
    (three, _) = await listed(db, "waiting")
    told = (await service("events", "show", three.id)).stdout
    assert "waiting" in told
    assert "or run `service topics create`: then it is published; or discard it" in told
    assert "topic missing" in told


async def test_redrive_counts_asks_and_says_what_waits(
    db: asyncpg.Connection, service: Command
) -> None:
    await bury(db, 3)
    dry = await service("events", "redrive", "--dry-run")
    assert "3 dead" in dry.stdout
    unsure = await service("events", "redrive", input="n\n")
    assert (unsure.exit_code, "Redrive 3?" in unsure.stderr) == (1, True)
    assert await numbers(db) == {1, 2, 3}, "nothing was done"
    done = await service("events", "redrive", "1", "3", "--wait", "0.1", input="y\n")
    assert done.exit_code == 4
    assert "redriven 2 of 2" in done.stderr
    assert "2 waiting" in done.stdout
    assert "the relay notices within " in done.stdout
    assert await numbers(db, "waiting") == {1, 3}
    again = await service("events", "redrive", "1", "--yes")
    assert (again.exit_code, "1 is not dead, but waiting" in again.stderr) == (1, True)
    quiet = await service("events", "redrive", "--all", "--yes", "--wait", "0", "--json")
    assert json.loads(quiet.stdout) == {"found": 1, "redriven": 1, "became": None, "died": None}


async def test_discard_keeps_who_and_why(db: asyncpg.Connection, service: Command) -> None:
    await bury(db, 3)
    done = await service(
        "events", "discard", "2", "--because", "told Bob", "--operator", "ann", input="y\n"
    )
    assert "Discard 1?" in done.stderr
    assert "discarded 1 of 1" in done.stderr
    told = (await service("events", "show", "2")).stdout
    assert "ann" in told
    assert "told Bob" in told
    assert advice.DISCARDED in told
    again = await service("events", "discard", "2", "--because", "x", "--yes")
    assert (again.exit_code, "not dead, but discarded" in again.stderr) == (1, True)
    done = await service("events", "discard", "--because", "all of it", "--all", "--yes", "--json")
    assert json.loads(done.stdout) == {"found": 2, "discarded": 2}
    by = await db.fetchval("SELECT discarded_by FROM pipeline.outbox_rejected WHERE id = 1")
    assert by == getpass.getuser()
    assert (await service("list")).stdout == "0 dead\n", "and nothing of events"
    assert "3 discarded" in (await service("events", "list", "--discarded")).stdout


async def test_events_that_wait_are_discarded_only_with_the_option_for_them(
    db: asyncpg.Connection, service: Command
) -> None:
    await bury(db, 3)
    await db.execute(
        "UPDATE pipeline.outbox_rejected SET died_at = NULL, topic = 'gone' WHERE id < 3"
    )
    because = ("--because", "no such topic", "--yes")
    refused = await service("events", "discard", "1", *because)
    assert (refused.exit_code, "1 is not dead, but waiting" in refused.stderr) == (1, True)
    refused = await service("events", "discard", "3", "--waiting", *because)
    assert (refused.exit_code, "3 is not waiting, but dead" in refused.stderr) == (1, True)
    done = await service("events", "discard", "--waiting", "--topic", "gone", *because)
    assert "discarded 2 of 2" in done.stderr
    assert await numbers(db, "discarded") == {1, 2}
    refused = await service("discard", "--waiting", *because)
    assert (refused.exit_code, "No such option" in refused.output) == (2, True)


async def test_a_command_that_loses_the_database_says_how_far_it_came(
    db: asyncpg.Connection, service: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead, "CHUNK", 1)
    monkeypatch.setattr(dead_commands, "PROGRESS", 2)
    await bury(db, 3)
    await db.execute("UPDATE pipeline.outbox_rejected SET key = 'ada'")
    lose = "SELECT pg_terminate_backend(pg_backend_pid()) WHERE $1::bigint[] = ARRAY[3::bigint]"
    changes = operator_statements.REDRIVE_EVENTS
    monkeypatch.setattr(operator_statements, "REDRIVE_EVENTS", lose)
    done = await service("events", "redrive", "3", "--yes")
    assert done.exit_code == 1
    assert "redriven 0 of 1; run it again to continue" in done.stderr
    assert "PostgreSQL at " in done.stderr
    monkeypatch.setattr(operator_statements, "REDRIVE_EVENTS", changes)
    done = await service("events", "redrive", "--all", "--yes", "--wait", "0")
    assert done.stderr.splitlines() == ["redriven 2 of 3", "redriven 3 of 3"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "17"], "there is no dead event 17"),
        (["show", "event 17"], "is not the number of an event"),
        (["redrive", "17"], "there is no dead event 17"),
        (["list", "--reason", "dance"], "is none of"),
        (["list", "--older-than", "soon"], "is not a time such as"),
        (["list", "--waiting", "--discarded"], "exclude each other"),
        (["discard"], "--because"),
        (["discard", "--because", " "], "--because is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
async def test_what_can_not_be_meant_is_refused(
    service: Command, arguments: list[str], said: str
) -> None:
    done = await service("events", *arguments)
    assert done.exit_code in (1, 2)
    assert said in complaint(done)
    assert isinstance(done.exception, SystemExit), "and no traceback"
