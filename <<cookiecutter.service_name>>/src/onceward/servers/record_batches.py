"""Batches are unpacked without a limit, and not read at all if a header's name is not UTF-8.

What is wrong: aiokafka unpacks a batch without a limit, and a few hundred kilobytes may take all
memory. And it decodes the names of headers as UTF-8, which no broker requires: at a record with
another name it raises at every attempt, and nothing behind it is ever read.

To see it: send a batch of zeros with gzip; send a header whose name is the byte FF.

The change: a batch is unpacked to at most its room, or raises an error that has its offsets. Bytes
of a name that are not UTF-8 become surrogates.
"""

from collections.abc import Iterator
from itertools import islice
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from struct import unpack_from
from typing import Any
from weakref import proxy

import cramjam
from aiokafka.codec import _detect_xerial_stream
from aiokafka.consumer.fetcher import PartitionRecords
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBase, _DefaultRecordBatchPy
from aiokafka.record.memory_records import MemoryRecords

from onceward.errors import OncewardError

_MAGIC, _OLD_CODEC, _CODEC = 16, 17, 22
"""Offsets in a batch of its format, of its codec before format 2, and of its codec since."""
_HEADER = DefaultRecordBase.HEADER_STRUCT.size
_CODEC_MASK = DefaultRecordBase.CODEC_MASK
_CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
_XERIAL_HEADER = 16
_NO_ROOM = "failed to write whole buffer"
"""cramjam's error at the end of the buffer."""


class UnreadableBatch(OncewardError):
    """A batch can't be unpacked within its limit, or holds no valid records."""

    def __init__(self, batch: Any, raw: memoryview, error: Exception, room: int) -> None:
        codec = raw[_OLD_CODEC if _is_old(raw) else _CODEC] & _CODEC_MASK
        self.first, self.next = _offset_of(raw), int(batch.next_offset)
        self.is_too_large = isinstance(error, _TooLarge)
        why = (
            f"unpacks to more than {room:,} bytes"
            if self.is_too_large
            else f"can't be read: {type(error).__name__}: {error}"
        )
        super().__init__(
            f"the batch of the offsets {self.first} to {self.next - 1}"
            f" ({len(raw):,} bytes, {_CODECS[codec] if codec < len(_CODECS) else codec}) {why}"
        )


class _TooLarge(OncewardError):
    """The batch unpacks to more than its limit."""


class FetchedRecords(PartitionRecords):  # type: ignore[misc]  # it has no types
    """The records of a fetch: their iterator refers weakly to them, so the batch goes with them."""

    def _unpack_records(self) -> Any:
        return PartitionRecords._unpack_records(proxy(self))


class FetchedBatches:
    """The batches of a fetch, in place of aiokafka's `MemoryRecords`; a `member.Arrived`."""

    room = 128 * 2**20
    """Bytes to which its next batches may unpack together."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._records = MemoryRecords(bytes(data))
        self.is_over = False
        self.stable: int | None = None
        """See `member.Arrived`."""
        self.epoch, self.whole = -1, range(0)
        """The first batch's leader epoch, and its offsets unless compaction has removed some."""
        if len(data) >= _HEADER and not _is_old(self._data):
            header = DefaultRecordBase.HEADER_STRUCT.unpack_from(data)
            first, _, self.epoch, _, _, _, last, *_, count = header
            if count == last + 1:
                self.whole = range(first, first + count)

    def size_in_bytes(self) -> int:
        """Return the size of all batches, in bytes."""
        return int(self._records.size_in_bytes())

    def has_next(self) -> bool:
        """Whether there is another batch."""
        return not self.is_over and bool(self._records.has_next())

    def next_batch(self) -> "FetchedBatch":
        """Return the next batch."""
        # Behind an offset of 8 bytes stands the length of what follows it.
        (length,) = unpack_from(">i", self._data, self._at + 8)
        start, self._at = self._at, self._at + 12 + length
        raw = self._data[start : self._at]
        return FetchedBatch(self._records.next_batch(), raw, self, is_first=not start)


