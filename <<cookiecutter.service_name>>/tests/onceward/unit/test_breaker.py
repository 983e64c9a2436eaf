"""The breaker: what opens it, and who probes."""

from contextlib import suppress
from time import monotonic

import pytest

from onceward.apply import throttles
from onceward.apply.breaker import Breaker, BreakerOpen, FailedMessage
from onceward.observe.health import Health

PAUSE = 60.0


def failed(key: int, error: BaseException, *, is_repeated: bool = False) -> FailedMessage:
    return FailedMessage("ask", str(key).encode(), error, is_repeated)


@pytest.fixture
def of_three() -> Breaker:
    """Return a breaker that opens after failures of three keys."""
    return Breaker(keys=3, pause=PAUSE, health=Health(stall_after=PAUSE))


def let_fail(one: Breaker, *failures: FailedMessage) -> None:
    with suppress(BreakerOpen):
        one.observe(failures)


def test_failed_retries_neither_open_the_breaker_nor_spend_attempts_while_open(
    of_three: Breaker,
) -> None:
    of_three.observe([failed(n, KeyError(n), is_repeated=True) for n in range(9)])
    of_three.observe([failed(n, ValueError(n)) for n in range(2)])
    of_three.observe([failed(n, KeyError(n), is_repeated=True) for n in range(9)])
    with pytest.raises(BreakerOpen, match="ask fails with ValueError"):
        of_three.observe([failed(2, ValueError(2))])
    with pytest.raises(BreakerOpen):
        of_three.observe([failed(1, KeyError(1), is_repeated=True)])


@pytest.mark.parametrize("is_worker", [False, True], ids=["readers", "workers"])
def test_one_batch_of_all_of_them_probes_in_each_pause(
    of_three: Breaker, monkeypatch: pytest.MonkeyPatch, is_worker: bool
) -> None:
    def read() -> bool:
        """Return whether a batch, which fails, was tried."""
        was_tried = False
        with suppress(BreakerOpen), of_three.probe({"ask", "other"}, is_worker=is_worker):
            was_tried = True
            let_fail(of_three, failed(7, ValueError(7)))
            raise BreakerOpen("it fails", "ask")
        return was_tried

    assert [read() for _ in range(12)] == [True] * 12
    let_fail(of_three, *(failed(n, ValueError(n)) for n in range(3)))
    for pauses in range(3):
        now = monotonic() + pauses * PAUSE
        monkeypatch.setattr(throttles, "monotonic", lambda now=now: now)
        assert [read() for _ in range(12)].count(True) == (pauses > 0)
        with (
            pytest.raises(BreakerOpen, match="with ValueError") as refused,
            of_three.probe({"ask"}, is_worker=is_worker),
        ):
            pytest.fail("another has probed")
        assert refused.value.after is not None
        assert 0 < refused.value.after <= PAUSE + 1e-6  # floats are rounded
        with of_three.probe({"other"}, is_worker=is_worker):
            """Its consumer is not judged."""
    of_three.succeeded({"ask"})
    assert read()


def test_a_worker_that_tries_what_has_failed_leaves_readers_their_turn(
    of_three: Breaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_fail(of_three, *(failed(n, ValueError(n)) for n in range(3)))
    later = monotonic() + PAUSE
    monkeypatch.setattr(throttles, "monotonic", lambda: later)
    with of_three.probe({"ask"}, is_worker=True):
        with pytest.raises(BreakerOpen), of_three.probe({"ask"}, is_worker=True):
            pytest.fail("two workers at once")
        with of_three.probe({"ask"}):
            """What it has read is new."""


@pytest.mark.parametrize("is_worker", [False, True], ids=["readers", "workers"])
def test_a_probe_is_that_of_the_consumer_which_fails(
    of_three: Breaker, monkeypatch: pytest.MonkeyPatch, is_worker: bool
) -> None:
    def fail(consumer: str, *keys: int) -> None:
        of_three.observe(FailedMessage(consumer, bytes([key]), ValueError(key)) for key in keys)

    for consumer in ("ask", "tell"):
        with suppress(BreakerOpen):
            fail(consumer, 1, 2, 3)
    later = monotonic() + PAUSE
    monkeypatch.setattr(throttles, "monotonic", lambda: later)
    with suppress(BreakerOpen), of_three.probe({"ask", "tell"}, is_worker=is_worker):
        fail("ask", 4)
    with pytest.raises(BreakerOpen), of_three.probe({"ask"}, is_worker=is_worker):
        pytest.fail("it has just failed")
    with of_three.probe({"tell"}, is_worker=is_worker):
        """It was not judged."""


def test_a_consumer_rests_for_as_long_after_a_probe_that_took_long(
    of_three: Breaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_fail(of_three, *(failed(n, ValueError(n)) for n in range(3)))
    begun = monotonic() + PAUSE
    monkeypatch.setattr(throttles, "monotonic", lambda: begun)
    with suppress(BreakerOpen), of_three.probe({"ask"}, is_worker=True):
        monkeypatch.setattr(throttles, "monotonic", lambda: begun + 10 * PAUSE)
        of_three.observe([failed(1, ValueError(1))])
    assert of_three.throttles.resting("consumer") == {"ask"}


def test_a_batch_without_failures_leaves_the_probe_to_the_next_batch(
    of_three: Breaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_fail(of_three, *(failed(n, ValueError(n)) for n in range(3)))
    later = monotonic() + PAUSE
    monkeypatch.setattr(throttles, "monotonic", lambda: later)
    for _ in range(3):
        with of_three.probe({"ask"}):
            """Its messages are duplicates."""
    assert of_three.open == {"ask"}
