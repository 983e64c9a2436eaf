"""Passwords and tokens that expire: functions that settings name, called for each connection."""

import asyncio
from collections.abc import Awaitable, Callable
from pkgutil import resolve_name

from aiokafka.abc import AbstractTokenProvider

from pipeline.errors import describe_error

ANSWER_SECONDS = 10.0
"""Time-out of a call, after which the attempt to connect fails."""


class CredentialsUnavailable(ConnectionError):
    """A function has returned no password or token, or a server has rejected what it returned.

    The text has the setting that names the function, and the reason.
    """


class Credentials(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka has no types
    """Calls the function that a setting names, `module:function`, for a password or a token."""

    def __init__(self, setting: str, function: str, extensions: str | None = None) -> None:
        """`extensions` are those of SASL, as `name=value`, separated by commas."""
        self.name = f"{setting} ({function})"
        self._function: Callable[[], Awaitable[object]] = resolve_name(function)
        pairs = (one.strip().partition("=") for one in (extensions or "").split(",") if one)
        self._extensions = {name: value for name, _, value in pairs}

    async def token(self) -> str:
        """Return what the function returns. Raises `CredentialsUnavailable`."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS) as limit:
                found = await self._function()
        except (Exception, SystemExit) as error:  # the latter would end the event loop
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
