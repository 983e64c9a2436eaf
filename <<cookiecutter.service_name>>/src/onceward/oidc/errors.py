"""Errors of a token provider; `tokens.py` can't be imported without its settings."""

from onceward.errors import OncewardError


class TokenRefused(OncewardError):
    """The provider has answered, and with no token; the text has its reason."""
