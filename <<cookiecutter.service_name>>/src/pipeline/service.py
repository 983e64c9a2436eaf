"""What a service consists of, as its `main.py` declares."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pydantic_settings import BaseSettings
from sqlalchemy import MetaData

from pipeline.apply.claim_check import ClaimCheck
from pipeline.apply.writer import Writer
from pipeline.events.event import Unpublishable, declared_events
from pipeline.handlers.registry import Handlers
from pipeline.retention.archive import Archive
from pipeline.retry.workers import BacklogWorkers
from pipeline.servers.database import create_engine

from .settings import Settings, WriterSettings


class Misconfigured(Exception):
    """The service's code and its settings contradict each other."""


@dataclass(frozen=True)
class Service:
    """A service: its name, its handlers and its tables.

    `name` is the consumer group, the `source` of the events published (as `/name`) and the name in
    traces and logs. A new name is a new group, which starts from the beginning.
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
    workers: Sequence[type[BacklogWorkers]] = ()
    """Those of optional packages, for handlers that work outside of a transaction."""
    settings: Sequence[type[BaseSettings]] = ()
    """Settings of optional packages, which every command reads with the engine's, so that all
    mistakes are reported at once."""

    def check(self, settings: Settings) -> None:
        """Raise `Misconfigured` with all contradictions."""
        if wrong := list(self._contradictions(settings)):
            raise Misconfigured("\n".join(wrong))

    def _contradictions(self, settings: Settings) -> Iterator[str]:
        if self.archive is not None:
            try:
                self.archive.check()
            except Misconfigured as error:
                yield str(error)
        if self.claims is not None:
            try:
                self.claims(self.name, settings)
            except Misconfigured as error:
                yield str(error)
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
        if unread := self.handlers.demanding - self.handlers.topics:
            yield f"demands_types=True of {min(unread)!r}: no handler reads this topic"

    async def open_codecs(self) -> None:
        """Prepare the codecs of topics for the events that the service publishes there.

        Raises `Misconfigured` for events that can't be published, and `StoreUnavailable`.
        """
        events = [*declared_events()]
        for topic, codec in self.handlers.codecs.items():
            try:
                await codec.open(topic, [one for one in events if one.event_topic == topic])
            except Unpublishable as error:
                raise Misconfigured(f"topic {topic!r}: {error}") from error

    @asynccontextmanager
    async def writer(self, settings: Settings | None = None) -> AsyncIterator[Writer]:
        """Yield a writer for an HTTP API or a job, with a connection pool of its own.

        By default the settings are read from the environment. It needs the database, and no Kafka.
        Create one for each process. Raises `Misconfigured` for events that can't be published.
        """
        settings = settings or WriterSettings()
        await self.open_codecs()
        engine = create_engine(settings, name=self.name)
        try:
            yield Writer(
                engine,
                source=self.source,
                max_event_bytes=settings.max_event_bytes,
                handlers=self.handlers,
                claims=self.claims and self.claims(self.name, settings),
            )
        finally:
            await engine.dispose()

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
        return frozenset(event.event_topic for event in declared_events() if event.event_topic)
