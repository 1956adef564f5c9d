"""What devices a worker has, and that it shall take no jobs.

Revision ID: 0014
Revises: 0013
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    now = sa.text("clock_timestamp()")
    op.add_column("worker", sa.Column("devices", JSONB(), server_default="[]", nullable=False))
    op.add_column("worker", sa.Column("beat_at", TIMESTAMP(timezone=True), server_default=now, nullable=False))
    op.add_column("worker", sa.Column("drain_requested_at", TIMESTAMP(timezone=True), nullable=True))


def downgrade() -> None:
    for column in ("drain_requested_at", "beat_at", "devices"):
        op.drop_column("worker", column)
