"""Chats with the result of a job and its original.

Revision ID: 0150
Revises: 0140
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP

revision = "0150"
down_revision = "0140"
branch_labels = None
depends_on = None


def upgrade() -> None:
    now, time = sa.text("clock_timestamp()"), TIMESTAMP(timezone=True)
    op.create_table(
        "chat",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("job_id", sa.Text(), sa.ForeignKey("job.id", ondelete="CASCADE"), nullable=False),
        sa.Column("project_id", sa.Text(), sa.ForeignKey("project.id"), nullable=False),
        sa.Column("max_new_tokens", sa.Integer(), nullable=False),
        sa.Column("needs_memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), server_default="waiting", nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("error", JSONB(none_as_null=True), nullable=True),
        sa.Column("has_template", sa.Boolean(), nullable=True),
        sa.Column("seq", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=True),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", time, nullable=True),
        sa.Column("created_at", time, server_default=now, nullable=False),
        sa.Column("waits_until", time, nullable=False),
        sa.Column("started_at", time, nullable=True),
        sa.Column("used_at", time, server_default=now, nullable=False),
        sa.Column("ended_at", time, nullable=True),
        sa.CheckConstraint("state IN ('ended', 'open', 'starting', 'waiting')", name="state"),
        sa.CheckConstraint(
            "num_nulls(fence, worker, lease_expires_at) = CASE WHEN state IN ('starting', 'open') THEN 0 ELSE 3 END",
            name="held_has_lease",
        ),
        sa.CheckConstraint("(state = 'ended') = (num_nulls(reason, ended_at) = 0)", name="ended_has_reason"),
    )
    op.create_index("uq_chat_open", "chat", ["project_id"], unique=True, postgresql_where=sa.text("state <> 'ended'"))
    op.create_index(
        "ix_chat_lease", "chat", ["lease_expires_at"], postgresql_where=sa.text("state IN ('starting', 'open')")
    )
    op.create_index("ix_chat_job_id", "chat", ["job_id", "id"])
    op.create_table(
        "chat_turn",
        sa.Column("chat_id", sa.Text(), sa.ForeignKey("chat.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default="waiting", nullable=False),
        sa.Column("answer", JSONB(none_as_null=True), nullable=True),
        sa.Column("error", JSONB(none_as_null=True), nullable=True),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state IN ('answered', 'answering', 'failed', 'waiting')", name="state"),
        sa.CheckConstraint("(state = 'failed') = (error IS NOT NULL)", name="failed_has_error"),
    )


def downgrade() -> None:
    op.drop_table("chat_turn")
    op.drop_table("chat")
