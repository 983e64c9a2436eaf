"""One timer for the calls of many handlers."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from onceward.apply.limits import Deadline

LONG = 60.0


async def rest() -> None:
    """Wait for ever."""
    await asyncio.Event().wait()


async def test_a_call_that_takes_too_long_ends_with_a_time_out() -> None:
    deadline = Deadline()
    with pytest.raises(TimeoutError), deadline.within(0.01):
        await rest()
    assert deadline.is_over
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "the task itself was not cancelled"


async def test_a_shorter_call_after_a_longer_one_ends_in_time() -> None:
    deadline = Deadline()
    with deadline.within(LONG):
        pass
    async with asyncio.timeout(LONG / 2):
        with pytest.raises(TimeoutError), deadline.within(0.01):
            await rest()
    deadline.close()


async def test_the_timer_of_an_earlier_call_ends_no_later_one() -> None:
    deadline = Deadline()
    with deadline.within(0.05):
        pass
    with deadline.within(LONG):
        await asyncio.sleep(0.1)
    assert not deadline.is_over
    with deadline.within(0.1):
        pass
    await asyncio.sleep(0.2)  # nobody is called while it fires
    assert not deadline.is_over
    with pytest.raises(TimeoutError), deadline.within(0.01):
        await rest()


async def test_a_reply_received_while_the_loop_was_busy_is_in_time() -> None:
    loop, deadline = asyncio.get_running_loop(), Deadline()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    def answer_and_burn() -> None:
        theirs.send(b"!")
        time.sleep(0.6)

    with ours, theirs, deadline.within(0.5):
        loop.call_soon(answer_and_burn)
        assert await loop.sock_recv(ours, 1) == b"!"
    assert not deadline.is_over


async def test_an_overdue_call_that_continues_keeps_its_own_error() -> None:
    deadline, seen = Deadline(), list[float]()
    with pytest.raises(ValueError, match="mine"), deadline.within(0.01):
        try:
            await rest()
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            seen.append(deadline.overdue())
            raise ValueError("mine") from None
    assert deadline.is_over
    assert 0 < seen[0] < LONG
    assert deadline.overdue() == 0


@pytest.mark.parametrize("seconds", [0.01, LONG])
async def test_who_is_cancelled_from_outside_is_cancelled(seconds: float) -> None:
    has_begun = asyncio.Event()

    async def called() -> None:
        deadline = Deadline()
        with deadline.within(seconds):
            has_begun.set()
            try:
                await rest()
            finally:
                # Also when its own time is over meanwhile.
                await _settle(lambda: asyncio.sleep(0.05))
        pytest.fail("went on")

    task = asyncio.create_task(called())
    await has_begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _settle(work: Callable[[], Awaitable[None]]) -> None:
    """Do it to the end, cancelled or not."""
    for _ in range(2):
        try:
            await work()
        except asyncio.CancelledError:
            continue


async def test_nothing_stays_behind() -> None:
    deadline = Deadline()
    with deadline.within(0.02):
        pass
    deadline.close()
    await asyncio.sleep(0.05)
    assert not deadline.is_over
