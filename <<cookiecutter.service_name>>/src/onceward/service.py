"""What a service consists of, as its `main.py` declares."""

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from pydantic_settings import BaseSettings
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import configure_mappers

from onceward.apply.claim_check import ClaimCheck
from onceward.apply.encryption import Encryption
from onceward.apply.writer import Writer
from onceward.errors import OncewardError, StoreUnavailable, describe_error, summarize_error
from onceward.events.event import Unpublishable, declared_events, is_final
from onceward.handlers.aggregate import locking
from onceward.handlers.registry import TIMEOUT, Handlers
from onceward.handlers.resources import OpenResources, ResourceTypes, name_of
from onceward.retention.archive import Archive
from onceward.retry.workers import BacklogWorkers
from onceward.servers import peers
from onceward.servers.database import create_engine
from onceward.servers.retrying import Retrying
from onceward.servers.tasks import in_background

from .server_settings import over_http
from .settings import Settings, WriterSettings

log = logging.getLogger(__name__)


class Misconfigured(OncewardError):
    """The service's code and its settings contradict each other."""


@dataclass(frozen=True)
class Service:
    """A service: its name, its handlers and its tables.

    `name` is the consumer group, the `source` of the events published (as `/name`) and the name in
    traces and logs. A new name is a new group, which starts from the beginning; its database is
    refused until its schema has the new name.
    """

    name: str
    handlers: Handlers
    metadata: MetaData
    package: str | None = None
    """The package of its code, `__package__` in its `main.py`; names the service's loggers."""
    archive: Archive | None = None
    """Where days of the outbox go before they are dropped; None: nowhere."""
    claims: Callable[[str, Settings], ClaimCheck | None] | None = None
    """Opens the claim check of the service of this name; None if the settings name no object store.
    Raises `Misconfigured`."""
    encryption: Encryption | None = None
    """Encrypts payloads in tables; None: they are stored as they are."""
    workers: Sequence[type[BacklogWorkers]] = ()
    """Those of optional packages, for handlers that work outside of a transaction."""
    settings: Sequence[type[BaseSettings]] = ()
    """Settings of optional packages, which every command reads with the engine's, so that all
    mistakes are reported at once."""
    resources: OpenResources | None = None
    """Opens what handlers and calls take next to events, such as clients of other services.

    An `@asynccontextmanager` function without arguments, whose annotation names the dataclass that
    it yields. Each process that calls functions of the service opens it before the first call, and
    closes it after the last. A parameter after those of the engine takes the one field that has the
    same annotation; if none has it, or several do, the service does not start. As long as a server
    can't be reached (`OSError`, such as `ConnectionError` and `TimeoutError`, or an error of
    PostgreSQL or Kafka that says so) the process is not ready, and opens it again; other errors end
    the process."""

    def check(self, settings: Settings) -> None:
        """Raise `Misconfigured` with all contradictions."""
        # One may come again: of a mapper that fails, by each class that is loaded.
        if wrong := dict.fromkeys(self._contradictions(settings)):
            raise Misconfigured("\n".join(wrong))

    def _contradictions(self, settings: Settings) -> Iterator[str]:
        checks: list[Callable[[], object]]
        checks = [one.check for one in (self.archive, self.encryption) if one is not None]
        if self.claims is not None:
            checks.append(partial(self.claims, self.name, settings))
        loaded = {each.entity for one in self.handlers for each in one.loads}
        # All subclasses of what is loaded are imported now.
        checks += [configure_mappers, *(partial(locking, one) for one in sorted(loaded, key=str))]
        for check in checks:
            try:
                check()
            except Misconfigured as error:
                yield str(error)
            except Exception as error:  # also of the service's code, in a relationship
                yield describe_error(error)
        yield from self._resource_faults()
        if self.handlers.callers and not self.workers:
            yield (
                f"{min(self.handlers.callers)!r} is an effect, and no worker would make its calls:"
                " write Service(…, workers=[EffectWorkers])"
            )
        if settings.dead_letter_topic in self.handlers.topics:
            yield (
                f"the service reads {settings.dead_letter_topic}, and would send its dead letters"
                " there for ever: let PIPELINE_DEAD_LETTER_TOPIC name another topic"
            )
        for name in self.handlers.replaced:
            yield (
                f"a decorator above that of {name} would never be used: the function was registered"
                " before. Write @handlers… above all others"
            )
        for one in self.handlers:
            # The default of a handler is cut off by a shorter limit of the transaction.
            is_longer = one.timeout > settings.transaction_timeout and one.timeout != TIMEOUT
            if is_longer and one.mode != "call":
                yield (
                    f"timeout= of consumer {one.consumer!r} has {one.timeout:g} s, and"
                    f" PIPELINE_TRANSACTION_TIMEOUT ends its transaction after"
                    f" {settings.transaction_timeout:g} s: shorten the first or raise the second"
                )
        if unread := self.handlers.demanding - self.handlers.topics:
            yield f"demands_types=True of {min(unread)!r}: no handler reads this topic"

    def _resource_faults(self) -> Iterator[str]:
        try:
            yield from ResourceTypes.of(self.resources).mismatches(self.handlers)
        except TypeError as error:
            yield str(error)

    @asynccontextmanager
    async def opened(self, report: Callable[[str], None] = log.debug) -> AsyncIterator["Service"]:
        """Yield the service whose handlers have the resources that they take, until the end.

        While a server can't be reached they are opened again; `report` is called with the reason to
        wait. Raises `Misconfigured` if they are not what handlers take, and other errors of opening
        and closing them.
        """
        if wrong := [*self._resource_faults()]:
            raise Misconfigured("\n".join(wrong))
        open_resources = self.resources
        if open_resources is None:
            yield self
            return
        report("the resources are not open yet")
        opening = Retrying("opening resources", name_of(open_resources), report=report)
        async with AsyncExitStack() as stack:
            resources = await opening(lambda: stack.enter_async_context(open_resources()))
            bind = partial(ResourceTypes.of(open_resources).bind, resources)
            handlers = self.handlers.changed(lambda one: one.bound(bind))
            yield replace(self, handlers=handlers, resources=None)

    async def open_codecs(self) -> None:
        """Prepare the codecs of topics for the events that the service publishes there.

        Raises `Misconfigured` for events that can't be published, and `StoreUnavailable` if some of
        the topics are still closed.
        """
        for topic in [*self.handlers.closed]:
            codec = self.handlers.codecs[topic]
            events = [one for one in declared_events() if one.__event_topic__ == topic]
            final = [one for one in events if is_final(one)]
            try:
                if final:
                    await codec.open(topic, final)
                for base in {*events} - {*final}:
                    with suppress(Unpublishable):  # an error only if it is published
                        await codec.open(topic, [base])
                self.handlers.closed.pop(topic, None)
            except StoreUnavailable as error:
                self.handlers.closed[topic] = summarize_error(error)
            except Unpublishable as error:
                raise Misconfigured(f"topic {topic!r}: {error}") from error
        for reason in self.handlers.closed.values():
            raise StoreUnavailable(reason)

    @asynccontextmanager
    async def writer(self, settings: Settings | None = None) -> AsyncIterator[Writer]:
        """Yield a writer for an HTTP API or a job, with a connection pool of its own.

        By default the settings are read from the environment. It needs the database, and no Kafka.
        While the codec of a topic can't be opened, events for this topic raise `StoreUnavailable`.
        Its `write` raises `WrongDatabase` if the database is another service's, and `NotAdopted` if
        it may be a copy. Create one for each process. Raises `Misconfigured` for events that can't
        be published.
        """
        settings = settings or WriterSettings()
        async with self.publishing(settings) as engine:
            yield Writer(
                engine,
                source=self.source,
                max_event_bytes=settings.max_event_bytes,
                handlers=self.handlers,
                claims=self.claims and self.claims(self.name, settings),
                encryption=self.encryption,
                release=settings.release,
            )

    @asynccontextmanager
    async def publishing(self, settings: Settings) -> AsyncIterator[AsyncEngine]:
        """Yield a connection pool, while the codecs of topics are opened beside.

        To connect raises `WrongDatabase` and `NotAdopted`, as `cluster.gate`.
        """
        with suppress(StoreUnavailable):
            await self.open_codecs()
        opening = Retrying("opening codecs", "codecs", report=log.debug)
        engine = create_engine(settings, name=self.name)
        try:
            async with in_background(opening(self.open_codecs)):
                yield engine
        finally:
            await engine.dispose()

    def plaintext(self, settings: Settings) -> Iterable[tuple[str, str]]:
        """Return a fault and advice for each host beyond loopback that TLS does not secure.

        PostgreSQL and the brokers are those to which this process has connected.
        """
        of_packages = (over_http(kind()) for kind in self.settings)
        return dict.fromkeys(chain(peers.unsecured.items(), over_http(settings), *of_packages))

    def loggers(self, settings: Settings) -> Iterator[str]:
        """Yield the loggers that are configured beside the engine's."""
        yield from filter(None, (self.package, *(settings.log_loggers or "").split(",")))

    @property
    def source(self) -> str:
        """The CloudEvents source of what the service publishes."""
        return f"/{self.name}"

    @property
    def topics(self) -> frozenset[str]:
        """Every topic that the service reads or declares events for."""
        return self.handlers.topics | self.declared_topics

    @property
    def declared_topics(self) -> frozenset[str]:
        """Topics that the service declares events for."""
        return frozenset(
            event.__event_topic__ for event in declared_events() if event.__event_topic__
        )
