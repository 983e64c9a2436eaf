"""The chaos test: its parts one by one, and a short round in which everything breaks once."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, fields, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg  # type: ignore[import-untyped]
import httpx2
import pytest
from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]
from aiokafka.admin import AIOKafkaAdminClient, NewTopic  # type: ignore[import-untyped]
from aiokafka.errors import InvalidTimestampError  # type: ignore[import-untyped]

from chaos import breaker as breakers
from chaos import brokers, copies, errands, feed, schedule, stops, system
from chaos import doctor as doctors
from chaos import plan as plans
from chaos import poison as poisons
from chaos import run as runs
from chaos.backlog import Backlog
from chaos.breaker import UNSAID, WORKERS, Breaker
from chaos.checker import kept, lanes_lost, races_lost
from chaos.checker import unordered as parcels_without_order
from chaos.edit import Edit, Outdated
from chaos.errands import AFTER, CHARGE, TELL, Done, Errand, Reminder, Request
from chaos.fates import Books, Call, Stored, judge
from chaos.memory import END_AUDIT, VERSIONS, Memory
from chaos.outside import Outside
from chaos.plan import NOTICED, PATIENCE, Plan
from chaos.poison import ATTEMPTS, ILLEGIBLE, TALLY, Given, Poison, understand
from chaos.proxy import HOST, Proxy
from chaos.rates import PHASES, rates
from chaos.recovery import Ended, Recovery, first_sent, measure, met, undisturbed
from chaos.releases import Releases
from chaos.report import Report
from chaos.round import CONSUMERS, EXTRA, RELAYS, reason_of
from chaos.run import planned, settings_of
from chaos.sabotage import LOADS, SABOTAGES, Sabotage
from chaos.schedule import EVERYBODY, KINDS, STOPS, Fault
from chaos.selftest import found
from chaos.system import Member, Servers, System
from chaos.talk import Helper
from demo import processes
from demo.evidence import Evidence
from demo.feed import TOPIC
from demo.flights import Scan
from demo.ledger import audit
from demo.processes import PACKAGE, ProcessFailed, last_lines
from demo.witness import CONSUMER, read_records

from tests.baked import RAW
from tests.test_demo import (
    altered,
    environment_in,
    honest,
    needs_proc,
    processes_of,
    row_of,
    scan,
    wrong,
)


def made(seed: int, seconds: float = 60.0) -> list[Fault]:
    """A schedule of all kinds."""
    return schedule.make(seed, seconds, consumers=CONSUMERS, relays=RELAYS)


def test_a_schedule_follows_from_its_seed_alone() -> None:
    assert made(7) == made(7)
    assert made(7) != made(8)


def test_every_kind_of_fault_comes_before_any_comes_again() -> None:
    for seed in range(20):
        kinds = [fault.kind for fault in made(seed, seconds=200)]
        assert len(kinds) == 39
        for first in range(0, len(kinds) - len(KINDS) + 1, len(KINDS)):
            assert set(kinds[first : first + len(KINDS)]) == set(KINDS)


@pytest.mark.parametrize("seconds", [40, 1.05, 1.69])  # of these the last kind was rounded away
def test_a_short_schedule_holds_every_kind_in_its_time(seconds: float) -> None:
    for seed in range(20):
        faults = made(seed, seconds=seconds)
        assert {fault.kind for fault in faults} == set(KINDS)
        assert all(0 < fault.at <= seconds for fault in faults)


@pytest.mark.parametrize("seconds", [0.5, 1])
def test_a_round_without_time_for_faults_is_refused(
    seconds: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ})  # from which settings are taken
    with pytest.raises(SystemExit) as ended:
        runs.main([f"--seconds={seconds}"])
    assert ended.value.code == 2
    assert "the first fault comes after 1 s" in capsys.readouterr().err
    assert schedule.make(1, seconds, consumers=CONSUMERS, relays=RELAYS, kinds=[]) == []


def test_only_chosen_kinds_of_faults_come() -> None:
    faults = schedule.make(1, 60, consumers=CONSUMERS, relays=RELAYS, kinds=["cut", "kill"])
    assert Counter(fault.kind for fault in faults) == {"cut": 5, "kill": 6}
    assert schedule.make(1, 60, consumers=CONSUMERS, relays=RELAYS, kinds=[]) == []


SCANS = [scan(minute, f"N{minute % 20}", "JFK-dep") for minute in range(1, 4_001)]


def test_the_feed_sends_strays_to_two_partitions_and_some_scans_again() -> None:
    sends = feed.make(SCANS, repeats=0.1, strays=0.1, seed=5)
    where: dict[str, list[int | None]] = {}
    for send in sends:
        where.setdefault(send.scan.parcel_id, []).append(send.partition)
    strays = {parcel for parcel, partitions in where.items() if None not in partitions}
    assert len(strays) == 2
    times = Counter(send.scan.number for send in sends)
    for one in SCANS:
        assert times[one.number] == 2 or (one.parcel_id not in strays and times[one.number] == 1)
    again = sum(times[one.number] == 2 for one in SCANS if one.parcel_id not in strays)
    assert 300 < again < 420
    first = dict.fromkeys(s.scan for s in sends if s.scan.parcel_id not in strays)
    assert list(first) == [one for one in SCANS if one.parcel_id not in strays]
    assert sends == feed.make(SCANS, repeats=0.1, strays=0.1, seed=5)


def test_no_scan_comes_again_later_than_the_feed_is_told() -> None:
    impostors = poisons.spread(SCANS, 0.1, seed=5, kinds=["impostor"])
    sends = feed.make(SCANS, repeats=0.3, strays=0.1, within=50, seed=5, poisoned=impostors)
    assert 50 <= feed.reach(sends) < 100, "others that come again stand between them"
    assert feed.reach(feed.make(SCANS, repeats=0.3, strays=0.1, seed=5)) > 1_000
    assert feed.reach(feed.make(SCANS, repeats=0.0, strays=0.0, seed=5)) == 0


def test_the_feed_can_be_of_the_busiest_parcels() -> None:
    busy = [*SCANS, scan(9_998, "N3", "LGA-dep"), scan(9_999, "N7", "LGA-dep")]
    chosen = feed.of_the_busiest(busy, 2)
    assert {one.parcel_id for one in chosen} == {"N3", "N7"}
    assert len(chosen) == 402
    assert feed.of_the_busiest(busy, 0) == busy


ONE, TWO, THREE = (scan(minute, "N1", "JFK-dep") for minute in (1, 2, 3))


def unordered(*applied: Scan) -> Evidence:
    """What an honest service leaves behind that applied a parcel's scans in this order."""
    evidence = honest(list(applied))
    rows = [row._replace(last_scanned_at=THREE.scanned_at) for row in evidence.parcels]
    sent = [ONE, TWO, THREE]
    return replace(evidence, sent=sent, parcels=rows, unordered=frozenset({"N1"}))


def test_an_order_that_is_not_promised_may_be_any() -> None:
    evidence = unordered(ONE, THREE, TWO)
    assert audit(evidence).ledger.holds, audit(evidence).findings
    assert "reordered" in wrong(audit(replace(evidence, unordered=frozenset())))


def test_parcels_in_several_partitions_are_known_to_have_no_order() -> None:
    other = scan(4, "N2", "JFK-dep")
    records = (ONE, 4), (other, 4), (ONE, 5), (TWO, 5)
    assert parcels_without_order([given(one, p) for one, p in records]) == {"N1"}


@pytest.mark.parametrize(
    ("tamper", "verdict"),
    [
        (lambda e: replace(e, output=e.output[1:]), {"lost": 1}),
        (lambda e: replace(e, markers=e.markers[1:]), {"lost": 1}),
        (lambda e: replace(e, markers=[*e.markers, e.markers[0]]), {"doubled": 1}),
        (lambda e: replace(e, output=[*e.output, altered(e.output[0], id="x")]), {"doubled": 1}),
        (lambda e: replace(e, output=[*e.output[1:], e.output[0]]), {"reordered": 1}),
        (lambda e: row_of(e, "N1", place="?"), {"reordered": 1}),
    ],
)
def test_without_an_order_everything_else_is_still_found(
    tamper: Callable[[Evidence], Evidence], verdict: dict[str, int]
) -> None:
    assert wrong(audit(tamper(unordered(ONE, THREE, TWO)))) == verdict


def test_a_repeat_with_other_bytes_is_found() -> None:
    evidence = honest([ONE, TWO])
    again = altered(evidence.output[0], time="2013-01-01T00:00:01Z")
    assert wrong(audit(replace(evidence, output=[*evidence.output, again]))) == {"doubled": 1}


def test_what_a_failed_call_has_changed_or_published_is_found() -> None:
    undone, left = honest([ONE, TWO]), honest([ONE, TWO, THREE])
    assert wrong(audit(undone)) == {}
    assert "doubled" in wrong(audit(replace(undone, parcels=left.parcels)))
    assert "doubled" in wrong(audit(replace(undone, output=left.output)))


