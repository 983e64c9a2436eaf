"""The first tables of the service.

Revision ID: service_0001
Revises:
"""

# <% if cookiecutter.worked_example == "yes" %>
import sqlalchemy as sa
from alembic import op

# <% endif %>
revision = "service_0001"
down_revision = None
branch_labels = ("service",)
depends_on = None


def upgrade() -> None:
    """Apply it."""
    # <% if cookiecutter.worked_example == "yes" %>
    op.create_table(
        "parcel",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("place", sa.Text, nullable=False),
        sa.Column("scans", sa.Integer, nullable=False),
        sa.Column("last_scanned_at", sa.DateTime(timezone=True)),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="parcel_pkey"),
    )
    # <% endif %>


def downgrade() -> None:
    """Take it back."""
    # <% if cookiecutter.worked_example == "yes" %>
    op.drop_table("parcel")
    # <% endif %>
