"""The breaker: carries a schedule of faults out, and heals each when its time is over."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace

import asyncpg  # type: ignore[import-untyped]

from benchmarks.payments import SERVICE
from chaos import brokers, copies, payments, stops
from chaos.memory import AUDIT, END_AUDIT, Memory
from chaos.pressure import crowded, stood_still
from chaos.proxy import Proxy
from chaos.recovery import Ended
from chaos.releases import Releases
from chaos.schedule import Fault
from chaos.system import AWAY, BOOTED_WITHIN, GONE_WITHIN, STOP, Member, System
from chaos.talk import Helper
from demo.processes import NAME

TERMINATE = f"""
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE application_name IN ('{NAME}', '{SERVICE}')
"""
READ_ONLY = "ALTER SYSTEM SET default_transaction_read_only = on"
MAY_WRITE = "SET default_transaction_read_only = off"
READ_WRITE = "ALTER SYSTEM RESET default_transaction_read_only"
RELOAD = "SELECT pg_reload_conf()"
LOCK = "LOCK TABLE parcel, tally IN ACCESS EXCLUSIVE MODE"
SHORTLY = "SET lock_timeout = '1s'"
RENAME = "ALTER TABLE tally RENAME COLUMN parcel_id TO parcel"
RENAME_BACK = "ALTER TABLE tally RENAME COLUMN parcel TO parcel_id"
IS_DONE = (
    asyncpg.UndefinedColumnError,
    asyncpg.UndefinedObjectError,
    asyncpg.DuplicateFunctionError,
)
"""What a change that is made already fails with: the answer was lost."""
LOOK_EVERY = 0.1
"""Seconds until a connection that was given back is taken too, or a fault is tried again."""
TAKEN_AT_ONCE = 20
"""Connections that are opened at the same time, to take all."""
TAKEN_WITHIN = 60.0
"""Seconds in which a busy machine has opened all of them."""
ACTS_WITHIN = 30.0
"""Seconds in which a fault that has taken no effect is tried again when the input has become slow:
what it breaks may be away, or slow. Each time it lasts twice as long, but no longer than it has
been tried."""
ACTS_AFTER = 10
"""Times that it is tried then at least: on a busy machine each may take as long as all should."""
UNSAID = ("kill", "rebalance", "halfopen", "rollout")
"""Faults after which workers may have lost a lane and not say so. All others say so."""
WORKERS = 2
"""Workers of the backlog in a process that consumes."""


class Breaker:
    """Breaks the system."""

    def __init__(
        self,
        system: System,
        memory: Memory,
        outside: Helper,
        releases: Releases,
        is_slow: Callable[[], bool],
    ) -> None:
        self.ended: list[Ended] = []
        """What took effect, and when it was over, but for the faults of the payments alone."""
        self._system = system
        self._memory = memory
        self._outside = outside
        self._releases = releases
        self._is_slow = is_slow
        self._outside_busy = asyncio.Lock()
        self._renaming = asyncio.Lock()
        self._copying = asyncio.Lock()
        self._auditing = asyncio.Lock()
        self._stopping = asyncio.Lock()

    async def run(self, schedule: Sequence[Fault], note: Callable[[str], None]) -> None:
        """Carry it out, counting from now, and tell of it; return when all is healed."""
        async with asyncio.TaskGroup() as group:
            for fault in schedule:
                group.create_task(self._at_its_time(fault, note))

    async def _at_its_time(self, fault: Fault, note: Callable[[str], None]) -> None:
        await asyncio.sleep(fault.at)
        note(f"[red]{fault}[/]")
        tried, began = fault, time.monotonic()
        until, tries = began + ACTS_WITHIN, 0
        while (ended := await self._try(tried, note)) is None:
            if not self._is_slow():
                until, tries = time.monotonic() + ACTS_WITHIN, 0
            tries += 1
            if time.monotonic() >= until and tries > ACTS_AFTER:
                note(f"[red]{fault} took no effect[/]")
                return
            await asyncio.sleep(LOOK_EVERY)
            longest = max(fault.seconds, time.monotonic() - began)
            tried = replace(tried, seconds=min(2 * tried.seconds, longest))
        if fault.target not in payments.MEMBERS:
            self.ended.append(ended)

    async def _try(self, fault: Fault, note: Callable[[str], None]) -> Ended | None:
        async with self._one_at_a_time(fault):
            return await self._carry_out(fault, note)

    async def _carry_out(self, fault: Fault, note: Callable[[str], None]) -> Ended | None:
        """Carry a fault out and heal it; return nothing if it took no effect."""
        began, under_way, acted = time.time(), 0, True
        match fault.kind:
            case "kill":
                await self._kill(fault)
            case "pause":
                under_way = await self._pause(fault)
            case "unread" | "clients":
                acted = await self._press(fault)
            case "copy":
                acted = await copies.use(self._system, fault)
            case "refused":
                acted = await brokers.refuse(self._system, fault)
            case "tail":
                acted = await brokers.lose_tail(self._system, self._memory, fault)
            case "cut":
                acted = True in [proxy.cut() for proxy in self._proxies(fault)]
            case "halfopen":
                acted = True in [proxy.silence() for proxy in self._proxies(fault)]
            case "delay" | "partition":
                await self._hinder(fault)
            case "terminate":
                acted = await self._terminate()
            case "database" | "broker" | "both":
                await self._stop_servers(fault, note)
            case "readonly":
                await self._make_read_only(fault)
            case "connections":
                acted = await self._use_up_connections(fault)
            case "locked":
                acted = await self._lock_tables(fault)
            case "renamed":
                await self._rename_column(fault)
            case "rebalance" | "relays":
                await self._join_and_leave(fault)
            case "rollout":
                await self._releases.roll_out(fault.seconds)
            case "retention":
                under_way = await self._memory.next_day()
            case "rotation":
                acted = await self._memory.rotate(fault.seconds)
            case "replay":
                acted = await self._memory.replay(self._member(fault), fault.seconds)
            case "scheduled":
                acted = await self._memory.hold_up_moves(fault.seconds)
            case "effects":
                await self._spoil_the_outside(fault)
            case "audit":
                await self.audit()
                await asyncio.sleep(fault.seconds)
                await self._change(END_AUDIT)
            case "stopped":
                acted = await stops.stop(self._system, fault)
        ended = Ended(fault.kind, began, time.time(), under_way, self._lanes_lost(fault))
        return ended if acted else None

    def _one_at_a_time(self, fault: Fault) -> AbstractAsyncContextManager[object]:
        """Return what keeps faults apart that would undo each other."""
        match fault.kind:
            case "kill" | "pause" | "unread" | "clients" | "rebalance" | "relays":
                return self._member(fault).busy
            case "database" | "broker" | "both" | "readonly" | "connections" | "refused" | "tail":
                return self._system.servers.busy
            case "renamed":
                return self._renaming
            case "copy":
                return self._copying
            case "effects":
                return self._outside_busy
            case "audit":
                return self._auditing
            case "stopped":
                return self._stopping
        return nullcontext()

    def _lanes_lost(self, fault: Fault) -> int:
        """Return how many lanes workers may have lost by it and not say so, at most."""
        if fault.kind not in UNSAID or fault.server == "kafka":
            return 0
        targets = self._system.targets(fault.target)
        return WORKERS * sum(member.command == "consume" for member in targets)

    def _member(self, fault: Fault) -> Member:
        return self._system.members[fault.target]

    async def _kill(self, fault: Fault) -> None:
        member = self._member(fault)
        await member.service.kill()
        await asyncio.sleep(fault.seconds)
        await member.service.start()

    async def _pause(self, fault: Fault) -> int:
        """Stop a process for a while; return how many calls it may have been on the way with."""
        member = self._member(fault)
        member.service.send(signal.SIGSTOP)
        try:
            async with asyncio.TaskGroup() as group:
                counting = group.create_task(self._memory.calls_under_way())
                await asyncio.sleep(fault.seconds)
        finally:
            member.service.send(signal.SIGCONT)
        return counting.result() if member.command == "consume" else 0

    async def _press(self, fault: Fault) -> bool:
        """Crowd a process's port, or leave its log unread; return whether that concerned it.

        Notes it if it stands still for half of the time.
        """
        member, is_crowd = self._member(fault), fault.kind == "clients"
        service = member.service
        if service.pid is None or await service.seconds_since_beat() is None:
            return False
        async with crowded(service.port, service.pid) if is_crowd else member.pipe.unread():
            still = await stood_still(service, fault.seconds)
        if still > fault.seconds / 2:
            self._system.misbehaved.append(f"{member.name} stood still for {still:.1f} s: {fault}")
        return is_crowd or await member.pipe.has_waited()

    def _proxies(self, fault: Fault) -> list[Proxy]:
        return [member.proxies[fault.server] for member in self._system.targets(fault.target)]

    async def _hinder(self, fault: Fault) -> None:
        with ExitStack() as hindered:
            for proxy in self._proxies(fault):
                is_delay = fault.kind == "delay"
                way = proxy.slowed(fault.latency) if is_delay else proxy.parted()
                hindered.enter_context(way)
            await asyncio.sleep(fault.seconds)

    async def _terminate(self) -> bool:
        """End the sessions of the service; return whether there was one."""
        with suppress(*AWAY):
            return await self._system.servers.execute(TERMINATE) != "SELECT 0"
        return False

    async def _stop_servers(self, fault: Fault, note: Callable[[str], None]) -> None:
        servers = self._system.servers
        for name in fault.target.split(" and "):
            number = signal.SIGKILL if fault.hard else STOP[name]
            if not await servers.stop(name, number):
                note(f"[red]{name} did not end within {GONE_WITHIN:.0f} s, and was killed[/]")
        await asyncio.sleep(fault.seconds)
        await servers.start()

    async def _make_read_only(self, fault: Fault) -> None:
        """Refuse every write, as a standby does, on connections that are there already too."""
        servers = self._system.servers
        await servers.execute(READ_ONLY, RELOAD)
        await asyncio.sleep(fault.seconds)
        await servers.execute(MAY_WRITE, READ_WRITE, RELOAD)

    async def _use_up_connections(self, fault: Fault) -> bool:
        """Take every connection that the server has, those of the service too.

        It lasts from when all are taken, which takes a busy machine a while. Returns whether they
        were.
        """
        address, taken = self._system.servers.stack.database, list[asyncpg.Connection]()
        are_used_up = asyncio.Event()

        async def take() -> None:
            while True:
                try:
                    taken.append(await asyncpg.connect(address))
                except asyncpg.TooManyConnectionsError:
                    are_used_up.set()
                    await asyncio.sleep(LOOK_EVERY)

        async def end_others() -> None:
            await are_used_up.wait()
            within.reschedule(asyncio.get_running_loop().time() + fault.seconds)
            while True:
                await taken[0].execute(TERMINATE)
                await asyncio.sleep(LOOK_EVERY)

        try:
            async with asyncio.timeout(TAKEN_WITHIN) as within, asyncio.TaskGroup() as group:
                group.create_task(end_others())
                for _ in range(TAKEN_AT_ONCE):
                    group.create_task(take())
        except TimeoutError:
            pass
        finally:
            for connection in taken:
                connection.terminate()
        return are_used_up.is_set()

    async def _lock_tables(self, fault: Fault) -> bool:
        """Hold the tables of the handlers, as a migration does that takes long.

        Returns whether they were locked.
        """
        is_locked = False
        with suppress(*AWAY):
            connection = await asyncpg.connect(self._system.servers.stack.database)
            try:
                async with connection.transaction():
                    await connection.execute(LOCK)
                    is_locked = True
                    await asyncio.sleep(fault.seconds)
            finally:
                connection.terminate()
        return is_locked

    async def _rename_column(self, fault: Fault) -> None:
        """Rename a column that a handler writes, and give it its name back."""
        await self._change(RENAME)
        await asyncio.sleep(fault.seconds)
        await self._change(RENAME_BACK)

    async def audit(self) -> None:
        """Have each version of a parcel's row written down from now on."""
        await self._change(AUDIT)

    async def _change(self, statements: str) -> None:
        """Change the schema, in one transaction, as soon as it can be."""
        while True:
            try:
                await self._system.servers.execute(MAY_WRITE, SHORTLY, statements)
                return
            except IS_DONE:
                return
            except AWAY:
                await asyncio.sleep(LOOK_EVERY)

    async def _spoil_the_outside(self, fault: Fault) -> None:
        self._outside.tell(fault.target)
        await asyncio.sleep(fault.seconds)
        self._outside.tell("well")

    async def _join_and_leave(self, fault: Fault) -> None:
        member = self._member(fault)
        await member.service.start()
        await member.service.ready(BOOTED_WITHIN)
        await asyncio.sleep(fault.seconds)
        if fault.hard:
            await member.service.kill()
        else:
            await self._system.end(member)
