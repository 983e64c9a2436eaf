"""The commands `service dead …` and `service dead events …`: list, show, redrive, discard."""

import getpass
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields
from typing import Annotated, Any, TypeVar

import asyncpg
import typer

from .dead import Became, Entry, Group, Selection, State, Store
from .dead_events import DeadEvents
from .dead_letters import DeadLetters
from .dead_options import Confirmation, Filters, Ids, LetterFilters
from .errors import Refused
from .output import format_value, one_line, print_fields, print_json, print_table
from .terminal import Invocation, operation

T = TypeVar("T")
Kind = type[Store[Any]]

PROGRESS = 10_000
"""After so many changes there is a line on standard error."""
_DEAD_AGAIN = 3
"""Exit code."""
_IS: dict[State, str] = {
    "waiting": "waits, and is tried again by itself",
    "dead": "is dead",
    "discarded": "was discarded",
}
_STAYS = {
    "consumer": "this service has no consumer {one.consumer!r}: they would wait for ever",
    "reason": "it is not known whether they were applied: see --reason {one.reason!r}",
}
"""Why `redrive` excludes dead letters."""


async def list_entries(
    invocation: Invocation,
    kind: Kind,
    filters: Filters,
    waiting: Annotated[bool, typer.Option("--waiting", help="those that wait instead")] = False,
    discarded: Annotated[bool, typer.Option("--discarded", help="those discarded")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="only count by groups")] = False,
    limit: Annotated[int, typer.Option(min=1, help="so many at most")] = 50,
) -> None:
    """List what is dead, the newest first; with --json each is a line."""
    if waiting and discarded:
        raise typer.BadParameter("--waiting and --discarded exclude each other")
    state: State = "waiting" if waiting else "discarded" if discarded else "dead"
    store = kind.of(invocation.service, invocation.settings)
    async with invocation.connected() as connection:
        selection = await filters.select(connection, store)
        if invocation.as_json and not summary:
            async for one in store.entries(connection, state, selection, limit):
                print_json(one)
            return
        groups = await store.count(connection, state, selection)
        if invocation.as_json:
            print_json(*groups[:limit])
            return
        if summary:
            _print_groups(groups[:limit])
            shown = total = _total(groups)
        else:
            entries = store.entries(connection, state, selection, limit)
            rows = [[format_value(one[name]) for name in kind.listed] async for one in entries]
            print_table(kind.listed, rows, right=("attempts", "offset"))
            shown, total = len(rows), _total(groups)
        more = f", the newest of {total:,}: --limit shows more" if total > shown else ""
        typer.echo(f"{shown:,} {state}{more}")
        if kind is DeadLetters and state == "dead":
            await _mention_events(invocation, connection)


async def _mention_events(invocation: Invocation, connection: asyncpg.Connection) -> None:
    events = await DeadEvents.of(invocation.service, invocation.settings).count(
        connection, "dead", Selection()
    )
    if events:
        typer.echo(f"dead events, too: {_total(events):,}; see `service dead events list`")


async def show(
    invocation: Invocation,
    kind: Kind,
    id: Annotated[str, typer.Argument(help="as `list` shows it")],
) -> None:
    """Show all that is stored of one, and what to do about it; also of one that waits."""
    async with invocation.connected() as connection:
        entry = await kind.of(invocation.service, invocation.settings).show(connection, id)
    if invocation.as_json:
        print_json(entry)
    else:
        _print_entry(entry)


async def redrive(
    invocation: Invocation,
    kind: Kind,
    filters: Filters,
    confirmation: Confirmation,
    ids: Ids = None,
    wait: Annotated[float, typer.Option(min=0, help="seconds to wait for what they become")] = 30.0,
) -> None:
    """Try them again, in order and with a new budget, and report what became of them.

    The exit code is 3 if some are dead again.
    """
    confirmation.check(are_chosen=bool(ids) or filters.are_given)
    store, became = kind.of(invocation.service, invocation.settings), None
    async with invocation.connected() as connection:
        everything = await _select(connection, kind, store, "dead", filters, ids)
        selection = store.redrivable(everything)
        groups = await store.count(connection, "dead", everything)
        groups = _without_excluded(groups, selection)
        redriven: Sequence[Any] = ()
        if _is_confirmed(invocation, "Redrive", groups, confirmation):
            chunks = store.redrive(connection, selection)
            redriven = await _count_changes("redriven", _total(groups), chunks)
            became = await store.follow(connection, redriven, wait) if wait else None
    if invocation.as_json:
        counts, died = (became.counts, became.died) if became else (None, None)
        done = {"found": _total(groups), "redriven": len(redriven)}
        print_json(done | {"became": counts, "died": died})
    elif became:
        _print_became(became)
        if became.counts["waiting"]:
            typer.echo(f"Some wait after {wait:g} s: {store.hint}")
    if became and became.counts["dead"]:
        raise typer.Exit(_DEAD_AGAIN)


