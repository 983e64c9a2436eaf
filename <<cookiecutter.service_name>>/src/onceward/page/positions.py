"""Positions in topics: where a seek or a replay would let the service go on."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import asyncpg
import typer
from aiokafka.errors import KafkaError

from onceward import Service
from onceward.cli import moves, topic_commands
from onceward.cli.errors import Refused
from onceward.cli.moves import Move
from onceward.cli.terminal import Invocation
from onceward.errors import describe_error
from onceward.settings import Settings

from . import parameters

FIELDS = ("what", "topic", "partition", "to")
"""Fields of a form that say what is to be moved; `what` is `seek` or `replay`."""
_SHOWN = re.compile("([0-9]{1,9}):([0-9]{1,19})")


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
    except TimeoutError:  # of PostgreSQL: those of Kafka are errors of it
        raise
    except (KafkaError, OSError) as error:
        raise Refused(f"{settings.kafka}: {describe_error(error)}") from error
    if planned.forgotten:
        raise Refused(topic_commands.forgotten(planned))
    return planned.moves


def shown(planned: Sequence[Move]) -> str:
    """Return the partitions and their new positions, as a field of the preview's form."""
    return " ".join(f"{one.slot.partition}:{one.new}" for one in planned)


def as_shown(planned: Sequence[Move], text: str) -> Sequence[Move]:
    """Return the moves to where a preview has shown them to go, whatever was written since.

    Raises `Refused` if it has shown other partitions, or the topic has these places no more.
    """
    offsets = {int(number): int(offset) for number, offset in _SHOWN.findall(text)}
    moves = [replace(one, new=offsets.get(one.slot.partition, -1)) for one in planned]
    if shown(moves) != text or not all(one.first <= one.new <= one.end for one in moves):
        raise Refused("the topic is not as a preview has shown it: preview it again")
    return moves
