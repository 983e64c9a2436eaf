"""The command `service inbox show`: the inbox markers and events of a handled message."""

from collections.abc import Sequence
from shlex import quote
from typing import Annotated

import asyncpg
import typer
from pydantic_core import from_json

from onceward.apply.statements import KEPT
from onceward.events.message import marker_key
from onceward.handlers.staging import event_id
from onceward.servers.revisions import check_database

from .dead import STATE
from .errors import Refused
from .output import one_line, print_fields, print_json, write
from .terminal import Invocation, operation

_SECONDS = 86_400.0
"""Time limit: without a source the statement reads all markers."""

ORDINALS = 1_000
"""Largest number of events of one message that are searched in the outbox."""

_MARKERS = f"""
SELECT consumer, source, id, type, topic, partition, "offset", created_at AS applied_at,
       xid AS transaction, generation, traceparent, hash, result::text
  FROM pipeline.inbox
 WHERE {KEPT}
   AND id = $1 AND ($2::bytea[] IS NULL OR key = ANY ($2))
 ORDER BY created_at, consumer
"""

_EVENTS = """
SELECT event_id, type, topic, convert_from(key, 'UTF8') AS key, sequence, traceparent
  FROM pipeline.outbox
 WHERE xid = ANY (ARRAY[$1::xid8, (SELECT reset_xid FROM pipeline.outbox_cluster)])
   AND event_id = ANY ($2)
 ORDER BY id
"""

_STATES = f"""
SELECT DISTINCT {STATE} AS state FROM pipeline.backlog
 WHERE id = $1 AND ($2::text IS NULL OR source = $2) ORDER BY state
"""

app = typer.Typer(help="Messages that the service has handled.", no_args_is_help=True)


async def events_of(
    connection: asyncpg.Connection, key: bytes, hash: bytes, transaction: object
) -> Sequence[asyncpg.Record]:
    """Return the events that a message's handler has published, as far as the outbox has them.

    They are found by key, hash and transaction of its marker.
    """
    ids = [event_id(key, hash, ordinal) for ordinal in range(ORDINALS)]
    rows: Sequence[asyncpg.Record] = await connection.fetch(_EVENTS, transaction, ids)
    return rows


@operation(app, example="service inbox show 7d0f2c5e --source /scanners/7")
async def show(
    invocation: Invocation,
    id: Annotated[str, typer.Argument(help="the event's id")],
    source: Annotated[str | None, typer.Option(help="its source, for a faster search")] = None,
) -> None:
    """Show when, where and with which outcome an event was handled."""
    keys = None
    if source is not None:  # an index finds these
        consumers = invocation.service.handlers.consumers
        keys = [marker_key(consumer, source, id) for consumer in consumers]
    found = []
    async with invocation.connected(check_database) as connection:
        for row in await connection.fetch(_MARKERS, id, keys, timeout=_SECONDS):
            key = marker_key(row["consumer"], row["source"], row["id"])
            events = await events_of(connection, key, row["hash"], row["transaction"])
            found.append((dict(row), [dict(event) for event in events]))
        rows = await connection.fetch(_STATES, id, source, timeout=_SECONDS)
        states = [row["state"] for row in rows]
    of_source = f" of source {source!r}" if source else ""
    lists = [
        f"`service dead list --event-id {quote(id)}{'' if state == 'dead' else f' --{state}'}`"
        for state in states
    ]
    is_in = f"{' and '.join(states)}, see {' and '.join(lists)}"
    if not found:
        if states:
            raise Refused(f"event {id!r}{of_source} was not applied: it is {is_in}")
        raise Refused(
            f"no event {id!r}{of_source} is remembered: never handled,"
            " skipped as no handler takes its type, or forgotten"
        )
    for number, (marker, events) in enumerate(found):
        marker["payload_hash"] = marker.pop("hash").hex()
        if invocation.as_json:
            result = None if marker["result"] is None else from_json(marker["result"])
            print_json(marker | {"result": result, "events": events})
            continue
        if number:
            write()
        print_fields(marker)
        for event in events:
            of_key = f", key {event['key']}" if event["key"] else ""
            to = f"{event['topic']}{of_key}"
            write(one_line(f"published {event['type']} {event['event_id']} to {to}"))
    if states:
        write(f"event {id!r}{of_source} is also {is_in}", err=True)
