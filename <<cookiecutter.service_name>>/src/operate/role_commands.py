"""The command `service grant`."""

from typing import Annotated

import asyncpg
import typer

from . import roles
from .errors import Refused
from .output import print_json
from .terminal import Invocation, operation

app = typer.Typer()


@operation(app, example="service grant --to-service parcels_service --to-relay parcels_relay")
async def grant(
    invocation: Invocation,
    to_service: Annotated[str | None, typer.Option(help="role that consumes")] = None,
    to_relay: Annotated[str | None, typer.Option(help="role that publishes")] = None,
    to_operator: Annotated[str | None, typer.Option(help="role of a person")] = None,
    to_retention: Annotated[
        str | None, typer.Option(help="role that makes and drops partitions, and owns them")
    ] = None,
) -> None:
    """Let roles of the database do their work and no more; after every `service migrate`."""
    given = (to_service, to_relay, to_operator, to_retention)
    names = {one: name for one, name in zip(roles.ROLES, given, strict=True) if name}
    if not names:
        raise typer.BadParameter("name a role, as by --to-service")
    async with invocation.connected() as connection:
        try:
            await roles.grant(connection, names, invocation.service.metadata)
        except asyncpg.UndefinedObjectError as error:
            raise Refused(f"{error}: an administrator has to create it before") from None
    if invocation.as_json:
        print_json(names)
        return
    for one, name in names.items():
        typer.echo(f"{name} may {roles.ROLES[one]}.")
