"""The commands `service archive …`: list and verify the archive, and find events in it."""

from collections.abc import Sequence
from datetime import date, datetime
from typing import Annotated

import typer

from onceward.cli.errors import Refused
from onceward.cli.output import print_json, write
from onceward.cli.terminal import Json, run_to_end
from onceward.object_store import Missing, Store
from onceward.redaction import redact

from . import reading
from .days import Archive
from .files import MANIFEST, Damaged
from .reading import Verdict

Days = Annotated[
    list[datetime] | None,
    typer.Argument(formats=["%Y-%m-%d"], metavar="[DAY]...", help="days to read; default: all"),
]


def group(archive: Archive) -> typer.Typer:
    """Return the commands for an archive."""
    app = typer.Typer(help="Archived days of the outbox.", no_args_is_help=True)

    @app.command("list", epilog="For example: service archive list")
    def list_days(as_json: Json = False) -> None:
        """List the archived days."""
        run_to_end(_list(archive, as_json=as_json))

    @app.command(epilog="For example: service archive verify 2026-11-20")
    def verify(days: Days = None, as_json: Json = False) -> None:
        """Read the archive; exit code 1 if anything is missing or changed."""
        run_to_end(_verify(archive, _dates(days), as_json=as_json))

    @app.command(epilog="For example: service archive find 7d0f2c5e 2026-11-20")
    def find(
        id: Annotated[str, typer.Argument(help="id of the event")],
        days: Days = None,
    ) -> None:
        """Print the events with an id, as one line of JSON each."""
        run_to_end(_find(archive, id, _dates(days)))

    return app


def _dates(days: list[datetime] | None) -> list[date]:
    return [day.date() for day in days or ()]


def _open(archive: Archive) -> Store:
    store = archive.open()
    if store is None:
        raise Refused("nothing is archived: PIPELINE_ARCHIVE_URL is not set")
    return store


async def _days(archive: Archive, store: Store, *, as_json: bool) -> Sequence[date]:
    found = await reading.days(archive, store)
    if not found:
        write("nothing is archived yet", err=as_json)
    return found


async def _list(archive: Archive, *, as_json: bool) -> None:
    store = _open(archive)
    for day in await _days(archive, store, as_json=as_json):
        one = await reading.listed(archive, store, day)
        if as_json:
            print_json(one)
        elif one.wrong or not one.finished_at:
            write(f"{day}  {one.wrong or 'not finished'}")
        else:
            write(f"{day}  {one.rows:,} events, {one.size:,} bytes, {one.finished_at:%F %R}Z")


async def _verify(archive: Archive, chosen: Sequence[date], *, as_json: bool) -> None:
    store = _open(archive)
    found = chosen or await _days(archive, store, as_json=as_json)
    is_whole = True
    for verdict in [] if chosen else reading.gaps(found):
        is_whole = False
        _print(verdict, as_json=as_json)
    for day in found:
        verdict = await reading.verify(archive, store, day)
        is_whole = is_whole and not verdict.wrong
        _print(verdict, as_json=as_json)
    if not is_whole:
        raise typer.Exit(1)


def _print(verdict: Verdict, *, as_json: bool) -> None:
    if as_json:
        print_json(verdict)
        return
    intact = f"{verdict.rows:,} events in {verdict.size:,} bytes are intact"
    for text in verdict.wrong or (intact,):
        write(f"{verdict.day}  {text}")


async def _find(archive: Archive, id: str, chosen: Sequence[date]) -> None:
    store = _open(archive)
    found, undecodable = 0, False
    for day in chosen or await reading.days(archive, store):
        try:
            async for event in reading.find(archive, store, day, id):
                if event["payload"] is not None:
                    event["payload"] = redact(event["payload"])
                print_json(event)
                found += 1
        except Missing:
            undecodable = True
            write(f"{day}: {MANIFEST} is missing; the day was not searched", err=True)
        except Damaged as error:
            undecodable = True
            write(f"{day}: {error}; the rest of the day was not searched", err=True)
    if not found:
        where = "the readable part of the archive" if undecodable else "the archive"
        raise Refused(f"no event {id!r} is in {where}")
    if undecodable:
        raise typer.Exit(1)
