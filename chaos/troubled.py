"""The baked service as the rig runs it: its own handler and a deferred one, both with trouble.

`python -m chaos.troubled <command>` is the command `service` with these handlers. Poisoned scans
say in their payload what is to happen, see `chaos.poison`; all others go straight on. Every call
with a poisoned scan is a line of a file, written before anything goes wrong: what a handler has
done is known whatever becomes of its transaction, or of its process.

Beside their own work some scans run errands, where the round has any, see `chaos.errands`.
"""

import asyncio
import json
import os
import signal
from contextvars import Context
from functools import cache
from typing import Any

import httpx2
import sqlalchemy as sa
from parcel_tracker.events import ScanRecorded  # type: ignore[import-not-found]
from parcel_tracker.handlers import record_scan  # type: ignore[import-not-found]
from parcel_tracker.main import service  # type: ignore[import-not-found]
from parcel_tracker.tables import Base, Parcel  # type: ignore[import-not-found]
from sqlalchemy.orm import Mapped, mapped_column

from onceward import Event, Handlers, Park, Policy, Reject, Retry, Service, Transaction
from onceward.cli.commands import command_line
from onceward.effects import Call, Effects, EffectWorkers
from onceward.events.message import marker_key
from onceward.handlers.policy import DIED
from onceward.servers.database import driver_of

from chaos.errands import (
    AFTER,
    CHARGE,
    KEY,
    NEVER,
    OUTSIDE,
    REMINDERS,
    TELL,
    WORK,
    Errand,
    called,
    name_of,
    step,
    work_of,
)
from chaos.poison import AFTER_DEATH, ATTEMPTS, CALLS, LATE, SCHEDULE, TALLY, TIMEOUT, trouble
from demo.feed import TOPIC
from demo.witness import CONSUMER

DAWDLES = 0.2
PARKED_FOR = 0.3
HAD = sa.text("""
SELECT attempts, reason FROM pipeline.backlog WHERE key = :key
""")
# The same error for key after key would be the breaker's, and not the messages'.
ERRORS = (ValueError, KeyError, LookupError, RuntimeError, ArithmeticError)
# Classes of errors that servers raise in outages.
STATES = ("08006", "25006", "57P03", "XX000")
BLAME = "DO $$ BEGIN RAISE EXCEPTION 'blamed' USING ERRCODE = '{}'; END $$"
DISCONNECT = sa.text("SELECT pg_terminate_backend(pg_backend_pid())")
PROCESS = sa.text("SELECT pg_backend_pid()")
REMEMBER = (
    "SELECT set_config('rig.message', 'kept', false), pg_advisory_lock_shared(46, 0)",
    "CREATE TEMPORARY TABLE kept ()",
)
REMEMBERED = sa.text("""
SELECT current_setting('rig.message', true) = 'kept' OR to_regclass('pg_temp.kept') IS NOT NULL
       OR EXISTS (SELECT FROM pg_locks
                   WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND classid = 46)
""")


PATIENT = Policy(attempts=1_000, schedule=SCHEDULE)
"""No call is given up because the outside is bad."""
work = os.environ.get(WORK, "").split(",")


ONE_EACH = httpx2.Limits(max_keepalive_connections=0)
"""On a connection that is used again, an answer that came twice is taken for the next one's."""


class Told(Event, type="parcel.told.v1"):  # type: ignore[call-arg,misc]
    """The outside is to know of a scan."""

    parcel_id: str
    scans: int


class Charged(Event, type="parcel.charged.v1"):  # type: ignore[call-arg,misc]
    """The outside is to be paid for a scan, once."""

    parcel_id: str
    scans: int


class Reminded(Event, type="parcel.reminded.v1", topic=REMINDERS):  # type: ignore[call-arg,misc]
    """A while ago a parcel was scanned."""

    parcel_id: str
    scans: int


class Tallied(Base):  # type: ignore[misc]
    """A scan that the deferred consumer has handled; `n` tells in which order."""

    __tablename__ = TALLY

    n: Mapped[int] = mapped_column(primary_key=True)
    scanner: Mapped[str]
    number: Mapped[int]
    parcel_id: Mapped[str]


async def record(scan: ScanRecorded, tx: Transaction) -> None:
    """Do what the service does."""
    await misbehave(CONSUMER, tx)
    await record_scan(scan, tx)
    await run_errand(scan, tx)
    fail_late(tx)


async def run_errand(scan: ScanRecorded, tx: Transaction) -> None:
    """Do what the scan has the service do besides."""
    kind = work_of(scan.parcel_id)
    if kind not in work:
        return
    parcel = await tx.load(Parcel, scan.parcel_id)
    errand = Errand(parcel.id, parcel.scans)
    if kind == "scheduled":
        schedule(errand, tx)
    elif effect := called(errand.scans):
        tx.call((Told if effect == TELL else Charged)(**errand._asdict()), of=parcel)


def schedule(errand: Errand, tx: Transaction) -> None:
    """Do what the scan is to do about events to come."""
    what, _ = step(errand.scans)
    if what == "take back":
        tx.cancel(name_of(errand))
        return
    after = AFTER if what == "move up" else NEVER
    event = Reminded(**errand._asdict())
    tx.publish(event, key=errand.parcel_id, after=after, name=name_of(errand))


async def tell(event: Told, call: Call) -> None:
    """Tell the outside; it may hear it twice."""
    (await ring(TELL, event, call)).raise_for_status()


