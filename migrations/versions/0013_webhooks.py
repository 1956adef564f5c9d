"""Webhooks, and what is delivered to them.

Revision ID: 0013
Revises: 0012
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, TIMESTAMP

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

NOW = sa.text("clock_timestamp()")


def upgrade() -> None:
    op.create_table(
        "webhook",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("event_types", ARRAY(sa.Text()), nullable=False),
        sa.Column("sealed_secret", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.Column("failing_since", TIMESTAMP(timezone=True), nullable=True),
        sa.Column("disabled_at", TIMESTAMP(timezone=True), nullable=True),
        sa.Column("disabled_reason", sa.Text(), nullable=True),
        sa.Column("busy_until", TIMESTAMP(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["project.id"], name=op.f("fk_webhook_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook")),
    )
    op.create_index("ix_webhook_project_id", "webhook", ["project_id"])
    op.create_table(
        "webhook_delivery",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("webhook_id", sa.Text(), nullable=False),
        sa.Column("event_type", sa.Text(), nullable=False),
        sa.Column("data", JSONB(), nullable=False),
        sa.Column("state", sa.Text(), server_default="pending", nullable=False),
        sa.Column("num_tries", sa.Integer(), server_default="0", nullable=False),
        sa.Column("tries", JSONB(), server_default="[]", nullable=False),
        sa.Column("next_try_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.Column("created_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.Column("delivered_at", TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint("state IN ('delivered', 'failed', 'pending')", name=op.f("ck_webhook_delivery_state")),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhook.id"], ondelete="CASCADE", name=op.f("fk_webhook_delivery_webhook_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_delivery")),
    )
    op.create_index(
        "ix_webhook_delivery_due", "webhook_delivery", ["next_try_at"], postgresql_where=sa.text("state = 'pending'")
    )
    op.create_index("ix_webhook_delivery_list", "webhook_delivery", ["webhook_id", sa.literal_column("id DESC")])
    op.create_index("ix_webhook_delivery_created_at", "webhook_delivery", ["created_at"])


def downgrade() -> None:
    op.drop_table("webhook_delivery")
    op.drop_table("webhook")
