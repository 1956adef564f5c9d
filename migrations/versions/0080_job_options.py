"""How a job's result is measured, and which way its weights take.

Revision ID: 0080
Revises: 0050
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0080"
down_revision = "0050"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("evaluation", postgresql.JSONB(), server_default="{}", nullable=False))
    op.add_column("job", sa.Column("file2file", sa.Boolean(), server_default="false", nullable=False))
    op.add_column("job", sa.Column("shard_blocks", sa.Boolean(), nullable=True))
    op.add_column("job", sa.Column("evaluation_dataset_id", sa.Text(), nullable=True))
    op.create_foreign_key(
        op.f("fk_job_evaluation_dataset_id"), "job", "dataset", ["evaluation_dataset_id"], ["id"], ondelete="SET NULL"
    )
    op.create_index(
        "ix_job_evaluation_dataset_id",
        "job",
        ["evaluation_dataset_id"],
        postgresql_where=sa.text("evaluation_dataset_id IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_job_evaluation_dataset_id", "job")
    for name in ("evaluation_dataset_id", "shard_blocks", "file2file", "evaluation"):
        op.drop_column("job", name)
