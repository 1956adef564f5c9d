"""The queue's promises: one claim a job, nothing from a stale worker, nothing lost, nothing for ever."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import func, select, text

from api.store.engine import Sessions
from api.store.queue import clock, control, events, jobs, leases, outbox, workers
from api.store.queue.events import NewEvent
from api.store.queue.leases import Failure, Lease, LeaseLost, Order
from api.store.tables.jobs import Artifact, Attempt, Job, Outbox
from tests.support.service import job_columns
from tests.support.waiting import PATIENCE_S

Submit = Callable[..., str]
GetJob = Callable[[str], Job]


def claim(sessions: Sessions, *, worker: str = "w", lease_s: float = 30) -> Lease | None:
    with sessions.begin() as session:
        return leases.claim(session, worker=worker, lease_s=lease_s)


def held(sessions: Sessions, **options: Any) -> Lease:
    lease = claim(sessions, **options)
    assert lease is not None
    return lease


def expire(sessions: Sessions) -> None:
    with sessions.begin() as session:
        session.execute(
            text("UPDATE job SET lease_expires_at = now() - interval '1 s' WHERE lease_expires_at < 'infinity'")
        )


def reap(sessions: Sessions) -> int:
    with sessions.begin() as session:
        return leases.reap(session)


def attempts(sessions: Sessions, job_id: str) -> list[str | None]:
    with sessions.begin() as session:
        wanted = select(Attempt.outcome).where(Attempt.job_id == job_id).order_by(Attempt.number)
        return list(session.scalars(wanted))


def test_submit_writes_job_event_and_message_together(sessions: Sessions, submit: Submit, get_job: GetJob) -> None:
    job_id = submit()
    with sessions.begin() as session:
        assert [event.seq for event in events.read(session, job_id, after=0, limit=9)] == [1]
        assert [message.payload for message in session.scalars(select(Outbox))] == [{"v": 1}]
    with pytest.raises(RuntimeError), sessions.begin() as session:
        jobs.submit(session, **job_columns())
        raise RuntimeError
    with sessions.begin() as session:
        for table in (Job, Outbox):
            assert session.scalar(select(func.count()).select_from(table)) == 1


def test_oldest_first_and_none_twice(sessions: Sessions, submit: Submit) -> None:
    ids = [submit() for _ in range(3)]
    assert [held(sessions).job_id for _ in ids] == ids
    assert claim(sessions) is None


def test_many_claimers_one_job(sessions: Sessions, submit: Submit) -> None:
    for _ in range(15):
        submit()
        won: list[Lease | None] = []
        start = threading.Barrier(4)

        def race(won: list[Lease | None] = won, start: threading.Barrier = start) -> None:
            start.wait()
            won.append(claim(sessions))

        threads = [threading.Thread(target=race) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 4
        assert sum(lease is not None for lease in won) == 1


def test_many_claimers_many_jobs(sessions: Sessions, submit: Submit) -> None:
    ids = {submit() for _ in range(40)}
    claimed: list[Lease] = []

    def work() -> None:
        while lease := claim(sessions):
            claimed.append(lease)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(lease.job_id for lease in claimed) == sorted(ids)
    assert len({lease.fence for lease in claimed}) == len(ids)


STALE_WRITES: dict[str, Callable[..., Any]] = {
    "renew": lambda session, lease: leases.renew(session, lease, lease_s=60),
    "record": lambda session, lease: leases.record(
        session, lease, happened=[NewEvent("x")], columns={"phase": "stale"}
    ),
    "succeed": lambda session, lease: leases.succeed(
        session, lease, manifest_sha256="s", path="/stale", num_bytes=1, summary={}
    ),
    "fail": lambda session, lease: leases.fail(session, lease, Failure("stale", "stale"), retry_base_s=1),
    "release": leases.release,
}


def snapshot(sessions: Sessions) -> list[Any]:
    """Everything that there is to know, row by row."""
    with sessions.begin() as session:
        return [
            session.execute(text(f"SELECT to_jsonb({table}) FROM {table} ORDER BY 1")).all()
            for table in ("job", "attempt", "event", "artifact", "outbox")
        ]


@pytest.mark.parametrize("write", STALE_WRITES)
@pytest.mark.parametrize("taken_over", [True, False], ids=["taken over", "waiting again"])
def test_a_stale_worker_writes_nothing(write: str, taken_over: bool, sessions: Sessions, submit: Submit) -> None:
    submit()
    stale = held(sessions, worker="slow")
    expire(sessions)
    assert reap(sessions) == 1
    if taken_over:
        assert held(sessions, worker="quick").fence > stale.fence
    before = snapshot(sessions)
    with pytest.raises(LeaseLost), sessions.begin() as session:
        STALE_WRITES[write](session, stale)
    assert snapshot(sessions) == before


# (renew has its own query)
@pytest.mark.parametrize("write", sorted(STALE_WRITES.keys() - {"renew"}))
def test_it_is_the_fence_that_stops_it(
    write: str, sessions: Sessions, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same story with the fence left out of the query: every write goes through. So the test above can fail."""

    def held_by_anybody(session: Any, lease: Lease) -> Job:
        return session.scalars(select(Job).where(Job.id == lease.job_id, Job.fence.is_not(None))).one()  # type: ignore[no-any-return]

    submit()
    stale = held(sessions, worker="slow")
    expire(sessions)
    reap(sessions)
    held(sessions, worker="quick")
    before = snapshot(sessions)
    monkeypatch.setattr(leases, "_held", held_by_anybody)
    with sessions.begin() as session:
        STALE_WRITES[write](session, stale)
    assert snapshot(sessions) != before


