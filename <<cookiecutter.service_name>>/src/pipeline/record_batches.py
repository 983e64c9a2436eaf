"""Batches of records, read whatever the names of their headers are.

aiokafka reads the names as UTF-8, which no broker asks of anybody. At a record with another one it
raises, however often it is asked, and nothing behind it would ever be read.
"""

from collections.abc import Iterator
from typing import Any

from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.memory_records import MemoryRecords

_BEFORE_LENGTH, _BEFORE_BATCH = 8, 12
"""Bytes of a batch before its length, and before what the length counts."""


class AnyMemoryRecords:
    """What a fetch has brought, as aiokafka's `MemoryRecords`, with `AnyBatch` for its batches."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._records = MemoryRecords(bytes(data))

    def size_in_bytes(self) -> int:
        """Return the size of all batches."""
        return int(self._records.size_in_bytes())

    def has_next(self) -> bool:
        """Whether there is another batch."""
        return bool(self._records.has_next())

    def next_batch(self) -> "AnyBatch":
        """Return the next batch."""
        length = self._data[self._at + _BEFORE_LENGTH : self._at + _BEFORE_BATCH]
        end = self._at + _BEFORE_BATCH + int.from_bytes(length, "big")
        raw, self._at = self._data[self._at : end], end
        return AnyBatch(self._records.next_batch(), raw)


class AnyBatch:
    """A batch of aiokafka's, or a lenient one if it holds a record that aiokafka can't read."""

    def __init__(self, batch: Any, raw: memoryview) -> None:
        self._batch = batch
        self._raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __next__(self) -> Any:
        return next(self._batch)

    def __iter__(self) -> Iterator[Any]:
        try:
            return iter(list(self._batch))
        except (UnicodeDecodeError, CorruptRecordException) as error:
            # The second one is what aiokafka makes of it without its C extension.
            if not isinstance(error.__cause__ or error, UnicodeDecodeError):
                raise
            return iter(_LenientBatch(self._raw))


class _LenientBatch(_DefaultRecordBatchPy):  # type: ignore[misc]  # it has no types
    """A batch whose headers may have any name: what is not UTF-8 becomes surrogates."""

    def _maybe_uncompress(self) -> None:
        super()._maybe_uncompress()
        self._buffer: bytearray = _Buffer(self._buffer)


class _Buffer(bytearray):
    """Bytes of which every slice is lenient; only the names of headers are decoded."""

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return _Lenient(found) if isinstance(at, slice) else found


class _Lenient(bytearray):
    def decode(self, *_: str) -> str:
        return super().decode("utf-8", "surrogateescape")
