"""Jobs that several workers do together.

Revision ID: 0090
Revises: 0080
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP

revision = "0090"
down_revision = "0080"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("nodes", sa.SmallInteger(), server_default="1", nullable=False))
    op.create_check_constraint(op.f("ck_job_nodes"), "job", "nodes BETWEEN 1 AND 64")
    op.create_table(
        "seat",
        sa.Column("job_id", sa.Text(), sa.ForeignKey("job.id", name="fk_seat_job_id", ondelete="CASCADE")),
        sa.Column("fence", sa.BigInteger(), autoincrement=False),
        sa.Column("node_rank", sa.SmallInteger(), autoincrement=False),
        sa.Column("state", sa.Text(), server_default="open", nullable=False),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("expires_at", TIMESTAMP(timezone=True), nullable=True),
        sa.Column("endpoint", sa.Text(), nullable=True),
        sa.Column("error", JSONB(none_as_null=True), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "fence", "node_rank", name=op.f("pk_seat")),
        sa.CheckConstraint("node_rank > 0", name="node_rank"),
        sa.CheckConstraint("state IN ('done', 'failed', 'left', 'open', 'taken')", name="state"),
        sa.CheckConstraint(
            "num_nulls(worker, expires_at) = CASE WHEN state = 'open' THEN 2 ELSE 0 END", name="taken_has_lease"
        ),
        sa.CheckConstraint("(state = 'failed') = (error IS NOT NULL)", name="failed_has_error"),
    )
    op.create_index("ix_seat_open", "seat", ["job_id"], postgresql_where=sa.text("state = 'open'"))


def downgrade() -> None:
    op.drop_table("seat")
    op.drop_constraint(op.f("ck_job_nodes"), "job")
    op.drop_column("job", "nodes")
