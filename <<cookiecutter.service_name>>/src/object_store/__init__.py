"""The object store for the archive and for large payloads, given by its URL."""

from .store import Missing, Store, StoreUrl

__all__ = ["Missing", "Store", "StoreUrl"]
