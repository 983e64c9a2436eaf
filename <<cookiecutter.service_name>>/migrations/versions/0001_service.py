"""The first tables of the service.

Revision ID: service_0001
Revises:
"""

# <% if cookiecutter.worked_example not in ("none", "no") %>
import sqlalchemy as sa
from alembic import op

# <% endif %>
revision = "service_0001"
down_revision = None
branch_labels = ("service",)
depends_on = None


def upgrade() -> None:
    """Apply it."""
    # <% if cookiecutter.worked_example in ("parcels", "yes") %>
    op.create_table(
        "parcel",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("place", sa.Text, nullable=False),
        sa.Column("scans", sa.Integer, nullable=False),
        sa.Column("last_scanned_at", sa.DateTime(timezone=True)),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="parcel_pkey"),
    )
    # <% elif cookiecutter.worked_example == "payments" %>
    op.create_table(
        "account",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("balance", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="account_pkey"),
        sa.CheckConstraint(
            "balance >= 0 OR starts_with(id, 'bank:')", name="account_balance_check"
        ),
    )
    op.create_table(
        "entry",
        sa.Column("id", sa.BigInteger, sa.Identity(), nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("reference", sa.Text, nullable=False),
        sa.Column(
            "added_at",
            sa.DateTime(timezone=True),
            server_default=sa.func.current_timestamp(),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("id", name="entry_pkey"),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name="entry_account_id_fkey"),
        sa.CheckConstraint("amount <> 0", name="entry_amount_check"),
    )
    op.create_index("ix_entry_account_id", "entry", ["account_id"])
    op.execute(
        "CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN RAISE 'rows of % are only added', TG_TABLE_NAME; END$$"
    )
    op.execute(
        "CREATE TRIGGER entry_is_only_added BEFORE UPDATE OR DELETE OR TRUNCATE ON entry"
        " EXECUTE FUNCTION refuse_change()"
    )
    op.create_table(
        "deposit",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("customer", sa.Text, nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="deposit_pkey"),
    )
    op.create_table(
        "payment",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("customer", sa.Text, nullable=False),
        sa.Column("merchant", sa.Text, nullable=False),
        sa.Column("authorized", sa.BigInteger, nullable=False),
        sa.Column("captured", sa.BigInteger, nullable=False),
        sa.Column("refunded", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="payment_pkey"),
        sa.CheckConstraint(
            "0 <= refunded AND refunded <= captured AND captured <= authorized",
            name="payment_amounts_check",
        ),
    )
    op.create_table(
        "refund",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("payment_id", sa.Text, nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="refund_pkey"),
        sa.ForeignKeyConstraint(["payment_id"], ["payment.id"], name="refund_payment_id_fkey"),
    )
    # <% endif %>


def downgrade() -> None:
    """Take it back."""
    # <% if cookiecutter.worked_example in ("parcels", "yes") %>
    op.drop_table("parcel")
    # <% elif cookiecutter.worked_example == "payments" %>
    op.drop_table("refund")
    op.drop_table("payment")
    op.drop_table("deposit")
    op.drop_table("entry")
    op.execute("DROP FUNCTION refuse_change")
    op.drop_table("account")
    # <% endif %>
