"""Deliberate faults of the engine, each with a round that must find it.

A sabotage replaces text of the baked service's engine. A text that is not there any more is an
error: then the engine has changed, and its sabotage must follow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chaos.edit import Edit
from chaos.errands import Work
from chaos.plan import Plan
from chaos.poison import LATE, TALLY
from chaos.round import CONSUMERS, RELAYS
from chaos.schedule import (
    EVERYBODY,
    MODES,
    PAUSED_CONSUMER,
    PAUSED_EVENTS,
    PAUSED_KEY,
    PAUSED_TOPIC,
    THROTTLED_TOPIC,
    Fault,
)
from demo.witness import TOPIC

PATIENCE = 15.0
"""Seconds: no round here has a fault that takes longer to be noticed."""


@dataclass(frozen=True)
class Load:
    """What provokes a fault: a feed and faults around it, the same for every seed."""

    events: int
    seconds: float
    schedule: Sequence[Fault]
    parcels: int = 0
    repeats: float = 0.05
    within: int = 0
    strays: float = 0.1
    poison: float = 0.0
    kinds: Sequence[str] = ()
    after_death: str = "go on"
    settings: Mapping[str, str] = field(default_factory=dict)
    errands: Sequence[Work] = ()

    def plan(self, seed: int) -> Plan:
        """Return the round."""
        return Plan(
            events=self.events,
            seconds=self.seconds,
            seed=seed,
            schedule=self.schedule,
            parcels=self.parcels,
            repeats=self.repeats,
            within=self.within,
            strays=self.strays,
            poison=self.poison,
            kinds=self.kinds,
            after_death=self.after_death,
            settings=self.settings,
            errands=self.errands,
            patience=PATIENCE,
        )


@dataclass(frozen=True)
class Sabotage:
    """An engine that is wrong in one way."""

    name: str
    load: str
    """The one of `LOADS` that provokes it."""
    edits: Sequence[Edit]


def _slow(seconds: float, latency: float = 0.05) -> Fault:
    """Make transactions last: everybody's every round trip to the database takes longer."""
    return Fault(0.0, "delay", EVERYBODY, seconds, "postgres", latency)


def _taking_turns(names: Sequence[str], *, every: float, until: float) -> list[tuple[float, str]]:
    return [
        (round(1 + number * every, 2), names[number % len(names)])
        for number in range(int((until - 1) / every))
    ]


MANY_GENERATIONS = {
    "PIPELINE_INBOX_GENERATION_AGE": "0.5",
    "PIPELINE_RETENTION_INTERVAL": "0.5",
}

