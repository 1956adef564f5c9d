"""A job keeps the traceparent of the request that made it."""

import sqlalchemy as sa
from alembic import op

revision = "0060"
down_revision = "0040"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("traceparent", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("job", "traceparent")
