"""A reader: one assigned partition, read from the position that is stored, batch after batch."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from traceback import clear_frames
from typing import NoReturn, TypeVar

from aiokafka import ConsumerRecord, TopicPartition
from sqlalchemy.ext.asyncio import AsyncEngine

from pipeline.apply import positions
from pipeline.apply.batch import Batch, read
from pipeline.apply.breaker import BreakerOpen
from pipeline.apply.claim_check import resolve_batch
from pipeline.apply.pace import Pace
from pipeline.apply.positions import Anchor, PositionMoved, Slot, StoredPosition
from pipeline.apply.transactions import ConsumeTransactions
from pipeline.errors import describe_error, is_infrastructure, summarize_error
from pipeline.handlers.registry import Handlers
from pipeline.observe import telemetry
from pipeline.observe.health import Health
from pipeline.servers.clients import KafkaConsumer
from pipeline.servers.database import autocommitting
from pipeline.servers.record_batches import UnreadableBatch, unpacked_at_most
from pipeline.servers.retrying import Attempts, retry_while_unavailable
from pipeline.servers.tasks import end, in_background, sleep_or_event
from pipeline.settings import Settings

from .partition_source import PartitionSource

log = logging.getLogger(__name__)

T = TypeVar("T")
Offsets = Mapping[TopicPartition, int]

_ANSWER_SECONDS = 5.0
_FAREWELL_SECONDS = 1.0
_PROOF_SECONDS = 1.0
"""Without an error for so long after an outage, the brokers are there again."""
_CAREFUL_BYTES = 16 * 2**20
"""What a batch may unpack to where processes have died: more than nearly all do, and little beside
what a process has."""


class TopicChanged(Exception):
    """The topic does not hold what the position says: a person decides where to go on."""

    def __init__(self, slot: Slot, position: int, what: str) -> None:
        super().__init__(
            f"{slot.topic}/{slot.partition} goes on at {position}, but {what}. Nothing is"
            f" read until somebody says where to go on, for instance: {_seek(slot, 'earliest')}"
        )


class Stuck(Exception):
    """The partition stands still before an offset: its service, topic or servers are at fault."""

    def __init__(self, offset: int, reason: str, error: BaseException) -> None:
        super().__init__(
            f"offset {offset}: {reason}: {summarize_error(error) or describe_error(error)}"
        )
        self.offset = offset
        self.reason = reason
        self.error = error


class BatchHeld(Exception):
    """A batch of a producer can't be read here: a person decides whether to go on behind it."""

    def __init__(self, slot: Slot, batch: UnreadableBatch, advice: str) -> None:
        super().__init__(
            f"{batch}. Nothing is read until it can be. {advice}To go on behind it, without what it"
            f" holds: {_seek(slot, batch.next)}"
        )


def _seek(slot: Slot, to: int | str) -> str:
    return f"service topics seek {slot.topic} --partition {slot.partition} --to {to}"


_EXPLAINED = (BatchHeld, BreakerOpen, TopicChanged)


