"""The runtime: starts everything and stops it in order. The only module that knows everyone."""

import asyncio
import gc
import logging
import os
import signal
import traceback
from collections.abc import Awaitable, Callable, Sequence
from enum import Flag, auto
from functools import partial
from time import monotonic
from typing import cast

import asyncpg
from alembic.script import ScriptDirectory
from sqlalchemy.ext.asyncio import AsyncEngine

from pipeline.apply import inbox
from pipeline.apply.breaker import Breaker
from pipeline.apply.filters import Filters
from pipeline.apply.transactions import ConsumeTransactions, Signals
from pipeline.consume import inbox_coverage
from pipeline.consume.consumer import Consumer
from pipeline.events.references import Claims
from pipeline.observe import exporters, logs, telemetry
from pipeline.observe.health import Health, HealthServer, ReadinessLog, Watchdog
from pipeline.relay.relay import Relay
from pipeline.retention.maintenance import AHEAD_SECONDS, make_ahead, tidy
from pipeline.retention.partitions import NotOwner
from pipeline.retry.workers import BacklogWorkers
from pipeline.servers import revisions
from pipeline.servers.database import autocommitting, create_engine
from pipeline.servers.guard import InContext
from pipeline.servers.retrying import retry_while_unavailable
from pipeline.servers.tasks import in_background

from .errors import describe_error, is_infrastructure, is_of_the_database
from .service import Service
from .settings import Settings

log = logging.getLogger(__name__)

_BEAT = 1.0
_DEAF = 70
"""Exit code."""
_STALL_AFTER = 10.0
"""Seconds without a beat of the event loop after which the process counts as hanging."""


class Part(Flag):
    """What a process does."""

    CONSUME = auto()
    RELAY = auto()


async def run(service: Service, settings: Settings, parts: Part) -> None:
    """Run until SIGTERM or SIGINT, then finish what is begun within the shutdown grace.

    Raises `Misconfigured`, `NotMigrated`, `RemembersTooLittle`, `CannotListen`, and what a part
    failed with that nobody expected.
    """
    service.check(settings)
    migrations = revisions.here()
    _collect_seldom(settings.gc_threshold)
    logs.configure(
        level=settings.log_level, json=settings.log_json, loggers=service.loggers(settings)
    )
    health = Health(stall_after=_STALL_AFTER)
    server = HealthServer(health, host=settings.health_host, port=settings.health_port)
    port = server.start()
    sending = exporters.configure(
        service_name=service.name,
        otlp_endpoint=settings.otlp_endpoint,
        sample_ratio=settings.trace_sample_ratio,
    )
    log.info("%s starts; health and metrics on port %s", service.name, port)
    try:
        async with in_background(_beat(health, settings.hang_timeout)):
            await serve(
                service,
                settings,
                parts,
                health=health,
                stopping=_stopping_on_signals(),
                migrations=migrations,
            )
    finally:
        server.stop()
        await asyncio.to_thread(sending.shutdown)
        log.info("%s has stopped", service.name)


async def serve(
    service: Service,
    settings: Settings,
    parts: Part,
    *,
    health: Health,
    stopping: asyncio.Event,
    migrations: ScriptDirectory | None = None,
) -> None:
    """Run the parts until `stopping` is set, then stop them in order.

    `migrations` are those that the code needs; None: it is not known.
    """
    engine = create_engine(settings, name=service.name)
    try:
        await _serve(service, settings, parts, engine, health, stopping, migrations)
    finally:
        await engine.dispose()


def _collect_seldom(threshold: int) -> None:
    """Keep the collector from looking at batches: what they hold goes without it, and is much.

    By default that takes a quarter of the time. Only what handlers leave behind in cycles lets the
    number of objects grow to the threshold. Every third time those are searched again that were in
    use then, and every ninth time all.
    """
    gc.freeze()
    gc.set_threshold(threshold, 2, 2)


