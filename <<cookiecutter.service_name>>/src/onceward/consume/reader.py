"""A reader: reads one assigned partition from its stored position, batch after batch."""

import asyncio
import logging
from dataclasses import replace
from functools import partial
from math import inf
from time import monotonic

from aiokafka import ConsumerRecord, TopicPartition, errors

from onceward.apply.attempt import Findings
from onceward.apply.batch import Batch, read, undecodable
from onceward.apply.claim_check import resolve_batch
from onceward.apply.item import Undecoded
from onceward.apply.limits import Pace
from onceward.apply.positions import PositionMoved, Slot
from onceward.apply.throttles import LOOK_SECONDS, Resting
from onceward.apply.transactions import ConsumeTransactions
from onceward.errors import Paused
from onceward.events.message import seconds_of
from onceward.handlers.policy import DIED, ProcessDied
from onceward.observe import metrics, traces
from onceward.observe.health import Health
from onceward.servers.member import GroupMember
from onceward.servers.record_batches import UnreadableBatch
from onceward.servers.retrying import Retrying
from onceward.servers.tasks import end, sleep_or_event

from .blockage import Blockage
from .gathering import Gatherer
from .limits import TopicLimits
from .partition_source import PartitionBatch, PartitionSource
from .position import KAFKA_FAILED, UNEXPECTED, PartitionPosition

log = logging.getLogger(__name__)

_RECOVERY_POLL_SECONDS = 1.0
"""Length of a poll after an outage of the brokers: if it raises no error, the outage is over."""
LARGEST_SHARE = 16 * 2**20
"""Bytes of a share at most, and of a batch over which processes have died: more than nearly all
batches have, and little beside the memory of a process. A reader has six shares: what is fetched,
unpacked, decoded and applied, and the data of the last two. Objects may take as much again."""
_RECORD_BYTES = 2_048
"""About what the objects of a record take of a share."""


class Share:
    """What each of a member's readers may hold of its partition at a time."""

    def __init__(self, size: int) -> None:
        """`size`: of a batch, in bytes."""
        self.size = size
        self.exceeding = asyncio.Lock()
        """Held by the one reader that may hold more."""


