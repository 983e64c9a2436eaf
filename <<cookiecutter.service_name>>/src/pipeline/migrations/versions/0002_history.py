"""What is known of a message in the backlog is stored beside the reason for which it waits.

The database whose outbox it is, and its brokers, are stored beside the cluster. Rows that are due
are found by their consumer. The table `inbox_filter` is used by processes of version 1.0.0 only.

Revision ID: pipeline_0002
Revises: pipeline_0001
"""

from alembic import op

from pipeline.migrations import alter_in_turns

revision = "pipeline_0002"
down_revision = "pipeline_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns, which have defaults, and find due rows by consumer.

    Processes of version 1.0.0 can go on. Consumers wait while the index is created, and then look
    at all that is due in a lane to find a lane. What relays read is altered last.
    """
    alter_in_turns(
        "pipeline.backlog",
        """
        ALTER TABLE pipeline.backlog
            ADD COLUMN deaths integer NOT NULL DEFAULT 0,
            ADD COLUMN losses integer NOT NULL DEFAULT 0,
            ADD COLUMN is_redriven boolean NOT NULL DEFAULT false;
        DROP INDEX pipeline.backlog_due_idx;
        CREATE INDEX backlog_due_idx ON pipeline.backlog (lane, consumer, due_at)
         WHERE due_at IS NOT NULL;
        ALTER TABLE pipeline.outbox_cluster
            ADD COLUMN database_oid oid, ADD COLUMN kafka_cluster text;
        UPDATE pipeline.outbox_cluster SET database_oid = oid
          FROM pg_database WHERE datname = current_database();
        """,
    )


def downgrade() -> None:
    """Remove the columns, and find due rows as before."""
    op.execute("""
        ALTER TABLE pipeline.outbox_cluster DROP COLUMN database_oid, DROP COLUMN kafka_cluster
    """)
    op.execute("""
        ALTER TABLE pipeline.backlog
            DROP COLUMN deaths, DROP COLUMN losses, DROP COLUMN is_redriven
    """)
    op.execute("DROP INDEX pipeline.backlog_due_idx")
    op.execute("""
        CREATE INDEX backlog_due_idx ON pipeline.backlog (lane, due_at) WHERE due_at IS NOT NULL
    """)
