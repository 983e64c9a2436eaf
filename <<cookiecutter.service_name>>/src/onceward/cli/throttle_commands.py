"""The commands `service pause`, `service throttle` and `service resume`."""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

import typer

from onceward.operators import stopping
from onceward.operators.stopping import Subject

from .dead_commands import span
from .errors import Refused
from .signing import Explained, Signed
from .terminal import Invocation, Yes, operation

app = typer.Typer()

Kind = StrEnum("Kind", ["TOPIC", "CONSUMER", "EVENTS", "KEY"])
"""What can be paused."""
_Kind = Annotated[Kind, typer.Argument(help="what is paused")]
_Name = Annotated[str, typer.Argument(help="its name, the key, or the topic of the events")]
_Rate = Annotated[float, typer.Argument(min=0.001, help="how many are taken in a second")]
_Only = Annotated[str | None, typer.Option(help="of a key: only there")]
_Time = Annotated[timedelta | None, typer.Option("--for", parser=span, metavar="90s|15m|2h|7d")]


@dataclass(frozen=True)
class Terms:
    """Options of a pause and of a throttle."""

    topic: _Only = None
    consumer: _Only = None
    lasts: _Time = None
    yes: Yes = False


async def stop(
    invocation: Invocation, kind: _Kind, name: _Name, rate: _Rate, by: Explained, terms: Terms
) -> None:
    """Take nothing, or no more than so many in a second, until it is resumed.

    All processes obey within two seconds. What is not taken waits in its order, and spends no
    attempt.
    """
    if rate and kind is Kind.KEY:
        raise typer.BadParameter("a key can only be paused: throttle its consumer")
    who, service = by.to("pause").who, invocation.service
    async with invocation.connected() as connection:
        known = stopping.pausable(service.handlers, service.declared_topics, name)
        found = [one for some in known.values() for one in some if one.kind == kind]
        found = _only(found, terms.topic, terms.consumer if kind is Kind.KEY else name)
        if not found:
            names = ", ".join(one for one in known if one.startswith(f"{kind} "))
            raise Refused(f"the service has no such {kind}; it has {names}")
        done = f"throttled to {rate:g}/s" if rate else "paused"
        if not terms.yes:
            will = f"{', '.join(map(str, found))} will be {done}."
            more = stopping.consequence(service.handlers, found[0])
            invocation.confirm(" ".join(filter(None, [will, more, "Go on?"])))
        await stopping.ask(
            connection, found, per_second=rate, lasts=terms.lasts, who=who, why=by.because
        )
    _print(invocation, done, found)


_SCANS = 'service pause topic scans --for 30m --because "wrong prices"'
operation(app, "pause", example=_SCANS, by=Explained, terms=Terms, rate=0.0)(stop)
_TRACK = 'service throttle consumer record-scan 20 --because "a slow disk"'
operation(app, "throttle", example=_TRACK, by=Explained, terms=Terms)(stop)


@operation(app, example="service resume topic scans", by=Signed)
async def resume(
    invocation: Invocation,
    kind: _Kind,
    name: _Name,
    by: Signed,
    topic: _Only = None,
    consumer: _Only = None,
) -> None:
    """Take something as before. The exit code is 1 if it is not paused and not throttled."""
    who, _, why = by.to("resume")
    async with invocation.connected() as connection:
        found = [Subject(kind.value, name)]
        if kind is Kind.KEY:
            paused = await stopping.of_key(connection, name.encode())
            found = _only(paused, topic, consumer)
        if not (found and await stopping.resume(connection, found, who=who, why=why)):
            raise Refused(f"{kind} {name} is not paused: `service status` lists what is")
    _print(invocation, "resumed", found)


def _only(keys: list[Subject], topic: str | None, consumer: str | None) -> list[Subject]:
    return [one for one in keys if topic in (None, one.topic) and consumer in (None, one.name)]


def _print(invocation: Invocation, done: str, subjects: list[Subject]) -> None:
    lines = (f"{one} is {done}" for one in subjects)
    invocation.answer({"subjects": [*map(str, subjects)], "are": done}, lines=lines)
