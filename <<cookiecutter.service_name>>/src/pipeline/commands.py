"""The command line `service`."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, for_code
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError

from .database import autocommitting, create_engine
from .health import CannotListen
from .retention import NotMigrated, make_ahead
from .runtime import Part, run
from .service import Service
from .settings import Settings

_ALEMBIC = Path("alembic.ini")
_TOPIC_EXISTS = 36
"""Kafka's error code TOPIC_ALREADY_EXISTS."""
_NOT_LET_IN = ("28", "3D")
"""PostgreSQL's error classes for a wrong user, password or name of the database."""


def command_line(service: Service) -> Callable[[], None]:
    """Return the function behind the console script `service`."""
    app = typer.Typer(
        name="service",
        help=f"The service {service.name}.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    topics = typer.Typer(help="Kafka topics of the service.", no_args_is_help=True)
    app.add_typer(topics, name="topics")

    @app.command("run")
    def run_all() -> None:
        """Consume, relay and keep house, in one process."""
        _run(run(service, _settings(), Part.CONSUME | Part.RELAY))

    @app.command()
    def consume() -> None:
        """Consume and keep house, without a relay."""
        _run(run(service, _settings(), Part.CONSUME))

    @app.command()
    def relay() -> None:
        """Publish the outbox and keep house, without consuming."""
        _run(run(service, _settings(), Part.RELAY))

    @app.command()
    def migrate() -> None:
        """Bring the database to the newest schema, the engine's and yours."""
        settings = _settings()
        with _in_a_sentence():
            if not _ALEMBIC.exists():
                raise FileNotFoundError(f"no {_ALEMBIC} here: run this in the service's folder")
            command.upgrade(Config(_ALEMBIC), "heads")
        _run(_make_ahead(service, settings))

    @topics.command("create")
    def create(
        partitions: Annotated[int, typer.Option(min=1, help="partitions of a new topic")] = 8,
        replicas: Annotated[int, typer.Option(min=1, help="replicas of each partition")] = 1,
    ) -> None:
        """Create the topics that are missing, for development; those that exist are left alone."""
        _run(_create_topics(_settings(), sorted(service.topics), partitions, replicas))

    return app


def _settings() -> Settings:
    """Read the settings, or say everything that is wrong with them."""
    try:
        return Settings()
    except ValidationError as error:
        typer.echo("The settings are wrong:", err=True)
        for mistake in error.errors(include_url=False, include_input=False):
            name = "_".join(str(part) for part in mistake["loc"]).upper()
            text = mistake["msg"].removeprefix("Value error, ")
            typer.echo(f"  {f'PIPELINE_{name}: ' if name else ''}{text}", err=True)
        raise typer.Exit(2) from None


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end on uvloop where there is one."""
    with _in_a_sentence(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(work)


@contextmanager
def _in_a_sentence() -> Iterator[None]:
    """End the command with exit code 1 and one sentence when it fails as one may expect."""
    try:
        yield
    except (NotMigrated, CannotListen, CommandError, KafkaError, OSError) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
    except DBAPIError as error:
        state = getattr(error.orig, "sqlstate", None) or ""
        if not state.startswith(_NOT_LET_IN):
            raise
        typer.echo(f"PIPELINE_DATABASE_URL: {error.orig}", err=True)
    else:
        return
    raise typer.Exit(1)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32" or sys.implementation.name != "cpython":
        return None
    import uvloop

    return uvloop.new_event_loop


async def _make_ahead(service: Service, settings: Settings) -> None:
    engine = create_engine(settings, name=service.name)
    try:
        async with autocommitting(engine) as connection:
            await make_ahead(connection, settings)
    finally:
        await engine.dispose()


async def _create_topics(
    settings: Settings, names: list[str], partitions: int, replicas: int
) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.kafka_bootstrap_servers)
    try:
        await admin.start()
        # aiokafka does not raise for a topic that could not be made: look at the codes.
        answer = await admin.create_topics([NewTopic(name, partitions, replicas) for name in names])
        for name, code, *_ in answer.topic_errors:
            if code not in (0, _TOPIC_EXISTS):
                raise for_code(code)(f"topic {name} was not created")
            typer.echo(f"{name}: {'exists' if code else f'created with {partitions} partitions'}")
    finally:
        await admin.close()
