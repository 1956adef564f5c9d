"""The states of a job and every legal move between them.

The migration builds a trigger from ``MOVES`` (``create_trigger_sql``), so not even a mistaken query can leave the map.
A new state or move is a line here and a migration that runs ``create_trigger_sql`` again.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    RETRY_WAIT = "retry_wait"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


CLAIMABLE = frozenset({State.QUEUED, State.RETRY_WAIT})
HELD = frozenset({State.RUNNING, State.CANCELLING})  # a worker holds the lease
FINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})

MOVES: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING, State.CANCELLED}),
    State.RETRY_WAIT: frozenset({State.RUNNING, State.CANCELLED}),
    # back to queued: the worker was lost, or drained
    State.RUNNING: frozenset({State.SUCCEEDED, State.FAILED, State.RETRY_WAIT, State.QUEUED, State.CANCELLING}),
    # succeeded: the cancel came after the artifact was whole
    State.CANCELLING: frozenset({State.CANCELLED, State.SUCCEEDED}),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}

OUTCOMES = ("succeeded", "failed", "retry", "lost", "cancelled", "drained")  # how an attempt ended

# What a worker does behind the scenes moves no ETag: a poll between two heartbeats is still answered 304.
_UNSEEN_COLUMNS = ("version", "updated_at", "lease_expires_at", "num_events")


def create_trigger_sql() -> str:
    """SQL that (re)creates the guard of table ``job``: legal moves only; it also keeps version and updated_at."""
    moves = ", ".join(f"'{old}>{new}'" for old in MOVES for new in sorted(MOVES[old]))
    unseen = ", ".join(f"'{name}'" for name in _UNSEEN_COLUMNS)
    return f"""
CREATE OR REPLACE FUNCTION guard_job() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.state <> OLD.state AND (OLD.state || '>' || NEW.state) NOT IN ({moves}) THEN
    RAISE EXCEPTION 'a job cannot move from % to %', OLD.state, NEW.state USING ERRCODE = 'check_violation';
  END IF;
  IF to_jsonb(NEW) - ARRAY[{unseen}] IS DISTINCT FROM to_jsonb(OLD) - ARRAY[{unseen}] THEN
    NEW.version := OLD.version + 1;
  END IF;
  NEW.updated_at := clock_timestamp();
  RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER guard_job BEFORE UPDATE ON job FOR EACH ROW EXECUTE FUNCTION guard_job();
"""


def drop_trigger_sql() -> str:
    """SQL that undoes ``create_trigger_sql``."""
    return "DROP TRIGGER IF EXISTS guard_job ON job; DROP FUNCTION IF EXISTS guard_job();"
