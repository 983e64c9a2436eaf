"""The error of a test that uses the kit wrongly."""


class HarnessMisused(Exception):
    """The test asks for something that the service can't do; the text says what to write."""
