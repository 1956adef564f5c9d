"""What clients do with jobs that are there, over HTTP and on the real database: change, pause, retry, clone, delete."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import delete, event, func, select, text, update

from api.store.engine import Sessions
from api.store.queue import control, leases, waiting, workers
from api.store.queue.leases import Failure, Lease, Order
from api.store.queue.waiting import explain
from api.store.states import ACTIONS, FINAL, State
from api.store.tables.jobs import Artifact, Attempt, Event, Job
from quantcore.config import presets
from tests.support.waiting import wait_until

MakeModel = Callable[..., Path]
Submit = Callable[..., str]
GetJob = Callable[[str], Job]


def body(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"model": {"path": str(folder)}, "config": {"preset": "int8_dynamic"}, **changes}


def claim(sessions: Sessions, **options: Any) -> Lease:
    with sessions.begin() as session:
        lease = leases.claim(session, **{"worker": "w", "lease_s": 60} | options)
    assert lease is not None
    return lease


def do(sessions: Sessions, change: Callable[..., Any], *args: Any, **named: Any) -> Any:
    with sessions.begin() as session:
        return change(session, *args, **named)


def succeed(sessions: Sessions, lease: Lease) -> None:
    do(sessions, leases.succeed, lease, manifest_sha256="s", path="/p", num_bytes=1, summary={})


def fail(sessions: Sessions, lease: Lease, **options: Any) -> None:
    do(sessions, leases.fail, lease, Failure("bad", "bad", **options), retry_base_s=60)


def count(sessions: Sessions, table: Any) -> int:
    return do(sessions, lambda session: session.scalar(select(func.count()).select_from(table)))  # type: ignore[no-any-return]


def bring_to(state: State, sessions: Sessions, submit: Submit) -> str:
    """A job in ``state``, moved there by what the service really does."""
    job_id = submit()
    if state in (State.QUEUED, State.PAUSED):
        if state == State.PAUSED:
            do(sessions, control.pause, job_id)
        return job_id
    lease = claim(sessions)
    moves: dict[State, Callable[[], Any]] = {
        State.RUNNING: lambda: None,
        State.RETRY_WAIT: lambda: fail(sessions, lease, retryable=True),
        State.CANCELLING: lambda: do(sessions, control.cancel, job_id),
        State.PAUSING: lambda: do(sessions, control.pause, job_id),
        State.SUCCEEDED: lambda: succeed(sessions, lease),
        State.FAILED: lambda: fail(sessions, lease),
        State.CANCELLED: lambda: (do(sessions, control.cancel, job_id), do(sessions, leases.release, lease)),
    }
    moves[state]()
    return job_id


LEADS_TO = {
    "cancel": {State.RUNNING: "cancelling", State.PAUSING: "cancelling", State.CANCELLING: "cancelling"},
    "pause": {State.RUNNING: "pausing", State.PAUSING: "pausing"},
}
OTHERWISE = {"cancel": "cancelled", "pause": "paused", "resume": "queued", "retry": "queued"}


@pytest.mark.parametrize("action", OTHERWISE)
def test_every_action_in_every_state(
    subtests: pytest.Subtests, action: str, client: TestClient, sessions: Sessions, submit: Submit
) -> None:
    for state in State:
        with subtests.test(state=state):
            check_action(action, state, client, sessions, submit)
        do(sessions, lambda session: session.execute(delete(Job)))


def check_action(action: str, state: State, client: TestClient, sessions: Sessions, submit: Submit) -> None:
    job_id = bring_to(state, sessions, submit)
    before = client.get(f"/v1/jobs/{job_id}").json()
    assert before["state"] == state
    answer = client.post(f"/v1/jobs/{job_id}/{action}")
    after = client.get(f"/v1/jobs/{job_id}").json()
    if state in ACTIONS[action]:
        assert answer.status_code == 202, answer.text
        wanted = LEADS_TO.get(action, {}).get(state, OTHERWISE[action])
        assert answer.json()["state"] == after["state"] == wanted
        assert (after["finished_at"] is not None) == (wanted in FINAL)
        assert answer.headers["etag"]
        return
    assert answer.status_code == 409, answer.text
    problem = answer.json()
    final = state in FINAL and action in ("cancel", "pause")
    assert problem["code"] == ("job_already_final" if final else "wrong_state")
    assert problem["detail"].startswith(f"Cannot {action} a {state} job. It must be ")
    assert problem["errors"][0]["allowed"] == sorted(ACTIONS[action])
    offered = [action for action, states in ACTIONS.items() if state in states]
    assert problem["hint"] == f"Allowed for a {state} job: {', '.join(offered)}."
    assert after == before


def test_actions_on_no_job(client: TestClient) -> None:
    for action in OTHERWISE:
        answer = client.post(f"/v1/jobs/job_{'0' * 32}/{action}")
        assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")


def test_every_state_has_its_time(client: TestClient, sessions: Sessions, submit: Submit) -> None:
    job_id = submit()
    claim(sessions)
    client.post(f"/v1/jobs/{job_id}/pause")
    client.post(f"/v1/jobs/{job_id}/cancel")
    times = client.get(f"/v1/jobs/{job_id}").json()["state_times"]
    assert [*sorted(times, key=times.__getitem__)] == ["queued", "running", "pausing", "cancelling"]


# pause, resume, retry: nothing lost, nothing twice


def test_a_paused_job_is_not_claimed_and_a_resumed_one_is(sessions: Sessions, submit: Submit, get_job: GetJob) -> None:
    job_id, other = submit(), submit()
    do(sessions, control.pause, job_id)
    assert claim(sessions).job_id == other
    assert do(sessions, leases.claim, worker="w", lease_s=60) is None
    do(sessions, control.resume, job_id)
    assert claim(sessions).job_id == job_id
    assert get_job(job_id).state == "running"


@pytest.mark.parametrize("end", ["release", "reap", "retryable failure"])
def test_whatever_ends_a_pausing_job_pauses_it(end: str, sessions: Sessions, submit: Submit, get_job: GetJob) -> None:
    job_id = submit()
    lease = claim(sessions)
    do(sessions, control.pause, job_id)
    assert do(sessions, leases.renew, lease, lease_s=60) is Order.PAUSE
    if end == "release":
        do(sessions, leases.release, lease)
    elif end == "reap":
        do(sessions, lambda session: session.execute(text("UPDATE job SET lease_expires_at = now() - interval '1 s'")))
        assert do(sessions, leases.reap) == 1
    else:
        fail(sessions, lease, retryable=True)
    job = get_job(job_id)
    assert (job.state, job.fence, job.finished_at) == ("paused", None, None)
    assert do(sessions, leases.claim, worker="w", lease_s=60) is None


def test_a_cancel_outweighs_the_pause_under_way(sessions: Sessions, submit: Submit, get_job: GetJob) -> None:
    job_id = submit()
    lease = claim(sessions)
    do(sessions, control.pause, job_id)
    do(sessions, control.cancel, job_id)
    assert do(sessions, leases.renew, lease, lease_s=60) is Order.CANCEL
    do(sessions, leases.release, lease)
    assert get_job(job_id).state == "cancelled"


def test_success_beats_a_late_pause(sessions: Sessions, submit: Submit, get_job: GetJob) -> None:
    job_id = submit()
    lease = claim(sessions)
    do(sessions, control.pause, job_id)
    succeed(sessions, lease)
    assert get_job(job_id).state == "succeeded"


def test_a_retry_is_a_new_start(client: TestClient, sessions: Sessions, submit: Submit, get_job: GetJob) -> None:
    job_id = submit(max_runtime_s=1000)
    lease = claim(sessions)
    fail(sessions, lease)
    job = client.post(f"/v1/jobs/{job_id}/retry").json()
    assert (job["error"], job["finished_at"], job["queue_position"]) == (None, None, 1)
    row = get_job(job_id)
    assert (row.failure_count, row.lost_count, row.used_runtime_s, row.cancel_requested_at) == (0, 0, 0, None)
    again = claim(sessions)
    assert (again.attempt, again.fence > lease.fence) == (2, True)
    succeed(sessions, again)
    with sessions.begin() as session:
        assert list(session.scalars(select(Attempt.outcome).order_by(Attempt.number))) == ["failed", "succeeded"]


def test_a_retry_elsewhere_avoids_the_host_of_the_last_attempt(
    client: TestClient, sessions: Sessions, submit: Submit
) -> None:
    """Also its other workers, and after further tries; until it is retried without that."""
    here, neighbour, there = "one:7:ab:0", "one:8:cd:1", "two:7:ef:0"
    for worker in (here, neighbour):
        beat(sessions, worker.rpartition(":")[0], 1, host="one")
    job_id = submit()
    fail(sessions, claim(sessions, worker=here))
    job = client.post(f"/v1/jobs/{job_id}/retry?elsewhere=true").json()
    assert job["avoid_host"] == "one"
    assert job["waiting_reason"] == "no live worker on another host than one"
    for worker in (here, neighbour):
        assert do(sessions, leases.claim, worker=worker, lease_s=60) is None
        assert not do(sessions, leases.is_any_due, worker=worker, waits_s=0, memory_bytes=1)
    assert do(sessions, leases.is_any_due, worker=there, waits_s=0, memory_bytes=1)
    beat(sessions, "two:7:ef", 1, host="two")
    assert client.get(f"/v1/jobs/{job_id}").json()["waiting_reason"] == "next in queue"
    fail(sessions, claim(sessions, worker=there), retryable=True)
    do(sessions, lambda session: session.execute(update(Job).values(run_at=func.clock_timestamp())))
    assert do(sessions, leases.claim, worker=here, lease_s=60) is None
    fail(sessions, claim(sessions, worker=there))
    assert client.post(f"/v1/jobs/{job_id}/retry").json()["avoid_host"] is None
    assert claim(sessions, worker=here).job_id == job_id
    entries = client.get("/v1/audit").json()["data"]
    assert [entry["detail"] for entry in entries if entry["action"] == "job.retry"] == [{}, {"elsewhere": True}]


def test_a_retry_elsewhere_says_what_it_waits_for(client: TestClient, sessions: Sessions, submit: Submit) -> None:
    job_id = submit(needs_memory_bytes=2**30)
    fail(sessions, claim(sessions, worker="one:7:ab:0"))
    beat(sessions, "two:7:ef", 0.5, host="two")
    waiting = client.post(f"/v1/jobs/{job_id}/retry?elsewhere=true").json()["waiting_reason"]
    assert waiting == "no live worker has 1.0 GiB of memory on another host than one"


def test_one_that_has_not_run_avoids_nothing(client: TestClient, sessions: Sessions, submit: Submit) -> None:
    job_id = submit()
    do(sessions, control.cancel, job_id)
    assert client.post(f"/v1/jobs/{job_id}/retry?elsewhere=true").json()["avoid_host"] is None


def test_two_retries_at_once_queue_it_once(sessions: Sessions, submit: Submit) -> None:
    job_id = bring_to(State.FAILED, sessions, submit)
    start, results = threading.Barrier(4), []

    def race() -> None:
        start.wait()
        try:
            do(sessions, control.retry, job_id)
            results.append("queued")
        except control.WrongState:
            results.append("refused")

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["queued", "refused", "refused", "refused"]


# priority and limits


def test_claims_go_by_priority_then_age(sessions: Sessions, submit: Submit) -> None:
    low, middle, high, second_high = submit(priority=1), submit(), submit(priority=9), submit(priority=9)
    assert [claim(sessions).job_id for _ in range(4)] == [high, second_high, middle, low]


def test_a_job_that_runs_too_long_is_told_so(sessions: Sessions, submit: Submit) -> None:
    submit(max_runtime_s=1)
    lease = claim(sessions)
    began = time.monotonic()
    wait_until(lambda: do(sessions, leases.renew, lease, lease_s=60) is Order.TIME_IS_UP)
    assert time.monotonic() - began > 0.9


def test_runtime_adds_up_over_attempts(sessions: Sessions, submit: Submit, get_job: GetJob) -> None:
    job_id = submit(max_runtime_s=1)
    began = time.monotonic()
    for _ in range(2):
        lease = claim(sessions)
        time.sleep(0.6)
        do(sessions, leases.release, lease)
    assert 1.1 < get_job(job_id).used_runtime_s < time.monotonic() - began + 0.1
    assert do(sessions, leases.renew, claim(sessions), lease_s=60) is Order.TIME_IS_UP


def test_a_job_that_waits_too_long_fails(client: TestClient, sessions: Sessions, submit: Submit) -> None:
    late, patient, paused = (submit(max_pending_s=1000) for _ in range(3))
    do(sessions, control.pause, paused)
    assert do(sessions, leases.expire_pending) == 0
    with sessions.begin() as session:
        session.execute(update(Job).where(Job.id.in_((late, paused))).values(max_pending_s=1))
    # the API's own upkeep does it
    wait_until(lambda: client.get(f"/v1/jobs/{late}").json()["state"] == "failed")
    job = client.get(f"/v1/jobs/{late}").json()
    assert (job["error"]["code"], job["error"]["retryable"]) == ("max_pending_exceeded", True)
    assert job["error"]["hint"]
    assert job["finished_at"]
    assert [client.get(f"/v1/jobs/{other}").json()["state"] for other in (patient, paused)] == ["queued", "paused"]
    assert client.post(f"/v1/jobs/{late}/retry").json()["state"] == "queued"


def test_priority_and_limits_are_taken_and_checked(client: TestClient, make_model: MakeModel, get_job: GetJob) -> None:
    model = make_model()
    limits = {"max_runtime_s": 60, "max_pending_s": 30}
    job = client.post("/v1/jobs", json=body(model, priority=0, limits=limits)).json()
    assert (job["priority"], job["limits"]) == (0, limits)
    assert get_job(job["id"]).needs_memory_bytes == job["needs_memory_bytes"] > 0
    wrong = ({"priority": 10}, {"priority": "5"}, {"limits": {"max_runtime_s": 0}}, {"limits": {"max_hours": 1}})
    for change in wrong:
        answer = client.post("/v1/jobs", json=body(model, **change))
        assert answer.status_code == 422, change
        assert answer.json()["errors"][0]["pointer"].startswith(f"#/{next(iter(change))}")


# why it waits


def beat(sessions: Sessions, name: str, gib: float, live_s: float = 60, host: str = "h") -> None:
    worker = workers.Registration(name, host, 1, int(gib * 2**30))
    do(sessions, workers.beat, worker, devices=[], live_s=live_s)


def test_a_waiting_job_says_why(client: TestClient, sessions: Sessions, submit: Submit) -> None:
    def seen(job_id: str) -> tuple[str | None, int | None]:
        job = client.get(f"/v1/jobs/{job_id}").json()
        return job["waiting_reason"], job["queue_position"]

    small, large = submit(needs_memory_bytes=2**30), submit(needs_memory_bytes=80 * 2**30)
    assert seen(small) == ("no live worker", 1)
    beat(sessions, "one", 16)
    assert seen(small) == ("next in queue", 1)
    assert seen(large) == ("no live worker has 80.0 GiB of memory", 2)
    first = submit(priority=9, needs_memory_bytes=1)
    beat(sessions, "two", 96)
    assert seen(first)[1] == 1
    assert (seen(small), seen(large)) == (("1 job ahead in the queue", 2), ("2 jobs ahead in the queue", 3))
    do(sessions, workers.leave, "one")
    beat(sessions, "two", 96, live_s=-1)
    assert seen(small) == ("no live worker", 2)
    do(sessions, workers.purge)
    fail(sessions, claim(sessions), retryable=True)
    reason, position = seen(first)
    assert (reason or "").startswith("next attempt at 20") and position is None
    do(sessions, control.pause, small)
    assert seen(small) == (None, None)


def test_a_worker_leaves_what_is_too_large_for_it(sessions: Sessions, submit: Submit) -> None:
    large, small, unknown = submit(needs_memory_bytes=100), submit(needs_memory_bytes=10), submit()
    assert claim(sessions, memory_bytes=10).job_id == small
    assert claim(sessions, memory_bytes=10).job_id == unknown
    assert do(sessions, leases.claim, worker="w", lease_s=9, memory_bytes=99) is None
    assert claim(sessions, memory_bytes=100).job_id == large


def test_places_of_a_page_take_few_queries(sessions: Sessions, submit: Submit) -> None:
    with sessions.begin() as session:
        found = [session.get_one(Job, submit()) for _ in range(30)]
        places = explain(session, found)
    assert [places[job.id].position for job in found] == list(range(1, 31))


def test_a_long_queue_is_counted_once_a_moment_for_all_who_ask(
    sessions: Sessions, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LONG_QUEUE", 2)
    monkeypatch.setattr(waiting, "MOMENT_S", 3600)
    reads: list[str] = []
    listens = event.listens_for(sessions.kw["bind"], "before_cursor_execute")
    listens(lambda *arguments: reads.append(arguments[2]))

    def place(job_id: str) -> int | None:
        with sessions.begin() as session:
            job = session.get_one(Job, job_id)
            reads.clear()
            return explain(session, [job])[job_id].position

    first, second, third = submit(), submit(), submit()
    assert place(second) == 2 and reads
    assert place(third) == 3 and not reads
    newer, urgent = submit(), submit(priority=9)
    assert (place(urgent), place(first), place(newer)) == (1, 1, 4) and not reads  # the first's is of a moment ago
    fail(sessions, claim(sessions), retryable=True)
    assert place(urgent) is None and not reads
    monkeypatch.setattr(waiting, "MOMENT_S", 0)
    assert (place(first), place(newer)) == (1, 4) and reads


def test_a_short_queue_is_counted_for_every_answer(sessions: Sessions, submit: Submit) -> None:
    ids = [submit() for _ in range(3)]
    for gone, left in enumerate(ids):
        with sessions.begin() as session:
            assert explain(session, [session.get_one(Job, ids[-1])])[ids[-1]].position == 3 - gone
        claim(sessions)
        with sessions.begin() as session:
            assert explain(session, [session.get_one(Job, left)]) == {}


def test_an_etag_moves_with_the_queue_but_if_match_does_not(client: TestClient, submit: Submit) -> None:
    first, second = submit(), submit()
    tag = client.get(f"/v1/jobs/{second}").headers["etag"]
    same = {"If-None-Match": tag}
    assert client.get(f"/v1/jobs/{second}", headers=same).status_code == 304
    client.post(f"/v1/jobs/{first}/cancel")
    assert client.get(f"/v1/jobs/{second}", headers=same).status_code == 200
    assert client.patch(f"/v1/jobs/{second}", json={"name": "n"}, headers={"If-Match": tag}).status_code == 200


# change, delete, clone


def test_patch_changes_what_is_named_and_nothing_else(client: TestClient, submit: Submit) -> None:
    job_id = submit(name="old", labels={"a": "1"})
    url = f"/v1/jobs/{job_id}"
    answer = client.patch(url, json={"priority": 9})
    assert (answer.status_code, answer.json()["code"]) == (428, "if_match_required")
    tag = client.get(url).headers["etag"]
    answer = client.patch(url, json={"priority": 9, "labels": {"b": "2"}}, headers={"If-Match": tag})
    assert answer.status_code == 200, answer.text
    job = answer.json()
    assert (job["name"], job["labels"], job["priority"]) == ("old", {"b": "2"}, 9)
    assert client.get(url).json() == job
    answer = client.patch(url, json={"name": "late"}, headers={"If-Match": tag})
    assert (answer.status_code, answer.json()["code"]) == (412, "job_changed")
    assert client.patch(url, json={"name": None}, headers={"If-Match": "*"}).json()["name"] is None
    last = client.get(f"{url}/events").json()["data"][-1]
    assert (last["kind"], last["data"]) == ("job_edited", {"name": None})
    for wrong in ({"state": "failed"}, {"priority": 10}, {"labels": None}):
        assert client.patch(url, json=wrong, headers={"If-Match": "*"}).status_code == 422
    none = f"/v1/jobs/job_{'0' * 32}"
    assert client.patch(none, json={}, headers={"If-Match": "*"}).status_code == 404


def test_delete_takes_all_that_belongs_to_an_ended_job(
    client: TestClient, sessions: Sessions, submit: Submit, settings: Any
) -> None:
    kept = bring_to(State.SUCCEEDED, sessions, submit)
    job_id = bring_to(State.SUCCEEDED, sessions, submit)
    for each in (kept, job_id):
        (settings.artifacts_dir / each / "sha").mkdir(parents=True)
    assert client.delete(f"/v1/jobs/{job_id}").status_code == 204
    assert client.get(f"/v1/jobs/{job_id}").status_code == 404
    assert client.delete(f"/v1/jobs/{job_id}").status_code == 404
    assert [folder.name for folder in settings.artifacts_dir.iterdir()] == [kept]
    assert [count(sessions, table) for table in (Job, Artifact, Attempt)] == [1, 1, 1]
    with sessions.begin() as session:
        assert set(session.scalars(select(Event.job_id))) == {kept}


def test_delete_of_a_job_that_goes_on_is_refused(
    subtests: pytest.Subtests, client: TestClient, sessions: Sessions, submit: Submit
) -> None:
    for state in sorted(set(State) - FINAL):
        with subtests.test(state=state):
            job_id = bring_to(state, sessions, submit)
            answer = client.delete(f"/v1/jobs/{job_id}")
            assert (answer.status_code, answer.json()["code"]) == (409, "wrong_state")
            remedy = "It must be cancelled or failed or succeeded." if state == State.CANCELLING else "Cancel it first."
            assert answer.json()["detail"] == f"Cannot delete a {state} job. {remedy}"
            assert count(sessions, Job) == 1
        do(sessions, lambda session: session.execute(delete(Job)))


def test_a_clone_is_the_same_job_but_for_what_is_named(client: TestClient, make_model: MakeModel) -> None:
    labels, limits = {"team": "x"}, {"max_runtime_s": 60, "max_pending_s": None}
    asked = body(make_model(), name="first", labels=labels, priority=7, limits=limits, calibration={"num_samples": 3})
    asked |= {"max_shard_size": "500MB", "gate": "fail"}
    first = client.post("/v1/jobs", json=asked).json()
    again = client.post(f"/v1/jobs/{first['id']}/clone")
    assert again.status_code == 202, again.text
    assert again.headers["location"] == f"/v1/jobs/{again.json()['id']}"
    same = first.keys() - {"id", "created_at", "state_times", "cloned_from", "waiting_reason", "queue_position"}
    assert (again.json()["max_shard_size"], again.json()["gate"]) == ("500MB", "fail")
    assert {name: again.json()[name] for name in same} == {name: first[name] for name in same}
    assert (again.json()["cloned_from"], again.json()["id"] != first["id"]) == (first["id"], True)

    changes = {"config": {"preset": "fp8"}, "export": ["compressed_tensors"], "name": None, "labels": {}}
    other = client.post(f"/v1/jobs/{first['id']}/clone", json=changes).json()
    assert (other["preset"], other["export"], other["name"], other["labels"]) == (
        "fp8",
        ["compressed_tensors"],
        None,
        {},
    )
    assert (other["calibration"], other["priority"]) == (first["calibration"], 7)
    for wrong, pointer in (({"config": {"preset": "fp9"}}, "#/config/preset"), ({"export": None}, "#/export")):
        answer = client.post(f"/v1/jobs/{first['id']}/clone", json=wrong)
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer), answer.text
    assert client.post(f"/v1/jobs/job_{'0' * 32}/clone").status_code == 404


def test_a_clone_of_a_hub_model_stays_at_its_commit(submit: Submit, get_job: GetJob) -> None:
    from api.jobs.submission import _merge

    stored = {"id": "org/name", "revision": "main", "sha": "a" * 40}
    config = presets.resolve("int8_weight_only")
    merged = _merge(get_job(submit(model=stored, config=config)), {})
    assert (merged.model.id, merged.model.revision, merged.config) == ("org/name", "a" * 40, config.to_dict())


def test_conflicts_are_problem_documents(client: TestClient, submit: Submit) -> None:
    answer = client.post(f"/v1/jobs/{submit()}/resume")
    assert answer.headers["content-type"] == "application/problem+json"
    assert json.loads(answer.content)["type"] == "urn:bitfoundry:error:wrong_state"
