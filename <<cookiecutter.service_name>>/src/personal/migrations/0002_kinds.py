"""The kind of a subject is stored beside its name, which may be that of another subject.

Revision ID: personal_0002
Revises: personal_0001
"""

from alembic import op

revision = "personal_0002"
down_revision = "personal_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns, which are empty: what was stored may be of either subject of a name.

    Processes of version 1.0.0 can go on.
    """
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
                    ALTER TABLE pipeline.personal_key ADD COLUMN kind text;
                    ALTER TABLE pipeline.personal_forgotten ADD COLUMN kind text;
                    PERFORM set_config('lock_timeout', limit_before, true);
                    RETURN;
                EXCEPTION WHEN lock_not_available THEN
                    PERFORM pg_sleep(1);
                END;
            END LOOP;
            RAISE EXCEPTION 'a transaction has held pipeline.personal_key for ten minutes: see'
                ' pg_stat_activity, end it, and migrate again';
        END $$
    """)


def downgrade() -> None:
    """Remove the columns: subjects of one name are the same again."""
    op.execute("ALTER TABLE pipeline.personal_key DROP COLUMN kind")
    op.execute("ALTER TABLE pipeline.personal_forgotten DROP COLUMN kind")
