"""Who has cancelled a call of the service's code: itself, or somebody else."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from onceward.apply.limits import Deadline
from onceward.servers.guard import Guard, LoopBlocked
from onceward.servers.service_code import CancelledItself, call_service

from tests.onceward.blocking import interrupt

Code = Callable[[], Coroutine[Any, Any, None]]
LIMIT = 0.5
"""Seconds after which a call that hangs is cancelled: many times what it needs until it hangs."""


def cancel() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def hang() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise ValueError


async def catch() -> None:
    """Cancel the own task, and catch that."""
    cancel()
    with suppress(asyncio.CancelledError):
        await hang()


async def take_back() -> None:
    """Cancel the own task, catch that, and say so."""
    await catch()
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


async def cancel_and_hang() -> None:
    cancel()
    await hang()


async def cancel_and_fail() -> None:
    cancel()
    await fail()


async def cancel_after_the_first() -> None:
    await catch()
    cancel()


async def fail_in_a_group() -> None:
    async with asyncio.TaskGroup() as group:  # which cancels this task
        group.create_task(fail())
        group.create_task(hang())


async def catch_and_fail_in_a_group() -> None:
    await catch()
    await fail_in_a_group()


async def time_out() -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await hang()


async def catch_and_time_out() -> None:
    await catch()
    await time_out()


async def await_what_is_cancelled() -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def be_interrupted() -> None:
    """Block, until the signal comes."""
    interrupt()


async def be_interrupted_in_a_task() -> None:
    await asyncio.create_task(be_interrupted())


async def catch_an_interruption() -> None:
    with suppress(BaseException):
        interrupt()


async def replace_an_interruption() -> None:
    try:
        interrupt()
    except BaseException as error:
        raise ValueError from error


async def take_an_interruption_for_a_cancellation() -> None:
    try:
        interrupt()
    except BaseException as error:
        raise asyncio.CancelledError from error


async def cancel_after_an_interruption() -> None:
    with suppress(BaseException):
        interrupt()
    await cancel_and_hang()


async def await_what_is_cancelled_after_an_interruption() -> None:
    with suppress(BaseException):
        interrupt()
    await time_out()
    await await_what_is_cancelled()


async def gather_an_interruption() -> None:
    await asyncio.gather(be_interrupted(), return_exceptions=True)


async def leave_an_interruption() -> None:
    await asyncio.wait([asyncio.create_task(be_interrupted())])


async def outcome(call: Awaitable[None]) -> type[BaseException] | None:
    """Return the class of the error of a call."""
    try:
        await call
    except BaseException as error:
        return type(error)
    return None


ENDING: dict[Code, type[BaseException] | None] = {
    catch: None,
    take_back: None,
    time_out: None,
    catch_and_time_out: None,
    fail: ValueError,
    cancel_and_fail: ValueError,
    fail_in_a_group: ExceptionGroup,
    catch_and_fail_in_a_group: ExceptionGroup,
    cancel_and_hang: CancelledItself,
    cancel_after_the_first: CancelledItself,
    await_what_is_cancelled: CancelledItself,
}
FIRST = catch, take_back, time_out
"""What code may have done before it hangs."""


@pytest.mark.parametrize("code", ENDING)
async def test_what_the_code_cancels_itself_ends_with_its_call(code: Code) -> None:
    async def run() -> type[BaseException] | None:
        found = await outcome(call_service(code()))
        await asyncio.sleep(0)  # nothing is pending
        return found

    assert await asyncio.create_task(run()) == ENDING[code]


@pytest.mark.parametrize("first", FIRST)
async def test_a_stop_is_not_taken_for_the_codes_own_cancellation(first: Code) -> None:
    hangs = asyncio.Event()

    async def code() -> None:
        await first()
        hangs.set()
        await hang()

    task = asyncio.create_task(outcome(call_service(code())))
    await hangs.wait()
    task.cancel()
    assert await task is asyncio.CancelledError


@pytest.mark.parametrize("first", FIRST)
async def test_a_time_limit_is_not_taken_for_the_codes_own_cancellation(first: Code) -> None:
    async def code() -> None:
        await first()
        await hang()

    async def within() -> None:
        with Deadline().within(LIMIT):
            await call_service(code())

    async def outside() -> None:
        async with asyncio.timeout(LIMIT):
            await call_service(code())

    for run in (within, outside):
        assert await asyncio.create_task(outcome(run())) is TimeoutError


INTERRUPTED: list[Code] = [
    be_interrupted,
    be_interrupted_in_a_task,
    catch_an_interruption,
    replace_an_interruption,
    take_an_interruption_for_a_cancellation,
    cancel_after_an_interruption,
    await_what_is_cancelled_after_an_interruption,
    gather_an_interruption,
    leave_an_interruption,
]


@pytest.mark.parametrize("guard", [None, Guard(None)])
@pytest.mark.parametrize("code", INTERRUPTED)
async def test_an_interrupted_call_ends_so_whatever_its_code_returns_or_raises(
    code: Code, guard: Guard | None
) -> None:
    assert await outcome(call_service(code(), guard)) is LoopBlocked


async def test_an_interruption_does_not_replace_a_cancellation_from_outside() -> None:
    hangs = asyncio.Event()

    async def code() -> None:
        await catch_an_interruption()
        hangs.set()
        await hang()

    task = asyncio.create_task(outcome(call_service(code())))
    await hangs.wait()
    task.cancel()
    assert await task is asyncio.CancelledError


async def test_only_the_call_that_runs_is_interrupted() -> None:
    """Not the engine, not what the call has left behind, and not the call in which it was made."""
    left: list[asyncio.Task[None]] = []
    goes_on = asyncio.Event()

    async def later() -> None:
        await goes_on.wait()
        interrupt()

    async def leave() -> None:
        left.append(asyncio.create_task(later()))

    async def call_another() -> None:
        assert await outcome(call_service(be_interrupted())) is LoopBlocked

    interrupt()
    await call_service(leave())
    assert await outcome(call_service(call_another())) is None
    goes_on.set()
    await left[0]
