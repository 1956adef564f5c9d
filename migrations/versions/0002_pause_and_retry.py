"""Pausing and paused, retry of ended jobs, and the time at which a job last entered each state.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from api.store.states import create_trigger_sql, drop_trigger_sql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

OLD_STATES = ("cancelled", "cancelling", "failed", "queued", "retry_wait", "running", "succeeded")
OLD_OUTCOMES = ("cancelled", "drained", "failed", "lost", "retry", "succeeded")
OLD_TRIGGER = """
CREATE FUNCTION guard_job() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.state <> OLD.state AND (OLD.state || '>' || NEW.state) NOT IN ('queued>cancelled', 'queued>running',
    'retry_wait>cancelled', 'retry_wait>running', 'running>cancelling', 'running>failed', 'running>queued',
    'running>retry_wait', 'running>succeeded', 'cancelling>cancelled', 'cancelling>succeeded') THEN
    RAISE EXCEPTION 'a job cannot move from % to %', OLD.state, NEW.state USING ERRCODE = 'check_violation';
  END IF;
  IF to_jsonb(NEW) - ARRAY['version', 'updated_at', 'lease_expires_at', 'num_events']
    IS DISTINCT FROM to_jsonb(OLD) - ARRAY['version', 'updated_at', 'lease_expires_at', 'num_events'] THEN
    NEW.version := OLD.version + 1;
  END IF;
  NEW.updated_at := clock_timestamp();
  RETURN NEW;
END $$;
CREATE TRIGGER guard_job BEFORE UPDATE ON job FOR EACH ROW EXECUTE FUNCTION guard_job();
"""


def upgrade() -> None:
    op.execute(drop_trigger_sql())
    op.add_column("job", sa.Column("state_times", JSONB(), server_default="{}", nullable=False))
    op.execute("UPDATE job SET state_times = jsonb_build_object('queued', created_at) || jsonb_build_object(state, "
               "coalesce(finished_at, started_at, updated_at))")  # fmt: skip
    _set_states(
        all_states=(*OLD_STATES, "paused", "pausing"),
        held=("cancelling", "pausing", "running"),
        outcomes=(*OLD_OUTCOMES, "paused"),
    )
    op.execute(create_trigger_sql())


def downgrade() -> None:
    op.execute(drop_trigger_sql())
    # What the old map does not know goes back to where an old worker can take it up.
    op.execute(
        "UPDATE job SET state = 'queued', fence = NULL, worker = NULL, lease_expires_at = NULL"
        " WHERE state IN ('pausing', 'paused')"
    )
    op.execute("UPDATE attempt SET outcome = 'drained' WHERE outcome = 'paused'")
    op.execute(
        "UPDATE attempt SET outcome = 'lost', ended_at = clock_timestamp()"
        " WHERE ended_at IS NULL AND job_id IN (SELECT id FROM job WHERE state = 'queued')"
    )
    _set_states(
        all_states=OLD_STATES,
        held=("cancelling", "running"),
        outcomes=OLD_OUTCOMES,
    )
    op.drop_column("job", "state_times")
    op.execute(OLD_TRIGGER)


def _set_states(all_states: tuple[str, ...], held: tuple[str, ...], outcomes: tuple[str, ...]) -> None:
    """The constraints that name states or outcomes, anew."""
    rules = {
        ("job", "ck_job_state"): f"state IN {all_states}",
        ("job", "ck_job_held_has_lease"): (
            f"num_nulls(fence, worker, lease_expires_at) = CASE WHEN state IN {held} THEN 0 ELSE 3 END"
        ),
        ("attempt", "ck_attempt_outcome"): f"outcome IN {outcomes}",
    }
    for (table, name), rule in rules.items():
        op.drop_constraint(op.f(name), table, type_="check")
        op.create_check_constraint(op.f(name), table, rule)
    op.drop_index("ix_job_lease", "job")
    op.create_index("ix_job_lease", "job", ["lease_expires_at"], postgresql_where=sa.text(f"state IN {held}"))
