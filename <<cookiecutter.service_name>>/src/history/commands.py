"""The command `service timeline`."""

from dataclasses import asdict
from datetime import timedelta
from shlex import quote
from typing import Annotated

import typer

from operate.dead_commands import ago, span
from operate.errors import Refused
from operate.output import format_time, print_json, print_table, write
from operate.terminal import Invocation, Limit, operation
from pipeline.redaction import redact
from pipeline.servers.revisions import check_database

from . import timeline

app = typer.Typer()


@operation(app, "timeline", example="service timeline parcel-17 --since 2h")
async def show(
    invocation: Invocation,
    key: Annotated[str, typer.Argument(help="the key in Kafka")],
    since: Annotated[
        timedelta | None,
        typer.Option(parser=span, metavar="90s|15m|2h|7d", help="how far to look back; 6h"),
    ] = None,
    limit: Limit = 200,
) -> None:
    """Show what happened to a key, in the order of time; what waits or is dead, of any age."""
    async with invocation.connected(check_database) as connection:
        found = await timeline.look(
            connection,
            invocation.service,
            invocation.settings,
            key.encode(),
            await ago(connection, since or timedelta(hours=6)),
            limit,
        )
    if invocation.as_json:
        print_json(*map(asdict, found.entries))
    else:
        print_table(
            ("time", "what", "where", "event", "release", "more"),
            (
                [
                    format_time(one.at),
                    one.what,
                    one.where,
                    one.event,
                    one.release or "-",
                    redact(one.more),
                ]
                for one in found.entries
            ),
        )
    for name, why in found.unknown.items():
        write(f"not known: {name}: {why}", err=True)
    if all(one.what == "release" for one in found.entries) and not found.unknown:
        raise Refused(f"nothing of key {quote(key)} is in inbox, outbox and backlog since then")