def test_a_backlog_says_what_is_left() -> None:
    assert str(Backlog({}, 0, 0)) == ""
    assert str(Backlog({3: 7}, 0, 0)) == "partition 3: 7 records unread"
    assert str(Backlog({}, 1, 0)) == "1 messages of the backlog waiting"
    assert str(Backlog({}, 0, 2)) == "2 events of the outbox unpublished"
    assert str(Backlog({}, 0, 0, 3)) == "3 scheduled events due"
    assert str(Backlog({}, 0, 0, 0, 4)) == "4 days and generations kept that nobody needs"


@pytest.mark.parametrize("hour", range(24))
def test_days_that_should_be_dropped_are_awaited_at_any_starting_hour(hour: int) -> None:
    jumped = datetime(2026, 1, 1, hour, 30, tzinfo=UTC) + timedelta(hours=27)
    days = [date(2026, 1, 1) + n * timedelta(days=1) for n in range(4)]
    there = {"now": jumped, "oldest": 3, "days": days, "generations": [2, 3, 4]}
    assert kept(there) == (3 if hour == 23 else 2), "the days, and a generation"
    assert kept({**there, "days": days[2:], "generations": [3, 4]}) == 0


def test_lost_lanes_are_counted_by_the_log_lines_of_their_processes(
    tmp_path: Path,
) -> None:
    engine = RAW / "src" / "onceward"
    lost = '"; ".join(f"backlog lane {lane} was taken over" for lane in'
    assert lost in (engine / "retry/lanes.py").read_text()
    assert "\nLANES = 32\n" in (engine / "schema.py").read_text()
    for name, lanes in (
        ("consume-1", (0, 63, 64)),
        ("consume-2", (5, 5)),
        ("relay-1", ()),
        ("run-payments-1", (1,)),  # has lanes of its own
    ):
        lines = [f'{{"message": "backlog lane {lane} was taken over"}}' for lane in lanes]
        (tmp_path / f"{name}.log").write_text("\n".join(["started", *lines, ""]))
    assert lanes_lost(tmp_path) == 4, "in lanes of calls no attempt of a scan is spent"


def test_races_to_insert_a_parcel_are_counted_by_the_lines_of_failures(
    tmp_path: Path,
) -> None:
    failed = "scan.recorded.v1 '218' failed (attempt 1 of 3), again in 0 s: "
    raced = failed + 'IntegrityError: duplicate key violates \\"parcel_pkey\\"'
    (tmp_path / "consume-1.log").write_text("\n".join([raced, failed + "ValueError", raced, ""]))
    assert races_lost(tmp_path) == 2


def given(one: Scan, partition: int, offset: int = 0, poison: Poison | None = None) -> Given:
    """A record of the input topic, as the checker reads it."""
    value, headers = poisons.record(one, poison)
    sent_at = one.scanned_at.timestamp()
    return understand((partition, offset), sent_at, one.parcel_id.encode(), value, dict(headers))


@pytest.mark.parametrize("poison", poisons.EVERY, ids=str)
def test_the_checker_knows_poison_from_the_record_alone(poison: Poison) -> None:
    known = given(ONE, 0, poison=poison)
    assert known.identity == (ONE.source, "1")
    assert known.poison == (None if poison.kind == "impostor" else poison)
    assert known.is_legible == (poison.kind not in ILLEGIBLE)
    if poison.kind not in ("invalid payload", "impostor", "invalid envelope"):
        assert known.scan == ONE


def test_poison_is_spread_by_the_seed_and_every_kind_comes() -> None:
    poisoned = poisons.spread(SCANS, 0.1, seed=5)
    assert poisoned == poisons.spread(SCANS, 0.1, seed=5)
    assert 300 < len(poisoned) < 500
    assert set(poisoned.values()) == set(poisons.EVERY)
    only = poisons.spread(SCANS, 0.1, seed=5, kinds=["raises"])
    assert {poison.kind for poison in only.values()} == {"raises"}
    assert {poison.consumer for poison in only.values()} == {CONSUMER, TALLY}
    there = poisons.spread(SCANS, 0.1, seed=5, kinds=["raises tally"])
    assert {(poison.kind, poison.consumer) for poison in there.values()} == {("raises", TALLY)}


def test_at_first_no_poison_has_the_services_own_handler_use_its_session() -> None:
    poisoned = poisons.spread(SCANS, 0.1, seed=5)
    until = poisons.WITHOUT_SESSIONS * len(SCANS)
    first = {poison for one, poison in poisoned.items() if one.number <= until}
    assert {*poisons.LATE} <= first
    assert not any(poison.uses_session for poison in first)
    assert any(poison.uses_session for poison in poisoned.values())


def test_an_impostor_comes_behind_the_scan_whose_identity_it_takes() -> None:
    poisoned = poisons.spread(SCANS, 0.2, seed=5, kinds=["impostor"])
    sends = feed.make(SCANS, repeats=0.1, strays=0.1, seed=5, poisoned=poisoned)
    places = {send: place for place, send in reversed(list(enumerate(sends)))}
    impostors = [send for send in sends if send.poison]
    assert 500 < len(impostors) < 800
    for send in impostors:
        assert places[send._replace(poison=None)] < places[send]


DIES = Poison("raises", TALLY, ATTEMPTS)
N2 = [scan(minute, "N2", "JFK-dep") for minute in range(5, 11)]
STRAY = scan(11, "N3", "JFK-dep")
INPUT = [
    given(ONE, 0, 0),
    given(TWO, 0, 1, DIES),
    given(THREE, 0, 2),  # waits for a person at the consumer that holds
    given(ONE, 0, 3),
    given(N2[0], 1, 0, Poison("rejects", CONSUMER, 1)),
    given(N2[1], 1, 1, Poison("raises", CONSUMER, 1)),
    given(N2[1], 1, 2, Poison("impostor")),
    given(N2[2], 1, 3, Poison("invalid payload")),
    given(N2[3], 1, 4),
    given(N2[4], 1, 5, Poison("not CloudEvents")),
    given(N2[4], 1, 6, Poison("not CloudEvents")),
    given(N2[5], 1, 7, Poison("unknown type")),
    given(STRAY, 2, 0),
    given(STRAY, 3, 0),
]


def row(consumer: str, one: Given, reason: str, attempts: int = 0, **fields: Any) -> Stored:
    """A row of the backlog, for the record; a dead letter unless said otherwise."""
    is_known = bool(consumer) or reason == "identity mismatch"
    identity = one.identity if is_known else None
    usual: dict[str, Any] = {"is_dead": True, "holds": consumer == TALLY}
    return Stored(consumer, one.place, one.key, identity, reason, attempts, **{**usual, **fields})


def waits(one: Given, **fields: Any) -> Stored:
    """A row of the deferred consumer that is not dead."""
    return row(TALLY, one, "deferred", is_dead=False, holds=False, **fields)


def raised(consumer: str, one: Given, *attempts: int) -> list[Call]:
    """Calls of a handler that failed."""
    return [Call(consumer, *one.identity, n, fails=True) for n in attempts]


BOOKS = Books(
    given=INPUT,
    markers={
        CONSUMER: [INPUT[n].identity for n in (0, 1, 2, 5, 8, 12)],
        TALLY: [INPUT[n].identity for n in (0, 4, 5, 12)],
    },
    backlog=[
        row(TALLY, INPUT[1], "attempts used up", 3),
        waits(INPUT[2]),
        row(CONSUMER, INPUT[4], "rejected", 1),
        row("", INPUT[6], "identity mismatch"),
        row(CONSUMER, INPUT[7], "invalid payload"),
        row(TALLY, INPUT[7], "invalid payload"),
        waits(INPUT[8]),
        row("", INPUT[9], "not CloudEvents"),
        row("", INPUT[10], "not CloudEvents"),
    ],
    tallied=[
        (INPUT[0].identity, "N1"),
        (INPUT[4].identity, "N2"),
        (INPUT[5].identity, "N2"),
        (INPUT[12].identity, "N3"),
    ],
    calls=[
        *raised(TALLY, INPUT[1], 0, 1, 2),
        *raised(CONSUMER, INPUT[4], 0),
        *raised(CONSUMER, INPUT[5], 0),
        Call(CONSUMER, *INPUT[5].identity, 1, fails=False),
    ],
)


def test_messages_that_became_what_they_should_add_up() -> None:
    judgement = judge(BOOKS)
    assert judgement.findings == []
    assert (judgement.sent, judgement.duplicates) == (10, 3)
    assert judgement.counts == {
        CONSUMER: {"illegible": 1, "applied": 6, "waiting": 0, "dead": 2, "skipped": 1},
        TALLY: {"illegible": 1, "applied": 4, "waiting": 2, "dead": 2, "skipped": 1},
    }
    assert judgement.applied[TALLY] == BOOKS.markers[TALLY]
    assert sum(judgement.dead.values()) == 7


def without(books: Books, place: int) -> Books:
    """The books without a row of the backlog."""
    return replace(books, backlog=[*books.backlog[:place], *books.backlog[place + 1 :]])


def changed(books: Books, place: int, **fields: Any) -> Books:
    """The books with another row in the backlog."""
    new = books.backlog[place]._replace(**fields)
    return replace(books, backlog=[*without(books, place).backlog, new])


def marked(books: Books, consumer: str, one: Given) -> Books:
    """The books with a marker more."""
    return replace(
        books, markers={**books.markers, consumer: [*books.markers[consumer], one.identity]}
    )