def test_an_expired_lease_cannot_be_renewed(sessions: Sessions, submit: Submit) -> None:
    submit()
    lease = held(sessions)
    expire(sessions)
    with pytest.raises(LeaseLost), sessions.begin() as session:
        leases.renew(session, lease, lease_s=60)


def test_the_leases_clock_is_the_databases(sessions: Sessions, submit: Submit, get_job: GetJob) -> None:
    job_id = submit()
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)
        time.sleep(0.3)  # now() would still be the start of this transaction
        assert lease
        before = session.scalar(text("SELECT clock_timestamp()"))
        leases.renew(session, lease, lease_s=60)
        left = session.scalar(
            text("SELECT extract(epoch FROM lease_expires_at - :before) FROM job"), {"before": before}
        )
    assert left is not None
    assert 60 <= left < 60 + PATIENCE_S
    assert get_job(job_id).state == "running"


def test_a_lease_of_a_clock_that_was_set_back_ends_in_time(sessions: Sessions, submit: Submit) -> None:
    """Without that, a job whose worker is lost at the jump would wait for an hour."""

    def left_s() -> float:
        with sessions.begin() as session:
            left = session.scalar(text("SELECT extract(epoch FROM lease_expires_at - clock_timestamp()) FROM job"))
        assert left is not None
        return float(left)

    def shorten() -> int:
        with sessions.begin() as session:
            return clock.shorten_leases(session, lease_s=60)

    submit()
    lease = held(sessions, lease_s=60)
    assert shorten() == 0
    with sessions.begin() as session:
        session.execute(text("UPDATE job SET lease_expires_at = lease_expires_at + interval '1 h'"))
    assert shorten() == 1 and shorten() == 0
    assert 60 < left_s() <= 120
    with sessions.begin() as session:
        leases.renew(session, lease, lease_s=60)
    assert left_s() <= 60


def test_lost_workers_are_forgiven_three_times(sessions: Sessions, submit: Submit, get_job: GetJob) -> None:
    job_id = submit()
    for lost in range(1, 4):
        held(sessions)
        expire(sessions)
        assert reap(sessions) == 1
        job = get_job(job_id)
        assert (job.state, job.lost_count, job.failure_count) == ("queued", lost, 0)
    held(sessions)
    expire(sessions)
    reap(sessions)
    job = get_job(job_id)
    assert job.state == "failed"
    assert job.error is not None
    assert job.error["code"] == "worker_lost"
    assert attempts(sessions, job_id) == ["lost"] * 4
    assert claim(sessions) is None


def test_a_live_lease_is_not_reaped(sessions: Sessions, submit: Submit) -> None:
    submit()
    held(sessions)
    assert reap(sessions) == 0


def test_reaper_and_finish_race_has_one_winner(sessions: Sessions, submit: Submit, get_job: GetJob) -> None:
    for _ in range(10):
        job_id = submit()
        lease = held(sessions)
        expire(sessions)
        start = threading.Barrier(2)
        results: list[str] = []

        def finish(lease: Lease = lease, start: threading.Barrier = start, results: list[str] = results) -> None:
            start.wait()
            try:
                with sessions.begin() as session:
                    leases.fail(session, lease, Failure("bad", "bad"), retry_base_s=1)
                results.append("failed")
            except LeaseLost:
                results.append("lost")

        thread = threading.Thread(target=finish)
        thread.start()
        start.wait()
        num_reaped = reap(sessions)
        thread.join()
        num_reaped += reap(sessions)
        assert (num_reaped, results) in [(1, ["lost"]), (0, ["failed"])]
        if get_job(job_id).state == "queued":
            held(sessions)
        with sessions.begin() as session:
            session.execute(text("UPDATE job SET lease_expires_at = 'infinity' WHERE fence > 0"))


def test_retryable_failures_wait_then_end(sessions: Sessions, submit: Submit, get_job: GetJob) -> None:
    job_id = submit()
    for failure_count in (1, 2, 3):
        lease = held(sessions)
        with sessions.begin() as session:
            leases.fail(session, lease, Failure("net", "away", retryable=True), retry_base_s=60)
        job = get_job(job_id)
        assert job.failure_count == failure_count
        assert job.state == ("retry_wait" if failure_count < 3 else "failed")
        if failure_count < 3:
            assert job.run_at > job.updated_at
            assert claim(sessions) is None
        with sessions.begin() as session:
            session.execute(text("UPDATE job SET run_at = clock_timestamp()"))
    assert attempts(sessions, job_id) == ["retry", "retry", "failed"]


