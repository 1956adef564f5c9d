"""Uploaded datasets.

Revision ID: 0020
Revises: 0014
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, TIMESTAMP

revision = "0020"
down_revision = "0014"
branch_labels = None
depends_on = None

NOW = sa.text("clock_timestamp()")


def upgrade() -> None:
    op.create_table(
        "dataset",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("submitted_by", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("format", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("columns", ARRAY(sa.Text()), nullable=False),
        sa.Column("text_column", sa.Text(), nullable=False),
        sa.Column("statistics", JSONB(), nullable=False),
        sa.Column("created_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["project.id"], name=op.f("fk_dataset_project_id")),
        sa.ForeignKeyConstraint(["submitted_by"], ["api_key.id"], name=op.f("fk_dataset_submitted_by")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_dataset")),
    )
    op.create_index(op.f("ix_dataset_sha256"), "dataset", ["sha256"])
    op.create_index(op.f("ix_dataset_project_id"), "dataset", ["project_id"])
    op.create_table(
        "upload",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("submitted_by", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("format", sa.Text(), nullable=False),
        sa.Column("text_column", sa.Text(), nullable=True),
        sa.Column("dataset_id", sa.Text(), nullable=True),
        sa.Column("created_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.Column("expires_at", TIMESTAMP(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["project.id"], name=op.f("fk_upload_project_id")),
        sa.ForeignKeyConstraint(["submitted_by"], ["api_key.id"], name=op.f("fk_upload_submitted_by")),
        sa.ForeignKeyConstraint(["dataset_id"], ["dataset.id"], ondelete="CASCADE", name=op.f("fk_upload_dataset_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_upload")),
    )
    op.create_index(op.f("ix_upload_expires_at"), "upload", ["expires_at"])
    op.create_table(
        "upload_part",
        sa.Column("upload_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["upload_id"], ["upload.id"], ondelete="CASCADE", name=op.f("fk_upload_part_upload_id")
        ),
        sa.PrimaryKeyConstraint("upload_id", "number", name=op.f("pk_upload_part")),
    )
    op.add_column("job", sa.Column("dataset_id", sa.Text(), nullable=True))
    op.create_foreign_key(op.f("fk_job_dataset_id"), "job", "dataset", ["dataset_id"], ["id"], ondelete="SET NULL")
    op.create_index("ix_job_dataset_id", "job", ["dataset_id"], postgresql_where=sa.text("dataset_id IS NOT NULL"))


def downgrade() -> None:
    op.drop_index("ix_job_dataset_id", "job")
    op.drop_column("job", "dataset_id")
    op.drop_table("upload_part")
    op.drop_table("upload")
    op.drop_table("dataset")
