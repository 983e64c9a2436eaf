"""How long tests with the fixture `harness` take in a generated service.

`pytest tests/test_kit.py -m full -s` prints it. The goals, on an idle machine: the first test of a
run in 5 seconds from the start of pytest, with PostgreSQL; each further one in 50 milliseconds.
"""

import json
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from tests.baked import Template

PLUGIN = """
import json, os, time

def pytest_runtest_logreport(report):
    moment = [report.nodeid, report.when, time.time(), time.process_time()]
    with open(os.environ["PACE_FILE"], "a") as file:
        print(json.dumps(moment), file=file)
"""
TESTS = "tests/parcel_tracker/test_record_scan.py"
ONCE = "not in_whatever_way and not wherever"
"""Leaves out the tests that handle their messages many times."""
ROUNDS = 3


@dataclass(frozen=True)
class Duration:
    """How long something took, in seconds."""

    wall: float
    cpu: float
    """Of the tests' process alone: it hardly depends on what else the machine does."""


def durations(file: Path, began: float) -> tuple[Duration, list[Duration]]:
    """Return the durations of a run's first test, with the start of pytest, and of further ones."""
    ends: dict[str, Duration] = {}
    first = None
    for line in file.read_text("utf-8").splitlines():
        name, when, at, cpu = json.loads(line)
        ends[name] = Duration(at, cpu)
        if first is None and when == "call":
            first = Duration(at - began, cpu)
    assert first is not None
    # The end of the last test is that of the session.
    moments = [*ends.values()][:-1]
    further = [Duration(b.wall - a.wall, b.cpu - a.cpu) for a, b in pairwise(moments)]
    assert len(further) > 1
    return first, further


@pytest.mark.full
def test_the_first_test_takes_seconds_and_each_further_one_milliseconds(
    template: Template, tmp_path: Path
) -> None:
    project = template.bake(tmp_path / "output")
    (tmp_path / "pace.py").write_text(PLUGIN, "utf-8")
    firsts: list[Duration] = []
    further: list[Duration] = []
    for number in range(ROUNDS + 1):
        file = tmp_path / f"round-{number}"
        began = time.time()
        project.run(
            *(sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "pace", TESTS, "-k", ONCE),
            PACE_FILE=str(file),
            PYTHONPATH=f"{project.path / 'src'}:{tmp_path}",
            PIPELINE_DATABASE_URL="",  # the fixture starts PostgreSQL
            PIPELINE_KAFKA_BOOTSTRAP_SERVERS="",
        )
        if number > 0:  # the first round makes the folder of PostgreSQL's data, and bytecode
            first, others = durations(file, began)
            firsts.append(first)
            further += others
    for what, found in (("first test of a run", firsts), ("each further test", further)):
        wall, cpu = (median(getattr(one, name) for one in found) for name in ("wall", "cpu"))
        print(f"\n{what}: {wall:.3f} s, {cpu:.3f} s of them CPU of the process (median)")
    # Four times the goals: a busy machine has cold caches.
    assert median(one.cpu for one in firsts) < 20
    assert median(one.cpu for one in further) < 0.2
