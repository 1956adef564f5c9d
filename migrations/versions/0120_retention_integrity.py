"""What projects keep of their jobs, and what the check of stored files has found.

Revision ID: 0120
Revises: 0110
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import TIMESTAMP

revision = "0120"
down_revision = "0110"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("pinned", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.create_table(
        "retention_policy",
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("keep_last", sa.Integer(), nullable=True),
        sa.Column("keep_days", sa.Integer(), nullable=True),
        sa.CheckConstraint("keep_last > 0 AND keep_days > 0", name=op.f("ck_retention_policy_limits")),
        sa.ForeignKeyConstraint(["project_id"], ["project.id"], name=op.f("fk_retention_policy_project_id")),
        sa.PrimaryKeyConstraint("project_id", name=op.f("pk_retention_policy")),
    )
    for table in ("artifact", "dataset"):
        op.add_column(table, sa.Column("checked_at", TIMESTAMP(timezone=True), nullable=True))
    op.create_table(
        "integrity_finding",
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("object_id", sa.Text(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("found_at", TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint("kind IN ('damaged', 'missing', 'orphan')", name=op.f("ck_integrity_finding_kind")),
        sa.PrimaryKeyConstraint("path", name=op.f("pk_integrity_finding")),
    )


def downgrade() -> None:
    op.drop_table("integrity_finding")
    for table in ("artifact", "dataset"):
        op.drop_column(table, "checked_at")
    op.drop_table("retention_policy")
    op.drop_column("job", "pinned")
