"""How long fetches pause, by the CPU time that the process uses."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from pipeline.servers.consumer import Fetcher

Run = Callable[[float, float], float]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that lets seconds pass at a load, and returns the pause after that."""
    clock = {"wall": 1_000.0, "cpu": 10.0}
    fetcher = Fetcher.__new__(Fetcher)
    fetcher._loop = SimpleNamespace(time=lambda: clock["wall"])
    monkeypatch.setattr(time, "process_time", lambda: clock["cpu"])

    def run(seconds: float, load: float) -> float:
        for _ in range(round(seconds / 0.1)):
            clock["wall"] += 0.1
            clock["cpu"] += 0.1 * load
            fetcher.adapt_pause()
        return fetcher._pause

    return run


def test_a_process_with_little_to_do_does_not_pause(run: Run) -> None:
    assert run(10, 0.3) == 0


@pytest.mark.parametrize(
    ("load", "pause"), [(0.4, 0.005), (0.5, 0.015), (0.6, 0.025), (0.9, 0.025)]
)
def test_the_pause_grows_with_the_load_up_to_a_limit(run: Run, load: float, pause: float) -> None:
    assert run(30, load) == pytest.approx(pause, rel=0.01)


@pytest.mark.parametrize("rate", [100, 300, 1_000])
@pytest.mark.parametrize("cpu", [0.003, 0.0055, 0.009])
def test_the_pause_settles_where_it_lowers_the_load(run: Run, rate: int, cpu: float) -> None:
    """`cpu` is that of a transaction, which takes half as long again."""

    def load(pause: float) -> float:
        return cpu / max(1.5 * cpu, pause + 1 / rate)

    pause = 0.0
    pauses = [pause := run(0.6, load(pause)) for _ in range(100)]
    assert max(pauses[-20:]) - min(pauses[-20:]) < 0.001


def test_a_short_peak_changes_little_and_a_long_one_is_forgotten(run: Run) -> None:
    run(10, 0.1)
    assert 0 < run(0.6, 1.0) < 0.0125
    assert run(30, 1.0) == pytest.approx(0.025, rel=0.01)
    assert run(30, 0.1) < 0.0001