@pytest.mark.parametrize(
    ("tamper", "kind"),
    [
        (lambda b: without(b, 0), "lost"),
        (lambda b: without(b, 1), "lost"),
        (lambda b: without(b, 3), "lost"),
        (lambda b: without(b, 8), "lost"),
        (lambda b: replace(b, tallied=b.tallied[1:]), "lost"),
        (lambda b: replace(b, tallied=[*b.tallied, b.tallied[0]]), "doubled"),
        (lambda b: replace(b, tallied=[*b.tallied, (THREE.source, "3")]), "doubled"),
        (lambda b: marked(b, CONSUMER, INPUT[0]), "doubled"),
        (lambda b: marked(b, CONSUMER, INPUT[4]), "doubled"),
        (lambda b: marked(b, TALLY, INPUT[2]), "doubled"),
        (lambda b: marked(b, CONSUMER, given(scan(99, "N9", "JFK-dep"), 0)), "doubled"),
        (lambda b: replace(b, backlog=[*b.backlog, b.backlog[3]]), "doubled"),
        (lambda b: replace(b, backlog=[*b.backlog, b.backlog[8]]), "doubled"),
        (lambda b: replace(b, tallied=[b.tallied[n] for n in (0, 2, 1, 3)]), "reordered"),
        (lambda b: changed(b, 0, reason="rejected"), "misjudged"),
        (lambda b: changed(b, 0, is_dead=False, holds=False), "misjudged"),
        (lambda b: changed(b, 2, attempts=2), "misjudged"),
        (lambda b: changed(b, 8, reason="missing attribute"), "misjudged"),
        (lambda b: marked(without(b, 1), TALLY, INPUT[2]), "misjudged"),
        (lambda b: marked(without(b, 2), CONSUMER, INPUT[4]), "misjudged"),
        (lambda b: replace(b, calls=b.calls[1:]), "misjudged"),
        (lambda b: replace(b, calls=[*b.calls[:4], *b.calls[5:]]), "misjudged"),
    ],
)
def test_what_became_of_messages_is_checked(tamper: Callable[[Books], Books], kind: str) -> None:
    assert kind in {finding.kind for finding in judge(tamper(BOOKS)).findings}


def test_an_attempt_may_be_spent_beforehand_where_processes_die() -> None:
    interrupted = replace(BOOKS, calls=BOOKS.calls[1:], interruptions=1)
    assert judge(interrupted).findings == []


def test_between_note_and_verdict_a_lost_lane_may_cost_an_attempt() -> None:
    for place in (4, 5):  # of one whose payload does not fit, at each consumer
        spent = changed(BOOKS, place, attempts=1)
        assert judge(replace(spent, interruptions=1)).findings == []
        assert {finding.kind for finding in judge(spent).findings} == {"misjudged"}


def test_a_lost_lane_excuses_no_other_reason() -> None:
    wrongly = changed(BOOKS, 5, reason="rejected", attempts=1)
    assert "misjudged" in {
        finding.kind for finding in judge(replace(wrongly, interruptions=1)).findings
    }


def test_where_deaths_hold_nothing_nothing_waits() -> None:
    kinds = {finding.kind for finding in judge(replace(BOOKS, holds=False)).findings}
    assert "misjudged" in kinds


RINGS, WAITS = "N2", "N4"
"""Parcels whose scans have the outside called, and an event published later."""
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def request(consumer: str, scans: int, word: str, id: str = "") -> Request:
    """A request to the outside, as it is written down."""
    return Request(consumer, id or f"{consumer} {scans}", RINGS, scans, word)  # type: ignore[arg-type]


def reminder(scans: int, at: timedelta = AFTER, id: str = "", rest: object = "") -> Reminder:
    """An event that was scheduled by a scan of that minute, and published so much later."""
    at_ = NOON + timedelta(minutes=scans) + at
    return Reminder(Errand(WAITS, scans), id or f"reminder {scans}", at_, rest)


DONE = Done(
    work=("effects", "scheduled", "audit", "apart"),
    moves={
        Errand(parcel, n): NOON + timedelta(minutes=n)
        for parcel in (RINGS, WAITS, "N1")
        for n in range(1, 10)
    },
    requests=[
        request(TELL, 3, "refused"),
        request(TELL, 3, "taken"),
        request(CHARGE, 4, "refused"),
        request(CHARGE, 4, "taken"),
        request(CHARGE, 4, "asked: yes"),
        request(TELL, 8, "taken"),
        request(TELL, 3, "taken"),
        request(CHARGE, 9, "asked: no"),
        request(CHARGE, 9, "taken"),
    ],
    reminders=[reminder(4), reminder(8), reminder(4)],
    waiting=[f"{WAITS} 9"],
    versions=[Errand(parcel, n) for parcel in ("N1", RINGS, WAITS) for n in range(1, 10)],
    transactions=["750", "751"],
)


def test_some_parcels_have_errands() -> None:
    assert (errands.work_of(RINGS), errands.work_of(WAITS)) == ("effects", "scheduled")
    works = Counter(errands.work_of(f"N{number}") for number in range(1_000))
    assert all(200 < works[one] < 300 for one in ("effects", "scheduled"))


def test_errands_that_were_run_as_they_should_be_are_in_order() -> None:
    assert errands.judge(DONE) == []


CHARGED_ANYHOW = request(CHARGE, 9, "asked: yes"), request(CHARGE, 9, "refused")


def asked_for(done: Done, *requests: Request) -> Done:
    """The same with more requests, in the end."""
    return replace(done, requests=[*done.requests, *requests])


@pytest.mark.parametrize(
    ("tamper", "kind"),
    [
        (lambda d: replace(d, requests=d.requests[:-1]), "lost"),
        (lambda d: replace(d, requests=[*d.requests[:3], *d.requests[4:]]), "lost"),
        (lambda d: replace(d, reminders=[d.reminders[0]]), "lost"),
        (lambda d: replace(d, waiting=[]), "lost"),
        (lambda d: asked_for(d, request(TELL, 5, "taken")), "doubled"),
        (lambda d: asked_for(d, request(TELL, 8, "taken", id="other")), "doubled"),
        (lambda d: asked_for(d, request(CHARGE, 9, "taken")), "doubled"),
        (
            lambda d: asked_for(d, *[request(CHARGE, 9, w) for w in ("asked: yes", "refused")]),
            "doubled",
        ),
        (lambda d: replace(d, reminders=[*d.reminders, reminder(2)]), "doubled"),
        (lambda d: replace(d, reminders=[*d.reminders, reminder(8, id="other")]), "doubled"),
        (lambda d: replace(d, reminders=[*d.reminders, reminder(8, rest="other")]), "doubled"),
        (lambda d: replace(d, waiting=[f"{WAITS} 9", f"{WAITS} 1"]), "doubled"),
        (lambda d: replace(d, versions=d.versions[1:]), "lost"),
        (lambda d: replace(d, versions=[*d.versions, d.versions[0]]), "doubled"),
        (lambda d: replace(d, versions=[*d.versions, Errand("N1", 10)]), "doubled"),
        (lambda d: replace(d, transactions=["750", "751", "750"]), "doubled"),
        (lambda d: replace(d, requests=[*d.requests[5:], *d.requests[:5]]), "reordered"),
        (lambda d: replace(d, requests=[d.requests[0], d.requests[5], *d.requests]), "reordered"),
        (lambda d: replace(d, reminders=[reminder(8), reminder(4)]), "reordered"),
        (lambda d: replace(d, reminders=[reminder(4, AFTER / 2), reminder(8)]), "reordered"),
    ],
)
def test_errands_are_checked(tamper: Callable[[Done], Done], kind: str) -> None:
    assert kind in {finding.kind for finding in errands.judge(tamper(DONE))}
    assert errands.judge(replace(tamper(DONE), work=())) == []


def test_who_was_stopped_before_a_call_may_make_it_late() -> None:
    late = asked_for(DONE, request(CHARGE, 9, "taken"))
    assert errands.judge(replace(late, late=1)) == []


def test_the_simulated_external_service_fails_as_told_and_records_accepted_requests(
    tmp_path: Path,
) -> None:
    outside = Outside(tmp_path / "requests")
    threading.Thread(target=outside.serve_forever, daemon=True).start()
    url = f"http://{HOST}:{outside.server_address[1]}"
    one_each = httpx2.Limits(max_keepalive_connections=0)
    with outside, httpx2.Client(base_url=url, limits=one_each) as client:

        def ring(id: str) -> int:
            body = {"parcel_id": "N1", "scans": 4}
            headers = {errands.KEY: id}
            return client.post(f"/{CHARGE}", json=body, headers=headers).status_code

        def ask(id: str) -> bool:
            return bool(client.get(f"/{CHARGE}/N1/4", headers={errands.KEY: id}).json())

        outside.mode = "refuses"
        assert ring("1") == 503
        outside.mode = "hangs up"
        with pytest.raises(httpx2.RemoteProtocolError):
            ring("2")
        with pytest.raises(httpx2.RemoteProtocolError):
            ask("2")
        outside.mode = "stammers"
        assert ring("3") == 200
        outside.mode = ""
        assert [ask("1"), ask("2"), ask("3")] == [False, True, True]
        outside.shutdown()
    lines = (tmp_path / "requests").read_text().splitlines()
    written = [(one.id, one.word) for one in (Request(*json.loads(line)) for line in lines)]
    assert written == [
        ("1", "refused"),
        ("2", "taken"),
        ("3", "taken"),
        ("1", "asked: no"),
        ("2", "asked: yes"),
        ("3", "asked: yes"),
    ]


