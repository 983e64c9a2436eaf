"""Figures are of an optimised interpreter, of a machine with time to spare, and of this engine."""

import json
import os
import platform
import re
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from rich.console import Console

from benchmarks import engine, interpreter, kept, load, machine, probe, run, usage
from benchmarks.bench import Bench, Options, Run
from benchmarks.engine import ENGINE, OLDEST, changes_since
from benchmarks.interpreter import chosen, examined
from benchmarks.marks import LEAST_IDLE
from benchmarks.measures.ordinary import MANY, hold_against_goals, named
from benchmarks.rig import BARE_ORM, OURS
from benchmarks.runs import Streamed
from demo.processes import ProcessFailed

from tests.release import require_figures
from tests.test_demo import needs_proc

CPU = {"python": 2.0, "postgres": 1.0, "kafka": 0.5, "probe": 0.25}


class Repository:
    """A small git repository with an engine and a page."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / ENGINE).mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *words: str) -> str:
        """Run git in it, and return what it writes."""
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = ["git", *who, *words]
        return subprocess.run(
            done, cwd=self.path, capture_output=True, text=True, check=True
        ).stdout.strip()

    def commit(self, file: str, text: str) -> str:
        """Write a file, commit it, and return the commit."""
        (self.path / file).write_text(text)
        self.git("add", ".")
        self.git("commit", "--quiet", "--message", text)
        return self.git("rev-parse", "HEAD")

    def change_engine(self, times: int) -> None:
        """Change the engine in so many commits."""
        count = int(self.git("rev-list", "--count", "HEAD"))
        for number in range(times):
            self.commit(f"{ENGINE}/inbox.py", f"engine {count + number}")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_only_commits_that_change_the_engine_make_figures_older(repository: Repository) -> None:
    measured = repository.commit(f"{ENGINE}/inbox.py", "engine")
    assert changes_since(measured, repository.path) == 0
    repository.commit("page.md", "figures")
    assert changes_since(measured, repository.path) == 0
    repository.change_engine(3)
    repository.commit("page.md", "more figures")
    assert changes_since(measured, repository.path) == 3
    (repository.path / ENGINE / "new.py").touch()
    assert changes_since(measured, repository.path) == 4


def test_the_age_of_figures_of_another_history_is_unknown(repository: Repository) -> None:
    repository.commit(f"{ENGINE}/inbox.py", "engine")
    repository.git("switch", "--quiet", "--create", "other")
    elsewhere = repository.commit(f"{ENGINE}/inbox.py", "another engine")
    repository.git("switch", "--quiet", "main")
    assert changes_since(elsewhere, repository.path) is None
    assert changes_since("f" * 40, repository.path) is None
    assert changes_since("f" * 40, Path("/")) is None


def measured_on(**commits: str) -> dict[str, Any]:
    """A report of measures, by their commits."""
    return {"measured": {name: {"commit": commit} for name, commit in commits.items()}}


def test_a_release_needs_figures_that_are_at_most_fifteen_engine_commits_old(
    repository: Repository,
) -> None:
    old = repository.commit(f"{ENGINE}/inbox.py", "engine")
    repository.change_engine(1)
    new = repository.git("rev-parse", "HEAD")
    repository.change_engine(OLDEST)
    for _ in range(OLDEST):
        repository.git("commit", "--quiet", "--allow-empty", "--message", "no engine")
    require_figures(measured_on(throughput=new, latency=new, idle=old), repository.path)
    said = rf"latency was measured on {old[:7]}: {OLDEST + 1} commits have changed the engine"
    with pytest.raises(SystemExit, match=said):
        require_figures(measured_on(throughput=new, latency=old), repository.path)


def test_a_release_needs_figures_of_its_own_history(repository: Repository) -> None:
    here = repository.commit(f"{ENGINE}/inbox.py", "engine")
    with pytest.raises(SystemExit, match="fffffff, which is not in the history of this commit"):
        require_figures(measured_on(throughput="f" * 40, latency=here), repository.path)
    with pytest.raises(SystemExit, match="latency was not measured; run make bench ONLY="):
        require_figures(measured_on(throughput=here), repository.path)


@pytest.mark.skipif(not engine.has_history(), reason="needs the history (git fetch --unshallow)")
def test_pages_have_this_engines_figures_and_mark_earlier_ones() -> None:
    report = json.loads(kept.REPORT.read_text("utf-8"))
    shown = kept.shown(report, kept.ages(report))
    renew = "run: python -m benchmarks.kept"
    pages = {page: page.read_text("utf-8") for page in kept.PAGES}
    assert kept.told(shown) == pages, renew
    plots = {plot.name: plot.read_text("utf-8") for plot in kept.PLOTS.glob("*.svg")}
    assert kept.drawn(shown) == plots, renew


def report_of(*runs: Run, **marked: Sequence[float]) -> dict[str, Any]:
    """A report of runs on one commit, and of marks of the measure `latency` of theirs."""
    bench = Bench(run.rig_in(Path()), Options(), Console(quiet=True))
    bench.book.runs += runs
    bench.mark_figure("latency, p50", "ours", "p50")
    facts = {"commit": "f" * 40, "dirty": False, "python": "CPython 3.11.2, built with PGO"}
    return dict(run.report_of(bench, facts))


def row_of(page: str, first: str) -> list[str]:
    """The cells of the one row of the page's tables that begins so."""
    found = [line for line in page.splitlines() if line.startswith(f"| {first} ")]
    assert len(found) == 1, found
    return [cell.strip() for cell in found[0].strip("|").split("|")]


