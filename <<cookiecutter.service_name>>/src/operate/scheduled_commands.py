"""The commands `service scheduled …`: what is to be published later, and taking it back."""

from typing import Annotated

import typer

from pipeline.relay import scheduled
from pipeline.service import Service
from pipeline.settings import Settings

from .operations import Refused
from .prompts import at
from .tables import tell_table
from .terminal import Json, connected, read_settings, run_to_end, tell_program


def group(service: Service) -> typer.Typer:
    """Return the commands for a service."""
    app = typer.Typer(help="Events that are to be published later.", no_args_is_help=True)

    @app.command("list", epilog="For example: service scheduled list --limit 10")
    def list_waiting(
        limit: Annotated[int, typer.Option(min=1, help="at most so many")] = 50,
        as_json: Json = False,
    ) -> None:
        """List what waits, the next to be due first."""
        run_to_end(_list(service, read_settings(service), limit, as_json=as_json))

    @app.command(epilog="For example: service scheduled cancel remind-ada")
    def cancel(
        names: Annotated[list[str], typer.Argument(help="names of scheduled events")],
        as_json: Json = False,
    ) -> None:
        """Take events back, so that they are never published."""
        run_to_end(_cancel(service, read_settings(service), names, as_json=as_json))

    return app


async def _list(service: Service, settings: Settings, limit: int, *, as_json: bool) -> None:
    async with connected(service, settings) as connection:
        found = [one async for one in scheduled.waiting(connection, limit)]
    if as_json:
        tell_program(*found)
        return
    rows = ((at(one.due_at), one.name, one.type, one.topic, one.key or "-") for one in found)
    tell_table(("due", "name", "type", "topic", "key"), rows)
    if not found:
        typer.echo("No event is scheduled.")


async def _cancel(service: Service, settings: Settings, names: list[str], *, as_json: bool) -> None:
    async with connected(service, settings) as connection:
        cancelled = await scheduled.cancel(connection, names)
    if as_json:
        tell_program(*({"name": name} for name in cancelled))
    else:
        for name in cancelled:
            typer.echo(f"cancelled {name}")
    if missing := set(names).difference(cancelled):
        raise Refused(f"not scheduled, or published already: {', '.join(sorted(missing))}")
