"""The chaos test's second service: its feed, its faults, and what the checker finds."""

import asyncio
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from aiokafka.errors import KafkaError  # type: ignore[import-untyped]

from benchmarks import payments as load
from chaos import feed
from chaos.payments import MEMBERS, REPEATS, Books, judge, orders
from chaos.run import planned
from chaos.schedule import KINDS, SINGLE
from demo.evidence import Record

LOAD = load.make(400)
MUST = LOAD.ledger


def test_commands_are_sent_in_their_order_and_some_come_again() -> None:
    sends = orders(LOAD, seed=5)
    assert [*dict.fromkeys(one.command for one in sends)] == LOAD.commands
    assert 0.5 < (len(sends) - len(LOAD.commands)) / (REPEATS * len(LOAD.commands)) < 2
    assert orders(LOAD, seed=5) == sends != orders(LOAD, seed=6)
    for one in sends:
        key, value, headers = one.record()
        assert (key.decode(), json.loads(value)["amount"]) == one.command[2:6:3]
        assert "ce_time" not in dict(headers), "it would be too old once one was"


class Unsteady:
    """A producer that takes every third record, and says nothing of every fifth that it took."""

    taken: Sequence[bytes] = []

    def __init__(self, **_: object) -> None:
        self._number = 0

    async def start(self) -> None:
        """Connect."""

    async def stop(self) -> None:
        """Disconnect."""

    async def send(self, topic: str, value: bytes, **_: object) -> Any:
        """Take the record, or not."""
        Unsteady._calls += 1
        if Unsteady._calls % 3 == 0:
            return _failed()
        Unsteady.taken = [*Unsteady.taken, value]
        return _failed() if Unsteady._calls % 5 == 0 else _done()

    _calls = 0


async def _failed() -> None:
    raise KafkaError


async def _done() -> None:
    pass


@pytest.mark.parametrize(("at_most", "is_in_order"), [(1, True), (feed.BURST_AT_MOST, False)])
async def test_commands_arrive_in_their_order_whatever_becomes_of_kafka(
    at_most: int, is_in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "AIOKafkaProducer", Unsteady)
    monkeypatch.setattr(feed, "AGAIN_AFTER", 0.0)
    monkeypatch.setattr(Unsteady, "taken", [])
    sends = orders(load.make(40), seed=5)
    unsteady = feed.Feed("", "payments", lambda **_: None, burst_at_most=at_most)
    await unsteady.run(sends, 1e-9)
    firsts = [*dict.fromkeys(Unsteady.taken)]
    assert len(Unsteady.taken) > len(firsts)
    assert (firsts == [*dict.fromkeys(one.record()[1] for one in sends)]) is is_in_order


async def test_the_last_scans_come_slowly_until_no_fault_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed, "AIOKafkaProducer", Unsteady)
    monkeypatch.setattr(feed, "AGAIN_AFTER", 0.0)
    monkeypatch.setattr(feed, "SLOWLY", 0.001)
    monkeypatch.setattr(Unsteady, "taken", [])
    sends, may_end = orders(load.make(40), seed=5), asyncio.Event()
    told, is_last = dict[str, Any](), asyncio.Event()

    def tell(**said: Any) -> None:
        told.update(said)
        if told.get("done") == len(sends) - 1:
            is_last.set()

    slow = feed.Feed("", "payments", tell)
    sending = asyncio.create_task(slow.run(sends, 1e-9, may_end))
    await is_last.wait()
    assert told["slow"]
    await asyncio.sleep(0.1)
    assert told["begun"] == len(sends) - 1
    may_end.set()
    await sending
    assert told["done"] == len(sends)


def asked(**options: Any) -> Namespace:
    """The options of a round."""
    usual = {"replay": None, "faults": ",".join(KINDS), "poisons": "", "poison": 0.0}
    return Namespace(**{**usual, "seed": 1, "seconds": 200, "events": 900, **options})


def test_payments_have_faults_of_their_own_beside_those_of_all() -> None:
    without, plan = planned(asked(payments=0.0), {}), planned(asked(payments=0.1), {})
    assert (without.payments, plan.payments) == (0, 90)
    own = [fault for fault in plan.schedule if fault.target in MEMBERS]
    assert [*without.schedule, *own] == plan.schedule, "of the scans nothing changes"
    assert {fault.kind for fault in own} == {*SINGLE}
    assert {fault.target for fault in own} == {*MEMBERS}
    only = planned(asked(payments=0.1, faults="broker"), {}).schedule
    assert {fault.target for fault in only} == {"kafka"}


