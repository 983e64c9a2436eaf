"""The commands `service retention …`: what is kept and until when, and what holds it back."""

from datetime import date, datetime
from functools import partial
from typing import Annotated

import typer

from pipeline.retention import archive, maintenance
from pipeline.retention.partitions import PartitionStatus
from pipeline.servers import revisions
from pipeline.service import Service
from pipeline.settings import Settings

from .operations import Refused
from .tables import tell_table
from .terminal import Json, connected, read_settings, run_to_end, tell_program


def group(service: Service) -> typer.Typer:
    """Return the commands for a service."""
    app = typer.Typer(help="What is kept, and until when.", no_args_is_help=True)

    @app.command(epilog="For example: service retention run --json")
    def run(as_json: Json = False) -> None:
        """Do what a running service does every hour: make partitions, drop what is too old."""
        run_to_end(_run(service, read_settings(service), as_json=as_json))

    @app.command(epilog="For example: service retention status --json")
    def status(as_json: Json = False) -> None:
        """List days of the outbox and generations of the inbox; changes nothing."""
        run_to_end(_status(service, read_settings(service), as_json=as_json))

    @app.command(epilog="For example: service retention skip-archive 2026-11-20")
    def skip_archive(
        days: Annotated[
            list[datetime] | None, typer.Argument(formats=["%Y-%m-%d"], metavar="[DAY]...")
        ] = None,
        everything: Annotated[
            bool, typer.Option("--all", help="every day that is over, and those to come")
        ] = False,
        as_json: Json = False,
    ) -> None:
        """Let days of the outbox be dropped without being archived.

        --all is for an archive that was given up: take it out of the settings before.
        """
        if bool(days) == everything:
            raise typer.BadParameter("name the days, or say --all")
        chosen = [day.date() for day in days or ()]
        run_to_end(_skip_archive(service, read_settings(service), chosen, as_json=as_json))

    return app


async def _run(service: Service, settings: Settings, *, as_json: bool) -> None:
    async with connected(service, settings) as connection:
        await revisions.check(connection, revisions.load_migrations())
        done = await maintenance.run_retention(
            connection, settings, archive=service.archive, report=partial(typer.echo, err=as_json)
        )
    if as_json:
        tell_program(done)
        return
    for name in done.dropped:
        typer.echo(f"dropped  {name}")
    for one in done.held:
        typer.echo(f"held     {one.name}  {_describe(one)}")
    if done.discarded:
        typer.echo(f"deleted  {done.discarded:,} dead letters that were discarded")
    if not done.is_ours:
        typer.echo(f"Process {done.owner} runs it, or has died less than a minute ago.")
    elif not (done.dropped or done.held or done.discarded):
        typer.echo("Nothing is old enough to be dropped.")


async def _skip_archive(
    service: Service, settings: Settings, days: list[date], *, as_json: bool
) -> None:
    async with connected(service, settings) as connection:
        skipped = await archive.skip(connection, days or None)
    if as_json:
        tell_program(*({"day": day} for day in skipped))
    else:
        for day in skipped:
            typer.echo(f"{day} is dropped without being archived")
    if missing := [day for day in days if day not in skipped]:
        raise Refused(f"{', '.join(map(str, missing))}: the outbox has no such day that is over")


async def _status(service: Service, settings: Settings, *, as_json: bool) -> None:
    async with connected(service, settings) as connection:
        found = [one async for one in maintenance.list_partitions(connection, settings)]
    if as_json:
        tell_program(*found)
        return
    tell_table(("name", "kept"), ((one.name, _describe(one)) for one in found))


def _describe(one: PartitionStatus) -> str:
    if one.due_at is None:
        return "made ahead" if one.is_ahead else "takes new markers"
    since = f"{one.due_at:%Y-%m-%d %H:%M}Z"
    if not one.is_due:
        return f"until {since}"
    why = one.needed_by or "goes in the next round"
    return f"due since {since}: {why}"
