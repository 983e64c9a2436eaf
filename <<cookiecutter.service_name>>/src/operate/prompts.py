"""What commands share by which a person decides on many things: how they ask, count and tell."""

import getpass
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Protocol, TypeVar

import typer

from .dead import Became, OutcomeT, Shown, State
from .operations import Refused
from .tables import harmless, one_line
from .terminal import tell_program

PROGRESS = 10_000
"""After so many there is a line on standard error."""
_DEAD_AGAIN = 3
"""Exit code."""
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def span(text: str) -> timedelta:
    """Read how long."""
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time such as 90s, 15m, 2h or 7d")
    return timedelta(seconds=int(match[1]) * _UNITS[match[2]])


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """Return what reads one of these names."""

    def name(text: str) -> str:
        if text not in names:
            raise typer.BadParameter(f"{text!r} is none of: {', '.join(names)}")
        return text

    return name


Older = Annotated[
    timedelta | None,
    typer.Option(parser=span, metavar="90s|15m|2h|7d", help="dead for at least so long"),
]
Newer = Annotated[
    timedelta | None,
    typer.Option(parser=span, metavar="90s|15m|2h|7d", help="dead for at most so long"),
]
Waiting = Annotated[bool, typer.Option("--waiting", help="what waits in the backlog instead")]
Discarded = Annotated[bool, typer.Option("--discarded", help="what was discarded instead")]
Summary = Annotated[bool, typer.Option("--summary", help="only count what is alike")]
Limit = Annotated[int, typer.Option(min=1, help="so many at most")]
Wait = Annotated[float, typer.Option(min=0, help="seconds to wait for what becomes of them")]
Because = Annotated[str, typer.Option(help="why; it is kept")]
Operator = Annotated[str | None, typer.Option(help="who; it is kept", show_default="you")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="only count")]
Yes = Annotated[bool, typer.Option("--yes", help="don't ask")]
All = Annotated[bool, typer.Option("--all", help="mean everything, without ids and filters")]


@dataclass(frozen=True)
class How:
    """How a command that changes something goes about it."""

    is_dry: bool
    asks: bool
    as_json: bool


def how_to_go_about(
    chosen_by: Iterable[object], *, everything: bool, dry_run: bool, yes: bool, as_json: bool
) -> How:
    """Return how; `chosen_by` are ids and filters, None or empty where they are not given.

    Refuses to change everything unasked, unless that is said: ids may come from a shell's variable
    that was empty.
    """
    is_chosen = any(one not in (None, []) for one in chosen_by)
    if everything and is_chosen:
        raise typer.BadParameter("--all excludes ids and filters")
    if yes and not (is_chosen or everything or dry_run):
        raise typer.BadParameter(
            "--yes without an id or a filter would mean everything: say --all if you mean that"
        )
    return How(dry_run, not yes, as_json)


def state_of(*, waiting: bool, discarded: bool) -> State:
    """Return what is to be listed."""
    if waiting and discarded:
        raise typer.BadParameter("--waiting and --discarded exclude each other")
    return "waiting" if waiting else "discarded" if discarded else "dead"


def signed(because: str, operator: str | None) -> str:
    """Return who decides; refuses a decision without a name or a reason."""
    by = _user() if operator is None else operator
    for name, text in (("--because", because), ("--operator", by)):
        if not text.strip():
            raise typer.BadParameter(f"{name} is empty: say it, it is kept to be read later")
    return by


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # as in a container whose user has no name
        return ""


class Counted(Protocol):
    """A number of things that are alike."""

    @property
    def count(self) -> int: ...


CountedT = TypeVar("CountedT", bound=Counted)


def total(groups: Iterable[Counted]) -> int:
    """Return how many they are together."""
    return sum(one.count for one in groups)


def is_agreed(
    verb: str,
    groups: Sequence[CountedT],
    tell: Callable[[Sequence[CountedT]], None],
    how: How,
) -> bool:
    """Tell how many they are, and ask whether to go on. Raises `typer.Abort` if not."""
    number = total(groups)
    if not how.as_json:
        tell(groups)
        typer.echo(f"{number:,} dead")
    if not number or how.is_dry:
        return False
    if how.asks and not typer.confirm(f"{verb.capitalize()} {number:,}?", err=True):
        raise typer.Abort
    return True


class Progress:
    """How many of those that were found have been changed."""

    def __init__(self, verb: str, found: int) -> None:
        self._verb = verb
        self._found = found
        self._number = 0

    def add(self, number: int) -> None:
        """Count some more; long work says now and then how far it is."""
        before = self._number // PROGRESS
        self._number += number
        if self._number // PROGRESS > before:
            self._tell()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Say at the end how far it came, whatever has ended it."""
        try:
            yield
        except BaseException:
            self._tell("; run it again to go on")
            raise
        self._tell()

    def _tell(self, more: str = "") -> None:
        typer.echo(f"{self._verb} {self._number:,} of {self._found:,}{more}", err=True)

    def tell_program(self, **more: object) -> None:
        """Write what came of it for programs."""
        tell_program({"found": self._found, self._verb: self._number} | more)


def tell_what_became(
    became: Became[OutcomeT] | None, progress: Progress, how: How, *, short: int, waiting: str
) -> None:
    """Say what has become of those that were redriven; ends with its own code if some are dead.

    `short` is how much of an id is shown, `waiting` what is said where some wait.
    """
    counts = became and {str(outcome): number for outcome, number in became.counts.items()}
    if how.as_json:
        progress.tell_program(became=counts, died=became and became.died)
    elif became and counts:
        typer.echo(", ".join(f"{number:,} {name}" for name, number in counts.items() if number))
        for one in became.died:
            id = str(one["id"])[:short]
            typer.echo(one_line(f"  {id} is dead again: {one['reason']}: {one['error']}"))
        if counts["waiting"]:
            typer.echo(waiting)
    if counts and counts["dead"]:
        raise typer.Exit(_DEAD_AGAIN)


def tell_total(number: int, total: int, state: State) -> None:
    """End a list."""
    more = f", the newest of {total:,}: --limit shows more" if total > number else ""
    typer.echo(f"{number:,} {state}{more}")


def tell_all(lines: Mapping[str, object], *rest: str) -> None:
    """Write what is known of one: lines with names, and then texts of several lines."""
    told = [one_line(f"{name:<22} {text}") for name, text in lines.items() if text is not None]
    typer.echo("\n".join([*told, *(f"\n{harmless(text)}" for text in rest)]))


def refuse_unless_dead(state: State, name: str, show: str) -> None:
    """Raise `Refused` for one that was named to be changed, unless it is dead.

    `show` is the command that tells more.
    """
    if state != "dead":
        waits = "waits in the backlog and is tried again by itself"
        what = waits if state == "waiting" else "was discarded"
        raise Refused(f"{name}, it {what}: see `{show}`")


def given_up(since: datetime, by: str | None, why: str | None) -> str:
    """Return the state of what was discarded."""
    return f"discarded since {at(since)}, by {by}: {why}"


def at(time: datetime) -> str:
    """Return a time to the second."""
    return f"{time:%Y-%m-%d %H:%M:%SZ}"


def text_of(data: Shown) -> str:
    """Return bytes as text, or in hex."""
    if data is None:
        return "-"
    return data["text"] if "text" in data else f"0x{data['hex']}"
