"""Events that bring their order along: what was overtaken, what comes early, what never comes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import permutations
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa
from sqlalchemy import Text
from sqlalchemy.orm import Mapped, mapped_column

from onceward import Aggregate, Gaps, Handlers, Park, Policy, Sequenced, Timed, Transaction
from onceward.apply.outcome import BatchOutcome
from onceward.apply.transactions import ConsumeTransactions
from onceward.handlers.policy import GAP
from onceward.operators import dead_rows
from onceward.retry.lane_source import LaneSource
from onceward.servers.database import autocommitting

from .applier import Applier, NewApplier
from .lives import Life
from .test_backlog import QUICK
from .test_ladder import ENDS_ITS_CONNECTION, RAISE
from .test_lanes import is_note
from tests.contract.bank import Base, Deposit, Deposited

TOPIC = "moves"


class Follower(Sequenced, Timed, Aggregate, Base):
    """A row that follows the numbered events of another service."""

    __tablename__ = "follower"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    history: Mapped[str] = mapped_column(Text)

    def __init__(self, id: str) -> None:
        self.id = id
        self.history = ""


@dataclass
class Following:
    """A service that follows, and what the test lets it do."""

    gaps: Gaps | None
    policy: Policy = QUICK
    failures: Counter[int] = field(default_factory=Counter)
    """How often the handler fails at a number."""
    parks: set[int] = field(default_factory=set)
    """Numbers at which the handler parks, once."""
    statements: dict[int, str] = field(default_factory=dict)
    """What the handler executes at a number, once."""
    life: Life | None = None
    """Of the process that it runs in, where that may die."""
    seen: list[tuple[int, int]] = field(default_factory=list)
    """Numbers and gaps that the handler was called with."""
    handlers: Handlers = field(default_factory=Handlers)

    def __post_init__(self) -> None:
        @self.handlers.on(
            Deposited,
            topic=TOPIC,
            consumer="follow",
            loads=Follower.by("account"),
            policy=self.policy,
            gaps=self.gaps,
        )
        async def follow(event: Deposited, tx: Transaction) -> None:
            self.seen.append((event.amount, tx.gap))
            row = await tx.load_or_create(Follower, event.account)
            row.history += f"{event.amount},"
            if self.life is not None:
                await self.life.called()
            if event.amount in self.parks:
                self.parks.remove(event.amount)
                raise Park("not there yet", after=1)
            if statement := self.statements.pop(event.amount, None):
                await tx.session.execute(sa.text(statement))
            if self.failures[event.amount]:
                self.failures[event.amount] -= 1
                raise ValueError("not now")


def numbered(*numbers: int, account: str = "ada") -> list[Deposit]:
    """Return the events with these places in the sequence."""
    return [
        Deposit(
            number,
            account,
            id=f"{account}-{number}",
            headers=(("ce_sequence", b"%020d" % number),),
        )
        for number in numbers
    ]


async def following(
    new_applier: NewApplier, policy: Policy = QUICK, **gaps: Any
) -> tuple[Following, Applier]:
    """Return a service with such gaps, and its applier."""
    service = Following(Gaps(**gaps), policy)
    return service, await new_applier(service.handlers, topic=TOPIC)


async def history(db: asyncpg.Connection, account: str = "ada") -> list[int]:
    """Return the numbers that were applied, in this order."""
    text = await db.fetchval("SELECT history FROM follower WHERE id = $1", account)
    return [int(part) for part in (text or "").split(",") if part]


async def deadline_passes(applier: Applier, db: asyncpg.Connection) -> None:
    """Let everything have waited for a day."""
    await db.execute("UPDATE pipeline.backlog SET received_at = received_at - interval '1 day'")
    await applier.make_due()
    await applier.work_off()


@pytest.mark.parametrize("order", list(permutations([1, 2, 3, 4])))
async def test_events_are_applied_in_sequence_order_whatever_their_order_of_arrival(
    new_applier: NewApplier, db: asyncpg.Connection, order: Sequence[int]
) -> None:
    _, applier = await following(new_applier)
    await applier.apply(*numbered(*order[:2]))
    await applier.apply(*numbered(order[2]))
    await applier.apply(*numbered(order[3]))
    await applier.work_off()
    assert await history(db) == [1, 2, 3, 4]
    assert await applier.backlog() == []


async def test_those_of_one_batch_need_not_wait(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    _, applier = await following(new_applier)
    await applier.apply(*numbered(3, 1, 2), *numbered(1, account="bob"))
    assert await history(db) == [1, 2, 3]
    assert await history(db, "bob") == [1]
    assert await applier.backlog() == []


async def test_what_was_overtaken_is_skipped_and_counted(
    new_applier: NewApplier, db: asyncpg.Connection, outcomes: Counter[str]
) -> None:
    service, applier = await following(new_applier, wait=0)
    await applier.apply(*numbered(5))
    await applier.apply(*numbered(3, 6))
    assert await history(db) == [5, 6]
    assert service.seen == [(5, 4), (6, 0)], "the gap is told"
    assert outcomes == {"applied": 2, "superseded": 1}
    await applier.apply(*numbered(3))
    assert outcomes["duplicate"] == 1, "it is remembered"


async def test_a_waiting_event_blocks_no_other_key_and_waits_its_time(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    service, applier = await following(new_applier)
    await applier.apply(*numbered(1, 3), *numbered(1, account="bob"))
    await applier.work_off()
    await applier.apply(*numbered(5), *numbered(2, account="bob"))
    await applier.work_off()
    assert await history(db) == [1]
    assert await history(db, "bob") == [1, 2]
    waiting = [(row["sequence"], row["reason"]) for row in await applier.backlog()]
    assert waiting == [(3, "sequence gap"), (5, "follows another")]
    assert "has the sequence 3, and 2 did not come" in (await applier.backlog())[0]["error"]
    assert service.seen == [(1, 0), (1, 0), (2, 0)]
    await applier.apply(*numbered(2))
    await applier.work_off()
    assert await history(db) == [1, 2, 3]
    await applier.apply(*numbered(4))
    await applier.work_off()
    assert await history(db) == [1, 2, 3, 4, 5]


async def test_after_its_deadline_it_is_applied_with_the_gap_told(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    service, applier = await following(new_applier)
    await applier.apply(*numbered(1, 4, 5))
    await deadline_passes(applier, db)
    assert await history(db) == [1, 4, 5]
    assert service.seen == [(1, 0), (4, 2), (5, 0)]
    await applier.apply(*numbered(3))
    assert await history(db) == [1, 4, 5], "too late"


async def test_after_its_deadline_an_event_dies_and_the_next_one_waits(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    _, applier = await following(new_applier, then="die")
    await applier.apply(*numbered(1, 4))
    await deadline_passes(applier, db)
    await applier.apply(*numbered(5))
    await applier.work_off()
    rows = [(row["sequence"], row["died_at"] is None) for row in await applier.backlog()]
    assert rows == [(4, False), (5, True)]
    assert {row["reason"] for row in await applier.backlog()} == {"sequence gap"}
    await applier.apply(*numbered(2, 3))
    await applier.work_off()
    assert await history(db) == [1, 2, 3]


async def test_after_its_deadline_an_event_holds_its_key_except_for_predecessors(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    _, applier = await following(new_applier, then="hold")
    await applier.apply(*numbered(1, 3, 4))
    await deadline_passes(applier, db)
    (three, _) = await applier.backlog()
    assert three["holds"]
    await applier.apply(*numbered(2))
    await applier.work_off()
    assert await history(db) == [1, 2]
    async with autocommitting(applier.engine) as driver:
        await dead_rows.redrive(driver, [three])
    await applier.work_off()
    assert await history(db) == [1, 2, 3, 4]


@pytest.mark.parametrize("then", ["apply", "die", "hold"])
async def test_one_whose_deadline_has_passed_still_waits_for_what_waits_before_it(
    new_applier: NewApplier, db: asyncpg.Connection, then: str
) -> None:
    _, applier = await following(new_applier, then=then)
    await applier.apply(*numbered(1, 5))
    await db.execute("UPDATE pipeline.backlog SET received_at = received_at - interval '1 day'")
    await applier.apply(*numbered(4))
    await applier.make_due()
    await applier.work_off()
    assert await history(db) == [1]
    assert [(row["sequence"], row["died_at"]) for row in await applier.backlog()] == [
        (5, None),
        (4, None),
    ]
    await applier.apply(*numbered(3, 2))
    await applier.work_off()
    assert await history(db) == [1, 2, 3, 4, 5]


async def test_a_process_death_lets_no_waiting_event_skip_its_gap(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    service, applier = await following(new_applier, then="hold")
    await applier.apply(*numbered(1, 3))
    await db.execute("UPDATE pipeline.backlog SET attempts = 1, reason = 'process died'")
    await applier.make_due()
    await applier.work_off()
    (three,) = await applier.backlog()
    assert (three["reason"], three["attempts"], three["deaths"]) == ("sequence gap", 1, 1)
    await deadline_passes(applier, db)
    assert await history(db) == [1]
    (three,) = await applier.backlog()
    assert three["holds"]
    assert service.seen == [(1, 0)]


async def test_one_that_waits_keeps_no_attempt_that_was_counted_beforehand(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, applier = await following(new_applier, policy=Policy(attempts=1, schedule=(0,)))
    await applier.apply(*numbered(1, 3))
    await applier.make_due()
    await db.execute("UPDATE pipeline.backlog_lane SET starts = 1")  # somebody has died
    apply = applier.lanes._apply
    seen: list[asyncpg.Record] = []

    async def apply_and_look(
        consume: ConsumeTransactions, work: LaneSource
    ) -> Sequence[BatchOutcome]:
        results = await apply(consume, work)
        if is_note(work):
            seen.extend(await applier.backlog())
        return results

    monkeypatch.setattr(applier.lanes, "_apply", apply_and_look)
    await applier.lanes.work_off()
    assert [(row["reason"], row["attempts"]) for row in seen] == [("process died", 1)]
    monkeypatch.undo()
    [row] = await applier.backlog()
    assert (row["reason"], row["attempts"], row["deaths"]) == ("sequence gap", 0, 0)
    await applier.apply(*numbered(2))
    await applier.work_off()
    assert await history(db) == [1, 2, 3]


async def following_over_a_gap(
    new_applier: NewApplier, db: asyncpg.Connection
) -> tuple[Following, Applier]:
    """Return a service that has applied number 1, and whose number 4 an operator has redriven."""
    service, applier = await following(new_applier, then="die")
    await applier.apply(*numbered(1, 4))
    await deadline_passes(applier, db)
    (four,) = await applier.backlog()
    async with autocommitting(applier.engine) as driver:
        await dead_rows.redrive(driver, [four])
    return service, applier


async def test_a_redriven_event_skips_its_gap_even_if_its_handler_parks_it(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    service, applier = await following_over_a_gap(new_applier, db)
    service.parks = {4}
    await applier.work_off()
    assert [row["reason"] for row in await applier.backlog()] == ["parked by its handler"]
    await applier.make_due()
    await applier.work_off()
    assert await history(db) == [1, 4]


IN_ITS_WAY = [ENDS_ITS_CONNECTION, *map(RAISE.format, ("40P01", "55P03", "42P01", "53100"))]


@pytest.mark.parametrize("statement", [*IN_ITS_WAY, None])
async def test_a_redriven_event_skips_its_gap_despite_failures_or_process_death(
    new_applier: NewApplier, db: asyncpg.Connection, statement: str | None
) -> None:
    service, applier = await following_over_a_gap(new_applier, db)
    if statement is None:  # the process has died over it
        await db.execute(
            "UPDATE pipeline.backlog SET reason = 'process died', deaths = 1, is_redriven = true"
        )
    else:
        service.statements = {4: statement}
        await applier.work_off()
    for _ in range(3):
        await applier.make_due()
        await applier.work_off()
    assert await history(db) == [1, 4]


async def test_one_that_fails_lets_none_overtake_it(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    service, applier = await following(new_applier)
    service.failures = Counter({2: 2})
    await applier.apply(*numbered(3, 2, 1))
    await applier.apply(*numbered(4))
    for _ in range(3):
        await applier.make_due()
        await applier.work_off()
    assert await history(db) == [1, 2, 3, 4]


async def test_an_early_event_waits_for_predecessors_even_if_another_event_fails(
    new_applier: NewApplier,
) -> None:
    service, applier = await following(new_applier, wait=60)
    service.failures[1] = 9
    await applier.apply(*numbered(1, account="bob"))  # runs are undone from now on
    await applier.apply(*numbered(2), *numbered(1, account="cid"))
    assert [row["reason"] for row in await applier.backlog()] == ["failed", GAP, "failed"]


async def test_an_event_without_a_sequence_is_a_dead_letter(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    _, applier = await following(new_applier)
    wrong = [b"two", b"0", b"-5", b"1_000", "٣".encode(), b"%d" % 2**63, b"9" * 5_000]
    deposits = [
        Deposit(number, f"of {number}", headers=(("ce_sequence", text),))
        for number, text in enumerate(wrong, 10)
    ]
    await applier.apply(Deposit(1), *deposits, *numbered(1, account="bob"))
    await applier.work_off()
    rows = await applier.backlog()
    assert [row["reason"] for row in rows] == ["rejected"] * 8
    assert "goes by the CloudEvents attribute `sequence`" in rows[0]["error"]
    assert "'two'" in rows[1]["error"]
    assert await history(db, "bob") == [1]


async def test_one_that_holds_its_key_lets_those_before_it_pass(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    service, applier = await following(new_applier, policy=Policy(attempts=1, after_death="hold"))
    service.failures = Counter({2: 2})
    await applier.apply(*numbered(2, 1, 3))
    await applier.work_off()
    assert await history(db) == [1]
    assert [row["sequence"] for row in await applier.backlog()] == [2, 3]


async def test_the_latest_wins_in_whatever_order_they_come(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    handlers = Handlers()

    @handlers.on(Deposited, topic=TOPIC, consumer="newest", loads=Follower.by("account"))
    async def newest(event: Deposited, tx: Transaction) -> None:
        row = await tx.load_or_create(Follower, event.account)
        if tx.overwrites(row):
            row.history = str(event.amount)

    applier = await new_applier(handlers, topic=TOPIC)
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    times = [noon, noon + timedelta(seconds=1), noon + timedelta(seconds=1), noon]
    for number, order in enumerate(permutations(range(4))):
        account = f"of {number}"
        await applier.apply(
            *(
                Deposit(
                    place,
                    account,
                    id=f"{account}-{place}",
                    headers=(("ce_time", times[place].isoformat().encode()),),
                )
                for place in order
            )
        )
        assert await history(db, account) == [2]
    await applier.apply(Deposit(1, "eve"))
    assert "attribute `time`, which is not there" in (await applier.backlog())[0]["error"]


async def test_what_is_superseded_is_logged_with_both_ids(
    new_applier: NewApplier, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "onceward.apply.outcome")
    _, applier = await following(new_applier)
    await applier.apply(*numbered(1, 2, 3))
    await applier.apply(replace(numbered(2)[0], id="late"))
    (line,) = (record.getMessage() for record in caplog.records)
    assert "'late'" in line
    assert "superseded" in line
    assert "sequence 3 of '/tests ada-3'" in line


async def test_two_events_of_one_sequence_are_an_incident(
    new_applier: NewApplier, db: asyncpg.Connection, outcomes: Counter[str]
) -> None:
    """Their producer counts wrongly, and one of both would be lost in silence."""
    _, applier = await following(new_applier)
    await applier.apply(*numbered(1, 2))
    await applier.apply(replace(numbered(2)[0], id="another"), *numbered(3))
    (row,) = await applier.backlog()
    assert (row["reason"], row["offset"]) == ("sequence conflict", 2)
    assert row["died_at"] is not None
    assert "ada-2" in row["error"]
    assert await history(db, "ada") == [1, 2, 3]
    assert outcomes["dead"] == 1


@pytest.mark.parametrize("size", [1, 3])
async def test_an_incident_may_hold_its_key(
    new_applier: NewApplier, db: asyncpg.Connection, size: int
) -> None:
    _, applier = await following(new_applier, policy=Policy(after_death="hold"))
    await applier.apply(*numbered(1, 2))
    later = [replace(numbered(2)[0], id="another"), *numbered(3, 4)]
    for n in range(0, 3, size):
        await applier.apply(*later[n : n + size])
    assert await history(db) == [1, 2]
    assert [row["reason"] for row in await applier.backlog()] == [
        "sequence conflict",
        *["follows another"] * 2,
    ]


async def test_a_row_that_is_created_again_is_superseded_and_then_an_incident(
    new_applier: NewApplier, db: asyncpg.Connection, outcomes: Counter[str]
) -> None:
    """Its sequence begins anew, which looks like late events of the row that was deleted."""
    _, applier = await following(new_applier)
    await applier.apply(*numbered(1, 2, 3))
    await applier.apply(*(replace(one, id=f"again {one.amount}") for one in numbered(1, 2, 3, 4)))
    assert await history(db) == [1, 2, 3, 4]
    assert outcomes["superseded"] == 2
    assert [row["reason"] for row in await applier.backlog()] == ["sequence conflict"]
