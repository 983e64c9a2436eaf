"""Batches are unpacked to no more than a limit, and what can't be read stops nothing before it."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, PartitionRecords
from aiokafka.record import memory_records
from aiokafka.record.default_records import DefaultRecordBatchBuilder, _DefaultRecordBatchPy

from pipeline.servers import record_batches
from pipeline.servers.record_batches import FetchedBatches, UnreadableBatch, unpacked_at_most

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


def fetched(data: bytes, offset: int = 0, *, checks: bool = True) -> PartitionRecords:
    """Return what aiokafka makes of a fetch from the offset on."""
    place = TopicPartition("t", 0)
    records = FetchedBatches(data)
    return PartitionRecords(place, records, [], offset, None, None, checks, READ_COMMITTED)


def values(records: Sequence[Any]) -> list[bytes]:
    return [one.value for one in records]


@pytest.fixture
def limited() -> Iterator[None]:
    """Let batches unpack to a mebibyte."""
    token = unpacked_at_most.set(LIMIT)
    yield
    unpacked_at_most.reset(token)


def test_a_batch_shows_its_leader_epoch_and_whether_compaction_may_have_shortened_it() -> None:
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


@pytest.mark.usefixtures("limited")
def test_a_batch_within_the_limit_is_read_and_one_above_it_is_named() -> None:
    for codec in CODECS:
        fits = bytes(LIMIT - 100)
        assert values(list(fetched(batch(codec, fits)))) == [fits]
        if codec == "none":
            continue
        data = batch(codec, b"a", bytes(LARGE), b"c", first=7)
        with pytest.raises(UnreadableBatch) as raised:
            list(fetched(data, 8))
        assert (raised.value.first, raised.value.next) == (7, 10)
        assert str(raised.value) == (
            f"the batch of the offsets 7 to 9 ({len(data):,} bytes, {codec}) unpacks to more than"
            " 1,048,576 bytes"
        )


@pytest.mark.usefixtures("limited")
def test_what_comes_before_a_batch_that_is_too_large_is_read() -> None:
    before, bomb = batch("gzip", b"a", b"b"), batch("gzip", bytes(LARGE), first=2)
    found = fetched(before + bomb + batch("gzip", b"d", first=3))
    assert values(list(found)) == [b"a", b"b"]
    assert found.next_fetch_offset == 2, "the next fetch begins with it"
    with pytest.raises(UnreadableBatch):
        list(fetched(bomb, 2))


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
