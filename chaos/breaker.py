"""The breaker: carries a schedule of faults out, and heals each when its time is over."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import asyncpg  # type: ignore[import-untyped]

from chaos.memory import Memory
from chaos.proxy import Proxy
from chaos.recovery import Ended
from chaos.releases import Releases
from chaos.schedule import Fault
from chaos.system import AWAY, BOOTED_WITHIN, GONE_WITHIN, STOP, Member, System
from chaos.talk import Helper
from demo.processes import NAME

TERMINATE = f"""
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{NAME}'
"""
READ_ONLY = "ALTER SYSTEM SET default_transaction_read_only = on"
MAY_WRITE = "SET default_transaction_read_only = off"
READ_WRITE = "ALTER SYSTEM RESET default_transaction_read_only"
RELOAD = "SELECT pg_reload_conf()"
LOCK = "LOCK TABLE parcel, tally IN ACCESS EXCLUSIVE MODE"
SHORTLY = "SET lock_timeout = '1s'"
RENAME = "ALTER TABLE tally RENAME COLUMN parcel_id TO parcel"
RENAME_BACK = "ALTER TABLE tally RENAME COLUMN parcel TO parcel_id"
LOOK_EVERY = 0.1
"""Seconds until a connection that was given back is taken too."""


class Breaker:
    """Breaks the system."""

    def __init__(self, system: System, memory: Memory, outside: Helper, releases: Releases) -> None:
        self.ended: list[Ended] = []
        """What was carried out, and when it was over."""
        self._system = system
        self._memory = memory
        self._outside = outside
        self._releases = releases
        self._outside_busy = asyncio.Lock()
        self._renaming = asyncio.Lock()

    async def run(self, schedule: Sequence[Fault], note: Callable[[str], None]) -> None:
        """Carry it out, counting from now, and tell of it; return when all is healed."""
        async with asyncio.TaskGroup() as group:
            for fault in schedule:
                group.create_task(self._at_its_time(fault, note))

    async def _at_its_time(self, fault: Fault, note: Callable[[str], None]) -> None:
        await asyncio.sleep(fault.at)
        note(f"[red]{fault}[/]")
        under_way = 0
        match fault.kind:
            case "kill":
                await self._kill(fault)
            case "pause":
                under_way = await self._pause(fault)
            case "cut" | "halfopen" | "delay" | "partition":
                for proxy in self._proxies(fault):
                    await self._on_the_way(proxy, fault)
                await asyncio.sleep(fault.seconds)
                for proxy in self._proxies(fault):
                    self._heal(proxy, fault)
            case "terminate":
                await self._terminate()
            case "database" | "broker" | "both":
                await self._stop_servers(fault, note)
            case "readonly":
                await self._make_read_only(fault)
            case "connections":
                await self._use_up_connections(fault)
            case "locked":
                await self._lock_tables(fault)
            case "renamed":
                await self._rename_column(fault)
            case "rebalance" | "relays":
                await self._join_and_leave(fault)
            case "rollout":
                await self._releases.roll_out(fault.seconds)
            case "retention":
                under_way = await self._memory.next_day()
            case "rotation":
                await self._memory.rotate(fault.seconds)
            case "replay":
                await self._memory.replay(self._member(fault), fault.seconds)
            case "scheduled":
                await self._memory.hold_up_moves(fault.seconds)
            case "effects":
                await self._spoil_the_outside(fault)
        self.ended.append(Ended(fault.kind, time.time(), under_way))

    def _member(self, fault: Fault) -> Member:
        return self._system.members[fault.target]

    async def _kill(self, fault: Fault) -> None:
        member = self._member(fault)
        async with member.busy:
            await member.service.kill()
            await asyncio.sleep(fault.seconds)
            await member.service.start()

    async def _pause(self, fault: Fault) -> int:
        """Stop a process for a while; return how many calls it may have been on the way with."""
        member = self._member(fault)
        async with member.busy:
            member.service.send(signal.SIGSTOP)
            try:
                async with asyncio.TaskGroup() as group:
                    counting = group.create_task(self._memory.calls_under_way())
                    await asyncio.sleep(fault.seconds)
            finally:
                member.service.send(signal.SIGCONT)
        return counting.result() if member.command == "consume" else 0

    def _proxies(self, fault: Fault) -> list[Proxy]:
        return [member.proxies[fault.server] for member in self._system.targets(fault.target)]

    async def _on_the_way(self, proxy: Proxy, fault: Fault) -> None:
        match fault.kind:
            case "cut":
                proxy.cut()
            case "halfopen":
                proxy.silence()
            case "delay":
                proxy.slow_down(fault.latency)
            case "partition":
                proxy.part()

    def _heal(self, proxy: Proxy, fault: Fault) -> None:
        match fault.kind:
            case "delay":
                proxy.slow_down(0)
            case "partition":
                proxy.join()

    async def _terminate(self) -> None:
        # The server may just be away: then nobody is connected anyhow.
        with suppress(*AWAY):
            await self._system.servers.execute(TERMINATE)

    async def _stop_servers(self, fault: Fault, note: Callable[[str], None]) -> None:
        servers = self._system.servers
        async with servers.busy:
            for name in fault.target.split(" and "):
                number = signal.SIGKILL if fault.hard else STOP[name]
                if not await servers.stop(name, number):
                    note(f"[red]{name} did not end within {GONE_WITHIN:.0f} s, and was killed[/]")
            await asyncio.sleep(fault.seconds)
            await servers.start()

    async def _make_read_only(self, fault: Fault) -> None:
        """Refuse every write, as a standby does, on connections that are there already too."""
        servers = self._system.servers
        async with servers.busy:
            await servers.execute(READ_ONLY, RELOAD)
            await asyncio.sleep(fault.seconds)
            await servers.execute(MAY_WRITE, READ_WRITE, RELOAD)

    async def _use_up_connections(self, fault: Fault) -> None:
        """Take every connection that the server has, those of the service too."""
        servers, taken = self._system.servers, list[asyncpg.Connection]()
        try:
            async with servers.busy, asyncio.timeout(fault.seconds):
                while True:
                    try:
                        taken.append(await asyncpg.connect(servers.stack.database))
                    except asyncpg.TooManyConnectionsError:
                        await taken[-1].execute(TERMINATE)
                        await asyncio.sleep(LOOK_EVERY)
        except TimeoutError:
            pass
        finally:
            for connection in taken:
                connection.terminate()

    async def _lock_tables(self, fault: Fault) -> None:
        """Hold the tables of the handlers, as a migration does that takes long."""
        with suppress(*AWAY):
            connection = await asyncpg.connect(self._system.servers.stack.database)
            try:
                async with connection.transaction():
                    await connection.execute(LOCK)
                    await asyncio.sleep(fault.seconds)
            finally:
                connection.terminate()

    async def _rename_column(self, fault: Fault) -> None:
        """Rename a column that a handler writes, and give it its name back."""
        async with self._renaming:
            await self._rename(RENAME)
            await asyncio.sleep(fault.seconds)
            await self._rename(RENAME_BACK)

    async def _rename(self, statement: str) -> None:
        while True:
            try:
                await self._system.servers.execute(MAY_WRITE, SHORTLY, statement)
                return
            except asyncpg.UndefinedColumnError:
                return  # it is renamed, and the answer was lost
            except AWAY:
                await asyncio.sleep(LOOK_EVERY)

    async def _spoil_the_outside(self, fault: Fault) -> None:
        async with self._outside_busy:
            self._outside.tell(fault.target)
            await asyncio.sleep(fault.seconds)
            self._outside.tell("well")

    async def _join_and_leave(self, fault: Fault) -> None:
        member = self._member(fault)
        async with member.busy:
            await member.service.start()
            await member.service.ready(BOOTED_WITHIN)
            await asyncio.sleep(fault.seconds)
            if fault.hard:
                await member.service.kill()
            else:
                await member.service.stop()
