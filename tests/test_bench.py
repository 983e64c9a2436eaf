"""The benchmark: its check must be able to fail, its figures must be right, and it must run."""

import asyncio
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from benchmarks import figures, interpreter, kept, load, machine, producer, run, tables
from benchmarks.bench import Bench, Book, Options, Run
from benchmarks.check import Check, CheckFailed, misplaced, require
from benchmarks.clock import Clock
from benchmarks.load import SAMPLED
from benchmarks.marks import GOALS, LEAST_IDLE, Mark, Values, quantile, ratios
from benchmarks.measures import MEASURES
from benchmarks.measures.dropping import longest_pause
from benchmarks.measures.growth import SHARDS, VARIED, name
from benchmarks.measures.memory import growth_of
from benchmarks.measures.ordinary import RATES, SIDES, hold_against_goals, named
from benchmarks.measures.peers import PEERS, best, peers
from benchmarks.measures.poison import KEYS, KINDS, SHARES, undead
from benchmarks.measures.poison import named as named_failing
from benchmarks.measures.relay import REQUIRED_HEADERS, event_of
from benchmarks.measures.xmin import MOMENTS, SERIES, TABLES, place_of, series_name, summary
from benchmarks.measures.xmin import SIDES as TRANSACTIONS
from benchmarks.measures.xmin import windows as windows_of
from benchmarks.plots import Bar, bars, lines, steps
from benchmarks.rig import BARE_ORM, OURS, USUAL, Sample
from benchmarks.run import rig_in
from benchmarks.runs import rate, records
from benchmarks.work import is_poison
from demo.evidence import DELAYED, MOVED, Effect
from demo.flights import Scan
from demo.processes import ProcessFailed
from website import pictures

from tests.baked import ROOT
from tests.test_demo import environment_in, needs_proc, processes_of

EVENTS = [("a", 1), ("b", 1), ("a", 2), ("a", 3), ("b", 2)]
EXPECTED = {"a": 3, "b": 2}
SCANS = {"a": 2, "b": 2}


def faults(events: list[tuple[str, int]] = EVENTS, rows: dict[str, int] | None = None) -> list[str]:
    """What the check says of these events and rows."""
    check = Check()
    for event in events:
        check.add(*event)
    return check.faults(EXPECTED, SCANS, SCANS if rows is None else rows)


def test_work_that_was_done_passes_the_check() -> None:
    assert faults() == []
    require(faults(), "ours")


@pytest.mark.parametrize(
    ("events", "said"),
    [
        pytest.param([*EVENTS[:2], *EVENTS[3:]], "event 3 of a follows upon 1", id="one was lost"),
        pytest.param(EVENTS[:-1], "b has 1 events, it should be 2", id="the last was lost"),
        pytest.param([*EVENTS, EVENTS[2]], "6 events were published", id="one was doubled"),
        pytest.param(
            [*EVENTS[:-1], EVENTS[0]], "b has 1 events", id="one was lost and another doubled"
        ),
        pytest.param(
            [("a", 2), ("a", 1), *EVENTS[3:], EVENTS[1]],
            "event 2 of a follows upon 0",
            id="two changed places",
        ),
        pytest.param([*EVENTS[:-1], ("c", 1)], "c has 1 events", id="one is of another key"),
        pytest.param([], "0 events were published", id="nothing was done"),
    ],
)
def test_events_that_are_not_as_they_should_be_fail_the_check(
    events: list[tuple[str, int]], said: str
) -> None:
    assert said in "; ".join(faults(events))
    with pytest.raises(CheckFailed, match=r"^usual: "):
        require(faults(events), "usual")


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param({"a": 2, "b": 1}, id="a scan was not counted"),
        pytest.param({"a": 2, "b": 3}, id="a scan was counted twice"),
        pytest.param({"a": 3, "b": 1}, id="a scan was counted elsewhere"),
        pytest.param({"a": 4}, id="a row is missing"),
        pytest.param({"a": 2, "b": 2, "c": 0}, id="a row is too many"),
    ],
)
def test_rows_that_are_not_as_they_should_be_fail_the_check(rows: dict[str, int]) -> None:
    assert faults(rows=rows)


def moved(number: int) -> Effect:
    return Effect(MOVED, "one", number)


@pytest.mark.parametrize(
    ("effects", "said"),
    [
        pytest.param([moved(1), moved(2)], None, id="as they should be"),
        pytest.param([moved(2), moved(1)], "scan 2 where .* scan 1 should be", id="reordered"),
        pytest.param([moved(1), moved(1)], "scan 1 where .* scan 2 should be", id="doubled"),
        pytest.param([moved(1)], "nothing where .* scan 2 should be", id="lost"),
        pytest.param([moved(1), Effect(DELAYED, "one", 2)], "parcel.delayed", id="another type"),
        pytest.param([moved(1), Effect(MOVED, "two", 2)], "scan 2 where", id="another scanner"),
        pytest.param([moved(1), moved(2), moved(3)], "scan 3 where nothing", id="one more"),
    ],
)
def test_events_must_tell_of_the_scans_of_a_parcel_in_their_order(
    effects: list[Effect], said: str | None
) -> None:
    check = Check()
    for sequence, effect in enumerate(effects, 1):
        check.add("a", sequence, effect)
    found = "; ".join(check.faults({"a": len(effects)}, {}, {}, {"a": [moved(1), moved(2)]}))
    assert found == "" if said is None else re.search(said, found)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        pytest.param({"a": ("here", 2)}, None, id="as it should be"),
        pytest.param({"a": ("there", 2)}, "a is at", id="at an earlier place"),
        pytest.param({"a": ("here", 1)}, "a is at", id="with an earlier time"),
        pytest.param({}, "a is at None", id="nowhere"),
        pytest.param({"a": ("here", 2), "b": ("here", 1)}, "b is at", id="one more"),
    ],
)
def test_parcels_must_be_where_their_latest_scan_has_seen_them(
    found: dict[str, tuple[str, int]], said: str | None
) -> None:
    def seen(one: dict[str, tuple[str, int]]) -> dict[str, tuple[str, datetime]]:
        return {
            key: (place, datetime(2026, 1, day, tzinfo=UTC)) for key, (place, day) in one.items()
        }

    faults = "; ".join(misplaced(seen({"a": ("here", 2)}), seen(found)))
    assert faults == "" if said is None else faults.startswith(said)


