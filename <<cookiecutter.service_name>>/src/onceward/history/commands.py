"""The commands `service timeline`, `service affected` and `service correct`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from enum import StrEnum
from shlex import quote
from time import monotonic
from typing import Annotated, Any

import asyncpg
import typer

from onceward.cli.dead_commands import Age, Wait, ago, span
from onceward.cli.errors import Refused
from onceward.cli.output import (
    content_of,
    format_span,
    format_time,
    format_value,
    print_json,
    table,
    write,
)
from onceward.cli.signing import Explained, Signed
from onceward.cli.terminal import DryRun, Invocation, Limit, Yes, operation
from onceward.servers.cluster import gate
from onceward.servers.database import Check
from onceward.servers.revisions import check_database

from . import correcting, released, timeline
from .correcting import Correcting, Progress
from .entries import Timeline
from .released import Wanted

_LOOK_SECONDS = 1.0
"""Time between two looks at what became of what was handed, and two reports of it."""

app = typer.Typer()


@operation(app, "timeline", example="service timeline parcel-17 --since 2h")
async def show(
    invocation: Invocation,
    key: Annotated[str, typer.Argument(help="the key in Kafka")],
    since: Annotated[
        timedelta | None,
        typer.Option(parser=span, metavar="90s|15m|2h|7d", help="how far to look back; 6h"),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="longest time to read records in Kafka")
    ] = timeline.SECONDS,
    limit: Limit = 200,
) -> None:
    """Show what happened to a key, in the order of time; what waits or is dead, of any age.

    The exit code is 1 if nothing is found. The longest wait is marked. With --json the last line
    says what is not known and was not searched.
    """
    async with invocation.connected(check_database) as connection:
        found = await timeline.look(
            connection,
            invocation.service,
            invocation.settings,
            key.encode(errors="surrogateescape"),
            await ago(connection, since or timeline.SINCE),
            limit=limit,
            seconds=seconds,
        )
    names = "time", "what", "where", "event", "release", "more"
    invocation.answer(*found.lines, lines=table(names, _rows(found)))
    for name, why in found.unknown.items():
        write(f"not known: {name}: {why}", err=True)
    for one in found.not_searched:
        write(f"not searched: {one}", err=True)
    if found.is_empty and not found.unknown:
        raise Refused(f"nothing of key {quote(key)} is known since then: --since looks back longer")


def _rows(found: Timeline) -> Iterator[list[str]]:
    for one in found.entries:
        trace = f"trace {one.trace}" if one.trace else None
        waited = f"<- {format_span(one.waited or 0.0)}" if one.is_longest else None
        more = "  ".join(filter(None, (one.more, trace, waited)))
        yield [format_time(one.at), one.what, one.where, one.event, one.release or "-", more]


What = StrEnum("What", ["COUNTS", "MESSAGES", "AGGREGATES", "EVENTS", "CALLS"])
"""What is listed of a release."""

_COUNTED = ("count", "what", "consumer", "topic", "type", "oldest", "newest")
_LISTED: Mapping[What, Sequence[str]] = {
    What.MESSAGES: ("created_at", "consumer", "type", "id", "topic", "partition", "offset", "key"),
    What.AGGREGATES: ("topic", "key", "first", "last", "events"),
    What.EVENTS: ("created_at", "type", "event_id", "topic", "key", "sequence"),
    What.CALLS: ("created_at", "state", "consumer", "type", "id", "key"),
}
"""Columns of a list."""
_LISTS: Mapping[
    What, Callable[[asyncpg.Connection, Wanted], AsyncIterator[Sequence[asyncpg.Record]]]
] = {
    What.MESSAGES: released.messages,
    What.AGGREGATES: released.aggregates,
    What.EVENTS: released.events,
    What.CALLS: released.calls,
}


@operation(app, "affected", example="service affected messages --release 1.4.2 --json")
async def affected(
    invocation: Invocation,
    release: Annotated[str, typer.Option(help="as PIPELINE_RELEASE has named it")],
    what: Annotated[What, typer.Argument(help="what to list")] = What.COUNTS,
    consumer: Annotated[str | None, typer.Option(help="of messages and calls: which")] = None,
    type: Annotated[str | None, typer.Option(help="type of the event")] = None,
    topic: Annotated[str | None, typer.Option(help="topic of the record or event")] = None,
    newer_than: Age = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="largest number; 50, and with --json all")
    ] = None,
) -> None:
    """Count or list what a release has written: what it has applied, published and called.

    What waits, is dead or is scheduled is counted, too. Messages and events are known as long as
    the inbox and the outbox keep them, by PIPELINE_INBOX_AGE and PIPELINE_OUTBOX_AGE.
    """
    if consumer is not None and what in (What.AGGREGATES, What.EVENTS):
        raise typer.BadParameter("--consumer is for messages and calls: events have no consumer")
    async with invocation.connected(check_database) as connection:
        since = None if newer_than is None else await ago(connection, newer_than)
        wanted = Wanted(
            release=release,
            consumer=consumer,
            types=None if type is None else [type],
            topics=None if topic is None else [topic],
            since=since,
        )
        if what is What.COUNTS:
            if not (groups := await released.count(connection, wanted)):
                await released.check(connection, release)
            invocation.answer(*groups, lines=_columns(_COUNTED, groups))
            return
        await released.check(connection, release)
        left = limit if limit or invocation.as_json else 50
        has_header = True
        async for rows in _LISTS[what](connection, wanted):
            some = [_entry(row) for row in rows[:left]]
            lines = _columns(_LISTED[what], some, has_header=has_header)
            invocation.answer(*some, lines=lines)
            has_header = False
            left = None if left is None else left - len(some)
            if left == 0:
                invocation.say("There may be more: --limit shows them.")
                return


def _entry(row: asyncpg.Record) -> dict[str, Any]:
    """Return what is shown of a row."""
    entry = {
        name: value
        for name, value in row.items()
        if name not in ("hash", "hash_version", "xid", "result", "key", "record_key")
    }
    return entry | {"key": content_of(row.get("record_key", row["key"]))}


def _columns(
    names: Sequence[str], entries: Sequence[Mapping[str, Any]], **header: bool
) -> Iterator[str | bytes]:
    rows = ([format_value(one[name]) for name in names] for one in entries)
    numbers = ("count", "partition", "offset", "first", "last", "events", "sequence")
    return table(names, rows, right=numbers, **header)


@operation(
    app, "correct", example="service correct return-fee --release 1.4.2 --dry-run", by=Signed
)
async def correct(
    invocation: Invocation,
    by: Signed,
    name: Annotated[str, typer.Argument(help="the correction's consumer")],
    release: Annotated[str | None, typer.Option(help="what it has applied is handed")] = None,
    newer_than: Age = None,
    rate: Annotated[
        int, typer.Option(min=1, max=1_000, help="messages in a second, at most")
    ] = correcting.RATE,
    wait: Wait = 60.0,
    cancel: Annotated[bool, typer.Option("--cancel", help="delete what waits for it")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Hand each message that a release has applied to a correction, once; it can be repeated.

    The exit code is 3 if some are dead letters of the correction, else 4 if some wait, or their
    records are gone or can't be read.
    """
    if cancel is (release is not None):
        raise typer.BadParameter("give --release, or --cancel")
    because = by.because or ""
    who = "" if dry_run else Explained(because, by.operator).to("correct").who
    check: Check = check_database if dry_run else gate
    async with invocation.connected(check) as connection:
        one = Correcting(connection, invocation.service, invocation.settings, name)
        if release is None:
            await _cancel(invocation, one, who, because, dry_run=dry_run, yes=yes)
            return
        wanted = await one.wanted(release, newer_than)
        if not (groups := await one.plan(wanted)):
            await released.check(connection, release)
        left = sum(group.left for group in groups)
        names = "found", "done", "gone", "topic", "type", "oldest", "newest"
        lines = _columns(names, [asdict(group) for group in groups])
        last = f"{left:,} to be handed, of those applied until {_time(wanted)}"
        invocation.answer(lines=[*lines, last])
        handed = Progress()
        if left and not dry_run:
            if not yes:
                invocation.confirm(f"Hand {left:,} messages to {name}?")
            await one.begin(wanted, who=who, why=because)
            handed = await _hand(one, wanted, rate, left)
        waiting, dead = await _follow(one, 0.0 if dry_run else wait)
    gone = handed.gone or sum(group.gone for group in groups)
    became = {
        "handed": handed.handed,
        "waiting": waiting,
        "dead": dead,
        "gone": gone,
        "unreadable": handed.unreadable,
    }
    if invocation.as_json:
        print_json({"groups": groups, "to": wanted.until} | became)
    else:
        write(", ".join(f"{number:,} {what}" for what, number in became.items()))
    if not dry_run and (dead or waiting or gone or handed.unreadable):
        raise typer.Exit(3 if dead else 4)


