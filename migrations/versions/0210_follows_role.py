"""Whether a member's key follows the role, or had its scopes named when it was made.

Revision ID: 0210
Revises: 0200
"""

import sqlalchemy as sa
from alembic import op

revision = "0210"
down_revision = "0200"
branch_labels = None
depends_on = None

KEYS_THAT_FOLLOW = """
UPDATE api_key SET follows_role = true FROM member
WHERE member.id = api_key.member_id AND member.role = :role AND api_key.scopes @> :scopes AND api_key.scopes <@ :scopes
"""
ROLES = {
    "viewer": ["jobs:read"],
    "editor": ["jobs:read", "jobs:write", "jobs:chat"],
    "admin": ["jobs:read", "jobs:write", "jobs:chat", "admin"],
}


def upgrade() -> None:
    op.add_column("api_key", sa.Column("follows_role", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    for role, scopes in ROLES.items():
        wanted = sa.bindparam("scopes", scopes, type_=sa.ARRAY(sa.Text()))
        op.execute(sa.text(KEYS_THAT_FOLLOW).bindparams(wanted, role=role))


def downgrade() -> None:
    op.drop_column("api_key", "follows_role")
