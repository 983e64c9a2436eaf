"""Plain JSON: the codec of topics whose records are not CloudEvents; see `docs/codecs.md`."""

from .codec import Header, PayloadFields, Plain, Position

__all__ = ["Header", "PayloadFields", "Plain", "Position"]
