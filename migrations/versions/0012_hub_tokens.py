"""Tokens for the Hub, sealed.

Revision ID: 0012
Revises: 0011
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import TIMESTAMP

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

NOW = sa.text("clock_timestamp()")


def upgrade() -> None:
    op.create_table(
        "hub_token",
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.Column("updated_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["project.id"], name=op.f("fk_hub_token_project_id")),
        sa.PrimaryKeyConstraint("project_id", "name", name=op.f("pk_hub_token")),
    )


def downgrade() -> None:
    op.drop_table("hub_token")
