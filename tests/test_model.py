"""The protocol, searched exhaustively in small bounds: `docs/model.md` says what that shows."""

import re
from pathlib import Path

import pytest

from model import check
from model.check import FAULTS, FULL, QUICK, Outcome, Run

from tests.baked import ROOT
from tests.programs import require

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    for name in ("spin", "gcc"):
        require(name)


@pytest.fixture(scope="module")
def outcomes() -> dict[Run, Outcome]:
    runs = [*QUICK, *FAULTS]
    return dict(zip(runs, check.search(runs), strict=True))


@pytest.mark.parametrize("run", QUICK, ids=str)
def test_the_protocol_keeps_every_promise(run: Run, outcomes: dict[Run, Outcome]) -> None:
    assert outcomes[run].is_as_expected, outcomes[run].result


@pytest.mark.parametrize("run", FAULTS, ids=str)
def test_a_fault_breaks_the_promise_that_it_should(run: Run, outcomes: dict[Run, Outcome]) -> None:
    """Traps 1 to 7, 9 to 13, 19, 27, 28, 30 and 31: see `FAULTS`."""
    assert outcomes[run].is_as_expected, outcomes[run].result


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a search makes away from what `make model` has made."""
    monkeypatch.setattr(check, "BUILD", tmp_path)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    ("run", "result"),
    [
        pytest.param(
            Run("consume", "LENGTH=2 MISHAPS=0", "NO_SUCH_FAULT", "NO_LOSS"),
            "FAILED: nothing was found",
            id="harmless",
        ),
        pytest.param(
            Run("relay", "MISHAPS=0 ORDER_BY_XID"), "FAILED: assertion violated", id="broken"
        ),
    ],
)
def test_a_verdict_is_not_given_away(run: Run, result: str) -> None:
    [outcome] = check.search([run])

    assert outcome.result.startswith(result)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    ("limit", "value", "gap"),
    [("DEPTH", 20, "the search was not deep enough"), ("MEMORY_MB", 140, "the search did not end")],
)
def test_a_search_that_was_cut_short_does_not_count_as_complete(
    limit: str, value: int, gap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, limit, value)

    [outcome] = check.search([Run("consume")])

    assert outcome.gap.startswith(gap)
    assert not outcome.is_as_expected


@pytest.mark.usefixtures("apart")
def test_a_counter_example_can_be_read(tmp_path: Path) -> None:
    [run] = [it for it in FAULTS if it.fault == "NO_COMPARE_AND_SET" and it.breaks == "NO_DOUBLE"]

    [outcome] = check.search([run])

    assert outcome.is_as_expected, outcome.result
    title, _, *steps = (tmp_path / f"{run}.txt").read_text("utf-8").splitlines()
    assert title == f"no compare and set: {outcome.result}"
    assert "generation 0 is forgotten" in steps
    assert [step.split(" ", 2)[2] for step in steps].count("applies event 0") == 2


def test_without_spin_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert check.main(["--quick"]) == 1

    assert "apt-get install spin gcc" in capsys.readouterr().err


def test_the_page_counts_the_faults_and_explains_the_promises() -> None:
    page = (ROOT / "docs" / "model.md").read_text("utf-8")
    promises = {run.breaks for run in FAULTS} - {"DEADLOCK", "LIVELOCK"}

    assert f"each of {len({run.fault for run in FAULTS})} faults" in page
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE)) == promises
    assert set(re.findall(r"^\| `(\w+)\.pml` \|", page, re.MULTILINE)) == {
        run.model for run in (*QUICK, *FULL)
    }
