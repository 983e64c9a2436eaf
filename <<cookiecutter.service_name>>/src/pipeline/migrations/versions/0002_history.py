"""What is known of a message in the backlog is stored beside the reason for which it waits.

Revision ID: pipeline_0002
Revises: pipeline_0001
"""

from alembic import op

revision = "pipeline_0002"
down_revision = "pipeline_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns. Processes of version 1.0.0 can go on: the columns have defaults."""
    # In one statement, which changes the catalog only. The rows are few, or else wait already.
    op.execute("""
        ALTER TABLE pipeline.backlog
            ADD COLUMN deaths integer NOT NULL DEFAULT 0,
            ADD COLUMN is_redriven boolean NOT NULL DEFAULT false,
            ADD COLUMN is_unknown boolean NOT NULL DEFAULT false
    """)
    op.execute("""
        UPDATE pipeline.backlog
           SET deaths = (reason = 'process died' OR error LIKE 'ProcessDied:%')::integer,
               is_redriven = reason IN ('redriven', 'parked by its handler')
                   OR attempts > 0 AND reason NOT IN ('process died', 'sequence gap'),
               is_unknown = reason = 'outcome unknown'
         WHERE reason IN ('process died', 'redriven', 'parked by its handler', 'outcome unknown')
            OR error LIKE 'ProcessDied:%' OR attempts > 0 AND sequence > 0
    """)


def downgrade() -> None:
    """Remove the columns."""
    op.execute("""
        ALTER TABLE pipeline.backlog
            DROP COLUMN deaths, DROP COLUMN is_redriven, DROP COLUMN is_unknown
    """)
