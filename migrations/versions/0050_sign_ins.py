"""Browsers that are signed in.

Revision ID: 0050
Revises: 0070
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import TIMESTAMP

revision = "0050"
down_revision = "0070"
branch_labels = None
depends_on = None

NOW = sa.text("clock_timestamp()")


def upgrade() -> None:
    op.create_table(
        "sign_in",
        sa.Column("token_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("api_key_id", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.Column("expires_at", TIMESTAMP(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["api_key_id"], ["api_key.id"], name=op.f("fk_sign_in_api_key_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("token_sha256", name=op.f("pk_sign_in")),
    )
    op.create_index(op.f("ix_sign_in_api_key_id"), "sign_in", ["api_key_id"])
    op.create_index(op.f("ix_sign_in_expires_at"), "sign_in", ["expires_at"])


def downgrade() -> None:
    op.drop_table("sign_in")
