"""What a release has applied is handed to a correction: once each, however often it is begun."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from time import monotonic
from typing import Any

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin.records_to_delete import RecordsToDelete
from aiokafka.structs import TopicPartition

from onceward import Applied, Transaction
from onceward.apply import backlog, inbox
from onceward.history import correcting
from onceward.history.correcting import Correcting
from onceward.history.records import reading
from onceward.servers.database import autocommitting
from onceward.servers.record_batches import FetchedBatch, UnreadableBatch
from onceward.settings import Settings

from .conftest import Take, Tells
from tests.contract.bank import Account, Deposit, Deposited, histories
from tests.onceward.integration.applier import Applier, NewApplier
from tests.onceward.integration.bank import Bank
from tests.onceward.integration.conftest import Command, complaint
from tests.onceward.integration.test_bombs import large, send_batch
from tests.servers.topics import administrator
from tests.servers.waiting import eventually

WHY = ("--because", "a fee", "--yes", "--wait", "0")
_AGE = "UPDATE pipeline.inbox SET created_at = created_at - interval '1 hour'"
"""So that no transaction of theirs may be running."""


class Undoing:
    """Corrections of a bank: one takes deposits back, one notes what is remembered of them."""

    def __init__(self, bank: Bank) -> None:
        self.made: list[int] = []
        self.refused: set[int] = set()
        self.recalled: list[Applied] = []
        common: dict[str, Any] = {"topic": bank.deposits, "of": "deposit"}
        loads = Account.by("account")

        @bank.handlers.correct(Deposited, consumer="undo", loads=loads, **common)
        async def undo(event: Deposited, tx: Transaction) -> None:
            if event.amount in self.refused:
                raise ValueError("no")
            self.made.append(event.amount)
            account = await tx.load_or_create(Account, event.account)
            account.balance -= event.amount
            account.history += f"{-event.amount},"

        @bank.handlers.correct(Applied, consumer="recall", **common)
        async def recall(was: Applied, tx: Transaction) -> None:
            self.recalled.append(was)


@pytest.fixture
def undoing(bank: Bank) -> Undoing:
    """Return what the corrections of the bank have done."""
    return Undoing(bank)


@pytest.fixture
async def deployed(undoing: Undoing, db: asyncpg.Connection) -> Undoing:
    """Return the same, of a service that has them."""
    await inbox.register(db, ["deposit", "undo", "recall"])
    return undoing


async def work_off(applier: Applier) -> None:
    """Let the corrections be made that were handed."""
    await applier.make_due()
    await applier.work_off()


async def test_each_message_of_the_release_is_handed_once(
    deployed: Undoing,
    bank: Bank,
    applier: Applier,
    new_applier: NewApplier,
    take: Take,
    db: asyncpg.Connection,
    tells: Tells,
) -> None:
    other = await new_applier(bank.handlers, topic=bank.deposits, release="1.4.1")
    for number in range(1, 61):
        await take(applier if number % 3 else other, Deposit(number, f"{number % 7}"))
    await db.execute(_AGE)
    (plan,) = await tells("correct", "undo", "--release", "1.4.2", "--dry-run")
    assert plan["groups"][0] | {"oldest": None, "newest": None} == {
        "topic": bank.deposits,
        "type": "deposited",
        "found": 40,
        "done": 0,
        "gone": 0,
        "oldest": None,
        "newest": None,
    }
    assert await applier.backlog() == []
    for handed in (40, 0):
        (done,) = await tells("correct", "undo", "--release", "1.4.2", *WHY, code=4)
        assert (done["handed"], done["waiting"], done["gone"]) == (handed, 40, 0)
    await work_off(applier)
    wrong = [number for number in range(1, 61) if number % 3]
    assert sorted(deployed.made) == wrong
    (done,) = await tells("correct", "undo", "--release", "1.4.2", *WHY)
    assert (done["handed"], done["waiting"], done["dead"]) == (0, 0, 0)
    assert (done["groups"][0]["done"], len(deployed.made)) == (40, 40)
    right = [n for n in range(1, 61) if n % 3 == 0]
    assert sum(sum(one) for one in (await histories(db)).values()) == sum(right)
    (audit,) = await db.fetch("SELECT action, subject, why FROM pipeline.audit")
    assert tuple(audit) == ("correct", "consumer undo", "release 1.4.2: a fee")


async def test_two_commands_at_once_hand_each_once(
    deployed: Undoing,
    bank: Bank,
    applier: Applier,
    take: Take,
    db: asyncpg.Connection,
    settings: Callable[..., Settings],
) -> None:
    await take(applier, *(Deposit(number, f"{number % 7}") for number in range(1, 201)))
    await db.execute(_AGE)

    async def hand() -> int:
        handed = 0
        async with autocommitting(applier.engine) as driver:
            one = Correcting(driver, bank.service, settings(), "undo")
            async for progress in one.hand(await one.wanted("1.4.2"), 1_000):
                handed = progress.handed
        return handed

    assert sum(await asyncio.gather(hand(), hand())) == 200
    await work_off(applier)
    assert sorted(deployed.made) == list(range(1, 201))


async def test_what_is_interrupted_after_any_transaction_is_completed_by_another(
    deployed: Undoing,
    bank: Bank,
    applier: Applier,
    take: Take,
    db: asyncpg.Connection,
    settings: Callable[..., Settings],
    tells: Tells,
) -> None:
    await take(applier, *(Deposit(number) for number in range(1, 31)))
    await db.execute(_AGE)
    for _ in range(2):
        async with autocommitting(applier.engine) as driver:
            one = Correcting(driver, bank.service, settings(), "undo")
            async with aclosing(one.hand(await one.wanted("1.4.2"), 10)) as handing:
                progress = await anext(handing)
                assert progress.handed == 10
    (done,) = await tells("correct", "undo", "--release", "1.4.2", *WHY, code=4)
    assert (done["handed"], done["groups"][0]["done"]) == (10, 20)
    await work_off(applier)
    assert deployed.made == list(range(1, 31)), "in the order of the key"


async def test_each_is_handed_once_though_the_connection_ends_at_each_statement(
    deployed: Undoing,
    bank: Bank,
    applier: Applier,
    take: Take,
    db: asyncpg.Connection,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it ends when the process is killed: its reader of Kafka leaves nothing behind."""
    monkeypatch.setattr(correcting, "_AT_ONCE", 10)
    await take(applier, *(Deposit(number) for number in range(1, 31)))
    await db.execute(_AGE)

    async def is_handed(ends_at: int) -> bool:
        driver, seen = await connect(), 0

        def end(_: object) -> None:
            nonlocal seen
            seen += 1
            if seen == ends_at:  # the next statement is under way, and its answer is lost
                driver.terminate()

        driver.add_query_logger(end)
        try:
            one = Correcting(driver, bank.service, settings(), "undo")
            async for _ in one.hand(await one.wanted("1.4.2"), 1_000):
                pass
        except (asyncpg.PostgresConnectionError, asyncpg.InterfaceError):
            return False
        finally:
            driver.terminate()
        return True

    ends = 1
    while not await is_handed(ends):
        ends += 1
    assert ends > 8, "it has been at each statement of a transaction"
    assert len(await applier.backlog()) == 30
    await work_off(applier)
    assert deployed.made == list(range(1, 31)), "in the order of the key"