async def _cancel(
    invocation: Invocation, one: Correcting, by: str, because: str, *, dry_run: bool, yes: bool
) -> None:
    waiting, _ = await one.left()
    if not (dry_run or yes):
        invocation.confirm(f"Delete {waiting:,} messages that wait for it?")
    number = waiting if dry_run else await one.cancel(who=by, why=because)
    if invocation.as_json:
        print_json({"cancelled": number})
    else:
        write(f"{number:,} {'would be ' if dry_run else ''}cancelled: they can be handed again")


async def _hand(one: Correcting, wanted: Wanted, rate: int, left: int) -> Progress:
    """Hand the messages, and report how far it is."""
    progress, reported = Progress(), monotonic()
    try:
        async for progress in one.hand(wanted, rate):
            for batch in progress.batches:
                write(f"not handed: {batch}", err=True)
            if monotonic() - reported >= _LOOK_SECONDS:
                reported = monotonic()
                write(_handed(progress, left), err=True)
    except BaseException:
        write(f"{_handed(progress, left)}; run it again to continue", err=True)
        raise
    return progress


def _handed(progress: Progress, left: int) -> str:
    to = f", to those of {format_time(progress.to)}" if progress.to else ""
    return f"handed {progress.handed:,} of {left:,}{to}"


async def _follow(one: Correcting, seconds: float) -> tuple[int, int]:
    """Return how many wait and are dead, as soon as none waits or the time is over."""
    deadline = monotonic() + seconds
    while True:
        waiting, dead = await one.left()
        if not waiting or monotonic() >= deadline:
            return waiting, dead
        write(f"{waiting:,} wait, {dead:,} dead", err=True)
        await asyncio.sleep(_LOOK_SECONDS)


def _time(wanted: Wanted) -> str:
    return format_time(wanted.until) if wanted.until else "now"
