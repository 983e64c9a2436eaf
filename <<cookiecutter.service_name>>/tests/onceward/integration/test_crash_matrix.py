"""The crash matrix: a process is killed at every request it makes, and the ledger is right after.

The real service meets real servers through a wire that stops at a point: a boundary (a statement,
a request to Kafka) and a moment of it. The points run side by side, each in a world of its own.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import partial

import pytest
import pytest_asyncio
from aiokafka.admin import AIOKafkaAdminClient

from onceward.apply.statements import GENERATION_LOCK

from .bank import Bank
from .boundaries import BOUNDARIES, Boundary, Moment, Point
from .languages import boundary_of
from .processes import environment
from .test_boundaries import UNMET
from .wire import Wire
from .worlds import PATIENCE, LetGo, Servers, World
from tests.servers.fork_server import ForkServer
from tests.servers.waiting import eventually

pytestmark = pytest.mark.full

AT_ONCE = 6
"""Worlds at a time. Most of a world's time is spent waiting for the group to miss the dead one."""

NAMES = {boundary.name for boundary in BOUNDARIES}
IN_VAIN = [boundary for boundary in BOUNDARIES if boundary.name == "reader: undo start count"]
LASTING = [boundary for boundary in BOUNDARIES if not boundary.is_farewell]


POINTS = [Point(boundary, moment) for boundary in BOUNDARIES for moment in Moment]

in_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(
    server_url: str,
    template: str,
    kafka: str,
    used_databases: list[str],
) -> AsyncIterator[Servers]:
    """Return the servers, and a fork server for the processes."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    bank = Bank(deposits="none", balances="none", name="none")
    fork_server = ForkServer(environment(bank), f"{__package__}.fork_server")
    try:
        yield Servers(
            server_url, template, kafka, admin, fork_server, fork_server.logs, used_databases
        )
    finally:
        fork_server.close()
        await admin.close()


async def live(world: World, wire: Wire) -> None:
    """Let a process work until it is killed at its point, or has met all there is."""
    async with world.holding_relays_back() as let_go, world.running(wire) as process:
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await keep_busy(world, wire, let_go)
        process.send(signal.SIGTERM)
        await process.ended()


async def live_in_vain(world: World, wire: Wire) -> None:
    """Let a process be stopped before its first batch can commit."""
    async with world.holding_the_accounts(), asyncio.timeout(PATIENCE):
        # It has a second for its farewell; where processors are rare that may pass.
        while not any(wire.seen[one.name] for one in IN_VAIN):
            before = wire.seen["consume: insert accounts"]
            async with world.running(wire) as process:
                await eventually(
                    lambda before=before: wire.seen["consume: insert accounts"] > before,  # type: ignore[misc]
                    PATIENCE,
                )
                process.send(signal.SIGTERM)
                await process.ended()


async def keep_busy(world: World, wire: Wire, let_go: LetGo) -> None:
    """Give the process all there is to meet.

    Work, events that Kafka refuses, a day held back, a rotation refused, a position that moved.
    """
    is_dead = wire.has_killed.is_set

    async def has_settled() -> bool:
        # A broker that creates a topic may take too large an event before it knows the limit.
        if is_dead() or wire.seen["rejected: set reason"]:
            await world.refuse_less()
        return is_dead() or await world.is_settled()

    async def has_met(boundary: str) -> bool:
        return is_dead() or wire.seen[boundary] > 0

    async def has_looked(looks: int) -> bool:
        return is_dead() or wire.seen["throttle: look"] > looks

    await world.send_a_promise()
    await eventually(partial(has_met, "retention: find oldest writer"), PATIENCE)
    await let_go()
    async with world.db.transaction():
        await world.db.execute("SELECT pg_advisory_xact_lock_shared($1)", GENERATION_LOCK)
        await eventually(partial(has_met, "rotation: rollback"), PATIENCE)
    await eventually(has_settled, PATIENCE)
    await world.send_a_note()
    await eventually(has_settled, PATIENCE)
    while not is_dead() and not wire.seen["shared: commit"]:
        await world.send_a_pair()
        await eventually(has_settled, PATIENCE)

    def has_met_all() -> bool:
        return all(wire.seen[one.name] >= one.occurrence for one in LASTING)

    while not (is_dead() or (has_met_all() and world.has_paused)):
        await world.pause_a_little()
        # A process looks again only after the answer to its look.
        await eventually(partial(has_looked, wire.seen["throttle: look"] + 1), PATIENCE)
        if not is_dead():
            await world.note_the_pauses()
        await world.set_back()
        await world.send_deposits()
        await world.send_a_promise()
        await eventually(has_settled, PATIENCE)


@in_one_loop
async def test_the_list_holds_every_boundary_that_is_met_and_no_other(servers: Servers) -> None:
    wire, in_vain = Wire(), Wire()
    async with servers.world() as world:
        await live(world, wire)
        assert {one.name for one in LASTING} <= set(wire.seen)
        assert world.has_paused
        await world.audit()
    async with servers.world() as world:
        await live_in_vain(world, in_vain)
        await world.recover()
        await world.audit()
    met = set(wire.seen | in_vain.seen)
    assert met >= NAMES
    # On a busy machine a statement may take too long, which looks like an outage.
    others = {name for name in met - NAMES if not name.endswith(": rollback")}
    assert others <= {boundary_of(statement) for statement in UNMET}


@in_one_loop
@pytest.mark.parametrize(("moment", "arrived"), list(zip(Moment, (0, 1, 1), strict=True)))
async def test_a_request_arrives_if_the_process_dies_after_it_was_sent(
    servers: Servers, moment: Moment, arrived: int
) -> None:
    async with servers.world() as world:
        await live(world, Wire(Point(Boundary("relay: announce"), moment)))
        await eventually(world.is_left_alone, PATIENCE)
        assert await world.db.fetchval("SELECT count(*) FROM pipeline.outbox_relay") == arrived


Fates = Mapping[Point, asyncio.Task[None]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def decisions(servers: Servers, request: pytest.FixtureRequest) -> AsyncIterator[Fates]:
    """Let it happen at every point that was selected, some of them at a time."""
    selected: list[Point] = [
        item.callspec.params["point"]  # type: ignore[misc]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_killed_at.__name__
    ]
    room = asyncio.Semaphore(AT_ONCE)
    tasks = {point: asyncio.create_task(survive(point, servers, room)) for point in selected}
    yield tasks
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


async def survive(point: Point, servers: Servers, room: asyncio.Semaphore) -> None:
    """Kill a process at the point, start another, and look whether everything is right."""
    wire = Wire(point)
    async with room, servers.world() as world:
        await (live_in_vain if point.boundary in IN_VAIN else live)(world, wire)
        assert wire.has_killed.is_set(), f"{point} was not met, but {sorted(wire.seen)}"
        await world.recover()
        await world.audit()


@in_one_loop
@pytest.mark.parametrize("point", POINTS, ids=str)
async def test_killed_at(point: Point, decisions: Fates) -> None:
    """Trap 19 is the point between a COMMIT and its answer."""
    await decisions[point]
