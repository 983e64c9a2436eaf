"""The commands `service scheduled …`: events that are published later, and cancelling them."""

from typing import Annotated

import typer

from pipeline.relay import scheduled

from .errors import Refused
from .output import format_time, print_json, print_table
from .terminal import Invocation, operation

app = typer.Typer(help="Events that are to be published later.", no_args_is_help=True)


@operation(app, "list", example="service scheduled list --limit 10")
async def list_waiting(
    invocation: Invocation,
    limit: Annotated[int, typer.Option(min=1, help="at most so many")] = 50,
) -> None:
    """List what waits, the next to be due first."""
    async with invocation.connected() as connection:
        found = await scheduled.waiting(connection, limit)
    if invocation.as_json:
        print_json(*found)
        return
    rows = (
        [format_time(one.due_at), one.name, one.type, one.topic, one.key or "-"] for one in found
    )
    print_table(("due", "name", "type", "topic", "key"), rows)
    if not found:
        typer.echo("No event is scheduled.")


@operation(app, example="service scheduled cancel remind-ada")
async def cancel(
    invocation: Invocation,
    names: Annotated[list[str], typer.Argument(help="names of scheduled events")],
) -> None:
    """Take events back, so that they are never published."""
    async with invocation.connected() as connection:
        cancelled = await scheduled.cancel(connection, names)
    if invocation.as_json:
        print_json(*({"name": name} for name in cancelled))
    else:
        for name in cancelled:
            typer.echo(f"cancelled {name}")
    if missing := set(names).difference(cancelled):
        raise Refused(f"not scheduled, or published already: {', '.join(sorted(missing))}")
