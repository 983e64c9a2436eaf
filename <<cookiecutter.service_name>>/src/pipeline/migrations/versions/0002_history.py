"""What is known of a message in the backlog is stored beside the reason for which it waits.

Processes that start at a position are counted once each. Rows that are due are found by their
consumer. The table `inbox_filter` is used by processes of version 1.0.0 only.

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

    Processes of version 1.0.0 can go on. They wait while the index is created, and then look at all
    that is due in a lane to find a lane.
    """
    alter_in_turns(
        "pipeline.position or pipeline.backlog",
        """
        ALTER TABLE pipeline.position
            ADD COLUMN starters text[] NOT NULL DEFAULT '{}';  -- those in `starts`
        ALTER TABLE pipeline.backlog
            ADD COLUMN deaths integer NOT NULL DEFAULT 0,
            ADD COLUMN losses integer NOT NULL DEFAULT 0,
            ADD COLUMN is_redriven boolean NOT NULL DEFAULT false;
        DROP INDEX pipeline.backlog_due_idx;
        CREATE INDEX backlog_due_idx ON pipeline.backlog (lane, consumer, due_at)
         WHERE due_at IS NOT NULL;
        """,
    )


def downgrade() -> None:
    """Remove the columns, and find due rows as before."""
    op.execute("ALTER TABLE pipeline.position DROP COLUMN starters")
    op.execute("""
        ALTER TABLE pipeline.backlog
            DROP COLUMN deaths, DROP COLUMN losses, DROP COLUMN is_redriven
    """)
    op.execute("DROP INDEX pipeline.backlog_due_idx")
    op.execute("""
        CREATE INDEX backlog_due_idx ON pipeline.backlog (lane, due_at) WHERE due_at IS NOT NULL
    """)
