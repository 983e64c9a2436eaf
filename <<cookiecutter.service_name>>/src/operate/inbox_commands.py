"""The command `service inbox show`: what is remembered of a message that was handled."""

from typing import Annotated, Any

import asyncpg
import typer
from pydantic_core import from_json, to_json

from pipeline.events.message import marker_key
from pipeline.handlers.staging import event_id
from pipeline.service import Service

from .errors import Refused
from .output import one_line, print_fields, print_json
from .terminal import Invocation, operation

_SECONDS = 86_400.0
"""Without a source the statement reads all markers."""

_ORDINALS = 1_000
"""Events of one message that are looked for in the outbox."""

_MARKERS = """
SELECT consumer, source, id, type, topic, partition, "offset", created_at AS applied_at,
       xid AS transaction, generation, traceparent, hash, result::text
  FROM pipeline.inbox
 WHERE generation = ANY (ARRAY(
           SELECT generate_series(oldest, current) FROM pipeline.inbox_generation))
   AND id = $1 AND ($2::bytea[] IS NULL OR key = ANY ($2))
 ORDER BY created_at, consumer
"""

_EVENTS = """
SELECT event_id, type, topic, convert_from(key, 'UTF8') AS key
  FROM pipeline.outbox
 WHERE xid = ANY (ARRAY[$1::xid8, (SELECT reset_xid FROM pipeline.outbox_cluster)])
   AND event_id = ANY ($2)
 ORDER BY id
"""

app = typer.Typer(help="Messages that the service has handled.", no_args_is_help=True)


async def remembered(
    connection: asyncpg.Connection, service: Service, id: str, source: str | None
) -> list[dict[str, Any]]:
    """Return what the inbox has of a message at every consumer, found by its id.

    With its source an index finds it. `applied_at` is when the transaction began, by the database's
    clock; `transaction` is PostgreSQL's id of it (xid8); `result` is what the handler returned;
    `events` is what it published, as far as the outbox still holds it.
    """
    keys = None
    if source is not None:
        keys = [marker_key(consumer, source, id) for consumer in service.handlers.consumers]
    found = []
    for row in await connection.fetch(_MARKERS, id, keys, timeout=_SECONDS):
        key = marker_key(row["consumer"], row["source"], row["id"])
        ids = [event_id(key, row["hash"], ordinal) for ordinal in range(_ORDINALS)]
        events = await connection.fetch(_EVENTS, row["transaction"], ids)
        one = dict(row) | {"events": [dict(event) for event in events]}
        one["payload_hash"] = one.pop("hash").hex()
        one["result"] = None if row["result"] is None else from_json(row["result"])
        found.append(one)
    return found


@operation(app, example="service inbox show 7d0f2c5e --source /scanners/7")
async def show(
    invocation: Invocation,
    id: Annotated[str, typer.Argument(help="the event's id")],
    source: Annotated[str | None, typer.Option(help="its source, to find it faster")] = None,
) -> None:
    """Show when, where and with which outcome an event was handled."""
    async with invocation.connected() as connection:
        found = await remembered(connection, invocation.service, id, source)
    if not found:
        of_source = f" of source {source!r}" if source else ""
        raise Refused(f"no event {id!r}{of_source} is remembered: never handled, or forgotten")
    if invocation.as_json:
        print_json(*found)
        return
    for number, one in enumerate(found):
        if number:
            typer.echo()
        result = None if one["result"] is None else to_json(one["result"]).decode()
        events = one.pop("events")
        print_fields(one | {"result": result})
        for event in events:
            key = f", key {event['key']}" if event["key"] else ""
            typer.echo(
                one_line(f"published {event['type']} {event['event_id']} to {event['topic']}{key}")
            )
