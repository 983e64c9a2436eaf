"""SQL of handlers: what guards their sessions, and the events that they stage.

Parameters are described where a statement is executed.
"""

from .staged import COLUMNS, StagedEvent

AT_WORK = "at work"
"""Value of the setting `pipeline.handler` while handlers have sessions of their own: the database
then rejects COMMIT, see `pipeline.refuse_commit`."""

_GUARD = f"""
INSERT INTO pipeline.guarded_transaction SELECT pg_current_xact_id() WHERE %s = '{AT_WORK}'
"""

GUARD_COMMIT = _GUARD % "current_setting('pipeline.handler')"
"""Make the database reject COMMIT, in a transaction that moves no position.

It inserts nothing unless handlers have sessions of their own.

Locks: the new row. A deferred trigger deletes it in the COMMIT, so that each leaves a dead one.
Plan: finds no row.
"""

GUARD_WRITER = _GUARD % f"set_config('pipeline.handler', '{AT_WORK}', true)"
"""Begin the transaction of a writer, whose COMMIT the database rejects until `END_GUARD`.

Locks: the new row. A deferred trigger deletes it in the COMMIT, so that each leaves a dead one.
Plan: finds no row.
"""

END_GUARD = "SELECT set_config('pipeline.handler', '', true)"
"""Let the database accept COMMIT: the handlers have returned.

Locks: none.
Plan: reads no table.
"""

CHECK_GUARD = f"""
SELECT 1 / (COALESCE(current_setting('pipeline.handler', true), '') = '{AT_WORK}'
            AND current_setting('transaction_read_only') = 'off')::int
"""
"""Fail if the transaction is read-only, or not the one that the engine has begun.

A local setting ends with its transaction.

Locks: none.
Plan: reads no table.
"""

CHECK_DEFERRED = """
SAVEPOINT pipeline_check; SELECT set_config('pipeline.handler', '', true);
SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK TO pipeline_check; RELEASE pipeline_check
"""
"""Fail as COMMIT would.

By the rollback constraints are deferred as before, and checked again.

Locks: what the constraints lock that are checked, such as rows to which foreign keys refer, until
the savepoint is rolled back.
Plan: those of the constraints.
"""

RESET_SESSION = """
RESET ALL; RESET SESSION AUTHORIZATION; RESET ROLE; CLOSE ALL; UNLISTEN *; DISCARD TEMP;
SELECT pg_advisory_unlock_all()
"""
"""Reset the session of a connection after a handler has used it.

Locks: none; it releases advisory locks of the session.
Plan: reads no table.
"""

INSERT_EVENTS = f"""
INSERT INTO pipeline.outbox ({COLUMNS})
SELECT {COLUMNS} FROM unnest($1::pipeline.new_scheduled[])
"""
"""Insert events into the outbox, in order.

No COPY: no time limit ends a session that waits for its data, and its locks would be held for as
long as its process is stopped. An array of rows is no slower.

Locks: the new rows.
Plan: finds no row.
"""

SCHEDULE_EVENTS = f"""
WITH moment AS MATERIALIZED (SELECT clock_timestamp() AS at)
INSERT INTO pipeline.scheduled (name, due_at, scheduled_at, {COLUMNS})
SELECT name, COALESCE(due_at, at + after), at + place * interval '1 microsecond', {COLUMNS}
  FROM moment, unnest($1::pipeline.new_scheduled[]) WITH ORDINALITY AS new (
           name, due_at, after, {COLUMNS}, place)
 ORDER BY name
    ON CONFLICT (name) DO UPDATE
   SET due_at = excluded.due_at, scheduled_at = excluded.scheduled_at,
       {", ".join(f"{name} = excluded.{name}" for name in (*StagedEvent._fields, "release"))}
"""
"""Store events that are due later, in place of those of the same names.

Sorted by name, so that two transactions wait for each other without a deadlock. `scheduled_at`
keeps the order of staging among events that are due at the same time.

Locks: the rows, by name. It waits for transactions that store, cancel or move one of the same name.
Plan: `scheduled_pkey` finds those that exist.
"""

CANCEL_SCHEDULED = "DELETE FROM pipeline.scheduled WHERE name = ANY ($1) RETURNING name"
"""Delete scheduled events by their names.

Locks: the rows, in the order of the plan; a handler's transaction has locked them by name before.
It waits for transactions that store, cancel or move them.
Plan: `scheduled_pkey`, for each name.
"""

LOCK_SCHEDULED = "SELECT FROM pipeline.scheduled WHERE name = ANY ($1) ORDER BY name FOR UPDATE"
"""Lock scheduled events by name, before some are deleted and others stored, for the same order.

A name that is not stored yet has no row to be locked: two transactions of which one stores it anew
and cancels another may still deadlock, and are tried again.

Locks: the rows, by name. It waits for transactions that store, cancel or move them.
Plan: `scheduled_pkey`, for each name.
"""
