"""Worlds for the crash matrix: a service with database, topics and group of its own, and a ledger.

Many of them live side by side on the same servers.
"""

import asyncio
import json
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import asyncpg
from aiokafka import AIOKafkaProducer, ConsumerRecord
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from sqlalchemy import make_url

from onceward.handlers.staging import CALLS
from onceward.operators import stopping
from onceward.operators.stopping import Subject
from onceward.retention import partitions

from .bank import ATTEMPTS, Bank
from .languages import Kafka, Postgres
from .outgoing import all_is_written, allow, event, redrive, stage
from .processes import APP, environment
from .wire import Wire
from tests.contract.bank import Deposit, histories
from tests.servers.databases import ADOPT, HOME, administer, drop_databases
from tests.servers.fork_server import Forked, ForkServer
from tests.servers.topics import Tail, following, id_of
from tests.servers.waiting import eventually

PATIENCE = 300.0
"""Seconds: many worlds may have to share one core with others. A transaction that exceeds its time
limit there keeps partitions from sharing one for ten seconds."""

SETTINGS = {
    "log_json": False,
    "health_port": 0,
    "kafka_session_timeout": 4,
    "transaction_timeout": 3,
    "lock_timeout": 2,
    "retry_pause": 0.2,
    "offset_commit_interval": 0.1,
    "batch_size": 4,
    "backlog_lease": 6,
    "relay_batch_events": 2,
    "relay_lease": 2,
    "relay_cursor_interval": 0.01,
    "relay_topic_pause": 0.3,
    # A table to make at the start, and one generation after the other.
    "inbox_generations_ahead": 3,
    "inbox_generation_age": 0.001,
    "retention_interval": 0.3,
}

_PARTITIONS = range(2)
_FOR_GOOD = 1_000
_FAILURES = {(0, 3): 1, (0, 6): _FOR_GOOD, (1, 3): 2}
"""How often some deposits are refused, by partition and number of eight: in a batch and in a run,
if it is two times."""
_LONG_PAST = (("ce_time", b"2019-12-31T23:59:59Z"),)
"""Of a few deposits: older than the inbox remembers, but not than the consumer."""
_DATABASES_TO_DROP = 30

_SHARDS_ARE_OF_ONE_ALIVE = """
SELECT bool_and(owner = (SELECT owner FROM pipeline.outbox_relay ORDER BY lease_until DESC LIMIT 1))
  FROM pipeline.outbox_cursor
"""

_IS_LEFT_ALONE = """
SELECT (SELECT count(owner) FROM pipeline.outbox_cursor) = 0
   AND NOT EXISTS (SELECT FROM pipeline.backlog_lane WHERE lease_until > clock_timestamp())
   AND NOT EXISTS (
       SELECT FROM pg_stat_activity
        WHERE datname = current_database() AND backend_type = 'client backend'
          AND pid <> pg_backend_pid())
"""

_CREATE_THE_ACCOUNTS = """
INSERT INTO account (id, balance, history, version)
SELECT partition || '-' || number, 0, '', 0
  FROM generate_series(0, 1) AS partition, generate_series(0, 1) AS number
"""

_SOMETHING_WAITS = """
SELECT EXISTS (SELECT FROM pipeline.backlog WHERE died_at IS NULL)
    OR EXISTS (SELECT FROM pipeline.scheduled)
"""

_PAUSES = """
SELECT kind, clock_timestamp() AS since, min(until) AS until
  FROM pipeline.throttle WHERE per_second = 0 AND until > clock_timestamp() GROUP BY kind
"""
# A transaction begins after the look by which it takes something: `created_at` is its begin.
_TAKEN = """
SELECT consumer, id FROM pipeline.inbox
 WHERE created_at >= $2 AND created_at < $3
   AND CASE $1::text WHEN 'consumer' THEN consumer IN ('deposit', 'tell')
                       WHEN 'key' THEN consumer = 'deposit' AND record_key = '0-1' END
"""

