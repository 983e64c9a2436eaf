"""The bank as a program, named by the environment: `python -m tests.onceward.integration.app`."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import asyncpg
from pydantic import field_validator

from onceward import Event, Policy, Transaction
from onceward.apply import throttles
from onceward.apply.claim_check import ClaimCheck
from onceward.apply.item import Item
from onceward.cli.commands import command_line
from onceward.consume import consumer
from onceward.handlers.staged import StagedEvent
from onceward.handlers.staging import Outbox
from onceward.observe import logs
from onceward.retry import measuring
from onceward.servers import record_batches
from onceward.settings import Settings

from .bank import ATTEMPTS, CLAIM, Bank
from .calling import CallWorkers, take_calls
from tests.onceward.blocking import BLOCKS

bank = Bank(
    deposits=os.environ["BANK_DEPOSITS"],
    balances=os.environ["BANK_BALANCES"],
    name=os.environ["BANK_NAME"],
    options={"policy": Policy(attempts=ATTEMPTS, schedule=(0.05,))},
    workers=[CallWorkers],
)


class Noted(Event, type="noted"):
    """Something that needs to be remembered, and changes and tells nothing."""


@bank.handlers.on(Noted, topic=bank.deposits, consumer="note")
async def note(event: Noted, tx: Transaction) -> str:
    """Do nothing, once, and say so."""
    return "noted"


class Reminded(Event, type="reminded", topic=bank.balances):
    """Somebody was promised something, at length."""

    text: str = 1_000 * "."


class Folder:
    """Keeps in a folder what is too large to travel."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def sent_size(self, event: StagedEvent, allowed: int) -> int:
        """Let events be of any size."""
        return 0

    async def store(
        self,
        connection: asyncpg.Connection,
        outbox: Outbox,
        reserve: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Write each large payload into a file of its own."""
        names: list[str] = []
        replaced: dict[str, StagedEvent] = {}
        for event in outbox.events:
            if event.payload and len(event.payload) > 500:
                path = self._path / f"{event.event_id}-{uuid4().hex}"
                path.write_bytes(event.payload)
                names.append(path.name)
                replaced[event.event_id] = event._replace(
                    payload=b"", dataref=path.as_uri(), datalength=len(event.payload)
                )
        if names:
            await connection.execute(CLAIM, names, list(replaced))
            outbox.replace(replaced)

    async def resolve(self, items: Sequence[Item], memory: float) -> Sequence[Item]:
        """Fetch nothing: no event of the bank's topics refers to its data."""
        return items

    async def sweep(self, connection: asyncpg.Connection) -> None:
        """Leave everything where it is: somebody wants to look at it."""


def opened(name: str, settings: Settings) -> ClaimCheck | None:
    """Open the folder of the environment, if it names one."""
    folder = os.environ.get("BANK_FOLDER")
    return Folder(Path(folder)) if folder else None


class Told(Event, type="told"):
    """Somebody outside is to be told of it."""


async def tell(event: Told, tx: Transaction) -> None:
    """Do nothing: it is the marker that counts."""


take_calls(bank.handlers, Told, "tell", tell)


class Promised(Event, type="promised"):
    """Something that is to be said later."""


@bank.handlers.on(Promised, topic=bank.deposits, consumer="promise")
async def promise(event: Promised, tx: Transaction) -> None:
    """Say so in a moment, and not what an older promise would have said."""
    tx.cancel(f"{tx.message.id} of before")
    tx.publish(Reminded(), key="promise", after=timedelta(seconds=0.1), name=tx.message.id)
    tx.call(Told(), key="promise")


class Struck(Event, type="struck"):
    """What nobody survives, or what blocks the event loop."""

    how: str

    @field_validator("how")
    @classmethod
    def _nobody_survives_its_validation(cls, how: str) -> str:
        if how == "validation":
            os.kill(os.getpid(), signal.SIGKILL)
        if how.startswith("validation: "):
            raise EXITS[how.removeprefix("validation: ")]
        return how


EXITS: dict[str, type[BaseException]] = {
    one.__name__: one for one in (KeyboardInterrupt, GeneratorExit, SystemExit)
}


async def exit_by(kind: type[BaseException]) -> None:
    """Raise what ends a process."""
    raise kind


@bank.handlers.on(
    Struck,
    topic=bank.deposits,
    consumer="strike",
    policy=Policy(attempts=int(os.environ.get("BANK_CHANCES", "3")), schedule=(0.1,)),
    timeout=1,
    mode="deferred" if os.environ.get("BANK_STRIKES") == "deferred" else "immediate",
)
async def strike(event: Struck, tx: Transaction) -> None:
    """Die."""
    if event.how in BLOCKS:
        BLOCKS[event.how]()
        return
    while event.how == "deaf":
        with suppress(BaseException):
            await asyncio.sleep(60)
    if event.how in EXITS:
        raise EXITS[event.how]
    if event.how == "cancellation" and (task := asyncio.current_task()):
        task.cancel()
        await asyncio.Event().wait()
    if event.how.startswith("task: "):
        await asyncio.create_task(exit_by(EXITS[event.how.removeprefix("task: ")]))
    os.kill(os.getpid(), signal.SIGKILL)


if "BANK_OTHERS" in os.environ:  # a topic with other deposits
    Bank(
        os.environ["BANK_OTHERS"],
        bank.balances,
        bank.name,
        handlers=bank.handlers,
        options=bank.options,
    )

unpacked = record_batches._unpacked


def unpacked_or_dead(raw: memoryview, limit: int) -> memoryview:
    """Die of a batch for which there is no memory, as the kernel would see to it."""
    found = unpacked(raw, limit)
    if len(found) > int(os.environ["BANK_MEMORY"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return found


if "BANK_MEMORY" in os.environ:
    record_batches._unpacked = unpacked_or_dead
if "BANK_COUNTS" in os.environ:
    measuring._SAMPLE_SECONDS = consumer._MEASURE_SECONDS = float(os.environ["BANK_COUNTS"])
if "BANK_LOOKS" in os.environ:
    throttles.LOOK_SECONDS = float(os.environ["BANK_LOOKS"])
if "BANK_REPEATS" in os.environ:
    logs._PERIOD = float(os.environ["BANK_REPEATS"])

if __name__ == "__main__":
    command_line(replace(bank.service, claims=opened))()
