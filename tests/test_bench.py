"""The benchmark: its check must be able to fail, its figures must be right, and it must run."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import figures, load, run
from benchmarks.bench import Book, Run
from benchmarks.check import Check, CheckFailed, require
from benchmarks.load import SAMPLED
from benchmarks.marks import GOALS, Mark, quantile, ratios
from benchmarks.measures import MEASURES
from benchmarks.measures.growth import VARIED, name
from benchmarks.measures.memory import growth_of
from benchmarks.plots import Bar, bars, lines, steps
from benchmarks.rig import Sample, between
from benchmarks.runs import rate

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
    mark = goal("SQL handler")
    assert not mark.is_met
    assert mark.as_json()["remark"] == "not measured"


def test_sides_are_compared_round_by_round() -> None:
    ours, bare = [{"rate": 10.0}, {"rate": 5.0}], [{"rate": 20.0}, {"rate": 10.0}]
    assert ratios(ours, bare) == [0.5, 0.5]
    assert ratios([], bare) == []


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [quantile(values, share) for share in (0.5, 0.99, 0.999, 1.0)] == [50, 99, 100, 100]
    assert quantile([7.0], 0.5) == 7.0


def test_a_rate_is_taken_from_the_middle_of_the_work() -> None:
    # Slow at both ends, and 100 a second between.
    counts = [0, 0, *range(200, 2_000, 100), 2_000, 2_000]
    samples = [Sample(float(at), count, {"python": at / 10}) for at, count in enumerate(counts)]
    found = rate(samples, 1_000)  # each message makes two events
    assert found == {"rate": pytest.approx(50), "cpu_python": pytest.approx(2.0)}


def test_work_that_is_done_at_once_has_a_rate() -> None:
    samples = [Sample(0.0, 0, {}), Sample(1.0, 0, {}), Sample(3.0, 10, {})]
    assert between(samples, 0.1, 0.95) == (samples[1], samples[2])
    assert rate(samples, 10) == {"rate": 5.0}


def test_memory_grows_from_the_middle_third_to_the_last() -> None:
    assert growth_of([1, 9, 1, 100, 100, 100, 110, 110, 400]) == pytest.approx(1.1)


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


def test_every_measure_has_its_figures() -> None:
    values = {"rate": 2.0, "p50": 1.0, "p99": 3.0, "cpu_python": 1.0, "cpu_postgres": 1.0}
    values |= {"cpu_kafka": 1.0, "marker_bytes": 200.0, "event_bytes": 500.0, "wal_bytes": 900.0}
    book = Book(series={"memory over time": [(0.0, 100.0), (1.0, 110.0)]})
    for measure in ("throughput", "relay", "latency"):
        book.runs += [Run(measure, who, number, values) for who in "ab" for number in (0, 1, 2)]
    for kind, points in VARIED.items():
        book.runs += [Run("growth", name(kind, point), 1, values) for point in points]
    drawn = figures.draw(book)
    assert len(drawn) == 5 + 3 * len(VARIED)
    for svg in drawn.values():
        ElementTree.fromstring(svg)
    assert figures.draw(Book()) == {}


def test_the_documentation_has_the_marks_of_the_code() -> None:
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    rows = re.findall(r"^\| ([^|]+?) +\| ([≥≤<][^|]+?) +\|", text, re.MULTILINE)
    assert rows == [(goal.name, goal.text) for goal in GOALS]


def test_the_documentation_names_every_measure_and_every_goal_belongs_to_one() -> None:
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    assert re.findall(r"^\| `(\w+)` ", text, re.MULTILINE) == list(MEASURES)
    assert {goal.measure for goal in GOALS} <= set(MEASURES)


@pytest.mark.parametrize(
    "option", [["--only", "speed"], ["--events", "0"], ["--rounds", "0"], ["--minutes", "0"]]
)
def test_options_that_cannot_be_are_refused(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run.main([*option, "--into", str(tmp_path)])
    assert "error" in capsys.readouterr().err


@needs_proc
def test_a_short_benchmark_measures_ours_beside_bare(tmp_path: Path) -> None:
    said = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.run", "--into", str(tmp_path)),
            *("--only", "throughput", "--events", "5000", "--rounds", "1"),
            *("--contestants", "ours, 1,000 keys; bare, 1,000 keys"),
        ],
        cwd=ROOT,
        env=environment_in(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert said.returncode == 0, said.stdout
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    runs = [(one["contestant"], one["round"]) for one in report["runs"]]
    ours, bare = "ours, 1,000 keys", "bare, 1,000 keys"
    assert runs == [(ours, 0), (bare, 0), (bare, 1), (ours, 1)]
    assert all(one["values"]["rate"] > 0 for one in report["runs"])
    (mark,) = (one for one in report["marks"] if one["name"] == "ORM handler, 1,000 keys")
    assert mark["value"] > 0
    assert mark["met"] == (mark["value"] >= 0.5)
    assert {one["name"] for one in report["marks"]} <= {goal.name for goal in GOALS}
    ElementTree.parse(tmp_path / "throughput.svg")
    assert report["machine"]["kafka"]
    assert processes_of(tmp_path) == []
