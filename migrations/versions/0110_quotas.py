"""Quotas of datasets, open uploads, streams and webhooks.

Revision ID: 0110
Revises: 0100
"""

import sqlalchemy as sa
from alembic import op

revision = "0110"
down_revision = "0100"
branch_labels = None
depends_on = None

COUNTS = ("max_datasets", "max_uploads", "max_streams", "max_webhooks")


def upgrade() -> None:
    for name in COUNTS:
        op.add_column("project", sa.Column(name, sa.Integer(), nullable=True))
    op.add_column("project", sa.Column("max_dataset_bytes", sa.BigInteger(), nullable=True))
    limits = " AND ".join(f"{name} >= 0" for name in (*COUNTS, "max_dataset_bytes"))
    op.create_check_constraint(op.f("ck_project_more_limits"), "project", limits)
    op.create_index("ix_upload_project_id", "upload", ["project_id"])


def downgrade() -> None:
    op.drop_index("ix_upload_project_id", "upload")
    op.drop_constraint(op.f("ck_project_more_limits"), "project")
    for name in (*COUNTS, "max_dataset_bytes"):
        op.drop_column("project", name)
