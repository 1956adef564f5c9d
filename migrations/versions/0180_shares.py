"""Read-only links to the reports of jobs.

Revision ID: 0180
Revises: 0170
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import TIMESTAMP

revision = "0180"
down_revision = "0170"
branch_labels = None
depends_on = None


def upgrade() -> None:
    now, time = sa.text("clock_timestamp()"), TIMESTAMP(timezone=True)
    op.create_table(
        "share",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("job_id", sa.Text(), sa.ForeignKey("job.id", ondelete="CASCADE"), nullable=False),
        sa.Column("token_sha256", sa.LargeBinary(), nullable=False, unique=True),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column("created_at", time, server_default=now, nullable=False),
        sa.Column("expires_at", time, nullable=False),
    )
    op.create_index("ix_share_job_id", "share", ["job_id"])
    op.create_index("ix_share_expires_at", "share", ["expires_at"])


def downgrade() -> None:
    op.drop_table("share")
