"""Publications as rows on the real PostgreSQL: who takes them, who may still write, and what ends them."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from api.store.engine import Sessions
from api.store.queue import clock, jobs, leases, publication_leases, publications
from api.store.queue.events import NewEvent
from api.store.queue.leases import MAX_LOST, Failure, LeaseLost
from api.store.queue.publication_leases import PublicationLease
from api.store.queue.publications import CannotPublish
from api.store.tables.publications import Publication

TARGET = {"repo_id": "org/name", "hub_token": "team"}
MAY_PASS = Failure("hub_unreachable", "x", retryable=True, max_failures=3)


@pytest.fixture
def succeed(sessions: Sessions, submit: Callable[..., str]) -> Callable[..., str]:
    """``succeed(publish=..., summary=...)``: the id of a job that has succeeded."""

    def succeed(publish: dict[str, Any] | None = None, summary: dict[str, Any] | None = None) -> str:
        job_id = submit(publish=publish)
        with sessions.begin() as session:
            lease = leases.claim(session, worker="w", lease_s=60)
            assert lease and lease.job_id == job_id
            leases.succeed(session, lease, manifest_sha256="0" * 64, path="/x", num_bytes=1, summary=summary or {})
        return job_id

    return succeed


def ask(sessions: Sessions, job_id: str, asked: dict[str, Any] | None) -> str:
    with sessions.begin() as session:
        job = jobs.lock(session, job_id)
        assert job
        return publications.ask(session, job, asked).id


def claim(sessions: Sessions, lease_s: float = 60) -> PublicationLease | None:
    with sessions.begin() as session:
        return publication_leases.claim(session, worker="w", lease_s=lease_s)


def must_claim(sessions: Sessions, lease_s: float = 60) -> PublicationLease:
    lease = claim(sessions, lease_s)
    assert lease is not None
    return lease


def find(sessions: Sessions, publication_id: str) -> Publication:
    with sessions.begin() as session:
        found = session.get(Publication, publication_id)
        assert found
        return found


def run_out(sessions: Sessions) -> int:
    """All leases run out and are taken back; how many there were."""
    with sessions.begin() as session:
        session.execute(text("UPDATE publication SET lease_expires_at = now() - interval '1 s' WHERE fence > 0"))
    with sessions.begin() as session:
        return publication_leases.reap(session)


def make_due(sessions: Sessions) -> None:
    with sessions.begin() as session:
        session.execute(text("UPDATE publication SET run_at = now() - interval '1 s'"))


def test_it_comes_with_the_success_of_its_job(
    sessions: Sessions, succeed: Callable[..., str], submit: Callable[..., str]
) -> None:
    job_id = succeed(TARGET)
    waiting = submit(publish=TARGET)
    lease = must_claim(sessions)
    assert (lease.job_id, lease.attempt, lease.folder, lease.manifest_sha256) == (job_id, 1, "/x", "0" * 64)
    assert (lease.target, lease.hub_token, lease.sealed_hub_token) == ({"repo_id": "org/name"}, "team", None)
    assert claim(sessions) is None
    with sessions.begin() as session:
        assert publications.is_open(session, job_id) and not publications.is_open(session, waiting)
        job = jobs.lock(session, waiting)
        assert job
        with pytest.raises(CannotPublish, match="queued"):
            publications.ask(session, job, TARGET)


def test_a_lease_of_a_clock_that_was_set_back_ends_in_time(sessions: Sessions, succeed: Callable[..., str]) -> None:
    succeed(TARGET)
    must_claim(sessions)
    with sessions.begin() as session:
        session.execute(text("UPDATE publication SET lease_expires_at = lease_expires_at + interval '1 h'"))
    for expected in (1, 0):
        with sessions.begin() as session:
            assert clock.shorten_leases(session, lease_s=60) == expected


def test_a_stale_lease_writes_nothing(sessions: Sessions, succeed: Callable[..., str]) -> None:
    succeed(TARGET)
    stale = must_claim(sessions)
    assert run_out(sessions) == 1
    fresh = must_claim(sessions)
    assert fresh.fence > stale.fence and fresh.attempt == 2
    writes: list[Callable[[Any], object]] = [
        lambda session: publication_leases.renew(session, stale, lease_s=60),
        lambda session: publication_leases.record(session, stale, happened=[NewEvent("progress", {"done": 1})]),
        lambda session: publication_leases.write_log(session, stale, lines=[]),
        lambda session: publication_leases.succeed(session, stale, revision="r", url="u"),
        lambda session: publication_leases.fail(session, stale, MAY_PASS, retry_base_s=1),
        lambda session: publication_leases.release(session, stale),
    ]
    for write in writes:
        with pytest.raises(LeaseLost), sessions.begin() as session:
            write(session)
    with sessions.begin() as session:
        publication_leases.record(session, fresh, happened=[NewEvent("progress", {"done": 2})])
        publication_leases.succeed(session, fresh, revision="abc", url="https://x")
    found = find(sessions, fresh.publication_id)
    assert (found.state, found.revision, found.lost_count, found.progress) == ("published", "abc", 1, {"done": 2})
    for write in writes:
        with pytest.raises(LeaseLost), sessions.begin() as session:
            write(session)


def test_a_lease_that_ran_out_is_not_renewed(sessions: Sessions, succeed: Callable[..., str]) -> None:
    succeed(TARGET)
    lease = must_claim(sessions, lease_s=0)
    with pytest.raises(LeaseLost), sessions.begin() as session:
        publication_leases.renew(session, lease, lease_s=60)


def test_failures_that_may_pass_are_tried_again_some_times(sessions: Sessions, succeed: Callable[..., str]) -> None:
    job_id = succeed(TARGET)
    for number in (1, 2, 3):
        lease = must_claim(sessions)
        with sessions.begin() as session:
            publication_leases.fail(session, lease, MAY_PASS, retry_base_s=1000)
        found = find(sessions, lease.publication_id)
        assert found.error and found.error["code"] == "hub_unreachable"
        assert (found.state, found.failure_count) == ("pending" if number < 3 else "failed", number)
        assert claim(sessions) is None  # not yet
        make_due(sessions)
    assert ask(sessions, job_id, None) == lease.publication_id
    again = must_claim(sessions)
    assert (again.publication_id, again.attempt) == (lease.publication_id, 4)
    with sessions.begin() as session:
        publication_leases.fail(session, again, Failure("hub_auth", "x"), retry_base_s=1)
    assert find(sessions, again.publication_id).state == "failed"
    with sessions.begin() as session:
        kinds = session.scalars(text("SELECT data ->> 'state' FROM event WHERE kind = 'publication_changed'")).all()
    assert kinds.count("failed") == 2


def test_who_takes_its_worker_down_is_given_up(sessions: Sessions, succeed: Callable[..., str]) -> None:
    succeed(TARGET)
    for _ in range(MAX_LOST + 1):
        lease = must_claim(sessions)
        assert run_out(sessions) == 1
    found = find(sessions, lease.publication_id)
    assert found.state == "failed" and found.error and found.error["code"] == "worker_lost"
    assert run_out(sessions) == 0


def test_a_drain_costs_nothing(sessions: Sessions, succeed: Callable[..., str]) -> None:
    succeed(TARGET)
    lease = must_claim(sessions)
    with sessions.begin() as session:
        publication_leases.release(session, lease)
    found = find(sessions, must_claim(sessions).publication_id)
    assert (found.failure_count, found.lost_count, found.attempt) == (0, 0, 2)


def test_one_at_a_time_and_only_a_failed_one_again(sessions: Sessions, succeed: Callable[..., str]) -> None:
    job_id = succeed()
    with pytest.raises(CannotPublish) as caught:
        ask(sessions, job_id, None)
    assert caught.value.code == "nothing_to_retry"
    ask(sessions, job_id, TARGET)
    for asked in (TARGET, None):
        with pytest.raises(CannotPublish) as caught:
            ask(sessions, job_id, asked)
        assert caught.value.code == "publication_in_progress"
    with sessions.begin() as session:
        publication_leases.succeed(session, must_claim_in(session), revision="r", url="u")
    with pytest.raises(CannotPublish):
        ask(sessions, job_id, None)
    second = ask(sessions, job_id, {"to": "file:///x"})
    with sessions.begin() as session:
        assert publications.find_last(session, [job_id])[job_id].id == second
    with pytest.raises(IntegrityError, match="uq_publication_open"), sessions.begin() as session:
        session.execute(text("UPDATE publication SET state = 'pending', finished_at = NULL"))


def must_claim_in(session: Any) -> PublicationLease:
    lease = publication_leases.claim(session, worker="w", lease_s=60)
    assert lease is not None
    return lease


def test_one_folder_is_written_by_one(sessions: Sessions, succeed: Callable[..., str]) -> None:
    for to in ("file:///x", "file:///x", "file:///y"):
        succeed({"to": to})
    first, second = must_claim(sessions), must_claim(sessions)
    assert {first.target["to"], second.target["to"]} == {"file:///x", "file:///y"}
    assert claim(sessions) is None
    with pytest.raises(IntegrityError, match="uq_publication_to"), sessions.begin() as session:
        session.execute(
            text("UPDATE publication SET state = 'publishing', fence = 0, worker = 'w', lease_expires_at = now() "
                 "WHERE state = 'pending'")
        )  # fmt: skip
    with sessions.begin() as session:
        publication_leases.succeed(session, first, revision="r", url="u")
    assert must_claim(sessions).target == {"to": "file:///x"}


def test_many_workers_take_each_once(sessions: Sessions, succeed: Callable[..., str]) -> None:
    wanted = {succeed({"repo_id": f"org/{number}"}) for number in range(12)}
    taken: list[str] = []

    def work() -> None:
        for _ in range(30):  # a row that somebody is just looking at is passed over
            if lease := claim(sessions):
                taken.append(lease.job_id)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(wanted)


def test_a_deleted_job_takes_its_publication_along(sessions: Sessions, succeed: Callable[..., str]) -> None:
    job_id = succeed(TARGET)
    lease = must_claim(sessions)
    with sessions.begin() as session:
        job = jobs.lock(session, job_id)
        assert job
        jobs.delete(session, job)
    with pytest.raises(LeaseLost), sessions.begin() as session:
        publication_leases.succeed(session, lease, revision="r", url="u")


def verdict(level: str) -> dict[str, Any]:
    return {"verdict": {"level": level, "reason": "the KL divergence is large"}}


MET = {"verdict": None, "goal": {"is_met": True, "why": "the best result that fits"}}


@pytest.mark.parametrize("level", ["unclear", "degraded", "broken"])
def test_a_poor_result_is_published_on_request_alone(
    level: str, sessions: Sessions, succeed: Callable[..., str]
) -> None:
    job_id = succeed(summary=verdict(level))
    with pytest.raises(CannotPublish, match=f"The result is {level}: the KL divergence is large") as refusal:
        ask(sessions, job_id, TARGET)
    assert refusal.value.code == "poor_result" and "--force" in refusal.value.hint
    assert claim(sessions) is None
    publication_id = ask(sessions, job_id, TARGET | {"force": True})
    lease = must_claim(sessions)
    assert lease.publication_id == publication_id and find(sessions, publication_id).target == {"repo_id": "org/name"}


def test_a_result_that_missed_its_goal_is_published_on_request_alone(
    sessions: Sessions, succeed: Callable[..., str]
) -> None:
    missed = {"goal": {"is_met": False, "why": "no measured result that fits keeps 99 %"}}
    job_id = succeed(TARGET, verdict("faithful") | missed)
    with sessions.begin() as session:
        held = publications.find_last(session, [job_id])[job_id]
    assert (held.state, held.error["code"]) == ("failed", "poor_result")
    assert held.error["message"] == "The result missed its goal: no measured result that fits keeps 99 %."
    assert "a lower recovery" in held.error["hint"] and claim(sessions) is None
    ask(sessions, job_id, TARGET | {"force": True})
    assert claim(sessions) is not None


def test_a_poor_result_that_was_to_be_published_says_why_it_was_not(
    sessions: Sessions, succeed: Callable[..., str]
) -> None:
    job_id = succeed(TARGET, verdict("degraded"))
    with sessions.begin() as session:
        held = publications.find_last(session, [job_id])[job_id]
        assert (held.state, held.error["code"]) == ("failed", "poor_result") and held.finished_at
    assert claim(sessions) is None
    with pytest.raises(CannotPublish) as refusal:
        ask(sessions, job_id, None)  # a retry changes nothing about the result
    assert refusal.value.code == "poor_result"
    ask(sessions, job_id, TARGET | {"force": True})
    assert claim(sessions) is not None


@pytest.mark.parametrize("summary", [verdict("good"), verdict("faithful"), {"verdict": None}, {}, MET])
def test_other_results_are_published(summary: dict[str, Any], sessions: Sessions, succeed: Callable[..., str]) -> None:
    succeed(TARGET, summary)
    assert claim(sessions) is not None


def test_a_poor_result_that_was_to_be_published_in_any_case_is(sessions: Sessions, succeed: Callable[..., str]) -> None:
    succeed(TARGET | {"force": True}, verdict("broken"))
    assert claim(sessions) is not None