def test_recovery_is_measured_until_the_next_event_and_until_all_of_them() -> None:
    times = ("kill", 10.0), ("kill", 20.0), ("cut", 10.0), ("cut", 99.0)
    ended = [Ended(kind, at - 1, at) for kind, at in times]
    published = [(8.0, 8.5), (9.0, 14.0), (9.5, 10.5), (19.0, 19.5), (30.0, 31.0)]
    assert measure(ended, published) == {
        "cut": Recovery(0.5, 0.5, 4.0, 4.0),
        "kill": Recovery(5.75, 11.0, 2.0, 4.0),
    }


def test_a_fault_tests_something_only_if_a_scan_is_under_way() -> None:
    published = [(20.0, 24.0), (8.0, 8.5)]
    times = {
        "before": (9.0, 18.9),
        "left behind": (9.0, 19.1),
        "around": (19.0, 25.0),
        "within": (21.0, 22.0),
        "to its end": (23.0, 30.0),
        "after": (24.1, 30.0),
    }
    ended = [Ended(kind, began, at) for kind, (began, at) in times.items()]
    counts = met([*ended, Ended("within", 22.0, 23.0)], published)
    assert counts == {"left behind": 1, "around": 1, "within": 2, "to its end": 1}
    assert met(ended, []) == {}


def test_a_scan_is_under_way_from_its_first_record_on() -> None:
    records = [given(ONE, 0)._replace(sent_at=at) for at in (3.0, 1.0, 2.0)]
    assert first_sent(records) == {(ONE.source, "1"): 1.0}


def test_scans_that_wait_for_a_poisoned_one_tell_nothing_of_recovery() -> None:
    sound = [scan(minute, "N1", "JFK-dep") for minute in (1, 3, 4)]
    records = [given(sound[0], 0), given(scan(2, "N1", "JFK-dep"), 0, poison=DIES)]
    records += [
        given(one, 0)._replace(sent_at=records[1].sent_at + n)
        for n, one in ((1, sound[1]), (20, sound[2]))
    ]
    assert {number for _, number in undisturbed(records)} == {"1", "4"}


def test_rates_are_those_of_the_phases_that_have_been() -> None:
    begin, broken, fed, done = (10.0, 0), (20.0, 300), (20.5, 310), (40.5, 410)
    assert rates([begin, broken, fed, done]) == {PHASES[0]: 30, PHASES[2]: 5}
    assert rates([begin, broken, fed, (19.0, 300)]) == {PHASES[0]: 30}


GOOD = Report(
    sent=10,
    duplicates=1,
    applied=10,
    parked=0,
    dead=0,
    dead_by_reason={},
    consumers={CONSUMER: {"applied": 8, "dead": 1, "skipped": 1}, TALLY: {"applied": 10}},
    published=12,
    repeats=3,
    lost=0,
    doubled=0,
    reordered=0,
    misjudged=0,
    stuck=[],
    findings=[],
    faults={"kill": 1},
    unmet=[],
    recovery={},
    errands={},
    payments={},
    migrations={},
    rates={},
    seconds=1.0,
    plan=Plan(
        events=10,
        seconds=1.0,
        seed=2,
        schedule=made(1),
        parcels=3,
        repeats=0.1,
        within=4,
        strays=0.2,
        poison=0.01,
        kinds=["raises"],
        after_death="go on",
        settings={"PIPELINE_RELAY_TRANSACTIONAL": "true"},
        errands=["audit"],
        payments=7,
        patience=5.0,
    ),
)


@pytest.mark.parametrize(
    "change",
    [
        {"sent": 9},
        {"consumers": {CONSUMER: {"applied": 10}, TALLY: {"applied": 9}}},
        {"lost": 1},
        {"doubled": 1},
        {"reordered": 1},
        {"misjudged": 1},
        {"stuck": ["partition 3: 7 records unread"]},
    ],
)
def test_a_report_holds_only_if_nothing_is_wrong(change: dict[str, Any]) -> None:
    assert GOOD.holds
    assert not replace(GOOD, **change).holds
    assert not replace(GOOD, **change).is_right


def test_a_round_without_a_fault_that_was_to_come_has_no_verdict() -> None:
    untested = replace(GOOD, unmet=["kill", "cut"])
    assert untested.is_right
    assert not untested.holds
    assert (found(GOOD), found(untested)) == ("holds", "no verdict: kill, cut")
    assert found(replace(untested, lost=1)) == "1 lost"


def test_the_round_of_a_report_is_run_again(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(GOOD.as_json(), "utf-8")
    everything = {one.name for one in fields(Plan)}
    usual = Plan(events=0, seconds=0, seed=0, schedule=[])
    assert {one for one in everything if getattr(usual, one) != getattr(GOOD.plan, one)} == (
        everything
    ), "a field that has its default does not show whether it was kept"
    assert planned(Namespace(replay=report), {"PIPELINE_BATCH_EVENTS": "1"}) == GOOD.plan


def test_a_new_round_has_environment_settings_that_the_rig_leaves_open() -> None:
    environment = {
        "PATH": "/bin",
        "PIPELINE_RELAY_TRANSACTIONAL": "true",
        "PIPELINE_BATCH_SIZE": "7",
        "PIPELINE_DATABASE_URL": "postgresql+asyncpg://me:secret@there/db",
    }
    settings = settings_of(environment)
    assert settings == {"PIPELINE_RELAY_TRANSACTIONAL": "true"}
    assert environment == {"PATH": "/bin"}, "a replay has the settings of its report alone"
    asked = Namespace(
        replay=None,
        faults="kill",
        poisons="",
        seed=1,
        seconds=9,
        events=5,
        poison=0.0,
        payments=0.0,
    )
    assert planned(asked, settings).settings == settings


@pytest.mark.parametrize(
    "report", [[], {}, {"plan": {"events": 1}}, {"plan": {**asdict(GOOD.plan), "schedule": [{}]}}]
)
def test_a_report_that_lacks_what_is_needed_is_refused(report: object) -> None:
    with pytest.raises(ValueError, match="no report of a round of this version"):
        plans.from_json(report)


SLOWLY = """
import os, signal, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        Path("ready").touch()
        self.send_response(200)
        self.end_headers()

time.sleep(1)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
HTTPServer(("127.0.0.1", int(os.environ["PIPELINE_HEALTH_PORT"])), Ready).serve_forever()
"""
"""A service that takes a while until it knows of signals, and answers."""
DEAF = SLOWLY.replace("time.sleep(1)", "").replace("lambda *_: os._exit(0)", "signal.SIG_IGN")
"""A service that does not end when it is asked to."""


@asynccontextmanager
async def slow_system(folder: Path, *names: str, script: str = SLOWLY) -> AsyncIterator[System]:
    """A system whose processes do nothing but begin, slowly or not; none is started yet."""
    package = folder / "src" / PACKAGE
    package.mkdir(parents=True)
    (package.parent / "slowly.py").write_text(script)
    (package / "tables.py").touch()
    slow = System(folder, folder, module="slowly")
    slow.servers.stack.addresses |= {"PIPELINE_DATABASE_URL": "postgresql+asyncpg://me@there/db"}
    try:
        for name in names:
            slow.members[name] = Member(name, folder, folder, slow.servers, "slowly")
            await slow.members[name].prepare({})
        yield slow
    finally:
        for member in slow.members.values():
            await member.close()


@needs_proc
@pytest.mark.full
@pytest.mark.integration
async def test_who_still_starts_is_asked_to_end_when_it_is_ready(tmp_path: Path) -> None:
    async with slow_system(tmp_path, "relay-1", "relay-extra") as slow:
        await slow.members["relay-1"].service.start()
        assert (await slow.obstacles())["relay-1"]
        assert await slow.obstacles(patience=60) == {"relay-1": ""}
        await slow.stop()
        assert slow.misbehaved == []


@needs_proc
@pytest.mark.full
@pytest.mark.integration
async def test_who_joins_for_a_while_has_joined(tmp_path: Path) -> None:
    async with slow_system(tmp_path, "relay-extra") as slow:
        breaker = breaker_of(slow)
        await breaker.run([Fault(0, "relays", "relay-extra")], lambda _: None)
        assert (tmp_path / "ready").exists()
        assert [one.kind for one in breaker.ended] == ["relays"]


Doctor = Callable[[Mapping[str, str], Collection[str]], Mapping[str, str]]
"""What it says to do, by check: of the work that waits, by who takes it, and of who runs."""


def names_what_waits(work: Mapping[str, str], running: Collection[str]) -> dict[str, str]:
    """Name all that nobody takes, and who does."""
    waits = {check: taker for check, taker in work.items() if taker not in running}
    return {check: f"start `service {taker}`, or `service run`" for check, taker in waits.items()}


def takes_consumers_for_relays(work: Mapping[str, str], running: Collection[str]) -> dict[str, str]:
    """Take a consumer that runs for a relay, and the other way round."""
    others = {"consume": "relay", "relay": "consume"}
    seen = [others[one] for one in running]
    return names_what_waits(work, seen)


def names_all_if_any_is_away(work: Mapping[str, str], running: Collection[str]) -> dict[str, str]:
    """Name all work as long as a kind of process is missing."""
    return names_what_waits(work, running if len(running) == 2 else [])


def asks_for_others(work: Mapping[str, str], running: Collection[str]) -> dict[str, str]:
    """Name the right work, and ask for who does not take it."""
    found = names_what_waits(work, running)
    return {check: text.replace("consume", "relay") for check, text in found.items()}


@pytest.mark.parametrize(
    ("says", "wrong"),
    [
        (names_what_waits, None),
        (takes_consumers_for_relays, "all processes but `relay` run, and the doctor is wrong"),
        (names_all_if_any_is_away, "all processes but `relay` run, and the doctor is wrong"),
        (asks_for_others, "no `consume` runs, and the doctor does not say so of ['backlog'"),
    ],
)
async def test_a_doctor_must_name_what_has_stopped_and_only_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Doctor, wrong: str | None
) -> None:
    async with slow_system(tmp_path, "consume-1", "relay-1") as slow:
        running, is_paused = set[str](), False

        async def run(names: Sequence[str]) -> None:
            running.update(slow.members[name].command for name in names)

        async def end(member: Member) -> None:
            running.remove(member.command)

        async def execute(*statements: str, database: str = "") -> str:
            return ""

        async def send(kafka: str) -> None:
            pass

        async def command(*words: str, log: Path) -> None:
            nonlocal is_paused
            is_paused = words[0] == "pause"

        async def ask(*words: str, codes: Sequence[int]) -> str:
            work = {one: by for one, by in doctors.TAKERS.items() if one != "calls"}
            if is_paused:
                del work["backlog"]
            found = says(work, running)
            lines = [{"level": "wrong", "check": one, "advice": found[one]} for one in found]
            lines += [{"level": "ok", "check": one, "advice": ""} for one in ("reads", "clock")]
            return "\n".join(map(json.dumps, lines))

        monkeypatch.setattr(doctors, "PATIENCE", 0.0)
        monkeypatch.setattr(doctors, "LOOK_EVERY", 0.0)
        monkeypatch.setattr(doctors, "send", send)
        monkeypatch.setattr(slow, "run", run)
        monkeypatch.setattr(slow, "end", end)
        monkeypatch.setattr(slow.servers, "execute", execute)
        asked = slow.members["consume-1"].service
        monkeypatch.setattr(asked, "command", command)
        monkeypatch.setattr(asked, "ask", ask)
        slow.servers.stack.addresses["PIPELINE_KAFKA_BOOTSTRAP_SERVERS"] = "there:9092"
        found = await doctors.examine(slow, list(slow.members), has_effects=False)
        assert [one[: len(wrong or "")] for one in found] == ([wrong] if wrong else [])