VALUES = {f"busy_{name}": 0.25 for name in CPU} | {"p50": 7.0, "p99": 9.0, "machine_idle": 0.5}


@pytest.mark.parametrize(
    ("age", "name", "which"),
    [
        pytest.param(0, "100/s, ours", "this one", id="this engine"),
        pytest.param(1, "100/s, ours †", "an earlier one †", id="an earlier engine"),
        pytest.param(OLDEST, "100/s, ours †", "an earlier one †", id="the oldest that is shown"),
    ],
)
def test_a_page_says_of_which_engine_and_python_figures_are(
    age: int, name: str, which: str
) -> None:
    report = report_of(Run("latency", "ours", 1, VALUES))
    page = "".join(kept.told(kept.shown(report, {"latency": age})).values())
    assert row_of(page, name)[1:] == ["", "", "7", "9", *["0.25"] * 4, "50%"]
    assert row_of(page, "fffffff")[2:] == [which, "CPython 3.11.2, built with PGO", "`latency`"]
    assert page.count("![Latency](performance/latency.svg)\n\n### ") == 1
    sign = " †" if age else ""
    assert row_of(page, f"latency, p50{sign}")[2:] == ["7", "7 – 7", "", "yes"]


@pytest.mark.parametrize("age", [OLDEST + 1, None])
def test_a_page_leaves_out_figures_of_an_engine_that_is_gone(age: int | None) -> None:
    report = report_of(Run("latency", "ours", 1, VALUES))
    shown = kept.shown(report, {"latency": age})
    page = "".join(kept.told(shown).values())
    assert "100/s, ours" not in page
    assert "| latency, p50" not in page
    assert "(performance/latency.svg)" not in page
    assert kept.drawn(shown) == {}


def test_plots_that_are_not_drawn_any_more_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "PLOTS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("".join(one.read_text("utf-8") for one in kept.PAGES), "utf-8")
    monkeypatch.setattr(kept, "PAGES", (page,))
    monkeypatch.setattr(kept, "ages", lambda report: dict.fromkeys(report["measured"], 0))
    kept.renew(report_of(Run("latency", "ours", 1, VALUES)))
    assert [plot.name for plot in tmp_path.glob("*.svg")] == ["latency.svg"]
    assert re.findall(r"performance/(\S+\.svg)", page.read_text("utf-8")) == ["latency.svg"]
    (tmp_path / "latency.svg").rename(tmp_path / "memory.svg")
    kept.renew(report_of())
    assert list(tmp_path.glob("*.svg")) == []
    assert "performance/memory.svg" not in page.read_text("utf-8")


