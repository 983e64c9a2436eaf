"""How long tests with the fixture `harness` take in a generated service.

`pytest tests/test_kit.py -m full -s` prints it. The goals, on an idle machine: the first test of a
run in 5 seconds from the start of pytest, with PostgreSQL; each further one in 50 milliseconds.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from tests.baked import Template

PLUGIN = """
import json, os, time

def pytest_runtest_logreport(report):
    with open(os.environ["PACE_FILE"], "a") as file:
        print(json.dumps([report.nodeid, report.when, report.duration, time.time()]), file=file)
"""
TESTS = "tests/parcel_tracker/test_record_scan.py"
ONCE = "not in_whatever_way and not wherever"
"""Leaves out the tests that handle their messages many times."""
ROUNDS = 3
MACHINES = 20
"""How many times longer than the goals a loaded machine may take."""


@pytest.mark.full
def test_the_first_test_takes_seconds_and_each_further_one_milliseconds(
    template: Template, tmp_path: Path
) -> None:
    project = template.bake(tmp_path / "output")
    (tmp_path / "pace.py").write_text(PLUGIN, "utf-8")
    firsts: list[float] = []
    further: list[float] = []
    for number in range(ROUNDS + 1):
        file = tmp_path / f"round-{number}"
        began = time.time()
        project.run(
            *(sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "pace", TESTS, "-k", ONCE),
            PACE_FILE=str(file),
            PYTHONPATH=f"{project.path / 'src'}:{tmp_path}",
            PIPELINE_DATABASE_URL="",  # the fixture starts PostgreSQL
        )
        reports = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        names = list(dict.fromkeys(name for name, *_ in reports))
        assert len(names) > 3
        if number == 0:  # the folder of PostgreSQL's data and all bytecode are made
            continue
        firsts.append(next(at - began for name, when, _, at in reports if when == "call"))
        # The teardown of the last test is that of the session.
        further += [
            sum(seconds for one, when, seconds, _ in reports if one == name) for name in names[1:-1]
        ]
    print(
        f"\nfirst test of a run: {median(firsts):.1f} s ({min(firsts):.1f} to {max(firsts):.1f});"
        f" each further one: {1_000 * median(further):.0f} ms ({1_000 * min(further):.0f} to"
        f" {1_000 * max(further):.0f})"
    )
    assert min(firsts) < 5 * MACHINES
    assert min(further) < 0.050 * MACHINES
