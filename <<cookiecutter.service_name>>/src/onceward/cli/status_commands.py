"""The commands `service status` and `service doctor`."""

import asyncio
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from onceward.errors import StoreUnavailable, summarize_error
from onceward.operators.stopping import Stop
from onceward.servers.revisions import WrongDatabase, check_database

from . import doctor, status
from .health import Finding, judge
from .output import format_span, format_time, one_line, print_json, table, write
from .status import AT_MOST, Kind, Stage, Status, format_count
from .terminal import Invocation, operation

_WATCH_SECONDS = 2.0
_CLEAR = b"\x1b[2J\x1b[H"
_WIDTH = 80

app = typer.Typer()


@operation(app, "status", example="service status --watch")
async def show(
    invocation: Invocation,
    watch: Annotated[bool, typer.Option("--watch", help="repeat until Ctrl+C")] = False,
) -> None:
    """Show lag, backlog, outbox and findings on one screen; all of them without a terminal.

    Larger counts are 10,000+. If more than 10,000 messages wait, N+ are at least N.

    Open breakers are known to their process only: /health/ready names them.
    """
    while True:
        try:
            async with invocation.connected(check_database) as connection:
                while True:
                    found = await status.look(connection, invocation.service, invocation.settings)
                    if invocation.as_json:
                        print_json(found)
                    else:
                        is_terminal = sys.stdout.isatty()
                        write(_CLEAR if watch and is_terminal else b"")
                        write("\n".join(screen(found, is_whole=not is_terminal)))
                    if not watch:
                        return
                    await asyncio.sleep(_WATCH_SECONDS)
        except StoreUnavailable as error:  # --watch continues after an outage
            if not watch:
                raise
            write(str(error), err=True)
            await asyncio.sleep(_WATCH_SECONDS)


@operation(app, "doctor", example="service doctor --strict --json")
async def examine(
    invocation: Invocation,
    strict: Annotated[bool, typer.Option("--strict", help="warnings count as wrong")] = False,
) -> None:
    """Check settings, servers and tables, and report what to do; changes nothing.

    The exit code is 1 if something is wrong.
    """
    service, settings = invocation.service, invocation.settings
    try:
        async with invocation.connected(check_database) as connection:
            found = await doctor.examine(connection, service, settings)
    except (StoreUnavailable, WrongDatabase) as error:
        advice = "start the server, or correct PIPELINE_DATABASE_URL, for the other checks"
        check = "database" if isinstance(error, WrongDatabase) else "postgresql"
        wrong = Finding("wrong", summarize_error(error), advice, check=check)
        found = [wrong, *await doctor.examine(None, service, settings)]
    rows = (row for one in found for row in _rows(one))
    invocation.answer(*found, lines=table(("level", "check", "found"), rows))
    levels = {one.level for one in found}
    if "wrong" in levels or (strict and "warning" in levels):
        raise typer.Exit(1)


def _rows(finding: Finding) -> Iterator[tuple[str, str, str]]:
    yield finding.level, finding.check, finding.found
    if finding.advice:
        yield "", "", f"-> {finding.advice}"


def screen(found: Status, *, is_whole: bool = False) -> list[str]:
    """Return lines for a screen of 80 columns and 24 lines, or all, uncut, if it `is_whole`."""
    lines = [f"{found.service}  {format_time(found.at)}"]
    for name, texts, at_most in _blocks(found):
        shown = texts if is_whole or len(texts) <= at_most else texts[: at_most - 1]
        lines += [f"{name:<10} {one_line(text)}".rstrip() for text in shown]
        if left := len(texts) - len(shown):
            lines.append(f"{'':10} and {left} more: see --json")
    cut = [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in lines]
    return lines if is_whole else cut