def test_plots_name_the_commit_and_an_earlier_engine() -> None:
    report = report_of(Run("latency", "ours", 1, VALUES))
    assert "(fffffff)" in kept.drawn(kept.shown(report, {"latency": 0}))["latency.svg"]
    drawn = kept.drawn(kept.shown(report, {"latency": 2}))
    assert "(fffffff, an earlier engine)" in drawn["latency.svg"]


def streamed(idle: float) -> Streamed:
    """A hundred records, of which the events of the later ones took longer."""
    sent = {number: float(number) for number in range(100)}
    arrived = {number: number + (number + 1) / 1_000 for number in sent}
    return Streamed(sent, arrived, 4.0, CPU, idle, 0.5)


def test_latencies_stand_beside_the_cpu_of_every_process() -> None:
    found = streamed(LEAST_IDLE)
    committed = {number: at + 0.002 for number, at in found.sent.items()}
    values = found.values(commit=committed)
    assert [values["p50"], values["p99"]] == pytest.approx([50, 99])
    assert values["commit_p50"] == pytest.approx(2)
    busy = {name: values[f"busy_{name}"] for name in CPU}
    assert busy == {name: spent / 4 for name, spent in CPU.items()}
    assert values["machine_idle"] == LEAST_IDLE


def test_a_saturated_machine_gives_no_latency() -> None:
    values = streamed(LEAST_IDLE - 0.01).values()
    assert set(values) == {*(f"busy_{name}" for name in CPU), "machine_idle", "late_ms"}
    report = report_of(Run("latency", "ours", 1, values))
    (mark,) = report["marks"]
    assert (mark["value"], mark["met"], mark["remark"]) == (None, False, "saturated")
    page = "".join(kept.told(kept.shown(report, {"latency": 0})).values())
    assert row_of(page, "latency, p50")[2:] == ["", "", "", "saturated"]
    cells = row_of(page, "100/s, ours")
    assert cells[1:] == ["", "", "saturated", "saturated", "0.50", "0.25", "0.12", "0.06", "14%"]
    assert (
        "the machine was saturated" in kept.drawn(kept.shown(report, {"latency": 0}))["latency.svg"]
    )


def test_rounds_that_were_not_saturated_count() -> None:
    busy = streamed(LEAST_IDLE - 0.01).values()
    runs = [Run("latency", "ours", number, busy) for number in (1, 2)]
    report = report_of(*runs, Run("latency", "ours", 3, VALUES))
    assert [mark["value"] for mark in report["marks"]] == [7]


def test_comparisons_with_a_saturated_round_are_left_out() -> None:
    bench = Bench(run.rig_in(Path()), Options(), Console(quiet=True))
    cpu = {"cpu": 1.0, "core": 0.2, "commits": 0.1}
    for who in (OURS, BARE_ORM):
        values = cpu | dict(streamed(LEAST_IDLE - 0.01).values())
        bench.book.runs.append(Run("ordinary", named(who, 100, MANY), 1, values))
    hold_against_goals(bench)
    told = {mark.goal.name: mark.as_json() for mark in bench.book.marks}
    assert told["100/s, p50"]["remark"] == told["100/s, p99"]["remark"] == "saturated"
    assert told["100/s, p99"]["reference"] is None
    assert told["3,000/s, p50"]["remark"] == "not measured"


@needs_proc
def test_the_idle_share_is_of_all_time_of_all_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    idle, of_all = usage.machine_seconds()
    assert 0 < idle < of_all
    ticks = os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(usage, "TIMES", tmp_path / "stat")
    assert usage.machine_seconds() == (0, 0)
    usage.TIMES.write_text(f"cpu  {ticks} 0 0 {3 * ticks} {ticks} 0 0 {ticks} 9 9\ncpu0 9 9\n")
    assert usage.machine_seconds() == (4, 6)


