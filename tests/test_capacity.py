"""The capacity guide says what its formulas give."""

import re
from dataclasses import replace

import pytest

from benchmarks.capacity import COLUMNS, CONCURRENCY, CONNECTIONS, GUIDE, Demand, main
from demo.flights import ROOT

TEXT = (ROOT / "docs" / "capacity.md").read_text("utf-8")
ENGINE = ROOT / "<<cookiecutter.service_name>>" / "src" / "pipeline"


def test_the_table_of_the_guide_is_what_the_formulas_give() -> None:
    assert f"| {' | '.join(COLUMNS)} |" in TEXT
    assert re.findall(r"^\| \d.*$", TEXT, re.MULTILINE) == [demand.row() for demand in GUIDE]


def test_processes_and_connections_are_those_of_the_settings() -> None:
    settings = (ENGINE / "settings.py").read_text("utf-8")
    database = (ENGINE / "database.py").read_text("utf-8")

    def number(pattern: str, text: str) -> int:
        (found,) = re.findall(pattern, text)
        return int(found)

    workers = number(r"backlog_workers: Count = (\d+)", settings)
    beside = number(r"_BESIDE_TRANSACTIONS = (\d+)", database)
    assert number(r"\n    concurrency: Count = (\d+)", settings) == CONCURRENCY
    assert CONCURRENCY + workers + beside == CONNECTIONS
    assert f"`PIPELINE_BACKLOG_WORKERS` + {beside}" in TEXT


def test_twice_as_much_takes_twice_as_much() -> None:
    small = GUIDE[-1]
    large = replace(small, messages=2 * small.messages)
    for name in ("peak_rate", "inbox_gb", "outbox_gb", "wal_gb", "filter_mb"):
        assert getattr(large, name) == pytest.approx(2 * getattr(small, name))
    assert 2 * small.processes - 1 <= large.processes <= 2 * small.processes
    assert Demand(1).processes == 2


def test_the_command_prints_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(["50_000_000", "--payload", "2_000", "--peak", "20", "--remembered", "15", "--kept", "3"])
    header, row = capsys.readouterr().out.splitlines()
    assert row == Demand(50_000_000, payload=2_000, peak=20, remembered=15, kept=3).row()
    assert header.count("|") == row.count("|")
