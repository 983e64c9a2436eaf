"""The commands `service dead …`."""

import getpass
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated

import asyncpg
import typer
from pydantic_core import to_json

from . import dead
from .dead import Became, Detail, Group, Letter, Outcome, Redriven, Shown, State, Which
from .operations import Refused
from .service import Service
from .settings import Settings
from .terminal import connected, read_settings, run_to_end

_PROGRESS = 10_000
"""After so many messages there is a line on standard error."""
_SHORT = 16
"""Characters of an id that are shown."""
_DEAD_AGAIN = 3
"""Exit code."""
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal would obey, and a payload may hold; tab and end of line are harmless."""


def _span(text: str) -> timedelta:
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time such as 90s, 15m, 2h or 7d")
    return timedelta(seconds=int(match[1]) * _UNITS[match[2]])


def _reason(text: str) -> str:
    if text not in dead.REASONS:
        raise typer.BadParameter(f"{text!r} is none of: {', '.join(dead.REASONS)}")
    return text


_Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="as `list` shows them")]
_Reasons = Annotated[
    list[str] | None, typer.Option("--reason", parser=_reason, help="may be repeated")
]
_Consumer = Annotated[
    str | None, typer.Option(help="name of a consumer; '' for records that are nobody's")
]
_Type = Annotated[str | None, typer.Option(help="type of the event")]
_Topic = Annotated[str | None, typer.Option(help="topic that it came from")]
_Key = Annotated[str | None, typer.Option(help="the record's key")]
_Older = Annotated[
    timedelta | None,
    typer.Option(parser=_span, metavar="90s|15m|2h|7d", help="dead for at least so long"),
]
_Newer = Annotated[
    timedelta | None,
    typer.Option(parser=_span, metavar="90s|15m|2h|7d", help="dead for at most so long"),
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="only count")]
_Yes = Annotated[bool, typer.Option("--yes", help="don't ask")]
_Json = Annotated[bool, typer.Option("--json", help="for programs")]


@dataclass(frozen=True)
class _Asked:
    """What the options say of the letters that are meant."""

    ids: Sequence[str] | None
    reasons: Sequence[str] | None
    consumer: str | None
    type: str | None
    topic: str | None
    key: str | None
    older_than: timedelta | None
    newer_than: timedelta | None

    async def which(self, connection: asyncpg.Connection) -> Which:
        """Return them as they are at this moment."""
        newest = self.newer_than
        return Which(
            keys=await dead.keys_of(connection, self.ids) if self.ids else None,
            reasons=self.reasons or None,
            consumers=None if self.consumer is None else [self.consumer],
            type=self.type,
            topic=self.topic,
            record_key=None if self.key is None else self.key.encode(),
            since=None if newest is None else await dead.ago(connection, newest),
            # What dies from now on is not meant.
            until=await dead.ago(connection, self.older_than or timedelta(0)),
        )


def group(service: Service) -> typer.Typer:
    """Return the commands for a service."""
    app = typer.Typer(help="Messages that only a person can do more for.", no_args_is_help=True)

    @app.command("list")
    def list_letters(
        reason: _Reasons = None,
        consumer: _Consumer = None,
        type: _Type = None,
        topic: _Topic = None,
        key: _Key = None,
        older_than: _Older = None,
        newer_than: _Newer = None,
        waiting: Annotated[
            bool, typer.Option("--waiting", help="what waits in the backlog instead")
        ] = False,
        discarded: Annotated[
            bool, typer.Option("--discarded", help="what was discarded instead")
        ] = False,
        summary: Annotated[
            bool, typer.Option("--summary", help="only count what is alike")
        ] = False,
        limit: Annotated[int, typer.Option(min=1, help="so many at most")] = 50,
        as_json: _Json = False,
    ) -> None:
        """List dead letters, the newest first; with --json each is a line."""
        if waiting and discarded:
            raise typer.BadParameter("--waiting and --discarded exclude each other")
        state: State = "waiting" if waiting else "discarded" if discarded else "dead"
        asked = _Asked(None, reason, consumer, type, topic, key, older_than, newer_than)
        settings = read_settings()
        work = _summary if summary else _list
        run_to_end(work(service, settings, state, asked, limit, as_json=as_json))

    @app.command()
    def show(
        id: Annotated[str, typer.Argument(help="as `list` shows it")], as_json: _Json = False
    ) -> None:
        """Tell all that is stored of one, and what to do about it; also of one that waits."""
        run_to_end(_show(service, read_settings(), id, as_json=as_json))

    @app.command()
    def redrive(
        ids: _Ids = None,
        reason: _Reasons = None,
        consumer: _Consumer = None,
        type: _Type = None,
        topic: _Topic = None,
        key: _Key = None,
        older_than: _Older = None,
        newer_than: _Newer = None,
        wait: Annotated[
            float, typer.Option(min=0, help="seconds to wait for what becomes of them")
        ] = 30.0,
        dry_run: _DryRun = False,
        yes: _Yes = False,
        as_json: _Json = False,
    ) -> None:
        """Try them again, in order and with a new budget, and say what became of them.

        The exit code is 3 if some are dead again.
        """
        asked = _Asked(ids, reason, consumer, type, topic, key, older_than, newer_than)
        how = _How(dry_run, not yes, as_json)
        run_to_end(_redrive(service, read_settings(), asked, wait, how))

    @app.command()
    def discard(
        because: Annotated[str, typer.Option(help="why; it is kept")],
        ids: _Ids = None,
        reason: _Reasons = None,
        consumer: _Consumer = None,
        type: _Type = None,
        topic: _Topic = None,
        key: _Key = None,
        older_than: _Older = None,
        newer_than: _Newer = None,
        operator: Annotated[
            str | None, typer.Option(help="who; it is kept", show_default="you")
        ] = None,
        dry_run: _DryRun = False,
        yes: _Yes = False,
        as_json: _Json = False,
    ) -> None:
        """Give them up: they stay stored, and known when they come again; their keys go on."""
        asked = _Asked(ids, reason, consumer, type, topic, key, older_than, newer_than)
        by = _user() if operator is None else operator
        for name, text in (("--because", because), ("--operator", by)):
            if not text.strip():
                raise typer.BadParameter(f"{name} is empty: it is kept, to be read later")
        how = _How(dry_run, not yes, as_json)
        run_to_end(_discard(service, read_settings(), asked, by, because, how))

    return app


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # as in a container whose user has no name
        return ""


async def _list(
    service: Service, settings: Settings, state: State, asked: _Asked, limit: int, *, as_json: bool
) -> None:
    number = 0
    async with connected(service, settings) as connection:
        which = await asked.which(connection)
        async for letter in dead.letters(connection, state, which, limit):
            number += 1
            typer.echo(to_json(letter).decode() if as_json else _line(letter))
        if as_json:
            return
        total = sum(one.count for one in await dead.count(connection, state, which))
    more = f", the newest of {total:,}: --limit shows more" if total > number else ""
    typer.echo(f"{number:,} {state}{more}")


async def _summary(
    service: Service, settings: Settings, state: State, asked: _Asked, limit: int, *, as_json: bool
) -> None:
    async with connected(service, settings) as connection:
        groups = await dead.count(connection, state, await asked.which(connection))
    for one in groups[:limit]:
        typer.echo(to_json(one).decode() if as_json else _counted(one))
    if not as_json:
        typer.echo(f"{sum(one.count for one in groups):,} {state}")


async def _show(service: Service, settings: Settings, id: str, *, as_json: bool) -> None:
    async with connected(service, settings) as connection:
        detail = await dead.detail(connection, id)
    if as_json:
        fields = asdict(detail)
        typer.echo(to_json(fields.pop("letter") | fields, indent=2).decode())
    else:
        typer.echo(_told(detail))


@dataclass(frozen=True)
class _How:
    """How a command that changes something goes about it."""

    is_dry: bool
    asks: bool
    as_json: bool


async def _redrive(
    service: Service, settings: Settings, asked: _Asked, wait: float, how: _How
) -> None:
    became = None
    async with connected(service, settings) as connection:
        everything = await _of_the_dead(connection, asked)
        which = dead.redrivable(everything, service.handlers)
        groups = _without_what_stays(await dead.count(connection, "dead", everything), which)
        progress = _Progress("redriven", sum(one.count for one in groups))
        if _is_agreed("redrive", groups, how):
            redriven: list[Redriven] = []
            with progress.told():
                async for some in dead.redrive(
                    connection, service.handlers, which, patience=settings.backlog_lease
                ):
                    progress.add(len(some))
                    redriven += some if wait else []
            became = await dead.follow(connection, redriven, wait) if wait else None
    if how.as_json:
        counts = became and {outcome.value: number for outcome, number in became.counts.items()}
        progress.tell_program(became=counts, died=became and became.died)
    elif became:
        _tell_what_became(became, wait)
    if became and became.counts[Outcome.DEAD]:
        raise typer.Exit(_DEAD_AGAIN)


async def _discard(
    service: Service,
    settings: Settings,
    asked: _Asked,
    operator: str,
    because: str,
    how: _How,
) -> None:
    async with connected(service, settings) as connection:
        which = await _of_the_dead(connection, asked)
        groups = await dead.count(connection, "dead", which)
        progress = _Progress("discarded", sum(one.count for one in groups))
        if _is_agreed("discard", groups, how):
            with progress.told():
                async for number in dead.discard(
                    connection,
                    which,
                    operator=operator,
                    why=because,
                    patience=settings.backlog_lease,
                ):
                    progress.add(number)
    if how.as_json:
        progress.tell_program()


async def _of_the_dead(connection: asyncpg.Connection, asked: _Asked) -> Which:
    """Return what is asked for. Raises `Refused` for one that is named and is not dead."""
    for id in asked.ids or ():
        letter = (await dead.detail(connection, id)).letter
        if letter.state != "dead":
            what = "waits in the backlog" if letter.state == "waiting" else "was discarded"
            raise Refused(f"{id} is no dead letter, it {what}: see `service dead show {id}`")
    return await asked.which(connection)


def _without_what_stays(groups: Sequence[Group], which: Which) -> list[Group]:
    """Return what is redriven, and say what is not, and why."""
    redriven = []
    for one in groups:
        if one.consumer not in (which.consumers or ()):
            why = f"this service has no consumer {one.consumer!r}: they would wait for ever"
        elif one.reason in which.but_reasons:
            why = f"nobody can tell whether they were applied: see --reason {one.reason!r}"
        else:
            redriven.append(one)
            continue
        typer.echo(f"left out: {_counted(one)}; {why}", err=True)
    return redriven


def _is_agreed(verb: str, groups: Sequence[Group], how: _How) -> bool:
    """Count, and ask; says whether to go on. Raises `typer.Abort` if the answer is no."""
    total = sum(one.count for one in groups)
    if not how.as_json:
        for one in groups:
            typer.echo(_counted(one))
        typer.echo(f"{total:,} dead")
    if not total or how.is_dry:
        return False
    if how.asks and not typer.confirm(f"{verb.capitalize()} {total:,}?", err=True):
        raise typer.Abort
    return True


class _Progress:
    """How many of those that were found have been changed."""

    def __init__(self, verb: str, found: int) -> None:
        self._verb = verb
        self._found = found
        self._number = 0

    def add(self, number: int) -> None:
        """Count some more; long work says now and then how far it is."""
        before = self._number // _PROGRESS
        self._number += number
        if self._number // _PROGRESS > before:
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
        typer.echo(to_json({"found": self._found, self._verb: self._number} | more))


def _tell_what_became(became: Became, wait: float) -> None:
    parts = [f"{number:,} {outcome}" for outcome, number in became.counts.items() if number]
    typer.echo(", ".join(parts))
    for one in became.died:
        text = f"  {str(one['id'])[:_SHORT]} is dead again: {one['reason']}: {one['error']}"
        typer.echo(_one_line(text))
    if became.counts[Outcome.WAITING]:
        typer.echo(
            f"Some wait after {wait:g} s: see `service dead list --waiting`,"
            " and whether the service runs."
        )


def _counted(one: Group) -> str:
    newest = f"{_at(one.oldest)} to {_at(one.newest)}"
    consumer, type = one.consumer or "(nobody)", one.type or "-"
    return _one_line(
        f"{one.count:>8,}  {one.reason:<21}  {consumer:<20}  {type:<24}  {one.topic:<20}  {newest}"
    )


def _line(letter: Letter) -> str:
    """Return the letter in a line."""
    when = letter.discarded_at or letter.died_at or letter.due_at
    return _one_line(
        f"{letter.id[:_SHORT]}  {_at(when) if when else 'behind another':<20}"
        f"  {letter.attempts:>3}  {letter.reason:<21}  {letter.consumer or '(nobody)':<20}"
        f"  {letter.type or '-':<24}  {letter.topic}/{letter.partition}@{letter.offset}"
        f"  {_text(letter.key)}"
    )


def _told(detail: Detail) -> str:
    letter = detail.letter
    event = letter.type and f"{letter.type} {letter.message_id} of {letter.source}"
    lines = {
        "id": letter.id,
        "state": _state(detail),
        "reason": f"{letter.reason}, at attempt {letter.attempts}",
        "to do": detail.advice,
        "error": letter.error,
        "consumer": letter.consumer or "nobody: no handler has seen it",
        "event": event,
        "from": f"{letter.topic}/{letter.partition} at offset {letter.offset}",
        "key": letter.key and _text(letter.key),
        "written": _written(detail.timestamp),
        "received": _at(letter.received_at),
        "payload": detail.hash and f"hash {detail.hash}",
        "before": detail.remembered_hash and f"hash {detail.remembered_hash}",
        "trace": detail.traceparent,
        **{f"header {name}": _text(value) for name, value in detail.headers},
    }
    told = [_one_line(f"{name:<22} {text}") for name, text in lines.items() if text is not None]
    if detail.traceback:
        told += ["", _harmless(detail.traceback.rstrip())]
    return "\n".join([*told, "", _harmless(_text(detail.value))])


def _state(detail: Detail) -> str:
    letter = detail.letter
    if letter.discarded_at:
        by, why = detail.discarded_by, detail.discarded_why
        return f"discarded since {_at(letter.discarded_at)}, by {by}: {why}"
    if letter.died_at:
        key = "its key waits for it" if letter.holds else "its key goes on"
        return f"dead since {_at(letter.died_at)}; {key}"
    return f"waiting, due {_at(letter.due_at)}" if letter.due_at else "waiting, behind another"


def _written(milliseconds: int) -> str:
    try:
        return _at(datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=milliseconds))
    except OverflowError:  # producers may send any number
        return f"{milliseconds} ms since 1970"


def _at(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%SZ}"


def _text(data: Shown) -> str:
    if data is None:
        return "-"
    return data["text"] if "text" in data else f"0x{data['hex']}"


def _one_line(text: str) -> str:
    return _harmless(text.replace("\n", "\\n"))


def _harmless(text: str) -> str:
    """Return text that a terminal only shows."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
