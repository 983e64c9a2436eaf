"""The commands `service claims …`."""

import typer

from onceward.cli.errors import Refused
from onceward.cli.output import print_json, write
from onceward.cli.terminal import DryRun, Invocation, operation
from onceward.consume import stamps

from .check import open_claims

app = typer.Typer(help="Payloads in the object store.", no_args_is_help=True)
app.callback()(lambda: None)  # a group, although it has one command


@operation(app, example="service claims sweep --dry-run")
async def sweep(invocation: Invocation, dry_run: DryRun = False) -> None:
    """Delete payloads that no event needs, as a running service does in its rounds."""
    service, settings = invocation.service, invocation.settings
    claims = open_claims(service.name, settings)
    if claims is None:
        raise Refused("there is no object store: PIPELINE_CLAIM_URL is not set")
    async with invocation.connected() as connection:
        await stamps.check(connection, settings, service.name, service.handlers.topics)
        done = await claims.sweeper.all(connection, dry_run=dry_run)
    if invocation.as_json:
        print_json(done)
        return
    verb = "would be deleted" if dry_run else "deleted"
    write(f"{verb:9} {done.old:,} payloads whose events were published long ago")
    write(f"{verb:9} {done.orphans:,} payloads without an event, of {done.seen:,}")
