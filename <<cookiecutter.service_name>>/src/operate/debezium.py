"""Debezium in the place of the relay: what it is configured with, and the relay that follows it.

PostgreSQL does not tell two slots of one name apart. So the connector refuses a slot that is newer
than its own offset (`offset.mismatch.strategy`), and the relay publishes by itself whatever was
committed before the slot that it finds.
"""

import logging
from collections.abc import Mapping
from typing import Any

import asyncpg
from sqlalchemy import make_url

from pipeline.observe import metrics
from pipeline.relay.cursor import ServerChanged
from pipeline.relay.relay import Relay
from pipeline.relay.window import Page, Progress
from pipeline.settings import Settings

log = logging.getLogger(__name__)

PASSWORD = "DEBEZIUM_PASSWORD"
"""Environment variable of the Connect workers with the password of the connector's role."""

_HEADERS = {
    "event_id": "ce_id",
    "source": "ce_source",
    "type": "ce_type",
    "created_at": "ce_time",
    "subject": "ce_subject",
    "sequence": "ce_sequence",
    "content_type": "content-type",
    "traceparent": "traceparent",
    "tracestate": "tracestate",
    "baggage": "baggage",
    "dataref": "ce_dataref",
    "datalength": "ce_datalength",
    "datachecksum": "ce_datachecksum",
}
"""The header for each column of the outbox that becomes one."""

_SQL = """\
-- As a superuser, in the database of the service; wal_level must be logical. The role needs a
-- password.
CREATE ROLE {role} LOGIN REPLICATION;
GRANT USAGE ON SCHEMA pipeline TO {role};
GRANT SELECT ON pipeline.outbox TO {role};
CREATE PUBLICATION {slot} FOR TABLE pipeline.outbox
  WITH (publish = 'insert', publish_via_partition_root = true);
SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput');
"""

# The snapshot of a statement is older than what its functions return: what is visible in `seen`
# was committed below `written`.
_FOLLOW = """
SELECT pg_postmaster_start_time() AS server, pg_current_snapshot() AS seen,
       (pg_current_wal_insert_lsn() - '0/0')::bigint AS written,
       (slot.confirmed_flush_lsn - '0/0')::bigint AS confirmed, slot.active_pid AS walsender
  FROM (SELECT) AS one
  LEFT JOIN pg_replication_slots AS slot
    ON slot_name = $1 AND database = current_database() AND wal_status <> 'lost'
"""

_LAG_AT_MOST = 10_000
_LAG = """
SELECT count(*) AS count, min(created_at) AS oldest
  FROM (SELECT created_at FROM pipeline.outbox
         WHERE xid >= pg_snapshot_xmin($1) AND NOT pg_visible_in_snapshot(xid, $1)
         ORDER BY xid LIMIT $2) AS unconfirmed
"""


def slot_of(service: str) -> str:
    """Return the name of a service's replication slot, and of its publication."""
    return f"{service.replace('-', '_')}_outbox"


def statements(service: str, role: str) -> str:
    """Return the SQL that prepares a database for the connector."""
    quoted = role.replace('"', '""')
    return _SQL.format(slot=slot_of(service), role=f'"{quoted}"')


