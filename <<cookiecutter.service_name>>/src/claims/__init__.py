"""Claim check: payloads that are too large to travel are kept in an object store.

An event then carries CloudEvents' `dataref`, the length and the SHA-256 of its data; who takes it
fetches the data before its transaction begins. `docs/claims.md` says how, and what it costs.
"""

from .check import open_claims
from .settings import ClaimSettings

__all__ = ["ClaimSettings", "open_claims"]
