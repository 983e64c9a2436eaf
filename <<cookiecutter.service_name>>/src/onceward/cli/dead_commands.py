"""The commands `service dead …` and `service dead events …`: list, show, redrive, discard."""

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from itertools import chain
from typing import Annotated, Any

import asyncpg
import typer

from onceward.operators.copies import Copy
from onceward.servers.revisions import check_database

from .dead import Entry, Selection, State, Store
from .dead_events import DeadEvents
from .dead_letters import DeadLetters
from .output import format_value, one_line, print_fields, print_json, table, write
from .signing import Explained, Signed
from .terminal import DryRun, Invocation, Yes, operation

PROGRESS = 10_000
"""Number of changes after which progress is reported on standard error."""
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_DONE = {"redrive": "redriven", "discard": "discarded"}


def span(text: str) -> timedelta:
    """Return the time of an option such as 90s, 15m, 2h or 7d. Raises `typer.BadParameter`."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    time = timedelta(**{_UNITS[match[2]]: int(match[1])}) if match else timedelta.max
    if time > timedelta(days=36_525):
        raise typer.BadParameter(f"{text!r} is not a time such as 90s, 15m, 2h or 7d")
    return time


Age = Annotated[timedelta | None, typer.Option(parser=span, metavar="90s|15m|2h|7d")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="as `list` shows them")]
Waiting = Annotated[bool, typer.Option("--waiting", help="waiting ones instead")]
Wait = Annotated[float, typer.Option(min=0, help="seconds to wait for results")]


async def ago(connection: asyncpg.Connection, time: timedelta) -> datetime:
    """Return the database's time minus a duration."""
    moment: datetime = await connection.fetchval("SELECT clock_timestamp() - $1::interval", time)
    return moment


@dataclass(frozen=True)
class Filters:
    """Options that select entries."""

    reason: Annotated[list[str] | None, typer.Option(help="may be given several times")] = None
    event_id: Annotated[str | None, typer.Option(help="the event's own id, as in the log")] = None
    type: Annotated[str | None, typer.Option(help="type of the event")] = None
    topic: Annotated[str | None, typer.Option(help="topic of the record or event")] = None
    key: Annotated[str | None, typer.Option(help="the key in Kafka")] = None
    release: Annotated[str | None, typer.Option(help="release that has stored them")] = None
    older_than: Age = None
    newer_than: Age = None

    @property
    def are_given(self) -> bool:
        """Whether any option is set."""
        return any(getattr(self, one.name) not in (None, []) for one in fields(self))

    async def select(
        self, store: Store, ids: Sequence[str] | None = None, state: State = "dead"
    ) -> Selection:
        """Return the selection of the options and ids, as of now.

        Raises `Refused` for the id of an entry in another state.
        """
        if unknown := set(self.reason or ()).difference(store.reasons):
            known = ", ".join(store.reasons)
            raise typer.BadParameter(f"--reason {min(unknown)!r} is none of: {known}")
        consumer = getattr(self, "consumer", None)  # events have none
        return Selection(
            keys=await store.chosen(ids, state) if ids else None,
            reasons=self.reason or None,
            consumers=None if consumer is None else [consumer],
            event_id=self.event_id,
            type=self.type,
            topic=self.topic,
            record_key=None if self.key is None else self.key.encode(),
            release=self.release,
            since=None if self.newer_than is None else await ago(store.connection, self.newer_than),
            # Excludes what dies from now on.
            until=await ago(store.connection, self.older_than or timedelta(0)),
        )


@dataclass(frozen=True)
class LetterFilters(Filters):
    """Options that select dead letters."""

    consumer: Annotated[str | None, typer.Option(help="name; '' for records of none")] = None


@dataclass(frozen=True)
class Confirmation:
    """Options of commands that change entries."""

    dry_run: DryRun = False
    everything: Annotated[bool, typer.Option("--all", help="all, without ids and filters")] = False
    yes: Yes = False

    def check(self, *, are_chosen: bool) -> None:
        """Require `--all` for `--yes` without ids and filters.

        The ids may be those of an empty shell variable.
        """
        if self.everything and are_chosen:
            raise typer.BadParameter("--all excludes ids and filters")
        if self.yes and not (are_chosen or self.everything or self.dry_run):
            raise typer.BadParameter(
                "--yes without an id or a filter would mean everything: add --all if you mean that"
            )


