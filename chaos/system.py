"""The system that is broken: a baked service in several processes, its servers, proxies between."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from chaos.proxy import HOST, Address, Proxy
from chaos.schedule import EVERYBODY
from demo.processes import ProcessFailed, Service, Stack, end_holder

SESSION, LEASE = 4.0, 2.0
"""Seconds: a consumer that says nothing for so long is replaced, a relay likewise."""
SETTINGS = {
    "PIPELINE_KAFKA_SESSION_TIMEOUT": str(SESSION),
    "PIPELINE_TRANSACTION_TIMEOUT": "3",
    "PIPELINE_LOCK_TIMEOUT": "1.5",
    "PIPELINE_RELAY_LEASE": str(LEASE),
    "PIPELINE_RETRY_PAUSE": "1",
    "PIPELINE_OFFSET_COMMIT_INTERVAL": "2",
    "PIPELINE_SHUTDOWN_GRACE": "10",
    # Many small transactions and pages, and generations that are closed while they run.
    "PIPELINE_BATCH_SIZE": "50",
    "PIPELINE_RELAY_PAGE": "100",
    "PIPELINE_INBOX_GENERATION_AGE": "10",
    "PIPELINE_HOUSEKEEPING_INTERVAL": "2",
}
STOP = {"postgres": signal.SIGINT, "kafka": signal.SIGTERM}
"""What asks a server to end without waiting for its clients."""
GONE_WITHIN = 30.0
NO_DOCKER = {"DOCKER_HOST": "unix:///dev/null"}
"""Servers that are to be killed must be processes of this machine."""


class Member:
    """A process of the service, which reaches the servers through proxies of its own."""

    def __init__(self, name: str, project: Path, folder: Path, servers: "Servers") -> None:
        self.name = name
        self.command, _, _ = name.partition("-")
        self.log = folder / f"{name}.log"
        self.proxies = {
            "postgres": Proxy(lambda: servers.address("postgres")),
            "kafka": Proxy(lambda: servers.address("kafka"), kafka=True),
        }
        self.busy = asyncio.Lock()
        """Held by the fault that has stopped it, so that no other one starts it again."""
        self._project = project
        self._lock = folder / f"{name}.pid"
        self._servers = servers
        self._service: Service | None = None

    async def prepare(self, settings: Mapping[str, str]) -> None:
        """Start the proxies; `settings` come on top of the rig's."""
        for proxy in self.proxies.values():
            await proxy.start()
        addresses = self._servers.settings({name: p.port for name, p in self.proxies.items()})
        self._service = Service(
            self._project,
            {**SETTINGS, **settings, **addresses},
            self.log,
            self._lock,
            command=self.command,
        )

    @property
    def service(self) -> Service:
        """The process."""
        assert self._service is not None
        return self._service

    async def close(self) -> None:
        """End everything at once."""
        if self._service is not None:
            await self._service.kill()
        for proxy in self.proxies.values():
            await proxy.stop()


class Servers:
    """PostgreSQL and Kafka, which can be stopped and come back at their old addresses."""

    def __init__(self, project: Path, folder: Path, log: Path) -> None:
        ours = {name: v for name, v in os.environ.items() if not name.startswith("PIPELINE_")}
        self.stack = Stack(project, folder / "stack", {**ours, **NO_DOCKER})
        self.busy = asyncio.Lock()
        """Held while one of them is away."""
        self._log = log

    def address(self, server: str) -> Address:
        """Return where a server listens."""
        if server == "kafka":
            host, _, port = self.stack.kafka.rpartition(":")
            return host, int(port)
        database = urlsplit(self.stack.database)
        return database.hostname or HOST, database.port or 5432

    def settings(self, ports: Mapping[str, int]) -> dict[str, str]:
        """Return the addresses as a service is told them: those of its proxies."""
        url = urlsplit(self.stack.addresses["PIPELINE_DATABASE_URL"])
        user, _, _ = url.netloc.rpartition("@")
        there = url._replace(netloc=f"{user}@{HOST}:{ports['postgres']}")
        return {
            "PIPELINE_DATABASE_URL": urlunsplit(there),
            "PIPELINE_KAFKA_BOOTSTRAP_SERVERS": f"{HOST}:{ports['kafka']}",
        }

    async def stop(self, server: str, number: signal.Signals) -> None:
        """End a server by a signal; return when it is gone."""
        pid = json.loads((self.stack.state / "state.json").read_text())[server]["pid"]
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        async with asyncio.timeout(GONE_WITHIN):
            while _is_alive(pid):  # noqa: ASYNC110  # no child of ours: nobody tells us
                await asyncio.sleep(0.05)

    async def start(self) -> None:
        """Bring both up; return when they serve."""
        await self.stack.up(self._log)


class System:
    """All of it. What was started is stopped by `close`, however it stands."""

    def __init__(self, project: Path, folder: Path) -> None:
        self.folder = folder
        self.setup_log = folder / "setup.log"
        self.servers = Servers(project, folder, self.setup_log)
        self.members: dict[str, Member] = {}
        self.ended: list[str] = []
        """Processes that ended by themselves, which none may."""
        self._project = project

    async def clear(self) -> None:
        """End what a round that was killed has left running here, and delete its data."""
        for lock in self.folder.glob("*.pid"):
            end_holder(lock)
        if self._project.exists():
            await self.servers.stack.remove(self.setup_log)

    async def start(
        self, members: Sequence[str], extra: Sequence[str], settings: Mapping[str, str]
    ) -> None:
        """Bring up servers and members. `extra` ones are prepared, and started by faults."""
        await self.clear()
        await self.servers.start()
        for name in [*members, *extra]:
            member = Member(name, self._project, self.folder, self.servers)
            self.members[name] = member
            await member.prepare(settings)
        await self.members[members[0]].service.prepare(self.setup_log)
        for name in members:
            await self.members[name].service.start()
        for name in members:
            await self.members[name].service.ready()

    async def guard(self) -> None:
        """Start a member again that ends by itself, as its platform would, and take a note."""
        async with asyncio.TaskGroup() as group:
            for member in self.members.values():
                group.create_task(self._guard(member))

    async def _guard(self, member: Member) -> None:
        while True:
            try:
                await member.service.guard()
            except ProcessFailed as failure:
                self.ended.append(f"{member.name}: {failure}")
                async with member.busy:
                    await member.service.kill()  # what is left of it
                    await member.service.start()

    def targets(self, name: str) -> list[Member]:
        """Return the member of that name, or every one."""
        return list(self.members.values()) if name == EVERYBODY else [self.members[name]]

    async def obstacles(self) -> dict[str, str]:
        """Return what keeps the members that run from being ready, in their own words."""
        running = [m for m in self.members.values() if m.service.pid is not None]
        said = await asyncio.gather(*(member.service.obstacle() for member in running))
        return {member.name: reason for member, reason in zip(running, said, strict=True)}

    async def stop(self) -> list[str]:
        """Ask the members to end; return the names of those that did not do so properly."""
        members = list(self.members.values())
        properly = await asyncio.gather(*(member.service.stop() for member in members))
        return [m.name for m, well in zip(members, properly, strict=True) if not well]

    async def close(self) -> None:
        """End everything: members at once, servers as their owner would."""
        for member in self.members.values():
            await member.close()
        await self.servers.stack.down(self.setup_log)


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
