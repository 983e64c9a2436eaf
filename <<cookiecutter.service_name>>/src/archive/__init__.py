"""An archive of the outbox in an object store: days go there before their tables are dropped.

`days` writes a day, `reading` finds events and verifies what is there, `files` is the format. The
engine knows none of it: the service passes it an `Archive`.
"""

from .days import Archive, ArchiveSettings

__all__ = ["Archive", "ArchiveSettings"]
