"""Whatever comes, in whatever order and how often, and whoever dies: the state is the order's."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from itertools import count

import asyncpg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import Gaps

from .bank import Deposit
from .desk import Desk, NewDesk
from .pooler import POOLED
from .test_sequences import TOPIC, Following, history, numbered

_accounts = count()


@dataclass
class Story:
    """What is in a partition, and what goes wrong."""

    log: list[int]
    """Numbers of the events, in the order of the partition; some are there more than once."""
    batches: list[int]
    """How many records the consumer takes at a time, again and again."""
    works_off: list[bool]
    """Whether the backlog's worker has its turn after each."""
    failures: dict[int, int]
    crashes: dict[int, int]


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Draw what may happen to up to six events of a key."""
    numbers = list(range(1, draw(st.integers(2, 6)) + 1))
    again = draw(st.lists(st.sampled_from(numbers), max_size=4))
    some = st.dictionaries(st.sampled_from(numbers), st.integers(1, 2), max_size=3)
    return Story(
        draw(st.permutations(numbers + again)),
        draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)),
        draw(st.lists(st.booleans(), min_size=1, max_size=4)),
        draw(some),
        draw(some),
    )


async def tell(
    story: Story, service: Following, new_desk: NewDesk, db: asyncpg.Connection
) -> list[int]:
    """Let the story happen to an account of its own; returns the numbers that were applied."""
    desk = await new_desk(service.handlers, topic=TOPIC)
    try:
        return await _tell(story, service, desk, db)
    finally:
        await desk.engine.dispose()


async def _tell(story: Story, service: Following, desk: Desk, db: asyncpg.Connection) -> list[int]:
    account = f"of {next(_accounts)}"
    service.failures = Counter(story.failures)
    service.crashes = Counter(story.crashes)
    deposits = [
        Deposit(one.amount, account, id=f"{account}-{one.amount}", headers=one.headers)
        for one in numbered(*story.log)
    ]
    begin = await desk.position()
    for turn in range(200):
        done = await desk.position() - begin
        size = story.batches[turn % len(story.batches)]
        works_off = story.works_off[turn % len(story.works_off)] or done == len(deposits)
        try:
            if done < len(deposits):
                await desk.apply(*deposits[done : done + size])
            if works_off:
                await desk.make_due()
                await desk.work_off()
        except asyncio.CancelledError:  # the process has died, and the next one goes on
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            await db.execute("UPDATE pipeline.backlog_lane SET lease_until = now() - interval '1s'")
        else:
            if done == len(deposits) and not await desk.backlog():
                return await history(db, account)
    raise AssertionError(f"not done: {await desk.backlog()}")


many = settings(
    deadline=None,
    max_examples=10 if POOLED else 60,  # behind a pooler each takes several times as long
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@many
@given(story=stories())
async def test_those_that_bring_their_order_along_end_in_it(
    new_desk: NewDesk, db: asyncpg.Connection, story: Story
) -> None:
    applied = await tell(story, Following(Gaps()), new_desk, db)
    assert applied == sorted(set(story.log))


@many
@given(story=stories())
async def test_the_others_end_in_the_order_in_which_each_came_first(
    new_desk: NewDesk, db: asyncpg.Connection, story: Story
) -> None:
    applied = await tell(story, Following(None), new_desk, db)
    assert applied == list(dict.fromkeys(story.log))