async def list_entries(
    invocation: Invocation,
    kind: type[Store],
    filters: Filters,
    waiting: Waiting = False,
    discarded: Annotated[bool, typer.Option("--discarded", help="discarded ones instead")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="only count, by groups")] = False,
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="largest number; 50, and with --json all"),
    ] = None,
) -> None:
    """List the newest dead entries, or with an option the waiting or discarded ones."""
    if waiting and discarded:
        raise typer.BadParameter("--waiting and --discarded exclude each other")
    state: State = "waiting" if waiting else "discarded" if discarded else "dead"
    limit = limit or (None if invocation.as_json else 50)
    async with invocation.connected(check_database) as connection:
        store = kind(connection, invocation.service, invocation.settings)
        selection = await filters.select(store)
        if filters.older_than is None:  # the row of a paused key is as of the end of its pause
            selection = replace(selection, until=None)
        is_counted = summary or not invocation.as_json
        groups = await store.count(state, selection) if is_counted else []
        shown = total = _total(groups)
        if summary:
            invocation.answer(*groups[:limit], lines=_groups(groups[:limit]))
        else:
            shown = 0
            async for some in store.chunks(state, selection, limit):
                lines = _columns(kind.listed, some, has_header=not shown)
                invocation.answer(*some, lines=lines)
                shown += len(some)
    more = f", the newest of {total:,}: --limit shows more" if total > shown else ""
    invocation.answer(lines=[f"{shown:,} {state}{more}"])


async def show(
    invocation: Invocation,
    kind: type[Store],
    id: Annotated[str, typer.Argument(help="as `list` shows it")],
) -> None:
    """Show all that is stored of an entry, and what to do about it."""
    async with invocation.connected(check_database) as connection:
        entry = await kind(connection, invocation.service, invocation.settings).show(id)
    if invocation.as_json:
        print_json(entry)
        return
    texts = [entry.pop(name, None) for name in ("traceback", "value", "payload")]
    headers = {f"header {name}": value for name, value in entry.pop("headers", ())}
    print_fields(entry | headers, *(format_value(text) for text in texts if text is not None))


async def redrive(
    invocation: Invocation,
    kind: type[Store],
    filters: Filters,
    confirmation: Confirmation,
    by: Signed,
    ids: Ids = None,
    wait: Wait = 30.0,
    copy: Copy | None = None,
) -> None:
    """Try them again, in order and with new attempts, and report what became of them.

    The exit code is 3 if some are dead again, else 4 if some wait.
    """
    confirmation.check(are_chosen=bool(ids) or filters.are_given)
    became, followed = None, list[Any]()
    change = by.to("edit" if copy else "redrive")
    async with invocation.connected() as connection:
        store = kind(connection, invocation.service, invocation.settings)
        everything = await filters.select(store, ids)
        previewed = await store.preview(everything)
        for one, why in previewed:
            if why:
                left_out = one["count"], one["reason"], one["consumer"], one["topic"]
                named = one_line("  ".join(map(format_value, left_out)))
                write(f"left out: {named}; {why}", err=True)
        groups = [one for one, why in previewed if not why]
        chunks = store.redrive(store.redrivable(everything), change, copy)
        kept = followed if wait else None
        number = await _change(invocation, "redrive", groups, confirmation, chunks, kept=kept)
        if followed:
            became = await store.follow(followed, wait)
    if invocation.as_json:
        done = {"found": _total(groups), "redriven": number}
        print_json(done | {"became": became and became.counts, "died": became and became.died})
    elif became:
        counted = [f"{number:,} {name}" for name, number in became.counts.items() if number]
        write(", ".join(counted))
        for one in became.died:
            write(one_line(f"  {one['id']} is dead again: {one['reason']}: {one['error']}"))
        if became.counts["waiting"]:
            write(f"Some wait after {wait:g} s: {store.hint}")
    if became and (became.counts["dead"] or became.counts["waiting"]):
        raise typer.Exit(3 if became.counts["dead"] else 4)


async def edit(
    invocation: Invocation,
    id: Annotated[str, typer.Argument(help="as `list` shows it")],
    payload: Annotated[typer.FileBinaryRead, typer.Option(help="file with the new one, or `-`")],
    by: Explained,
    wait: Wait = 30.0,
) -> None:
    """Redrive a copy with another payload and id in the letter's place; the letter is discarded.

    The exit codes are those of `redrive`.
    """
    copy = Copy(payload.read(), by.to("edit").who, by.because)
    one = LetterFilters(), Confirmation(yes=True), by
    await redrive(invocation, DeadLetters, *one, ids=[id], wait=wait, copy=copy)


