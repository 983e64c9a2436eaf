"""The composition root: builds the parts of a process, starts them, and stops them in order."""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from enum import Flag, auto
from functools import partial

from alembic.script import ScriptDirectory
from sqlalchemy.ext.asyncio import AsyncEngine

from onceward.apply.breaker import Breaker
from onceward.apply.claim_check import ClaimCheck
from onceward.apply.outcome import BatchOutcome
from onceward.apply.throttles import Throttles
from onceward.apply.transactions import ConsumeTransactions, Signals
from onceward.consume import inbox_coverage, stamps
from onceward.consume.consumer import Consumer
from onceward.errors import OncewardError
from onceward.handlers.registry import Handlers
from onceward.observe import exporters, logs, metrics
from onceward.observe.health import Health, serving
from onceward.observe.watchdog import heartbeat, watch_calls
from onceward.relay.relay import Relay
from onceward.retention.worker import RetentionWorker
from onceward.retry.workers import BacklogWorkers
from onceward.servers import peers, revisions
from onceward.servers.database import create_engine
from onceward.servers.guard import interrupt, stack_of
from onceward.servers.retrying import Retrying
from onceward.servers.tasks import in_background

from .service import Service
from .settings import Settings

log = logging.getLogger(__name__)

_CONSUMER_SHARE, _RELAY_SHARE, _CLOSING_SHARE, _TELEMETRY_SHARE = 0.4, 0.3, 0.05, 0.2
"""Shares of the shutdown grace: for running batches, for what the relay has to publish, twice for
closing, of resources and of idle connections (of which each takes a minute if PostgreSQL hangs),
and for spans and metrics."""

_STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Running = Consumer | BacklogWorkers | Relay


class Cancelled(OncewardError):
    """Parts of the process were cancelled, and not by the engine."""

    def __init__(self, parts: Sequence[str]) -> None:
        super().__init__(
            f"code of the service has cancelled a task of the engine ({', '.join(parts)}): the"
            " process ends, and the next one tries alone what this one was handling"
        )


class Part(Flag):
    """What a process does."""

    CONSUME = auto()
    RELAY = auto()


async def run(
    service: Service, settings: Settings, parts: Part, *, make_relay: Callable[..., Relay] = Relay
) -> None:
    """Run until SIGTERM or SIGINT, then finish what is begun within the shutdown grace.

    Raises `Misconfigured`, `NotMigrated`, `RemembersTooLittle`, `CannotListen`, `Cancelled`, and
    any error with which a part has failed.
    """
    service.check(settings)
    migrations = revisions.load_migrations()
    async with process(service, settings) as (health, stopping):
        await serve(
            service,
            settings,
            parts,
            health=health,
            stopping=stopping,
            migrations=migrations,
            make_relay=make_relay,
        )


@asynccontextmanager
async def process(
    service: Service, settings: Settings
) -> AsyncIterator[tuple[Health, asyncio.Event]]:
    """Set up the log, health, telemetry and heartbeat of a process, for as long as it runs.

    Yields its health, and the event that SIGTERM or SIGINT sets. Raises `CannotListen`.
    """
    _collect_seldom(settings.gc_threshold)
    logs.configure(
        level=settings.log_level,
        json=settings.log_json,
        loggers=service.loggers(settings),
        queues=True,
    )
    for found in service.plaintext(settings):
        log.warning("%s: %s", *found)
    peers.warns = True
    os.register_at_fork(after_in_child=_leave_signals)
    health = Health(stall_after=settings.hang_timeout)
    # Renewed each third of their time, they outlast one call that blocks for another third.
    times = settings.kafka_session_timeout, settings.backlog_lease, settings.relay_lease
    with serving(health, host=settings.health_host, port=settings.health_port) as port:
        metrics.observe_ready(lambda: health.is_ready)
        shut_exporters_down = exporters.configure(
            service_name=service.name,
            otlp_endpoint=settings.otlp_endpoint,
            sample_ratio=settings.trace_sample_ratio,
            release=settings.release,
        )
        named = f"{service.name} {settings.release}".rstrip()
        log.info("%s starts; health and metrics on port %s", named, port)
        stopping = _stopping_on_signals()
        try:
            async with in_background(heartbeat(health, interrupt, min(times) / 3)):
                yield health, stopping
        finally:
            seconds = _TELEMETRY_SHARE * settings.shutdown_grace
            await asyncio.to_thread(shut_exporters_down, seconds)
            log.info("%s has stopped", service.name)


