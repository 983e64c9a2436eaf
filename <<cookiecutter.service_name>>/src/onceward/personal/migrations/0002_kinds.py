"""The kind of a subject is stored beside its name, which may be that of another subject.

Revision ID: personal_0002
Revises: personal_0001
"""

from alembic import op

from onceward.migrations import alter_in_turns

revision = "personal_0002"
down_revision = "personal_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns, which are empty: what was stored may be of either subject of a name.

    Processes of version 1.0.0 can go on.
    """
    alter_in_turns(
        "pipeline.personal_key",
        """
        ALTER TABLE pipeline.personal_key ADD COLUMN kind text;
        ALTER TABLE pipeline.personal_forgotten ADD COLUMN kind text;
        """,
    )


def downgrade() -> None:
    """Remove the columns: subjects of one name are the same again."""
    op.execute("ALTER TABLE pipeline.personal_key DROP COLUMN kind")
    op.execute("ALTER TABLE pipeline.personal_forgotten DROP COLUMN kind")