def breaker_of(broken: System, all_is_sent: Callable[[], bool] = lambda: True) -> Breaker:
    """What breaks a system around which there is no feed and no outside."""
    nobody = Helper("nobody", broken.folder / "nobody.log")
    memory, releases = Memory(broken.servers, nobody), Releases(broken, broken.folder)
    return Breaker(broken, memory, nobody, releases, all_is_sent)


@needs_proc
async def test_who_ignores_that_it_is_asked_to_end_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STOPPED_WITHIN", 0.2)
    async with slow_system(tmp_path, "relay-1", "relay-extra", script=DEAF) as deaf:
        await deaf.members["relay-1"].service.start()
        await deaf.members["relay-1"].service.ready(60)
        breaker = breaker_of(deaf)
        await breaker.run([Fault(0, "relays", "relay-extra")], lambda _: None)
        assert deaf.misbehaved == ["relay-extra did not end when it was asked to"]
        await Releases(deaf, tmp_path)._replace(deaf.members["relay-1"])
        assert deaf.misbehaved[1:] == ["relay-1 did not end when it was asked to"]
        await deaf.stop()
        assert deaf.misbehaved[2:] == ["relay-1 did not end when it was asked to"]


ORDERED = """
import sys

with open("ordered", "a") as file:
    print(*sys.argv[1:], file=file)
sys.exit(EXITS)
"""
"""A service whose commands say what they are asked to do."""


@needs_proc
@pytest.mark.parametrize("exits", [False, True])
@pytest.mark.parametrize(
    ("verb", "what", "rate"), [("pause", "key p-1", ""), ("throttle", "topic t", " 9")]
)
async def test_what_is_stopped_goes_on_by_a_command_or_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, what: str, rate: str, exits: bool
) -> None:
    monkeypatch.setattr(breakers, "ACTS_WITHIN", 0.0)
    monkeypatch.setattr(breakers, "ACTS_AFTER", 0)
    monkeypatch.setattr(stops, "OBEYED_WITHIN", 0.0)
    script = ORDERED.replace("EXITS", str(int(exits)))
    async with slow_system(tmp_path, "consume-1", script=script) as ordered:
        # Nobody listens there: what was taken is not known.
        nobody = "postgresql+asyncpg://me@127.0.0.1:1/db"
        ordered.servers.stack.addresses["PIPELINE_DATABASE_URL"] = nobody
        stopping = breaker_of(ordered)
        await stopping.run([Fault(0, "stopped", what + rate, 0.2)], lambda _: None)
    assert [one.kind for one in stopping.ended] == ["stopped"] * (not exits)
    orders = (tmp_path / "ordered").read_text().splitlines()
    assert orders == [
        f"{verb} {what}{rate} --for 11s --because a fault --yes",
        *[f"resume {what}"] * (not exits),
    ]


GROWING = """
CREATE SCHEMA pipeline;
CREATE TABLE pipeline.throttle AS SELECT now() + interval '1 h' AS until;
CREATE TABLE pipeline.begun AS SELECT clock_timestamp() AS at;
CREATE VIEW pipeline.taken AS
SELECT n, at + n * interval '0.1 s' AS taken_at
  FROM pipeline.begun,
       generate_series(0, (10 * extract(epoch FROM clock_timestamp() - at))::bigint) AS n;
CREATE VIEW pipeline.inbox AS
SELECT 'TOPIC'::text AS topic, 'record-scan'::text AS consumer, 0 AS partition, n AS "offset",
       'hot'::bytea AS record_key
  FROM pipeline.taken;
CREATE VIEW pipeline.position AS
SELECT 'TOPIC'::text AS topic, 0 AS partition, count(*) AS next_offset FROM pipeline.taken;
CREATE VIEW pipeline.outbox AS
SELECT n AS id, 0 AS shard, 'moves'::text AS topic, '1'::xid8 AS xid, taken_at AS created_at
  FROM pipeline.taken;
CREATE TABLE pipeline.outbox_cursor AS SELECT 0 AS shard, '10:10:'::pg_snapshot AS seen;
CREATE TABLE pipeline.outbox_rejected (id bigint, topic text);
"""
"""What a service leaves behind that takes ten of everything in a second, whatever is paused."""


@needs_proc
@pytest.mark.integration
async def test_who_takes_what_is_paused_or_more_than_is_allowed_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, url = f"rig_{uuid4().hex[:8]}", os.environ["PIPELINE_DATABASE_URL"]
    kafka, topic = os.environ["PIPELINE_KAFKA_BOOTSTRAP_SERVERS"], f"rig-{uuid4().hex[:8]}"
    monkeypatch.setattr("demo.feed.TOPIC", topic)
    monkeypatch.setattr(stops, "OBEYED_WITHIN", 0.0)
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, 1)])
    finally:
        await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        await producer.send_and_wait(topic, b"before")  # now all brokers know it
    script = ORDERED.replace("EXITS", "0")
    async with slow_system(tmp_path, "consume-1", script=script) as growing:
        addresses, breaker = growing.servers.stack.addresses, breaker_of(growing)
        addresses |= {"PIPELINE_DATABASE_URL": url, "PIPELINE_KAFKA_BOOTSTRAP_SERVERS": kafka}
        await growing.servers.execute(f"CREATE DATABASE {own}")
        addresses["PIPELINE_DATABASE_URL"] = system._in(own, url)
        await growing.servers.execute(GROWING.replace("TOPIC", topic))

        async def noted(*targets: str) -> list[str]:
            growing.misbehaved.clear()
            for one in targets:
                await breaker.run([Fault(0, "stopped", one, 0.5)], lambda _: None)
            return [re.findall(r"stopped (.+) for", one)[0] for one in growing.misbehaved]

        taken = [f"topic {topic}", "consumer record-scan", "key hot"]
        taken += [f"topic {topic} 0.5", "consumer record-scan 0.5"]
        allowed = [f"topic {topic} 20", "consumer tally", "key cold", "events others"]
        assert await noted(*taken, "events moves", *allowed) == [*taken, "events moves"]
        await growing.servers.execute("UPDATE pipeline.throttle SET until = now()")
        assert await noted(*taken, "events moves") == []
        addresses["PIPELINE_DATABASE_URL"] = url
        await growing.servers.execute(f"DROP DATABASE {own} WITH (FORCE)")