async def _serve(
    service: Service,
    settings: Settings,
    parts: Part,
    engine: AsyncEngine,
    health: Health,
    stopping: asyncio.Event,
    migrations: ScriptDirectory | None,
) -> None:
    async def prepare(
        connection: asyncpg.Connection, settings: Settings, *, warns: bool = True
    ) -> None:
        await make_ahead(connection, settings, warns=warns)
        if Part.CONSUME in parts:
            await inbox.register(connection, service.handlers.consumers)

    async def begin(connection: asyncpg.Connection, settings: Settings) -> None:
        await revisions.check(connection, migrations)
        await prepare(connection, settings)

    # Nothing may meet a missing column or partition: this comes before everything else.
    health.not_ready("housekeeping", "schema and partitions are not checked yet")
    await _patiently(begin, engine, settings, health, stopping)
    if stopping.is_set():
        return
    if Part.CONSUME in parts and service.handlers.topics:
        health.not_ready("consumer", "has not asked yet how long its topics keep records")
        await inbox_coverage.check(settings, service.handlers.topics)
    claims = service.claims and service.claims(service.name, settings)
    relay = Relay(engine, name=service.name, settings=settings, health=health)
    breaker = Breaker(keys=settings.breaker_keys, pause=settings.retry_pause, health=health)
    filters = Filters(mebibytes=settings.inbox_filter_mebibytes)
    signals = _Signals(relay)
    consume = ConsumeTransactions(
        engine,
        group=service.name,
        source=service.source,
        settings=settings,
        breaker=breaker,
        filters=filters,
        handlers=service.handlers,
        signals=signals,
        claims=claims,
    )
    signals.lanes = BacklogWorkers(consume, health)
    kinds = service.workers if service.handlers.callers else ()
    signals.calls = [workers(consume, health) for workers in kinds]
    consumer = Consumer(
        engine,
        consume,
        handlers=service.handlers,
        group=service.name,
        settings=settings,
        health=health,
    )
    # In this order they stop: the relay publishes what the others have committed last.
    every: list[tuple[Part, Sequence[Consumer | BacklogWorkers | Relay]]] = [
        (Part.CONSUME, [consumer, signals.lanes, *signals.calls]),
        (Part.RELAY, [relay]),
    ]
    async with (
        in_background(_watch([consume, *signals.calls], settings.hang_timeout)),
        in_background(filters.keep_loading(engine)),
        in_background(
            _keep_house(engine, service, claims, settings, health, stopping, prepare)
        ) as housekeeping,
    ):
        chosen = [
            [(one, asyncio.create_task(one.run())) for one in together]
            for part, together in every
            if part in parts
        ]
        tasks = [task for together in chosen for _, task in together]
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait({stop, housekeeping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        for together in chosen:
            for one, _ in together:
                one.stop()
            await asyncio.wait({task for _, task in together}, timeout=settings.shutdown_grace / 2)
            for _, task in together:
                task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(
                outcome, asyncio.CancelledError
            ):
                raise outcome


class _Signals(Signals):
    """Wakes the parts of the process that have something to do after a transaction."""

    lanes: BacklogWorkers
    calls: Sequence[BacklogWorkers]

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    async def wait_for_relay(self) -> None:
        await self._relay.lead.room()

    def events_staged(self, number: int) -> None:
        self._relay.wake(number)

    def rows_due(self) -> None:
        self.lanes.wake()

    def calls_staged(self) -> None:
        for workers in self.calls:
            workers.wake()


async def _watch(callers: Sequence[ConsumeTransactions | BacklogWorkers], seconds: float) -> None:
    """End the process when a handler swallows its cancellation: it would hold up its partition.

    The next process finds the message by the count of starts, as it does with all that kill.
    """
    found = None
    while found is None:
        await asyncio.sleep(_BEAT)
        found = next(filter(None, (one.ignoring_cancellation(seconds) for one in callers)), None)
    item, task = found
    log.critical(
        "%s: %s %r does not end, %s s after it was cancelled (PIPELINE_HANG_TIMEOUT): the process"
        " ends, and the next one takes the message by itself. It is at:\n%s",
        item.consumer,
        item.message.type,
        item.message.id,
        seconds,
        _stack_of(task),
    )
    logging.shutdown()
    os._exit(_DEAF)


def _stack_of(task: asyncio.Task[object] | None) -> str:
    """Return where a task waits, through all that it awaits."""
    frames, awaited = [], cast(object, task and task.get_coro())
    while frame := getattr(awaited, "cr_frame", None):
        frames.append((frame, frame.f_lineno))
        awaited = InContext.within(getattr(awaited, "cr_await", None))
    return "".join(traceback.StackSummary.extract(iter(frames)).format())


async def _keep_house(
    engine: AsyncEngine,
    service: Service,
    claims: Claims | None,
    settings: Settings,
    health: Health,
    stopping: asyncio.Event,
    prepare: Callable[..., Awaitable[None]],
) -> None:
    tidy_at = 0.0
    while True:
        is_time = monotonic() >= tidy_at
        await _patiently(partial(prepare, warns=is_time), engine, settings, health, stopping)
        if is_time:
            tidy_at = monotonic() + settings.housekeeping_interval
            await _tidy(engine, service, claims, settings)
        await asyncio.sleep(min(settings.housekeeping_interval, AHEAD_SECONDS))


async def _tidy(
    engine: AsyncEngine, service: Service, claims: Claims | None, settings: Settings
) -> None:
    """Drop what is too old. Nothing that fails there concerns a message: the next round goes on."""
    try:
        async with autocommitting(engine) as connection:
            done = await tidy(connection, settings, archive=service.archive)
            if claims is not None and done.is_ours:
                await claims.sweep(connection)
    except NotOwner as error:
        log.debug("left to others: %s", error)
    except Exception as error:
        telemetry.retention_failed()
        expected = is_infrastructure(error) or is_of_the_database(error)
        log.error(
            "tidying up failed: %s", describe_error(error), exc_info=None if expected else error
        )


async def _patiently(
    work: Callable[[asyncpg.Connection, Settings], Awaitable[object]],
    engine: AsyncEngine,
    settings: Settings,
    health: Health,
    stopping: asyncio.Event,
) -> None:
    try:
        async for attempt in retry_while_unavailable(
            "housekeeping",
            settings.postgresql,
            unless=stopping.is_set,
            away=lambda reason: health.not_ready("housekeeping", reason),
        ):
            with attempt:
                async with autocommitting(engine) as connection:
                    await work(connection, settings)
    except Exception:
        if not stopping.is_set():
            raise
    else:
        health.ready("housekeeping")


async def _beat(health: Health, hang_timeout: float) -> None:
    """Tell that the loop turns, and log when the process becomes ready or stops being so."""
    announcer = ReadinessLog(health)
    watchdog = Watchdog(health, hang_timeout)
    watchdog.start()
    telemetry.observe_ready(lambda: health.is_ready)
    try:
        while True:
            health.beat()
            watchdog.put_off()
            announcer.announce()
            await asyncio.sleep(_BEAT)
    finally:
        watchdog.stop()


def _stopping_on_signals() -> asyncio.Event:
    """Return the event that the first signal sets; a second one ends the process at once.

    That is safe: what is not in the database or in Kafka has not happened. Not even SIGINT raises
    `KeyboardInterrupt`, which would be the failure of the handler that it finds at work.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        log.info("%s: finishing what is begun", number.name)
        stopping.set()
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    return stopping
