"""The part of a process that makes partitions ahead, and runs a round of retention each hour."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from time import monotonic
from typing import TypeVar

import asyncpg
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine

from onceward.apply import inbox
from onceward.apply.claim_check import ClaimCheck
from onceward.errors import describe_error, is_infrastructure, is_of_the_database
from onceward.observe import metrics
from onceward.observe.health import Health
from onceward.servers import revisions
from onceward.servers.cluster import NotAdopted, check_brokers, is_ours
from onceward.servers.database import autocommitting
from onceward.servers.retrying import Retrying
from onceward.settings import Settings

from .archive import Archive, record_archiving
from .maintenance import begin_round, make_ahead, run_retention
from .partitions import NotOwner

log = logging.getLogger(__name__)

T = TypeVar("T")

_PART = "retention"
_AHEAD_SECONDS = 60.0
"""Longest time between two checks that partitions are there: messages would wait for one."""


class RetentionWorker:
    """Keeps partitions ahead of their use, and drops those that are too old."""

    def __init__(
        self,
        engine: AsyncEngine,
        settings: Settings,
        *,
        consumers: Collection[str],
        archive: Archive | None,
        claims: ClaimCheck | None,
        health: Health,
    ) -> None:
        """`consumers` are those that the process runs, to be registered at the inbox."""
        self._engine = engine
        self._settings = settings
        self._consumers = consumers
        self._archive = archive
        self._claims = claims
        self._health = health
        self._brokers: str | None = None

    async def start(
        self,
        declared: MetaData,
        migrations: ScriptDirectory | None,
        sharing: Callable[[str], Collection[str]],
        own: Callable[[asyncpg.Connection], Awaitable[tuple[T, str | None]]],
    ) -> T:
        """Return what `own` does, when the schema is checked and partitions are there.

        `declared` are the service's tables: warns of those without a migration, and of keys that
        are equal for all messages of a transaction if `sharing` returns consumers for their table.
        `own` raises if the database is not the service's; it also returns the brokers' id, which
        `run` stores wherever the database has none. No other part may begin before: columns or
        partitions may be missing. Raises `NotMigrated`.
        """

        async def begin(connection: asyncpg.Connection) -> None:
            await revisions.check(connection, migrations)
            for one in await revisions.lacking(connection, declared, migrations):
                log.warning("%s: %s", one, revisions.WRITE_MIGRATION)
            for table, one in await revisions.sharing(connection, declared):
                if consumers := sharing(table):
                    log.warning(
                        "%s is part of a unique key, and equal for all messages of a transaction:"
                        " these are tried one by one; register the handlers that add such rows"
                        " with own_transaction=True, which these consumers lack: %s",
                        one,
                        ", ".join(consumers),
                    )
            await self._prepare(connection, warns=True)

        self._health.not_ready(_PART, "schema, partitions and owner are not checked yet")
        await self._while_unavailable(begin)
        found, self._brokers = await self._while_unavailable(own)
        return found

    async def run(self) -> None:
        """Run until cancelled. An error of a round is logged; one of making ahead is raised.

        Nothing is made ahead while a round archives a day: that takes hours at most, and what is
        ahead suffices for days.
        """
        interval = self._settings.retention_interval
        round_at = 0.0
        while True:
            await self._while_unavailable(self._prepare)
            self._health.ready(_PART)
            if monotonic() >= round_at:
                round_at = monotonic() + interval
                await self._run_round()
            await asyncio.sleep(min(interval, _AHEAD_SECONDS))

    async def _run_round(self) -> None:
        try:
            async with autocommitting(self._engine) as connection:
                await record_archiving(connection, self._archive)
                # Processes take turns: half of the time, or one may come a moment too early.
                if await begin_round(connection, self._settings.retention_interval / 2):
                    await run_retention(connection, self._settings, archive=self._archive)
                    if self._claims is not None:
                        await self._claims.sweep(connection)
        except NotOwner as error:
            log.debug("left to another role: %s", error)
        except Exception as error:
            metrics.retention_failures.add(1)
            is_expected = is_infrastructure(error) or is_of_the_database(error)
            log.error(
                "a round of retention failed: %s",
                describe_error(error),
                exc_info=None if is_expected else error,
            )

    async def _prepare(self, connection: asyncpg.Connection, *, warns: bool = False) -> None:
        await make_ahead(connection, self._settings, warns=warns)
        if not await is_ours(connection):  # its data may have been replaced
            raise NotAdopted
        await check_brokers(connection, self._brokers, stores=True)
        if self._consumers:
            await inbox.register(connection, self._consumers, self._settings.release)

    async def _while_unavailable(self, work: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
        """Repeat the work while servers are unavailable, which readiness reports."""

        async def connected() -> T:
            async with autocommitting(self._engine) as connection:
                return await work(connection)

        return await Retrying(
            _PART,
            self._settings.postgresql,
            report=lambda reason: self._health.not_ready(_PART, reason),
        )(connected)
