"""A retry may avoid the host of the attempt that failed.

Revision ID: 0190
Revises: 0180
"""

import sqlalchemy as sa
from alembic import op

revision = "0190"
down_revision = "0180"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("avoid_host", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("job", "avoid_host")
