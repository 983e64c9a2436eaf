"""Passwords and tokens that expire: functions that settings name, called for each connection."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pkgutil import resolve_name
from typing import Any

from aiokafka.abc import AbstractTokenProvider

from onceward.errors import OncewardError, describe_error

ANSWER_SECONDS = 10.0
"""Time-out of a call, after which the attempt to connect fails."""
_ABANDON_SECONDS = 60.0
"""Time after which a call that still runs in its thread is made again, in another."""

_running: dict[Callable[[], Any], tuple[Future[Any], float]] = {}
"""The last call of each function in a thread, and when it began."""


class CredentialsUnavailable(OncewardError, ConnectionError):
    """A function has returned no password or token, or a server has rejected what it returned.

    The text has the setting that names the function, and the reason.
    """


class Credentials(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka has no types
    """Calls the function that a setting names, `module:function`, for a password or a token."""

    def __init__(self, setting: str, function: str, extensions: str | None = None) -> None:
        """`extensions` are those of SASL, as `name=value`, separated by commas."""
        self.name = f"{setting} ({function})"
        self._function: Callable[[], Any] = resolve_name(function)
        pairs = (one.strip().partition("=") for one in (extensions or "").split(",") if one)
        self._extensions = {name: value for name, _, value in pairs}

    async def token(self) -> str:
        """Return what the function returns. Raises `CredentialsUnavailable`."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS) as limit:
                found = await self._call()
        except Exception as error:
            reason = describe_error(error)
            if limit.expired():
                reason = f"it has not returned within {ANSWER_SECONDS:.0f} s"
            raise CredentialsUnavailable(f"{self.name}: {reason}") from error
        if not (isinstance(found, str) and found):
            reason = "an empty text" if found == "" else type(found).__name__
            raise CredentialsUnavailable(f"{self.name} has to return a text, not {reason}")
        return found

    def extensions(self) -> dict[str, str]:
        """Return the extensions of SASL, which aiokafka sends with the token."""
        return self._extensions

    async def _call(self) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function()
        call, began = _running.get(self._function, (None, 0.0))
        if call is None or call.done() or time.monotonic() - began > _ABANDON_SECONDS:
            call = Future()
            call.set_running_or_notify_cancel()  # a time-out ends the waiting, not the call
            _running[self._function] = call, time.monotonic()
            # The threads of `asyncio.to_thread` also resolve names, and delay the process' end.
            threading.Thread(target=_run, args=(self._function, call), daemon=True).start()
        return await asyncio.wrap_future(call)


def _run(function: Callable[[], Any], call: Future[Any]) -> None:
    try:
        call.set_result(function())
    except BaseException as error:
        # SystemExit would end the event loop.
        call.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
