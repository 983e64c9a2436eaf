"""The command line `service`."""

from contextlib import suppress
from datetime import datetime
from typing import Annotated

import asyncpg
import typer
from aiokafka.errors import KafkaError
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

from onceward.consume import stamps
from onceward.errors import is_access_denied, is_of_a_server, summarize_error
from onceward.operators import adopting, archive, audit, scheduled
from onceward.retention import maintenance
from onceward.retention.partitions import PartitionStatus
from onceward.runtime import Part, run
from onceward.servers import revisions, topics
from onceward.service import Service

from . import (
    dead_commands,
    inbox_commands,
    sql_commands,
    status_commands,
    throttle_commands,
    topic_commands,
)
from .errors import Refused
from .output import format_time, table
from .signing import Signed
from .terminal import (
    Invocation,
    Json,
    Limit,
    Program,
    Yes,
    in_a_sentence,
    naming_servers,
    operation,
    read_settings,
    run_to_end,
    service_of,
    serving,
)
from .words import app as words_app

_UNPUBLISHABLE = asyncpg.ObjectNotInPrerequisiteStateError, asyncpg.InvalidColumnReferenceError
"""Errors of an update of a table whose rows a publication can't identify."""

app = typer.Typer()
relay_app = typer.Typer(invoke_without_command=True)
scheduled_app = typer.Typer(help="Events to be published later.", no_args_is_help=True)
retention_app = typer.Typer(help="What is kept, and until when.", no_args_is_help=True)

GROUPS = {
    "topics": topic_commands.app,
    "inbox": inbox_commands.app,
    "dead": dead_commands.app,
    "retention": retention_app,
    "scheduled": scheduled_app,
    "relay": relay_app,
    "help": words_app,
}
WITHOUT_GROUP = (
    *(app, status_commands.app, throttle_commands.app, topic_commands.replay_app),
    sql_commands.app,
)


def command_line(service: Service, *apps: typer.Typer, **groups: typer.Typer) -> Program:
    """Return the command line `service`, whose console script is its `run_process`.

    `apps` are commands of other packages; `groups` are those with the name of a group before.
    """
    program = Program(
        name="service",
        help=f"The service {service.name}.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"obj": service},
    )
    for one in (*WITHOUT_GROUP, *apps):
        program.add_typer(one)
    for name, group in (GROUPS | groups).items():
        program.add_typer(group, name=name)
    return program


def _serve(context: typer.Context, parts: Part) -> None:
    service = service_of(context)
    with serving() as report:
        run_to_end(run(service, read_settings(service, report), parts), report)


@app.command("run", epilog="For example: service run")
def run_all(context: typer.Context) -> None:
    """Consume, relay and run retention, in one process."""
    _serve(context, Part.CONSUME | Part.RELAY)


@app.command(epilog="For example: service consume  # beside service relay")
def consume(context: typer.Context) -> None:
    """Consume and run retention, without a relay."""
    _serve(context, Part.CONSUME)


@relay_app.callback(epilog="For example: service relay  # beside service consume")
def relay(context: typer.Context) -> None:
    """Publish the outbox and run retention, without consuming."""
    if context.invoked_subcommand is None:
        _serve(context, Part.RELAY)


@operation(relay_app, "reset", example="service relay reset", by=Signed)  # its name in 1.0.0
@operation(app, example="service adopt", by=Signed)
async def adopt(
    invocation: Invocation,
    by: Signed,
    keep_progress: Annotated[
        bool, typer.Option("--keep-progress", help="transaction ids were kept (pg_upgrade)")
    ] = False,
    yes: Yes = False,
) -> None:
    """Make the database the service's, as after a restore: all that waits goes on here.

    Stop what runs on its original before. The whole outbox is published again.
    """
    settings, change = invocation.settings, by.to("adopt")
    async with invocation.connected(revisions.check_database) as connection:
        await revisions.check(connection, revisions.load_migrations())
        if not yes:
            calls, due, again = await adopting.count(connection, keep_progress=keep_progress)
            with suppress(KafkaError, OSError, ValueError):  # which may not be known
                reading = await topics.readers(settings, invocation.service.name)
                for one in sorted({one for one, _ in reading.values()}):
                    text = f"{one} reads topics of the service: if for another database, end it"
                    invocation.say(f"{text} before, or give this one other brokers")
            work = f"make {calls:,} calls, publish {due:,} scheduled events, {again:,} events again"
            invocation.confirm(f"At {settings.postgresql} and {settings.kafka}: {work}?")
        try:
            async with audit.changing(connection, change) as subjects:
                renewed = await adopting.adopt(connection, keep_progress=keep_progress)
                subjects.append(f"database, {renewed:,} events again")
        except _UNPUBLISHABLE as error:
            raise Refused(
                f"nothing was adopted: {summarize_error(error)}. `service adopt` updates every"
                " event, which a publication (CREATE PUBLICATION) prevents: exclude updates from it"
                " for this time, ALTER PUBLICATION … SET (publish = 'insert, delete, truncate')"
            ) from None
    done = "The database is the service's now: its processes go on, and relays publish it."
    invocation.answer({"published_again": renewed}, lines=[done])


@operation(scheduled_app, "list", example="service scheduled list --limit 10")
async def list_waiting(invocation: Invocation, limit: Limit = 50) -> None:
    """List scheduled events, the next due first."""
    async with invocation.connected(revisions.check_database) as connection:
        found = await scheduled.waiting(connection, limit)
    rows = (
        [format_time(one.due_at), one.name, one.type, one.topic, one.key or "-"] for one in found
    )
    names = "due", "name", "type", "topic", "key"
    invocation.answer(*found, lines=table(names, rows) if found else ["No event is scheduled."])


