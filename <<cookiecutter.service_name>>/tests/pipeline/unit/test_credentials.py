"""Functions that return passwords and tokens, and those that fail or hang."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pipeline.servers import credentials
from pipeline.servers.credentials import Credentials, CredentialsUnavailable

from tests.servers.waiting import PATIENCE

NAME = f"{__name__}:provide"
Function = Callable[[], Awaitable[object]]


async def provide() -> object:
    """Return what the test has put in the place of this."""
    raise NotImplementedError


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Callable[[Function], Credentials]:
    """Make credentials of a function, which have little patience with the one that hangs."""

    def make(function: Function) -> Credentials:
        monkeypatch.setattr(credentials, "ANSWER_SECONDS", 0.2 if function is hang else PATIENCE)
        monkeypatch.setattr(f"{__name__}.provide", function)
        return Credentials("PIPELINE_X", NAME, "logicalCluster=lkc-1,identityPoolId=pool=2")

    return make


def returning(found: object) -> Function:
    """Return a function that returns this."""

    async def function() -> object:
        return found

    return function


async def hang() -> str:
    await asyncio.sleep(3_600)
    return "late"


async def leave() -> str:
    raise SystemExit(3)


async def fail() -> str:
    raise ValueError("no metadata service")


async def time_out() -> str:
    raise TimeoutError("of its own")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (fail, "ValueError: no metadata service"),
        (leave, "SystemExit: 3"),
        (time_out, "TimeoutError: of its own"),
        (hang, "has not returned within 0 s"),
        (returning(None), "has to return a text, not NoneType"),
        (returning(("token", 3)), "has to return a text, not tuple"),
        (returning(""), "has to return a text, not an empty text"),
    ],
)
async def test_why_there_is_no_token_is_told_with_the_setting(
    provider: Callable[[Function], Credentials], function: Function, reason: str
) -> None:
    with pytest.raises(CredentialsUnavailable) as raised:
        await provider(function).token()
    assert str(raised.value).startswith(f"PIPELINE_X ({NAME})")
    assert reason in str(raised.value)


async def test_a_function_is_called_for_each_token(
    provider: Callable[[Function], Credentials],
) -> None:
    calls: list[str] = []

    async def count() -> str:
        calls.append(f"token {len(calls) + 1}")
        return calls[-1]

    tokens = provider(count)
    assert [await tokens.token() for _ in range(2)] == ["token 1", "token 2"]
    assert tokens.extensions() == {"logicalCluster": "lkc-1", "identityPoolId": "pool=2"}