def test_final_failures_end_at_once(sessions: Sessions, submit: Submit, get_job: GetJob) -> None:
    job_id = submit()
    lease = held(sessions)
    with sessions.begin() as session:
        leases.fail(session, lease, Failure("bad_config", "no", hint="do"), retry_base_s=1)
    job = get_job(job_id)
    assert job.state == "failed"
    assert job.finished_at is not None
    assert job.error == {"code": "bad_config", "message": "no", "hint": "do", "retryable": False, "detail": ""}


def test_a_drained_job_is_charged_nothing(sessions: Sessions, submit: Submit, get_job: GetJob) -> None:
    job_id = submit()
    lease = held(sessions)
    with sessions.begin() as session:
        leases.release(session, lease)
    job = get_job(job_id)
    assert (job.state, job.failure_count, job.lost_count) == ("queued", 0, 0)
    assert attempts(sessions, job_id) == ["drained"]
    assert held(sessions).attempt == 2


@pytest.mark.parametrize("end", ["release", "fail", "reap"])
def test_whatever_ends_a_cancelling_job_cancels_it(
    end: str, sessions: Sessions, submit: Submit, get_job: GetJob
) -> None:
    job_id = submit()
    lease = held(sessions)
    with sessions.begin() as session:
        control.cancel(session, job_id)
        assert leases.renew(session, lease, lease_s=60) is Order.CANCEL
    if end == "reap":
        expire(sessions)
        reap(sessions)
    else:
        with sessions.begin() as session:
            STALE_WRITES[end](session, lease)
    assert get_job(job_id).state == "cancelled"


def test_success_beats_a_late_cancel(sessions: Sessions, submit: Submit, get_job: GetJob) -> None:
    job_id = submit()
    lease = held(sessions)
    with sessions.begin() as session:
        control.cancel(session, job_id)
    with sessions.begin() as session:
        leases.succeed(session, lease, manifest_sha256="abc", path="/p", num_bytes=3, summary={"a": 1})
    job = get_job(job_id)
    assert (job.state, job.summary) == ("succeeded", {"a": 1})
    with sessions.begin() as session:
        artifact = session.get(Artifact, job.artifact_id)
        assert artifact is not None
        assert artifact.fence == lease.fence


def test_event_numbers_have_no_gaps(sessions: Sessions, submit: Submit) -> None:
    job_id = submit()
    lease = held(sessions)

    def write() -> None:
        for _ in range(20):
            with sessions.begin() as session:
                leases.record(session, lease, happened=[NewEvent("x"), NewEvent("y")], columns={})

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with sessions.begin() as session:
        found = events.read(session, job_id, after=0, limit=1000)
    assert [event.seq for event in found] == list(range(1, 2 + 1 + 3 * 20 * 2))


def test_version_moves_with_what_can_be_seen(sessions: Sessions, submit: Submit, get_job: GetJob) -> None:
    job_id = submit()
    lease = held(sessions)
    version = get_job(job_id).version
    with sessions.begin() as session:
        leases.renew(session, lease, lease_s=60)
    assert get_job(job_id).version == version
    with sessions.begin() as session:
        leases.record(session, lease, happened=[], columns={"phase": "quantize"})
    assert get_job(job_id).version == version + 1


def test_relay_sends_each_message_and_keeps_what_did_not_go(sessions: Sessions, submit: Submit) -> None:
    live(sessions, num_slots=3)
    for _ in range(3):
        submit()
    sent: list[str] = []

    def refuse_the_second(topic: str, payload: dict[str, Any]) -> None:
        if len(sent) == 1:
            raise outbox.Undelivered("down")
        sent.append(topic)

    with sessions.begin() as session:
        assert outbox.relay(session, refuse_the_second) == 1
    with sessions.begin() as session:
        assert outbox.relay(session, lambda topic, payload: sent.append(topic)) == 2
    with sessions.begin() as session:
        assert outbox.relay(session, lambda topic, payload: sent.append(topic)) == 0
    assert sent == [outbox.WAKE] * 3


@pytest.mark.parametrize(("num_slots", "num_sent"), [(0, 1), (2, 2), (9, 3)])
def test_relay_sends_no_more_wake_ups_at_once_than_there_are_slots(
    sessions: Sessions, submit: Submit, num_slots: int, num_sent: int
) -> None:
    if num_slots:
        live(sessions, num_slots)
    for _ in range(3):
        submit()
    sent: list[str] = []
    with sessions.begin() as session:
        assert outbox.relay(session, lambda topic, payload: sent.append(topic)) == 3
    assert len(sent) == num_sent


def live(sessions: Sessions, num_slots: int) -> None:
    """A worker is there."""
    with sessions.begin() as session:
        workers.beat(session, workers.Registration("w", "h", num_slots, memory_bytes=1), devices=[], live_s=60)
