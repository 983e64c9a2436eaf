"""Topics without CloudEvents, whose records have type, identity and data elsewhere.

See `docs/codecs.md`.
"""

from .codec import Header, PayloadFields, Plain, Position

__all__ = ["Header", "PayloadFields", "Plain", "Position"]
