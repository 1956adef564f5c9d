"""The phases of an attempt, and the engine's log.

Revision ID: 0008
Revises: 0007
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP

from api.store.states import create_trigger_sql

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("phases", JSONB(), server_default="[]", nullable=False))
    op.add_column("job", sa.Column("num_log_lines", sa.BigInteger(), server_default="0", nullable=False))
    op.create_table(
        "log_line",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.CheckConstraint("level IN ('debug', 'error', 'info', 'warning')", name=op.f("ck_log_line_level")),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE", name=op.f("fk_log_line_job_id")),
        sa.PrimaryKeyConstraint("job_id", "seq", name=op.f("pk_log_line")),
    )
    op.execute(create_trigger_sql())  # a new line in the log moves no ETag


def downgrade() -> None:
    op.drop_table("log_line")
    op.drop_column("job", "num_log_lines")
    op.drop_column("job", "phases")