ALIVE = """
import json, os
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

class Alive(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"seconds_since_beat": seconds_since_beat()}).encode())

    def log_message(self, *arguments):
        pass

PORT = "127.0.0.1", int(os.environ["PIPELINE_HEALTH_PORT"])
"""
"""The health port of a service, which says when that had its last heartbeat."""
CHATTY = f"""{ALIVE}
import threading, time
from itertools import count

def seconds_since_beat():
    return time.monotonic() - beat

def write():
    os.write(2, b"%d\\n" % next(numbers))

def write_all():
    while True:
        write()
        time.sleep(0.01)

beat, numbers = time.monotonic(), count()
server = ThreadingHTTPServer(PORT, Alive)
threading.Thread(target=server.serve_forever, daemon=True).start()
if not WAITS:
    threading.Thread(target=write_all, daemon=True).start()
while True:
    beat = time.monotonic()
    if WAITS:
        write()
    time.sleep(0.01)
"""
"""A service that writes a lot, and waits until it is written or has a thread for it."""


@needs_proc
@pytest.mark.full
@pytest.mark.integration
@pytest.mark.parametrize("waits", [False, True])
async def test_who_stands_still_while_nothing_reads_its_log_is_noted(
    tmp_path: Path, waits: bool
) -> None:
    script = f"WAITS = {waits}\n{CHATTY}"
    async with slow_system(tmp_path, "consume-1", script=script) as chatty:
        member, breaker = chatty.members["consume-1"], breaker_of(chatty)
        await member.service.start()
        await until_it_answers(member)
        await breaker.run([Fault(0, "unread", "consume-1", 4.0)], lambda _: None)
        assert [one.kind for one in breaker.ended] == ["unread"]
        noted = [one.partition(" for ")[0] for one in chatty.misbehaved]
        assert noted == ["consume-1 stood still"] * waits
    written = [int(line) for line in member.log.read_text().splitlines()]
    assert written == list(range(len(written)))
    assert len(written) > 10


async def until_it_answers(member: Member) -> None:
    """Wait until a process says whether it is alive."""
    while await member.service.seconds_since_beat() is None:  # noqa: ASYNC110  # another process
        await asyncio.sleep(0.1)


SERVING = f"""
import os, sys, time
sys.path.insert(0, {str(RAW / "src")!r})
from onceward.observe import health

state = health.Health(stall_after=60)
with health.serving(state, host="127.0.0.1", port=int(os.environ["PIPELINE_HEALTH_PORT"])):
    while True:
        state.beat()
        time.sleep(0.1)
"""
"""A service that has nothing but its health port."""
ONE_BY_ONE = f"""{ALIVE}
seconds_since_beat = float
HTTPServer(PORT, Alive).serve_forever()
"""
"""A service whose port waits for one client before it answers the next."""


@needs_proc
@pytest.mark.full
@pytest.mark.integration
@pytest.mark.parametrize(("script", "is_noted"), [(SERVING, False), (ONE_BY_ONE, True)])
async def test_who_does_not_answer_while_clients_crowd_its_port_is_noted(
    tmp_path: Path, script: str, is_noted: bool
) -> None:
    async with slow_system(tmp_path, "relay-1", script=script) as crowded:
        member, breaker = crowded.members["relay-1"], breaker_of(crowded)
        await member.service.start()
        await until_it_answers(member)
        await breaker.run([Fault(0, "clients", "relay-1", 8.0)], lambda _: None)
        assert [one.kind for one in breaker.ended] == ["clients"]
        noted = [one.partition(" for ")[0] for one in crowded.misbehaved]
        assert noted == ["relay-1 stood still"] * is_noted
        await until_it_answers(member)


ANSWERING = """
import asyncio, os
from http.server import BaseHTTPRequestHandler, HTTPServer

import asyncpg

class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if SAYS else 200)
        self.end_headers()
        self.wfile.write(SAYS.encode())

    def log_message(self, *arguments):
        pass

async def delete():
    url = os.environ["PIPELINE_DATABASE_URL"].replace("+asyncpg", "")
    connection = await asyncpg.connect(url)
    await connection.execute("DELETE FROM pipeline.outbox")
    await connection.close()

if DELETES:
    asyncio.run(delete())
HTTPServer(("127.0.0.1", int(os.environ["PIPELINE_HEALTH_PORT"])), Ready).serve_forever()
"""
"""A service that says why it is not ready, and may delete what its database holds."""


def answering(says: str, *, deletes: bool = False) -> str:
    """The script of such a service."""
    return f"SAYS, DELETES = {says!r}, {deletes}\n{ANSWERING}"


@needs_proc
@pytest.mark.integration
@pytest.mark.parametrize(
    ("says", "deletes", "noted"),
    [
        (copies.ADOPT, False, []),
        (
            "",
            False,
            [f"{one} does not wait for 'service adopt'" for one in copies.MEMBERS],
        ),
        (copies.ADOPT, True, ["the copy of the database was changed"]),
    ],
)
async def test_who_works_on_a_copy_of_the_database_is_noted(
    tmp_path: Path, says: str, deletes: bool, noted: list[str]
) -> None:
    own, url = f"rig_{uuid4().hex[:8]}", os.environ["PIPELINE_DATABASE_URL"]
    async with slow_system(tmp_path, script=answering(says, deletes=deletes)) as beside:
        addresses = beside.servers.stack.addresses
        addresses["PIPELINE_DATABASE_URL"] = url
        await beside.servers.execute(f"CREATE DATABASE {own}")
        addresses["PIPELINE_DATABASE_URL"] = system._in(own, url)
        tables = ("inbox", "outbox", "backlog", "scheduled")
        await beside.servers.execute(
            "CREATE SCHEMA pipeline",
            *(f"CREATE TABLE pipeline.{name} AS SELECT 1 AS n" for name in tables),
        )
        breaker = breaker_of(beside)
        for _ in range(2):
            await breaker.run([Fault(0, "copy", "postgres", 0.1)], lambda _: None)
        left = await beside.servers.execute("SELECT FROM pipeline.outbox")
        addresses["PIPELINE_DATABASE_URL"] = url
        for name in (own, f"{own}_copy"):
            await beside.servers.execute(f"DROP DATABASE {name} WITH (FORCE)")
        assert [one.kind for one in breaker.ended] == ["copy", "copy"]
        assert [one.partition(": ")[0] for one in beside.misbehaved] == 2 * noted
        assert left == "SELECT 1", "the original has everything"


@needs_proc
@pytest.mark.integration
@pytest.mark.parametrize(
    ("says", "is_met", "noted"),
    [
        ('{"relay to %s": "events wait: topic %s does not take events"}', True, []),
        ('{"relay": "%s/3: InvalidTimestampError"}', False, ["a relay holds all events up"]),
        ("", False, []),
    ],
)
async def test_a_topic_refuses_temporarily_and_relays_blocking_all_events_are_noted(
    tmp_path: Path, says: str, is_met: bool, noted: list[str]
) -> None:
    kafka, topic = os.environ["PIPELINE_KAFKA_BOOTSTRAP_SERVERS"], f"rig-{uuid4().hex[:8]}"
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, 1)])
        script = answering(says.replace("%s", topic))
        async with slow_system(tmp_path, "relay-1", script=script) as refused:
            refused.servers.stack.addresses["PIPELINE_KAFKA_BOOTSTRAP_SERVERS"] = kafka
            relay = refused.members["relay-1"].service
            await relay.start()
            while "Connection" in await relay.obstacle():  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.1)
            fault = Fault(0, "refused", topic, 3.0)
            async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
                refusing = asyncio.create_task(brokers.refuse(refused, fault))
                with pytest.raises(InvalidTimestampError):
                    while not refusing.done():
                        await producer.send_and_wait(topic, b"refused now and then")
                assert await refusing is is_met
                while True:  # the broker has been told, and may not know yet
                    with suppress(InvalidTimestampError):
                        await producer.send_and_wait(topic, b"taken")
                        break
            assert [one.partition(": ")[0] for one in refused.misbehaved] == noted
    finally:
        await admin.delete_topics([topic])
        await admin.close()


@needs_proc
@pytest.mark.full
@pytest.mark.integration
async def test_a_truncated_partition_has_other_records_until_its_end_is_restored(
    tmp_path: Path,
) -> None:
    servers = Servers(RAW, tmp_path, tmp_path / "log")
    try:
        await servers.start()
        kafka = servers.stack.kafka
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
        await admin.start()
        await admin.create_topics([NewTopic(TOPIC, 2, 1)])
        await admin.close()

        async def send(*values: bytes) -> None:
            async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
                for value in values:
                    await producer.send_and_wait(TOPIC, value, partition=1)

        async def values() -> list[bytes]:
            return [one.value for one in await read_records(kafka, TOPIC)]

        await send(b"0", b"1")
        before = await brokers.ends(servers)
        await send(b"2", b"3", b"4")
        async with brokers.cut(servers, 1, before[1].size):
            assert await values() == [b"0", b"1"]
            await brokers.fill(servers, 1, 6)
            assert (await brokers.ends(servers))[1].offset == 6
            assert (await values())[:2] == [b"0", b"1"]
            assert len({*(await values())[2:]}) == 1
        assert await values() == [b"0", b"1", b"2", b"3", b"4"]
        await send(b"5")
        assert await values() == [b"0", b"1", b"2", b"3", b"4", b"5"]
    finally:
        await servers.stack.remove(tmp_path / "log")


