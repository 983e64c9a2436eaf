"""The commands `service debezium …`."""

from functools import partial
from typing import Annotated

import typer

from onceward.cli.errors import Refused
from onceward.cli.output import print_json, write
from onceward.cli.terminal import (
    Invocation,
    operation,
    read_settings,
    run_to_end,
    service_of,
    serving,
)
from onceward.runtime import Part, run

from .connector import connector, slot_of, statements
from .following import FollowingRelay

app = typer.Typer(help="Debezium in place of the relay.", no_args_is_help=True)

Role = Annotated[str, typer.Option(help="role in PostgreSQL by which the connector reads")]


@operation(app, example="service debezium sql --role debezium")
async def sql(invocation: Invocation, role: Role = "debezium") -> None:
    """Print the statements that make the role, the publication and the replication slot."""
    text = statements(invocation.service.name, role)
    if invocation.as_json:
        print_json({"statements": text})
    else:
        write(text, end="")


@operation(app, "connector", example="service debezium connector --role debezium")
async def print_connector(invocation: Invocation, role: Role = "debezium") -> None:
    """Print the connector's configuration as JSON, for the REST API of Kafka Connect."""
    if invocation.service.encryption is not None:
        raise Refused(
            "the service encrypts personal data, which only its relay can decrypt: Debezium would"
            " publish it as it is stored. Keep `service relay`"
        )
    print_json(connector(invocation.service.name, role, invocation.settings))


@app.command(epilog="For example: service debezium follow  # beside service consume")
def follow(context: typer.Context) -> None:
    """Run in place of `service relay`: move scheduled events, and let retention go on.

    It publishes what the replication slot lacks.
    """
    service = service_of(context)
    relay = partial(FollowingRelay, slot=slot_of(service.name))
    with serving() as report:
        work = run(service, read_settings(service, report), Part.RELAY, make_relay=relay)
        run_to_end(work, report)
