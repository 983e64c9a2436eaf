"""The object store of the archive and of large payloads, by its URL."""

from .store import Missing, Store, StoreUrl

__all__ = ["Missing", "Store", "StoreUrl"]
