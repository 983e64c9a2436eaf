"""The commands `service dead events …`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated

import asyncpg
import typer

from pipeline.service import Service
from pipeline.settings import Settings

from . import dead_events
from .dead import State, ago
from .dead_events import EventDetail, EventGroup, RejectedEvent, Which
from .operations import Refused
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
from .tables import tell_table
from .terminal import Json, connected, read_settings, run_to_end, tell_program

_LAST = 2**63 - 1
_NAMES = ("id", "since", "reason", "type", "event", "topic", "key")
"""Of what is listed of each."""

_Id = Annotated[int, typer.Argument(min=1, max=_LAST, help="number in the outbox, as in `list`")]
_Ids = Annotated[
    list[int] | None,
    typer.Argument(min=1, max=_LAST, metavar="[ID]...", help="as `list` shows them"),
]
_Reasons = Annotated[
    list[str] | None,
    typer.Option("--reason", parser=one_of(list(dead_events.REASONS)), help="may be repeated"),
]
_EventId = Annotated[str | None, typer.Option(help="the event's own id, as the log names it")]
_Type = Annotated[str | None, typer.Option(help="type of the event")]
_Topic = Annotated[str | None, typer.Option(help="topic that it is for")]
_Key = Annotated[str | None, typer.Option(help="the event's key")]


@dataclass(frozen=True)
class _Asked:
    """What the options say of the events that are meant."""

    ids: Sequence[int] | None
    reasons: Sequence[str] | None
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
            ids=self.ids or None,
            reasons=self.reasons or None,
            event_id=self.event_id,
            type=self.type,
            topic=self.topic,
            key=None if self.key is None else self.key.encode(),
            since=None if newest is None else await ago(connection, newest),
            # What dies from now on is not meant.
            until=await ago(connection, self.older_than or timedelta(0)),
        )


def group(service: Service) -> typer.Typer:
    """Return the commands for a service."""
    app = typer.Typer(help="Events that Kafka rejects.", no_args_is_help=True)

    @app.command("list", epilog="For example: service dead events list --waiting --summary")
    def list_events(
        reason: _Reasons = None,
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
        """List dead events, the newest first; with --json each is a line."""
        state = state_of(waiting=waiting, discarded=discarded)
        asked = _Asked(None, reason, event_id, type, topic, key, older_than, newer_than)
        work = _summary if summary else _list
        run_to_end(work(service, read_settings(service), state, asked, limit, as_json=as_json))

    @app.command(epilog="For example: service dead events show 17")
    def show(id: _Id, as_json: Json = False) -> None:
        """Tell all that is stored of one, and what to do about it; also of one that waits."""
        run_to_end(_show(service, read_settings(service), id, as_json=as_json))

    @app.command(epilog="For example: service dead events redrive --reason 'topic missing'")
    def redrive(
        ids: _Ids = None,
        reason: _Reasons = None,
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
        """Let the relay publish them again, in order; say what became of them.

        The exit code is 3 if some are dead again.
        """
        asked = _Asked(ids, reason, event_id, type, topic, key, older_than, newer_than)
        how = how_to_go_about(
            vars(asked).values(), everything=everything, dry_run=dry_run, yes=yes, as_json=as_json
        )
        run_to_end(_redrive(service, read_settings(service), asked, wait, how))

    @app.command(epilog="For example: service dead events discard 17 --because 'paid twice'")
    def discard(
        because: Because,
        ids: _Ids = None,
        reason: _Reasons = None,
        event_id: _EventId = None,
        type: _Type = None,
        topic: _Topic = None,
        key: _Key = None,
        older_than: Older = None,
        newer_than: Newer = None,
        operator: Operator = None,
        waiting: Waiting = False,
        dry_run: DryRun = False,
        everything: All = False,
        yes: Yes = False,
        as_json: Json = False,
    ) -> None:
        """Give them up: they are never published; their rows stay."""
        asked = _Asked(ids, reason, event_id, type, topic, key, older_than, newer_than)
        by = signed(because, operator)
        how = how_to_go_about(
            vars(asked).values(), everything=everything, dry_run=dry_run, yes=yes, as_json=as_json
        )
        state = state_of(waiting=waiting, discarded=False)
        run_to_end(_discard(service, read_settings(service), state, asked, by, because, how))

    return app


async def _list(
    service: Service, settings: Settings, state: State, asked: _Asked, limit: int, *, as_json: bool
) -> None:
    rows = []
    async with connected(service, settings) as connection:
        which = await asked.which(connection)
        async for event in dead_events.events(connection, state, which, limit):
            if as_json:
                tell_program(event)
            else:
                rows.append(_row(event))
        if not as_json:
            tell_table(_NAMES, rows, right=("id",))
            groups = await dead_events.count(connection, state, which)
            tell_total(len(rows), total(groups), state)


async def _summary(
    service: Service, settings: Settings, state: State, asked: _Asked, limit: int, *, as_json: bool
) -> None:
    async with connected(service, settings) as connection:
        groups = await dead_events.count(connection, state, await asked.which(connection))
    if as_json:
        tell_program(*groups[:limit])
    else:
        _tell_groups(groups[:limit])
        typer.echo(f"{total(groups):,} {state}")


async def _show(service: Service, settings: Settings, id: int, *, as_json: bool) -> None:
    async with connected(service, settings) as connection:
        detail = await dead_events.detail(connection, id)
    if as_json:
        fields = asdict(detail)
        tell_program(fields.pop("event") | fields)
    else:
        _tell(detail)


async def _redrive(
    service: Service, settings: Settings, asked: _Asked, wait: float, how: How
) -> None:
    became = None
    async with connected(service, settings) as connection:
        which, groups = await _chosen(connection, "dead", asked)
        progress = Progress("redriven", total(groups))
        if is_agreed("redrive", groups, _tell_groups, how):
            redriven: list[int] = []
            with progress.told():
                async for ids in dead_events.redrive(
                    connection, which, patience=dead_events.patience_of(settings)
                ):
                    progress.add(len(ids))
                    redriven += ids if wait else []
            became = await dead_events.follow(connection, redriven, wait) if wait else None
    notices = (
        f"Some wait after {wait:g} s: the relay notices within {settings.relay_lease / 3:.3g} s,"
        " a third of its lease; see `service dead events list --waiting`, and whether a relay runs."
    )
    tell_what_became(became, progress, how, short=20, waiting=notices)


async def _discard(
    service: Service,
    settings: Settings,
    state: State,
    asked: _Asked,
    operator: str,
    because: str,
    how: How,
) -> None:
    async with connected(service, settings) as connection:
        which, groups = await _chosen(connection, state, asked)
        progress = Progress("discarded", total(groups))
        if is_agreed("discard", groups, _tell_groups, how):
            with progress.told():
                async for ids in dead_events.discard(
                    connection,
                    which,
                    operator=operator,
                    why=because,
                    patience=dead_events.patience_of(settings),
                    state=state,
                ):
                    progress.add(len(ids))
    if how.as_json:
        progress.tell_program()


async def _chosen(
    connection: asyncpg.Connection, state: State, asked: _Asked
) -> tuple[Which, list[EventGroup]]:
    """Return the events of that state. Raises `Refused` for a named one that has another."""
    for id in asked.ids or ():
        event = (await dead_events.detail(connection, id)).event
        if event.state != state:
            command = f"service dead events show {id}"
            refuse_unless_dead(event.state, f"{id} is no dead event", command)
            raise Refused(f"{id} does not wait, it is {event.state}: leave out --waiting")
    which = await asked.which(connection)
    return which, await dead_events.count(connection, state, which)


def _tell_groups(groups: Sequence[EventGroup]) -> None:
    rows = (
        (f"{one.count:,}", one.reason, one.type, one.topic, at(one.oldest), at(one.newest))
        for one in groups
    )
    names = ("count", "reason", "type", "topic", "oldest", "newest")
    tell_table(names, rows, right=("count",))


def _row(event: RejectedEvent) -> list[str]:
    """Return the event in a line."""
    return [
        str(event.id),
        at(event.discarded_at or event.died_at or event.parked_at),
        event.reason,
        event.type,
        event.event_id,
        event.topic,
        text_of(event.key),
    ]


def _tell(detail: EventDetail) -> None:
    event = detail.event
    tell_all(
        {
            "id": str(event.id),
            "state": _state(detail),
            "reason": event.reason,
            "to do": detail.advice,
            "error": event.error,
            "event": f"{event.type} {event.event_id} of {event.source}",
            "topic": event.topic,
            "key": event.key and text_of(event.key),
            "subject": detail.subject,
            "sequence": None if detail.sequence is None else str(detail.sequence),
            "written": at(event.created_at),
            "payload": f"{event.size or 0:,} bytes of {detail.content_type}"
            + (f", at {detail.dataref}" if detail.dataref else ""),
            "trace": detail.traceparent,
        },
        text_of(detail.payload),
    )


def _state(detail: EventDetail) -> str:
    event = detail.event
    if event.discarded_at:
        return given_up(event.discarded_at, detail.discarded_by, detail.discarded_why)
    if event.died_at:
        return f"dead since {at(event.died_at)}; its key goes on"
    return f"waiting since {at(event.parked_at)}"