@operation(scheduled_app, example="service scheduled cancel remind-ada", by=Signed)
async def cancel(
    invocation: Invocation,
    by: Signed,
    names: Annotated[list[str], typer.Argument(help="names of scheduled events")],
) -> None:
    """Cancel scheduled events, so that they are never published."""
    who, _, why = by.to("cancel")
    async with invocation.connected() as connection:
        cancelled = await scheduled.cancel(connection, names, operator=who, why=why)
    lines = (f"cancelled {name}" for name in cancelled)
    invocation.answer(*({"name": name} for name in cancelled), lines=lines)
    if missing := set(names).difference(cancelled):
        raise Refused(f"not scheduled, or published already: {', '.join(sorted(missing))}")


@operation(retention_app, "run", example="service retention run --json")
async def run_retention(invocation: Invocation) -> None:
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
    lines = [f"dropped  {name}" for name in done.dropped]
    lines += [f"held     {one.name}  {_kept(one)}" for one in done.held]
    if done.discarded:
        lines.append(f"deleted  {done.discarded:,} dead letters that were discarded")
    invocation.answer(done, lines=lines or ["Nothing is old enough to be dropped."])


@operation(retention_app, "status", example="service retention status --json")
async def list_partitions(invocation: Invocation) -> None:
    """List days of the outbox and generations of the inbox; changes nothing."""
    async with invocation.connected(revisions.check_database) as connection:
        found = [one async for one in maintenance.list_partitions(connection, invocation.settings)]
    rows = ([one.name, _kept(one)] for one in found)
    invocation.answer(*found, lines=table(("name", "kept"), rows))


@operation(retention_app, example="service retention skip-archive 2026-11-20", by=Signed)
async def skip_archive(
    invocation: Invocation,
    by: Signed,
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
    chosen, change = [day.date() for day in days or ()], by.to("skip-archive")
    async with invocation.connected() as connection:
        skipped = await archive.skip(connection, chosen or None, change)
    lines = (f"{day} is dropped without being archived" for day in skipped)
    invocation.answer(*({"day": day} for day in skipped), lines=lines)
    if missing := [day for day in chosen if day not in skipped]:
        raise Refused(f"{', '.join(map(str, missing))}: the outbox has no such day that is over")


def _kept(one: PartitionStatus) -> str:
    """Return until when a partition is kept, and why."""
    if one.due_at is None:
        return "created ahead" if one.is_ahead else "takes new markers"
    since = f"{one.due_at:%Y-%m-%d %H:%M}Z"
    if not one.is_due:
        return f"until {since}"
    return f"due since {since}: {one.needed_by or 'dropped in the next round'}"


@app.command(epilog="For example: service migrate")
def migrate(context: typer.Context, as_json: Json = False) -> None:
    """Migrate the database to the newest schema, the engine's and yours."""
    service = service_of(context)
    settings = read_settings(service)
    with in_a_sentence():
        if not revisions.ALEMBIC.exists():
            raise FileNotFoundError(f"no {revisions.ALEMBIC} here: run it in the service's folder")
        migrations = revisions.load_migrations()
    invocation = Invocation(service, settings, as_json)
    if not run_to_end(_is_newer(invocation, migrations)):
        _upgrade(invocation)
    run_to_end(_make_ahead(invocation, migrations))


def _upgrade(invocation: Invocation) -> None:
    config = Config(revisions.ALEMBIC)
    config.attributes["service"] = invocation.service.name
    with in_a_sentence(), naming_servers(invocation.settings):
        try:
            command.upgrade(config, "heads")
        except Exception as error:
            if is_of_a_server(error) or is_access_denied(error):
                raise
            if failure := revisions.describe_failure(error):
                raise Refused(failure) from None
            raise


async def _is_newer(invocation: Invocation, migrations: ScriptDirectory | None) -> bool:
    """Return whether the database has all migrations of this code, and others.

    Raises `Refused` if it has others and lacks some: Alembic can't apply these then.
    """
    async with invocation.connected(revisions.check_database) as connection:
        if migrations is None:
            return False
        if wrong := await revisions.wrong_columns(connection, migrations):
            raise revisions.WrongColumns(wrong)
        unknown = await revisions.unknown(connection, migrations)
        if unknown and (lacking := await revisions.missing(connection, migrations)):
            raise Refused(
                f"nothing was migrated: the database has {', '.join(sorted(unknown))}, which this"
                f" code lacks, and lacks {', '.join(sorted(lacking))}: run the migrate of code that"
                " has both; after a reverted update docs/updating.md says what to do"
            )
        return bool(unknown)


async def _make_ahead(invocation: Invocation, migrations: ScriptDirectory | None) -> None:
    async with invocation.connected(revisions.check_database) as connection:
        await revisions.check(connection, migrations)
        await maintenance.make_ahead(connection, invocation.settings)
        applied = await revisions.applied_revisions(connection)
        is_newer = migrations and await revisions.unknown(connection, migrations)
    schema = "The tables are at the newest schema"
    if is_newer:
        schema = "The schema is newer than this code: nothing was migrated"
    done = f"{schema}, and partitions are made for the days ahead."
    invocation.answer({"revisions": applied}, lines=[done])
