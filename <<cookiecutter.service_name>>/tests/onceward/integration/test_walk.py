"""How many files a message's walk takes, and where it climbs back to a room above.

What is counted is what runs while one message is consumed, applied and published, without a
failure, in the rooms that it goes through: what they use of libraries, of the servers' clients, of
events and of telemetry is left out.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

import pytest
from aiokafka import AIOKafkaProducer

import onceward

from .bank import Bank
from tests.conftest import Records, Running
from tests.contract.bank import Deposit

ROOT = Path(onceward.__path__[0])
ROOMS = ("events", "observe", "servers", "handlers", "apply", "relay", "consume", "runtime")
"""The rooms of the walk, and the composition root, from below."""
WALK = {"consume", "apply", "handlers", "relay"}
MOST_FILES = 45
CLIMBS = {
    ("apply", "consume"),  # the source says which messages there are, and stores what they need
    ("apply", "runtime"),  # which wakes the relay after the commit
    ("servers", "handlers"),  # the handler uses its `tx`
    ("servers", "apply"),  # `Retrying` repeats a transaction
}
"""From which room what runs climbs to which one above."""


class Walk:
    """The modules of the engine whose code runs, and the climbs between their rooms."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.climbs: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call, as `sys.setprofile` reports it."""
        if event != "call" or (called := module_of(frame)) is None:
            return
        room = room_of(called)
        if room in WALK:
            self.files.add(called)
        if (caller := caller_of(frame)) and room in ROOMS:
            above = room_of(caller)
            if above in ROOMS and ROOMS.index(above) < ROOMS.index(room):
                self.climbs.add((above, room))


def module_of(frame: FrameType) -> str | None:
    """Return the path of a frame's code below the engine; None: it is no code of the engine."""
    return None if frame.f_code.co_name == "<module>" else _below(frame.f_code.co_filename)


@cache
def _below(file: str) -> str | None:
    path = Path(file)
    return path.relative_to(ROOT).as_posix() if ROOT in path.parents else None


def room_of(module: str) -> str:
    """Return the room of a module."""
    return module.partition("/")[0].removesuffix(".py")


def caller_of(frame: FrameType) -> str | None:
    """Return the engine's module that a call comes from, also through a library or a handler."""
    above = frame.f_back
    while above is not None and (module := module_of(above)) is None:
        above = above.f_back
    return module if above is not None else None


@contextmanager
def walking() -> Iterator[Walk]:
    """Note what runs in this thread during the block."""
    walk = Walk()
    sys.setprofile(walk)
    try:
        yield walk
    finally:
        sys.setprofile(None)


@pytest.fixture
async def walk(bank: Bank, running: Running, producer: AIOKafkaProducer, records: Records) -> Walk:
    """Return the walk of a message, after others, for which the service has read what it needs."""
    async with running(bank.service):
        for amount in (1, 2):
            await Deposit(amount).send(producer, bank.deposits)
            await records(bank.balances, amount)
        with walking() as walk:
            await Deposit(3).send(producer, bank.deposits)
            await records(bank.balances, 3)
    return walk


async def test_processing_a_message_uses_few_files_and_only_known_upward_calls(
    walk: Walk,
) -> None:
    assert {room_of(file) for file in walk.files} == WALK
    assert len(walk.files) <= MOST_FILES, sorted(walk.files)
    assert walk.climbs <= CLIMBS, sorted(walk.climbs - CLIMBS)
