"""What every command of the command line rests on: settings, a loop, a connection, an end."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

import asyncpg
import typer
from aiokafka.errors import KafkaError
from alembic.util import CommandError
from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError

from .database import autocommitting, create_engine
from .failures import is_infrastructure, named
from .health import CannotListen
from .horizon import RemembersTooLittle
from .operations import Refused
from .retention import NotMigrated
from .service import Misconfigured, Service
from .settings import Settings

_NOT_LET_IN = ("28", "3D")
"""PostgreSQL's error classes for a wrong user, password or name of the database."""


class Away(Exception):
    """A server can't be used; the text names it, and the variable that says where it is."""


def read_settings() -> Settings:
    """Read the settings, or say everything that is wrong with them."""
    try:
        return Settings()
    except ValidationError as error:
        typer.echo("The settings are wrong:", err=True)
        for mistake in error.errors(include_url=False, include_input=False):
            name = "_".join(str(part) for part in mistake["loc"]).upper()
            text = mistake["msg"].removeprefix("Value error, ")
            if mistake["type"] == "missing":
                text = "is not set (for the servers of `make up`: `dev/stack.py env` prints it)"
            typer.echo(f"  {f'PIPELINE_{name}: ' if name else ''}{text}", err=True)
        raise typer.Exit(2) from None


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end on uvloop where there is one."""
    with in_a_sentence(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(work)


@contextmanager
def in_a_sentence() -> Iterator[None]:
    """End the command with exit code 1 and one sentence when it fails as one may expect."""
    try:
        yield
    except Away as error:
        typer.echo(error, err=True)
    except (
        Misconfigured,
        NotMigrated,
        CannotListen,
        RemembersTooLittle,
        CommandError,
        KafkaError,
        Refused,
        OSError,
    ) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
    except (DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        state = getattr(getattr(error, "orig", error), "sqlstate", None) or ""
        if state.startswith(_NOT_LET_IN):
            typer.echo(f"PIPELINE_DATABASE_URL: {getattr(error, 'orig', error)}", err=True)
        elif is_infrastructure(error):
            typer.echo(f"PostgreSQL: {named(error)}", err=True)
        else:
            raise
    else:
        return
    raise typer.Exit(1)


def of_postgresql(settings: Settings) -> AbstractContextManager[None]:
    """Say that it is PostgreSQL that fails. Raises `Away`."""
    return _of(f"{settings.postgresql} (PIPELINE_DATABASE_URL)", is_infrastructure)


def of_kafka(settings: Settings) -> AbstractContextManager[None]:
    """Say that it is Kafka that fails. Raises `Away`."""
    return _of(
        f"{settings.kafka} (PIPELINE_KAFKA_BOOTSTRAP_SERVERS)",
        lambda error: isinstance(error, KafkaError | OSError),
    )


@contextmanager
def _of(server: str, is_its: Callable[[Exception], bool]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # A pipe is broken where nobody reads any more what a command writes.
        if isinstance(error, BrokenPipeError) or not is_its(error):
            raise
        raise Away(f"{server}: {named(error)}") from error


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32" or sys.implementation.name != "cpython":
        return None
    import uvloop

    return uvloop.new_event_loop


@asynccontextmanager
async def connected(service: Service, settings: Settings) -> AsyncIterator[asyncpg.Connection]:
    """Lend a connection on which every statement is a transaction of its own."""
    engine = create_engine(settings, name=service.name)
    try:
        with of_postgresql(settings):
            async with autocommitting(engine) as connection:
                yield connection
    except (asyncpg.InvalidSchemaNameError, asyncpg.UndefinedTableError):
        raise NotMigrated from None
    finally:
        await engine.dispose()