def test_a_load_tells_where_parcels_were_seen_last_whatever_comes_in_late() -> None:
    def scan(number: int, place: str, day: int) -> Scan:
        return Scan("one", number, "a", place, datetime(2026, 1, day, tzinfo=UTC), None)

    scans = [scan(1, "first", 1), scan(2, "newest", 3), scan(3, "late", 2), scan(4, "equal", 3)]
    assert load.Load("few", scans).last_seen == {"a": ("equal", scans[1].scanned_at)}
    assert load.Load("few", scans[:3]).last_seen == {"a": ("newest", scans[1].scanned_at)}


def test_a_check_that_finds_much_says_so_in_a_few_words() -> None:
    with pytest.raises(CheckFailed, match=r"5; and 4 more$"):
        require([str(number) for number in range(1, 10)], "ours")


def test_a_load_tells_what_must_come_of_it() -> None:
    made = load.make(10, 1_000)
    assert made.per_parcel.total() == len(made.scans) == 1_000
    late = sum(scan.minutes_late == 90 for scan in made.scans)
    assert made.events == 1_000 + late > 1_000
    assert load.make(10, 1_000) == made
    assert (
        len({scan.number for scan in (*made.scans, *load.make(10, 9, first=1_000).scans)}) == 1_009
    )


@pytest.mark.parametrize("size", [250, 2_000, 20_000])
def test_payloads_have_their_size_and_identities_stay_short(size: int) -> None:
    made = load.make(1_000, 100, payload=size)
    for scan in made.scans:
        assert len(scan.payload()) == pytest.approx(size, rel=0.1)
        assert dict(made.headers(scan))["ce_source"] == scan.source[:20].encode()
    assert made.name != load.make(1_000, 100).name


def test_one_trace_in_a_hundred_is_recorded() -> None:
    made = load.make(1_000, 10 * SAMPLED, traced=True)
    traces = [dict(made.headers(scan))["traceparent"].decode() for scan in made.scans]
    assert all(re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]", each) for each in traces)
    assert sum(each.endswith("-01") for each in traces) == 10
    assert len(set(traces)) == len(traces)


def goal(name: str) -> Mark:
    """A mark that was not measured."""
    return Mark(next(goal for goal in GOALS if goal.name == name), [])


def test_the_median_of_the_rounds_is_held_against_the_goal() -> None:
    relay = goal("relay alone").goal
    mark = Mark(relay, [0.95, 0.2, 0.9])
    assert (mark.value, mark.is_met) == (0.9, True)
    assert not Mark(relay, [0.95, 0.2, 0.89]).is_met
    told = mark.as_json()
    assert (told["least"], told["most"], told["goal"]) == (0.2, 0.95, "≥ 0.9 of producer")


def test_what_is_to_be_less_is_not_met_by_as_much() -> None:
    at_most, less = goal("latency, p50").goal, goal("idle service").goal
    assert Mark(at_most, [10]).is_met
    assert not Mark(at_most, [10.1]).is_met
    assert Mark(less, [0.9]).is_met
    assert not Mark(less, [1]).is_met


def test_what_was_not_measured_is_not_met() -> None:
    mark = goal("SQL handler, 1 key")
    assert not mark.is_met
    assert mark.as_json()["remark"] == "not measured"


def test_a_layer_that_waits_has_not_spent_its_waiting() -> None:
    waiting = SimpleNamespace(flush=lambda: sleep(0.2), decode=lambda: sleep(0.2))
    clock = Clock()
    clock.note(waiting, "flush", "flush", waits=True)
    clock.note(waiting, "decode", "decode")
    waiting.flush()
    waiting.decode()
    assert clock.spent["flush"] < 0.1
    # What is called for each message is not asked to wait: its clock is cheap and goes on.
    assert clock.spent["decode"] > 0.1


def test_sides_are_compared_round_by_round() -> None:
    ours, bare = [{"rate": 10.0}, {"rate": 5.0}], [{"rate": 20.0}, {"rate": 10.0}]
    assert ratios(ours, bare) == [0.5, 0.5]
    assert ratios([], bare) == []


def test_ours_is_held_against_the_fastest_peer_of_each_round() -> None:
    book = Book()
    for who, rates in {
        "ours": (900.0, 900.0),
        "pactix": (3.0, 2.0),
        "txoutbox": (1.0, 6.0),
    }.items():
        book.runs += [Run("peers", who, n, {"rate": rate}) for n, rate in enumerate(rates, 1)]
    assert [one["rate"] for one in best(book)] == [3, 6]
    assert best(Book()) == []


