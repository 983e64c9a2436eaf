-- Privileges of the service's roles in PostgreSQL; docs/security.md describes the roles. Run this
-- with psql, as the role that owns the tables, which must be a member of the role `retention`, or as
-- a superuser:
--
--   psql --set service=parcels_service --set relay=parcels_relay --set operator=parcels_operator \
--        --set retention=parcels_retention --file deploy/postgres/roles.sql "$URL"
--
-- Run it after the first `service migrate` and after each migration of the engine; the service may
-- run. In one transaction it grants what each role needs and revokes all other privileges. The roles
-- must exist; several may be the same. If a lock times out, run it again.

\set ON_ERROR_STOP on

BEGIN;
SET LOCAL lock_timeout = '2s';

SELECT pg_get_userbyid(relowner) AS owner
  FROM pg_class WHERE oid = 'pipeline.position'::regclass \gset

SELECT bool_or(pg_has_role(part, :'owner', 'MEMBER')
               OR part <> :'retention' AND pg_has_role(part, :'retention', 'MEMBER')) AS is_owner
  FROM unnest(ARRAY[:'service', :'relay', :'operator', :'retention']) AS part \gset
\if :is_owner
    DO $$ BEGIN
        RAISE 'a role is a superuser, or a member of a role that owns tables: use another role';
    END $$;
\endif

-- retention creates and drops partitions, which PostgreSQL allows only to the owner of a table. It
-- owns the inbox, the outbox and their partitions, attached or not, and no other table.

CREATE TEMPORARY VIEW partitioned AS
SELECT oid::regclass AS name, pg_get_userbyid(relowner) AS owner
  FROM pg_class
 WHERE relnamespace = 'pipeline'::regnamespace AND relkind IN ('r', 'p')
   AND relname ~ '^(inbox|outbox)(_[gp][0-9]+)?$';

GRANT USAGE, CREATE ON SCHEMA pipeline TO :"retention";

SELECT count(*) > 0 AS is_new FROM partitioned WHERE owner <> :'retention' \gset
\if :is_new
    -- In one statement, before the changes: transactions of the service lock one after the other.
    LOCK TABLE pipeline.inbox, pipeline.outbox IN ACCESS EXCLUSIVE MODE;
    SELECT format('ALTER TABLE %s OWNER TO %I', name, :'retention')
      FROM partitioned WHERE owner <> :'retention' \gexec
\endif

-- All privileges are revoked first, including those of an owner on its own tables.

REVOKE ALL ON SCHEMA pipeline FROM PUBLIC, :"service", :"relay", :"operator";
REVOKE ALL ON ALL TABLES IN SCHEMA pipeline
  FROM PUBLIC, :"service", :"relay", :"operator", :"retention";
REVOKE ALL ON ALL SEQUENCES IN SCHEMA pipeline
  FROM PUBLIC, :"service", :"relay", :"operator", :"retention";
ALTER DEFAULT PRIVILEGES FOR ROLE :"owner", :"retention" IN SCHEMA pipeline
REVOKE ALL ON TABLES FROM :"service", :"relay", :"operator";

GRANT USAGE ON SCHEMA pipeline TO :"service", :"relay", :"operator";
GRANT USAGE, CREATE ON SCHEMA pipeline TO :"retention";
SELECT format('GRANT ALL ON %s TO %I', name, :'retention') FROM partitioned \gexec
GRANT ALL ON SEQUENCE pipeline.outbox_id_seq TO :"retention";

-- Locking a row requires the privilege to update one of its columns: hence some UPDATE (column).

-- service: handles messages, and inserts events into the outbox, which it can neither read nor
-- change. The server assigns `id` and `xid` of an event: other values would break the order of a key,
-- or hide the event from the relay.

GRANT SELECT, INSERT, UPDATE, DELETE
   ON pipeline.inbox, pipeline.backlog, pipeline.scheduled TO :"service";
GRANT SELECT, INSERT, UPDATE ON pipeline.position TO :"service";
GRANT SELECT, INSERT, DELETE ON pipeline.guarded_transaction TO :"service";
GRANT SELECT, INSERT ON pipeline.inbox_consumer, pipeline.release TO :"service";
GRANT SELECT, UPDATE ON pipeline.backlog_lane, pipeline.backlog_count TO :"service";
GRANT SELECT, UPDATE (next_at) ON pipeline.throttle TO :"service";
GRANT SELECT ON pipeline.inbox_generation, pipeline.inbox_closed, pipeline.outbox_cluster
   TO :"service";
GRANT UPDATE (kafka_cluster) ON pipeline.outbox_cluster TO :"service", :"relay";
GRANT SELECT, UPDATE (archives) ON pipeline.retention_round TO :"service";
GRANT INSERT ON pipeline.claim, pipeline.audit TO :"service";
GRANT USAGE ON SEQUENCE pipeline.backlog_call_seq TO :"service";
GRANT INSERT (topic, key, payload, event_id, source, type, subject, sequence, content_type,
              traceparent, tracestate, baggage, headers, dataref, datalength, datachecksum)
   ON pipeline.outbox TO :"service";

-- relay: reads and publishes the outbox, and inserts scheduled events into it, each with the
-- release that has scheduled it.

GRANT SELECT, INSERT, UPDATE, DELETE
   ON pipeline.outbox_rejected, pipeline.outbox_relay TO :"relay";