LOADS: Mapping[str, Load] = {
    "slow transactions": Load(events=4_000, seconds=10, schedule=[_slow(10)]),
    "lost connections": Load(
        events=4_000,
        seconds=12,
        schedule=[
            _slow(12, latency=0.02),
            *(
                Fault(at, "cut", name, server="postgres")
                for at, name in _taking_turns(CONSUMERS, every=0.7, until=12)
            ),
        ],
    ),
    "killed relays": Load(
        events=4_000,
        seconds=16,
        schedule=[
            # Whoever is killed has something under way.
            *(Fault(0.0, "delay", name, 16, "kafka", 0.15) for name in RELAYS),
            *(
                Fault(at, "kill", name, seconds=0.1)
                for at, name in _taking_turns(RELAYS, every=2.5, until=16)
            ),
        ],
    ),
    "a broker that is away": Load(
        events=4_000,
        seconds=16,
        schedule=[
            Fault(3, "broker", "kafka", 2.0, hard=True),
            *(
                Fault(at, "partition", name, 1.5, "kafka")
                for at, name in _taking_turns(RELAYS, every=2.2, until=16)
            ),
        ],
        parcels=10,
        repeats=0.0,
        strays=0.0,
    ),
    "relays that wake up late": Load(
        events=4_000,
        seconds=18,
        schedule=[Fault(3, "pause", RELAYS[0], 4.0), Fault(9, "pause", RELAYS[1], 4.0)],
    ),
    "a consumer that does not know it was replaced": Load(
        events=12_000,
        seconds=8,
        schedule=[
            _slow(16, latency=0.03),
            *(Fault(3, "partition", name, 8.0, "kafka") for name in CONSUMERS[:1]),
        ],
        repeats=0.0,
        strays=0.0,
    ),
    "the same events in two partitions": Load(
        events=2_000,
        seconds=12,
        schedule=[_slow(12)],
        repeats=0.0,
        strays=1.0,
        settings={
            "PIPELINE_INBOX_GENERATION_AGE": "0.3",
            "PIPELINE_RETENTION_INTERVAL": "0.3",
        },
    ),
    "the same events again": Load(
        events=4_000,
        seconds=12,
        schedule=[],
        repeats=0.3,
        settings={"PIPELINE_INBOX_GENERATION_AGE": "2"},
    ),
    "busy parcels that fail": Load(
        events=2_000,
        seconds=10,
        schedule=[_slow(10, latency=0.01)],
        parcels=40,
        repeats=0.2,
        strays=0.0,
        poison=0.1,
        kinds=("raises", "parks"),
    ),
    "calls that are undone in memory": Load(
        events=2_000,
        seconds=10,
        schedule=[_slow(10, latency=0.01)],
        parcels=40,
        strays=0.0,
        poison=0.1,
        kinds=[one.kind for one in LATE],
    ),
    "an audit of every version": Load(
        events=2_000,
        seconds=10,
        # Here each message takes round trips of its own.
        schedule=[_slow(10, latency=0.002)],
        parcels=10,
        strays=0.0,
        poison=0.05,
        kinds=[one.kind for one in LATE],
        errands=("audit",),
    ),
    "connections lost under handlers": Load(
        events=2_000,
        seconds=14,
        schedule=[
            _slow(14, latency=0.01),
            *(
                Fault(at, "cut", name, server="postgres")
                for at, name in _taking_turns(CONSUMERS, every=0.8, until=14)
            ),
        ],
        poison=0.4,
        kinds=("asks",),
    ),
    "workers that wake up late": Load(
        events=4_000,
        seconds=20,
        schedule=[
            _slow(20, latency=0.01),
            *(
                Fault(at, "pause", name, 9.0)
                for at, name in zip((3.0, 5.0, 15.0), CONSUMERS, strict=True)
            ),
        ],
        settings={"PIPELINE_BACKLOG_LEASE": "3.2"},
    ),
    "tables that are locked": Load(
        events=2_000,
        seconds=14,
        schedule=[Fault(at, "locked", "postgres", 6.0) for at in (2.0, 9.0)],
        # So a message alone meets the lock more often than it has attempts.
        settings={"PIPELINE_LOCK_TIMEOUT": "0.3"},
    ),
    "a column renamed under few keys": Load(
        events=1_500,
        seconds=16,
        schedule=[Fault(at, "renamed", "postgres", 4.0) for at in (3.0, 9.5)],
        # Too few for the breaker, which spends no attempt either.
        parcels=8,
        strays=0.0,
    ),
    "connections that do not answer": Load(
        events=200,
        seconds=24,
        # Each scan is alone in its transaction, so that a failure would count. The partition
        # outlasts the transaction's time limit, the end of its connection, and the probe after it.
        # The server dies before it ends: a transaction that had begun meanwhile would go on too
        # late, when the probe succeeds again.
        schedule=[
            _slow(24, latency=0.02),
            *(Fault(5, "partition", name, 14.0, "postgres") for name in CONSUMERS),
            Fault(17, "database", "postgres", 4.0, hard=True),
        ],
        strays=0.0,
        poison=1.0,
        kinds=(f"dawdles {TALLY}",),
        # No lane is lost meanwhile, which would excuse an attempt.
        settings={"PIPELINE_BACKLOG_LEASE": "30"},
        errands=("apart",),
    ),
    "sessions that are misused": Load(
        events=2_000,
        seconds=12,
        schedule=[_slow(12, latency=0.01)],
        strays=0.0,
        poison=0.1,
        kinds=("blames", "remembers", "ends"),
    ),
    "generations that are forgotten": Load(
        events=2_000,
        seconds=24,
        schedule=[Fault(1, "rotation", "postgres", 25)],
        repeats=0.5,
        within=700,
        settings=MANY_GENERATIONS,
    ),
    "days that end": Load(
        events=2_000,
        seconds=18,
        # Nobody publishes while the day ends, nor until retention has come by.
        schedule=[
            *(Fault(at - 0.5, "pause", name, 4.5) for at in (3, 9, 15) for name in RELAYS),
            *(Fault(at, "retention", "postgres") for at in (3, 9, 15)),
        ],
        settings={"PIPELINE_RETENTION_INTERVAL": "0.3"},
    ),
    "a topic that is read again": Load(
        events=1_500,
        seconds=12,
        schedule=[
            Fault(at, "replay", name, 12.0)
            for at, name in zip((5.0, 8.0, 11.0), CONSUMERS, strict=True)
        ],
        repeats=0.0,
        poison=0.05,
        kinds=("raises",),
        settings=MANY_GENERATIONS,
    ),
    "an outside that fails": Load(
        events=4_000,
        seconds=16,
        schedule=[
            Fault(at, "effects", mode, 2.0)
            for at, mode in zip((2.0, 5.0, 8.0, 11.0), MODES, strict=True)
        ],
        parcels=100,
        strays=0.0,
    ),
    "moves that are ended": Load(
        events=3_000,
        seconds=20,
        schedule=[
            *(Fault(0.0, "delay", name, 24, "postgres", 0.05) for name in RELAYS),
            *(Fault(at, "scheduled", "postgres", 3.0) for at in (3.0, 9.0, 15.0)),
        ],
        parcels=200,
    ),
    "a log that nothing reads": Load(
        events=2_000,
        seconds=18,
        schedule=[Fault(3, "unread", CONSUMERS[0], 12.0)],
        # Each is a line of the log.
        poison=0.1,
        kinds=("rejects",),
    ),
    "clients that say nothing": Load(
        events=1_500,
        seconds=16,
        schedule=[Fault(2, "clients", CONSUMERS[0], 12.0)],
    ),
    "a copy beside the database": Load(
        events=2_000,
        seconds=40,
        # Its processes take a while to start.
        schedule=[Fault(4, "copy", "postgres", 10.0)],
        errands=("effects", "scheduled"),
    ),
    "a topic that refuses": Load(
        events=3_000,
        seconds=28,
        schedule=[Fault(at, "refused", TOPIC, 6.0) for at in (3.0, 15.0)],
        parcels=100,
        strays=0.0,
        errands=("scheduled",),
    ),
    "a tail that is lost": Load(
        events=3_000,
        seconds=40,
        schedule=[Fault(4, "tail", "kafka", 4.0)],
    ),
    # The feed goes on until it is resumed.
    **{
        stopped: Load(
            events=3_000,
            seconds=40,
            schedule=[Fault(3, "stopped", stopped, 10.0)],
            parcels=40,
            strays=0.0,
        )
        for stopped in (
            PAUSED_TOPIC,
            THROTTLED_TOPIC,
            PAUSED_CONSUMER,
            PAUSED_EVENTS,
            PAUSED_KEY,
        )
    },
}