async def test_peers_are_left_out_where_they_cannot_be_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nowhere = [str(tmp_path / "python3.12")]
    monkeypatch.setattr(interpreter, "commands", lambda: nowhere)
    bench = Bench(run.rig_in(tmp_path), Options(), Console(quiet=True))
    await peers(bench)
    assert [(one.goal.name, one.values) for one in bench.book.marks] == [
        ("against the best peer", [])
    ]
    assert bench.book.runs == []


def test_every_peer_has_a_program_and_a_row_in_the_documentation() -> None:
    programs = {path.stem for path in (ROOT / "benchmarks" / "peers").glob("*.py")}
    assert programs - {"__init__", "shared"} == {name.replace("-", "_") for name in PEERS}
    assert f"| {', '.join(PEERS)} |" in kept.MEASURING.read_text("utf-8")


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [quantile(values, share) for share in (0.5, 0.99, 0.999, 1.0)] == [50, 99, 100, 100]
    assert quantile([7.0], 0.5) == 7.0


def test_rates_are_measured_from_first_consumed_record_to_last_published_event() -> None:
    # Each message makes two events; who publishes late is not faster for it.
    soon = [*range(0, 2_000, 200), 2_000]
    late = [0] * 6 + [*range(400, 2_000, 400), 2_000]
    for counts in (soon, late):
        samples = [Sample(float(at), count, {"python": at / 10}) for at, count in enumerate(counts)]
        assert rate(samples, 1_000) == {"rate": 100, "cpu_python": 1.0}


class Told:
    """Counts that come one after the other, the last of them for ever."""

    def __init__(self, *counts: int) -> None:
        self._counts = list(counts)

    async def __call__(self) -> int:
        return self._counts.pop(0) if len(self._counts) > 1 else self._counts[0]


@pytest.mark.parametrize(
    ("published", "begun", "seen"),
    [
        pytest.param([0, 0, 0, 2, 4], None, [0, 2, 4], id="published at once"),
        pytest.param([0, 0, 0, 0, 4], [0, 0, 1], [0, 0, 0, 4], id="consumed before"),
        pytest.param([4], None, [0, 4], id="all is there at once"),
    ],
)
async def test_work_is_measured_from_the_last_sample_before_it_began(
    tmp_path: Path, published: list[int], begun: list[int] | None, seen: list[int]
) -> None:
    rig = rig_in(tmp_path)
    asked = Told(*begun) if begun else None
    rig.servers_cpu = dict  # type: ignore[method-assign]
    samples = await rig.watch([], Told(*published), 4, begun=asked)
    assert [one.count for one in samples] == seen


def test_memory_grows_as_a_line_through_what_comes_after_the_first_third() -> None:
    warming_up = [(float(at), 10.0 * at) for at in range(100)]
    noisy = [(float(at), 100 + (at - 200) / 600 + at % 2) for at in range(100, 300)]
    assert growth_of([*warming_up, *noisy]) == pytest.approx(1, rel=0.05)
    assert growth_of([*warming_up, *((at, 50.0) for at, _ in noisy)]) == 0


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_the_scans_that_fail_are_always_the_same_and_scattered(share: float) -> None:
    failing = [number for number in range(20_000) if is_poison(number, share)]
    assert len(failing) == pytest.approx(20_000 * share, rel=0.2)
    assert failing == [number for number in range(20_000) if is_poison(number, share)]
    halves = [sum(number < 10_000 for number in failing), sum(number % 2 for number in failing)]
    assert halves == pytest.approx([len(failing) / 2] * 2, rel=0.2)
    assert not any(is_poison(number, 0) for number in range(20_000))


FAILING = [str(number) for number in range(1_000) if is_poison(number, 0.01)]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        pytest.param([(id, 6, True) for id in FAILING], "", id="all are dead"),
        pytest.param([(id, 6, True) for id in FAILING[1:]], "in the backlog", id="one is missing"),
        pytest.param(
            [(id, 6, True) for id in [*FAILING, FAILING[0]]],
            "in the backlog",
            id="one is there twice",
        ),
        pytest.param(
            [(id, 6, True) for id in [*FAILING[1:], "0"]],
            "scan 0 is in one",
            id="another one is dead",
        ),
        pytest.param(
            [(id, 6, id != FAILING[0]) for id in FAILING],
            "is waiting after 6",
            id="one still waits",
        ),
        pytest.param([(id, 5, True) for id in FAILING], "dead after 5", id="dead too early"),
    ],
)
def test_each_scan_that_fails_is_dead_once_after_all_its_attempts(
    rows: list[tuple[str, int, bool]], said: str
) -> None:
    assert not is_poison(0, 0.01)
    found = "; ".join(undead(rows, load.make(10, 1_000), 0.01, 6))
    assert said in found if said else found == ""


@pytest.mark.parametrize(("seconds", "count", "size"), [(900, 90, 10_000), (6, 5, 2_100)])
def test_windows_contain_the_scans_of_their_time_beyond_the_warm_up(
    seconds: float, count: int, size: int
) -> None:
    works = windows_of(seconds)
    assert [len(one.scans) for one in works] == [size] * count
    assert len({scan.number for one in works for scan in one.scans}) == count * size


