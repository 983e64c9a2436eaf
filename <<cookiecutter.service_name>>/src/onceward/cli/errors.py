"""Errors that end a command with one sentence."""

from onceward.errors import OncewardError
from onceward.errors import Refused as Refused


class OutputFailed(OncewardError):
    """Standard output can't be written; the text says why. It is no `OSError`, as of a server."""