class Reader:
    """One assigned partition: fetches batches and applies them, one after the other."""

    def __init__(
        self,
        client: GroupMember,
        partition: TopicPartition,
        share: Share,
        consume: ConsumeTransactions,
        gatherer: Gatherer,
        health: Health,
    ) -> None:
        """Start the task that reads."""
        self._client = client
        self._partition = partition
        self._share = share
        self._consume = consume
        self._gatherer = gatherer
        self._settings = consume.settings
        self._health = health
        self._memory: float = share.size
        """Bytes that a batch may take: a share, or any number in the turn of this reader."""
        self._slot = Slot(consume.group, partition.topic, partition.partition)
        self._part = f"partition {partition.topic}/{partition.partition}"
        self._stored_position = PartitionPosition(self._slot, client, consume, self._attempts)
        self._pace = Pace(consume.settings)
        self._stopping = asyncio.Event()
        self._blockage = Blockage(self._slot, self._part, health)
        self._is_cut_off = False
        self._is_applying = False
        self._left: list[ConsumerRecord] = []
        """Records that were fetched and did not fit into the latest batch."""
        self.limits = TopicLimits(consume.throttles, consume.handlers.takers, partition.topic)
        self._has_begun = False
        """Whether the first records are applied; until then processes may have died over them."""
        self._deaths = 0
        """Processes that have died over the first records, if these are decoded one by one."""
        self.position: int | None = None
        """The offset after the last record that was applied."""
        self.since: float | None = None
        """When the first record that is not applied was written, in seconds, by its timestamp; or
        the one before it, if that record is not fetched, as while the partition is blocked."""
        self._task = asyncio.create_task(self._run(), name=self._part)

    def raise_if_ended(self) -> None:
        """Raise the error of the task if it has ended by itself."""
        if self._task.done() and not self._stopping.is_set():
            self._task.result()

    async def stop(self, grace: float | None) -> None:
        """Let the running batch finish; with `grace`, roll it back after so many seconds."""
        task = self._task
        if not self._stopping.is_set() and (task.done() or task.cancelling()):
            # The task was not ended by this method: KeyboardInterrupt or SystemExit in a task of a
            # handler ends the event loop, and cancels all tasks. That counts as a death.
            self._stored_position.counted_at = None
        self._stopping.set()
        if self._is_applying:
            await asyncio.wait({task}, timeout=grace)
        task.cancel()
        await asyncio.wait({task})
        await self._stored_position.undo_start(self.position)
        self._blockage.forget()
        self._health.forget(self._part)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            pause = 0.0
            try:
                await self._rest()
                await self._locate()
                await self._read_on()
            except Resting:
                # A process that dies while it is paused has not died over its records.
                await self._stored_position.undo_start(self.position)
            except (PositionMoved, errors.OffsetOutOfRangeError) as moved:
                log.warning("%s: %s; reading the position again", self._part, moved)
            except Exception as error:
                if not self._stopping.is_set():
                    after = error.after if isinstance(error, Paused) else None
                    pause = after or self._settings.retry_pause
                    self._block(error)
            if pause:  # without the error, which refers to the batch
                # Records that stay in the client's buffer would delay its next fetch for others.
                with self._client.resting(self._partition):
                    await sleep_or_event(self._stopping, pause)

    async def _read_on(self) -> None:
        assert self.position is not None
        following: asyncio.Task[PartitionBatch] | None = None
        try:
            while not self._stopping.is_set():
                until = self.position + 1
                try:
                    part = await (following or self._fetch(self.position))
                    exceeds = part.batch.end < until  # the data of its first message does
                except UnreadableBatch as error:
                    if not error.is_too_large:
                        raise
                    until, exceeds = error.next, True
                following = None
                if exceeds:
                    await self._exceed(until)
                    continue
                # Not while earlier processes may have died over the first records.
                if self._has_begun:
                    # The next batch is fetched and decoded while this one is applied.
                    following = asyncio.create_task(self._fetch(part.batch.end))
                await self._apply(part)
        finally:
            await end(*filter(None, [following]))
            self._left = []

    async def _exceed(self, until: int) -> None:
        """Apply up to `until` what exceeds the share; turns of other readers come in between."""
        assert self.position is not None
        await self.limits.wait()
        with self._client.resting(self._partition):
            await self._share.exceeding.acquire()
        self._memory, is_over = inf, False
        ends_at = monotonic() + 2 * self._settings.kafka_session_timeout  # a fetch takes less
        try:
            while not (is_over or self._stopping.is_set()):
                part = await self._fetch(self.position)
                if part.batch.end > self.position:
                    await self._apply(part)
                is_over = not self._left and (self.position >= until or monotonic() >= ends_at)
        finally:
            with self._client.resting(self._partition):
                self._share.exceeding.release()
            self._memory = self._share.size

    async def _apply(self, part: PartitionBatch) -> None:
        await self.limits.take(part.batch, others_wait=self._memory == inf)  # for its turn
        part = replace(part, stored=self.limits.stored, limits=self.limits)
        findings = Findings()
        # Not with others while its records may kill the process; a full batch gains nothing.
        shares = self._has_begun and len(part.batch.records) < self._pace.limit
        source, breaker = PartitionSource([part]), self._consume.breaker
        records = part.batch.records
        if records:
            self.since = seconds_of(records[0].timestamp)
        try:
            with breaker.probe(source.judged if breaker.open else ()):
                if not (shares and await self._gatherer.apply(part, findings)):
                    self._is_applying = False
                    attempts = self._attempts("the consume transaction")
                    results = await self._consume.apply(source, attempts, findings)
                    self._gatherer.learn(part, results)
                    self._pace.learn(results, len(part.batch.records))
        finally:
            self._is_applying = False
        if records:
            self.since = seconds_of(records[-1].timestamp)
        self._move_to(part.batch.end)
        if not self._has_begun:
            self._deaths = part.deaths if self._left else 0
            # Without records there was only a gap in the offsets.
            self._has_begun = bool(part.batch.records) and not self._deaths

    async def _rest(self) -> None:
        """Wait, ready, while the topic or each of its consumers is paused.

        A process that begins so locates the position: its lag is known, and no record is passed by.
        """
        while await self.limits.are_paused() and not self._stopping.is_set():
            if self.position is None:
                await self._locate()
            self._blockage.end()
            with self._client.resting(self._partition):
                await sleep_or_event(self._stopping, LOOK_SECONDS)

    async def _locate(self) -> None:
        position = await self._stored_position.locate()
        if position != self.position:
            self.since = self._stored_position.anchored_at
        self._move_to(position)

    async def _fetch(self, start: int) -> PartitionBatch:
        """Wait for the records from `start` on, decode them and fetch the data they refer to.

        If processes have died over them the payloads are not validated and no data is fetched,
        because that may be what kills a process: the records are parked as they are. Where they
        have a codec of their own, which parses them, they are decoded and parked one by one.
        """
        records = await self._records(start)
        if not records:
            behind = await self._client.position(self._partition)
            return PartitionBatch(self._slot, Batch(start, max(start, behind), (), ()))
        deaths, handlers = self._suspected_deaths, self._consume.handlers
        attempts = self._attempts("fetching schemas or data")
        if deaths and not self._deaths:
            log.warning(
                "%s: processes crashed %s times at this offset: the records at the offsets %s to %s"
                " are parked, and a worker of the backlog tries them one by one",
                self._part,
                deaths,
                records[0].offset,
                records[-1].offset,
            )
        if deaths and self._slot.topic in handlers.codecs:
            await self._stored_position.count_start(start)
            batch = await attempts(self._read_alone, start, records[0], deaths)
        else:
            batch = await attempts(partial(read, handlers, start, records, validates=not deaths))
        if not deaths:
            batch = await attempts(resolve_batch, batch, self._consume.claims, self._memory)
        self._left = [record for record in records if record.offset >= batch.end]
        return PartitionBatch(self._slot, batch, deaths, self._begun)

    def _begun(self) -> None:
        """Note that a transaction has begun, for whose end `stop` waits."""
        self._is_applying = True

    async def _read_alone(self, start: int, record: ConsumerRecord, deaths: int) -> Batch:
        if not self._stored_position.is_deadly:
            return await read(self._consume.handlers, start, [record], validates=False)
        error = ProcessDied(f"processes have died, {deaths} in all, when they decoded it")
        found = undecodable(self._consume.handlers, Undecoded(record, DIED, error))
        if isinstance(found, Undecoded):
            return Batch(start, record.offset + 1, [record], (), (), [found])
        return Batch(start, record.offset + 1, [record], found)

    async def _records(self, start: int) -> list[ConsumerRecord]:
        """Wait for records; returns none when only a gap in the offsets was fetched.

        Control records of transactions are such gaps. The position must move past them: once
        retention has emptied the topic, offsets behind the position look like lost records.
        """
        records, self._left = self._left, []
        is_gap = False
        while not records and not is_gap:
            await self.limits.check()
            records = await self._poll(start)
            if not records:
                await self._stored_position.check(self.position or 0, start)
                is_gap = self._memory == inf or await self._client.position(self._partition) > start
            if self._is_cut_off:
                self._is_cut_off = False
                self._blockage.end()
        return records

    async def _poll(self, start: int) -> list[ConsumerRecord]:
        """Wait for records from `start` on; returns none after the interval of commits."""
        interval = self._settings.offset_commit_interval
        seconds = _RECOVERY_POLL_SECONDS if self._is_cut_off else interval
        until = asyncio.get_running_loop().time() + seconds
        found: list[ConsumerRecord] = []
        with traces.polling(self._slot.topic, self._slot.group):
            while True:
                batches = await self._client.arrival(self._partition, until)
                if await self.limits.are_paused():  # before anything is counted or unpacked
                    break
                if self._stored_position.may_have_lost(batches):
                    self._stored_position.fetch_from(start)
                    continue
                # Unpacking the records may kill the process, so its start is counted before. When
                # only the anchor has arrived there is nothing to count.
                if batches is not None:
                    if not self._has_begun and (batches.stable or 0) > start:
                        await self._stored_position.count_start(start)
                    careful = LARGEST_SHARE if self._suspected_deaths else inf
                    batches.room = int(min(self._settings.largest_batch, self._memory, careful))
                of_share = 1 + self._share.size // _RECORD_BYTES
                most = int(min(self._pace.limit, of_share, self.limits.most))
                try:
                    taken = await self._client.take(self._partition, most)
                except UnreadableBatch as batch:
                    if batch.next > start:
                        raise
                    self._stored_position.fetch_from(start, compares=False)
                    continue
                found = self._stored_position.recognized(taken, start, batches)
                if found or batches is None or self._memory == inf:
                    break
        if found:
            metrics.received(self._slot.topic, self._slot.group, len(found))
        return found

    @property
    def _suspected_deaths(self) -> int:
        """Return how many processes may have died over the first records."""
        return 0 if self._has_begun else self._deaths or self._stored_position.suspected_deaths

    def _move_to(self, position: int) -> None:
        """Set the position; the partition is ready unless it is still blocked there."""
        self.position = position
        self._blockage.pass_by(position)

    def _block(self, error: Exception) -> None:
        deaths = self._suspected_deaths
        blocked = self._stored_position.blocked_by(self.position or 0, error, deaths)
        if blocked.reason in (KAFKA_FAILED, UNEXPECTED):
            self._is_cut_off = blocked.reason == KAFKA_FAILED
        self._blockage.report(blocked)

    def _attempts(self, what: str) -> Retrying:
        return Retrying(
            f"{self._part}: {what}",
            self._settings.postgresql,
            unless=self._stopping.is_set,
            report=lambda reason: self._health.not_ready(self._part, reason),
            waits_for_stores=self._memory < inf,  # or others would wait for their turn, too
        )
