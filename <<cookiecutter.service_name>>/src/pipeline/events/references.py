"""References: where the data of an event is stored, if it is not in the event's record."""

from typing import NamedTuple


class Reference(NamedTuple):
    """Where the data of an event is stored: CloudEvents' `dataref`, and two extensions of ours.

    The extensions serve to verify the data. Other producers may leave them out.
    """

    uri: str
    length: int | None = None
    """Number of bytes; the attribute `datalength`."""
    checksum: str | None = None
    """SHA-256 in hexadecimal digits; the attribute `datachecksum`."""
