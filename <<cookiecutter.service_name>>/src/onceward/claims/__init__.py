"""Claim check: payloads that are too large to travel are stored in an object store.

An event then carries CloudEvents' `dataref`, the length and the SHA-256 of its data; its consumers
fetch the data before their transactions begin. See `docs/claims.md`.
"""

from .check import open_claims
from .settings import ClaimSettings

__all__ = ["ClaimSettings", "open_claims"]