def _blocks(found: Status) -> Iterator[tuple[str, list[str], int]]:
    """Yield the name of some lines, what they say, and how many of them a screen has at most."""
    yield ("paused", [*map(_stop, found.stops)], 3) if found.stops else ("", [""], 1)
    yield "reads", [_topic(found, one) for one in found.of("reads")], 4
    yield "backlog", [_consumer(found, one) for one in found.of("backlog", "calls")], 4
    for name, part, text in _parts(found):
        yield name, ["not known, see below" if part in found.unknown else text], 1
    shown = found.unknown.keys() | {"paused", "processes"}  # other lines say it
    findings = [one for one in judge(found) if one.check not in shown]
    for level in ("wrong", "warning"):
        yield level, [f"{one.check}: {one.found}" for one in findings if one.level == level], 2
    yield "unknown", [f"{part}: {why}" for part, why in found.unknown.items()], 2


def _parts(found: Status) -> Iterator[tuple[str, str, str]]:
    """Yield a line's name, the part of the status that it needs, and its text."""
    to_publish = f"{format_count(found.waiting('outbox'))} to publish{_age(found, 'outbox')}"
    other = "of a copy, nothing is published: `service adopt`"
    yield "outbox", "outbox", to_publish if found.is_this_cluster else other
    shards = sum(len(one.shards) for one in found.relays.values())
    without = found.shards_without_relay
    alone = f", {without} shards without one" if without else ""
    relays = f"{len(found.relays)} with {shards} shards{alone}"
    yield "relays", "relays", relays if found.relays else "none: run `service relay`"
    waiting, dead = format_count(found.waiting("rejected")), format_count(found.dead("rejected"))
    yield "rejected", "rejected", f"{waiting} waiting, {dead} dead{_age(found, 'rejected')}"
    due = f", next {format_time(found.next_due)}" if found.next_due else ""
    yield "scheduled", "scheduled", f"{format_count(found.waiting('scheduled'))}{due}"
    since = found.remembered_since
    yield "remembers", "memory", f"all since {format_time(since)}" if since else "everything"
    yield "ahead", "memory", f"partitions until {found.ahead_until}"


def _age(found: Status, kind: Kind) -> str:
    if not found.waiting(kind):
        return ""
    topic = found.slowest_topic(kind)
    return f", oldest {format_span(found.oldest(kind))}{f' for {topic}' if topic else ''}"


def _topic(found: Status, stage: Stage) -> str:
    its = [one for one in found.readings if one.topic == stage.subject]
    moved = max((one.moved_at for one in its if one.moved_at), default=None)
    ago = f"moved {format_span((found.at - moved).total_seconds())} ago" if moved else "never read"
    if stage.waiting is None:
        return f"{stage.subject}  {len(its)} partitions, lag not known, {ago}"
    worst = max(its, key=lambda one: one.lag or 0)
    where = f" (partition {worst.partition}: {worst.lag:,})" if worst.lag and len(its) > 1 else ""
    readers = {one.reader for one in its} - {None}
    by = f", {len(readers) or 'no'} reader{'s' * (len(readers) > 1)}"
    known_by = by if found.are_readers_known else ""
    age = f", oldest {format_span(stage.oldest)}" if stage.oldest >= 1 else ""
    return f"{stage.subject}  lag {stage.waiting:,}{where}{age}, {ago}{known_by}"


def _consumer(found: Status, stage: Stage) -> str:
    # Only some were counted, if there are more of all consumers together. A consumer has none if
    # none is due: the first of a key is, except behind a dead letter.
    more_dead = "+" if (found.dead("backlog", "calls") or 0) > AT_MOST else ""
    is_part = found.is_cut_off and (stage.waiting or stage.dead or more_dead)
    more, least = ("+", "at least ") if is_part else ("", "")
    what = "calls: " if stage.kind == "calls" else ""
    waiting = f"{what}{min(stage.waiting or 0, AT_MOST):,}{more} waiting"
    failing = f", {stage.failing:,}{more} failing" if stage.failing else ""
    dead = f"{min(stage.dead, AT_MOST):,}{more_dead} dead"
    of_topic = f" for {stage.slowest_topic}" if stage.slowest_topic else ""
    age = f", oldest {least}{format_span(stage.oldest)}{of_topic}" if stage.waiting else ""
    return f"{stage.subject or '(none)'}  {waiting}{failing}, {dead}{age}"


def _stop(one: Stop) -> str:
    state = f" {one.state}" if one.per_second else ""
    return f"{one.subject}{state}, {format_span(one.seconds)}, {one.who}: {one.why}"
