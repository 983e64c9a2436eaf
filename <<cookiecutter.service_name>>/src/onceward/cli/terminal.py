"""What commands share: settings, event loop, connection, and errors as one sentence."""

import asyncio
import inspect
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from inspect import Parameter
from typing import Annotated, Any, TypeVar, cast

import asyncpg
import typer
from aiokafka.errors import KafkaError
from alembic.util import CommandError
from pydantic import TypeAdapter, ValidationError
from pydantic_settings import BaseSettings
from sqlalchemy.exc import DBAPIError

from onceward import redaction
from onceward.consume.inbox_coverage import RemembersTooLittle
from onceward.errors import (
    StoreUnavailable,
    as_raised,
    describe_error,
    format_traceback,
    is_access_denied,
    is_infrastructure,
    is_of_a_server,
    summarize_error,
)
from onceward.observe import logs, watchdog
from onceward.observe.health import CannotListen
from onceward.servers import guard, revisions
from onceward.servers.cluster import gate
from onceward.servers.database import Check, autocommitting, create_engine
from onceward.service import Misconfigured, Service
from onceward.settings import Settings, is_secret, mistakes, variables

from .errors import OutputFailed, Refused
from .output import interruptible, print_json, standard_streams, write

log = logging.getLogger(__name__)

T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="write JSON, one line for each item")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="only report what would change")]
Limit = Annotated[int, typer.Option(min=1, max=100_000, help="largest number to list")]
Yes = Annotated[bool, typer.Option("--yes", help="do not ask for confirmation")]

Report = Callable[[str], None]
"""Reports an error, to standard error or to the log."""

PREFIX = "PIPELINE_"
"""Prefix of every variable that is a setting, of the engine or of an optional package."""

_TASKS_SECONDS = 1.0
"""Time for tasks that the work of a command leaves behind, once they are cancelled."""

_AS_JSON = TypeAdapter(bool | None)

_EXPECTED = (
    Misconfigured,
    revisions.NotMigrated,
    CannotListen,
    RemembersTooLittle,
    CommandError,
    KafkaError,
    Refused,
    OSError,
)
"""Errors whose text is enough for an operator."""


class Program(typer.Typer):
    """A command line that removes secrets from what it writes, also after an unexpected error."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command of the process's arguments."""
        secret = {name for name, field in variables().items() if is_secret(field)}
        redaction.learn(os.environ, secret)
        with standard_streams():
            logging.captureWarnings(True)
            guard.watch_coroutines()
            logs.configure(level="WARNING", json=False)
            if path := revisions.unreadable():
                user = f"the user {os.geteuid()}, who runs this"
                write(f"{path} can't be read by {user}: chmod -R a+rX {path}", err=True)
                sys.exit(1)
            try:
                return super().__call__(*args, **kwargs)
            except (OutputFailed, OSError) as error:  # typer writes the help by itself
                if not isinstance(error.__cause__, BrokenPipeError):  # such as of `head`
                    write(f"standard output can't be written, changes are kept: {error}", err=True)
            except Exception as error:
                write(format_traceback(error), err=True)
            sys.exit(1)

    def run_process(self) -> None:
        """Run the command, and end the process within four seconds after it."""
        try:
            self()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            threading.Thread(target=watchdog.end_late, args=(code,), daemon=True).start()
            raise


@dataclass(frozen=True)
class Invocation:
    """The service, settings and output format of one call of a command."""

    service: Service
    settings: Settings
    as_json: bool

    @asynccontextmanager
    async def connected(self, check: Check = gate) -> AsyncIterator[asyncpg.Connection]:
        """Open a connection, where each statement commits. A copy is refused by the default."""
        engine = create_engine(self.settings, name=self.service.name, check=check)
        try:
            with naming_servers(self.settings):
                async with autocommitting(engine) as connection:
                    yield connection
        except (asyncpg.InvalidSchemaNameError, asyncpg.UndefinedTableError):
            raise revisions.NotMigrated from None
        except asyncpg.UndefinedColumnError as error:
            found = f"{describe_error(error)}: `service doctor` names what the database lacks"
            raise Refused(found) from None
        finally:
            await engine.dispose()

    def say(self, text: str) -> None:
        """Write a line for people: to standard output, with `--json` to standard error."""
        write(text, err=self.as_json)

    def answer(self, *values: object, lines: Iterable[str | bytes] = ()) -> None:
        """Write values as JSON with `--json`, else lines for people."""
        if self.as_json:
            print_json(*values)
        else:
            for line in lines:
                write(line)

    def confirm(self, question: str) -> None:
        """Ask a question. Raises `typer.Abort` unless the answer is yes, and `Refused` without a
        terminal that gives one."""
        try:
            with interruptible():
                typer.confirm(redaction.harmless(question), abort=True, err=True)
        except typer.Abort:
            if sys.stdin.isatty():
                raise
            raise Refused("nothing was done: without a terminal, give --yes") from None


def service_of(context: typer.Context) -> Service:
    """Return the service whose command line was called."""
    return cast(Service, context.obj)


Operation = Callable[..., Coroutine[Any, Any, None]]