def connector(service: str, role: str, settings: Settings) -> Mapping[str, str]:
    """Return the configuration of the connector, without secrets."""
    url = make_url(settings.database_url.get_secret_value())
    slot = slot_of(service)
    placed = ",".join(f"{column}:header:{name}" for column, name in _HEADERS.items())
    outbox = "transforms.outbox."
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "topic.prefix": service,
        "database.hostname": url.host or "localhost",
        "database.port": str(url.port or 5432),
        "database.dbname": url.database or "",
        "database.user": role,
        "database.password": f"${{env:{PASSWORD}}}",
        "database.sslmode": "verify-full" if settings.database_tls else "prefer",
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": slot,
        "publication.autocreate.mode": "disabled",
        "table.include.list": "pipeline.outbox",
        "snapshot.mode": "no_data",
        # A slot that was made again lacks events: the task fails, instead of skipping them.
        "offset.mismatch.strategy": "trust_offset",
        # Without events, only these move the slot, which otherwise holds all write-ahead log.
        "heartbeat.interval.ms": "5000",
        "heartbeat.action.query": "SELECT pg_logical_emit_message(true, 'heartbeat', '')",
        "message.prefix.exclude.list": "heartbeat",
        "poll.interval.ms": "10",
        "extended.headers.enabled": "false",
        # Above the largest event, which must fit with its key and headers.
        "producer.override.max.request.size": str(2 * max(settings.max_event_bytes, 2**20)),
        "key.converter": "io.debezium.converters.BinaryDataConverter",
        "key.converter.delegate.converter.type": "org.apache.kafka.connect.json.JsonConverter",
        "value.converter": "io.debezium.converters.BinaryDataConverter",
        "value.converter.delegate.converter.type": "org.apache.kafka.connect.json.JsonConverter",
        "header.converter": "org.apache.kafka.connect.storage.StringConverter",
        "transforms": "version,header,outbox,id",
        # `InsertHeader` would make the number 1 of it.
        "transforms.version.type": "org.apache.kafka.connect.transforms.InsertField$Value",
        "transforms.version.static.field": "ce_specversion",
        "transforms.version.static.value": "1.0",
        "transforms.header.type": "org.apache.kafka.connect.transforms.HeaderFrom$Value",
        "transforms.header.fields": "ce_specversion",
        "transforms.header.headers": "ce_specversion",
        "transforms.header.operation": "move",
        "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
        f"{outbox}route.by.field": "topic",
        f"{outbox}route.topic.replacement": "${routedByValue}",
        f"{outbox}table.field.event.id": "event_id",
        f"{outbox}table.field.event.key": "key",
        f"{outbox}table.field.event.payload": "payload",
        f"{outbox}table.fields.additional.placement": placed,
        # The router's own, which is the same as ce_id.
        "transforms.id.type": "org.apache.kafka.connect.transforms.DropHeaders",
        "transforms.id.headers": "id",
    }


class FollowingRelay(Relay):
    """A relay that lets a connector publish, and moves the cursor as far as its slot is confirmed.

    It publishes by itself what was committed before it found the slot, and everything while there
    is none. So events may be sent twice then, and none is skipped. Scheduled events, and those that
    wait for a topic or were redriven, stay the relay's.
    """

    def __init__(self, *arguments: Any, slot: str, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._slot = slot
        self._covered: dict[int, Progress] = {}
        """Shards whose events are all published, or decoded from the slot, with their progress."""
        self._noted: asyncpg.Record | None = None
        """What was committed at a moment since which the same walsender holds the slot."""
        self._has_slot = True

    async def _serve(self) -> None:
        self._covered.clear()
        self._noted = None
        await super()._serve()

    async def _step(self, driver: asyncpg.Connection, *, is_poll: bool) -> tuple[bool, bool]:
        now = await driver.fetchrow(_FOLLOW, self._slot)
        if now["server"] != self._cursor.server:
            raise ServerChanged
        has_slot = now["confirmed"] is not None
        if has_slot != self._has_slot:
            log.warning("relay: %s", self._describe(has_slot))
            self._has_slot = has_slot
        # Shards claimed meanwhile have another relay's progress, or that of a reset.
        if has_slot and self._covered == self._cursor.progress:
            await self._retry(driver)
            await self._follow(driver, now)
            self._covered = dict(self._cursor.progress)
            return False, False
        found, is_more = await super()._step(driver, is_poll=False)
        # The window was opened after the slot was found, and all of it is published.
        self._covered = dict(self._cursor.progress) if has_slot and not is_more else {}
        return found, is_more

    async def _follow(self, driver: asyncpg.Connection, now: asyncpg.Record) -> None:
        """Advance to what was noted, if that is confirmed, and note what is committed now."""
        noted = self._noted
        if noted and noted["walsender"] != now["walsender"]:
            noted = None
        if noted and now["confirmed"] >= noted["written"]:
            then = Progress(noted["seen"], None, 0, 0)
            self._cursor.advance(Page([*self._cursor.progress], [], then, now["server"]))
            noted = None
        self._noted = noted or (now if now["walsender"] else None)
        for one in {*self._cursor.progress.values()}:
            metrics.observe_outbox(*await driver.fetchrow(_LAG, one.seen, _LAG_AT_MOST))
        self._failures = 0
        if now["walsender"]:
            self._health.ready("relay")
        else:
            reason = f"no connector reads the replication slot {self._slot}: see its task's status"
            self._health.not_ready("relay", reason)

    def _describe(self, has_slot: bool) -> str:
        if has_slot:
            return f"there is the replication slot {self._slot}: its connector publishes"
        return f"the replication slot {self._slot} is missing or lost: this relay publishes"
