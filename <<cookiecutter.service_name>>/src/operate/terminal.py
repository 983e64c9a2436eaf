"""What commands rest on: settings, an event loop, a connection, errors as one sentence."""

import asyncio
import inspect
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from inspect import Parameter
from typing import Annotated, Any, cast

import asyncpg
import typer
from aiokafka.errors import KafkaError
from alembic.util import CommandError
from pydantic import TypeAdapter, ValidationError
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

from .errors import NOT_LET_IN, Refused, Unavailable

log = logging.getLogger(__name__)

Json = Annotated[bool, typer.Option("--json", help="for programs: a line each")]

Report = Callable[[str], None]
"""Reports an error to a person, or to the log."""

PREFIX = "PIPELINE_"
"""Prefix of every variable that is a setting, of the engine or of an optional package."""

_AS_JSON = TypeAdapter(bool | None)

_EXPECTED = (
    Misconfigured,
    NotMigrated,
    CannotListen,
    RemembersTooLittle,
    CommandError,
    KafkaError,
    Refused,
    OSError,
)
"""Errors whose text alone tells an operator what to do."""


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


@dataclass(frozen=True)
class Invocation:
    """What a command is run with."""

    service: Service
    settings: Settings
    as_json: bool
    """Whether standard output is for programs."""

    def connected(self) -> AbstractAsyncContextManager[asyncpg.Connection]:
        """Lend a connection on which every statement is a transaction of its own."""
        return connected(self.service, self.settings)

    def say(self, text: str) -> None:
        """Write a sentence for people: beside standard output where that is for programs."""
        typer.echo(text, err=self.as_json)

    def confirm(self, question: str) -> None:
        """Ask, and go on only after a yes. Raises `typer.Abort`."""
        if not typer.confirm(question, err=True):
            raise typer.Abort


def service_of(context: typer.Context) -> Service:
    """Return the service whose command line was called."""
    return cast(Service, context.obj)


Operation = Callable[..., Coroutine[Any, Any, None]]


def operation(
    app: typer.Typer, name: str | None = None, *, example: str, **given: object
) -> Callable[[Operation], Operation]:
    """Register an asynchronous function as a command that has `--json`.

    Its first parameter is the `Invocation`. The parameters in `given` are no options: they get
    the value given here. A dataclass given here becomes an option for each of its fields, and the
    parameter gets an instance.
    """

    def register(function: Operation) -> Operation:
        _, *parameters = inspect.signature(function).parameters.values()
        groups = {
            name: one for name, one in given.items() if isinstance(one, type) and is_dataclass(one)
        }

        def run(context: typer.Context, *, as_json: bool, **options: Any) -> None:
            values = dict(given)
            for parameter, kind in groups.items():
                names = [one.name for one in fields(kind)]
                values[parameter] = kind(**{name: options.pop(name) for name in names})
            service = service_of(context)
            invocation = Invocation(service, read_settings(service), as_json)
            run_to_end(function(invocation, **options, **values))

        options = [one for one in parameters if one.name not in given]
        for kind in groups.values():
            options += [
                Parameter(
                    one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type
                )
                for one in fields(kind)
            ]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context),
                *(one.replace(kind=Parameter.KEYWORD_ONLY) for one in options),
                Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Json),
            ]
        )
        called = name or function.__name__.replace("_", "-")
        app.command(called, help=inspect.getdoc(function), epilog=f"For example: {example}")(run)
        return function

    return register


def _report(text: str) -> None:
    typer.echo(redaction.redact_error(text), err=True)


def read_settings(
    service: Service, report: Report = _report, *others: type[BaseSettings]
) -> Settings:
    """Return the settings, or report everything that is wrong with them, the packages' and others'.

    After it each of these classes can be made of the environment.
    """
    kinds: list[type[BaseSettings]] = [Settings, *service.settings, *others]
    wrong: list[str] = []
    for kind in dict.fromkeys(kinds):
        try:
            kind()
        except ValidationError as error:
            wrong += mistakes(error, kind)
    wrong += _unknown_variables()
    if wrong:
        report("\n  ".join(("The settings are wrong:", *wrong)))
        raise typer.Exit(2)
    return Settings()


