"""The states of a job, every legal move between them, and the actions that a client may ask for in each state.

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
    PAUSING = "pausing"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


CLAIMABLE = frozenset({State.QUEUED, State.RETRY_WAIT})
HELD = frozenset({State.RUNNING, State.CANCELLING, State.PAUSING})  # a worker holds the lease
FINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})  # nothing moves any more unless a client asks

MOVES: dict[State, frozenset[State]] = {
    # failed: no worker came in time (max_pending_s)
    State.QUEUED: frozenset({State.RUNNING, State.PAUSED, State.CANCELLED, State.FAILED}),
    State.RETRY_WAIT: frozenset({State.RUNNING, State.PAUSED, State.CANCELLED}),
    # back to queued: the worker was lost, or drained
    State.RUNNING: frozenset(
        {State.SUCCEEDED, State.FAILED, State.RETRY_WAIT, State.QUEUED, State.CANCELLING, State.PAUSING}
    ),
    # succeeded: the cancel came after the artifact was whole
    State.CANCELLING: frozenset({State.CANCELLED, State.SUCCEEDED}),
    # succeeded or failed: the pause came after the engine's end
    State.PAUSING: frozenset({State.PAUSED, State.CANCELLING, State.SUCCEEDED, State.FAILED}),
    State.PAUSED: frozenset({State.QUEUED, State.CANCELLED}),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset({State.QUEUED}),
    State.CANCELLED: frozenset({State.QUEUED}),
}

# Asking again for what is already under way is the same as asking once, so pause is legal in pausing too.
ACTIONS: dict[str, frozenset[State]] = {
    "cancel": frozenset(State) - FINAL,
    "pause": frozenset({State.QUEUED, State.RETRY_WAIT, State.RUNNING, State.PAUSING}),
    "resume": frozenset({State.PAUSED}),
    "retry": frozenset({State.FAILED, State.CANCELLED}),
    "delete": FINAL,
}


class WrongState(Exception):
    """The job's present ``state`` does not allow ``action``."""

    def __init__(self, action: str, state: str) -> None:
        super().__init__(f"cannot {action} a job that is {state}")
        self.action = action
        self.state = State(state)

    @property
    def allowed_states(self) -> list[State]:
        return sorted(ACTIONS[self.action])

    @property
    def allowed_actions(self) -> list[str]:
        return [action for action, states in ACTIONS.items() if self.state in states]


OUTCOMES = ("succeeded", "failed", "retry", "lost", "cancelled", "paused", "drained")  # how an attempt ended

# What a worker does behind the scenes moves no ETag: a poll between two heartbeats is still answered 304. ``nodes``
# follows from ``spec``, and a trigger before the update sees it empty.
_UNSEEN_COLUMNS = ("version", "updated_at", "lease_expires_at", "num_events", "num_log_lines", "nodes")


def create_trigger_sql() -> str:
    """Return SQL that (re)creates the guard of table ``job``: legal moves only; version, updated_at, state_times."""
    moves = ", ".join(f"'{old}>{new}'" for old in MOVES for new in sorted(MOVES[old]))
    unseen = ", ".join(f"'{name}'" for name in _UNSEEN_COLUMNS)
    return f"""
CREATE OR REPLACE FUNCTION guard_job() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'INSERT' THEN
    NEW.state_times := jsonb_build_object(NEW.state, clock_timestamp());
    RETURN NEW;
  END IF;
  IF NEW.state <> OLD.state THEN
    IF (OLD.state || '>' || NEW.state) NOT IN ({moves}) THEN
      RAISE EXCEPTION 'a job cannot move from % to %', OLD.state, NEW.state USING ERRCODE = 'check_violation';
    END IF;
    NEW.state_times := OLD.state_times || jsonb_build_object(NEW.state, clock_timestamp());
  END IF;
  IF to_jsonb(NEW) - ARRAY[{unseen}] IS DISTINCT FROM to_jsonb(OLD) - ARRAY[{unseen}] THEN
    NEW.version := OLD.version + 1;
  END IF;
  NEW.updated_at := clock_timestamp();
  RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER guard_job BEFORE INSERT OR UPDATE ON job FOR EACH ROW EXECUTE FUNCTION guard_job();
"""


def drop_trigger_sql() -> str:
    """Return SQL that undoes ``create_trigger_sql``."""
    return "DROP TRIGGER IF EXISTS guard_job ON job; DROP FUNCTION IF EXISTS guard_job();"
