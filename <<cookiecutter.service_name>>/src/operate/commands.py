"""The command line `service`."""

import logging
from collections.abc import Callable
from datetime import datetime
from typing import Annotated

import asyncpg
import typer
from aiokafka.admin import NewTopic
from aiokafka.errors import for_code
from alembic import command
from alembic.config import Config
from pydantic_core import to_json

from pipeline.apply import positions
from pipeline.retention.maintenance import make_ahead
from pipeline.runtime import Part, run
from pipeline.servers import clients, cluster, revisions
from pipeline.service import Service
from pipeline.settings import Settings

from . import dead_commands, replay, retention_commands, scheduled_commands, status_commands
from .operations import Move, Refused, Remembered, To, moves, remembered
from .tables import one_line
from .terminal import (
    Json,
    Program,
    connected,
    in_a_sentence,
    of_kafka,
    of_postgresql,
    read_settings,
    run_to_end,
    serving,
    tell_program,
)

log = logging.getLogger(__name__)

PLACE = "earliest|latest|OFFSET|TIME"
_REPLICAS = 3
"""Where there are as many brokers: one may be away, and what was acknowledged is kept."""
_TOPIC_EXISTS = 36
"""Kafka's error code TOPIC_ALREADY_EXISTS."""


def command_line(service: Service, **groups: typer.Typer) -> Callable[[], None]:
    """Return the function behind the console script `service`.

    `groups` are commands of other packages, by the name of their group.
    """
    app = Program(
        name="service",
        help=f"The service {service.name}.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    topics = typer.Typer(help="Kafka topics of the service.", no_args_is_help=True)
    app.add_typer(topics, name="topics")
    memory = typer.Typer(help="What the service has handled.", no_args_is_help=True)
    app.add_typer(memory, name="inbox")
    app.add_typer(dead_commands.group(service), name="dead")
    app.add_typer(retention_commands.group(service), name="retention")
    app.add_typer(scheduled_commands.group(service), name="scheduled")
    status_commands.add_to(app, service)
    for name, group in groups.items():
        app.add_typer(group, name=name)
    relays = typer.Typer(invoke_without_command=True)
    app.add_typer(relays, name="relay")

    def serve(parts: Part) -> None:
        with serving() as tell:
            work = run(service, read_settings(service, tell), parts)
            try:
                run_to_end(work, tell)
            except (KeyboardInterrupt, SystemExit) as error:
                # Signals don't: asyncio lets these out of any task, and so out of a handler's own.
                log.critical(
                    "%s in a task has ended the process", type(error).__name__, exc_info=error
                )
                raise

    @app.command("run", epilog="For example: service run")
    def run_all() -> None:
        """Consume, relay and run retention, in one process."""
        serve(Part.CONSUME | Part.RELAY)

    @app.command(epilog="For example: service consume  # beside service relay")
    def consume() -> None:
        """Consume and run retention, without a relay."""
        serve(Part.CONSUME)

    @relays.callback(epilog="For example: service relay  # beside service consume")
    def relay(context: typer.Context) -> None:
        """Publish the outbox and run retention, without consuming."""
        if context.invoked_subcommand is None:
            serve(Part.RELAY)

    @relays.command(epilog="For example: service relay reset")
    def reset(
        keep_progress: Annotated[
            bool,
            typer.Option(
                "--keep-progress", help="the cluster has kept the transaction ids (pg_upgrade)"
            ),
        ] = False,
        yes: Annotated[bool, typer.Option("--yes", help="don't ask")] = False,
        as_json: Json = False,
    ) -> None:
        """Publish everything in the outbox again, after a dump was restored."""
        work = _reset(
            service,
            read_settings(service),
            keep_progress=keep_progress,
            asks=not yes,
            as_json=as_json,
        )
        run_to_end(work)

    @memory.command(epilog="For example: service inbox show 7d0f2c5e --source /scanners/7")
    def show(
        id: Annotated[str, typer.Argument(help="the event's id")],
        source: Annotated[str | None, typer.Option(help="its source, to find it at once")] = None,
        as_json: Json = False,
    ) -> None:
        """Tell when, where and with which outcome an event was handled."""
        run_to_end(_show(service, read_settings(service), id, source, as_json=as_json))

    @app.command(epilog="For example: service migrate")
    def migrate(as_json: Json = False) -> None:
        """Bring the database to the newest schema, the engine's and yours."""
        settings = read_settings(service)
        with in_a_sentence():
            if not revisions.ALEMBIC.exists():
                raise FileNotFoundError(
                    f"no {revisions.ALEMBIC} here: run this in the service's folder"
                )
            with of_postgresql(settings):
                command.upgrade(Config(revisions.ALEMBIC), "heads")
        run_to_end(_make_ahead(service, settings, as_json=as_json))

    @topics.command("create", epilog="For example: service topics create --partitions 16")
    def create(
        partitions: Annotated[int, typer.Option(min=1, help="partitions of a new topic")] = 8,
        replicas: Annotated[
            int | None,
            typer.Option(
                min=1, help="of each partition; else three, or as many as there are brokers"
            ),
        ] = None,
        as_json: Json = False,
    ) -> None:
        """Create the topics that are missing; those that exist are left alone.

        In production say how many partitions: to change that later breaks the order of keys.
        """
        settings = read_settings(service)
        names = service.topics | (
            {settings.dead_letter_topic} if settings.dead_letter_topic else set()
        )
        work = _create_topics(settings, sorted(names), partitions, replicas, as_json=as_json)
        run_to_end(work)

    @topics.command(
        epilog="For example: service topics seek scans --partition 3 --to earliest --dry-run"
    )
    def seek(
        topic: Annotated[str, typer.Argument(help="a topic that the service reads")],
        to: Annotated[str, typer.Option(metavar=PLACE, help="where to go on")],
        partition: Annotated[int | None, typer.Option(min=0, help="only this one")] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="only tell")] = False,
        as_json: Json = False,
    ) -> None:
        """Go on elsewhere in a topic: what was handled before is not handled again."""
        place = _place_of(to)
        work = _seek(
            service,
            read_settings(service),
            topic,
            partition,
            place,
            dry_run=dry_run,
            as_json=as_json,
        )
        run_to_end(work)

    @app.command(epilog="For example: service replay scans --from 2026-11-01T08:00+00:00")
    def replay(
        topic: Annotated[str, typer.Argument(help="a topic that the service reads")],
        since: Annotated[str, typer.Option("--from", metavar=PLACE, help="where to begin")],
        partition: Annotated[int | None, typer.Option(min=0, help="only this one")] = None,
        too_old: Annotated[
            bool, typer.Option("--too-old", help="also what may have been forgotten")
        ] = False,
        wait: Annotated[bool, typer.Option(help="show how far it is, until it is done")] = True,
        as_json: Json = False,
    ) -> None:
        """Read a topic again: what took effect before is skipped, what has not is handled."""
        place = _place_of(since)
        work = _replay(
            *(service, read_settings(service), topic, partition, place),
            too_old=too_old,
            wait=wait,
            as_json=as_json,
        )
        run_to_end(work)

    return app