async def charge(event: Charged, call: Call) -> None:
    """Charge the outside; say so where it is known that it was not charged."""
    try:
        answer = await ring(CHARGE, event, call)
    except httpx2.ConnectError as error:
        raise Retry("nobody is there") from error
    if answer.status_code == 503:
        raise Retry("it was refused")
    answer.raise_for_status()


async def was_charged(event: Charged, call: Call) -> bool:
    """Ask the outside."""
    url = f"/{CHARGE}/{event.parcel_id}/{event.scans}"
    answer = await outside().get(url, headers={KEY: call.id})
    return bool(answer.raise_for_status().json())


async def ring(consumer: str, event: Event, call: Call) -> httpx2.Response:
    """Call the outside."""
    return await outside().post(f"/{consumer}", json=event.model_dump(), headers={KEY: call.id})


@cache
def outside() -> httpx2.AsyncClient:
    """Return the client."""
    return httpx2.AsyncClient(base_url=os.environ[OUTSIDE], timeout=10 * TIMEOUT, limits=ONE_EACH)


async def tally(scan: ScanRecorded, tx: Transaction) -> None:
    """Write the scan down."""
    await misbehave(TALLY, tx)
    tx.session.add(Tallied(scanner=scan.scanner, number=scan.number, parcel_id=scan.parcel_id))


async def misbehave(consumer: str, tx: Transaction) -> None:
    """Do what the scan's poison asks for."""
    poison = trouble(tx.message.data)
    if poison is None or poison.consumer != consumer or poison in LATE:
        return
    attempts, reason = await had(consumer, tx)
    fails = attempts < poison.times
    note(consumer, tx, attempts, fails=fails)
    match poison.kind:
        case "dawdles":
            await asyncio.sleep(DAWDLES)
        case "parks" if reason != "parked by its handler":
            raise Park("the first time", after=PARKED_FOR)
        case "rejects":
            raise Reject("it always is")
        case "raises" if fails:
            raise ERRORS[tx.message.offset % len(ERRORS)](str(poison))
        case "hangs" if fails:
            await asyncio.sleep(10 * TIMEOUT)
        case "spoils" if fails:
            tx.session.add(Tallied())  # without anything that it must have
        case "blames" if fails:
            state = STATES[tx.message.offset % len(STATES)]
            await tx.session.execute(sa.text(BLAME.format(state)))
        case "disconnects" if fails:
            await tx.session.execute(DISCONNECT)
        case "crashes" if fails:
            os.kill(await tx.session.scalar(PROCESS), signal.SIGKILL)
            await tx.session.execute(PROCESS)
        case "remembers":
            if await tx.session.scalar(REMEMBERED):
                raise Reject("the connection remembers an earlier message")
            for statement in REMEMBER:
                await tx.session.execute(sa.text(statement))
        case "ends" if fails:
            driver = await driver_of(await tx.session.connection())
            await asyncio.create_task(begin_anew(driver), context=Context())


async def begin_anew(driver: Any) -> None:
    """End the transaction, and begin another one."""
    await driver.execute("ROLLBACK; BEGIN")


def fail_late(tx: Transaction) -> None:
    """Fail when the work is done, if the scan's poison asks for that.

    Nothing is awaited here, so nobody can say how many attempts there were: all of them fail.
    """
    poison = trouble(tx.message.data)
    if poison is None or poison not in LATE:
        return
    for attempts in range(poison.times):
        note(CONSUMER, tx, attempts, fails=True)
    if poison.kind == "rejects-late":
        raise Reject("it always is")
    raise ERRORS[tx.message.offset % len(ERRORS)](str(poison))


async def had(consumer: str, tx: Transaction) -> tuple[int, str]:
    """Return how many attempts the message has had before this one, and why it is in the backlog.

    Not by the session, which would flush what others have left in it.
    """
    key = marker_key(consumer, tx.message.source, tx.message.id)
    rows = await (await tx.session.connection()).execute(HAD, {"key": key})
    attempts, reason = rows.one_or_none() or (0, "")
    # Where a process has died, the attempt is counted before it is made.
    return attempts - (reason == DIED), reason


def note(consumer: str, tx: Transaction, attempts: int, *, fails: bool) -> None:
    """Write the call down."""
    line = json.dumps([consumer, tx.message.source, tx.message.id, attempts, fails])
    os.write(_calls, f"{line}\n".encode())


_calls = os.open(os.environ[CALLS], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

handlers = Handlers()
for consumer, function, options in (
    (CONSUMER, record, {"loads": Parcel.by("parcel_id")}),
    (TALLY, tally, {"mode": "deferred", "own_transaction": "apart" in work}),
):
    after_death = os.environ[AFTER_DEATH] if consumer == TALLY else "go on"
    policy = Policy(attempts=ATTEMPTS, schedule=SCHEDULE, after_death=after_death)
    handlers.on(
        ScanRecorded, topic=TOPIC, consumer=consumer, policy=policy, timeout=TIMEOUT, **options
    )(function)
if "effects" in work:
    options = {"policy": PATIENT, "timeout": TIMEOUT}
    effects = Effects(handlers)
    effects.on(Told, consumer=TELL, **options)(tell)
    effects.on(Charged, consumer=CHARGE, repeatable=False, ask=was_charged, **options)(charge)

if __name__ == "__main__":
    workers = [EffectWorkers]
    command_line(
        Service(service.name, handlers=handlers, metadata=Base.metadata, workers=workers)
    ).run_process()