def event(key: str, sequence: int, type: str, amount: int) -> Record:
    """An event as it lies in its topic."""
    headers = {"ce_id": f"{key} {sequence}", "ce_type": type, "ce_sequence": f"{sequence:020}"}
    value = json.dumps({"payment_id": key, "amount": amount}).encode()
    return Record(0, key.encode(), {name: text.encode() for name, text in headers.items()}, value)


OUTPUT = [
    event(key, number, *one)
    for key, events in MUST.events.items()
    for number, one in enumerate(events, start=1)
]
ENTRIES = [
    {"account_id": account, "amount": amount, "reference": "any"}
    for account, amount in MUST.balances.items()
    if amount
]
BOOKS = Books(
    tables=replace(MUST, events={}),
    entries=ENTRIES,
    markers=[str(one.number) for one in LOAD.commands],
    backlog=[],
    output=OUTPUT,
)
PAYMENT = next(key for key, events in MUST.events.items() if len(events) > 1)
FIRST = OUTPUT.index(event(PAYMENT, 1, *MUST.events[PAYMENT][0]))


def with_table(name: str, key: str, change: Callable[[Any], Any]) -> Books:
    """The books in which one row of a table differs."""
    rows = dict(getattr(MUST, name))
    rows[key] = change(rows[key])
    return replace(BOOKS, tables=replace(BOOKS.tables, **{name: rows}))


def with_output(*places: int, more: Sequence[Record] = ()) -> Books:
    """The books whose output has its first records of the payment in other places."""
    chosen = [OUTPUT[FIRST + place] for place in places]
    return replace(BOOKS, output=[*OUTPUT[:FIRST], *chosen, *OUTPUT[FIRST + 2 :], *more])


def test_the_checker_accepts_correct_payments_in_order_with_repeated_events() -> None:
    assert judge(LOAD, BOOKS) == []
    assert judge(LOAD, with_output(0, 1, 0, 1, 0)) == []


@pytest.mark.parametrize(
    ("books", "kinds"),
    [
        pytest.param(replace(BOOKS, markers=BOOKS.markers[1:]), ["lost"], id="no marker"),
        pytest.param(
            replace(BOOKS, markers=[*BOOKS.markers, BOOKS.markers[3]]),
            ["doubled"],
            id="two markers",
        ),
        pytest.param(
            replace(BOOKS, markers=[*BOOKS.markers, "x"]), ["doubled"], id="unknown marker"
        ),
        pytest.param(replace(BOOKS, backlog=[("3", "rejected")]), ["misjudged"], id="a letter"),
        pytest.param(with_output(1), ["lost"], id="no event"),
        pytest.param(with_output(1, 0), ["reordered"], id="events swapped"),
        pytest.param(
            with_output(
                0, 1, more=[OUTPUT[FIRST]._replace(value=(OUTPUT[FIRST].value or b"") + b" ")]
            ),
            ["doubled"],
            id="a repeat that differs",
        ),
        pytest.param(
            with_output(0, 1, more=[event(PAYMENT, 9, *MUST.events[PAYMENT][0])]),
            ["doubled"],
            id="the same under another id",
        ),
        pytest.param(
            replace(
                BOOKS,
                output=[
                    *OUTPUT[: FIRST + 1],
                    OUTPUT[FIRST + 1]._replace(partition=1),
                    *OUTPUT[FIRST + 2 :],
                ],
            ),
            ["reordered"],
            id="two partitions",
        ),
        pytest.param(
            replace(BOOKS, output=[*OUTPUT, OUTPUT[0]._replace(value=b"{")]),
            ["lost"],
            id="illegible",
        ),
        pytest.param(
            with_table("entries", PAYMENT, lambda n: n + 2), ["misjudged"], id="moved twice"
        ),
        pytest.param(
            with_table("payments", PAYMENT, lambda row: row._replace(captured=0)),
            ["misjudged"],
            id="not captured",
        ),
        pytest.param(
            with_table("balances", "merchant:0", lambda balance: balance + 1),
            ["misjudged"] * 3,  # of the load, of the ledger's sum, and of its entries
            id="a lost update",
        ),
        pytest.param(
            replace(BOOKS, entries=ENTRIES[1:]), ["misjudged"] * 2, id="an entry is missing"
        ),
    ],
)
def test_what_became_of_payments_is_checked(books: Books, kinds: list[str]) -> None:
    assert Counter(finding.kind for finding in judge(LOAD, books)) == Counter(kinds)