_HALF_MADE_TABLES = """
SELECT count(*) FROM pg_class
 WHERE relkind = 'r' AND NOT relispartition AND relname ~ '^(outbox_p|inbox_g)[0-9]+$'
"""

# So that only a snapshot can bring all shards together.
_PART_THE_SHARDS = """
UPDATE pipeline.outbox_cursor SET seen = pg_current_snapshot() WHERE shard % 2 = 0
"""

_LONG_AGO = "FROM ('2020-01-01 00:00+00') TO ('2020-01-02 00:00+00')"
# What a service has left behind that has run for long: all of it is to go, but for the event.
_LEAVE_A_PAST = """
INSERT INTO pipeline.inbox (generation, key, hash, hash_version, consumer, source, id, type,
                            topic, partition, "offset")
VALUES (1, 'key', 'hash', 1, 'deposit', '/tests', 'long-ago', 'deposited', 'deposits', 0, 0);
INSERT INTO pipeline.inbox_closed VALUES (1, '2020-01-02 00:00+00');
UPDATE pipeline.inbox_generation SET current = 2;
INSERT INTO pipeline.backlog (key, lane, order_key, consumer, topic, partition, "offset", timestamp,
                              headers, hash_version, reason, attempts, waited, holds, died_at,
                              discarded_at)
VALUES ('key', 0, 'order', 'deposit', 'deposits', 0, 0, 0, '[]', 1, 'rejected', 1, 0, false,
        '2020-01-01 00:00+00', '2020-01-01 00:00+00')
"""
_STAGE_LONG_AGO = """
INSERT INTO pipeline.outbox (created_at, topic, key, payload, event_id, source, type, content_type)
VALUES ('2020-01-01 12:00+00', $1, 'eve', '{}', 'long-ago', '/bank', 'x', 'application/json')
"""
_PAST = """
SELECT count(*) FROM pg_class WHERE relname IN ('outbox_p20200101', 'inbox_g1')
"""


@dataclass(frozen=True)
class Servers:
    """What the worlds share."""

    database_url: str
    template: str
    kafka: str
    admin: AIOKafkaAdminClient
    fork_server: ForkServer
    logs: Path
    used_databases: list[str]

    @asynccontextmanager
    async def world(self) -> AsyncIterator["World"]:
        """Make a world with its first deposits sent, and remove it after the block."""
        name = f"crash_{uuid4().hex[:12]}"
        bank = Bank(deposits=f"{name}-deposits", balances=f"{name}-balances", name=name)
        url = make_url(self.database_url).set(database=name).render_as_string(hide_password=False)
        topics = [bank.deposits, bank.balances]
        late = f"{name}-late"
        await self.admin.create_topics([NewTopic(topic, len(_PARTITIONS), 1) for topic in topics])
        await administer(self.database_url, f"CREATE DATABASE {name} TEMPLATE {self.template}")
        db = await asyncpg.connect(url.replace("+asyncpg", ""))
        await db.execute(ADOPT)
        await db.execute(_PART_THE_SHARDS)
        await partitions.attach(db, "outbox", "outbox_p20200101", _LONG_AGO)
        await db.execute(_LEAVE_A_PAST)
        await db.execute(_STAGE_LONG_AGO, late)
        try:
            async with (
                AIOKafkaProducer(bootstrap_servers=self.kafka) as producer,
                following(self.kafka, bank.balances) as tail,
            ):
                world = World(self, bank, late, url, db, producer, tail)
                try:
                    await world.send_deposits()
                    await world.stage_what_is_refused()
                    yield world
                except Exception as error:
                    # Printed, it would be shown beside the test that runs at the moment.
                    error.add_note(
                        "\n".join(process.output[-2_000:] for process in world.processes)
                    )
                    raise
        finally:
            await db.close()
            await self.admin.delete_topics([*topics, late])
            await self._discard(name)

    async def _discard(self, database: str) -> None:
        self.used_databases.append(database)
        if len(self.used_databases) > _DATABASES_TO_DROP:
            await drop_databases(self.database_url, self.used_databases)


