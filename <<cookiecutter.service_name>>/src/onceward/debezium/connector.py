"""What PostgreSQL and Kafka Connect need for Debezium to publish the outbox."""

from collections.abc import Mapping

from sqlalchemy import make_url

from onceward.settings import Settings

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