class Reader:
    """One assigned partition: reads batches and hands them on, one after the other."""

    def __init__(
        self,
        client: KafkaConsumer,
        partition: TopicPartition,
        *,
        engine: AsyncEngine,
        consume: ConsumeTransactions,
        handlers: Handlers,
        group: str,
        settings: Settings,
        health: Health,
    ) -> None:
        self._client = client
        self._partition = partition
        self._slot = Slot(group, partition.topic, partition.partition)
        self._engine = engine
        self._consume = consume
        self._handlers = handlers
        self._settings = settings
        self._pace = Pace(settings)
        self._health = health
        self._part = f"partition {partition.topic}/{partition.partition}"
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._held: Stuck | None = None
        self._is_cut_off = False
        self._is_careful = False
        self._anchor: Anchor | None = None
        self._left: list[ConsumerRecord] = []
        """What is read behind the latest batch, which had no room for it."""
        self._has_begun = False
        """Whether the first records are read; before that nothing is known of them."""
        self._started_at: int | None = None
        self._starts = 0
        """Processes that have begun there and not come back, this one included."""
        self.position: int | None = None
        """The offset after the last record that took effect."""

    def start(self) -> None:
        """Begin to read, in a task."""
        self._task = asyncio.create_task(self._run(), name=self._part)

    def raise_if_ended(self) -> None:
        """Raise what has ended it, if it has ended unasked."""
        if self._task is not None and self._task.done() and not self._stopping.is_set():
            self._task.result()

    async def stop(self, grace: float) -> None:
        """Let the running batch finish within `grace` seconds, then roll it back."""
        task = self._task
        if task and not self._stopping.is_set() and (task.done() or task.cancelling()):
            # Not by us: the loop ends over what a task of a handler has raised, KeyboardInterrupt
            # or SystemExit, and all tasks are cancelled. That is a death.
            self._started_at = None
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=grace)
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._end_in_order()
        self._release()
        self._health.forget(self._part)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._locate()
                await self._read_on()
            except PositionMoved as moved:
                log.warning("%s: %s; reading the position again", self._part, moved)
            except BreakerOpen as error:
                await self._hold(Stuck(self.position or 0, "breaker open", error))
            except UnreadableBatch as batch:
                await self._hold(
                    Stuck(self.position or 0, "unreadable batch", self._held_by(batch))
                )
            except Stuck as stuck:
                await self._hold(stuck)
            except Exception as error:
                if not self._stopping.is_set():
                    self._is_cut_off = is_infrastructure(error)
                    reason = "Kafka failed" if self._is_cut_off else "unexpected error"
                    await self._hold(Stuck(self.position or 0, reason, error))

    async def _locate(self) -> None:
        """Find out where to go on, and make the client fetch from there and nowhere else."""
        stored = await self._stored_position()
        if stored is None:
            beginning = await self._beginning()
            await self._patiently("storing the start")(self._start_at, beginning)
            stored = await self._stored_position()
        assert stored is not None
        self._anchor = await self._find_anchor(stored)
        self._move_to(stored.next_offset)
        # The record before the position is read again, to see that it is still the same.
        start = self._anchor.offset if self._anchor else stored.next_offset
        self._left = []
        self._client.seek(self._partition, start)

    async def _find_anchor(self, stored: StoredPosition) -> Anchor | None:
        """Return the anchor if the topic can still hold it; raises `Stuck` for lost offsets."""
        position = stored.next_offset
        first = await self._ask(self._client.beginning_offsets)
        end = await self._ask(self._client.end_offsets)
        if position < first:
            self._refuse(
                position,
                f"the brokers have deleted what is before {first}:"
                f" {first - position} offsets are lost to this service",
            )
        if position > end:
            self._refuse(position, f"it ends at {end} (created anew, or its data lost)")
        anchor = stored.anchor
        return anchor if anchor and anchor.offset >= first else None

    def _refuse(self, position: int, what: str) -> NoReturn:
        raise Stuck(position, "topic changed", TopicChanged(self._slot, position, what))

    async def _stored_position(self) -> StoredPosition | None:
        return await self._patiently("reading the position")(self._read_position)

    async def _read_position(self) -> StoredPosition | None:
        # A connection that died without a word would be waited for much longer.
        async with asyncio.timeout(_ANSWER_SECONDS), autocommitting(self._engine) as driver:
            return await positions.position(driver, self._slot)

    async def _start_at(self, beginning: int) -> None:
        """Store the start before the first fetch, so that it can't move under our feet."""
        async with autocommitting(self._engine) as driver:
            await positions.start_at(driver, self._slot, beginning)

    async def _beginning(self) -> int:
        earliest = self._settings.consumer_start == "earliest"
        return await self._ask(
            self._client.beginning_offsets if earliest else self._client.end_offsets
        )

    async def _ask(self, offsets: Callable[[list[TopicPartition]], Awaitable[Offsets]]) -> int:
        # The client itself would wait for most of a minute on a connection that is dead.
        return (await asyncio.wait_for(offsets([self._partition]), _ANSWER_SECONDS))[
            self._partition
        ]

    async def _read_on(self) -> None:
        assert self.position is not None
        while not self._has_begun and not self._stopping.is_set():
            await self._begin(self.position)
        following = asyncio.create_task(self._fetch(self.position))
        try:
            while (batch := await self._unless_stopped(following)) is not None:
                # The next batch is fetched and decoded while this one takes effect.
                following = asyncio.create_task(self._fetch(batch.end))
                await self._apply(PartitionSource(self._slot, batch))
        finally:
            await end(following)

    async def _begin(self, position: int) -> None:
        """Apply the first records, whose start is counted before anything is done with them."""
        async with in_background(self._records(position)) as fetching:
            records = await self._unless_stopped(fetching)
        if records is None:
            return
        self._has_begun = bool(records)  # in a gap nobody dies
        if records and self._starts > self._settings.unclean_starts:
            log.warning("%s: %s processes have died here: one by one", self._part, self._starts - 1)
            await self._apply_singly(records, self._starts)
        else:
            await self._apply(PartitionSource(self._slot, await self._read(position, records)))

    async def _apply_singly(self, records: Sequence[ConsumerRecord], starts: int) -> None:
        """Apply records one by one; the first is set aside if a process has died over it alone."""
        self._is_careful = True
        singly = self._settings.unclean_starts + 1
        deaths = starts - 1 if starts > singly else 0
        assert self.position is not None
        for record in records:
            if self._stopping.is_set():
                return
            batch = await self._read(self.position, [record], validates=not deaths)
            # Where the next process begins, it knows that the record was tried alone.
            carried = 0 if record is records[-1] else singly
            await self._apply(PartitionSource(self._slot, batch, starts=carried, deaths=deaths))
            deaths = 0

    async def _apply(self, work: PartitionSource) -> None:
        results = await self._consume.apply(work, self._patiently("the consume transaction"))
        self._pace.learn(results)
        self._move_to(work.batch.end)

    async def _begin_at(self, position: int) -> None:
        """Count the start, unless that is done. What dies without records was not theirs."""
        if self._started_at != position:
            self._started_at = position
            self._starts = await self._patiently("counting the start")(self._count_start, position)

    async def _count_start(self, position: int) -> int:
        async with autocommitting(self._engine) as driver:
            return await positions.count_start(driver, self._slot, position)

    async def _end_in_order(self) -> None:
        """Take the start back if nothing came of it: what ends in order has killed nobody."""
        started_at, self._started_at = self._started_at, None
        # Where records are taken singly the start has moved along with the position.
        if started_at is not None and (started_at == self.position or self._is_careful):
            with suppress(Exception):
                async with (
                    asyncio.timeout(_FAREWELL_SECONDS),
                    autocommitting(self._engine) as driver,
                ):
                    await positions.forgive_start(driver, self._slot, self.position or 0)

    async def _fetch(self, start: int) -> Batch:
        """Wait for the records from `start` on, and decode them."""
        return await self._read(start, await self._records(start))

    async def _read(
        self, start: int, records: Sequence[ConsumerRecord], *, validates: bool = True
    ) -> Batch:
        """Decode the records, and fetch what they refer to: of the first ones, if it is much."""
        topic = self._partition.topic
        if not records:
            return Batch(start, await self._client.position(self._partition), (), ())
        batch = await read(self._handlers, topic, start, records, validates=validates)
        if validates:  # else that, too, may be what kills, and what is set aside has its reference
            attempts = self._patiently("fetching data")
            batch = await attempts(resolve_batch, batch, self._consume.claims)
        self._left = [record for record in records if record.offset >= batch.end]
        return batch

    async def _records(self, start: int) -> Sequence[ConsumerRecord]:
        """Wait for records; none are returned when nothing but a gap in the offsets has come.

        Marks of transactions are such gaps. Left in front of the position they would look like
        records that are lost, once retention has emptied the topic.
        """
        records, self._left = self._left, []
        is_gap = False
        while not records and not is_gap:
            seconds = _PROOF_SECONDS if self._is_cut_off else self._settings.offset_commit_interval
            with telemetry.polling(self._slot.topic, self._slot.group):
                if not self._has_begun:
                    # To unpack them may be what kills. The anchor alone is no record to begin with.
                    if await self._client.arrival(self._partition, seconds) > start:
                        await self._begin_at(start)
                    seconds = 0.0
                unpacked_at_most.set(self._room)
                fetched = await self._client.getmany(
                    self._partition, timeout_ms=round(seconds * 1_000), max_records=self._pace.limit
                )
            if not fetched:
                if await self._is_elsewhere(start):
                    raise PositionMoved(f"{self._part} is not at {start}: somebody has moved it")
                is_gap = await self._client.position(self._partition) > start
            found = fetched.get(self._partition, [])
            if found:
                telemetry.received(self._slot.topic, self._slot.group, len(found))
            records = self._recognised(found, start)
            if self._is_cut_off:
                self._is_cut_off = False
                self._release()
                self._health.ready(self._part)
        return records

    @property
    def _are_suspects(self) -> bool:
        """Whether processes have died over the first records, or over reading them."""
        return not self._has_begun and self._starts > self._settings.unclean_starts

    @property
    def _room(self) -> int:
        """Bytes that a batch may unpack to."""
        room = self._settings.unpacked_mebibytes * 2**20
        return min(_CAREFUL_BYTES, room) if self._are_suspects else room

    def _held_by(self, batch: UnreadableBatch) -> BatchHeld:
        # Else all that was unpacked of it would be kept meanwhile.
        for error in filter(None, (batch, batch.__cause__)):
            clear_frames(error.__traceback__)
        advice = ""
        if batch.is_too_large and self._are_suspects:
            here = self.position or 0
            advice = (
                f"Processes have died here ({self._starts - 1}): give them more memory, and let one"
                f" try to read it: {_seek(self._slot, here)}. "
            )
        elif batch.is_too_large:
            advice = "To read it, raise PIPELINE_UNPACKED_MEBIBYTES: it takes twice that memory. "
        return BatchHeld(self._slot, batch, advice)

    async def _is_elsewhere(self, start: int) -> bool:
        """Whether a person has moved the position; without the database nobody can tell."""
        applied = self.position or 0
        try:
            stored = await self._read_position()
        except Exception as error:
            if not is_infrastructure(error):
                raise
            return False
        # While a batch is being applied, maybe in parts, it is between these two.
        return stored is not None and not applied <= stored.next_offset <= start

    def _recognised(self, records: Sequence[ConsumerRecord], start: int) -> list[ConsumerRecord]:
        """Return the records from `start` on; raises `Stuck` if the anchor is another record."""
        if not records:
            return []
        anchor, self._anchor = self._anchor, None
        first = records[0]
        if first.offset < (anchor.offset if anchor else start):
            raise PositionMoved(f"{self._part} returned {first.offset} for {start}")
        # A compacted topic may have dropped it meanwhile.
        if anchor and anchor.offset == first.offset and anchor.hash != Anchor.of(first).hash:
            self._refuse(
                start,
                f"the record at {first.offset} is not the one of {anchor.time:%Y-%m-%d %H:%M:%S}Z"
                " that was read there (created anew)",
            )
        return [record for record in records if record.offset >= start]

    def _move_to(self, position: int) -> None:
        """Note the position; the partition is ready unless it still stands before its record."""
        self.position = position
        if self._held is not None:
            if position == self._held.offset:
                return
            log.info("%s goes on at offset %s", self._part, position)
            self._release()
        self._health.ready(self._part)

    async def _hold(self, stuck: Stuck) -> None:
        """Stand still before a record that can't be handled, visibly; then try it again."""
        partition = self._partition
        if self._held is None or str(self._held) != str(stuck):
            log.error(
                "%s stands still, nothing is skipped: %s",
                self._part,
                stuck,
                # Where the sentence says it all, there is no code of ours to look at.
                exc_info=None
                if self._is_cut_off or isinstance(stuck.error, _EXPLAINED)
                else stuck.error,
                extra={"topic": partition.topic, "partition": partition.partition}
                | {"offset": stuck.offset, "reason": stuck.reason},
            )
            telemetry.processed(partition.topic, "", "stuck", 1, self._slot.group)
        self._held = stuck
        telemetry.set_stuck(partition.topic, partition.partition, is_stuck=True)
        self._health.not_ready(self._part, str(stuck))
        # What is buffered here would keep the client from fetching for the others.
        with suppress(Exception):
            self._client.pause(partition)
        await sleep_or_event(self._stopping, self._settings.retry_pause)
        with suppress(Exception):
            self._client.resume(partition)

    def _release(self) -> None:
        if self._held is not None:
            self._held = None
            telemetry.set_stuck(self._partition.topic, self._partition.partition, is_stuck=False)

    def _patiently(self, what: str) -> Attempts:
        return retry_while_unavailable(
            f"{self._part}: {what}",
            self._settings.postgresql,
            unless=self._stopping.is_set,
            away=lambda reason: self._health.not_ready(self._part, reason),
        )

    async def _unless_stopped(self, task: asyncio.Task[T]) -> T | None:
        """Wait for the task, but no longer than until `stop`: None."""
        stop = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        return None if self._stopping.is_set() else task.result()
