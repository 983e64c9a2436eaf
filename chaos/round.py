"""A round: a fresh system is fed, broken, healed and drained, and then the ledger is checked."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import payments
from chaos import doctor
from chaos.breaker import Breaker
from chaos.errands import OUTSIDE, WORK
from chaos.memory import AUDIT, CLOCK, MARKERS, VERSIONS, Memory
from chaos.payments import DATABASE, MEMBERS, MODULE
from chaos.plan import PATIENCE, Plan
from chaos.poison import AFTER_DEATH, CALLS
from chaos.rates import Progress
from chaos.recovery import Ended
from chaos.releases import Releases
from chaos.report import Report
from chaos.system import SESSION, System
from chaos.talk import Helper
from demo.display import Display, say

CONSUMERS = ("consume-1", "consume-2", "consume-3")
RELAYS = ("relay-1", "relay-2")
EXTRA = ("consume-extra", "relay-extra")


class Round:
    """One round, of the service that lies in `project`, with its logs in `folder`."""

    def __init__(self, plan: Plan, project: Path, folder: Path, console: Console) -> None:
        self._plan = plan
        self._console = console
        self._project = project
        self._folder = folder
        self._calls = folder / "calls"
        self._requests = folder / "requests"
        self._system = System(project, folder, module="chaos.troubled")

    async def run(self) -> Report:
        """Run it; leaves no process behind, however it ends."""
        for old in self._folder.glob("*.log"):
            old.unlink()
        self._calls.write_text("")
        self._requests.write_text("")
        system = self._system
        settings = {
            **self._plan.settings,
            CALLS: str(self._calls),
            AFTER_DEATH: self._plan.after_death,
            WORK: ",".join(self._plan.work),
        }
        feed = self._feed()
        memory = Memory(system.servers, feed)
        outside = Helper("outside", self._folder / "outside.log", requests=self._requests)
        try:
            async with asyncio.TaskGroup() as group:
                feeding = group.create_task(feed.run())
                serving = group.create_task(outside.run())
                settings[OUTSIDE] = await outside.says("url")
                beforehand = [*CLOCK, MARKERS, VERSIONS]
                afterwards = [AUDIT] if "audit" in self._plan.errands else []
                members = [*CONSUMERS, *RELAYS]
                await system.start(members, EXTRA, settings, beforehand, afterwards)
                if self._plan.payments:
                    await self._start_payments()
                checker = self._checker()
                checking = group.create_task(checker.run())
                guarding = group.create_task(system.guard())
                await feed.says("ready")
                # Not before: of a generation that is closed it asks how much was sent by then.
                watching = group.create_task(memory.watch())
                await checker.says("applied")
                releases = Releases(system, self._project)
                breaker = Breaker(system, memory, outside, releases, lambda: "slow" in feed.said)
                progress = Progress(lambda: checker.said["applied"])
                noting = group.create_task(progress.watch())
                ended = await self._break(feed, feeding, checker, breaker, progress)
                watching.cancel()
                stuck = await self._drain(checker)
                noting.cancel()
                guarding.cancel()
                await system.stop()
                if "audit" in self._plan.work:
                    await breaker.audit()  # what came since the last one is known to it
                checker.tell(f"audit {json.dumps(ended)}")
                await checking
                if not (stuck or checker.said["findings"]):
                    has_effects = "effects" in self._plan.work
                    say(self._console, "doctor", "asked while no process runs, and then")
                    stuck = await doctor.examine(system, members, has_effects=has_effects)
                outside.tell("end")
                await serving
        except ExceptionGroup as failures:
            raise reason_of(failures) from None
        finally:
            await system.close()
        stuck = [*stuck, *system.misbehaved]
        return self._report(checker.said, ended, releases.migrated, progress.rates(), stuck)

    async def _start_payments(self) -> None:
        """Start the second service; its customers have what they are going to pay."""
        load = payments.make(self._plan.payments, seed=self._plan.seed)
        await payments.generate(self._folder)
        project = self._folder / payments.SERVICE
        await self._system.start_beside(MEMBERS, project, MODULE, DATABASE, [*load.funding()])

    def _feed(self) -> Helper:
        plan = self._plan
        return Helper(
            "feed",
            self._folder / "feed.log",
            events=plan.events,
            seconds=plan.seconds,
            seed=plan.seed,
            parcels=plan.parcels,
            repeats=plan.repeats,
            within=plan.within,
            strays=plan.strays,
            poison=plan.poison,
            kinds=",".join(plan.kinds),
            payments=plan.payments,
        )

    def _checker(self) -> Helper:
        stack = self._system.servers.stack
        return Helper(
            "checker",
            self._folder / "checker.log",
            kafka=stack.kafka,
            database=stack.database,
            calls=self._calls,
            requests=self._requests,
            logs=self._folder,
            work=",".join(self._plan.work),
            **{"after-death": self._plan.after_death},
            patience=self._plan.patience,
            quiet=SESSION,
            seed=self._plan.seed,
            payments=self._plan.payments,
            **{"payments-database": self._system.servers.url(DATABASE)},
        )

    def _report(
        self,
        said: Mapping[str, Any],
        ended: Sequence[Ended],
        migrations: Mapping[str, int],
        rates: Mapping[str, float],
        stuck: Sequence[str],
    ) -> Report:
        plan, ledger, counts = self._plan, said["ledger"], said["counts"]
        names = (
            "sent",
            "duplicates",
            "applied",
            "published",
            "lost",
            "doubled",
            "reordered",
            "misjudged",
        )
        return Report(
            **{name: ledger[name] for name in names},
            parked=sum(one["waiting"] for one in counts.values()),
            dead=sum(said["dead"].values()),
            dead_by_reason=said["dead"],
            consumers=counts,
            repeats=said["repeats"],
            stuck=stuck,
            findings=said["findings"],
            faults=dict(Counter(fault.kind for fault in ended)),
            unmet=sorted({fault.kind for fault in plan.schedule} - said["met"].keys()),
            recovery=said["recovery"],
            errands=said["errands"],
            payments=said.get("payments", {}),
            migrations=dict(migrations),
            rates=rates,
            seconds=ledger["seconds"],
            plan=plan,
        )

    async def _break(
        self,
        feed: Helper,
        feeding: asyncio.Task[None],
        checker: Helper,
        breaker: Breaker,
        progress: Progress,
    ) -> Sequence[Ended]:
        """Feed, and carry the schedule out; return what was broken when all is fed and healed."""
        with Display(self._console, self._plan.events) as display:
            began = time.monotonic()

            async def show() -> None:
                while True:
                    seconds = time.monotonic() - began
                    sent, applied = feed.said.get("sent", 0), checker.said["applied"]
                    display.update(sent=sent, applied=applied, seconds=seconds)
                    await asyncio.sleep(0.2)

            showing = asyncio.create_task(show())
            try:
                feed.tell(self._system.servers.stack.kafka)
                await breaker.run(self._plan.schedule, display.note)
                progress.end_phase()
                await feed.says("slow")
                # A message that crashes the server fails only if others commit in between.
                checker.tell("settle")
                await checker.says("unsettled")
                feed.tell("end")
                await feeding
                progress.end_phase()
            finally:
                showing.cancel()
        return breaker.ended

    async def _drain(self, checker: Helper) -> list[str]:
        """Wait until all is done, by members that are ready; return what is left, and why."""
        say(self._console, "healed", "waiting until all is done")
        healed = time.monotonic()
        checker.tell("drain")
        left = await checker.says("left")
        obstacles = await self._system.obstacles(0 if left else PATIENCE)
        if not left and not any(obstacles.values()):
            say(self._console, "drained", f"after {time.monotonic() - healed:.1f} s")
            return []
        ready = [f"{name}: {reason or 'ready'}" for name, reason in obstacles.items()]
        return [left, *ready] if left else ready


def reason_of(failures: BaseException) -> BaseException:
    """Return the first failure of a group, however many groups it lies in."""
    while isinstance(failures, BaseExceptionGroup):
        failures = failures.exceptions[0]
    return failures
