"""The model registry: models, versions, aliases, and the requests to move a protected alias.

Revision ID: 0240
Revises: 0230
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, TIMESTAMP

revision = "0240"
down_revision = "0230"
branch_labels = None
depends_on = None


def upgrade() -> None:
    now, time = sa.text("clock_timestamp()"), TIMESTAMP(timezone=True)
    names, production = ARRAY(sa.Text()), sa.text("'{production}'")
    op.add_column("project", sa.Column("protected_aliases", names, server_default=production, nullable=False))
    op.create_table(
        "registered_model",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("project_id", sa.Text(), sa.ForeignKey("project.id"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("last_version", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", time, server_default=now, nullable=False),
    )
    op.create_index("uq_registered_model_name", "registered_model", ["project_id", "name"], unique=True)
    op.create_table(
        "registry_version",
        sa.Column("model_id", sa.Text(), sa.ForeignKey("registered_model.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("job_id", sa.Text(), sa.ForeignKey("job.id"), nullable=False, index=True),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column("created_at", time, server_default=now, nullable=False),
    )
    op.create_index("uq_registry_version_job", "registry_version", ["model_id", "job_id"], unique=True)
    op.create_table(
        "registry_alias",
        sa.Column("model_id", sa.Text(), sa.ForeignKey("registered_model.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("alias", sa.Text(), primary_key=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("moved_at", time, server_default=now, nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id", "version"],
            ["registry_version.model_id", "registry_version.version"],
            name=op.f("fk_registry_alias_version"),
        ),
    )
    op.create_table(
        "alias_request",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("model_id", sa.Text(), sa.ForeignKey("registered_model.id", ondelete="CASCADE"), nullable=False),
        sa.Column("alias", sa.Text(), nullable=False),
        sa.Column("from_version", sa.Integer(), nullable=True),
        sa.Column("to_version", sa.Integer(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default="pending", nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=True),
        sa.Column("created_at", time, server_default=now, nullable=False),
        sa.Column("decided_by", sa.Text(), nullable=True),
        sa.Column("decided_at", time, nullable=True),
        sa.Column("comment", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "state IN ('approved', 'pending', 'refused', 'withdrawn')", name=op.f("ck_alias_request_state")
        ),
        sa.CheckConstraint("(state = 'pending') = (decided_at IS NULL)", name=op.f("ck_alias_request_decided")),
    )
    op.create_index("ix_alias_request_list", "alias_request", ["model_id", sa.text("id DESC")])
    pending = sa.text("state = 'pending'")
    op.create_index(
        "uq_alias_request_pending", "alias_request", ["model_id", "alias"], unique=True, postgresql_where=pending
    )


def downgrade() -> None:
    for table in ("alias_request", "registry_alias", "registry_version", "registered_model"):
        op.drop_table(table)
    op.drop_column("project", "protected_aliases")
