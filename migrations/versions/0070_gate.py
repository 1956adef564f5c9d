"""What a result means that misses a limit.

Revision ID: 0070
Revises: 0060
"""

import sqlalchemy as sa
from alembic import op

revision = "0070"
down_revision = "0060"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("gate", sa.Text(), server_default="warn", nullable=False))


def downgrade() -> None:
    op.drop_column("job", "gate")