def test_figures_during_an_open_transaction_are_from_windows_ending_then() -> None:
    assert [place_of(minute, 90) for minute in MOMENTS] == [5, 29, 59, 71, 89]
    found = [{"rate": 1.0, "p50": n / 6, "p99": float(n > 72)} for n in range(1, 91)]
    values = summary(found, 900)
    assert [values[f"p50 at {minute}"] for minute in MOMENTS] == pytest.approx(list(MOMENTS))
    assert values["p50 a minute"] == pytest.approx(1)
    # What follows upon the end of the transaction is no growth.
    assert [values[f"{of} a minute"] for of in ("rate", "p99")] == [0, 0]


def test_a_window_in_which_the_machine_was_saturated_has_no_latencies() -> None:
    found: list[Values] = [{"rate": 1.0}, *({"rate": 1.0, "p50": 2.0} for _ in range(4))]
    values = summary(found, 50)
    assert (values["rate"], values["p50"], values["p50 a minute"]) == (1, 2, 0)
    assert [f"p50 at {minute}" in values for minute in MOMENTS] == [False, True, True, True, True]
    values = summary([{"rate": 1.0}] * 5, 50)
    assert [of for of in values if "p50" in of] == []


@pytest.mark.parametrize("per_second", [0.7, 100])
def test_there_are_records_after_the_warm_up_however_short_the_time(
    per_second: float,
) -> None:
    assert records(0.1, per_second) > records(0, per_second)
    assert records(20, per_second) - records(0, per_second) == 20 * per_second


def test_the_longest_pause_is_from_progress_to_progress() -> None:
    counts = [0, 5, 5, 5, 9, 12, 12]
    samples = [Sample(float(at), count, {}) for at, count in enumerate(counts)]
    assert longest_pause(samples, 0.5, 5.5) == 3
    assert longest_pause(samples, 1.5, 5.5) == 2.5
    assert longest_pause(samples, 4.5, 10) == 5
    assert longest_pause([], 1, 3) == 2


@pytest.mark.parametrize("most", [0.0004, 0.9, 1, 4.9, 5, 37, 100, 70_123])
def test_an_axis_has_a_few_round_numbers(most: float) -> None:
    ticks = steps(most)
    assert ticks[0] == 0
    assert ticks[-2] < most <= ticks[-1] * 1.000001
    assert 3 <= len(ticks) <= 7


