"""Members of projects: people, each with keys of their own.

Revision ID: 0200
Revises: 0190
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import TIMESTAMP

revision = "0200"
down_revision = "0190"
branch_labels = None
depends_on = None


def upgrade() -> None:
    now, time = sa.text("clock_timestamp()"), TIMESTAMP(timezone=True)
    op.create_table(
        "member",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("project_id", sa.Text(), sa.ForeignKey("project.id"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("created_at", time, server_default=now, nullable=False),
        sa.Column("removed_at", time, nullable=True),
        sa.CheckConstraint("role IN ('admin', 'editor', 'viewer')", name=op.f("ck_member_role")),
    )
    present = sa.text("removed_at IS NULL")
    op.create_index("uq_member_name", "member", ["project_id", "name"], unique=True, postgresql_where=present)
    op.add_column("api_key", sa.Column("member_id", sa.Text(), sa.ForeignKey("member.id"), nullable=True))
    op.create_index("ix_api_key_member_id", "api_key", ["member_id"])


def downgrade() -> None:
    op.drop_column("api_key", "member_id")
    op.drop_table("member")