def python_at(path: Path, version: str, flags: str) -> str:
    """A program that says of itself that it is such a Python."""
    found = {
        "executable": str(path),
        "implementation": "CPython",
        "version": version,
        "flags": flags,
    }
    path.write_text(f"#!/bin/sh\necho '{json.dumps(found).replace(chr(39), '')}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("flags", "build", "is_optimised"),
    [
        ("--enable-optimizations --with-lto", "built with PGO and LTO", True),
        ("--enable-optimizations", "built with PGO", True),
        ("-O2 -fprofile-use -fprofile-correction -flto", "built with PGO and LTO", True),
        ("-O3 -flto", "not optimised: built without PGO", False),
        ("--enable-shared -O3", "not optimised: built without PGO and LTO", False),
    ],
)
def test_an_interpreter_is_optimised_if_it_was_built_with_a_profile(
    flags: str, build: str, is_optimised: bool, tmp_path: Path
) -> None:
    found = examined(python_at(tmp_path / "python", "3.12.1", flags))
    assert str(found) == f"CPython 3.12.1, {build}"
    assert (found.is_optimised, found.version) == (is_optimised, (3, 12))


@pytest.mark.skipif(
    not Path("/etc/debian_version").exists()
    or not Path("/usr/bin/python3").exists()
    or platform.machine() not in ("x86_64", "aarch64"),
    reason="needs Debian's Python",
)
def test_debians_python_is_optimised_although_its_flags_do_not_say_so() -> None:
    found = examined("/usr/bin/python3")
    assert found.is_optimised
    assert found.build == "built with PGO and LTO by Debian"


def test_the_first_optimised_interpreter_is_chosen_and_else_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = python_at(tmp_path / "plain", "3.12.1", "")
    old = python_at(tmp_path / "old", "3.10.1", "--enable-optimizations")
    quick = python_at(tmp_path / "quick", "3.11.1", "--enable-optimizations")
    monkeypatch.setattr(
        interpreter, "commands", lambda: ["/nowhere/python", "/bin/false", plain, old, quick]
    )
    assert chosen(None).executable == quick
    assert chosen(plain).executable == plain
    assert chosen(None, (3, 12)).executable == plain
    with pytest.raises(ProcessFailed, match=r"no Python 3\.13 or newer"):
        chosen(None, (3, 13))
    with pytest.raises(ProcessFailed, match=r"no Python 3\.11 or newer"):
        chosen(old)
    with pytest.raises(ProcessFailed, match="/nowhere/python does not start a Python"):
        chosen("/nowhere/python")


def test_figures_of_an_interpreter_that_is_not_optimised_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "source", lambda: {"dirty": False})
    for address in machine.ADDRESSES:
        monkeypatch.delenv(address, raising=False)
    plain = python_at(tmp_path / "plain", "3.12.1", "")
    with pytest.raises(SystemExit):
        run.main(["--keep-plots", "--python", plain, "--into", str(tmp_path / "into")])
    assert "not optimised: built without PGO and LTO; name another" in capsys.readouterr().err


@needs_proc
@pytest.mark.integration
def test_the_probe_notes_when_records_were_sent_and_their_events_received(tmp_path: Path) -> None:
    kafka = os.environ["PIPELINE_KAFKA_BOOTSTRAP_SERVERS"]
    topic = f"probe-{secrets.token_hex(6)}"
    admin = AdminClient({"bootstrap.servers": kafka})
    for made in admin.create_topics([NewTopic(topic, 4, 1)]).values():
        made.result()
    scans = load.make(10, 100).scans
    # What it sends is what it receives, as if a service had answered each record at once.
    plan = probe.Plan(
        bootstrap_servers=kafka,
        input=topic,
        output=topic,
        records=[(scan.parcel_id.encode(), scan.payload(), []) for scan in scans],
        warm_up=20,
        per_second=200.0,
        events=len(scans),
        processes={"python": [os.getpid()]},
    )
    try:
        found = probe.Probe(plan).run()
    finally:
        for gone in admin.delete_topics([topic]).values():
            gone.result()
    sent, arrived = found["sent"], found["arrived"]
    assert isinstance(sent, list)
    assert isinstance(arrived, Mapping)
    assert sorted(arrived) == [scan.number for scan in scans]
    assert all(arrived[scan.number] >= at for scan, at in zip(scans, sent, strict=True))
    assert sent[-1] - sent[0] >= 99 / 200 * 0.9
    assert isinstance(found["cpu"], Mapping)
    assert set(found["cpu"]) == {"python", "probe"}
    assert found["cpu"]["probe"] > 0
