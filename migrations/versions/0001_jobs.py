"""Jobs with their attempts, events and artifacts; the outbox; API keys.

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, JSON, JSONB, TIMESTAMP

from api.store.states import create_trigger_sql, drop_trigger_sql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

NOW = sa.text("clock_timestamp()")


def upgrade() -> None:
    op.execute(sa.schema.CreateSequence(sa.Sequence("fence_seq", data_type=sa.BigInteger())))
    op.create_table(
        "api_key",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("scopes", ARRAY(sa.Text()), nullable=False),
        sa.Column("created_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.Column("expires_at", TIMESTAMP(timezone=True), nullable=True),
        sa.Column("revoked_at", TIMESTAMP(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_key")),
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("payload", JSONB(), nullable=False),
        sa.Column("created_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
    )
    op.create_table(
        "job",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("submitted_by", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("labels", JSONB(), nullable=False),
        sa.Column("model", JSONB(), nullable=False),
        sa.Column("preset", sa.Text(), nullable=True),
        sa.Column("config", JSON(), nullable=False),
        sa.Column("calibration", JSONB(), nullable=False),
        sa.Column("export", ARRAY(sa.Text()), nullable=False),
        sa.Column("state", sa.Text(), server_default="queued", nullable=False),
        sa.Column("phase", sa.Text(), nullable=True),
        sa.Column("progress", JSONB(), nullable=True),
        sa.Column("summary", JSONB(), nullable=True),
        sa.Column("error", JSONB(), nullable=True),
        sa.Column("artifact_id", sa.Text(), nullable=True),
        sa.Column("cancel_requested_at", TIMESTAMP(timezone=True), nullable=True),
        sa.Column("version", sa.BigInteger(), server_default="1", nullable=False),
        sa.Column("num_events", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("failure_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("lost_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=True),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", TIMESTAMP(timezone=True), nullable=True),
        sa.Column("run_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.Column("created_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.Column("updated_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.Column("started_at", TIMESTAMP(timezone=True), nullable=True),
        sa.Column("finished_at", TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(state IN ('cancelled', 'failed', 'succeeded')) = (finished_at IS NOT NULL)",
            name=op.f("ck_job_final_has_finished_at"),
        ),
        sa.CheckConstraint(
            "num_nulls(fence, worker, lease_expires_at) = "
            "CASE WHEN state IN ('cancelling', 'running') THEN 0 ELSE 3 END",
            name=op.f("ck_job_held_has_lease"),
        ),
        sa.CheckConstraint("state <> 'failed' OR error ->> 'code' IS NOT NULL", name=op.f("ck_job_failed_has_code")),
        sa.CheckConstraint(
            "state <> 'succeeded' OR artifact_id IS NOT NULL", name=op.f("ck_job_succeeded_has_artifact")
        ),
        sa.CheckConstraint(
            "state IN ('cancelled', 'cancelling', 'failed', 'queued', 'retry_wait', 'running', 'succeeded')",
            name=op.f("ck_job_state"),
        ),
        sa.ForeignKeyConstraint(["submitted_by"], ["api_key.id"], name=op.f("fk_job_submitted_by")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job")),
    )
    op.create_index(
        "ix_job_claim",
        "job",
        ["run_at", "id"],
        unique=False,
        postgresql_where=sa.text("state IN ('queued', 'retry_wait')"),
    )
    op.create_index(
        "ix_job_lease",
        "job",
        ["lease_expires_at"],
        unique=False,
        postgresql_where=sa.text("state IN ('cancelling', 'running')"),
    )
    op.create_index(
        "ix_job_list", "job", [sa.literal_column("created_at DESC"), sa.literal_column("id DESC")], unique=False
    )
    op.create_table(
        "artifact",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("manifest_sha256", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_artifact_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_artifact")),
    )
    op.create_index("uq_artifact_manifest", "artifact", ["job_id", "manifest_sha256"], unique=True)
    op.create_table(
        "attempt",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("started_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.Column("ended_at", TIMESTAMP(timezone=True), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("error", JSONB(), nullable=True),
        sa.CheckConstraint(
            "outcome IN ('cancelled', 'drained', 'failed', 'lost', 'retry', 'succeeded')",
            name=op.f("ck_attempt_outcome"),
        ),
        sa.CheckConstraint("(ended_at IS NULL) = (outcome IS NULL)", name=op.f("ck_attempt_ended_has_outcome")),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_attempt_job_id")),
        sa.PrimaryKeyConstraint("job_id", "number", name=op.f("pk_attempt")),
        sa.UniqueConstraint("fence", name=op.f("uq_attempt_fence")),
    )
    op.create_index("uq_attempt_open", "attempt", ["job_id"], unique=True, postgresql_where=sa.text("ended_at IS NULL"))
    op.create_table(
        "event",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("data", JSONB(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_event_job_id")),
        sa.PrimaryKeyConstraint("job_id", "seq", name=op.f("pk_event")),
    )
    op.create_foreign_key(op.f("fk_job_artifact_id"), "job", "artifact", ["artifact_id"], ["id"])
    op.execute(create_trigger_sql())


def downgrade() -> None:
    op.execute(drop_trigger_sql())
    op.drop_constraint(op.f("fk_job_artifact_id"), "job", type_="foreignkey")
    for table in ("event", "attempt", "artifact", "job", "outbox", "api_key"):
        op.drop_table(table)
    op.execute(sa.schema.DropSequence(sa.Sequence("fence_seq")))
