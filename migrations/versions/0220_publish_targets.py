"""Which project a folder belongs to that artifacts are published to: the one that did so first.

Revision ID: 0220
Revises: 0210
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import TIMESTAMP

revision = "0220"
down_revision = "0210"
branch_labels = None
depends_on = None

SO_FAR = """
INSERT INTO publish_target (url, project_id, created_at)
SELECT DISTINCT ON (target ->> 'to') target ->> 'to', project_id, created_at FROM publication
WHERE target ->> 'to' IS NOT NULL AND state <> 'failed' ORDER BY target ->> 'to', created_at
"""


def upgrade() -> None:
    now = sa.text("clock_timestamp()")
    op.create_table(
        "publish_target",
        sa.Column("url", sa.Text(), primary_key=True),
        sa.Column("project_id", sa.Text(), sa.ForeignKey("project.id"), nullable=False, index=True),
        sa.Column("created_at", TIMESTAMP(timezone=True), server_default=now, nullable=False),
    )
    op.execute(SO_FAR)


def downgrade() -> None:
    op.drop_table("publish_target")