def _unknown_variables() -> Iterator[str]:
    """Yield a sentence for each variable that looks like a setting and has no effect."""
    known = variables()
    for name in sorted(os.environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            # Compared without the prefix, which makes all names similar.
            rests = [one.removeprefix(PREFIX) for one in known]
            near = get_close_matches(name.upper().removeprefix(PREFIX), rests, n=1)
            hint = f"did you mean {PREFIX}{near[0]}?" if near else "unset it"
            yield f"{name}: there is no such setting; {hint}"


@contextmanager
def serving() -> Iterator[Report]:
    """Log what ends a process that serves, unexpected errors too.

    Lends what reports a sentence: in a line of the log if that is JSON. The log begins here,
    before the settings are read.
    """
    try:
        given = {name.upper(): value for name, value in os.environ.items()}
        as_json = _AS_JSON.validate_python(given.get(f"{PREFIX}LOG_JSON"))
    except ValidationError:  # reported with the other mistakes in the settings
        as_json = None
    logs.configure(level="INFO", json=as_json)
    write = partial(log.critical, "%s") if logs.is_json(as_json) else _report

    def report(text: str) -> None:
        error = sys.exc_info()[1]
        # The text of an operating system's error says little without the place in the code.
        if isinstance(error, OSError) and not isinstance(error, StoreUnavailable):
            log.critical("the system has ended the process", exc_info=error)
        write(text)

    try:
        yield report
    except typer.Exit:
        raise
    except Exception as error:
        log.critical("an unexpected error has ended the process", exc_info=error)
        raise typer.Exit(1) from error


def run_to_end(work: Coroutine[Any, Any, None], report: Report = _report) -> None:
    """Run to the end, on uvloop where it is available."""
    with in_a_sentence(report), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(work)


@contextmanager
def in_a_sentence(report: Report = _report) -> Iterator[None]:
    """End the command with exit code 1 and one sentence after an expected error."""
    try:
        yield
    except BrokenPipeError:  # the output is not read any more, as by `| head`: Typer ends quietly
        raise
    except (Unavailable, StoreUnavailable) as error:  # their text names the server
        report(summarize_error(error))
    except _EXPECTED as error:
        report(describe_error(error))
    except (DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        state = sqlstate_of(error) or ""
        if state.startswith(NOT_LET_IN):
            report(f"PIPELINE_DATABASE_URL: {summarize_error(as_raised(error))}")
        elif is_infrastructure(error):
            report(f"PostgreSQL: {describe_error(error)}")
        else:
            raise
    else:
        return
    raise typer.Exit(1)


@contextmanager
def naming_servers(settings: Settings) -> Iterator[None]:
    """Name the server in errors of Kafka and of PostgreSQL. Raises `Unavailable`."""
    try:
        yield
    except (StoreUnavailable, BrokenPipeError):  # not an error of either
        raise
    except KafkaError as error:
        server = f"{settings.kafka} (PIPELINE_KAFKA_BOOTSTRAP_SERVERS)"
        raise Unavailable(f"{server}: {describe_error(error)}") from error
    except Exception as error:
        if not is_infrastructure(error):
            raise
        server = f"{settings.postgresql} (PIPELINE_DATABASE_URL)"
        raise Unavailable(f"{server}: {describe_error(error)}") from error


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
        with naming_servers(settings):
            async with autocommitting(engine) as connection:
                yield connection
    except (asyncpg.InvalidSchemaNameError, asyncpg.UndefinedTableError):
        raise NotMigrated from None
    except asyncpg.UndefinedColumnError as error:
        found = f"{describe_error(error)}: `service doctor` names what the database lacks"
        raise Refused(found) from None
    finally:
        await engine.dispose()
