"""Projects: every key, job and sweep belongs to one. What was there before belongs to the project "default".

Revision ID: 0010
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import TIMESTAMP

revision = "0010"
down_revision = "0008"
branch_labels = None
depends_on = None

DEFAULT = "prj_" + "0" * 32
OWNED = ("api_key", "sweep", "job")
FINAL = "state IN ('cancelled', 'failed', 'succeeded')"
LIST = [sa.literal_column("created_at DESC"), sa.literal_column("id DESC")]


def upgrade() -> None:
    op.create_table(
        "project",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("max_waiting", sa.Integer(), nullable=True),
        sa.Column("max_running", sa.Integer(), nullable=True),
        sa.Column("max_stored_bytes", sa.BigInteger(), nullable=True),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("created_at", TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint(
            "max_waiting >= 0 AND max_running >= 0 AND max_stored_bytes >= 0 AND requests_per_minute > 0",
            name=op.f("ck_project_limits"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_project")),
        sa.UniqueConstraint("name", name=op.f("uq_project_name")),
    )
    op.execute(f"INSERT INTO project (id, name) VALUES ('{DEFAULT}', 'default')")
    for table in OWNED:
        # With a default the rows that are there are not rewritten, so no trigger fires and no version moves.
        op.add_column(table, sa.Column("project_id", sa.Text(), server_default=DEFAULT, nullable=False))
        op.alter_column(table, "project_id", server_default=None)
        op.create_foreign_key(op.f(f"fk_{table}_project_id"), table, "project", ["project_id"], ["id"])
    op.create_index("ix_api_key_project_id", "api_key", ["project_id"])
    for column in ("previous_until", "rotated_at", "last_used_at"):
        op.add_column("api_key", sa.Column(column, TIMESTAMP(timezone=True), nullable=True))
    op.add_column("api_key", sa.Column("previous_sha256", sa.LargeBinary(), nullable=True))
    op.drop_index("ix_job_list", "job")
    op.create_index("ix_job_list", "job", ["project_id", *LIST])
    op.create_index("ix_job_open", "job", ["project_id", "state"], postgresql_where=sa.text(f"NOT ({FINAL})"))


def downgrade() -> None:
    """Everything is everybody's again: do not serve clients of different projects after this."""
    op.drop_index("ix_job_open", "job")
    op.drop_index("ix_job_list", "job")
    op.create_index("ix_job_list", "job", LIST)
    for column in ("previous_sha256", "last_used_at", "rotated_at", "previous_until"):
        op.drop_column("api_key", column)
    op.drop_index("ix_api_key_project_id", "api_key")
    for table in OWNED:
        op.drop_column(table, "project_id")
    op.drop_table("project")