@pytest.mark.slow
async def test_a_paused_input_is_sent_nothing_and_reports_the_remaining_count(
    tmp_path: Path,
) -> None:
    helper = Helper("outside", tmp_path / "outside.log", requests=tmp_path / "requests")
    memory = Memory(Servers(tmp_path, tmp_path, tmp_path / "log"), helper)
    running = asyncio.create_task(helper.run())
    url = await helper.says("url")
    helper.said |= {"sends": 10, "done": 3}
    async with memory.at_rest() as to_come:
        assert to_come == 7
        with pytest.raises(httpx2.ReadTimeout):
            await asyncio.to_thread(httpx2.get, url, timeout=1.0)
    helper.tell("end")
    await running
    async with memory.at_rest():
        pass  # it has ended


NO_EFFECT = " took no effect"
IN_VAIN: tuple[schedule.Kind, ...] = (
    "unread",
    "clients",
    "copy",
    "cut",
    "halfopen",
    "terminate",
    "locked",
    "rotation",
    "replay",
    "scheduled",
)


async def test_a_fault_without_effect_is_tried_again_and_then_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakers, "ACTS_WITHIN", 0.5)
    monkeypatch.setattr(breakers, "ACTS_AFTER", 2)
    async with slow_system(tmp_path, "consume-1", script="raise SystemExit(1)") as idle:
        idle.servers.stack.addresses |= {"PIPELINE_DATABASE_URL": f"postgresql://me@{HOST}:1/db"}
        is_sent = True
        breaker, notes = breaker_of(idle, lambda: is_sent), list[str]()
        faults = [Fault(0, one, "consume-1", 0.1, server="kafka") for one in IN_VAIN]
        await breaker.run(faults, notes.append)
        assert breaker.ended == []
        assert set(notes) == {f"[red]{one}{end}[/]" for one in faults for end in ("", NO_EFFECT)}

        # Somebody connects at last.
        is_sent = False
        server = await asyncio.start_server(Echo().answer, HOST, 0)
        port = server.sockets[0].getsockname()[1]
        idle.servers.stack.addresses["PIPELINE_KAFKA_BOOTSTRAP_SERVERS"] = f"{HOST}:{port}"
        cut = faults[IN_VAIN.index("cut")]
        running = asyncio.create_task(breaker.run([cut], notes.append))
        await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection(
            HOST, idle.members["consume-1"].proxies["kafka"].port
        )
        with pytest.raises(ConnectionResetError):
            await reader.read()
        await running
        assert [one.kind for one in breaker.ended] == ["cut"]
        writer.close()
        server.close()


@pytest.mark.integration
async def test_versions_are_audited_for_a_while_and_known_before_and_after(tmp_path: Path) -> None:
    own, url = f"rig_{uuid4().hex[:8]}", os.environ["PIPELINE_DATABASE_URL"]
    async with slow_system(tmp_path) as idle:
        addresses = idle.servers.stack.addresses
        addresses["PIPELINE_DATABASE_URL"] = url
        await idle.servers.execute(f"CREATE DATABASE {own}")
        addresses["PIPELINE_DATABASE_URL"] = system._in(own, url)
        breaker = breaker_of(idle)
        count = "UPDATE parcel SET scans = scans + 1"
        await idle.servers.execute(
            "CREATE SCHEMA rig",
            VERSIONS,
            "CREATE TABLE parcel (id text, scans integer)",
            "INSERT INTO parcel VALUES ('N1', 1)",
            count,
        )
        await breaker.audit()
        await idle.servers.execute("INSERT INTO parcel VALUES ('N2', 1)", count)
        for _ in range(2):  # as if the answer to the first was lost
            await breaker._change(END_AUDIT)
        await idle.servers.execute(count)
        for _ in range(2):
            await breaker.audit()
        await idle.servers.execute(count)
        connection = await asyncpg.connect(idle.servers.url())
        try:
            written, known = [
                await connection.fetch(f"SELECT parcel_id, scans FROM rig.{table} ORDER BY 1, 2")
                for table in ("version", "unwatched")
            ]
        finally:
            await connection.close()
            addresses["PIPELINE_DATABASE_URL"] = url
            await idle.servers.execute(f"DROP DATABASE {own} WITH (FORCE)")
        assert [tuple(row) for row in known] == [("N1", 1), ("N1", 2), ("N1", 4), ("N2", 3)]
        assert [tuple(row) for row in written] == [
            *(("N1", n) for n in (3, 5)),
            *(("N2", n) for n in (1, 2, 4)),
        ]


async def test_a_fault_excuses_the_lanes_of_those_that_it_hits_alone(tmp_path: Path) -> None:
    async with slow_system(tmp_path, "consume-1", "consume-2", "relay-1") as some:
        breaker = breaker_of(some)

        def excused(kind: schedule.Kind, target: str, server: str = "") -> int:
            return breaker._lanes_lost(Fault(0, kind, target, server=server))

        settings = (RAW / "src" / "onceward" / "settings.py").read_text()
        assert f"backlog_workers: Count = {WORKERS}\n" in settings
        assert excused("kill", "consume-1") == WORKERS
        assert excused("halfopen", EVERYBODY, "postgres") == 2 * WORKERS
        assert excused("halfopen", "consume-2", "kafka") == 0
        assert excused("kill", "relay-1") == 0
        assert [excused(kind, "consume-1") for kind in KINDS if kind not in UNSAID] == [0] * (
            len(KINDS) - len(UNSAID)
        )


@needs_proc
async def test_a_server_that_does_not_end_when_asked_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "GONE_WITHIN", 0.2)
    servers = Servers(tmp_path, tmp_path, tmp_path / "log")
    servers.stack.state.mkdir()
    for ignores, goes in (("", True), ("trap '' TERM; ", False)):
        script = f"{ignores}echo; while :; do sleep 0.05; done"
        server = await asyncio.create_subprocess_exec(
            "sh", "-c", script, stdout=asyncio.subprocess.PIPE
        )
        assert server.stdout is not None
        await server.stdout.readline()
        state = json.dumps({"kafka": {"pid": server.pid}})
        (servers.stack.state / "state.json").write_text(state)
        assert await servers.stop("kafka", signal.SIGTERM) is goes
        await server.stdout.read()  # its last `sleep` has the pipe, too
        assert await server.wait() == -(signal.SIGTERM if goes else signal.SIGKILL)


def test_the_reason_of_a_failure_is_told_however_deep_it_lies() -> None:
    failure = ProcessFailed("the service was not ready")
    groups = ExceptionGroup("a", [ExceptionGroup("b", [ExceptionGroup("c", [failure])])])
    assert reason_of(groups) is failure


def test_nobody_counts_as_stuck_before_dead_connections_can_have_been_noticed() -> None:
    engine = RAW / "src" / "onceward"
    assert (
        f"_COMMAND_SECONDS = {NOTICED['postgres']}\n"
        in (engine / "servers/database.py").read_text()
    )
    assert f"_ANSWERS_WITHIN = {NOTICED['kafka']}\n" in (engine / "servers/clients.py").read_text()
    assert 2 * NOTICED["postgres"] + NOTICED["kafka"] < PATIENCE


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.name)
def test_every_sabotage_still_fits_the_engine(sabotage: Sabotage, tmp_path: Path) -> None:
    engine = tmp_path / "onceward"
    shutil.copytree(RAW / "src" / "onceward", engine)
    assert sabotage.load in LOADS
    for edit in sabotage.edits:
        edit.apply(engine)
        text = (engine / edit.module).read_text()
        compile(text, edit.module, "exec")
        assert text != (RAW / "src" / "onceward" / edit.module).read_text()


def test_a_column_is_renamed_under_fewer_keys_than_open_the_breaker() -> None:
    settings = (RAW / "src" / "onceward" / "settings.py").read_text()
    [keys] = re.findall(r"breaker_keys: Count = (\d+)\n", settings)
    load = LOADS["a column renamed under few keys"]
    assert {fault.kind for fault in load.schedule} == {"renamed"}
    assert 0 < load.parcels < int(keys)
    assert "PIPELINE_BREAKER_KEYS" not in {**system.SETTINGS, **load.settings}


def test_a_partition_of_connections_that_do_not_answer_outlasts_the_probe() -> None:
    probe = (RAW / "src" / "onceward" / "servers" / "probe.py").read_text()
    [seconds] = re.findall(r"^_SECONDS = ([\d.]+)$", probe, re.MULTILINE)
    load = LOADS["connections that do not answer"]
    # For two seconds SQLAlchemy tries to end the connection in an orderly way.
    limit = float(system.SETTINGS["PIPELINE_TRANSACTION_TIMEOUT"]) + 2 + float(seconds)
    parted = [fault.seconds for fault in load.schedule if fault.kind == "partition"]
    assert limit < min(parted)
    assert max(parted) < float(load.settings["PIPELINE_BACKLOG_LEASE"])


