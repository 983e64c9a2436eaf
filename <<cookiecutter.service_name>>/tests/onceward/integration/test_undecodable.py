"""Records that can't be decoded, of a topic where they hold their key at each of its consumers."""

from collections.abc import Sequence
from typing import Literal

import asyncpg
import pytest

from onceward import CloudEvents, Event, Handlers, Message, Transaction
from onceward.apply.item import StoredRecord
from onceward.consume.partition_source import PartitionBatch
from onceward.events.message import Record

from .applier import Applier, NewApplier
from .bank import Bank
from .test_dead import became, discard, letters, redrive
from tests.contract.bank import Deposit, Deposited

BAD = b"bad"


class Withdrawn(Event, type="undecodable.withdrawn"):
    """What a consumer takes that takes no deposits."""

    account: str


class Shop:
    """A bank of three consumers, whose codec can't decode a value until it is mended."""

    def __init__(self, undecodable: Literal["go on", "hold"] = "hold") -> None:
        self.bank = bank = Bank(deposits="deposits", balances="balances", name="bank")
        self.mended: dict[bytes, bytes] = {}
        self.noted: list[int] = []
        mended = self.mended

        class Codec(CloudEvents):
            """One that replaces values, once it knows by what."""

            def decode(self, record: Record, *, hash: bytes | None = None) -> Message:
                if record.value == BAD:
                    record = StoredRecord.copy_of(record, mended[BAD], record.headers)
                return CloudEvents.decode(self, record, hash=hash)

        bank.handlers.topic(bank.deposits, codec=Codec(), undecodable=undecodable)

        @bank.handlers.on(Deposited, topic=bank.deposits, consumer="note", mode="deferred")
        async def note(event: Deposited, tx: Transaction) -> None:
            self.noted.append(event.amount)

        @bank.handlers.on(Withdrawn, topic=bank.deposits, consumer="other")
        async def other(event: Withdrawn, tx: Transaction) -> None:
            raise AssertionError("never")

    def mend(self) -> None:
        """Let the codec decode what it could not."""
        self.mended[BAD] = b'{"account": "ada", "amount": 2}'


@pytest.fixture
def shop() -> Shop:
    """Return a shop where records that can't be decoded hold their key."""
    return Shop()


@pytest.fixture
async def applier(shop: Shop, new_applier: NewApplier) -> Applier:
    """Return the applier of its bank."""
    return await new_applier(shop.bank.handlers, topic="deposits")


CAME = Deposit(1), Deposit(2, value=BAD), Deposit(3), Deposit(4, "bob")


async def states(applier: Applier) -> Sequence[tuple[str, int, str, bool]]:
    """Return consumer, offset and reason of each row, and whether it holds its key."""
    return [
        (row["consumer"], row["offset"], row["reason"], row["holds"])
        for row in await applier.backlog()
    ]


HELD = [
    ("deposit", 1, "invalid envelope", True),
    ("deposit", 2, "follows another", False),
    ("note", 1, "invalid envelope", True),
    ("note", 2, "deferred", False),
    ("other", 1, "invalid envelope", True),
]


async def test_it_holds_its_key_for_each_consumer_and_no_other_key(
    shop: Shop, applier: Applier, db: asyncpg.Connection
) -> None:
    await applier.apply(*CAME)
    await applier.work_off()
    assert (shop.bank.calls, sorted(shop.noted)) == ([1, 4], [1, 4])
    assert await states(applier) == HELD
    sources = "SELECT count(*) FROM pipeline.backlog WHERE source IS NULL"
    assert await db.fetchval(sources) == 3, "nothing is known of their events"
    assert {one.source for one in await letters(applier)} == {None}
    # A replay stores none again.
    await db.execute("UPDATE pipeline.position SET next_offset = 0")
    await applier.apply(*CAME)
    assert await states(applier) == HELD


async def test_it_is_redriven_before_what_it_held_when_it_can_be_decoded(
    shop: Shop, applier: Applier
) -> None:
    await applier.apply(*CAME)
    await applier.work_off()
    redriven = await redrive(applier)
    await applier.work_off()
    assert await became(applier, redriven) == {"dead": 3}, "nothing has changed"
    assert await states(applier) == HELD
    shop.mend()
    redriven = await redrive(applier)
    assert await became(applier, redriven) == {"waiting": 3}
    await applier.work_off()
    assert await became(applier, redriven) == {"applied": 2, "gone": 1}
    assert shop.bank.calls == [1, 4, 2, 3]
    assert shop.noted[-2:] == [2, 3]
    assert await applier.backlog() == []
    # Its event is known now.
    await applier.apply(Deposit(2))
    assert shop.bank.calls == [1, 4, 2, 3]


