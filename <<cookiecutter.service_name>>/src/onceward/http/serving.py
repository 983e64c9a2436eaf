"""The API's server: it listens, and ends by a signal as the service's other processes do."""

import asyncio
import logging
from functools import partial

from fastapi import FastAPI

from onceward import Service
from onceward.http_server.server import Server
from onceward.observe.health import Health, listen
from onceward.observe.watchdog import watch_calls
from onceward.runtime import process
from onceward.servers import revisions
from onceward.servers.database import autocommitting, create_engine
from onceward.servers.guard import stack_of
from onceward.servers.retrying import Retrying
from onceward.servers.tasks import in_background
from onceward.settings import Settings

from .settings import HttpSettings

log = logging.getLogger(__name__)

_PART = "api"
_GRACE_SHARE = 0.5
"""Share of the shutdown grace for requests that are being answered."""


async def serve(app: FastAPI, service: Service, settings: Settings) -> None:
    """Serve the API until SIGTERM or SIGINT.

    Raises `CannotListen`, `NotMigrated` and `Misconfigured`.
    """
    http = HttpSettings()
    service.check(settings)
    async with process(service, settings) as (health, stopping):
        health.not_ready(_PART, "the schema is not checked yet")
        grace = round(_GRACE_SHARE * settings.shutdown_grace) or 1
        server = Server(app, grace=grace)
        bind = partial(listen, what="the API", prefix="PIPELINE_HTTP")
        listener, url = await asyncio.to_thread(bind, http.host, http.port)
        log.info("the API is at %s", url)
        with listener:
            async with (
                in_background(server.serve([listener])) as serving,
                in_background(_check(service, settings, health, stopping, server)) as checking,
                in_background(watch_calls(stack_of, settings.hang_timeout)),
            ):
                stop = asyncio.create_task(stopping.wait())
                await asyncio.wait({serving, checking, stop}, return_when=asyncio.FIRST_COMPLETED)
                stop.cancel()
                server.should_exit = True
                if server.has_started.is_set():
                    await asyncio.wait({serving})


async def _check(
    service: Service, settings: Settings, health: Health, stopping: asyncio.Event, server: Server
) -> None:
    """Report readiness when the schema is checked and the application has started, which opens the
    service's resources, and wait for the end. Raises `NotMigrated`."""
    migrations = revisions.load_migrations()
    engine = create_engine(settings, name=service.name)

    async def check() -> None:
        async with autocommitting(engine) as connection:
            await revisions.check(connection, migrations)

    try:
        await Retrying(
            _PART,
            settings.postgresql,
            report=lambda reason: health.not_ready(_PART, reason),
        )(check)
    finally:
        await engine.dispose()
    health.not_ready(_PART, "the application has not started yet: the log says what it waits for")
    await server.has_started.wait()
    health.ready(_PART)
    await stopping.wait()
