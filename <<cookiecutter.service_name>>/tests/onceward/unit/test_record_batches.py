"""Batches are read as far as there is room, and what can't be read stops nothing before it."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import suppress
from mmap import mmap
from typing import Any
from weakref import ref

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED
from aiokafka.record import memory_records
from aiokafka.record.default_records import DefaultRecordBatchBuilder, _DefaultRecordBatchPy

from onceward.servers import record_batches
from onceward.servers.record_batches import FetchedBatches, FetchedRecords, UnreadableBatch

CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
LARGE = 64 * 2**20
LIMIT = 2**20


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> str:
    """Return the name of each codec in turn."""
    return str(request.param)


@pytest.fixture(params=["C extension", "pure Python"], autouse=True)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let records be read by either of aiokafka's readers."""
    if request.param == "pure Python":
        monkeypatch.setattr(record_batches, "MemoryRecords", memory_records._MemoryRecordsPy)
        monkeypatch.setattr(memory_records, "DefaultRecordBatch", _DefaultRecordBatchPy)


Headers = Sequence[tuple[str, bytes]]


def batch(codec: str, *values: bytes, first: int = 0, headers: Headers = ()) -> bytes:
    """Return a batch as a producer sends it and a broker stores it, from offset `first` on."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=CODECS[codec],
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=2**31 - 1,
    )
    for offset, value in enumerate(values):
        builder.append(
            offset, timestamp=1_700_000_000_000, key=b"k", value=value, headers=[*headers]
        )
    return first.to_bytes(8, "big") + bytes(builder.build())[8:]


def fetched(
    data: bytes, offset: int = 0, *, checks: bool = True, room: int = 2 * LARGE
) -> FetchedRecords:
    """Return what aiokafka makes of a fetch from the offset on."""
    place = TopicPartition("t", 0)
    records = FetchedBatches(data)
    records.room = room
    return FetchedRecords(place, records, [], offset, None, None, checks, READ_COMMITTED)


def values(records: Sequence[Any]) -> list[bytes]:
    return [one.value for one in records]


def test_a_batch_shows_its_leader_epoch_and_whether_compaction_shortened_it() -> None:
    made = batch("gzip", b"a", b"b", b"c", first=7)
    made = made[:12] + (5).to_bytes(4) + made[16:]
    found = FetchedBatches(made + batch("none", b"d", first=10))
    assert (found.epoch, found.whole) == (5, range(7, 10))
    cleaned = FetchedBatches(made[:57] + (2).to_bytes(4) + made[61:])
    assert (cleaned.epoch, cleaned.whole) == (5, range(0))
    old = made[:16] + b"\x01" + made[17:]
    for data in (old, made[:60], b""):
        assert (FetchedBatches(data).epoch, FetchedBatches(data).whole) == (-1, range(0))


def test_batches_of_each_codec_are_read_from_any_offset(codec: str) -> None:
    sent = [b"%d" % number * 1_000 for number in range(100)]
    data = batch(codec, *sent[:60]) + batch(codec, *sent[60:], first=60)
    found = fetched(data)
    assert values(list(found)) == sent
    assert found.next_fetch_offset == 100
    assert values(list(fetched(data, 37))) == sent[37:]


def test_a_batch_that_fits_is_read_and_larger_ones_are_named(codec: str) -> None:
    fits = bytes(LIMIT - 100)
    assert values(list(fetched(batch(codec, fits), room=LIMIT))) == [fits]
    data = batch(codec, b"a", bytes(LARGE), b"c", first=7)
    with pytest.raises(UnreadableBatch) as raised:
        list(fetched(data, 8, room=LIMIT))
    assert (raised.value.first, raised.value.next) == (7, 10)
    assert raised.value.is_too_large
    assert str(raised.value) == (
        f"the batch of the offsets 7 to 9 ({len(data):,} bytes, {codec}) unpacks to more than"
        " 1,048,576 bytes"
    )


def test_batches_share_the_room_and_what_does_not_fit_is_fetched_again(codec: str) -> None:
    sent = [batch(codec, bytes(LIMIT // 3), first=offset) for offset in range(4)]
    found = fetched(b"".join(sent), room=LIMIT)
    assert len(list(found)) == 2, "three have headers, too"
    assert found.next_fetch_offset == 2
    assert len(list(fetched(b"".join(sent[2:]), 2, room=LIMIT))) == 2


def test_the_rest_of_an_unpacked_batch_needs_no_further_room(codec: str) -> None:
    large = batch(codec, bytes(LIMIT // 2), bytes(LIMIT // 3))
    found = fetched(large + batch(codec, b"c", first=2), room=LIMIT)
    next(found)
    found._records.room = 1_000
    assert len(list(found)) == 2


def test_what_comes_before_a_batch_that_is_too_large_is_read() -> None:
    before, bomb = batch("gzip", b"a", b"b"), batch("gzip", bytes(LARGE), first=2)
    found = fetched(before + bomb + batch("gzip", b"d", first=3), room=LIMIT)
    assert values(list(found)) == [b"a", b"b"]
    assert found.next_fetch_offset == 2, "the next fetch begins with it"
    with pytest.raises(UnreadableBatch):
        list(fetched(bomb, 2, room=LIMIT))


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ref[mmap]]]:
    """Return references to what is unpacked, for which no garbage is collected."""
    found: list[ref[mmap]] = []

    def noted(*args: Any, **options: Any) -> mmap:
        memory = mmap(*args, **options)
        found.append(ref(memory))
        return memory

    monkeypatch.setattr(record_batches, "mmap", noted)
    gc.disable()
    yield found
    gc.enable()


def test_unpacked_data_is_released_with_its_records_even_if_unread(
    unpacked: list[ref[mmap]],
) -> None:
    records = fetched(batch("gzip", b"a", b"b"))
    assert next(records).value == b"a"
    assert [one() is not None for one in unpacked] == [True]
    del records
    assert [one() for one in unpacked] == [None]


def test_what_is_unpacked_goes_with_the_error_if_it_is_too_much(unpacked: list[ref[mmap]]) -> None:
    records = fetched(batch("gzip", bytes(LARGE)), room=LIMIT)
    with suppress(UnreadableBatch):
        next(records)
    assert [one() for one in unpacked] == [None]


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_a_batch_that_its_codec_cannot_unpack_is_named(codec: str) -> None:
    data = bytearray(batch(codec, b"a" * 100, b"b" * 100, first=3))
    data[61:] = b"\xff" * (len(data) - 61)
    with pytest.raises(UnreadableBatch, match=f"offsets 3 to 4 .*{codec}.* can't be read: "):
        list(fetched(bytes(data), checks=False))


def test_blocks_of_snappy_that_lead_nowhere_end() -> None:
    """A length below zero would lead aiokafka's own loop in a circle."""
    data = bytearray(batch("snappy", b"a" * 100))
    data[61 + 16 : 61 + 20] = (-4).to_bytes(4, "big", signed=True)
    assert values(list(fetched(bytes(data), checks=False))) == [b"a" * 100]


def test_what_snappy_says_of_its_size_is_not_believed() -> None:
    """Four gibibytes, of which there are two bytes."""
    data = batch("snappy", b"a")[:61] + b"\xff\xff\xff\xff\x0f" + b"\x00a"
    data = data[:8] + (len(data) - 12).to_bytes(4, "big") + data[12:]
    with pytest.raises(UnreadableBatch, match="unpacks to more than"):
        list(fetched(data, checks=False))