def operation(
    app: typer.Typer, name: str | None = None, *, example: str, **given: object
) -> Callable[[Operation], Operation]:
    """Register an asynchronous function as a command that has `--json`.

    Its first parameter is the `Invocation`. A parameter in `given` is not an option and always
    gets that value; but a dataclass in `given` becomes one option for each of its fields, and the
    parameter gets an instance of it.
    """

    def register(function: Operation) -> Operation:
        _, *parameters = inspect.signature(function).parameters.values()
        groups = {
            name: (one, inspect.signature(one).parameters)
            for name, one in given.items()
            if isinstance(one, type) and is_dataclass(one)
        }

        def run(context: typer.Context, *, as_json: bool, **options: Any) -> None:
            values = dict(given)
            for parameter, (kind, names) in groups.items():
                values[parameter] = kind(**{name: options.pop(name) for name in names})
            service = service_of(context)
            invocation = Invocation(service, read_settings(service), as_json)
            run_to_end(function(invocation, **options, **values))

        keyword = Parameter.KEYWORD_ONLY
        options = [one for one in parameters if one.name not in given]
        options += [one for _, names in groups.values() for one in names.values()]
        first = Parameter("context", keyword, annotation=typer.Context)
        last = Parameter("as_json", keyword, default=False, annotation=Json)
        all_keywords = [first, *(one.replace(kind=keyword) for one in options), last]
        signature = inspect.Signature(all_keywords)
        run.__signature__ = signature  # type: ignore[attr-defined]
        called = name or function.__name__.replace("_", "-")
        app.command(called, help=inspect.getdoc(function), epilog=f"For example: {example}")(run)
        return function

    return register


def _report(text: str) -> None:
    write(redaction.redact_error(text), err=True)


def read_settings(
    service: Service, report: Report = _report, *others: type[BaseSettings]
) -> Settings:
    """Return the settings. Reports all mistakes in them and raises `typer.Exit` if there are any.

    The settings of the service's packages and of `others` are checked, too.
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
    """Yield a sentence for each variable that has the prefix of settings and is none."""
    known = variables()
    for name in sorted(os.environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            # Compared without the prefix, which would make all names similar.
            rests = [one.removeprefix(PREFIX) for one in known]
            near = get_close_matches(name.upper().removeprefix(PREFIX), rests, n=1)
            hint = f"did you mean {PREFIX}{near[0]}?" if near else "unset it"
            yield f"{name}: there is no such setting; {hint}"


@contextmanager
def serving() -> Iterator[Report]:
    """Configure the log, and log what ends a process that serves, whatever it is.

    Returns a function that logs a text: as one line of JSON, else line by line. The log is
    configured before the settings are read.
    """
    as_json: bool | None = None
    with suppress(ValidationError):  # it is reported with the other mistakes in the settings
        given = {name.upper(): value for name, value in os.environ.items()}
        as_json = _AS_JSON.validate_python(given.get(f"{PREFIX}LOG_JSON"))
    is_json = logs.configure(level="INFO", json=as_json)

    def report(text: str) -> None:
        error = sys.exc_info()[1]
        # The text of an operating system's error is not enough without a traceback.
        is_local = isinstance(error, OSError) and not isinstance(error, StoreUnavailable)
        for line in [text] if is_json else text.splitlines():
            log.critical("%s", line, exc_info=is_local)

    try:
        yield report
    except typer.Exit:
        raise
    except BaseException as error:
        # asyncio lets SystemExit pass from any task, also a handler's. It keeps its code, except 0.
        log.critical("stopped by an unexpected error", exc_info=error)
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code):
            raise
        raise typer.Exit(1) from error


def run_to_end(work: Coroutine[Any, Any, T], report: Report = _report) -> T:
    """Run a coroutine until it ends, on uvloop where it is available.

    It waits for no thread, and a second for tasks that ignore their cancellation.
    """
    factory = None
    if sys.platform != "win32" and sys.implementation.name == "cpython":
        import uvloop

        factory = uvloop.new_event_loop
    runner = asyncio.Runner(loop_factory=factory)
    try:
        with in_a_sentence(report):
            return runner.run(work)
    finally:
        loop = runner.get_loop()
        # Closing waits for the threads of the loop's executor: a new one has none.
        loop.set_default_executor(ThreadPoolExecutor())
        loop.call_later(_TASKS_SECONDS, loop.stop)
        with suppress(RuntimeError):  # the loop was stopped before all tasks had ended
            runner.close()


@contextmanager
def in_a_sentence(report: Report = _report) -> Iterator[None]:
    """After an expected error report one sentence, and end the command with exit code 1."""
    try:
        yield
    except StoreUnavailable as error:  # its text names the server
        report(summarize_error(error))
    except _EXPECTED as error:
        report(describe_error(error))
    except (DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        if is_access_denied(error):
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
    """Raise errors of Kafka and of PostgreSQL as `StoreUnavailable`, which names the server."""
    try:
        yield
    except Exception as error:
        if isinstance(error, KafkaError):
            server = f"{settings.kafka} (PIPELINE_KAFKA_BOOTSTRAP_SERVERS)"
        elif is_of_a_server(error) and not isinstance(error, StoreUnavailable):
            server = f"{settings.postgresql} (PIPELINE_DATABASE_URL)"
        else:
            raise
        raise StoreUnavailable(f"{server}: {describe_error(error)}") from error
