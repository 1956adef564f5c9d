"""Where a scheduler runs a job's engine, and which workers use one.

Revision ID: 0250
Revises: 0240
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0250"
down_revision = "0240"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("allocation", JSONB(none_as_null=True), nullable=True))
    op.add_column("worker", sa.Column("launcher", sa.Text(), server_default="local", nullable=False))


def downgrade() -> None:
    op.drop_column("worker", "launcher")
    op.drop_column("job", "allocation")