NO_IDEMPOTENCE = (
    Edit("relay/publisher.py", "=self._settings.relay_idempotent", "=False"),
    # Or it would try again for 40 s before it fails.
    Edit("relay/publisher.py", 'acks="all",', 'acks="all", request_timeout_ms=500,'),
)

SABOTAGES: Sequence[Sabotage] = (
    Sabotage(
        "position moves before the transaction",
        "lost connections",
        [
            Edit(
                "apply/transactions.py",
                """\
        generations = await source.begin(driver)
""",
                """\
        from onceward.servers.database import autocommitting
        async with autocommitting(self.engine) as elsewhere:
            generations = await source.begin(elsewhere)
""",
            )
        ],
    ),
    Sabotage(
        "markers commit separately",
        "lost connections",
        [
            Edit(
                "apply/transactions.py",
                """\
        found = await look_up(driver, """,
                """\
        from onceward.servers.database import autocommitting
        async with autocommitting(self.engine) as elsewhere:
          found = await look_up(elsewhere, """,
            )
        ],
    ),
    Sabotage(
        "outbox rows commit separately",
        "lost connections",
        [
            Edit(
                "apply/runs.py",
                "    if not await outbox.write(driver) and outcome.applied",
                """\
    from onceward.servers.database import autocommitting
    async with autocommitting(attempt.connection.engine) as elsewhere:
        wrote = await outbox.write(elsewhere)
    if not wrote and outcome.applied""",
            ),
            Edit("handlers/staging.py", "if not connection.is_in_transaction():", "if False:"),
        ],
    ),
    Sabotage(
        "no look-up in closed generations",
        "the same events again",
        [Edit("apply/inbox.py", "if generations.oldest < generations.current:", "if False:")],
    ),
    Sabotage(
        "generation closed without the lock",
        "the same events in two partitions",
        [
            Edit(
                "retention/statements.py",
                "{IDLE_LIMIT}, pg_advisory_xact_lock($1)",
                "{IDLE_LIMIT}, $1::bigint",
            )
        ],
    ),
    Sabotage(
        "position not compared, markers ignored",
        "a consumer that does not know it was replaced",
        [
            Edit(
                "apply/statements.py",
                "AND position.next_offset = move.fetched_from\n    RETURNING 1",
                "AND move.fetched_from IS NOT NULL\n    RETURNING 1",
            ),
            Edit("apply/inbox.py", "if item.key not in known}", "if known is not None}"),
        ],
    ),
    Sabotage(
        "relay's cursor is an id",
        "slow transactions",
        [
            Edit(
                "relay/window.py",
                """\
    head, *events = await connection.fetch(
        statements.READ_WINDOW,""",
                """\
    later = await connection.fetch(
        f"SELECT {statements.COLUMNS} FROM pipeline.outbox"
        " WHERE id > $1 AND shard = ANY ($2) ORDER BY id LIMIT $3",
        progress.last_id, shards, limit,
    )
    then = replace(progress, last_id=later[-1]["id"]) if later else progress
    return Page(shards, later, then, None)
    head, *events = await connection.fetch(
        statements.READ_WINDOW,""",
            )
        ],
    ),
    Sabotage(
        "snapshot without running transactions",
        "slow transactions",
        [
            Edit(
                "relay/statements.py",
                "AND xid = ANY (ARRAY(",
                "AND false AND xid = ANY (ARRAY(",
            )
        ],
    ),
    Sabotage(
        "cursor moves before the acknowledgement",
        "killed relays",
        [
            Edit(
                "relay/relay.py",
                "                await self._publish(driver, events, then)\n",
                """\
                for one in pages:
                    cursor.advance(one)
                await cursor.write_moved(driver)
                await self._publish(driver, events, then)
""",
            )
        ],
    ),
    Sabotage(
        "relay passes a failed send",
        "a broker that is away",
        [
            *NO_IDEMPOTENCE,
            Edit(
                "relay/publisher.py",
                """\
                    raise NotSent(f"{topic}/{chain.partition}: {describe_error(error)}") from error
""",
                """\
                    chain.take(count)
                    continue
""",
            ),
        ],
    ),
    Sabotage(
        "failed batch sent again behind later ones",
        "a broker that is away",
        [
            *NO_IDEMPOTENCE,
            Edit(
                "relay/publisher.py",
                "        while chain.sent < len(chain.events):\n",
                """\
        waiting = chain.events
        while waiting:
            failed = []
            for event in waiting:
                batch, _ = Chain(topic, chain.partition, [event]).fill(producer)
                try:
                    await (await producer.send_batch(batch, topic, partition=chain.partition))
                except KafkaError:
                    failed.append(event)
            waiting = failed
        chain.sent = len(chain.events)
        while chain.sent < len(chain.events):
""",
            ),
        ],
    ),
    Sabotage(
        "lease without token and deadline",
        "relays that wake up late",
        [
            Edit("relay/statements.py", " AND cursor.token = mine.token", ""),
            Edit("relay/cursor.py", "return monotonic() < self._lease_ends", "return True"),
        ],
    ),
    Sabotage(
        "a retry does not park followers",
        "busy parcels that fail",
        [
            Edit(
                "apply/inbox.py",
                "if decision is None and behind and item.order_key in behind:",
                "if decision is None and behind and item.order_key is None:",
            )
        ],
    ),
    Sabotage(
        "parked follower not due",
        "busy parcels that fail",
        [
            Edit(
                "apply/statements.py",
                "reason, attempts, waited, clock_timestamp() + make_interval(secs => due_in),",
                """\
reason, attempts, waited,
       CASE WHEN reason <> 'follows another'
            THEN clock_timestamp() + make_interval(secs => due_in) END,""",
            )
        ],
    ),
    Sabotage(
        "no marker after the backlog",
        "busy parcels that fail",
        [
            Edit(
                "apply/transactions.py",
                "        died = await source.settle(driver, outcome)\n",
                """\
        applied = [item.key for item in outcome.applied if item.row]
        await inbox.unmark(driver, generations, applied)
        died = await source.settle(driver, outcome)
""",
            )
        ],
    ),
    Sabotage(
        "an outage spends an attempt",
        "connections lost under handlers",
        [
            Edit(
                "apply/transactions.py",
                "                        left += self._divided(piece, rung + 1)\n",
                """\
                        for item in piece.items if result.is_lost else ():
                            spent = RolledBack(result.error)
                            memory.decisions[item.key] = decide_alone(item, spent)
                        left += self._divided(piece, rung + 1)
""",
            ),
        ],
    ),
    Sabotage(
        "neighbours of a failing message are blamed",
        "busy parcels that fail",
        [
            Edit(
                "apply/runs.py",
                """\
            if len(run) > 1:
                runs.failed(run, failure.items)
                continue
            decide_isolated(run[0], failure, outcome)
""",
                """\
            for one in run:
                decide_isolated(one, failure, outcome)
""",
            )
        ],
    ),
    Sabotage(
        "what a failed call has changed stays",
        "calls that are undone in memory",
        [
            Edit(
                "handlers/rows.py",
                """\
        for state, before in self._before.items():
            before.restore(state, known)
""",
                "",
            )
        ],
    ),
    Sabotage(
        "only the last version of a row is written",
        "an audit of every version",
        [
            Edit(
                "handlers/writes.py",
                "if not (reactions or self.each or has_new_key):",
                "if not has_new_key:",
            )
        ],
    ),
    Sabotage(
        "a lock spends an attempt",
        "tables that are locked",
        [Edit("apply/failures.py", "reason=LOCKED_OUT, is_free=True", "reason=LOCKED_OUT")],
    ),
    Sabotage(
        "what the catalog lacks spends attempts",
        "a column renamed under few keys",
        [Edit("handlers/policy.py", "isinstance(as_raised(one), MISSING)", "False")],
    ),
    Sabotage(
        "the probe always succeeds",
        "connections that do not answer",
        [Edit("servers/probe.py", "await _write(self._engine)", "pass")],
    ),
    Sabotage(
        "own transactions are shared",
        "connections that do not answer",
        [
            Edit(
                "apply/transactions.py",
                "for one in handlers if one.own_transaction}",
                "for one in handlers if False}",
            )
        ],
    ),
    Sabotage(
        "an error's class is an outage, whatever the probe says",
        "sessions that are misused",
        [Edit("apply/transactions.py", "return asked > 1", "return True")],
    ),
    Sabotage(
        "connections remember earlier messages",
        "sessions that are misused",
        [
            Edit(
                "handlers/statements.py",
                """\
RESET ALL; RESET SESSION AUTHORIZATION; RESET ROLE; CLOSE ALL; UNLISTEN *; DISCARD TEMP;
SELECT pg_advisory_unlock_all()
""",
                "SELECT\n",
            )
        ],
    ),
    Sabotage(
        "the transaction that was begun may be another one",
        "sessions that are misused",
        [Edit("handlers/sessions.py", "{statements.CHECK_GUARD}; ", "")],
    ),
    Sabotage(
        "lane's worker checks neither token nor markers",
        "workers that wake up late",
        [
            Edit(
                "retry/statements.py",
                "AS own (lane, token) USING (lane, token)",
                "AS own (lane, their_token) USING (lane)",
            ),
            Edit(
                "apply/inbox.py",
                "if item.key not in known}",
                "if item.key not in known or item.row}",
            ),
        ],
    ),
    Sabotage(
        "younger generations forgotten with an old one",
        "generations that are forgotten",
        [Edit("retention/statements.py", "SET oldest = last + 1,", "SET oldest = current,")],
    ),
    Sabotage(
        "generation dropped before it is forgotten",
        "generations that are forgotten",
        [
            Edit(
                "retention/generations.py",
                'if number < generation["oldest"]:',
                'if number < generation["current"]:',
            )
        ],
    ),
    Sabotage(
        "closed generations are not searched",
        "generations that are forgotten",
        [
            Edit(
                "apply/inbox.py",
                "if generations.oldest < generations.current:",
                "if False:",
            )
        ],
    ),
    Sabotage(
        "day dropped although unpublished",
        "days that end",
        [Edit("retention/days.py", "    if not unfinished:\n", "    if True:\n")],
    ),
    Sabotage(
        "relay ignores past days",
        "days that end",
        [
            Edit(
                "relay/statements.py",
                "         WHERE {_BEGUN_SINCE} AND shard = ANY ($2)\n        UNION ALL\n",
                """\
         WHERE {_BEGUN_SINCE} AND shard = ANY ($2)
           AND created_at >= date_trunc('day', clock_timestamp(), 'UTC')
        UNION ALL
""",
            )
        ],
    ),
    Sabotage(
        "repeated messages not looked up in the backlog",
        "a topic that is read again",
        [
            Edit(
                "consume/partition_source.py",
                "        return await backlog.find(connection, items)\n",
                """\
        _, waiting = await backlog.find(connection, items)
        return {}, waiting
""",
            )
        ],
    ),
    Sabotage(
        "only the youngest closed generation looked up",
        "a topic that is read again",
        [
            Edit(
                "apply/inbox.py",
                "closed = generations.oldest, generations.current",
                "closed = generations.current - 1, generations.current",
            )
        ],
    ),
    Sabotage(
        "effect settled before its call",
        "an outside that fails",
        [
            Edit(
                "effects/workers.py",
                "            call = self._call(lease, item, noted_at=",
                """\
            await self._settle_together(lease, [CallResult(item)])
            call = self._call(lease, item, noted_at=""",
            )
        ],
    ),
    Sabotage(
        "call repeated without a query",
        "an outside that fails",
        [
            Edit(
                "effects/calls.py",
                "return item.reason == UNKNOWN and not Effect.of(item).is_repeatable",
                "return False",
            )
        ],
    ),
    Sabotage(
        "call does not wait for its predecessor",
        "an outside that fails",
        [
            Edit(
                "effects/workers.py",
                "heads = [items[0] for key, items in of_keys.items() if key not in calls]",
                "heads = [items[-1] for key, items in of_keys.items() if key not in calls]",
            )
        ],
    ),
    Sabotage(
        "scheduled events deleted before their move",
        "moves that are ended",
        [
            Edit(
                "relay/scheduled.py",
                """\
done = await connection.execute(statements.MOVE_SCHEDULED, _AT_ONCE)
                    moved = int(done.split()[-1])""",
                """\
from onceward.handlers.staged import StagedEvent
                    from onceward.handlers.staging import append
                    due = await connection.fetch(
                        "DELETE FROM pipeline.scheduled WHERE name IN ("
                        " SELECT name FROM pipeline.scheduled WHERE due_at <= now()"
                        " ORDER BY due_at, scheduled_at, name LIMIT $1 FOR UPDATE SKIP LOCKED)"
                        " RETURNING *", _AT_ONCE
                    )
                    due.sort(key=lambda one: (one["due_at"], one["scheduled_at"]))
                    await connection.execute("COMMIT")
                    await connection.execute("BEGIN")
                    await connection.fetchval(statements.LOCK_MOVE, MOVE_LOCK)
                    await connection.execute("SELECT pg_sleep(0.5)")
                    await append(
                        connection,
                        [StagedEvent(*(one[n] for n in StagedEvent._fields)) for one in due],
                    )
                    moved = len(due)""",
            )
        ],
    ),
    Sabotage(
        "scheduled event moved early",
        "moves that are ended",
        [
            Edit(
                "relay/statements.py",
                "SELECT min(due_at) <= now() FROM",
                "SELECT min(due_at) <= now() + interval '1.5 s' FROM",
            ),
            Edit(
                "relay/statements.py",
                "                     WHERE due_at <= now()\n",
                "                     WHERE due_at <= now() + interval '1.5 s'\n",
            ),
        ],
    ),
    Sabotage(
        "a line is written by whoever logs it",
        "a log that nothing reads",
        [Edit("runtime.py", "queues=True", "queues=False")],
    ),
    Sabotage(
        "health port serves any number of requests",
        "clients that say nothing",
        [Edit("observe/health.py", "MOST_REQUESTS = 32\n", "MOST_REQUESTS = 10_000\n")],
    ),
    Sabotage(
        "a database that is copied within its server is the same",
        "a copy beside the database",
        [
            Edit(
                "servers/statements.py",
                """
         JOIN pg_database ON pg_database.oid = database_oid
        WHERE datname = current_database())""",
                ")",
            )
        ],
    ),
    Sabotage(
        "events do not wait behind others of their topic",
        "a topic that refuses",
        [Edit("relay/rejected.py", "topic in self._try_at or topic in self", "topic in self")],
    ),
    Sabotage(
        "a topic that refuses is an outage",
        "a topic that refuses",
        [
            Edit(
                "relay/rejections.py",
                "errors.BrokerResponseError: _REFUSES",
                "errors.BrokerResponseError: None",
            )
        ],
    ),
    Sabotage(
        "what was read last is not compared",
        "a tail that is lost",
        [
            Edit(
                "consume/position.py",
                "if (found or is_due) and found != [(anchor.offset, anchor.hash)]:",
                "if False:",
            )
        ],
    ),
    Sabotage(
        "a topic that is paused is read",
        PAUSED_TOPIC,
        [
            Edit(
                "consume/limits.py",
                'is_paused = self._throttles.left("topic", self._topic) == math.inf',
                "is_paused = False",
            )
        ],
    ),
    Sabotage(
        "a process does not know what others have taken",
        THROTTLED_TOPIC,
        [
            Edit(
                "apply/statements.py",
                "AND subject = $2 AND per_second > 0",
                "AND subject = $2 AND per_second < 0",
            )
        ],
    ),
    Sabotage(
        "a consumer that is paused is called where others are",
        PAUSED_CONSUMER,
        [
            Edit(
                "consume/partition_source.py",
                """\
            if item.handler.mode == "deferred" or item.consumer in self.stored
""",
                """\
            if item.handler.mode == "deferred"
""",
            )
        ],
    ),
    Sabotage(
        "events that are paused are published",
        PAUSED_EVENTS,
        [Edit("relay/rejected.py", ' or topic in self.throttles.asked("events")', "")],
    ),
    Sabotage(
        "a key that is paused is overtaken",
        PAUSED_KEY,
        [
            Edit(
                "apply/statements.py",
                "WHERE b.order_key = wanted.key AND (b.died_at IS NULL OR b.holds))",
                "WHERE b.order_key = wanted.key AND (b.died_at IS NULL OR b.holds)"
                " AND b.reason <> 'paused')",
            )
        ],
    ),
    Sabotage(
        "a key that is resumed forgets what waits",
        PAUSED_KEY,
        [
            Edit(
                "operators/stop_statements.py",
                "UPDATE pipeline.backlog SET due_at = clock_timestamp()\n"
                " WHERE key = ANY ($1::bytea[]) AND topic = '{PAUSES}'",
                "DELETE FROM pipeline.backlog\n"
                " WHERE key = ANY ($1::bytea[]) AND topic = '{PAUSES}'",
            )
        ],
    ),
)
