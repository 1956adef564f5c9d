"""What a job asks for moves into one column: its JobSpec.

API and workers of the release before read the columns that go. Stop them, migrate, and start those of this release;
jobs that were running go on when a worker takes them again.

Revision ID: 0140
Revises: 0130
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from api.store.states import create_trigger_sql

revision = "0140"
down_revision = "0130"
branch_labels = None
depends_on = None

# JSON, not JSONB: the order of a config's patterns counts.
TO_SPEC = """
UPDATE job SET spec = json_strip_nulls(json_build_object(
  'calibration', calibration, 'export', export, 'evaluation', evaluation, 'gate', gate,
  'max_shard_size', max_shard_size, 'file2file', file2file, 'shard_blocks', shard_blocks, 'nodes', nodes,
  'config', config, 'mix', mix))
"""
FROM_SPEC = """
UPDATE job SET config = spec -> 'config', mix = spec -> 'mix', calibration = (spec -> 'calibration')::jsonb,
  export = ARRAY(SELECT json_array_elements_text(spec -> 'export')), evaluation = (spec -> 'evaluation')::jsonb,
  gate = spec ->> 'gate', max_shard_size = spec ->> 'max_shard_size', file2file = (spec ->> 'file2file')::boolean,
  shard_blocks = (spec ->> 'shard_blocks')::boolean
"""
NODES = "COALESCE((spec ->> 'nodes')::smallint, 1)"


def upgrade() -> None:
    op.add_column("job", sa.Column("spec", postgresql.JSON(), nullable=True))
    op.execute("ALTER TABLE job DISABLE TRIGGER USER")  # nothing changes for those who watch the jobs
    op.execute(TO_SPEC)
    op.execute("ALTER TABLE job ENABLE TRIGGER USER")
    op.alter_column("job", "spec", nullable=False)
    for name in (
        "config", "mix", "calibration", "export", "evaluation", "gate", "max_shard_size", "file2file", "shard_blocks",
        "nodes",
    ):  # fmt: skip
        op.drop_column("job", name)
    op.add_column("job", sa.Column("nodes", sa.SmallInteger(), sa.Computed(NODES, persisted=True)))
    op.create_check_constraint(op.f("ck_job_nodes"), "job", "nodes BETWEEN 1 AND 64")
    op.alter_column("job", "nodes", nullable=False)
    op.execute(create_trigger_sql())  # the trigger knows that ``nodes`` follows from ``spec``


def downgrade() -> None:
    op.drop_column("job", "nodes")
    op.add_column("job", sa.Column("nodes", sa.SmallInteger(), server_default="1", nullable=False))
    op.execute("ALTER TABLE job DISABLE TRIGGER USER")
    op.execute("UPDATE job SET nodes = coalesce((spec ->> 'nodes')::smallint, 1)")
    op.create_check_constraint(op.f("ck_job_nodes"), "job", "nodes BETWEEN 1 AND 64")
    op.add_column("job", sa.Column("config", postgresql.JSON(), nullable=True))
    op.add_column("job", sa.Column("mix", postgresql.JSON(), nullable=True))
    op.add_column("job", sa.Column("calibration", postgresql.JSONB(), nullable=True))
    op.add_column("job", sa.Column("export", postgresql.ARRAY(sa.Text()), nullable=True))
    op.add_column("job", sa.Column("max_shard_size", sa.Text(), server_default="5GB", nullable=False))
    op.add_column("job", sa.Column("gate", sa.Text(), server_default="warn", nullable=False))
    op.add_column("job", sa.Column("evaluation", postgresql.JSONB(), server_default="{}", nullable=False))
    op.add_column("job", sa.Column("file2file", sa.Boolean(), server_default="false", nullable=False))
    op.add_column("job", sa.Column("shard_blocks", sa.Boolean(), nullable=True))
    op.execute(FROM_SPEC)
    op.execute("ALTER TABLE job ENABLE TRIGGER USER")
    for name in ("config", "calibration", "export"):
        op.alter_column("job", name, nullable=False)
    op.drop_column("job", "spec")
