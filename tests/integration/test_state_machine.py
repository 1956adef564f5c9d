"""The whole life of jobs under hypothesis, on the real database; and the mutants that this must find.

Rules are what clients, workers and time do, in any order. A model in Python says what must be true after each. A
sequence that breaks a promise is found here, and a service without its fence, its state check or its lease check must
be such a sequence: otherwise this test would prove nothing.
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test
from sqlalchemy import select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from api.store.engine import Sessions
from api.store.queue import control, jobs, leases
from api.store.queue.leases import Failure, Lease, LeaseLost
from api.store.states import ACTIONS, FINAL, HELD, State, WrongState
from api.store.tables.jobs import Attempt, Job
from tests.support.params import with_usual
from tests.support.service import job_columns

NUM_EXAMPLES = int(os.environ.get("STATE_MACHINE_EXAMPLES", "12"))  # a nightly run may take more


@dataclass
class Expected:
    """What the model knows of one job: its state, and whose lease counts."""

    state: State = State.QUEUED
    fence: int | None = None
    num_claims: int = 0


class Life(RuleBasedStateMachine):
    """Three or so jobs, workers that die and come back, clients that ask for everything."""

    sessions: Sessions
    all_jobs = Bundle("all_jobs")
    all_leases = Bundle("all_leases")  # every lease ever given, most of them stale

    def __init__(self) -> None:
        super().__init__()
        with self.sessions.begin() as session:
            session.execute(text("DELETE FROM job"))
            session.execute(text("DELETE FROM outbox"))
        self.expected: dict[str, Expected] = {}
        self.given: list[Lease] = []

    def do(self, change: Callable[..., Any], *args: Any, **named: Any) -> Any:
        with self.sessions.begin() as session:
            return change(session, *args, **named)

    # clients

    @rule(target=all_jobs, priority=st.integers(0, 9))
    def submit(self, priority: int) -> Any:
        if len(self.expected) >= 4:
            return multiple()
        job_id = self.do(jobs.submit, **job_columns(priority=priority)).id
        self.expected[job_id] = Expected()
        return job_id

    @rule(job_id=all_jobs, action=st.sampled_from(["cancel", "pause", "resume", "retry"]))
    def ask(self, job_id: str, action: str) -> None:
        known = self.expected[job_id]
        legal = known.state in ACTIONS[action]
        try:
            self.do(getattr(control, action), job_id)
        except WrongState:
            assert not legal, f"{action} of a job that is {known.state} was refused"
            return
        assert legal, f"{action} of a job that is {known.state} was done"
        held = known.state in HELD
        aims = {"cancel": (State.CANCELLED, State.CANCELLING), "pause": (State.PAUSED, State.PAUSING)}
        known.state = aims[action][held] if action in aims else State.QUEUED

    # workers

    @rule(target=all_leases)
    def claim(self) -> Any:
        lease: Lease | None = self.do(leases.claim, worker="w", lease_s=60)
        waiting = [job_id for job_id, known in self.expected.items() if known.state in (State.QUEUED, State.RETRY_WAIT)]
        if lease is None:
            assert not waiting, "a job waits and nobody gets it"
            return multiple()
        assert lease.job_id in waiting, "a job was claimed that does not wait"
        known = self.expected[lease.job_id]
        known.state, known.fence = State.RUNNING, lease.fence
        known.num_claims += 1
        self.given.append(lease)
        return lease

    @rule(lease=all_leases)
    def lose_and_hand_over(self, lease: Lease) -> None:
        """The worker falls silent, its lease runs out, the reaper comes: the lease in the bundle is stale now."""
        known = self.expected[lease.job_id]
        if known.fence != lease.fence:
            return
        past = text("UPDATE job SET lease_expires_at = now() - interval '1 s', lost_count = 0 WHERE id = :id")
        self.do(lambda session: session.execute(past, {"id": lease.job_id}))
        with pytest.raises(LeaseLost):
            self.do(leases.renew, lease, lease_s=60)
        assert self.do(leases.reap) == 1
        becomes = {State.CANCELLING: State.CANCELLED, State.PAUSING: State.PAUSED}
        known.state, known.fence = becomes.get(known.state, State.QUEUED), None

    @rule(lease=all_leases, how=st.sampled_from(["renew", "record", "release", "succeed", "fail", "retry"]))
    def write(self, lease: Lease, how: str) -> None:
        """A worker writes, whether its lease still counts or not."""
        known = self.expected[lease.job_id]
        mine = known.fence == lease.fence
        try:
            self.do(WRITES[how], lease)
        except LeaseLost:
            assert not mine, f"{how} of the worker that holds the job was refused"
            return
        assert mine, f"{how} of a stale worker was written"
        if how in ("renew", "record"):
            return
        known.fence = None
        stopped = {State.CANCELLING: State.CANCELLED, State.PAUSING: State.PAUSED}
        known.state = {
            "release": stopped.get(known.state, State.QUEUED),
            "succeed": State.SUCCEEDED,
            "fail": State.CANCELLED if known.state == State.CANCELLING else State.FAILED,
            "retry": stopped.get(known.state, State.RETRY_WAIT),
        }[how]

    @rule(
        action=st.sampled_from(["cancel", "pause"]),
        how=st.sampled_from(["release", "succeed", "fail", "retry"]),
        which=st.integers(0, 3),
    )
    def ask_and_obey(self, action: str, how: str, which: int) -> None:
        """A client asks for the end of a job that runs, and its worker ends it: too rare where chance decides."""
        held = [lease for lease in self.given if self.expected[lease.job_id].fence == lease.fence]
        if held:
            lease = held[which % len(held)]
            self.ask(lease.job_id, action)
            self.write(lease, how)

    @rule()
    def reap_what_lives(self) -> None:
        assert self.do(leases.reap) == 0, "a live lease was taken away"

    # what is always true

    @invariant()
    def the_database_agrees(self) -> None:
        with self.sessions.begin() as session:
            for job in session.scalars(select(Job)):
                known = self.expected[job.id]
                assert (job.state, job.fence) == (known.state, known.fence)
                assert (job.finished_at is not None) == (job.state in FINAL)
                assert job.attempt == known.num_claims
                assert job.state in job.state_times
                tries = session.scalars(select(Attempt).where(Attempt.job_id == job.id)).all()
                assert len(tries) == known.num_claims
                assert [each.fence for each in tries if each.outcome is None] == ([known.fence] if known.fence else [])
                assert sum(each.outcome == "succeeded" for each in tries) == (job.state == State.SUCCEEDED)


def succeed(session: Session, lease: Lease) -> None:
    sha = f"sha{lease.fence}"
    leases.succeed(session, lease, manifest_sha256=sha, path="/p", num_bytes=1, summary={})


# (looked up when they are called: a mutant may stand there)
WRITES: dict[str, Callable[[Session, Lease], Any]] = {
    "renew": lambda session, lease: leases.renew(session, lease, lease_s=60),
    "record": lambda session, lease: leases.record(session, lease, happened=[], columns={"phase": "x"}),
    "release": lambda session, lease: leases.release(session, lease),
    "succeed": succeed,
    "fail": lambda session, lease: leases.fail(session, lease, Failure("bad", "bad"), retry_base_s=0),
    "retry": lambda session, lease: leases.fail(
        session, lease, Failure("net", "away", retryable=True, max_failures=10**6), retry_base_s=0
    ),
}


def live(sessions: Sessions, num_examples: int) -> None:
    """Run lives until one breaks a promise. No shrinking: against a database it would take minutes."""

    class OnThisDatabase(Life):
        pass

    OnThisDatabase.sessions = sessions
    how = settings(
        max_examples=num_examples,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(OnThisDatabase, settings=how)


def test_nothing_is_lost_and_nothing_runs_twice(sessions: Sessions) -> None:
    live(sessions, NUM_EXAMPLES)


# name -> (module, function, what is changed in its text, to what, how it shows)
MUTANTS: dict[str, tuple[ModuleType, str, str, str, tuple[str, ...]]] = {
    "fence removed": (leases, "_held", "Job.fence == lease.fence, ", "", ("stale worker was written",)),
    "state check removed": (
        control,
        "_lock_for",
        "job.state not in ACTIONS[action]",
        "False",
        ("was done", "cannot move from", "held_has_lease"),  # behind the code stands the database
    ),
    "reaper's lease compare flipped": (
        leases,
        "reap",
        "lease_expires_at <",
        "lease_expires_at >",
        ("live lease", "0 == 1"),
    ),
    "heartbeat's lease compare flipped": (
        leases,
        "renew",
        "lease_expires_at >",
        "lease_expires_at <",
        ("that holds the job was refused", "DID NOT RAISE"),
    ),
    "pause forgotten by the release": (
        leases,
        "release",
        "State.PAUSED",
        "State.QUEUED",
        ("queued", "cannot move from"),
    ),
    "claims ignore the state": (
        leases,
        "_due",
        "Job.state.in_(CLAIMABLE), ",
        "",
        ("cannot move", "does not wait", "uq_"),
    ),
}


@pytest.mark.parametrize("name", with_usual(MUTANTS, ["fence removed", "reaper's lease compare flipped"]))
def test_it_finds_a_service_without_its_guards(name: str, sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function, old, new, signs = MUTANTS[name]
    source = inspect.getsource(getattr(module, function))
    assert source.count(old) == 1
    names = dict(vars(module))
    exec(source.replace(old, new), names)
    monkeypatch.setattr(module, function, names[function])
    with pytest.raises((AssertionError, SQLAlchemyError, pytest.fail.Exception)) as found:
        live(sessions, 4 * NUM_EXAMPLES)
    assert any(sign in str(found.value) for sign in signs), found.value
