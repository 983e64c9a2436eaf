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
    """Add the columns, which have defaults: processes of version 1.0.0 can go on."""
    # Statements wait behind one that waits for a lock of the whole table: so it waits for a second,
    # and lets them pass.
    op.execute("""
        DO $$
        DECLARE
            limit_before text = current_setting('lock_timeout');
        BEGIN
            FOR attempt IN 1 .. 300 LOOP
                BEGIN
                    SET LOCAL lock_timeout = '1s';
                    ALTER TABLE pipeline.backlog
                        ADD COLUMN deaths integer NOT NULL DEFAULT 0,
                        ADD COLUMN losses integer NOT NULL DEFAULT 0,
                        ADD COLUMN is_redriven boolean NOT NULL DEFAULT false;
                    PERFORM set_config('lock_timeout', limit_before, true);
                    RETURN;
                EXCEPTION WHEN lock_not_available THEN
                    PERFORM pg_sleep(1);
                END;
            END LOOP;
            RAISE EXCEPTION 'a transaction has held pipeline.backlog for ten minutes: see'
                ' pg_stat_activity, end it, and migrate again';
        END $$
    """)


def downgrade() -> None:
    """Remove the columns."""
    op.execute("""
        ALTER TABLE pipeline.backlog
            DROP COLUMN deaths, DROP COLUMN losses, DROP COLUMN is_redriven
    """)
