"""Artifacts on their way to the Hub or to a folder elsewhere.

Revision ID: 0040
Revises: 0030
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP

revision = "0040"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    now = sa.text("clock_timestamp()")
    time = TIMESTAMP(timezone=True)
    op.add_column("job", sa.Column("publish", JSONB(none_as_null=True), nullable=True))
    op.create_table(
        "publication",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("job_id", sa.Text(), sa.ForeignKey("job.id", ondelete="CASCADE"), nullable=False),
        sa.Column("project_id", sa.Text(), sa.ForeignKey("project.id"), nullable=False),
        sa.Column("target", JSONB(none_as_null=True), nullable=False),
        sa.Column("hub_token", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), server_default="pending", nullable=False),
        sa.Column("progress", JSONB(none_as_null=True), nullable=True),
        sa.Column("revision", sa.Text(), nullable=True),
        sa.Column("url", sa.Text(), nullable=True),
        sa.Column("error", JSONB(none_as_null=True), nullable=True),
        *(sa.Column(name, sa.Integer(), server_default="0", nullable=False)
          for name in ("attempt", "failure_count", "lost_count")),
        sa.Column("fence", sa.BigInteger(), nullable=True),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", time, nullable=True),
        sa.Column("run_at", time, server_default=now, nullable=False),
        sa.Column("created_at", time, server_default=now, nullable=False),
        sa.Column("finished_at", time, nullable=True),
        sa.CheckConstraint("state IN ('failed', 'pending', 'published', 'publishing')", name="state"),
        sa.CheckConstraint(
            "num_nulls(fence, worker, lease_expires_at) = CASE WHEN state = 'publishing' THEN 0 ELSE 3 END",
            name="held_has_lease",
        ),
        sa.CheckConstraint(
            "(state IN ('published', 'failed')) = (finished_at IS NOT NULL)", name="final_has_finished_at"
        ),
        sa.CheckConstraint("state <> 'published' OR num_nulls(revision, url) = 0", name="published_has_revision"),
        sa.CheckConstraint("state <> 'failed' OR error ->> 'code' IS NOT NULL", name="failed_has_code"),
    )  # fmt: skip
    is_open, is_held = sa.text("state IN ('pending', 'publishing')"), sa.text("state = 'publishing'")
    op.create_index("uq_publication_open", "publication", ["job_id"], unique=True, postgresql_where=is_open)
    op.create_index(
        "uq_publication_to", "publication", [sa.text("(target ->> 'to')")], unique=True, postgresql_where=is_held
    )
    is_pending = sa.text("state = 'pending'")
    op.create_index("ix_publication_claim", "publication", ["run_at", "id"], postgresql_where=is_pending)
    op.create_index("ix_publication_lease", "publication", ["lease_expires_at"], postgresql_where=is_held)
    op.create_index("ix_publication_job_id", "publication", ["job_id", "id"])


def downgrade() -> None:
    op.drop_table("publication")
    op.drop_column("job", "publish")
