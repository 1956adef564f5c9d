"""The format of a webhook's messages.

Revision ID: 0170
Revises: 0160
"""

import sqlalchemy as sa
from alembic import op

revision = "0170"
down_revision = "0160"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("webhook", sa.Column("format", sa.Text(), server_default="json", nullable=False))
    op.create_check_constraint(op.f("ck_webhook_format"), "webhook", "format IN ('json', 'slack', 'teams')")


def downgrade() -> None:
    op.drop_constraint(op.f("ck_webhook_format"), "webhook", type_="check")
    op.drop_column("webhook", "format")