LetGo = Callable[[], Awaitable[None]]


class Pause(NamedTuple):
    """When nothing was to be taken, by the clock of the database."""

    kind: str
    """That of the subjects that were paused."""
    since: datetime
    """Everything from before was done, and each process knew of the pause."""
    until: datetime


@dataclass
class World:
    """One service, and what it was sent."""

    servers: Servers
    bank: Bank
    late: str
    """A topic that does not exist yet."""
    database_url: str
    db: asyncpg.Connection
    producer: AIOKafkaProducer
    tail: Tail
    sent: dict[int, list[Deposit]] = field(
        default_factory=lambda: {partition: [] for partition in _PARTITIONS}
    )
    processes: list[Forked] = field(default_factory=list)
    allowed: int = 0
    """Size of the records that the late topic takes; 0 while it is missing."""
    pauses: list[Pause] = field(default_factory=list)

    @asynccontextmanager
    async def running(self, wire: Wire | None = None) -> AsyncIterator[Forked]:
        """Run the service, on the wire if there is one; it has ended after the block."""
        async with AsyncExitStack() as stack:
            database_url, kafka = self.database_url, self.servers.kafka
            if wire is not None:
                database_url, kafka = await self._through(wire, stack)
            process = self.servers.fork_server.start(
                APP,
                "run",
                environment=environment(
                    self.bank, database_url=database_url, kafka_bootstrap_servers=kafka, **SETTINGS
                )
                | {"BANK_FOLDER": str(self._folder), "BANK_LOOKS": "0.2"},
                log=self.servers.logs / f"{self.bank.name}-{uuid4().hex[:4]}",
                cwd=HOME,
            )
            self.processes.append(process)
            if wire is not None:
                wire.lead_to(lambda: process.send(signal.SIGKILL))
            try:
                yield process
            finally:
                await process.kill()

    @property
    def _folder(self) -> Path:
        """Where payloads are kept that are too large to travel."""
        folder = self.servers.logs / f"{self.bank.name}-folder"
        folder.mkdir(exist_ok=True)
        return folder

    async def _through(self, wire: Wire, stack: AsyncExitStack) -> tuple[str, str]:
        """Return the URL and the bootstrap server that lead through the wire."""
        url = make_url(self.database_url)
        assert url.host
        assert url.port
        host, _, port = self.servers.kafka.rpartition(":")
        postgres = await wire.serve(stack, url.host, url.port, lambda _: Postgres())
        kafka = await wire.serve(
            stack, host, int(port), lambda ours: Kafka(host, int(port), ours=ours)
        )
        readable = url.set(port=postgres, query={"ssl": "disable"})
        return readable.render_as_string(hide_password=False), f"{host}:{kafka}"

    async def send_deposits(self) -> None:
        """Send some to every partition: one again at once, others in a later batch or much later.

        Most of them are in the topic before the service can take the first.
        """
        await asyncio.gather(*(self._send_deposits(partition) for partition in self.sent))

    async def _send_deposits(self, partition: int) -> None:
        last = self._last(partition)
        a, b, c, d, e, f, g, h = range(last + 1, last + 9)
        oldest = [1, 2] if last else []
        for number in (a, b, c, b, d, a, e, f, *oldest, g, h, d):
            await self._send(number, partition)

    async def send_a_note(self) -> None:
        """Send an event that changes and tells nothing."""
        await self._send(self._last(0) + 1, 0, type="noted")

    async def send_a_pair(self) -> None:
        """Send a deposit to each partition in one request, so that they share a transaction."""
        await asyncio.gather(*(self._send(self._last(one) + 1, one) for one in self.sent))

    async def send_a_promise(self) -> None:
        """Send an event that schedules another."""
        await self._send(self._last(0) + 1, 0, type="promised")

    def _last(self, partition: int) -> int:
        return max((one.amount for one in self.sent[partition]), default=0)

    async def _send(self, number: int, partition: int, type: str = "deposited") -> None:
        one = Deposit(
            number,
            account=f"{partition}-{number % 2}",
            id=f"{partition}-{number}",
            type=type,
            partition=partition,
            failures=_FAILURES.get((partition, number % 8), 0) if type == "deposited" else 0,
            headers=_LONG_PAST if number % 8 == 5 else (),
        )
        await one.send(self.producer, self.bank.deposits)
        self.sent[partition].append(one)

    @asynccontextmanager
    async def holding_the_accounts(self) -> AsyncIterator[None]:
        """Let nobody create an account inside the block."""
        other = await asyncpg.connect(self.database_url.replace("+asyncpg", ""))
        transaction = other.transaction()
        await transaction.start()
        await other.execute(_CREATE_THE_ACCOUNTS)
        try:
            yield
        finally:
            await transaction.rollback()
            await other.close()

    @asynccontextmanager
    async def holding_relays_back(self) -> AsyncIterator["LetGo"]:
        """Let no relay get past a transaction that could still commit, until told to let go.

        Days that are to be dropped are held back as well.
        """
        other = await asyncpg.connect(self.database_url.replace("+asyncpg", ""))
        transaction = other.transaction()
        await transaction.start()
        await other.execute("SELECT pg_current_xact_id()")
        try:
            yield transaction.rollback
        finally:
            await other.close()

    async def stage_what_is_refused(self) -> None:
        """Stage events for the topic that is missing, of which one is too large for it then."""
        large = event(self.late, "late-0", payload=b" " * 9_000 + b"{}")
        others = [event(self.late, "late-1"), event(self.late, "late-2", "bob")]
        await stage(self.db, [large, *others])

    async def refuse_less(self) -> None:
        """Create the topic when all wait for it; let it take the large one when that is dead."""
        rejected = await self._rejected()
        if len(rejected) == 4 and self.allowed == 0:
            await self._allow(4_000)
        elif rejected.get("late-0") and self.allowed == 4_000:
            await self._allow(100_000)
        if self.allowed == 100_000:
            await redrive(self.db)

    async def _allow(self, size: int) -> None:
        # With its limit from the start: else what is too large might slip through.
        limit = {"max.message.bytes": str(size)}
        await self.servers.admin.create_topics([NewTopic(self.late, 1, 1, topic_configs=limit)])
        await allow(self.servers.kafka, self.late, size)
        self.allowed = size

    async def _rejected(self) -> dict[str, bool]:
        """Return the events that Kafka rejects, and whether each is dead."""
        rows = await self.db.fetch("SELECT event_id, died_at FROM pipeline.outbox_rejected")
        return {row["event_id"]: row["died_at"] is not None for row in rows}

    async def set_back(self) -> None:
        """Let a partition begin anew, as after a restore: all its records come again."""
        await self.db.execute("UPDATE pipeline.position SET next_offset = 0 WHERE partition = 0")

    async def pause_a_little(self) -> None:
        """Pause and throttle what goes on by itself in a moment: the key after its consumer."""
        deposits, balances = self.bank.deposits, self.bank.balances
        paused = [
            Subject("consumer", "deposit"),
            Subject("consumer", "tell"),
            Subject("events", balances),
        ]
        for subjects, rate, seconds in (
            ([Subject("key", "deposit", deposits, b"0-1")], 0.0, 3),
            ([Subject("topic", deposits)], 200.0, 2),
            (paused, 0.0, 2),
        ):
            await stopping.ask(
                self.db,
                subjects,
                per_second=rate,
                lasts=timedelta(seconds=seconds),
                who="ada",
                why="to see what happens",
            )

    async def note_the_pauses(self) -> None:
        """Let the audit find what is taken from now on until they end, if they have not yet.

        All must be done, and known to every process.
        """
        self.pauses += [Pause(*row) for row in await self.db.fetch(_PAUSES)]

    @property
    def has_paused(self) -> bool:
        """Whether the audit finds what is taken of each kind: a busy machine may be too slow."""
        return {one.kind for one in self.pauses} == {"consumer", "events", "key"}

    async def is_settled(self) -> bool:
        """Whether all that was sent is applied or dead, and all that was staged is in Kafka."""
        return (
            await self._positions() == self._ends
            and not await self.db.fetchval(_SOMETHING_WAITS)
            and await self._staged() <= set(self.tail.ids)
            and await all_is_written(self.db)
            and not await self._rejected()
        )

    @property
    def _ends(self) -> dict[int, int]:
        return {partition: len(sent) for partition, sent in self.sent.items()}

    async def _positions(self) -> dict[int, int]:
        rows = await self.db.fetch("SELECT partition, next_offset FROM pipeline.position")
        return {row["partition"]: row["next_offset"] for row in rows}

    async def _staged(self) -> set[str]:
        rows = await self.db.fetch(
            "SELECT event_id FROM pipeline.outbox WHERE topic = $1", self.bank.balances
        )
        return {row["event_id"] for row in rows}

    async def is_left_alone(self) -> bool:
        """Whether nobody but the test is connected, and nobody holds a shard or a lane."""
        return bool(await self.db.fetchval(_IS_LEFT_ALONE))

    async def recover(self) -> None:
        """Run the service again until it has done what was left and more, and stop it."""
        generation = await self._generation()

        async def rotates() -> bool:
            return await self._generation() > generation

        async def owns_all_shards() -> bool:
            return bool(await self.db.fetchval(_SHARDS_ARE_OF_ONE_ALIVE))

        async def settles() -> bool:
            await self.refuse_less()
            return await self.is_settled()

        async def nothing_is_left_of_the_past() -> bool:
            return not await self.db.fetchval(_PAST)

        async with self.running() as process:
            await self.send_deposits()
            await self.send_a_promise()
            await self._allow(100_000)
            await eventually(settles, PATIENCE)
            await eventually(rotates, PATIENCE)
            await eventually(nothing_is_left_of_the_past, PATIENCE)
            await eventually(owns_all_shards, PATIENCE)
            process.send(signal.SIGTERM)
            assert await process.ended() == 0
        await eventually(self.is_left_alone, PATIENCE)

    async def _generation(self) -> int:
        current: int = await self.db.fetchval("SELECT current FROM pipeline.inbox_generation")
        return current

    @property
    def _sent_once(self) -> list[Deposit]:
        return list(dict.fromkeys(one for sent in self.sent.values() for one in sent))

    @property
    def _refused(self) -> set[Deposit]:
        """What can only be a dead letter in the end."""
        return {one for one in self._sent_once if one.failures == _FOR_GOOD}

    async def audit(self) -> None:
        """Compare what was sent with every table, and with what was published."""
        applied: dict[str, list[int]] = defaultdict(list)
        for one in self._sent_once:
            if one.type == "deposited" and one not in self._refused:
                applied[one.account].append(one.amount)
        await self._audit_the_tables(applied)
        await self._audit_the_topic(applied)
        await self._audit_the_late_topic()
        await self._audit_the_calls()
        await self._audit_the_folder()
        await self._audit_the_pauses()
        committed = await self.servers.admin.list_consumer_group_offsets(self.bank.name)
        assert {one.partition: offset.offset for one, offset in committed.items()} == self._ends

    async def _audit_the_tables(self, applied: Mapping[str, list[int]]) -> None:
        found = await histories(self.db)
        assert found == applied, (found, applied)
        accounts = await self.db.fetch("SELECT id, balance, version FROM account")
        assert {row["id"]: (row["balance"], row["version"]) for row in accounts} == {
            account: (sum(amounts), len(amounts)) for account, amounts in applied.items()
        }
        markers = await self.db.fetch("SELECT id FROM pipeline.inbox WHERE topic <> $1", CALLS)
        ids = {one.id for one in self._sent_once if one not in self._refused}
        assert sorted(row["id"] for row in markers) == sorted(map(str, ids))
        backlog = await self.db.fetch("SELECT id, reason, attempts FROM pipeline.backlog")
        assert sorted(tuple(row) for row in backlog) == sorted(
            (one.id, "attempts used up", ATTEMPTS) for one in self._refused
        )
        assert await self._positions() == self._ends
        assert await self.db.fetchval("SELECT max(starts) FROM pipeline.position") == 0
        assert await self.db.fetchval(_HALF_MADE_TABLES) == 0

    async def _audit_the_topic(self, applied: Mapping[str, list[int]]) -> None:
        first: dict[str, ConsumerRecord] = {}
        for record in self.tail.records:
            original = first.setdefault(id_of(record), record)
            assert _contents(record) == _contents(original), "a repeat is the same in every byte"
        assert set(first) == await self._staged()
        told: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        reminders = [one for one in first.values() if one.key == b"promise"]
        promised = [one for one in self._sent_once if one.type == "promised"]
        assert len(reminders) == len(promised)
        for record in first.values():
            if record in reminders:
                continue
            event = json.loads(record.value)
            sequence = int(dict(record.headers)["ce_sequence"])
            told[record.key.decode()].append((sequence, event["amount"], event["balance"]))
        assert told == {
            account: [
                (place, amount, sum(amounts[:place])) for place, amount in enumerate(amounts, 1)
            ]
            for account, amounts in applied.items()
        }

    async def _audit_the_calls(self) -> None:
        """Each promise has its one call, which is done."""
        promised = sum(one.type == "promised" for one in self._sent_once)
        done = await self.db.fetchval("SELECT count(*) FROM pipeline.inbox WHERE topic = $1", CALLS)
        assert done == promised > 0

    async def _audit_the_folder(self) -> None:
        """Each event that refers to its data has it; what a dead process has kept may be more."""
        events = await self.db.fetch(
            "SELECT event_id FROM pipeline.outbox WHERE dataref IS NOT NULL"
        )
        claims = await self.db.fetch("SELECT name, event_id FROM pipeline.claim")
        assert sorted(row["event_id"] for row in claims) == sorted(
            row["event_id"] for row in events
        )
        assert events, "every reminder is large"
        assert {row["name"] for row in claims} <= {path.name for path in self._folder.iterdir()}

    async def _audit_the_pauses(self) -> None:
        """Nothing was taken of what was paused, also by a process that began meanwhile."""
        for pause in self.pauses:
            taken = await self.db.fetch(_TAKEN, *pause)
            assert taken == [], (pause, taken)
            if pause.kind == "events":
                sent = [one for one in self.tail.records if _was_sent(one, pause)]
                assert sent == [], (pause, sent)

    async def _audit_the_late_topic(self) -> None:
        async with following(self.servers.kafka, self.late) as tail:
            await tail.until_ids(["late-0", "late-1", "late-2", "long-ago"])
        # The large one is dead in between, unless the topic takes it as soon as it is created.
        first = {key: sorted(ids) for key, ids in tail.first_ids().items()}
        assert first == {b"ada": ["late-0", "late-1"], b"bob": ["late-2"], b"eve": ["long-ago"]}


def _contents(record: ConsumerRecord) -> tuple[object, ...]:
    return record.partition, record.key, record.value, record.headers


def _was_sent(record: ConsumerRecord, pause: Pause) -> bool:
    """Return whether a record was surely made during a pause: it has a time in milliseconds."""
    made = datetime.fromtimestamp(record.timestamp / 1_000, UTC)
    return pause.since <= made and made + timedelta(milliseconds=1) <= pause.until
