"""Lists by label, deletion of a job with all that belongs to it, and what a job is a clone of.

Revision ID: 0006
Revises: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

OWNED = ("artifact", "attempt", "event")


def upgrade() -> None:
    op.add_column("job", sa.Column("cloned_from", sa.Text(), nullable=True))
    op.create_index(
        "ix_job_labels", "job", ["labels"], postgresql_using="gin", postgresql_ops={"labels": "jsonb_path_ops"}
    )
    _set_ondelete("CASCADE")


def downgrade() -> None:
    _set_ondelete(None)
    op.drop_index("ix_job_labels", "job")
    op.drop_column("job", "cloned_from")


def _set_ondelete(ondelete: str | None) -> None:
    for table in OWNED:
        name = op.f(f"fk_{table}_job_id")
        op.drop_constraint(name, table, type_="foreignkey")
        op.create_foreign_key(name, table, "job", ["job_id"], ["id"], ondelete=ondelete)
