"""How large the files of weights may be.

Revision ID: 0030
Revises: 0020
"""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("max_shard_size", sa.Text(), server_default="5GB", nullable=False))


def downgrade() -> None:
    op.drop_column("job", "max_shard_size")