async def test_what_it_held_goes_on_when_it_is_discarded(shop: Shop, applier: Applier) -> None:
    await applier.apply(*CAME)
    await applier.work_off()
    assert await discard(applier) == 3
    await applier.work_off()
    assert shop.bank.calls == [1, 4, 3]
    assert sorted(shop.noted) == [1, 3, 4]
    assert {row["discarded_by"] for row in await applier.backlog()} == {"ann"}


async def test_it_follows_what_waits_of_its_key(shop: Shop, applier: Applier) -> None:
    shop.bank.refused = {1}
    await applier.apply(CAME[0])
    await applier.apply(*CAME[1:])
    of_deposit = [one for one in await states(applier) if one[0] == "deposit"]
    assert [reason for _, _, reason, _ in of_deposit] == ["failed", *["follows another"] * 2]
    shop.bank.refused = set()
    await applier.make_due()
    await applier.work_off()
    assert shop.bank.calls[-1] == 1
    assert await states(applier) == HELD


async def test_a_record_without_a_key_holds_nothing(shop: Shop, applier: Applier) -> None:
    await applier.apply(Deposit(2, key=None, value=BAD), Deposit(3, key=None))
    await applier.work_off()
    assert shop.bank.calls == [3]
    assert shop.noted == [3]


async def test_a_type_that_no_handler_takes_holds_where_types_are_demanded(
    new_applier: NewApplier,
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    bank.handlers.topic("deposits", demands_types=True, undecodable="hold")
    applier = await new_applier(bank.handlers, topic="deposits")
    await applier.apply(Deposit(1, type="unknown"), Deposit(2))
    assert await states(applier) == [
        ("deposit", 0, "unknown type", True),
        ("deposit", 1, "follows another", False),
    ]


async def test_a_record_over_which_processes_have_died_is_dead_at_once(
    shop: Shop, applier: Applier
) -> None:
    batch = await applier.read(CAME[1], CAME[3], start=await applier.position())
    await applier.apply_batch(batch, deaths=3)
    dead = [(consumer, reason) for consumer, _, reason, holds in await states(applier) if holds]
    assert dead == [(one, "invalid envelope") for one in ("deposit", "note", "other")]
    assert (
        PartitionBatch(applier.slot, batch, 3)
        .decisions.keys()
        .isdisjoint(one.key for one in batch.items if one.undecoded)
    )


async def test_a_record_that_kills_processes_when_redriven_still_holds_its_key(
    shop: Shop, applier: Applier, db: asyncpg.Connection
) -> None:
    await applier.apply(*CAME)
    await applier.work_off()
    await redrive(applier)
    await db.execute("UPDATE pipeline.backlog SET attempts = 6, deaths = 1 WHERE source IS NULL")
    await applier.work_off()
    assert await states(applier) == [
        (consumer, offset, "attempts used up" if holds else reason, holds)
        for consumer, offset, reason, holds in HELD
    ]
    assert shop.bank.calls == [1, 4]


async def test_elsewhere_it_holds_nothing(new_applier: NewApplier) -> None:
    shop = Shop("go on")
    applier = await new_applier(shop.bank.handlers, topic="deposits")
    await applier.apply(*CAME)
    await applier.work_off()
    assert shop.bank.calls == [1, 3, 4]
    assert await states(applier) == [("", 1, "invalid envelope", False)]


async def test_a_letter_of_nobody_stays_one_where_records_hold_their_key_since(
    new_applier: NewApplier,
) -> None:
    applier = await new_applier(Shop("go on").bank.handlers, topic="deposits")
    await applier.apply(*CAME)
    await applier.work_off()
    shop = Shop()
    holding = await new_applier(shop.bank.handlers, topic="deposits")
    await redrive(holding)
    await holding.work_off()
    assert await states(holding) == [("", 1, "invalid envelope", False)]
    shop.mend()
    await redrive(holding)
    await holding.work_off()
    assert await holding.backlog() == []
    assert shop.bank.calls == [2]


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="'go on' or 'hold', not 'stop'"):
        Handlers().topic("t", undecodable="stop")  # type: ignore[arg-type]
    handlers = Handlers()
    handlers.topic("t", undecodable="hold")
    assert handlers.with_topics("{}-7".format).holding == {"t-7"}
