"""Workers that can take no jobs for now say why.

Revision ID: 0130
Revises: 0120
"""

import sqlalchemy as sa
from alembic import op

revision = "0130"
down_revision = "0120"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("worker", sa.Column("blocked_reason", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("worker", "blocked_reason")
