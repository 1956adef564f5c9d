"""Indexes for the results of a model, and for the models that came from the artifact of a job.

Revision ID: 0160
Revises: 0150
"""

import sqlalchemy as sa
from alembic import op

revision = "0160"
down_revision = "0150"
branch_labels = None
depends_on = None

SOURCE = "COALESCE(model ->> 'id', model ->> 'path')"
PARENT = "substring(model ->> 'path', '/(job_[0-9a-f]{32})/')"


def upgrade() -> None:
    op.create_index(
        "ix_job_results",
        "job",
        ["project_id", sa.text(SOURCE), sa.text("finished_at DESC"), sa.text("id DESC")],
        postgresql_where=sa.text("state = 'succeeded'"),
    )
    op.create_index("ix_job_parent", "job", [sa.text(PARENT)], postgresql_where=sa.text(f"{PARENT} IS NOT NULL"))


def downgrade() -> None:
    op.drop_index("ix_job_parent", "job")
    op.drop_index("ix_job_results", "job")
