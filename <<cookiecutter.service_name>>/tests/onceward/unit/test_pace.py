"""How many messages a transaction is given, by what came before."""

import pytest

from onceward.apply.item import Item
from onceward.apply.limits import Pace
from onceward.apply.outcome import BatchOutcome
from onceward.settings import Settings

ALLOWED = 2.0
"""Seconds: a quarter of what a transaction may take."""


@pytest.fixture
def pace() -> Pace:
    """Return one that has not learnt anything."""
    return Pace(
        Settings.model_validate(
            {
                "database_url": "postgresql+asyncpg://service@localhost/service",
                "kafka_bootstrap_servers": "localhost:9092",
                "transaction_timeout": 4 * ALLOWED,
                "batch_size": 1_000,
            }
        )
    )


def done(count: int, seconds: float) -> BatchOutcome:
    """Return the results of so many messages."""
    item: Item = None  # type: ignore[assignment]
    return BatchOutcome(applied=[item] * count, seconds=seconds)


def test_it_begins_small_and_grows_while_handlers_are_quick(pace: Pace) -> None:
    seen = []
    for _ in range(6):
        seen.append(pace.limit)
        pace.learn([done(pace.limit, 0.01)], pace.limit)
    assert seen == [100, 200, 400, 800, 1_000, 1_000]


def test_slow_handlers_get_as_many_as_fit(pace: Pace) -> None:
    pace.learn([done(100, 100 * 0.05)], 100)
    assert pace.limit == 40
    pace.learn([done(40, 40 * 0.05)], 40)
    assert pace.limit == 40


def test_few_quick_messages_do_not_enlarge_the_batches_of_slow_handlers(pace: Pace) -> None:
    pace.learn([done(100, 100 * 0.05)], 100)
    for _ in range(3):
        pace.learn([done(1, 0.004)], 1)
    assert pace.limit == 40


@pytest.mark.parametrize("keys", [3, 60, 700])
def test_it_grows_where_the_limit_is_no_multiple_of_the_keys(pace: Pace, keys: int) -> None:
    """Of the backlog's rows as many are read of each key as of any other."""
    for _ in range(5):
        among = min(keys, pace.limit)
        number = among * (pace.limit // among)
        pace.learn([done(number, 0.01)], number)
    assert pace.limit == 1_000


def test_what_had_to_be_cut_is_not_given_at_once_again(pace: Pace) -> None:
    for _ in range(5):
        pace.learn([done(1_000, 0.1)], 1_000)
    pace.learn([done(500, 0.5), done(500, 0.5)], 1_000)
    assert pace.limit == 500


@pytest.mark.parametrize("seconds", [ALLOWED * 0.6, ALLOWED * 5])
def test_it_recovers_from_the_slowest_handlers(pace: Pace, seconds: float) -> None:
    for _ in range(20):
        pace.learn([done(pace.limit, seconds * pace.limit)], pace.limit)
    assert pace.limit in (2, 4)
    for _ in range(10):
        pace.learn([done(pace.limit, 0.001 * pace.limit)], pace.limit)
    assert pace.limit == 1_000


def test_what_no_handler_is_called_for_is_no_reason_to_take_less(pace: Pace) -> None:
    for _ in range(4):
        pace.learn([BatchOutcome(seconds=1e-6)], pace.limit)
    assert pace.limit == 1_000
