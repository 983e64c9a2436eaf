"""The error of a test that uses the kit wrongly."""

from onceward.errors import OncewardError


class HarnessMisused(OncewardError):
    """The test asks for something that the service can't do; the text says what to write."""
