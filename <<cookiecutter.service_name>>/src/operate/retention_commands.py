"""The commands `service retention …`: what is kept, until when, and why."""

from datetime import datetime
from typing import Annotated

import typer

from pipeline.consume import stamps
from pipeline.retention import archive, maintenance
from pipeline.retention.partitions import PartitionStatus
from pipeline.servers import revisions

from .errors import Refused
from .output import print_json, print_table, write
from .terminal import Invocation, operation

app = typer.Typer(help="What is kept, and until when.", no_args_is_help=True)


@operation(app, example="service retention run --json")
async def run(invocation: Invocation) -> None:
    """Create partitions and drop old ones, as a running service does every hour."""
    async with invocation.connected() as connection:
        service, settings = invocation.service, invocation.settings
        await revisions.check(connection, revisions.load_migrations())
        await maintenance.make_ahead(connection, settings)
        if service.archive and service.archive.is_on:  # a copy would archive into its original's
            await stamps.check(connection, settings, service.name, service.handlers.topics)
        await maintenance.begin_round(connection, 0)  # so that no service begins one now
        done = await maintenance.run_retention(
            connection, settings, archive=service.archive, report=invocation.say
        )
    if invocation.as_json:
        print_json(done)
        return
    for name in done.dropped:
        write(f"dropped  {name}")
    for one in done.held:
        write(f"held     {one.name}  {describe(one)}")
    if done.discarded:
        write(f"deleted  {done.discarded:,} dead letters that were discarded")
    if not (done.dropped or done.held or done.discarded):
        write("Nothing is old enough to be dropped.")


@operation(app, example="service retention status --json")
async def status(invocation: Invocation) -> None:
    """List days of the outbox and generations of the inbox; changes nothing."""
    async with invocation.connected(revisions.check_database) as connection:
        found = [one async for one in maintenance.list_partitions(connection, invocation.settings)]
    if invocation.as_json:
        print_json(*found)
    else:
        print_table(("name", "kept"), ([one.name, describe(one)] for one in found))


@operation(app, example="service retention skip-archive 2026-11-20")
async def skip_archive(
    invocation: Invocation,
    days: Annotated[
        list[datetime] | None, typer.Argument(formats=["%Y-%m-%d"], metavar="[DAY]...")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="all days, also those to come")] = False,
) -> None:
    """Drop days of the outbox without archiving them, in the next round of retention.

    --all ends archiving: remove the archive from the settings before.
    """
    if bool(days) == everything:
        raise typer.BadParameter("give either days or --all")
    chosen = [day.date() for day in days or ()]
    async with invocation.connected() as connection:
        skipped = await archive.skip(connection, chosen or None)
    if invocation.as_json:
        print_json(*({"day": day} for day in skipped))
    else:
        for day in skipped:
            write(f"{day} is dropped without being archived")
    if missing := [day for day in chosen if day not in skipped]:
        raise Refused(f"{', '.join(map(str, missing))}: the outbox has no such day that is over")


def describe(one: PartitionStatus) -> str:
    """Return until when a partition is kept, and why."""
    if one.due_at is None:
        return "created ahead" if one.is_ahead else "takes new markers"
    since = f"{one.due_at:%Y-%m-%d %H:%M}Z"
    if not one.is_due:
        return f"until {since}"
    return f"due since {since}: {one.needed_by or 'dropped in the next round'}"
