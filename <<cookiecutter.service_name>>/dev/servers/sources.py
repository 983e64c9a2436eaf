"""The sources of servers: the environment, Docker Compose or local processes."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from servers.console import StackError, pause, run_step
from servers.kafka import Kafka
from servers.network import LOOPBACK, kafka_answers, keep_or_pick, postgres_answers
from servers.postgres import Postgres
from servers.process import START_TIMEOUT, LocalServer, stop_all
from servers.state import State, StateDirectory

COMPOSE_FILE = Path(__file__).resolve().parents[2] / "deploy" / "compose.yaml"
COMPOSE_PASSWORD = "service"  # as in that file
DATABASE_URL = "PIPELINE_DATABASE_URL"
BOOTSTRAP_SERVERS = "PIPELINE_KAFKA_BOOTSTRAP_SERVERS"
TITLES = {"postgres": Postgres.title, "kafka": Kafka.title}
"""Names of servers in commands and in Docker Compose, and in messages."""


@dataclass(frozen=True)
class Status:
    title: str
    mode: str
    address: str
    process: str
    serves: bool
    log: str

    def __str__(self) -> str:
        serves = "serves" if self.serves else "down"
        return (
            f"{self.title:<10}  {self.mode}  {self.address}  {self.process}  {serves}  {self.log}"
        )


class Servers(ABC):
    mode: ClassVar[str]

    @abstractmethod
    def up(self) -> None:
        """Start the servers and wait until they serve; on failure, stop those that were started."""

    @abstractmethod
    def addresses(self) -> dict[str, str]:
        """Environment variables with the addresses for a service; {} if there are no servers."""

    @abstractmethod
    def status(self) -> list[Status]: ...

    @abstractmethod
    def are_up(self) -> bool:
        """Whether the servers run, without a request: a busy one may not answer."""

    def serve(self) -> bool:
        return bool(self.addresses()) and all(server.serves for server in self.status())


class EnvironmentServers(Servers):
    mode = "environment"

    def addresses(self) -> dict[str, str]:
        names = (DATABASE_URL, BOOTSTRAP_SERVERS)
        return {name: os.environ[name] for name in names if os.environ.get(name)}

    def are_up(self) -> bool:
        return True  # assumed: they are not managed here

    def up(self) -> None:
        deadline = time.monotonic() + 3
        while not self.serve():
            if time.monotonic() > deadline:
                lines = "\n".join(f"  {server}" for server in self.status())
                raise StackError(
                    f"The servers of {' and '.join(self.addresses())} do not answer. "
                    f"Start them, or unset the variables to use own servers.\n{lines}"
                )
            pause(0.2)

    def status(self) -> list[Status]:
        database = self._database()
        database_serves = postgres_answers(*database)
        address = f"{database[0]}:{database[1]}"
        found = [Status("PostgreSQL", self.mode, address, "-", database_serves, "-")]
        if bootstrap := os.environ.get(BOOTSTRAP_SERVERS):
            kafka_serves = any(kafka_answers(*it, with_groups=False) for it in self._bootstrap())
            found.append(Status("Kafka", self.mode, bootstrap, "-", kafka_serves, "-"))
        return found

    def _database(self) -> tuple[str, int]:
        try:
            url = urlsplit(os.environ[DATABASE_URL])
            if url.scheme.startswith("postgresql") and url.hostname:
                return url.hostname, url.port or 5432
        except ValueError:
            pass
        raise StackError(
            f"{DATABASE_URL} is not of the form postgresql+asyncpg://user:password@host:port/name."
        )

    def _bootstrap(self) -> list[tuple[str, int]]:
        pairs = [it.strip().rpartition(":") for it in os.environ[BOOTSTRAP_SERVERS].split(",")]
        if not all(host and port.isdigit() for host, _, port in pairs):
            raise StackError(f"{BOOTSTRAP_SERVERS} is not of the form host:port[,host:port...].")
        return [(host.strip("[]"), int(port)) for host, _, port in pairs]


class OwnServers(Servers):
    """Servers on this machine that are started and stopped here."""

    def __init__(self, directory: StateDirectory) -> None:
        self.directory = directory
        self.state = directory.state

    @abstractmethod
    def down(self, *, purge: bool) -> None: ...

    @abstractmethod
    def stop(self, server: str) -> None:
        """Stop one of the servers, and keep its data; `up` starts it again."""

    @abstractmethod
    def has_kafka(self) -> bool:
        """Whether Kafka runs."""

    def addresses(self) -> dict[str, str]:
        return own_addresses(self.state)


def own_addresses(state: State) -> dict[str, str]:
    if not state.postgres.ports or not (state.kafka.ports or state.postgres_alone):
        return {}
    database = f"{LOOPBACK}:{state.postgres.ports[0]}/service"
    found = {DATABASE_URL: f"postgresql+asyncpg://service:{state.password}@{database}"}
    if not state.postgres_alone:
        found[BOOTSTRAP_SERVERS] = f"{LOOPBACK}:{state.kafka.ports[0]}"
    return found


class ComposeServers(OwnServers):
    mode = "compose"

    def __init__(self, directory: StateDirectory) -> None:
        super().__init__(directory)
        # Containers and volumes of a state directory have this project name.
        if not self.state.project:
            # A moved state directory keeps its name, so a new one at the old path needs another.
            identity = f"{directory.path}{self.state.id}"
            digest = hashlib.sha256(identity.encode()).hexdigest()[:10]
            self.state.project = f"stack-{digest}"
        self.command = ["docker", "compose", "-p", self.state.project, "-f", str(COMPOSE_FILE)]
        self.log = directory.path / "compose.log"
        self.records = {"postgres": self.state.postgres, "kafka": self.state.kafka}
        if self.state.postgres_alone:
            del self.records["kafka"]

    def up(self) -> None:
        running = self._running()
        stopped = [service for service in self.records if service not in running]
        for service in stopped:
            self.records[service].ports = keep_or_pick(self.records[service].ports, 1)
        self.state.password = COMPOSE_PASSWORD
        self.directory.save()
        ports = {
            f"STACK_{service.upper()}_PORT": str(record.ports[0])
            for service, record in self.records.items()
        }
        try:
            run_step(
                [*self.command, "up", "--detach", *self.records],
                self.log,
                "Docker Compose could not start the servers.",
                env={**os.environ, **ports},
            )
            deadline = time.monotonic() + START_TIMEOUT
            while not self.serve():
                if time.monotonic() > deadline or not self.are_up():
                    raise StackError(
                        "The containers ended while starting, or did not serve within "
                        f"{START_TIMEOUT:.0f} s.\n{self._run('logs', '--tail=15')}"
                    )
                pause(0.5)
        except BaseException:
            if stopped:
                self._run("stop", *stopped)
            raise

    def down(self, *, purge: bool) -> None:
        run_step(
            [*self.command, "down", *(["--volumes"] if purge else [])],
            self.log,
            "Docker Compose could not stop the servers. Is the Docker engine running?",
        )
        if purge:
            self.log.unlink(missing_ok=True)

    def stop(self, server: str) -> None:
        failure = f"Docker Compose could not stop {TITLES[server]}. Is the Docker engine running?"
        run_step([*self.command, "stop", server], self.log, failure)

    def status(self) -> list[Status]:
        lines = []
        for service, record in self.records.items():
            port = record.ports[0]
            serves = (
                postgres_answers(LOOPBACK, port)
                if service == "postgres"
                else kafka_answers(LOOPBACK, port, with_groups=True)
            )
            log = f"`{shlex.join([*self.command, 'logs', service])}`"
            address = f"{LOOPBACK}:{port}"
            lines.append(Status(TITLES[service], self.mode, address, "container", serves, log))
        return lines

    def are_up(self) -> bool:
        return {*self.records} <= self._running()

    def has_kafka(self) -> bool:
        return "kafka" in self._running()

    def _running(self) -> set[str]:
        return {*self._run("ps", "--services", "--status", "running").split()}

    def _run(self, *arguments: str) -> str:
        return subprocess.run(
            [*self.command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ).stdout


class LocalServers(OwnServers):
    mode = "process"

    def __init__(self, directory: StateDirectory) -> None:
        super().__init__(directory)
        self.postgres = Postgres(directory, "postgres", self.state.postgres)
        self.kafka = Kafka(directory, "kafka", self.state.kafka)
        self.servers: list[LocalServer] = [self.postgres]
        if not self.state.postgres_alone:
            self.servers.append(self.kafka)

    def up(self) -> None:
        missing = [server for server in self.servers if not server.runs()]
        for server in missing:
            server.check_requirements()
        try:
            # Kafka first, as it takes longer: PostgreSQL starts at the same time.
            for server in reversed(missing):
                server.start()
            for server in self.servers:
                server.wait_until_serving()
        except BaseException:
            stop_all([server for server in self.servers if server.process])
            raise

    def down(self, *, purge: bool) -> None:
        stop_all([self.postgres, self.kafka])
        if purge:
            self.postgres.remove()
            self.kafka.remove()

    def stop(self, server: str) -> None:
        stop_all([{"postgres": self.postgres, "kafka": self.kafka}[server]])

    def are_up(self) -> bool:
        return all(server.runs() for server in self.servers)

    def has_kafka(self) -> bool:
        return self.state.kafka.runs()

    def status(self) -> list[Status]:
        return [
            Status(
                server.title,
                self.mode,
                f"{LOOPBACK}:{server.port}",
                f"pid {server.record.pid}" if server.runs() else "no process",
                server.serves(),
                str(server.log),
            )
            for server in self.servers
        ]


def named_by_environment(state: State, *, postgres_alone: bool = False) -> bool:
    """Whether the environment has addresses of servers other than those of this state directory.

    With `postgres_alone` that of PostgreSQL is enough. Addresses of own servers are in the
    environment too, inside `run` and after `eval "$(stack.py env)"`.
    """
    values = {name: os.environ.get(name) for name in (DATABASE_URL, BOOTSTRAP_SERVERS)}
    named = {name: value for name, value in values.items() if value}
    if named.items() <= own_addresses(state).items():
        return False
    missing = values.keys() - named.keys()
    if missing and not (postgres_alone and DATABASE_URL in named):
        raise StackError(
            f"{next(iter(named))} is set and {next(iter(missing))} is not. "
            "Set both to use servers that run already, or none to start servers."
        )
    return True


def docker_answers() -> bool:
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            result = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=15
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        if result.returncode != 0:
            return False
    return True


def choose_servers(directory: StateDirectory, *, postgres_alone: bool) -> tuple[Servers, str]:
    """Return the servers to start, and a message about the choice."""
    state = directory.state
    if named_by_environment(state, postgres_alone=postgres_alone):
        return EnvironmentServers(), "using the servers of the environment"
    recorded = recorded_servers(directory)
    # A Kafka that runs already is kept.
    state.postgres_alone = postgres_alone and not (recorded and recorded.has_kafka())
    if state.mode == LocalServers.mode and (directory.path / "postgres" / "initialised").exists():
        return LocalServers(directory), f"using local processes, whose data is in {directory.path}"
    if docker_answers():
        return ComposeServers(directory), "using Docker Compose, as a Docker engine answers"
    return LocalServers(directory), "using local processes, as no Docker engine answers"


def recorded_servers(directory: StateDirectory) -> OwnServers | None:
    """Return the servers that an earlier `up` or `run` has started."""
    for kind in (LocalServers, ComposeServers):
        if directory.state.mode == kind.mode:
            return kind(directory)
    return None
