"""The commands `service claims …`."""

from typing import Annotated

import typer

from operate.errors import Refused
from operate.output import print_json
from operate.terminal import Json, connected, read_settings, run_to_end
from pipeline import Service
from pipeline.settings import Settings

from .check import open_claims
from .sweeping import NotOurs


def group(service: Service) -> typer.Typer:
    """Return the commands for a service."""
    app = typer.Typer(help="Payloads in the object store.", no_args_is_help=True)

    @app.callback()
    def _() -> None:
        """Make this a group, although it has one command."""

    @app.command(epilog="For example: service claims sweep --dry-run")
    def sweep(
        dry_run: Annotated[bool, typer.Option("--dry-run", help="only count")] = False,
        as_json: Json = False,
    ) -> None:
        """Delete payloads that no event needs, as a running service does in its rounds."""
        run_to_end(_sweep(service, read_settings(service), dry_run=dry_run, as_json=as_json))

    return app


async def _sweep(service: Service, settings: Settings, *, dry_run: bool, as_json: bool) -> None:
    claims = open_claims(service.name, settings)
    if claims is None:
        raise Refused("there is no object store: PIPELINE_CLAIM_URL is not set")
    async with connected(service, settings) as connection:
        try:
            done = await claims.sweeper.all(connection, dry_run=dry_run)
        except NotOurs as error:
            raise Refused(str(error)) from None
    if as_json:
        print_json(done)
        return
    verb = "would be deleted" if dry_run else "deleted"
    typer.echo(f"{verb:9} {done.old:,} payloads whose events were published long ago")
    typer.echo(f"{verb:9} {done.orphans:,} payloads without an event, of {done.seen:,}")
