"""Priority, limits, and the time a job has already run.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

CLAIMABLE = sa.text("state IN ('queued', 'retry_wait')")


def upgrade() -> None:
    op.add_column("job", sa.Column("priority", sa.SmallInteger(), server_default="5", nullable=False))
    op.add_column("job", sa.Column("max_runtime_s", sa.Integer(), nullable=True))
    op.add_column("job", sa.Column("max_pending_s", sa.Integer(), nullable=True))
    op.add_column("job", sa.Column("used_runtime_s", sa.Double(), server_default="0", nullable=False))
    op.create_check_constraint(op.f("ck_job_priority"), "job", "priority BETWEEN 0 AND 9")
    op.create_check_constraint(op.f("ck_job_limits"), "job", "max_runtime_s > 0 AND max_pending_s > 0")
    op.drop_index("ix_job_claim", "job")
    columns = [sa.literal_column("priority DESC"), "run_at", "id"]
    op.create_index("ix_job_claim", "job", columns, postgresql_where=CLAIMABLE)


def downgrade() -> None:
    op.drop_index("ix_job_claim", "job")
    op.create_index("ix_job_claim", "job", ["run_at", "id"], postgresql_where=CLAIMABLE)
    op.drop_constraint(op.f("ck_job_limits"), "job", type_="check")
    op.drop_constraint(op.f("ck_job_priority"), "job", type_="check")
    for column in ("used_runtime_s", "max_pending_s", "max_runtime_s", "priority"):
        op.drop_column("job", column)
