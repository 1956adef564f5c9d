"""Sweeps: jobs that were asked for together.

Revision ID: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSON, JSONB, TIMESTAMP

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sweep",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("submitted_by", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("matrix", JSON(), nullable=False),
        sa.Column("created_at", TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.ForeignKeyConstraint(["submitted_by"], ["api_key.id"], name=op.f("fk_sweep_submitted_by")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sweep")),
    )
    op.add_column("job", sa.Column("sweep_id", sa.Text(), nullable=True))
    op.add_column("job", sa.Column("sweep_values", JSONB(), nullable=True))
    op.create_foreign_key(op.f("fk_job_sweep_id"), "job", "sweep", ["sweep_id"], ["id"])
    op.create_index("ix_job_sweep_id", "job", ["sweep_id"], postgresql_where=sa.text("sweep_id IS NOT NULL"))


def downgrade() -> None:
    op.drop_index("ix_job_sweep_id", "job")
    op.drop_constraint(op.f("fk_job_sweep_id"), "job", type_="foreignkey")
    op.drop_column("job", "sweep_values")
    op.drop_column("job", "sweep_id")
    op.drop_table("sweep")
