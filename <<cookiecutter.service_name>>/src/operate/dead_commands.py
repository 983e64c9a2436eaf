"""The commands `service dead …`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated

import asyncpg
import typer

from pipeline.service import Service
from pipeline.settings import Settings

from . import dead, dead_event_commands, dead_events
from .dead import Detail, Group, Letter, Redriven, State, Which
from .prompts import (
    All,
    Because,
    Discarded,
    DryRun,
    How,
    Limit,
    Newer,
    Older,
    Operator,
    Progress,
    Summary,
    Wait,
    Waiting,
    Yes,
    at,
    given_up,
    how_to_go_about,
    is_agreed,
    one_of,
    refuse_unless_dead,
    signed,
    state_of,
    tell_all,
    tell_total,
    tell_what_became,
    text_of,
    total,
)
from .tables import one_line, tell_table
from .terminal import Json, connected, read_settings, run_to_end, tell_program

_SHORT = 16
"""Characters of an id that are shown."""
_NAMES = ("attempts", "reason", "consumer", "type", "from", "key")
"""Of what is listed of each."""

_Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="as `list` shows them")]
_Reasons = Annotated[
    list[str] | None,
    typer.Option("--reason", parser=one_of(list(dead.REASONS)), help="may be repeated"),
]
_Consumer = Annotated[
    str | None, typer.Option(help="name of a consumer; '' for records that are nobody's")
]
_EventId = Annotated[str | None, typer.Option(help="the event's own id, as the log names it")]
_Type = Annotated[str | None, typer.Option(help="type of the event")]
_Topic = Annotated[str | None, typer.Option(help="topic that it came from")]
_Key = Annotated[str | None, typer.Option(help="the record's key")]


@dataclass(frozen=True)
class _Asked:
    """What the options say of the letters that are meant."""

    ids: Sequence[str] | None
    reasons: Sequence[str] | None
    consumer: str | None
    event_id: str | None
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
            event_id=self.event_id,
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

    events = dead_event_commands.group(service)
    app.add_typer(events, name="events")

    @app.command("list", epilog="For example: service dead list --summary")
    def list_letters(
        reason: _Reasons = None,
        consumer: _Consumer = None,
        event_id: _EventId = None,
        type: _Type = None,
        topic: _Topic = None,
        key: _Key = None,
        older_than: Older = None,
        newer_than: Newer = None,
        waiting: Waiting = False,
        discarded: Discarded = False,
        summary: Summary = False,
        limit: Limit = 50,
        as_json: Json = False,
    ) -> None:
        """List dead letters, the newest first; with --json each is a line."""
        state = state_of(waiting=waiting, discarded=discarded)
        asked = _Asked(None, reason, consumer, event_id, type, topic, key, older_than, newer_than)
        work = _summary if summary else _list
        run_to_end(work(service, read_settings(service), state, asked, limit, as_json=as_json))

    @app.command(epilog="For example: service dead show 7d0f2c5e")
    def show(
        id: Annotated[str, typer.Argument(help="as `list` shows it")], as_json: Json = False
    ) -> None:
        """Tell all that is stored of one, and what to do about it; also of one that waits."""
        run_to_end(_show(service, read_settings(service), id, as_json=as_json))

    @app.command(epilog="For example: service dead redrive --consumer post-notice")
    def redrive(
        ids: _Ids = None,
        reason: _Reasons = None,
        consumer: _Consumer = None,
        event_id: _EventId = None,
        type: _Type = None,
        topic: _Topic = None,
        key: _Key = None,
        older_than: Older = None,
        newer_than: Newer = None,
        wait: Wait = 30.0,
        dry_run: DryRun = False,
        everything: All = False,
        yes: Yes = False,
        as_json: Json = False,
    ) -> None:
        """Try them again, in order and with a new budget, and say what became of them.

        The exit code is 3 if some are dead again.
        """
        asked = _Asked(ids, reason, consumer, event_id, type, topic, key, older_than, newer_than)
        how = how_to_go_about(
            vars(asked).values(), everything=everything, dry_run=dry_run, yes=yes, as_json=as_json
        )
        run_to_end(_redrive(service, read_settings(service), asked, wait, how))

    @app.command(epilog="For example: service dead discard 7d0f2c5e --because 'sent again as 3'")
    def discard(
        because: Because,
        ids: _Ids = None,
        reason: _Reasons = None,
        consumer: _Consumer = None,
        event_id: _EventId = None,
        type: _Type = None,
        topic: _Topic = None,
        key: _Key = None,
        older_than: Older = None,
        newer_than: Newer = None,
        operator: Operator = None,
        dry_run: DryRun = False,
        everything: All = False,
        yes: Yes = False,
        as_json: Json = False,
    ) -> None:
        """Give them up: they stay stored, and known when they come again; their keys go on."""
        asked = _Asked(ids, reason, consumer, event_id, type, topic, key, older_than, newer_than)
        by = signed(because, operator)
        how = how_to_go_about(
            vars(asked).values(), everything=everything, dry_run=dry_run, yes=yes, as_json=as_json
        )
        run_to_end(_discard(service, read_settings(service), asked, by, because, how))

    return app


async def _list(
    service: Service, settings: Settings, state: State, asked: _Asked, limit: int, *, as_json: bool
) -> None:
    rows = []
    async with connected(service, settings) as connection:
        which = await asked.which(connection)
        async for letter in dead.letters(connection, state, which, limit):
            if as_json:
                tell_program(letter)
            else:
                rows.append(_row(letter))
        if as_json:
            return
        since = "due" if state == "waiting" else "since"
        tell_table(("id", since, *_NAMES), rows, right=("attempts",))
        tell_total(len(rows), total(await dead.count(connection, state, which)), state)
        await _tell_of_events(connection, state)


async def _summary(
    service: Service, settings: Settings, state: State, asked: _Asked, limit: int, *, as_json: bool
) -> None:
    async with connected(service, settings) as connection:
        groups = await dead.count(connection, state, await asked.which(connection))
        if as_json:
            tell_program(*groups[:limit])
            return
        _tell_groups(groups[:limit])
        typer.echo(f"{total(groups):,} {state}")
        await _tell_of_events(connection, state)


async def _tell_of_events(connection: asyncpg.Connection, state: State) -> None:
    """Say where the other dead letters are."""
    if state == "dead" and (number := await dead_events.number(connection)):
        typer.echo(f"dead events, too: {number:,}; see `service dead events list`")


async def _show(service: Service, settings: Settings, id: str, *, as_json: bool) -> None:
    async with connected(service, settings) as connection:
        detail = await dead.detail(connection, id)
    if as_json:
        fields = asdict(detail)
        tell_program(fields.pop("letter") | fields)
    else:
        _tell(detail)


async def _redrive(
    service: Service, settings: Settings, asked: _Asked, wait: float, how: How
) -> None:
    became = None
    async with connected(service, settings) as connection:
        everything = await _of_the_dead(connection, asked)
        which = dead.redrivable(everything, service.handlers)
        groups = _without_what_stays(await dead.count(connection, "dead", everything), which)
        progress = Progress("redriven", total(groups))
        if is_agreed("redrive", groups, _tell_groups, how):
            redriven: list[Redriven] = []
            with progress.told():
                async for some in dead.redrive(
                    connection, service.handlers, which, patience=settings.backlog_lease
                ):
                    progress.add(len(some))
                    redriven += some if wait else []
            became = await dead.follow(connection, redriven, wait) if wait else None
    waiting = (
        f"Some wait after {wait:g} s: see `service dead list --waiting`,"
        " and whether the service runs."
    )
    tell_what_became(became, progress, how, short=_SHORT, waiting=waiting)


async def _discard(
    service: Service,
    settings: Settings,
    asked: _Asked,
    operator: str,
    because: str,
    how: How,
) -> None:
    async with connected(service, settings) as connection:
        which = await _of_the_dead(connection, asked)
        groups = await dead.count(connection, "dead", which)
        progress = Progress("discarded", total(groups))
        if is_agreed("discard", groups, _tell_groups, how):
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
        refuse_unless_dead(letter.state, f"{id} is no dead letter", f"service dead show {id}")
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
        typer.echo(f"left out: {one_line('  '.join(_cells(one)[:-2]))}; {why}", err=True)
    return redriven


def _tell_groups(groups: Sequence[Group]) -> None:
    names = ("count", "reason", "consumer", "type", "topic", "oldest", "newest")
    tell_table(names, map(_cells, groups), right=("count",))


def _cells(one: Group) -> list[str]:
    named = (one.reason, one.consumer or "(nobody)", one.type or "-", one.topic)
    return [f"{one.count:,}", *named, at(one.oldest), at(one.newest)]


def _row(letter: Letter) -> list[str]:
    """Return the letter in a line."""
    when = letter.discarded_at or letter.died_at or letter.due_at
    return [
        letter.id[:_SHORT],
        at(when) if when else "behind another",
        str(letter.attempts),
        letter.reason,
        letter.consumer or "(nobody)",
        letter.type or "-",
        f"{letter.topic}/{letter.partition}@{letter.offset}",
        text_of(letter.key),
    ]


def _tell(detail: Detail) -> None:
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
        "key": letter.key and text_of(letter.key),
        "written": _written(detail.timestamp),
        "received": at(letter.received_at),
        "payload": detail.hash and f"hash {detail.hash}",
        "before": detail.remembered_hash and f"hash {detail.remembered_hash}",
        "trace": detail.traceparent,
        **{f"header {name}": text_of(value) for name, value in detail.headers},
    }
    traceback = [detail.traceback.rstrip()] if detail.traceback else []
    tell_all(lines, *traceback, text_of(detail.value))


def _state(detail: Detail) -> str:
    letter = detail.letter
    if letter.discarded_at:
        return given_up(letter.discarded_at, detail.discarded_by, detail.discarded_why)
    if letter.died_at:
        key = "its key waits for it" if letter.holds else "its key goes on"
        return f"dead since {at(letter.died_at)}; {key}"
    return f"waiting, due {at(letter.due_at)}" if letter.due_at else "waiting, behind another"


def _written(milliseconds: int) -> str:
    try:
        return at(datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=milliseconds))
    except OverflowError:  # producers may send any number
        return f"{milliseconds} ms since 1970"
