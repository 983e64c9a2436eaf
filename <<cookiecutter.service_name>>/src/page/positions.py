"""Positions in topics: where a seek or a replay would let the service go on."""

from collections.abc import Mapping, Sequence

import asyncpg
import typer
from aiokafka.errors import KafkaError

from operate import moves, topic_commands
from operate.errors import Refused
from operate.moves import Move
from operate.terminal import Invocation
from pipeline import Service
from pipeline.errors import describe_error
from pipeline.settings import Settings

from . import parameters

FIELDS = ("what", "topic", "partition", "to")
"""Fields of a form that say what is to be moved; `what` is `seek` or `replay`."""


async def plan(
    connection: asyncpg.Connection, service: Service, settings: Settings, given: Mapping[str, str]
) -> Sequence[Move]:
    """Return how the positions would change, as the commands do. Changes nothing.

    Raises `Refused`, also if Kafka does not answer, and for a replay of what may be forgotten.
    """
    try:
        to = topic_commands.place(given["to"])
    except typer.BadParameter as error:
        raise Refused(str(error)) from None
    invocation = Invocation(service, settings, as_json=True)
    wanted = given["topic"], parameters.partition(given), to
    try:
        if given["what"] != "replay":
            return await moves.plan_moves(connection, invocation, *wanted)
        planned = await moves.plan_replay(connection, invocation, *wanted)
    except KafkaError as error:
        raise Refused(f"{settings.kafka}: {describe_error(error)}") from error
    if planned.forgotten:
        raise Refused(topic_commands.forgotten(planned))
    return planned.moves
