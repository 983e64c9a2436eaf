"""The traffic: scans go in, the service is killed on the way, events come out."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from demo.display import Display
from demo.evidence import effects
from demo.feed import Feed, with_repeats
from demo.flights import Scan
from demo.processes import Service
from demo.witness import Witness

REPEATED = 0.03
"""Share of the scans that are sent a second time."""
PATIENCE = 60.0
"""Seconds without a new event, after which nothing more is waited for."""
QUIET = 2.0
"""Seconds in which nothing new may come after the last event."""
SETTLED = 0.5
"""Seconds without a new event, after which all that a killed service had published is seen."""


@dataclass(frozen=True)
class Outcome:
    """What the sender and the witness can tell afterwards."""

    sent: Sequence[Scan]
    """Every scan once, in the order in which they were sent first."""
    duplicates: int
    seconds: float
    missing: int
    """Events that were still expected when nothing more came."""


class Traffic:
    """A run of scans through a service that is killed `kills` times."""

    def __init__(
        self, scans: Sequence[Scan], *, kills: int, seed: int, service: Service, display: Display
    ) -> None:
        schedule = with_repeats(scans, round(len(scans) * REPEATED), seed)
        # The service is killed when it has done 1/3 and 2/3 of the work. The sender waits for the
        # kill half a third later: so there is work at hand when it comes, and more to come after.
        self._gates = [asyncio.Event() for _ in range(kills)]
        places = (round(len(schedule) * (n + 1.5) / (kills + 1)) for n in range(kills))
        self._feed = Feed(schedule, dict(zip(places, self._gates, strict=True)))
        self._witness = Witness(self._be_patient)
        self._scans = len(scans)
        self._events = sum(1 for scan in scans for _ in effects(scan))
        self._service = service
        self._display = display
        self._patience = asyncio.timeout(None)

    async def run(self, bootstrap_servers: str) -> Outcome:
        """Send everything, kill on the way, and wait for the last event.

        Raises `FeedFailed`, or `ProcessFailed` when the service ends by itself.
        """
        try:
            with suppress(TimeoutError):  # the outcome tells what is missing
                async with self._patience, asyncio.TaskGroup() as group:
                    aside = [
                        group.create_task(self._witness.watch(bootstrap_servers)),
                        group.create_task(self._service.guard()),
                        group.create_task(self._show()),
                    ]
                    feeding = group.create_task(self._feed.run(bootstrap_servers))
                    self._be_patient()
                    await self._kill_on_the_way()
                    await feeding
                    await self._witness.until_published(self._events)
                    await self._witness.until_quiet(QUIET)
                    for task in aside:
                        task.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self._update()
        return Outcome(
            sent=self._feed.first,
            duplicates=self._feed.duplicates,
            seconds=self._seconds(),
            missing=max(0, self._events - len(self._witness.events)),
        )

    async def _kill_on_the_way(self) -> None:
        for number, gate in enumerate(self._gates, start=1):
            await self._witness.until_moved(self._scans * number // (len(self._gates) + 1))
            await self._service.kill()
            killed = time.monotonic()
            at_hand = len(self._feed.first) - self._witness.moves
            self._update()
            gate.set()
            self._display.note(f"[red]kill -9[/] with {at_hand:,} scans at hand, starting it again")
            await self._service.start()
            # First what the killed one had published; its successor is not that quick.
            await self._witness.until_quiet(SETTLED)
            await self._witness.until_published(len(self._witness.events) + 1)
            self._update()
            self._display.note(f"publishing again after {self._witness.latest - killed:.1f} s")

    async def _show(self) -> None:
        while True:
            self._update()
            await asyncio.sleep(0.2)

    def _update(self) -> None:
        self._display.update(
            sent=len(self._feed.first), applied=self._witness.moves, seconds=self._seconds()
        )

    def _seconds(self) -> float:
        return max(0.0, self._witness.latest - self._feed.began) if self._feed.began else 0.0

    def _be_patient(self) -> None:
        self._patience.reschedule(asyncio.get_running_loop().time() + PATIENCE)
