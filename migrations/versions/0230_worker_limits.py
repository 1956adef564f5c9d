"""What protects a worker's engines and limits their memory; a table that readiness writes to, and never keeps.

Revision ID: 0230
Revises: 0220
"""

import sqlalchemy as sa
from alembic import op

revision = "0230"
down_revision = "0220"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("worker", sa.Column("sandbox", sa.Text(), server_default="unknown", nullable=False))
    op.add_column("worker", sa.Column("memory_limit", sa.Text(), server_default="unknown", nullable=False))
    op.create_table("write_probe", sa.Column("content", sa.Text(), nullable=False))


def downgrade() -> None:
    op.drop_table("write_probe")
    op.drop_column("worker", "memory_limit")
    op.drop_column("worker", "sandbox")