class FetchedBatch:
    """A batch of aiokafka's, unpacked within the limit, and read leniently where aiokafka fails.

    If it can't be read it raises `UnreadableBatch`, but only as the first one of a fetch: others
    end the fetch, and are the first of the next one. So what stands before them is applied.
    """

    def __init__(self, batch: Any, raw: memoryview, of: FetchedBatches, *, is_first: bool) -> None:
        self._batch = batch
        self._raw = raw
        self._fetch = of
        self._is_first = is_first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    @property
    def next_offset(self) -> int:
        """Return the offset to fetch from next: behind it, or its own if it ended the fetch."""
        has_ended_fetch = self._fetch.is_over and not self._is_first
        return _offset_of(self._raw) if has_ended_fetch else int(self._batch.next_offset)

    def __next__(self) -> Any:
        return next(self._batch)

    def __iter__(self) -> Iterator[Any]:
        read, fetch = 0, self._fetch
        try:
            raw, batch = self._raw, self._batch
            if len(raw) > fetch.room:
                raise _TooLarge
            if raw[_CODEC] & _CODEC_MASK and not _is_old(raw):
                raw = _unpacked(raw, fetch.room)
                batch = type(batch)(raw)
            fetch.room -= len(raw)
            try:
                for record in batch:
                    read += 1
                    yield record
            except (UnicodeDecodeError, CorruptRecordException) as error:
                # Without its C extension aiokafka raises the second one from the first.
                if not isinstance(error.__cause__ or error, UnicodeDecodeError):
                    raise
                yield from islice(_LenientBatch(raw), read, None)
        except Exception as error:
            if self._is_first or read:
                raise UnreadableBatch(self._batch, self._raw, error, fetch.room) from error
            fetch.is_over = True


def _is_old(raw: memoryview) -> bool:
    """Return whether its format is one that brokers have not written since Kafka 3.0."""
    return raw[_MAGIC] <= 1


def _offset_of(raw: memoryview) -> int:
    offset: int = unpack_from(">q", raw)[0]
    return offset


def _unpacked(raw: memoryview, limit: int) -> memoryview:
    """Return the batch without its codec. Raises `_TooLarge`, or the codec's error."""
    # Pages of it take no memory until they are written to.
    batch = memoryview(mmap(-1, _HEADER + limit, flags=MAP_PRIVATE | MAP_ANONYMOUS))
    batch[:_HEADER] = raw[:_HEADER]
    batch[_CODEC] &= ~_CODEC_MASK
    codec, data, room = _CODECS[raw[_CODEC] & _CODEC_MASK], raw[_HEADER:], batch[_HEADER:]
    if codec == "snappy":
        size = 0
        for block in _snappy_blocks(data):
            if cramjam.snappy.decompress_raw_len(block) > limit - size:
                raise _TooLarge
            size += cramjam.snappy.decompress_raw_into(block, room[size:])
    else:
        try:
            size = getattr(cramjam, codec).decompress_into(data, room)
        except cramjam.DecompressionError as error:
            raise _TooLarge if _NO_ROOM in str(error) else error from None
    return batch[: _HEADER + size]


def _snappy_blocks(data: memoryview) -> Iterator[memoryview]:
    """Yield the parts that are packed by themselves: the blocks of Java's stream format, or all."""
    if not _detect_xerial_stream(data):
        yield data
        return
    at = _XERIAL_HEADER
    while at < len(data):
        (length,) = unpack_from(">I", data, at)
        yield data[at + 4 : at + 4 + length]
        at += 4 + length


class _LenientBatch(_DefaultRecordBatchPy):  # type: ignore[misc]  # it has no types
    """A batch whose headers may have any name: bytes that are not UTF-8 become surrogates."""

    def _maybe_uncompress(self) -> None:
        self._buffer: bytearray = _Buffer(self._buffer)


class _Buffer(bytearray):
    """Bytes whose slices decode leniently; only the names of headers are decoded."""

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return _Lenient(found) if isinstance(at, slice) else found


class _Lenient(bytearray):
    def decode(self, *_: str) -> str:
        return super().decode("utf-8", "surrogateescape")