GRANT SELECT, DELETE, UPDATE (scheduled_at) ON pipeline.scheduled TO :"relay";
GRANT SELECT, UPDATE ON pipeline.outbox_cursor TO :"relay";
GRANT SELECT ON pipeline.inbox_generation, pipeline.outbox_cluster TO :"relay";
GRANT SELECT, UPDATE (next_at) ON pipeline.throttle TO :"relay";
GRANT SELECT, UPDATE (archives) ON pipeline.retention_round TO :"relay";
GRANT SELECT,
      INSERT (topic, key, payload, event_id, source, type, subject, sequence, content_type,
              traceparent, tracestate, baggage, headers, dataref, datalength, datachecksum, release)
   ON pipeline.outbox TO :"relay";
GRANT SELECT ON SEQUENCE pipeline.outbox_id_seq TO :"relay";

-- Keys of encrypted personal data: the service creates keys of subjects and reads them, the relay
-- reads them, and the operator forgets subjects.

SELECT to_regclass('pipeline.personal_key') IS NOT NULL AS has_keys \gset
\if :has_keys
    GRANT SELECT, INSERT, DELETE ON pipeline.personal_key TO :"service";
    GRANT INSERT ON pipeline.personal_forgotten TO :"service";
    GRANT SELECT ON pipeline.personal_key TO :"relay";
    GRANT UPDATE (wrapped), DELETE ON pipeline.personal_key TO :"operator";
    GRANT INSERT, UPDATE (keys) ON pipeline.personal_forgotten TO :"operator";
\endif

-- operator: reads the engine's tables and later partitions, redrives or discards dead letters, pauses
-- and resumes. The server numbers the rows of the audit: nobody needs pipeline.audit_id_seq.

GRANT SELECT ON ALL TABLES IN SCHEMA pipeline TO :"operator";
GRANT SELECT ON ALL SEQUENCES IN SCHEMA pipeline TO :"operator";
ALTER DEFAULT PRIVILEGES FOR ROLE :"owner", :"retention" IN SCHEMA pipeline
GRANT SELECT ON TABLES TO :"operator";
GRANT INSERT, UPDATE (reason, attempts, died_at, discarded_at, discarded_by, discarded_why,
              waited, due_at, holds, error, received_at) ON pipeline.backlog TO :"operator";
GRANT UPDATE (reason, died_at, discarded_at, discarded_by, discarded_why,
              parked_at, error) ON pipeline.outbox_rejected TO :"operator";
GRANT UPDATE (token, owner, lease_until, starts) ON pipeline.backlog_lane TO :"operator";
GRANT UPDATE (owner) ON pipeline.outbox_cursor TO :"operator";
GRANT DELETE ON pipeline.scheduled TO :"operator";
GRANT INSERT, UPDATE, DELETE ON pipeline.throttle TO :"operator";
GRANT INSERT ON pipeline.audit TO :"operator";

-- retention, in tables of other owners: rotates generations, and deletes rows discarded long ago.

GRANT SELECT, INSERT, UPDATE, DELETE
   ON pipeline.inbox_closed, pipeline.outbox_closed TO :"retention";
GRANT SELECT, UPDATE ON pipeline.inbox_generation, pipeline.retention_round TO :"retention";
GRANT SELECT ON pipeline.outbox_cursor, pipeline.outbox_cluster TO :"retention";
GRANT INSERT ON pipeline.audit TO :"retention";
GRANT SELECT (key, discarded_at), UPDATE (discarded_at), DELETE
   ON pipeline.backlog TO :"retention";
GRANT SELECT (id, event_id, dataref, discarded_at), UPDATE (discarded_at), DELETE
   ON pipeline.outbox_rejected TO :"retention";
GRANT SELECT (event_id, dataref) ON pipeline.scheduled TO :"retention";
GRANT SELECT, UPDATE (published_at), DELETE ON pipeline.claim TO :"retention";

-- The service's own tables, in any schema of the owner, are for its handlers alone, including tables
-- of later migrations.

CREATE TEMPORARY VIEW own AS
SELECT oid::regclass AS name, relkind AS kind, relnamespace::regnamespace AS schema
  FROM pg_class
 WHERE pg_get_userbyid(relowner) = :'owner' AND relkind IN ('r', 'p', 'S')
   AND relpersistence <> 't' AND relnamespace <> 'pipeline'::regnamespace;

SELECT format('REVOKE ALL ON %s FROM PUBLIC, %I, %I, %I, %I',
              name, :'service', :'relay', :'operator', :'retention')
  FROM own \gexec
SELECT DISTINCT
       format('GRANT USAGE ON SCHEMA %s TO %I', schema, :'service'),
       format('ALTER DEFAULT PRIVILEGES FOR ROLE %I IN SCHEMA %s'
              ' GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO %I',
              :'owner', schema, :'service'),
       format('ALTER DEFAULT PRIVILEGES FOR ROLE %I IN SCHEMA %s'
              ' GRANT USAGE ON SEQUENCES TO %I', :'owner', schema, :'service')
  FROM own \gexec
SELECT CASE kind WHEN 'S' THEN format('GRANT USAGE ON SEQUENCE %s TO %I', name, :'service')
                 ELSE format('GRANT SELECT, INSERT, UPDATE, DELETE ON %s TO %I', name, :'service')
       END
  FROM own WHERE name <> 'alembic_version'::regclass \gexec

-- Each process checks at its start whether the database is migrated.

GRANT SELECT ON alembic_version TO :"service", :"relay", :"operator", :"retention";

DROP VIEW partitioned, own;
COMMIT;
