"""References: where the data of an event is, if it does not travel with the event."""

from typing import NamedTuple


class Reference(NamedTuple):
    """Where the data of an event is: CloudEvents' `dataref`, and two extensions of ours.

    By the other two a consumer verifies the data; other producers may leave them out.
    """

    uri: str
    length: int | None = None
    """Bytes; the attribute `datalength`."""
    checksum: str | None = None
    """SHA-256 in hexadecimal digits; the attribute `datachecksum`."""
