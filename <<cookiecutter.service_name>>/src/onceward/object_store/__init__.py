"""The object store for the archive and for large payloads, given by its URL."""

from .settings import EndpointSettings
from .store import Missing, Store, StoreUrl

__all__ = ["EndpointSettings", "Missing", "Store", "StoreUrl"]
