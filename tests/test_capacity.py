"""The capacity guide says what its formulas give."""

import json
import re
from dataclasses import replace

import pytest

from benchmarks import capacity
from benchmarks.capacity import (
    COLUMNS,
    CONCURRENCY,
    CONNECTIONS,
    GENERATION_DAYS,
    GUIDE,
    Demand,
    main,
    unlike,
)
from benchmarks.kept import PLOTS
from demo.flights import ROOT

TEXT = (ROOT / "docs" / "capacity.md").read_text("utf-8")
ENGINE = ROOT / "<<cookiecutter.service_name>>" / "src" / "onceward"


def test_the_table_of_the_guide_is_what_the_formulas_give() -> None:
    assert f"| {' | '.join(COLUMNS)} |" in TEXT
    assert re.findall(r"^\| \d.*$", TEXT, re.MULTILINE) == [demand.row() for demand in GUIDE]


def test_processes_and_connections_are_those_of_the_settings() -> None:
    settings = (ENGINE / "settings.py").read_text("utf-8")
    database = (ENGINE / "servers/database.py").read_text("utf-8")

    def number(pattern: str, text: str) -> int:
        (found,) = re.findall(pattern, text)
        return int(found)

    workers = number(r"backlog_workers: Count = (\d+)", settings)
    beside = number(r"_BESIDE_TRANSACTIONS = (\d+)", database)
    assert number(r"\n    concurrency: Count = (\d+)", settings) == CONCURRENCY
    assert CONCURRENCY + workers + beside == CONNECTIONS
    scaling = ENGINE.parent.parent / "docs" / "scaling.md"
    assert f"`PIPELINE_BACKLOG_WORKERS` + {beside}" in scaling.read_text("utf-8")


def report(**measured: float) -> dict[str, object]:
    """A report of a full run that has measured what the constants say, unless said otherwise."""
    values = {
        "rate": capacity.MESSAGES_A_SECOND,
        "marker_bytes": capacity.MARKER_BYTES,
        "event_bytes": capacity.EVENT_BYTES + Demand.payload,
        "wal_bytes": capacity.WAL_BYTES + Demand.payload,
    } | measured
    runs = {"growth": "payload 250", "throughput": "ours, 1,000 keys"}
    return {
        "runs": [
            {"measure": one, "contestant": who, "round": 1, "counts": True, "values": values}
            for one, who in runs.items()
        ]
    }


def test_constants_that_were_measured_otherwise_are_noticed() -> None:
    assert unlike(report()) == []
    assert len(unlike(report(rate=3 * capacity.MESSAGES_A_SECOND))) == 1
    for name, value in {
        "rate": capacity.MESSAGES_A_SECOND / 2,
        "marker_bytes": capacity.MARKER_BYTES / 2,
        "event_bytes": 3 * capacity.EVENT_BYTES,
        "wal_bytes": 3 * capacity.WAL_BYTES,
    }.items():
        assert len(unlike(report(**{name: value}))) == 1


@pytest.mark.skipif(not PLOTS.exists(), reason="the plots of a full run are not kept yet")
def test_the_constants_are_those_of_the_run_whose_plots_are_kept() -> None:
    assert unlike(json.loads((PLOTS / "report.json").read_text("utf-8"))) == []


@pytest.mark.skipif(not PLOTS.exists(), reason="the plots of a full run are not kept yet")
def test_the_guide_gives_marker_sizes_in_small_and_large_tables() -> None:
    runs = json.loads((PLOTS / "report.json").read_text("utf-8"))["runs"]
    markers = {run["contestant"]: run["values"].get("marker_bytes") for run in runs}
    assert markers["rows 1000000"] == pytest.approx(capacity.MARKER_BYTES, rel=0.1)
    assert markers["payload 250"] == pytest.approx(260, rel=0.1)
    of_guide = (
        f"{capacity.MARKER_BYTES} bytes in large tables, as these are; after 100,000 messages"
    )
    assert f"takes {of_guide} it was 260" in TEXT


def test_a_generation_takes_markers_for_as_long_as_the_engine_lets_it() -> None:
    settings = (ENGINE / "settings.py").read_text("utf-8")
    assert f"inbox_generation_age: Seconds = {86_400 * GENERATION_DAYS:_}.0" in settings


def test_twice_as_much_takes_twice_as_much() -> None:
    small = GUIDE[-1]
    large = replace(small, messages=2 * small.messages)
    for name in ("peak_rate", "inbox_gb", "outbox_gb", "wal_gb"):
        assert getattr(large, name) == pytest.approx(2 * getattr(small, name))
    assert 2 * small.processes - 1 <= large.processes <= 2 * small.processes
    assert Demand(1).processes == 2


def test_the_command_prints_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(["50_000_000", "--payload", "2_000", "--peak", "20", "--remembered", "15", "--kept", "3"])
    header, row = capsys.readouterr().out.splitlines()
    assert row == Demand(50_000_000, payload=2_000, peak=20, remembered=15, kept=3).row()
    assert header.count("|") == row.count("|")


@pytest.mark.parametrize("options", [["50M"], ["5", "--peak", "abc"]])
def test_what_is_no_number_is_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert f"{options[-1]} is no " in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["0"],
        ["5", "--peak", "0.5"],
        ["5", "--kept", "-3"],
        ["5_000_000", "--rate", "0"],
    ],
)
def test_what_cannot_be_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert "is not at least" in capsys.readouterr().err


def test_a_slower_process_needs_more_of_its_kind() -> None:
    assert Demand(200_000_000, rate=5_000).processes > Demand(200_000_000).processes