def test_what_is_stopped_is_obeyed_before_it_ends_by_itself() -> None:
    engine = (RAW / "src" / "onceward" / "apply" / "throttles.py").read_text()
    [fresh] = re.findall(r"^_FRESH_SECONDS = ([\d.]+)$", engine, re.MULTILINE)
    limit = float(system.SETTINGS["PIPELINE_TRANSACTION_TIMEOUT"])
    assert float(fresh) + limit <= stops.OBEYED_WITHIN
    assert sum(name.startswith("consume") for name in (*CONSUMERS, *EXTRA)) == stops.PROCESSES
    for target in STOPS:
        kind, name, *rate = target.split()
        assert kind in {"topic", "consumer", "events", "key"}
        assert name
        assert all(map(float, rate))
    assert len(LOADS.keys() & {*STOPS}) == 5


def test_the_page_lists_every_kind_of_fault_and_counts_the_sabotages() -> None:
    page = (RAW.parent / "docs" / "chaos.md").read_text("utf-8")
    chapter = page.partition("\n## The faults\n")[2].partition("\n## ")[0]

    assert {kind for kind in schedule.KINDS if f"`{kind}`" not in chapter} == set()
    assert f"one of {len(SABOTAGES)} sabotages" in page


def test_a_sabotage_whose_text_is_gone_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\n")
    with pytest.raises(Outdated, match="0 times"):
        Edit("a.py", "two", "three").apply(tmp_path)


@asynccontextmanager
async def through_a_proxy(*, kafka: bool = False) -> AsyncIterator[tuple[Proxy, "Echo"]]:
    """A proxy before a server that answers what it is told."""
    echo = Echo()
    server = await asyncio.start_server(echo.answer, HOST, 0)
    echo.port = server.sockets[0].getsockname()[1]
    proxy = Proxy(lambda: (HOST, echo.port), kafka=kafka)
    await proxy.start()
    try:
        yield proxy, echo
    finally:
        await proxy.stop()
        server.close()
        await server.wait_closed()


class Echo:
    """A server that says back what it hears."""

    port = 0

    def __init__(self) -> None:
        self.heard = b""
        self.ended = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            while data := await reader.read(1024):
                self.heard += data
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()
            self.ended.set()


async def nothing_comes(reader: asyncio.StreamReader) -> bool:
    """Whether nothing is said for a while."""
    try:
        return not await asyncio.wait_for(reader.read(1), 0.2)
    except TimeoutError:
        return True


async def test_a_proxy_passes_everything_on_and_the_end_too() -> None:
    async with through_a_proxy() as (proxy, echo):
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write(b"x" * 1_000_000)
        assert await reader.readexactly(1_000_000) == b"x" * 1_000_000
        writer.close()
        await echo.ended.wait()


async def test_a_cut_connection_is_reset_on_both_sides() -> None:
    async with through_a_proxy() as (proxy, echo):
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write(b"x")
        await reader.readexactly(1)
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        await echo.ended.wait()
        writer.close()


async def test_a_half_open_connection_swallows_and_new_ones_are_well() -> None:
    async with through_a_proxy() as (proxy, echo):
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write(b"x")
        await reader.readexactly(1)
        proxy.silence()
        writer.write(b"swallowed")
        assert await nothing_comes(reader)
        writer.close()
        other, new = await asyncio.open_connection(HOST, proxy.port)
        new.write(b"new")
        assert await other.readexactly(3) == b"new"
        assert echo.heard == b"xnew"
        assert not echo.ended.is_set()
        new.close()


async def test_what_waits_before_a_partition_arrives_when_it_is_healed() -> None:
    async with through_a_proxy() as (proxy, echo):
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write(b"x")
        await reader.readexactly(1)
        with proxy.parted():
            with proxy.parted():
                writer.write(b"late")
                other, new = await asyncio.open_connection(HOST, proxy.port)
                new.write(b"new")
                assert await nothing_comes(reader)
            assert await nothing_comes(reader), "the other partition goes on"
            assert echo.heard == b"x"
        assert await reader.readexactly(4) == b"late"
        assert await other.readexactly(3) == b"new"
        writer.close()
        new.close()


async def test_a_slow_connection_keeps_its_order() -> None:
    async with through_a_proxy() as (proxy, _):
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        with proxy.slowed(0.1):
            with proxy.slowed(0.05):
                pass
            began = loop.time()
            writer.write(b"one")
            assert await reader.readexactly(3) == b"one"
            assert loop.time() - began >= 0.2
        writer.write(b"two")
        assert await reader.readexactly(3) == b"two"
        writer.close()


async def test_a_server_that_is_away_resets_its_clients() -> None:
    with socket.socket() as closed:
        closed.bind((HOST, 0))
        proxy = Proxy(closed.getsockname)
        await proxy.start()
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        await proxy.stop()


async def test_a_broker_that_names_its_address_names_the_proxy() -> None:
    async with through_a_proxy(kafka=True) as (proxy, echo):

        def metadata(port: int) -> bytes:
            body = struct.pack(">iih9si", 7, 1, len(HOST), HOST.encode(), port)
            return struct.pack(">i", len(body)) + body

        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        answer = metadata(echo.port)
        for byte in answer:  # however the answer is cut into pieces
            writer.write(bytes([byte]))
            await writer.drain()
        assert await reader.readexactly(len(answer)) == metadata(proxy.port)
        writer.close()


@needs_proc
@pytest.mark.full
@pytest.mark.integration
def test_the_self_test_catches_sabotages_and_lets_the_honest_engine_pass(tmp_path: Path) -> None:
    names = ("markers commit separately", "a key that is paused is overtaken")
    said = subprocess.run(
        [*(sys.executable, "-m", "chaos.selftest"), *names, *("--into", str(tmp_path))],
        cwd=RAW.parent,
        env=environment_in(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert said.returncode == 0, said.stdout
    assert re.findall(r"^ *(right|WRONG) ", said.stdout, re.MULTILINE) == ["right"] * 4, said.stdout
    assert processes_of(tmp_path) == []


@needs_proc
@pytest.mark.full
@pytest.mark.integration
def test_two_releases_come_out_by_expand_and_contract_while_scans_are_handled(
    tmp_path: Path,
) -> None:
    # Two of them: the second one takes away what the first has brought. On a slow machine it does
    # so when the feed has ended already.
    options = ["--faults", "rollout", "--events", "3000", "--seconds", "12", "--poison", "0"]
    report, evidence = ran(tmp_path, *options)
    assert report["holds"], evidence
    assert report["faults"] == {"rollout": 2}, evidence
    assert report["migrations"] == {"expand": 2, "contract": 1}, evidence
    assert report["applied"] == 3_000, evidence


@needs_proc
@pytest.mark.full
@pytest.mark.integration
def test_a_service_around_which_everything_breaks_once_loses_doubles_and_reorders_nothing(
    tmp_path: Path,
) -> None:
    options = ["--events", "6000", "--seconds", "120", "--seed", "4", "--poison", "0.05"]
    report, evidence = ran(tmp_path, *options)
    assert report["holds"], evidence
    assert report["sent"] == 6_000, evidence
    assert report["duplicates"] > 400, evidence
    assert report["dead"] > 50, evidence
    assert report["parked"] > 10, evidence
    assert set(report["dead_by_reason"]) == {
        "attempts used up",
        "identity mismatch",
        "invalid payload",
        "rejected",
        *ILLEGIBLE,
    }, evidence
    for counts in report["consumers"].values():
        assert sum(counts.values()) == 6_000, evidence
        assert counts["applied"] > 5_250, evidence
    assert report["faults"] == dict.fromkeys(KINDS, 1), evidence
    assert report["errands"]["requests"] >= report["errands"]["calls"] > 50, evidence
    assert report["errands"]["reminders"] > 20, evidence
    assert report["errands"]["days dropped"] >= 1, evidence
    assert report["errands"]["versions"] > 50, evidence
    assert report["payments"]["commands"] == 600, evidence
    assert report["payments"]["events"] == 600, evidence


@needs_proc
@pytest.mark.full
@pytest.mark.integration
def test_messages_that_crash_the_server_fail_and_no_other_message_does(tmp_path: Path) -> None:
    # Seed 125 has two such messages early on. A crash counts only if others commit between.
    options = ["--events", "900", "--seconds", "90", "--seed", "125", "--faults", ""]
    report, evidence = ran(tmp_path, *options, "--poison", "0.004", "--poisons", "crashes")
    assert report["holds"], evidence
    assert report["dead_by_reason"] == {"attempts used up": 1}, evidence


def ran(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Run a round to its end; returns its report, and all that it has told, for who fails."""
    said = subprocess.run(
        [sys.executable, "-m", "chaos.run", "--into", str(folder), *options],
        cwd=RAW.parent,
        env=environment_in(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    report_file, logs = folder / "report.json", sorted(folder.glob("*.log"))
    written = report_file.read_text() if report_file.exists() else "no report"
    evidence = "\n".join([said.stdout, written, *map(last_lines, logs)])
    assert said.returncode == 0, evidence
    assert processes_of(folder) == [], evidence
    report: dict[str, Any] = json.loads(written)
    return report, evidence
