"""Jobs whose schemes are chosen layer by layer.

Revision ID: 0100
Revises: 0090
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0100"
down_revision = "0090"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("mix", postgresql.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("job", "mix")
