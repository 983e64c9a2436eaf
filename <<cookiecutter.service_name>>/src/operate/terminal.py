"""What every command of the command line rests on: settings, a loop, a connection, an end."""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any, TypeVar, cast

import asyncpg
import typer
from aiokafka.errors import KafkaError
from alembic.util import CommandError
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json
from pydantic_settings import BaseSettings
from sqlalchemy.exc import DBAPIError

from pipeline import redaction
from pipeline.consume.inbox_coverage import RemembersTooLittle
from pipeline.errors import (
    StoreUnavailable,
    as_raised,
    describe_error,
    format_traceback,
    is_infrastructure,
    sqlstate_of,
    summarize_error,
)
from pipeline.observe import logs
from pipeline.observe.health import CannotListen
from pipeline.servers import guard
from pipeline.servers.database import autocommitting, create_engine
from pipeline.servers.revisions import NotMigrated
from pipeline.service import Misconfigured, Service
from pipeline.settings import Settings, is_secret, mistakes, variables

from .operations import Refused

log = logging.getLogger(__name__)

Json = Annotated[bool, typer.Option("--json", help="for programs: a line each")]

Tell = Callable[[str], None]
"""Says to a person what has gone wrong."""

PREFIX = "PIPELINE_"
"""Of every variable that is a setting, of the engine or of a package beside it."""

_AS_JSON = TypeAdapter(bool | None)

_NOT_LET_IN = ("28", "3D", "42501")
"""How PostgreSQL's errors begin for a wrong user, password or name of the database; and the one for
what the user may not do."""


SettingsT = TypeVar("SettingsT", bound=BaseSettings)


class Away(Exception):
    """A server can't be used; the text names it, and the variable that says where it is."""


class Program(typer.Typer):
    """A command line whose process writes no secrets, whatever ends it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command that the process was started with."""
        secret = {name for name, field in variables().items() if is_secret(field)}
        redaction.learn(os.environ, secret)
        logging.captureWarnings(True)
        guard.watch_coroutines()
        logs.configure(level="WARNING", json=False)
        try:
            return super().__call__(*args, **kwargs)
        except Exception as error:
            typer.echo(format_traceback(error), err=True)
            sys.exit(1)


def _tell(text: str) -> None:
    typer.echo(redaction.redact_error(text), err=True)


def read_settings(service: Service, tell: Tell = _tell) -> Settings:
    """Read the settings, or say everything that is wrong with them and those of the packages."""
    return read_settings_and(service, Settings, tell)[0]


def read_settings_and(
    service: Service, others: type[SettingsT], tell: Tell = _tell
) -> tuple[Settings, SettingsT]:
    """Read the settings and others, or say everything that is wrong with all of them."""
    kinds: list[type[BaseSettings]] = [Settings, *service.settings, others]
    found: dict[type[BaseSettings], BaseSettings] = {}
    wrong: list[str] = []
    for kind in dict.fromkeys(kinds):
        try:
            found[kind] = kind()
        except ValidationError as error:
            wrong += mistakes(error, kind)
    wrong += _unknown_variables()
    if wrong:
        tell("\n  ".join(("The settings are wrong:", *wrong)))
        raise typer.Exit(2)
    return cast(Settings, found[Settings]), cast(SettingsT, found[others])


def _unknown_variables() -> Iterator[str]:
    """Say which variables look like settings and are nobody's: mistyped, they would do nothing."""
    known = variables()
    for name in sorted(os.environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            # Without what all have in common, by which all are near.
            rests = [one.removeprefix(PREFIX) for one in known]
            near = get_close_matches(name.upper().removeprefix(PREFIX), rests, n=1)
            hint = f"did you mean {PREFIX}{near[0]}?" if near else "unset it"
            yield f"{name}: there is no such setting; {hint}"


def tell_program(*found: object) -> None:
    """Write what was found, or done, for programs: a line of JSON for each."""
    for one in found:
        typer.echo(to_json(one))


@contextmanager
def serving() -> Iterator[Tell]:
    """Let the log have what ends a process that serves, also what nobody expected.

    Lends what tells a sentence, in a line of the log if that is JSON. So the log begins here,
    before the settings are read.
    """
    try:
        given = {name.upper(): value for name, value in os.environ.items()}
        as_json = _AS_JSON.validate_python(given.get(f"{PREFIX}LOG_JSON"))
    except ValidationError:  # which is told with the other mistakes
        as_json = None
    logs.configure(level="INFO", json=as_json)
    say = partial(log.critical, "%s") if logs.is_json(as_json) else _tell

    def tell(text: str) -> None:
        error = sys.exc_info()[1]
        # A sentence that is not ours says little, if not where.
        if isinstance(error, OSError) and not isinstance(error, StoreUnavailable):
            log.critical("the system has ended the process", exc_info=error)
        say(text)

    try:
        yield tell
    except typer.Exit:
        raise
    except Exception as error:
        log.critical("what nobody expected has ended the process", exc_info=error)
        raise typer.Exit(1) from error


def run_to_end(work: Coroutine[Any, Any, None], tell: Tell = _tell) -> None:
    """Run to the end on uvloop where there is one."""
    with in_a_sentence(tell), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(work)


@contextmanager
def in_a_sentence(tell: Tell = _tell) -> Iterator[None]:
    """End the command with exit code 1 and one sentence when it fails as one may expect."""
    try:
        yield
    except (Away, StoreUnavailable) as error:  # they say whose outage it is
        tell(summarize_error(error))
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
        tell(describe_error(error))
    except (DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        state = sqlstate_of(error) or ""
        if state.startswith(_NOT_LET_IN):
            tell(f"PIPELINE_DATABASE_URL: {summarize_error(as_raised(error))}")
        elif is_infrastructure(error):
            tell(f"PostgreSQL: {describe_error(error)}")
        else:
            raise
    else:
        return
    raise typer.Exit(1)


def of_postgresql(settings: Settings) -> AbstractContextManager[None]:
    """Say that it is PostgreSQL that fails, unless another server does. Raises `Away`."""
    return _of(
        f"{settings.postgresql} (PIPELINE_DATABASE_URL)",
        lambda error: (
            is_infrastructure(error) and not isinstance(error, StoreUnavailable | KafkaError)
        ),
    )


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
        raise Away(f"{server}: {describe_error(error)}") from error


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