def _place_of(text: str) -> To:
    """Return what a person has written for a place in a topic."""
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    if text.isdecimal():
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not earliest, latest, an offset, or a time such as 2026-11-01T08:00+00:00"
        ) from None
    if time.tzinfo is None:
        raise typer.BadParameter(f"{text!r} has no zone: write {text}+00:00 for UTC")
    return time


async def _replay(
    service: Service,
    settings: Settings,
    topic: str,
    partition: int | None,
    to: To,
    *,
    too_old: bool,
    wait: bool,
    as_json: bool,
) -> None:
    """Move positions back, and follow them."""
    async with connected(service, settings) as connection:
        with of_kafka(settings):
            found = await replay.plan(connection, settings, service, topic, partition, to)
        if found.forgotten and not too_old:
            raise Refused(
                f"{found.forgotten:,} of {found.records:,} offsets are from before {found.since},"
                " and the inbox does not remember what it handled then, or not for much longer:"
                " they would be dead letters as too old. Begin with"
                f" --from {found.since:%Y-%m-%dT%H:%M:%SZ}, or add --too-old"
            )
        for one in found.moves:
            await positions.rewind(connection, one.slot, one.new)
            typer.echo(_moved(one, "goes"), err=as_json)
        became = None
        if wait:
            async for progress in replay.follow(connection, found):
                typer.echo(
                    f"{progress.done:,} of {found.records:,} offsets are read again"
                    + (": does the service run?" if progress.stands else ""),
                    err=as_json,
                )
            became = await replay.outcome(connection, found)
    if as_json:
        tell_program({"moves": found.moves, "became": became})
    elif became:
        waiting = f", {became.waiting:,} wait in the backlog" if became.waiting else ""
        typer.echo(
            f"{became.applied:,} messages took effect that had not, {became.known:,} were known"
            f"{waiting}; others were dead letters, or are nobody's"
        )
        if became.buried:
            typer.echo(
                f"{became.buried:,} messages were too old, and are dead letters now:"
                ' `service dead list --reason "too old"`'
            )