def test_plots_are_well_formed_whatever_they_are_called() -> None:
    hostile = 'a <b> & "c"'
    bar = Bar(hostile, 3.0, 2.0, 4.0)
    drawn = [
        bars(hostile, "%", {hostile: [bar], "": [bar, Bar("zero", 0.0, 0.0, 0.0)]}),
        lines(hostile, hostile, hostile, {hostile: [(1, 2), (10, 3)], "two": [(1, 0)]}),
        lines(hostile, "x", "y", {"one": [(5, 0)]}, logarithmic=True),
    ]
    for svg in drawn:
        root = ElementTree.fromstring(svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert hostile in [element.text for element in root.iter()]
        colours = {one.get(kind, "none") for one in root.iter() for kind in ("fill", "stroke")}
        assert colours <= {*pictures.DARK, "none"}


def test_every_measure_has_its_figures() -> None:
    values = {"rate": 2.0, "p50": 1.0, "p99": 3.0, "cpu_python": 1.0, "cpu_postgres": 1.0}
    values |= {"cpu_kafka": 1.0, "marker_bytes": 200.0, "event_bytes": 500.0, "wal_bytes": 900.0}
    book = Book(series={"memory over time": [(0.0, 100.0), (1.0, 110.0)]})
    for measure in ("throughput", "relay", "latency"):
        book.runs += [Run(measure, who, number, values) for who in "ab" for number in (0, 1, 2)]
    book.runs += ordinary_runs(values | {"cpu": 2.0})
    for kind, points in VARIED.items():
        book.runs += [Run("growth", name(kind, point), 1, values) for point in points]
    book.runs += [Run("xmin", who, 1, values) for who in TRANSACTIONS]
    book.series |= {series_name(who, of): [(1, 2), (2, 3)] for who in TRANSACTIONS for of in SERIES}
    drawn = figures.draw(book)
    assert len(drawn) == 9 + 3 * len(VARIED)
    for svg in drawn.values():
        ElementTree.fromstring(svg)
    assert figures.draw(Book()) == {}
    book.series = {}  # of a machine that was saturated all the time
    ElementTree.fromstring(figures.draw(book)["xmin.svg"])
    # A line for each contestant and number of partitions, and two where it has two quantiles.
    counts = {"ordinary": 6, "ordinary-latency": 12, "xmin": 2, "xmin-size": 2}
    for plot, count in counts.items():
        root = ElementTree.fromstring(drawn[f"{plot}.svg"])
        assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == count
    assert drawn["ordinary-latency.svg"].count("stroke-dasharray") == 6


def ordinary_runs(values: Values) -> list[Run]:
    """A round of ordinary traffic in which all contestants have shown the same."""
    return [
        Run("ordinary", named(who, rate, partitions), 1, values)
        for rate in RATES
        for who, partitions in SIDES
        if who is not USUAL or rate < 300
    ]


def test_ordinary_traffic_is_held_against_its_goals() -> None:
    bench = Bench(run.rig_in(Path()), Options(), Console(quiet=True))
    values = {"cpu": 2.0, "core": 0.4, "commits": 0.1, "p50": 9.0, "p99": 11.0}
    bench.book.runs += ordinary_runs(values)
    hold_against_goals(bench)
    marks = {mark.goal.name: (mark.value, mark.is_met) for mark in bench.book.marks}
    assert list(marks) == [goal.name for goal in GOALS if goal.measure == "ordinary"]
    assert marks["300/s, CPU"] == (1, True)
    assert marks["300/s, CPU against bare-orm"] == (1, False)
    assert marks["300/s, core"] == (0.4, False)
    assert marks["1,000/s, commits"] == (0.1, True)
    assert marks["100/s, p50"] == (9, False)
    assert marks["100/s, p99"] == (1, True)
    # In a container nobody sees what PostgreSQL takes.
    del bench.book.marks[:], values["cpu"]
    hold_against_goals(bench)
    assert {one.goal.name for one in bench.book.marks if not one.values} == {
        goal.name for goal in GOALS if goal.measure == "ordinary" and "CPU" in goal.name
    }


def test_a_p99_below_the_previous_one_suffices_whatever_bare_orm_has() -> None:
    bench = Bench(run.rig_in(Path()), Options(), Console(quiet=True))
    for who, p99 in ((OURS, 8.0), (BARE_ORM, 4.0)):
        values = {"cpu": 1.0, "p99": p99}
        bench.book.runs.append(Run("ordinary", named(who, 100, 12), 1, values | {"p50": 1.0}))
    hold_against_goals(bench)
    told = {mark.goal.name: mark.as_json() for mark in bench.book.marks}["100/s, p99"]
    assert (told["value"], told["met"], told["reference"]) == (0.8, True, 10)


def test_the_shards_that_are_not_varied_are_those_of_the_schema() -> None:
    engine = ROOT / "<<cookiecutter.service_name>>" / "src" / "onceward" / "schema.py"
    assert f"\nSHARDS = {SHARDS}\n" in engine.read_text("utf-8")


def test_the_documentation_has_marks_of_the_code_alone() -> None:
    text = kept.MEASURING.read_text("utf-8")
    # None, if the engine has changed more often than figures may be old.
    rows = re.findall(r"^\| ([^|]+?)(?: †)? +\| ([≥≤<][^|]+?) +\|", text, re.MULTILINE)
    assert rows == [one for goal in GOALS if (one := (goal.name, goal.text)) in rows]


def test_the_documentation_names_every_measure_and_every_goal_belongs_to_one() -> None:
    text = kept.MEASURING.read_text("utf-8")
    assert re.findall(r"^\| `(\w+)` ", text, re.MULTILINE) == list(MEASURES)
    assert {goal.measure for goal in GOALS} <= set(MEASURES)


def kept_report() -> dict[str, Any]:
    return dict(json.loads(kept.REPORT.read_text("utf-8")))


def page_of(report: tables.Report) -> str:
    """The pages with the tables of a report, as if the engine had not changed since."""
    return "".join(kept.told(kept.shown(report, dict.fromkeys(report["measured"], 0))).values())


def test_a_measure_that_is_taken_anew_stands_beside_the_others() -> None:
    before = kept_report()
    new = Bench(run.rig_in(Path()), Options(), Console(quiet=True))
    new.book.runs.append(Run("idle", "ours", 1, {"share": 0.5}))
    new.mark("idle service", [0.5])
    facts = {"commit": "f" * 40, "dirty": False}
    after = kept.joined(run.report_of(new, facts), before)
    assert list(after["measured"]) == list(before["measured"])
    assert {n for n, one in after["measured"].items() if one["commit"] == "f" * 40} == {"idle"}
    (idle,) = [one for one in after["runs"] if one["measure"] == "idle"]
    assert idle["values"] == {"share": 0.5}
    names = [mark["name"] for mark in after["marks"]]
    assert names == [goal.name for goal in GOALS if goal.measure in after["measured"]]
    values = {mark["name"]: mark["value"] for mark in after["marks"]}
    assert values["idle service"] == 0.5
    assert values["hot key"] == next(m["value"] for m in before["marks"] if m["name"] == "hot key")
    assert after["series"] == before["series"]
    page = page_of(after)
    assert re.search(r"^\| fffffff +\| [^`]+\| `idle` +\|$", page, re.MULTILINE)
    assert re.search(r"^\| idle service +\| [^|]+\| 0.5 ", page, re.MULTILINE)


def test_what_was_held_against_another_goal_is_not_kept() -> None:
    before = kept_report()
    old = before["marks"][0] | {"name": "given up"}
    report = before | {"measured": {"idle": before["measured"]["idle"]}, "marks": []}
    after = kept.joined(report, before | {"marks": [old, *before["marks"]]})
    assert "given up" not in {mark["name"] for mark in after["marks"]}
    of_relay = [one for one in before["marks"] if one["name"] == "relay alone"]
    for unit, is_shown in (("of producer", True), ("of bare", False)):
        marks = [one | {"goal": f"≥ 0.8 {unit}", "unit": unit} for one in of_relay]
        page = page_of(before | {"marks": marks})
        found = re.search(r"^\| relay alone .*\| yes +\|$", page, re.MULTILINE)
        assert bool(found) is is_shown


def test_the_page_says_what_ordinary_traffic_costs() -> None:
    report = kept_report()
    values = {"cpu_python": 1.5, "cpu_postgres": 0.25, "cpu_kafka": 0.1, "cpu": 1.75}
    values |= {"core": 0.25, "commits": 0.05, "p50": 7.0, "p99": 9.5, "machine_idle": 0.4}
    values |= {"busy_python": 0.25, "busy_postgres": 0.5, "busy_kafka": 0.75, "busy_probe": 0.1}
    others = [one for one in report["runs"] if one["measure"] != "ordinary"]
    runs = others + [asdict(one) for one in ordinary_runs(values)]
    measured = report["measured"] | {"ordinary": report["measured"]["idle"]}
    page = page_of(report | {"runs": runs, "measured": measured})
    rows = re.findall(r"^\| ([\d,]+) +\| ours +\| (.+?) *\|$", page, re.MULTILINE)
    assert [one[0] for one in rows] == [f"{rate:,}" for rate in RATES]
    cells = ["1,500", "250", "0.05", "7", "9.5", "0.25", "0.50", "0.75", "0.10", "40%"]
    assert [[cell.strip() for cell in one[1].split("|")] for one in rows] == [cells] * len(rows)


def page_with(measure: str, runs: list[Run]) -> str:
    """The pages after a report that has these runs of a measure instead of its own."""
    report = kept_report()
    others = [one for one in report["runs"] if one["measure"] != measure]
    measured = report["measured"] | {measure: report["measured"]["idle"]}
    new = {"runs": others + [asdict(one) for one in runs], "measured": measured}
    return "".join(kept.told({**report, **new, "earlier": []}).values())


def cells_of(page: str, first: str) -> list[list[str]]:
    """The cells of the rows of a page that begin so, without the first."""
    rows = re.findall(rf"^\| {first} +\| (.+?) *\|$", page, re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows]


def test_the_page_says_what_failing_messages_cost() -> None:
    values = {"scans": 500.0, "cpu_python": 0.75, "cpu_postgres": 0.25, "per_cpu": 1_000.0}
    none = {"scans": 20_000.0, "cpu_python": 0.1, "cpu_postgres": 0.025, "per_cpu": 8_000.0}
    runs = [Run("poison", named_failing(keys), 1, none) for keys in KEYS]
    runs += [
        Run("poison", named_failing(keys, kind, share), 1, values)
        for keys in KEYS
        for kind in KINDS
        for share in SHARES
    ]
    page = page_with("poison", runs)
    assert cells_of(page, "none") == [["20,000", *["1", "100", "25"] * 2]]
    for said in KINDS.values():
        assert cells_of(page, rf"10? % {said}") == [["500", *["0.12", "750", "250"] * 2]] * 2


def test_the_page_says_what_an_open_transaction_costs() -> None:
    names = ["rate", "p50", "p99", "cpu_python", "cpu_postgres", *(f"{t}_bytes" for t in TABLES)]
    values = {f"{of} at {minute}": 2_000.0 for of in names for minute in MOMENTS}
    values |= {f"{of} a minute": -0.001 for of in names}
    page = page_with("xmin", [Run("xmin", who, 1, values) for who in TRANSACTIONS])
    cells = [*["2,000"] * 3, *["2,000,000"] * 2, *["2"] * 4, *["0.002"] * 2]
    for minute in MOMENTS:
        held, none = cells_of(page, str(minute))
        assert held == ["ended" if minute == 15 else "open", *cells]
        assert none == ["none", *cells]
    slopes = [*["0"] * 3, *["-1"] * 2, *["0"] * 6]
    assert cells_of(page, "each") == [["open", *slopes], ["none", *slopes]]
    del values["p99 at 12"]
    page = page_with("xmin", [Run("xmin", who, 1, values) for who in TRANSACTIONS])
    assert cells_of(page, "12")[0] == ["open", "2,000", "2,000", "saturated", *cells[3:]]


def test_a_measure_that_was_taken_otherwise_is_not_kept_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    same = run.as_json(Options())
    others = run.as_json(Options(events=1_000))
    assert kept.hindrance(["idle"], same) is None
    said = "what is kept was taken with events 200000: take the same, or all measures"
    assert kept.hindrance(["idle"], others) == said
    assert kept.hindrance(list(MEASURES), others) is None
    monkeypatch.setattr(kept, "REPORT", tmp_path / "report.json")
    assert "nothing is kept yet of throughput" in str(kept.hindrance(["idle"], same))


@pytest.mark.parametrize(
    "option",
    [
        ["--only", "speed"],
        ["--only", ","],
        ["--events", "999"],
        ["--rounds", "0"],
        ["--minutes", "0"],
        ["--seconds", "nan"],
    ],
)
def test_options_that_cannot_be_are_refused(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run.main([*option, "--into", str(tmp_path)])
    assert "error" in capsys.readouterr().err


async def ran(options: Options) -> Book:
    """What is noted of two groups whose runs know nothing but how many there were before."""
    bench = Bench(run.rig_in(Path()), options, Console(quiet=True))

    async def one() -> Values:
        return {"before": len(bench.book.runs)}

    await bench.rounds("race", {"a": one, "b": one}, {"c": one})
    return bench.book


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the machine will say of its speed, one after the other; then it is steady."""
    told: list[float] = []
    monkeypatch.setattr("benchmarks.bench.speed", lambda: told.pop(0) if told else 10.0)
    monkeypatch.setattr("benchmarks.bench.stolen", lambda: 0.0)
    return told


@pytest.mark.usefixtures("speeds")
def test_rounds_alternate_in_order_and_the_warm_up_does_not_count() -> None:
    book = asyncio.run(ran(Options(rounds=2)))
    assert [(one.contestant, one.round) for one in book.runs] == [
        *(("c", 0), ("b", 0), ("a", 0)),
        *(("a", 1), ("b", 1), ("c", 1)),
        *(("c", 2), ("b", 2), ("a", 2)),
    ]
    assert book.rounds("race", "a") == [{"before": 3}, {"before": 8}]


def test_the_speed_of_the_machine_is_noted_before_and_after_each_run(speeds: list[float]) -> None:
    speeds[:] = [10, 11, 12, 13, 14]
    book = asyncio.run(ran(Options(rounds=1, warm_up=False, again=0)))
    assert [one.speeds for one in book.runs] == [(10, 11), (11, 12), (13, 14)]


def test_a_group_that_was_disturbed_runs_again_as_a_whole(speeds: list[float]) -> None:
    # Between a and b of the first round the machine slows down.
    speeds[:] = [10, 10, 8]
    book = asyncio.run(ran(Options(rounds=2, warm_up=False, again=1e9)))
    assert [(one.contestant, one.round, one.counts) for one in book.runs] == [
        *(("a", 1, False), ("b", 1, False), ("c", 1, True)),
        *(("c", 2, True), ("b", 2, True), ("a", 2, True)),
        *(("a", 1, True), ("b", 1, True)),
    ]
    # In the order of the rounds, so that those of one round are compared.
    assert book.rounds("race", "a") == [{"before": 6}, {"before": 5}]


@pytest.mark.usefixtures("speeds")
def test_a_group_whose_time_was_stolen_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter((0.0, 0.1))  # of the first run; nothing later
    monkeypatch.setattr("benchmarks.bench.stolen", lambda: next(taken, 0.1))
    bench = Bench(
        run.rig_in(Path()), Options(rounds=1, warm_up=False, again=1e9), Console(quiet=True)
    )

    async def one() -> Values:
        await asyncio.sleep(0.2)
        return {}

    asyncio.run(bench.rounds("race", {"a": one}, {"b": one}))
    counts = [(run.contestant, run.counts) for run in bench.book.runs]
    assert counts == [("a", False), ("b", True), ("a", True)]
    first, *others = [run.stolen for run in bench.book.runs]
    assert 0 < first <= 0.5 / (os.cpu_count() or 1)
    assert others == [0, 0]


def test_the_attempt_that_was_disturbed_least_counts(speeds: list[float]) -> None:
    bench = Bench(
        run.rig_in(Path()), Options(rounds=1, warm_up=False, again=1e9), Console(quiet=True)
    )

    async def twice() -> Values:
        if len(bench.book.runs) == 2:
            raise ProcessFailed("that is enough")
        return {}

    speeds[:] = [10, 8, 10, 5]
    with pytest.raises(ProcessFailed):
        asyncio.run(bench.rounds("race", {"a": twice}))
    assert [one.counts for one in bench.book.runs] == [True, False]


def test_nothing_runs_again_when_there_is_no_time_for_it(speeds: list[float]) -> None:
    speeds[:] = [10, 5, 10]
    book = asyncio.run(ran(Options(rounds=1, warm_up=False, again=0)))
    assert [one.contestant for one in book.runs] == ["a", "b", "c"]


def test_a_machine_that_computes_has_a_speed() -> None:
    assert machine.speed() > 0


def test_time_that_is_stolen_is_what_linux_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "TIMES", tmp_path / "stat")
    assert machine.stolen() == 0
    ticks = os.sysconf("SC_CLK_TCK")
    machine.TIMES.write_text(f"cpu  9 8 7 6 5 4 3 {2 * ticks} 1 0\ncpu0 9 8 7 6 5 4 3 2 1 0\n")
    assert machine.stolen() == 2


def test_a_comparison_tells_what_was_compared_with() -> None:
    bench = Bench(run.rig_in(Path()), Options(), Console(quiet=True))
    for who, rate_ in (("relay", 9.0), ("producer", 10.0)):
        bench.book.runs.append(Run("relay", who, 1, {"rate": rate_}))
    bench.compare("relay alone", "relay", "producer")
    told = bench.book.marks[0].as_json()
    assert (told["value"], told["met"], told["reference"]) == (0.9, True, 10)


def test_the_producer_says_what_it_has_sent() -> None:
    value = (b"%020d" % 3).ljust(producer.PAYLOAD, b"x")
    record = SimpleNamespace(key=b"parcel-000007", value=value)
    assert producer.told(record) == (producer.key_of(2_007), 3, None)
    record.value = value[:-1]
    with pytest.raises(CheckFailed, match="249 bytes"):
        producer.told(record)


@pytest.mark.parametrize(
    ("missing", "size", "passes"),
    [
        pytest.param(None, producer.PAYLOAD, True, id="whole"),
        pytest.param("ce_id", producer.PAYLOAD, False, id="without an id"),
        pytest.param(None, 0, False, id="empty"),
    ],
)
def test_the_relay_must_send_whole_events(missing: str | None, size: int, passes: bool) -> None:
    headers = [(name, b"7") for name in REQUIRED_HEADERS if name != missing]
    record = SimpleNamespace(key=b"parcel-000007", value=b"x" * size, headers=headers)
    with nullcontext() if passes else pytest.raises(CheckFailed, match="relay"):
        assert event_of(record) == ("parcel-000007", 7, None)


def test_plots_are_not_kept_of_files_that_are_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "repository"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(repository)]
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    (repository / "file").touch()
    monkeypatch.setattr(machine, "ROOT", repository)
    with pytest.raises(SystemExit):
        run.main(["--keep-plots", "--into", str(tmp_path / "into")])
    assert "commit first" in capsys.readouterr().err
    monkeypatch.setattr(machine, "source", lambda: {"dirty": False})
    for address in machine.ADDRESSES:
        monkeypatch.setenv(address, "elsewhere")
    with pytest.raises(SystemExit):
        run.main(["--keep-plots", "--into", str(tmp_path / "into")])
    assert f"unset {' and '.join(machine.ADDRESSES)}" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(machine, "ROOT", repository)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    assert not machine.source()["dirty"]
    assert re.fullmatch("[0-9a-f]{40,}", str(machine.source()["commit"]))
    (repository / "file").write_text("changed")
    assert machine.source()["dirty"]
    monkeypatch.setattr(machine, "ROOT", tmp_path)  # no repository at all
    assert machine.source() == {"commit": None, "dirty": True}


@pytest.mark.usefixtures("speeds")
def test_only_the_contestants_that_were_chosen_run() -> None:
    book = asyncio.run(ran(Options(rounds=1, contestants=frozenset("b"))))
    assert [(one.contestant, one.round) for one in book.runs] == [("b", 0), ("b", 1)]


@pytest.mark.usefixtures("speeds")
def test_nothing_warms_up_where_that_is_not_wanted() -> None:
    book = asyncio.run(ran(Options(rounds=1, warm_up=False)))
    assert [(one.contestant, one.round) for one in book.runs] == [("a", 1), ("b", 1), ("c", 1)]


@needs_proc
@pytest.mark.full
@pytest.mark.integration
@pytest.mark.timeout(3_600)
def test_a_small_benchmark_takes_every_measure(tmp_path: Path) -> None:
    said = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.run", "--into", str(tmp_path)),
            *("--events", "1000", "--rounds", "1", "--minutes", "0.1", "--seconds", "0.5"),
            *("--cold", "--again", "0"),
        ],
        cwd=ROOT,
        env=environment_in(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert said.returncode == 0, said.stdout
    assert processes_of(tmp_path) == []
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    found = {name: [one for one in report["runs"] if one["measure"] == name] for name in MEASURES}
    # Peers need another Python and their packages.
    without = set() if found["peers"] else {"peers"}
    assert {measure for measure, runs in found.items() if not runs} == without
    rates = ("throughput", "relay", "duplicates", "deferred", "ledger", "old_tables", "telemetry")
    for measure in rates:
        assert all(one["values"]["rate"] > 0 for one in found[measure])
    assert all(one["values"]["commits"] > 0 for one in found["ordinary"])
    for one in (*found["latency"], *found["streamed"], *found["ordinary"]):
        assert one["values"]["busy_probe"] > 0
        is_saturated = one["values"]["machine_idle"] < LEAST_IDLE
        assert is_saturated or one["values"]["p99"] >= one["values"]["p50"] > 0
    for one in found["streamed"]:
        values = one["values"]
        assert "p50" not in values or 0 < values["commit_p50"] < values["p50"]
    assert all(one["python"].startswith("CPython 3.") for one in report["measured"].values())
    # No version of a row that was replaced while the transaction was open could be removed.
    assert found["xmin"][0]["values"]["hot_dead at 12"] > 0
    assert all(
        len(report["series"][series_name(who, of)]) > 1
        for who in TRANSACTIONS
        for of in SERIES
        if of not in ("p50", "p99")  # of windows in which the machine was not saturated
    )
    # Every layer was at work; in so short a run the clocks may differ by more than it takes.
    layers = {one["contestant"]: one["values"] for one in found["layers"]}
    bare, ours = layers.pop("bare"), list(layers["ours"])
    assert [layer for layer in ours if not any(values[layer] for values in layers.values())] == []
    assert set(bare) < set(ours)
    assert all(bare.values())
    growth = {one["contestant"] for one in found["growth"]}
    assert growth == {name(kind, point) for kind, points in VARIED.items() for point in points}
    assert report["machine"]["kafka"]
    assert {"commit", "dirty"} <= set(report["machine"])
    assert report["machine"]["settings"] == {}
    assert all(min(one["speeds"]) > 0 and 0 <= one["stolen"] < 1 for one in report["runs"])

    # What servers in containers take cannot be seen.
    seen = report["machine"]["servers"] == "process"
    # A machine that is busy gives no latencies.
    marks = {
        one["name"]
        for one in report["marks"]
        if one["value"] is not None or one["remark"] == "saturated"
    }
    of_cpu = {goal.name for goal in GOALS if goal.measure == "idle" or "CPU" in goal.name}
    taken = {goal.name for goal in GOALS if goal.measure not in without}
    assert marks == taken - (set() if seen else of_cpu)
    plots = {"throughput", "relay", "latency", "ordinary-latency", "memory", "xmin", "xmin-size"}
    plots |= {"cpu", "ordinary"} if seen else set()
    for kind in VARIED:
        plots |= {f"growth-{kind}", f"growth-{kind}-latency", f"growth-{kind}-size"}
    assert {plot.stem for plot in tmp_path.glob("*.svg")} == plots
    for plot in tmp_path.glob("*.svg"):
        ElementTree.parse(plot)
