"""The engine's tables.

Revision ID: pipeline_0001
Revises:
"""

from alembic import op

from onceward.migrations import first_inbox, first_outbox

revision = "pipeline_0001"
down_revision = None
branch_labels = ("pipeline",)
depends_on = None


def upgrade() -> None:
    """Create the schema `pipeline`."""
    op.execute("CREATE SCHEMA pipeline")
    if service := op.get_context().opts["service"]:
        quoted = service.replace("'", "''").replace(":", r"\:")
        op.execute(f"COMMENT ON SCHEMA pipeline IS '{quoted}'")
    op.execute(first_inbox.REFUSE_COMMIT)
    for script in (first_inbox.TABLES, first_outbox.TABLES):
        for statement in script.removesuffix(";\n").split(";\n"):
            op.execute(statement)


def downgrade() -> None:
    """Drop everything the engine remembers."""
    op.execute("DROP SCHEMA pipeline CASCADE")