async def discard(
    invocation: Invocation,
    kind: type[Store],
    filters: Filters,
    confirmation: Confirmation,
    by: Explained,
    ids: Ids = None,
    waiting: Waiting = False,
) -> None:
    """Discard them: their rows stay, and what waits for them is no longer held."""
    change = by.to("discard")
    confirmation.check(are_chosen=bool(ids) or filters.are_given)
    state: State = "waiting" if waiting else "dead"
    async with invocation.connected() as connection:
        store = kind(connection, invocation.service, invocation.settings)
        selection = await filters.select(store, ids, state)
        groups = await store.count(state, selection)
        chunks = store.discard(selection, change, state)
        number = await _change(invocation, "discard", groups, confirmation, chunks, state=state)
    invocation.answer({"found": _total(groups), "discarded": number})


async def _change(
    invocation: Invocation,
    verb: str,
    groups: Sequence[Entry],
    confirmation: Confirmation,
    chunks: AsyncIterator[Sequence[Any]],
    *,
    state: State = "dead",
    kept: list[Any] | None = None,
) -> int:
    """Show what is to be changed, ask, and return how many rows the chunks have changed.

    Progress is reported, and the chunks are appended to `kept`. Raises `typer.Abort` for a no.
    """
    changed, reported, found = 0, 0, _total(groups)
    invocation.answer(lines=chain(_groups(groups), [f"{found:,} {state}"]))
    if not found or confirmation.dry_run:
        return 0
    if not confirmation.yes:
        invocation.confirm(f"{verb.capitalize()} {found:,}?")
    done = _DONE[verb]
    try:
        async for some in chunks:
            changed += len(some)
            if kept is not None:
                kept += some
            if changed - reported >= PROGRESS:
                reported = changed
                write(f"{done} {reported:,} of {found:,}", err=True)
    except BaseException:
        write(f"{done} {changed:,} of {found:,}; run it again to continue", err=True)
        raise
    write(f"{done} {changed:,} of {found:,}", err=True)
    return changed


def _groups(groups: Sequence[Entry]) -> Iterator[str | bytes]:
    if groups:
        absent = "consumer" if groups[0]["consumer"] is None else ""  # of events
        yield from _columns([name for name in groups[0] if name != absent], groups)


def _columns(
    names: Sequence[str], entries: Sequence[Entry], **header: bool
) -> Iterator[str | bytes]:
    rows = ([_cell(one, name) for name in names] for one in entries)
    return table(names, rows, right=("count", "attempts", "offset"), **header)


def _cell(entry: Entry, name: str) -> str:
    """Return the text of a column; of a letter that holds its key, how many messages it holds."""
    held = entry.get("held") if name == "holds" else None
    return "1,000+" if held == 1_001 else format_value(entry[name] if held is None else held)


def _total(groups: Sequence[Entry]) -> int:
    return sum(one["count"] for one in groups)


def _group(
    kind: type[Store], id: str, filters: type[Filters], help: str, **discarded: Any
) -> typer.Typer:
    """Return the commands for a kind of entries; `discarded` are fixed arguments of `discard`."""
    group = typer.Typer(help=help, no_args_is_help=True)
    line = f"service {kind.command}"
    chosen: dict[str, Any] = {"kind": kind, "filters": filters}
    changed = chosen | {"confirmation": Confirmation}
    operation(group, "list", example=f"{line} list --summary", **chosen)(list_entries)
    operation(group, example=f"{line} show {id}", kind=kind)(show)
    example = f"{line} redrive --topic orders --newer-than 2h"
    operation(group, example=example, **changed, by=Signed, copy=None)(redrive)
    example = f"{line} discard {id} --because 'sent again by hand'"
    operation(group, example=example, **changed, by=Explained, **discarded)(discard)
    return group


_LETTERS = "Messages that need a person's decision."
app = _group(DeadLetters, "7d0f2c5e", LetterFilters, _LETTERS, waiting=False)
_EDIT = "service dead edit 7d0f2c5e --payload new.json --because typo"
operation(app, example=_EDIT, by=Explained)(edit)
app.add_typer(_group(DeadEvents, "17", Filters, "Events that Kafka has rejected."), name="events")
