"""The command `service sql`: the statements that the service executes, for a review."""

from textwrap import indent
from typing import Annotated

import asyncpg
import typer

from onceward import sql
from onceward.errors import describe_error
from onceward.servers.revisions import check_database

from .output import print_json, write
from .terminal import Invocation, operation

app = typer.Typer()


@operation(app, "sql", example="service sql --explain")
async def show(
    invocation: Invocation,
    explain: Annotated[bool, typer.Option("--explain", help="with the plan of each")] = False,
) -> None:
    """Print the statements of the engine, with what they lock and their indexes."""
    found = [one._asdict() for one in sql.statements()]
    if explain:
        async with invocation.connected(check_database) as connection:
            for one in found:
                try:
                    one["plan"] = await sql.explain(connection, one["sql"])
                except (asyncpg.InsufficientPrivilegeError, asyncpg.UndefinedTableError) as error:
                    one["plan"] = describe_error(error)
    if invocation.as_json:
        print_json(*found)
        return
    for one in found:
        texts = one["name"], one["comment"], *([one["plan"]] if explain else [])
        comment = indent("\n\n".join(texts), "-- ", lambda line: True)
        write(f"{comment}\n{one['sql']};\n")