async def _make_ahead(service: Service, settings: Settings, *, as_json: bool) -> None:
    async with connected(service, settings) as connection:
        await make_ahead(connection, settings)
        if as_json:
            tell_program({"revisions": await revisions.applied_revisions(connection)})
            return
    typer.echo("The tables are at the newest schema, and partitions are made for the days ahead.")


async def _reset(
    service: Service, settings: Settings, *, keep_progress: bool, asks: bool, as_json: bool
) -> None:
    async with connected(service, settings) as connection:
        if asks and not typer.confirm(await _question(connection, keep_progress), err=as_json):
            raise typer.Abort
        renewed = await cluster.reset(connection, keep_progress=keep_progress)
    if as_json:
        tell_program({"published_again": renewed})
    else:
        typer.echo("The outbox belongs to this database cluster now; relays publish it.")


async def _question(connection: asyncpg.Connection, keep_progress: bool) -> str:
    if keep_progress:
        return "Go on where the relays were?"
    question = f"Publish {await cluster.count(connection):,} events again, with their ids?"
    if await cluster.is_ours(connection):
        return f"The outbox is this database cluster's already. {question}"
    return question


async def _show(
    service: Service, settings: Settings, id: str, source: str | None, *, as_json: bool
) -> None:
    async with connected(service, settings) as connection:
        found = await remembered(connection, service, id, source)
    if not found:
        whose = f" of source {source!r}" if source else ""
        raise Refused(f"no event {id!r}{whose} is remembered: never handled, or forgotten")
    if as_json:
        tell_program(*found)
    else:
        typer.echo("\n\n".join(_told(one) for one in found))


def _told(one: Remembered) -> str:
    lines = {
        "event": f"{one.type} {one.id} of {one.source}",
        "consumer": one.consumer,
        "applied": f"{one.applied_at.isoformat(sep=' ')}, transaction {one.transaction},"
        f" generation {one.generation}",
        "from": f"{one.topic}/{one.partition} at offset {one.offset}",
        "trace": one.traceparent,
        "payload": f"hash {one.payload_hash}",
        "result": None if one.result is None else to_json(one.result).decode(),
    }
    told = [one_line(f"{name:9} {text}") for name, text in lines.items() if text is not None]
    told += [
        one_line(
            f"{'published':9} {event['type']} {event['event_id']} to {event['topic']}"
            + (f", key {event['key']}" if event["key"] else "")
        )
        for event in one.events
    ]
    return "\n".join(told)


async def _seek(
    service: Service,
    settings: Settings,
    topic: str,
    partition: int | None,
    to: To,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    async with connected(service, settings) as connection:
        with of_kafka(settings):
            found = await moves(connection, settings, service, topic, partition, to)
        for one in found:
            if not dry_run:
                await positions.seek(connection, one.slot, one.new)
            typer.echo(_moved(one, "would go" if dry_run else "goes"), err=as_json)
    if as_json:
        tell_program(*found)


def _moved(one: Move, verb: str) -> str:
    old = "the beginning" if one.old is None else one.old
    passed = one.new - max(one.first, one.old or one.first)
    return (
        f"{one.slot.topic}/{one.slot.partition} {verb} from {old} to {one.new}"
        f" (the brokers have {one.first} to {one.end})"
        + (f"; passes over {passed} offsets, which are lost to this service" if passed > 0 else "")
    )


async def _create_topics(
    settings: Settings,
    names: list[str],
    partitions: int,
    replicas: int | None,
    *,
    as_json: bool,
) -> None:
    with of_kafka(settings):
        async with clients.admin_client(settings) as admin:
            if replicas is None:
                replicas = min(_REPLICAS, len((await admin.describe_cluster())["brokers"]))
            new = [NewTopic(name, partitions, replicas) for name in names]
            answer = await admin.create_topics(new)
    there: dict[str, list[str]] = {"created": [], "existed": []}
    made = f"created with {partitions} partitions, replicas: {replicas}"
    # aiokafka does not raise for a topic that could not be made: look at the codes.
    for name, code, *_ in answer.topic_errors:
        if code not in (0, _TOPIC_EXISTS):
            raise for_code(code)(f"topic {name} was not created")
        there["existed" if code else "created"].append(name)
        typer.echo(f"{name}: {'exists' if code else made}", err=as_json)
    if as_json:
        tell_program(there | {"partitions": partitions, "replicas": replicas})