async def test_the_rate_is_kept(
    deployed: Undoing, applier: Applier, take: Take, db: asyncpg.Connection, tells: Tells
) -> None:
    await take(applier, *(Deposit(number) for number in range(1, 41)))
    await db.execute(_AGE)
    began = monotonic()
    await tells("correct", "undo", "--release", "1.4.2", "--rate", "10", *WHY, code=4)
    assert monotonic() - began >= 4.0


async def test_messages_that_are_behind_stop_it(
    deployed: Undoing,
    applier: Applier,
    take: Take,
    db: asyncpg.Connection,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await take(applier, *(Deposit(number) for number in range(1, 61)))
    await db.execute(_AGE)
    monkeypatch.setattr(backlog, "_MOST_DUE", 10)
    line = "correct", "undo", "--release", "1.4.2", "--rate", "10", *WHY
    handing = asyncio.ensure_future(command(*line))

    async def has_begun() -> bool:
        return len(await applier.backlog()) >= 10

    await eventually(has_begun)
    await applier.make_due()
    before = len(await applier.backlog())
    await asyncio.sleep(3)
    assert len(await applier.backlog()) <= before + 10
    while not handing.done():  # it goes on when they are made
        await work_off(applier)
        await asyncio.sleep(0.05)
    await work_off(applier)
    assert sorted(deployed.made) == list(range(1, 61))


async def test_what_is_handed_and_fails_is_a_dead_letter_of_the_correction(
    deployed: Undoing, applier: Applier, take: Take, db: asyncpg.Connection, tells: Tells
) -> None:
    await take(applier, Deposit(1), Deposit(2))
    await db.execute(_AGE)
    deployed.refused = {1}
    await tells("correct", "undo", "--release", "1.4.2", *WHY, code=4)
    await work_off(applier)
    assert await applier.park() == {("undo", 0): "attempts used up"}
    assert deployed.made == [2]
    (done,) = await tells("correct", "undo", "--release", "1.4.2", *WHY, code=3)
    assert (done["handed"], done["dead"]) == (0, 1)


async def test_what_is_cancelled_frees_its_keys_and_can_be_handed_again(
    deployed: Undoing,
    bank: Bank,
    applier: Applier,
    take: Take,
    db: asyncpg.Connection,
    tells: Tells,
) -> None:
    await take(applier, Deposit(1), Deposit(2, "bob"))
    await db.execute(_AGE)
    await tells("correct", "undo", "--release", "1.4.2", *WHY, code=4)
    await take(applier, Deposit(3))
    assert (await applier.park())["deposit", 2] == "follows another"
    for number in (2, 0):
        assert await tells("correct", "undo", "--cancel", *WHY) == [{"cancelled": number}]
    await applier.work_off()
    assert (bank.calls, deployed.made) == ([1, 2, 3], [])
    assert await applier.backlog() == []
    (done,) = await tells("correct", "undo", "--release", "1.4.2", *WHY, code=4)
    assert done["handed"] == 2
    await work_off(applier)
    assert sorted(deployed.made) == [1, 2]


async def test_deleted_records_are_counted_and_known_messages_are_corrected_without_them(
    deployed: Undoing,
    bank: Bank,
    applier: Applier,
    take: Take,
    db: asyncpg.Connection,
    kafka: str,
    tells: Tells,
) -> None:
    await take(applier, Deposit(1), Deposit(2), Deposit(3))
    await db.execute(_AGE)
    async with administrator(kafka) as admin:
        partition = TopicPartition(bank.deposits, 0)
        await admin.delete_records({partition: RecordsToDelete(2)})
    (plan,) = await tells("correct", "undo", "--release", "1.4.2", "--dry-run")
    assert (plan["groups"][0]["found"], plan["gone"]) == (3, 2)
    (done,) = await tells("correct", "undo", "--release", "1.4.2", *WHY, code=4)
    assert (done["handed"], done["gone"]) == (1, 2)
    (done,) = await tells("correct", "recall", "--release", "1.4.2", *WHY, code=4)
    assert (done["handed"], done["gone"]) == (3, 0)
    await work_off(applier)
    assert deployed.made == [3]
    published = await db.fetch("SELECT event_id, sequence FROM pipeline.outbox ORDER BY id")
    assert [(one.id, one.key, one.release, one.offset) for one in deployed.recalled] == [
        (str(number), "ada", "1.4.2", number - 1) for number in (1, 2, 3)
    ]
    events = [(it.id, it.sequence) for one in deployed.recalled for it in one.events]
    assert events == [tuple(row) for row in published][:3]


async def test_a_batch_that_can_not_be_read_is_named_and_passed_over(
    deployed: Undoing,
    applier: Applier,
    bank: Bank,
    take: Take,
    db: asyncpg.Connection,
    kafka: str,
    command: Command,
    tells: Tells,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await take(applier, Deposit(1))
    packed = large(2, 2, account="ada", partition=0)
    await send_batch(kafka, bank.deposits, packed, codec="gzip")
    await applier.apply(packed)
    await take(applier, Deposit(3))
    await db.execute(_AGE)
    monkeypatch.setenv("PIPELINE_UNPACKED_MEBIBYTES", "1")
    line = "correct", "undo", "--release", "1.4.2", *WHY
    done = await command(*line)
    assert done.exit_code == 4, done.output
    where = f"not handed: {bank.deposits}/0: the batch of the offsets 1 to 1 ("
    assert where in done.stderr
    assert "gzip) unpacks to more than 1,048,576 bytes" in done.stderr
    await work_off(applier)
    assert deployed.made == [1, 3]
    (done,) = await tells(*line, code=4)
    assert (done["handed"], done["waiting"], done["gone"], done["unreadable"]) == (0, 0, 0, 1)
    monkeypatch.delenv("PIPELINE_UNPACKED_MEBIBYTES")
    (done,) = await tells(*line, code=4)
    assert (done["handed"], done["unreadable"]) == (1, 0)
    await work_off(applier)
    assert deployed.made == [1, 3, 2]


async def test_what_stands_before_a_fault_in_its_batch_is_read(
    bank: Bank,
    producer: AIOKafkaProducer,
    settings: Callable[..., Settings],
    kafka: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await Deposit(1).send(producer, bank.deposits)
    await send_batch(kafka, bank.deposits, *map(Deposit, range(2, 7)), codec=None)
    await Deposit(7).send(producer, bank.deposits)
    read = FetchedBatch.__iter__

    def failing(batch: FetchedBatch) -> Iterator[Any]:
        for record in read(batch):
            if record.offset == 3:
                error = ValueError("damaged")
                raise UnreadableBatch(batch._batch, batch._raw, error, batch._fetch.room)
            yield record

    monkeypatch.setattr(FetchedBatch, "__iter__", failing)
    partition = TopicPartition(bank.deposits, 0)
    async with reading(settings()) as records:
        found = [one.offset async for one in records.between(partition, 0, 7)]
        (passed,) = records.unreadable
    assert found == [0, 1, 2, 6]
    assert (passed.partition, passed.start, passed.beyond) == (partition, 3, 6)


async def test_a_record_of_another_event_at_the_offset_is_not_handed(
    deployed: Undoing,
    bank: Bank,
    applier: Applier,
    take: Take,
    db: asyncpg.Connection,
    tells: Tells,
) -> None:
    await take(applier, Deposit(1), Deposit(2))
    await db.execute(_AGE)
    await db.execute("UPDATE pipeline.inbox SET source = '/before' WHERE id = '1'")
    (done,) = await tells("correct", "undo", "--release", "1.4.2", *WHY, code=4)
    assert (done["handed"], done["gone"]) == (1, 1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("deposit", "--release", "1.4.2"), "has no correction 'deposit'; it has recall, undo"),
        (("undo", "--release", "2"), "nothing is of release '2'"),
        (("undo", "--release", "1.4.3"), "is the release of this process"),
        (("undo", "--release", "1.4.2"), "no process has had 'undo' yet"),
    ],
    ids=["no correction", "no release", "its own release", "not deployed"],
)
async def test_what_can_not_be_corrected_is_refused(
    undoing: Undoing,
    applier: Applier,
    take: Take,
    db: asyncpg.Connection,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    line: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setenv("PIPELINE_RELEASE", "1.4.3")
    await take(applier, Deposit(1))
    await db.execute(_AGE)
    done = await command("correct", *line, *WHY)
    assert done.exit_code == 1
    assert said in complaint(done)
    assert await applier.backlog() == []
    assert await db.fetchval("SELECT count(*) FROM pipeline.audit") == 0


@pytest.mark.parametrize(
    "line", [(), ("--release", "1.4.2", "--cancel"), ("--release", "1.4.2", "--because", " ")]
)
async def test_a_reason_is_needed_and_what_to_do(
    undoing: Undoing, command: Command, line: tuple[str, ...]
) -> None:
    assert (await command("correct", "undo", *line)).exit_code == 2


async def test_messages_that_a_running_transaction_may_apply_are_left_for_later(
    deployed: Undoing, applier: Applier, take: Take, tells: Tells
) -> None:
    await take(applier, Deposit(1))
    (plan,) = await tells("correct", "undo", "--release", "1.4.2", "--dry-run")
    assert plan["groups"] == []
