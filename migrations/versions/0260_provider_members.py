"""Members who sign in through an OpenID provider.

Revision ID: 0260
Revises: 0250
"""

import sqlalchemy as sa
from alembic import op

revision = "0260"
down_revision = "0250"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("member", sa.Column("issuer", sa.Text(), nullable=True))
    op.add_column("member", sa.Column("subject", sa.Text(), nullable=True))
    op.create_index("uq_member_subject", "member", ["issuer", "subject", "project_id"], unique=True)


def downgrade() -> None:
    op.drop_index("uq_member_subject", "member")
    op.drop_column("member", "subject")
    op.drop_column("member", "issuer")