def _collect_seldom(threshold: int) -> None:
    """Keep the garbage collector from searching batches, which takes a quarter of the time.

    Reference counting frees what they hold. Only what handlers leave behind in cycles lets the
    number of objects grow to the threshold.
    """
    gc.freeze()
    gc.set_threshold(threshold, 2, 2)


async def serve(
    service: Service,
    settings: Settings,
    parts: Part,
    *,
    health: Health,
    stopping: asyncio.Event,
    migrations: ScriptDirectory | None = None,
    make_relay: Callable[..., Relay] = Relay,
) -> None:
    """Run the parts until `stopping` is set, then stop them in order.

    `migrations` are those that the code needs; None: it is not known.
    """
    engine = create_engine(settings, name=service.name)
    is_consuming, topics = Part.CONSUME in parts, service.handlers.topics
    claims = service.claims and service.claims(service.name, settings)
    retention = RetentionWorker(
        engine,
        settings,
        consumers=service.handlers.consumers if is_consuming else (),
        archive=service.archive,
        claims=claims,
        health=health,
    )
    for found in service.handlers.rivals() if is_consuming else ():
        log.warning("%s; %s", *found)
    own = partial(stamps.check, settings=settings, group=service.name, topics=topics)
    try:
        handlers = service.handlers if is_consuming else Handlers()
        begin = retention.start(service.metadata, migrations, handlers.sharing, own)
        async with in_background(begin) as beginning, in_background(stopping.wait()) as stop:
            await asyncio.wait({beginning, stop}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.is_set():
            return
        if is_consuming and topics:
            health.not_ready("consumer", "the retention of its topics is not checked yet")
            await inbox_coverage.check(settings, topics)
        throttles = Throttles(engine, health)
        relay = make_relay(
            engine,
            name=service.name,
            settings=settings,
            health=health,
            encryption=service.encryption,
            throttles=throttles,
        )
        stamp = beginning.result()
        uses = service if is_consuming else replace(service, handlers=handlers, resources=None)
        grace = _CLOSING_SHARE * settings.shutdown_grace
        async with _resources(uses, health, stopping, grace) as (holding, opened):
            if not opened.done():
                return
            ours = opened.result()
            consuming = _consuming(ours, settings, engine, health, relay, claims, throttles, stamp)
            # In this order they stop: the relay publishes what the others have committed last.
            groups: list[tuple[float, Sequence[Running]]] = []
            if is_consuming:
                groups.append((_CONSUMER_SHARE * settings.shutdown_grace, consuming))
            if Part.RELAY in parts:
                groups.append((_RELAY_SHARE * settings.shutdown_grace, [relay]))
            async with (
                in_background(watch_calls(stack_of, settings.hang_timeout)),
                in_background(retention.run()) as retaining,
                in_background(throttles.run()) as looking,
                in_background(_open_codecs(service, health, stopping, parts)) as opening,
            ):
                await _run_until(stopping, (holding, retaining, looking, opening), groups)
    finally:
        logging.getLogger("sqlalchemy.pool.impl").setLevel(logging.CRITICAL)  # no tracebacks
        with suppress(TimeoutError):
            await asyncio.wait_for(engine.dispose(), _CLOSING_SHARE * settings.shutdown_grace)


@asynccontextmanager
async def _resources(
    service: Service, health: Health, stopping: asyncio.Event, grace: float
) -> AsyncIterator[tuple[asyncio.Task[None], asyncio.Future[Service]]]:
    """Open the service's resources, and close them at the end, within `grace` seconds.

    Yields the task that holds them, and the service whose handlers have them, which is not there if
    the process stops before, or they can't be opened. Raises the error of that at the end.
    """
    opened = asyncio.get_running_loop().create_future()
    drained = asyncio.Event()
    async with in_background(_hold_resources(service, health, opened, drained)) as holding:
        async with in_background(stopping.wait()) as stop:
            await asyncio.wait({holding, opened, stop}, return_when=asyncio.FIRST_COMPLETED)
        try:
            yield holding, opened
        finally:
            drained.set()
            if opened.done() and not (await asyncio.wait({holding}, timeout=grace))[0]:
                log.warning("resources are not closed after %.1f s: cancelling that", grace)


async def _hold_resources(
    service: Service, health: Health, opened: asyncio.Future[Service], drained: asyncio.Event
) -> None:
    """Hold the service's resources open until all calls have ended.

    In a task of their own, which a task group or a time limit among them may cancel.
    """
    async with service.opened(partial(health.not_ready, "resources")) as one:
        health.forget("resources")
        opened.set_result(one)
        await drained.wait()


async def _open_codecs(
    service: Service, health: Health, stopping: asyncio.Event, parts: Part
) -> None:
    """Open the codecs of what is published, beside all other work, and wait for the end."""
    if Part.CONSUME in parts:
        await Retrying(
            "opening codecs",
            "codecs",
            report=lambda reason: health.not_ready("codecs", reason),
        )(service.open_codecs)
        health.ready("codecs")
    await stopping.wait()


def _consuming(
    service: Service,
    settings: Settings,
    engine: AsyncEngine,
    health: Health,
    relay: Relay,
    claims: ClaimCheck | None,
    throttles: Throttles,
    stamp: str,
) -> Sequence[Running]:
    """Return the parts that apply messages."""
    signals = _Signals(relay)
    consume = ConsumeTransactions(
        engine,
        group=service.name,
        source=service.source,
        settings=settings,
        breaker=Breaker(
            keys=settings.breaker_keys,
            pause=settings.retry_pause,
            health=health,
            throttles=throttles,
        ),
        handlers=service.handlers,
        signals=signals,
        claims=claims,
        encryption=service.encryption,
    )
    signals.lanes = BacklogWorkers(consume, health)
    kinds = service.workers if service.handlers.callers else ()
    signals.calls = [workers(consume, health) for workers in kinds]
    return [Consumer(consume, health, stamp), signals.lanes, *signals.calls]


async def _run_until(
    stopping: asyncio.Event,
    others: Sequence[asyncio.Task[None]],
    groups: Sequence[tuple[float, Sequence[Running]]],
) -> None:
    """Run until one fails or the process stops; then stop one group after the other.

    Each has so many seconds before it is cancelled. Raises `Cancelled` if one was cancelled before.
    """
    running = [
        (seconds, [(one, asyncio.create_task(one.run(), name=type(one).__name__)) for one in group])
        for seconds, group in groups
    ]
    tasks = [task for _, group in running for _, task in group]
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({stop, *others, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    cancelled = [task.get_name() for task in (*others, *tasks) if task.cancelled()]
    stop.cancel()
    for seconds, group in running:
        for one, _ in group:
            one.stop()
        await asyncio.wait({task for _, task in group}, timeout=seconds)
        for _, task in group:
            task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
    if cancelled:
        raise Cancelled(cancelled)


class _Signals(Signals):
    """Wakes the parts of the process that have something to do after a transaction."""

    lanes: BacklogWorkers
    calls: Sequence[BacklogWorkers]

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    async def wait_for_relay(self) -> None:
        await self._relay.backpressure.wait()

    def committed(self, outcome: BatchOutcome) -> None:
        if outcome.events:
            self._relay.wake(outcome.events)
        for workers in self.calls if outcome.has_calls else ():
            workers.wake()
        if outcome.has_due:
            self.lanes.wake()


def _leave_signals() -> None:
    """Let a process that a handler has forked end by its signals, and not stop this one.

    The two share the socket that wakes the event loop.
    """
    signal.set_wakeup_fd(-1)
    for number in _STOPPING_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _stopping_on_signals() -> asyncio.Event:
    """Return the event that the first SIGTERM or SIGINT sets; a second ends the process at once.

    The second may be either of them. That is safe: what is not in the database or in Kafka has not
    happened. SIGINT raises no `KeyboardInterrupt`, which would count as a failure of the handler
    that is running.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        stopping.set()
        for either in _STOPPING_SIGNALS:
            loop.remove_signal_handler(either)
            signal.signal(either, signal.SIG_DFL)
        # Not before: a second signal would be lost.
        log.info("%s: finishing running batches; a second signal kills the process", number.name)

    for number in _STOPPING_SIGNALS:
        loop.add_signal_handler(number, stop, number)
    return stopping