async def discard(
    invocation: Invocation,
    kind: Kind,
    filters: Filters,
    confirmation: Confirmation,
    because: Annotated[str, typer.Option(help="why; it is kept")],
    ids: Ids = None,
    operator: Annotated[str | None, typer.Option(help="name to keep", show_default="you")] = None,
    waiting: Annotated[bool, typer.Option("--waiting", help="those that wait instead")] = False,
) -> None:
    """Give them up: their rows stay, and what waits for them goes on."""
    by = _user() if operator is None else operator
    for name, text in (("--because", because), ("--operator", by)):
        if not text.strip():
            raise typer.BadParameter(f"{name} is empty: it is kept, to be read later")
    confirmation.check(are_chosen=bool(ids) or filters.are_given)
    store = kind.of(invocation.service, invocation.settings)
    state: State = "waiting" if waiting else "dead"
    async with invocation.connected() as connection:
        selection = await _select(connection, kind, store, state, filters, ids)
        groups = await store.count(connection, state, selection)
        discarded: Sequence[Any] = ()
        if _is_confirmed(invocation, "Discard", groups, confirmation, state):
            chunks = store.discard(connection, selection, operator=by, why=because, state=state)
            discarded = await _count_changes("discarded", _total(groups), chunks)
    if invocation.as_json:
        print_json({"found": _total(groups), "discarded": len(discarded)})


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # as in a container whose user has no name
        return ""


async def _select(
    connection: asyncpg.Connection,
    kind: Kind,
    store: Store[Any],
    state: State,
    filters: Filters,
    ids: Sequence[str] | None,
) -> Selection:
    """Return what is chosen. Raises `Refused` for an id of an entry in another state."""
    for id in ids or ():
        found: State = (await store.show(connection, id))["state"]
        if found != state:
            raise Refused(
                f"{id} is not {state}, it {_IS[found]}: see `service {kind.command} show {id}`"
            )
    return await filters.select(connection, store, ids)


def _without_excluded(groups: Sequence[Group], selection: Selection) -> list[Group]:
    """Return what is redriven, and report what is not, and why."""
    redriven = []
    for one in groups:
        if selection.consumers is not None and one.consumer not in selection.consumers:
            why = _STAYS["consumer"]
        elif one.reason in (selection.except_reasons or ()):
            why = _STAYS["reason"]
        else:
            redriven.append(one)
            continue
        named = "  ".join(map(format_value, (one.count, one.reason, one.consumer, one.topic)))
        typer.echo(f"left out: {one_line(named)}; {why.format(one=one)}", err=True)
    return redriven


def _is_confirmed(
    invocation: Invocation,
    verb: str,
    groups: Sequence[Group],
    confirmation: Confirmation,
    state: State = "dead",
) -> bool:
    """Show what will be changed, and ask whether to go on. Raises `typer.Abort` if not."""
    number = _total(groups)
    if not invocation.as_json:
        _print_groups(groups)
        typer.echo(f"{number:,} {state}")
    if not number or confirmation.dry_run:
        return False
    if not confirmation.yes:
        invocation.confirm(f"{verb} {number:,}?")
    return True


def _print_entry(entry: Entry) -> None:
    """Write the columns of an entry, its headers, and then its texts of several lines."""
    values = dict(entry)
    texts = [values.pop(name, None) for name in ("traceback", "value", "payload")]
    headers = {f"header {name}": value for name, value in values.pop("headers", ())}
    print_fields(values | headers, *(format_value(text) for text in texts if text is not None))


def _print_groups(groups: Sequence[Group]) -> None:
    names = [one.name for one in fields(Group)]
    if all(one.consumer is None for one in groups):  # they are events
        names.remove("consumer")
    rows = ([format_value(getattr(one, name)) for name in names] for one in groups)
    print_table(names, rows, right=("count",))


def _print_became(became: Became) -> None:
    counts = [f"{number:,} {outcome}" for outcome, number in became.counts.items() if number]
    if counts:
        typer.echo(", ".join(counts))
    for one in became.died:
        typer.echo(one_line(f"  {one['id']} is dead again: {one['reason']}: {one['error']}"))


def _total(groups: Sequence[Group]) -> int:
    return sum(one.count for one in groups)


async def _count_changes(verb: str, found: int, chunks: AsyncIterator[Sequence[T]]) -> Sequence[T]:
    """Return everything that chunks have changed; report how many, now and then and at the end."""
    changed: list[T] = []
    reported = 0
    try:
        async for some in chunks:
            changed += some
            if len(changed) - reported >= PROGRESS:
                reported = len(changed)
                typer.echo(f"{verb} {reported:,} of {found:,}", err=True)
    except BaseException:
        typer.echo(f"{verb} {len(changed):,} of {found:,}; run it again to go on", err=True)
        raise
    typer.echo(f"{verb} {len(changed):,} of {found:,}", err=True)
    return changed


def _group(kind: Kind, filters: type[Filters], help: str, **discarded: Any) -> typer.Typer:
    """Return the commands for a kind of entries; `discarded` are no options of `discard`."""
    group = typer.Typer(help=help, no_args_is_help=True)
    line = f"service {kind.command}"
    chosen: dict[str, Any] = {"kind": kind, "filters": filters}
    changed = chosen | {"confirmation": Confirmation}
    operation(group, "list", example=f"{line} list --summary", **chosen)(list_entries)
    operation(group, example=f"{line} show {kind.example}", kind=kind)(show)
    operation(group, example=f"{line} redrive --topic orders --newer-than 2h", **changed)(redrive)
    example = f"{line} discard {kind.example} --because 'sent again by hand'"
    operation(group, example=example, **changed, **discarded)(discard)
    return group


app = _group(DeadLetters, LetterFilters, "Messages that need a person's decision.", waiting=False)
app.add_typer(_group(DeadEvents, Filters, "Events that Kafka rejects."), name="events")
