"""PostgreSQL falls silent, and the process is stopped: it ends all the same."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

import pytest
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine

from onceward import runtime
from onceward.retry import workers
from onceward.runtime import Part, _run_until
from onceward.servers import tasks
from onceward.servers.database import create_engine
from onceward.settings import Settings

from .applier import NewApplier
from .bank import Bank
from .tcp_proxy import TcpProxy
from .test_backlog import QUICK
from .test_lanes import claim
from tests.conftest import Running
from tests.contract.bank import Deposit
from tests.servers.waiting import PATIENCE, eventually

GRACE = 5.0
LATE = 30.0
"""Seconds, in which the end fits on any machine, and the time limit of no statement."""


@asynccontextmanager
async def behind_a_proxy(database_url: str) -> AsyncIterator[tuple[TcpProxy, str]]:
    """Yield a proxy to the database's server, and the URL that leads through it."""
    url = make_url(database_url)
    async with TcpProxy(url.host or "127.0.0.1", url.port or 5432).listening() as proxy:
        yield proxy, url.set(port=proxy.port).render_as_string(hide_password=False)


@pytest.mark.parametrize("has_died", [False, True], ids=["together", "alone"])
async def test_all_that_workers_send_after_the_stop_has_one_deadline(
    new_applier: NewApplier, database_url: str, monkeypatch: pytest.MonkeyPatch, has_died: bool
) -> None:
    # These would end each statement, too, but one after the other.
    monkeypatch.setattr(workers, "_ANSWER_SECONDS", PATIENCE)
    monkeypatch.setattr(tasks, "_CANCEL_AGAIN_SECONDS", PATIENCE)
    bank = Bank(deposits="deposits", balances="balances", name="bank", options={"policy": QUICK})
    async with behind_a_proxy(database_url) as (proxy, through):
        applier = await new_applier(
            bank.handlers, topic=bank.deposits, database_url=through, shutdown_grace=GRACE
        )
        bank.refused = {1}
        await applier.apply(Deposit(1))
        bank.refused = set()
        await applier.make_due()
        if has_died:
            await claim(applier, lease=0.0)  # and die
        bank.calls.clear()
        bank.waits = {1: asyncio.Event().wait}  # type: ignore[dict-item]
        stopping = asyncio.Event()
        ending = asyncio.create_task(_run_until(stopping, (), [(GRACE / 5, [applier.lanes])]))
        await eventually(lambda: bank.calls == [1])
        proxy.hold()
        stopping.set()
        await asyncio.wait_for(ending, LATE)


async def test_idle_connections_do_not_delay_the_end_of_a_process(
    running: Running,
    bank: Bank,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engines: list[AsyncEngine] = []

    def create(settings: Settings, *, name: str) -> AsyncEngine:
        engines.append(create_engine(settings, name=name))
        return engines[-1]

    monkeypatch.setattr(runtime, "create_engine", create)
    async with behind_a_proxy(database_url) as (proxy, through):
        async with running(
            bank.service, Part.RELAY, database_url=through, shutdown_grace=GRACE
        ) as health:
            await eventually(lambda: health.is_ready)
            (engine,) = engines
            async with engine.connect(), engine.connect(), engine.connect():
                pass
            proxy.hold()
            begun = monotonic()
        assert monotonic() - begun < LATE
        proxy.restore()
        await engine.dispose()  # of what was left
    assert "closing connection" not in caplog.text
