"""The tables of personal data.

Revision ID: personal_0001
Revises:
"""

from alembic import op

revision = "personal_0001"
down_revision = None
branch_labels = ("personal",)
depends_on = ("pipeline_0001",)


def upgrade() -> None:
    """Create the keys of subjects, and the list of those that were forgotten."""
    op.execute("""
CREATE TABLE pipeline.personal_key (
    id         bytea NOT NULL CONSTRAINT personal_key_pkey PRIMARY KEY,
    subject    text NOT NULL,  -- empty: the key of payloads whose subject is not known
    wrapped    bytea NOT NULL,  -- the key, encrypted by a master key
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
)""")
    op.execute("""
COMMENT ON TABLE pipeline.personal_key IS
'Keys that personal data is encrypted with; a deleted one can''t be made again.'""")
    op.execute("CREATE INDEX personal_key_subject_idx ON pipeline.personal_key (subject)")
    op.execute("""
CREATE TABLE pipeline.personal_forgotten (
    id           bigint GENERATED ALWAYS AS IDENTITY
                 CONSTRAINT personal_forgotten_pkey PRIMARY KEY,
    subject      text NOT NULL,
    keys         integer NOT NULL,  -- so many were deleted
    forgotten_by text NOT NULL,
    forgotten_at timestamptz NOT NULL DEFAULT clock_timestamp()
)""")
    op.execute("""
COMMENT ON TABLE pipeline.personal_forgotten IS 'Subjects whose keys were deleted.'""")


def downgrade() -> None:
    """Drop the keys: what is encrypted can't be read any more."""
    op.execute("DROP TABLE pipeline.personal_key, pipeline.personal_forgotten")
