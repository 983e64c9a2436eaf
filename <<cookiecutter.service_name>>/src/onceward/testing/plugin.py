"""The pytest plugin: `pytest_plugins = ["onceward.testing.plugin"]` in the top `conftest.py`.

The service's tests define the fixture `harness_service`, and use the fixture `harness`.
"""

import asyncio
import os
import sys
import sysconfig
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
import pytest_asyncio
from alembic.config import Config

from onceward.errors import StoreUnavailable
from onceward.events.event import Unpublishable, declared_events
from onceward.servers.guard import frames_of
from onceward.servers.tasks import end
from onceward.service import Service

from .databases import Migrate, ResettableDatabase, resettable_database, with_alembic
from .errors import HarnessMisused
from .harness import Harness

H = TypeVar("H", bound=Harness)

_URL = "PIPELINE_DATABASE_URL"

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_END_SECONDS = 10.0

_HOLD = f"import os, sys; print(os.environ['{_URL}'], flush=True); sys.stdin.read()"
"""Program that `dev/stack.py` runs, and keeps PostgreSQL up for, until its input ends."""


@pytest.fixture(scope="session")
def harness_service() -> Service:
    """The service whose handlers are tested: define this fixture in a `conftest.py`."""
    pytest.fail(
        "the fixture `harness` does not know the service. Write into the conftest.py of its tests:"
        '\n\n    @pytest.fixture(scope="session")\n    def harness_service() -> Service:\n'
        "        return service  # that of main.py",
        pytrace=False,
    )


@pytest.fixture(scope="session")
def harness_migrate(pytestconfig: pytest.Config) -> Migrate:
    """The function that makes the tables in an empty database: by the service's `alembic.ini`."""
    return with_alembic(Config(pytestconfig.rootpath / "alembic.ini"))


@pytest.fixture(scope="session")
def harness_server(pytestconfig: pytest.Config) -> Iterator[str]:
    """URL of the PostgreSQL server of the environment, or of one that `dev/stack.py` starts."""
    if server := os.environ.get(_URL):
        yield server
        return
    stack = pytestconfig.rootpath / "dev" / "stack.py"
    if not stack.exists():
        pytest.fail(
            f"{_URL} is not set, and there is no {stack} to start PostgreSQL by: set it to the URL"
            " of a server",
            pytrace=False,
        )
    state = str(stack.parents[1] / ".stack")
    command = [sys.executable, str(stack), "--state", state, "run", "--postgres", "--"]
    command += [sys.executable, "-c", _HOLD]
    # In a session of its own, so that a Ctrl-C does not stop the server before the tests end.
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True, start_new_session=True) as process:
        assert process.stdin and process.stdout  # noqa: PT018
        if not (url := process.stdout.readline().strip()):
            pytest.fail(
                f"the fixture `harness` needs PostgreSQL (no Kafka), and {stack} has not started"
                f" it: see its standard error, or set {_URL} to the URL of a server",
                pytrace=False,
            )
        yield url
        process.stdin.close()


@pytest.fixture(scope="session")
def harness_migrated(
    harness_server: str, harness_service: Service, harness_migrate: Migrate
) -> Iterator[ResettableDatabase]:
    """The migrated database of the session, without connections for tests."""
    with resettable_database(harness_server, harness_service, harness_migrate) as database:
        yield database


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def harness_database(
    harness_migrated: ResettableDatabase,
) -> AsyncIterator[ResettableDatabase]:
    """The database, whose connections are shared by the tests in the session's event loop."""
    async with harness_migrated.shared() as database:
        yield database


@pytest.fixture
async def harness(
    harness_service: Service, harness_database: ResettableDatabase
) -> AsyncIterator[Harness]:
    """The service, without Kafka, on a database that holds what the migrations have put there."""
    async with open_harness(harness_service, harness_database, Harness) as one:
        yield one


@asynccontextmanager
async def open_harness(
    service: Service, database: ResettableDatabase, kind: type[H]
) -> AsyncIterator[H]:
    """Reset the database and yield a harness of this kind for the service."""
    database.check(service)
    await database.reset()
    await service.open_codecs()
    await _open_for_input(service)
    async with database.pool(service.name) as engine:
        with TemporaryDirectory() as folder:
            # Listeners for statements end with the test, as they are those of the copy.
            harness = kind(service, engine.execution_options(), database, Path(folder))
            before = asyncio.all_tasks()
            try:
                yield harness
            finally:
                await harness.close()
                await _end_tasks(asyncio.all_tasks() - before)


async def _end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """End the tasks of a test. Raises `HarnessMisused` if it has left any but libraries' own."""
    current = asyncio.current_task()
    left = {one: name for one in tasks if one is not current and (name := _name_of_own(one))}
    if left:
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await end(*left)
        raise HarnessMisused(
            f"the test has left tasks running ({', '.join(sorted(left.values()))}), in the event"
            " loop of all tests: await or cancel them before it ends"
        )


def _name_of_own(task: asyncio.Task[Any]) -> str | None:
    """Return the first coroutine in which the task waits that is no library's."""
    codes = (frame.f_code for frame in frames_of(task))
    own = (code.co_qualname for code in codes if not code.co_filename.startswith(_LIBRARIES))
    return next(own, None)


async def _open_for_input(service: Service) -> None:
    """Let tests write the events that the service only reads, as far as their codecs can."""
    written = {
        (one.__event_topic__, getattr(one, "__event_type__", "")) for one in declared_events()
    }
    with suppress(StoreUnavailable):
        for handler in service.handlers.takers:
            # Another class of a published type would be checked in place of the published one.
            if (handler.topic, handler.event.__event_type__) not in written:
                with suppress(Unpublishable):
                    codec = service.handlers.codec(handler.topic)
                    await codec.open(handler.topic, [handler.event])
