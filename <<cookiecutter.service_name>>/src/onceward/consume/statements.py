"""SQL of the group's member. Positions are in the statements of the room `apply`."""

READ_DATABASE_ID = "SELECT database_id FROM pipeline.inbox_generation"
"""Return the id of the database, which is stored with the group's offsets in Kafka.

Locks: none.
Plan: a scan of one row.
"""
