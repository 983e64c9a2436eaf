"""How a topic that was read is recognized: by the record before the position."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import ConsumerRecord, TopicPartition

from onceward.apply.positions import Anchor, Slot
from onceward.consume.blockage import Blocked
from onceward.consume.position import PartitionPosition
from onceward.servers.record_batches import FetchedBatches

from .test_record_batches import batch
from tests.contract.bank import Deposit

START = 12
"""The position: behind the anchor, and behind two offsets without records."""
ANCHOR, NEXT = Deposit(9).record("t", 9), Deposit(12).record("t", START)
OTHER, BETWEEN = Deposit(8).record("t", 9), Deposit(10).record("t", 10)
WHOLE = batch("none", b"8", b"9", first=8)
CLEANED = WHOLE[:57] + (1).to_bytes(4) + WHOLE[61:]
"""The same batch after compaction has removed one of its two records."""
BEHIND = batch("none", b"12", first=START)


def position() -> PartitionPosition:
    """Return a position from before which the anchor is fetched again."""
    one = PartitionPosition.__new__(PartitionPosition)
    one._slot, one._partition = Slot("group", "t", 0), TopicPartition("t", 0)
    one._anchor, one._last, one._has_read = Anchor.of(ANCHOR), None, False
    return one


@pytest.mark.parametrize(
    ("data", "records"),
    [
        (WHOLE, [ANCHOR, NEXT]),
        (CLEANED, [ANCHOR, NEXT]),
        (CLEANED, [NEXT]),
        (CLEANED, []),
        (BEHIND, [NEXT]),
        (None, []),
    ],
)
def test_the_anchor_is_there_or_compaction_may_have_removed_it(
    data: bytes | None, records: Sequence[ConsumerRecord]
) -> None:
    batches = None if data is None else FetchedBatches(data)
    found = position().recognized([*records], START, batches)
    assert found == [one for one in records if one is NEXT]


@pytest.mark.parametrize(
    ("data", "records"),
    [
        (WHOLE, []),  # control records, or those of an aborted transaction
        (WHOLE, [NEXT]),
        (WHOLE, [OTHER, NEXT]),
        (CLEANED, [OTHER]),
        (CLEANED, [BETWEEN]),
        (WHOLE, [ANCHOR, BETWEEN, NEXT]),
    ],
)
def test_another_or_no_record_in_a_complete_batch_is_an_incident(
    data: bytes, records: Sequence[ConsumerRecord]
) -> None:
    with pytest.raises(Blocked, match=r"read at 9 \(created anew, or its end lost\)"):
        position().recognized([*records], START, FetchedBatches(data))


def test_an_anchor_that_comes_alone_is_not_missed_when_others_come() -> None:
    one, batches = position(), FetchedBatches(WHOLE)
    assert one.recognized([ANCHOR], START, batches) == []
    assert one.recognized([NEXT], START, batches) == [NEXT]
    assert one._last == Anchor.of(NEXT)
    again = position()
    assert again.recognized([ANCHOR], START, batches) == []
    with pytest.raises(Blocked, match="its end lost"):
        again.recognized([BETWEEN], START, FetchedBatches(BEHIND))


def at_epoch(number: int) -> FetchedBatches:
    """Return a fetch whose first batch was written in this leader epoch."""
    return FetchedBatches(WHOLE[:12] + number.to_bytes(4) + WHOLE[16:])


def test_records_are_in_doubt_behind_each_other_epoch_and_each_gap() -> None:
    links = ["first"]
    one = position()
    one._client = cast(Any, SimpleNamespace(link=lambda _: links[-1], seek=lambda *_: None))
    one._link, one._epoch, one._has_read = "first", -1, True
    found = [one.may_have_lost(at_epoch(number)) for number in (3, 3, 5, 5, 3, 6)]
    assert found == [False, False, True, False, True, True]
    assert not one.may_have_lost(None)
    links.append("second")
    assert one.may_have_lost(None)
    assert not one.may_have_lost(None)


def test_the_anchor_is_not_in_doubt_and_its_followers_only_once() -> None:
    links = ["first"]
    one = position()
    one._client = cast(Any, SimpleNamespace(link=lambda _: links[-1], seek=lambda *_: None))
    one._link, one._epoch, one._has_read = "first", 3, True
    assert one.may_have_lost(at_epoch(5))
    one.fetch_from(START)
    links.append("second")
    assert not one.may_have_lost(at_epoch(3))
    assert one.recognized([ANCHOR], START, at_epoch(3)) == []
    assert not one.may_have_lost(at_epoch(5))


async def test_a_start_that_could_not_be_undone_is_not_counted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def be_away(*_: object) -> None:
        raise ConnectionError

    async def answer(*_: object) -> None:
        pass

    one = position()
    one.counted_at = START
    for query, counted_at in ((be_away, START), (answer, None)):
        monkeypatch.setattr(one, "_query", query)
        await one.undo_start(START)
        assert one.counted_at == counted_at
