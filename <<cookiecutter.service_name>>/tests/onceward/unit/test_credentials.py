"""Functions that return passwords and tokens, and those that fail or hang."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from onceward.servers import credentials
from onceward.servers.credentials import Credentials, CredentialsUnavailable

from tests.servers.waiting import PATIENCE

NAME = f"{__name__}:provide"
released = threading.Event()
calls: list[int] = []


def provide() -> object:
    """Return what the test has put in the place of this."""
    raise NotImplementedError


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], Credentials]:
    """Make credentials of a function, which have little patience with those that hang."""
    monkeypatch.setattr(credentials, "_running", {})
    released.clear()
    calls.clear()

    def make(function: Callable[[], object]) -> Credentials:
        seconds = 0.2 if function in (hang, hang_in_the_loop) else PATIENCE
        monkeypatch.setattr(credentials, "ANSWER_SECONDS", seconds)
        monkeypatch.setattr(f"{__name__}.provide", function)
        return Credentials("PIPELINE_X", NAME, "logicalCluster=lkc-1,identityPoolId=pool=2")

    return make


def hang() -> str:
    calls.append(threading.get_ident())
    released.wait()
    return "late"


async def hang_in_the_loop() -> str:
    await asyncio.sleep(3_600)
    return "late"


def leave() -> str:
    raise SystemExit(3)


def fail() -> str:
    raise ValueError("no metadata service")


async def fail_in_the_loop() -> str:
    raise TimeoutError("of its own")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (fail, "ValueError: no metadata service"),
        (fail_in_the_loop, "TimeoutError: of its own"),
        (hang, "has not returned within 0 s"),
        (hang_in_the_loop, "has not returned within 0 s"),
        (lambda: None, "has to return a text, not NoneType"),
        (lambda: ("token", 3), "has to return a text, not tuple"),
        (lambda: "", "has to return a text, not an empty text"),
    ],
)
async def test_why_there_is_no_token_is_told_with_the_setting(
    provider: Callable[[Callable[[], object]], Credentials],
    function: Callable[[], object],
    reason: str,
) -> None:
    with pytest.raises(CredentialsUnavailable) as raised:
        await provider(function).token()
    assert str(raised.value).startswith(f"PIPELINE_X ({NAME})")
    assert reason in str(raised.value)
    released.set()


async def test_a_function_that_ends_its_thread_ends_no_process(
    provider: Callable[[Callable[[], object]], Credentials],
) -> None:
    with pytest.raises(CredentialsUnavailable, match="SystemExit"):
        await provider(leave).token()


async def test_a_hanging_function_has_one_thread_and_its_late_answer_counts(
    provider: Callable[[Callable[[], object]], Credentials], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = provider(hang)
    for _ in range(3):
        with pytest.raises(CredentialsUnavailable):
            await tokens.token()
    assert len(calls) == 1
    monkeypatch.setattr(credentials, "ANSWER_SECONDS", PATIENCE)
    released.set()
    assert await tokens.token() == "late"


async def test_a_call_that_hangs_for_long_is_made_again(
    provider: Callable[[Callable[[], object]], Credentials], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_ABANDON_SECONDS", 0.1)
    tokens = provider(hang)
    for _ in range(2):
        with pytest.raises(CredentialsUnavailable):
            await tokens.token()
    assert len(calls) == 2
    released.set()


async def test_a_function_blocks_no_event_loop_and_is_called_for_each_token(
    provider: Callable[[Callable[[], object]], Credentials],
) -> None:
    def count() -> str:
        time.sleep(0.05)
        calls.append(threading.get_ident())
        return f"token {len(calls)}"

    tokens = provider(count)
    assert [await tokens.token() for _ in range(2)] == ["token 1", "token 2"]
    assert threading.get_ident() not in calls
    assert tokens.extensions() == {"logicalCluster": "lkc-1", "identityPoolId": "pool=2"}
