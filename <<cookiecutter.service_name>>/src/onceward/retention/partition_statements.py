"""SQL of partitions: which there are, and how they are made, detached and dropped.

Parameters are described where a statement is executed; a name in braces is put in there.
"""

from onceward.servers.database import IDLE_LIMIT

LIMIT_WAIT_FOR_LOCK = f"SELECT set_config('lock_timeout', '2s', true), {IDLE_LIMIT}"
"""Limit for how long a transaction waits for a lock of a partition.

Locks: none.
Plan: reads no table.
"""

LOCK_PARTITIONS = f"{LIMIT_WAIT_FOR_LOCK}, pg_advisory_xact_lock($1)"
"""Begin to make a partition, which one process does at a time.

Locks: the advisory lock `$1`, until the transaction ends. It waits for two seconds at most.
Plan: reads no table.
"""

BECOME_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true)
  FROM pg_class WHERE oid = ('pipeline.' || $1)::regclass
"""
"""Act as the owner of a table until the transaction ends.

A partition belongs to the owner of its table, whichever member of that role makes it.

Locks: none.
Plan: an index of the catalog.
"""

READ_OWNER = """
SELECT current_user AS role, pg_get_userbyid(relowner) AS owner,
       pg_has_role(relowner, 'USAGE') AS is_owner
  FROM pg_class WHERE oid = 'pipeline.outbox'::regclass
"""
"""Return the owner of the outbox, and whether the role is a member of it.

Locks: none.
Plan: an index of the catalog.
"""

LIST_PARTITIONS = """
SELECT relname AS name,
       CASE WHEN inhrelid IS NULL THEN 'detached'
            WHEN inhdetachpending THEN 'pending' ELSE 'attached' END AS state
  FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
       LEFT JOIN pg_inherits ON inhrelid = pg_class.oid
 WHERE nspname = 'pipeline' AND relkind = 'r' AND relname ~ $1
 ORDER BY inhdetachpending DESC NULLS LAST, length(relname), relname
"""
"""Return tables of the schema by their names, and whether they are attached.

A pending detach comes first: a table has one at most, and no other can begin before it is done.

Locks: none.
Plan: a scan of the catalog.
"""

FIND_USER_OF_PARTITION = """
SELECT format('process %s of %s uses it since %s', pid,
              COALESCE(NULLIF(application_name, ''), usename, '?'), xact_start)
  FROM pg_locks JOIN pg_stat_activity USING (pid)
 WHERE locktype = 'relation' AND granted AND pid <> pg_backend_pid()
   AND relation IN (to_regclass('pipeline.' || $1), to_regclass('pipeline.' || $2))
 ORDER BY xact_start LIMIT 1
"""
"""Return the process that has used a partition or its table for the longest time.

Locks: none.
Plan: views of the server's locks and processes.
"""

CREATE_PARTITION = (
    "CREATE TABLE IF NOT EXISTS pipeline.{name}"
    " (LIKE pipeline.{parent} INCLUDING ALL EXCLUDING IDENTITY)"
)
"""Create the table of a partition.

Locks: the new table; the parent in the mode ACCESS SHARE.
Plan: none.
"""

ATTACH_PARTITION = (
    "ALTER TABLE pipeline.{parent} ATTACH PARTITION pipeline.{name} FOR VALUES {bounds}"
)
"""Attach a new table as a partition, or one that was detached.

Locks: the parent in the mode SHARE UPDATE EXCLUSIVE, for which no transaction that reads or writes
rows has to wait; the new table in the mode ACCESS EXCLUSIVE.
Plan: none.
"""

DETACH_PARTITION = "ALTER TABLE pipeline.{parent} DETACH PARTITION pipeline.{name} CONCURRENTLY"
"""Detach a partition without holding up transactions that use the table.

Not in a transaction: it commits one in which the partition is pending, and goes on in another.

Locks: the parent and the partition in the mode SHARE UPDATE EXCLUSIVE. It waits for all
transactions that use the table, for thirty seconds at most; they don't wait for it. Then the
partition in the mode ACCESS EXCLUSIVE.
Plan: none.
"""

FINALIZE_DETACH = "ALTER TABLE pipeline.{parent} DETACH PARTITION pipeline.{name} FINALIZE"
"""Complete a detach that was interrupted.

Locks: the parent in the mode SHARE UPDATE EXCLUSIVE; the partition in the mode ACCESS EXCLUSIVE.
Then it waits for every transaction of the database with an older snapshot, such as a dump; for two
seconds at most for each lock and transaction, and for thirty in all.
Plan: none.
"""

LOCK_PARTITION = "LOCK TABLE pipeline.{name} IN ACCESS EXCLUSIVE MODE"
"""Lock a partition that is detached, before it is dropped.

Locks: the table, until the transaction ends. It waits for two seconds at most.
Plan: none.
"""

DROP_PARTITION = "DROP TABLE pipeline.{name}"
"""Drop a partition that is detached.

Locks: the table, which is locked already.
Plan: none.
"""
