"""An archive of the outbox in an object store, where days are stored before they are dropped.

`days` writes a day, `reading` finds events and verifies the archive, `files` is the format. The
engine does not import this package: the service passes an `Archive` to it.
"""

from .days import Archive, ArchiveSettings

__all__ = ["Archive", "ArchiveSettings"]
