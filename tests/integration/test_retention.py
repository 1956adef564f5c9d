"""What is forgotten after its time, and what never is."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, text

from api.http.security import create_key
from api.jobs.retention_task import RetentionTask
from api.settings import Settings
from api.store.accounts import projects
from api.store.engine import Sessions
from api.store.ids import new_id
from api.store.queue import control, hourly, leases
from api.store.queue.leases import Lease
from api.store.queue.logs import NewLine
from api.store.tables.jobs import Event, Job, LogLine, Project
from tests.support.service import WorkerProcess
from tests.support.waiting import wait_until

Submit = Callable[..., str]


def claim(sessions: Sessions) -> Lease:
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)
        assert lease
        leases.write_log(session, lease, lines=[NewLine("info", "hello")])
        return lease


def ended(sessions: Sessions, submit: Submit, settings: Settings, *, days_ago: float) -> tuple[str, Path]:
    """A succeeded job that ended so long ago, and its folder."""
    submit()
    lease = claim(sessions)
    folder = settings.artifacts_dir / lease.job_id / "sha"
    folder.mkdir(parents=True)
    with sessions.begin() as session:
        leases.succeed(session, lease, manifest_sha256="sha", path=str(folder), num_bytes=1, summary={})
        when = {"id": lease.job_id, "days": days_ago}
        session.execute(
            text("UPDATE job SET finished_at = finished_at - :days * interval '1 day' WHERE id = :id"), when
        )
    return lease.job_id, folder.parent


def counts(sessions: Sessions, job_id: str) -> list[int | None]:
    with sessions.begin() as session:
        wanted = [(Job, Job.id), (Event, Event.job_id), (LogLine, LogLine.job_id)]
        return [
            session.scalar(select(func.count()).select_from(table).where(column == job_id)) for table, column in wanted
        ]


def age(folder: Path, *, days: float) -> None:
    then = time.time() - days * 86400
    os.utime(folder, (then, then))


def test_stories_go_first_and_jobs_later(sessions: Sessions, submit: Submit, settings: Settings) -> None:
    young, talked, old = (ended(sessions, submit, settings, days_ago=days) for days in (1, 10, 40))
    submit()
    running = claim(sessions).job_id
    waiting = submit()
    with sessions.begin() as session:  # a job that is there for long and has not ended
        session.execute(text("UPDATE job SET created_at = created_at - interval '1 year' WHERE finished_at IS NULL"))
    RetentionTask(settings.model_copy(update={"keep_logs_days": 7, "keep_jobs_days": 30}), sessions).purge()
    assert counts(sessions, young[0]) == [1, 3, 1]
    assert counts(sessions, talked[0]) == [1, 0, 0]
    assert counts(sessions, old[0]) == [0, 0, 0]
    assert counts(sessions, running) == [1, 2, 1] and counts(sessions, waiting) == [1, 1, 0]
    assert [folder.exists() for _, folder in (young, talked, old)] == [True, True, False]
    with sessions.begin() as session:
        assert session.execute(text("SELECT action, object_id FROM audit_entry")).all() == [("job.purge", old[0])]


def test_by_default_nothing_is_forgotten(sessions: Sessions, submit: Submit, settings: Settings) -> None:
    job_id, folder = ended(sessions, submit, settings, days_ago=4000)
    RetentionTask(settings, sessions).purge()
    assert counts(sessions, job_id) == [1, 3, 1] and folder.exists()


def test_more_than_a_batch(
    sessions: Sessions, submit: Submit, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.store.queue.retention.BATCH", 2)
    for _ in range(5):
        ended(sessions, submit, settings, days_ago=40)
    RetentionTask(settings.model_copy(update={"keep_logs_days": 7}), sessions).purge()
    RetentionTask(settings.model_copy(update={"keep_jobs_days": 7}), sessions).purge()
    with sessions.begin() as session:
        assert session.scalar(select(func.count()).select_from(Job)) == 0
    assert list(settings.artifacts_dir.iterdir()) == []


def test_folders_of_jobs_that_are_gone_are_removed_and_no_others(
    client: TestClient, sessions: Sessions, submit: Submit, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, kept_folder = ended(sessions, submit, settings, days_ago=4000)
    gone, gone_folder = ended(sessions, submit, settings, days_ago=1)
    with monkeypatch.context() as patch:  # the process is killed between the row and the files
        patch.setattr("shutil.rmtree", lambda *arguments, **options: None)
        assert client.delete(f"/v1/jobs/{gone}").status_code == 204
    others = [settings.artifacts_dir / name for name in ("job_of_somebody", "lost+found")]
    for folder in others:
        folder.mkdir()
    for folder in (kept_folder, *others):
        age(folder, days=10)
    task = RetentionTask(settings, sessions)
    task.purge()
    assert gone_folder.exists()  # it may be that of a database that is older than the disk
    age(gone_folder, days=2)
    task.purge()
    assert not gone_folder.exists()
    assert all(folder.exists() for folder in (kept_folder, *others))
    assert counts(sessions, kept)[0] == 1


def test_it_runs_by_itself_once_an_hour(
    settings: Settings, sessions: Sessions, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[float] = []
    monkeypatch.setattr(RetentionTask, "purge", lambda self: ran.append(time.monotonic()))
    once = RetentionTask(settings, sessions)
    with sessions.begin() as session:
        assert [once.run(session) for _ in range(3)] == [0, 0, 0]
        assert len(ran) == 1
        monkeypatch.setattr(hourly, "HOUR_S", 0.0)
        often = RetentionTask(settings, sessions)
        assert [often.run(session) for _ in range(2)] == [0, 0]
    assert len(ran) == 3


@pytest.mark.slow
def test_a_job_that_runs_keeps_its_folder(
    settings: Settings, sessions: Sessions, make_model: Callable[..., Path], submit: Submit,
    start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job],
) -> None:  # fmt: skip
    """With the oldest possible folder and a real worker that publishes into it."""
    job_id = submit(make_model(mode="steady"))
    folder = settings.artifacts_dir / job_id
    folder.mkdir(parents=True)
    age(folder, days=400)
    task = RetentionTask(settings.model_copy(update={"keep_logs_days": 1e-9, "keep_jobs_days": 1000}), sessions)
    start_worker()
    wait_for(job_id, "running")
    wait_until(lambda: counts(sessions, job_id)[1])  # its first event
    while (job := wait_for(job_id, "running", "succeeded")).state == "running":
        age(folder, days=400)
        task.purge()
        assert counts(sessions, job_id)[1] > 0  # type: ignore[operator]
        time.sleep(0.1)
    task.purge()
    with sessions.begin() as session:
        path = session.execute(text("SELECT path FROM artifact WHERE id = :id"), {"id": job.artifact_id}).scalar_one()
        with pytest.raises(Exception, match="cannot"):
            control.cancel(session, job_id)
    assert (Path(path) / "MANIFEST.json").is_file()


def policy(client: TestClient, **keep: int | None) -> None:
    answer = client.put("/v1/retention", json=keep)
    assert answer.status_code == 200, answer.text


def ids(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [job["id"] for job in answer.json()["data"]]


def failed(sessions: Sessions, submit: Submit, *, days_ago: float) -> str:
    submit()
    lease = claim(sessions)
    with sessions.begin() as session:
        leases.fail(session, lease, leases.Failure("bad", "bad"), retry_base_s=1)
        when = {"id": lease.job_id, "days": days_ago}
        session.execute(
            text("UPDATE job SET finished_at = finished_at - :days * interval '1 day' WHERE id = :id"), when
        )
    return lease.job_id


def test_a_project_keeps_what_its_policy_says(
    client: TestClient, sessions: Sessions, submit: Submit, settings: Settings
) -> None:
    other = new_id("prj")
    with sessions.begin() as session:
        session.add(Project(id=other, name="other"))
    made = [ended(sessions, submit, settings, days_ago=days) for days in (50, 40, 30, 20, 1)]
    jobs = [job_id for job_id, _ in made]
    bad = [failed(sessions, submit, days_ago=days) for days in (45, 10)]
    foreign, foreign_folder = ended(sessions, submit, settings, days_ago=100)
    waiting = submit()
    with sessions.begin() as session:
        session.execute(text("UPDATE job SET project_id = :p WHERE id = :id"), {"p": other, "id": foreign})
    assert client.get("/v1/retention").json()["keep_last"] is None
    assert ids(client.post("/v1/retention/preview")) == []

    def preview(**keep: int) -> list[str]:
        return ids(client.post("/v1/retention/preview", json=keep))

    assert preview(keep_days=35) == [jobs[0], bad[0], jobs[1]]
    assert preview(keep_last=1) == [jobs[0], bad[0], *jobs[1:4]]  # a failure pushes no result out
    assert preview(keep_last=4, keep_days=5) == [jobs[0]]  # either of the two keeps a job
    assert client.patch(f"/v1/jobs/{jobs[0]}", json={"pinned": True}, headers={"If-Match": "*"}).json()["pinned"]
    assert preview(keep_last=4, keep_days=5) == []  # one that is pinned is not counted
    assert preview(keep_last=1, keep_days=25) == [bad[0], jobs[1], jobs[2]]
    with sessions.begin() as session:  # an artifact that is on its way somewhere stays until it is there
        session.execute(
            text("INSERT INTO publication (id, job_id, project_id, target) VALUES ('p', :id, :project, '{}')"),
            {"id": jobs[2], "project": projects.DEFAULT},
        )
    shown = client.post("/v1/retention/preview", json={"keep_last": 1, "keep_days": 25}).json()
    assert [job["id"] for job in shown["data"]] == [bad[0], jobs[1]]
    assert shown["num_pinned"] == 1 and shown["bytes"] == 1 and not shown["has_more"]
    assert "ended 40.0 days ago; jobs are kept for 25 days; 2 jobs that succeeded" in shown["data"][1]["reason"]

    policy(client, keep_last=1, keep_days=25)
    assert client.get("/v1/retention").json()["keep_days"] == 25
    assert client.get("/v1/audit?action=retention.set").json()["data"][0]["detail"]["keep_days"] == 25
    RetentionTask(settings, sessions).purge()
    gone, kept = {bad[0], jobs[1]}, {jobs[0], jobs[2], jobs[3], jobs[4], bad[1], foreign, waiting}
    assert {job_id for job_id in gone | kept if counts(sessions, job_id)[0]} == kept
    assert [folder.exists() for _, folder in made] == [True, False, True, True, True] and foreign_folder.exists()
    entries = {each["object_id"]: each for each in client.get("/v1/audit?action=job.purge").json()["data"]}
    assert entries.keys() == gone and entries[bad[0]]["detail"] == {"keep_last": 1, "keep_days": 25}

    policy(client, keep_last=1)
    assert ids(client.post("/v1/retention/run")) == [jobs[3]]
    assert not made[3][1].exists() and ids(client.post("/v1/retention/run")) == []
    [entry] = client.get(f"/v1/audit?object_id={jobs[3]}&action=job.purge").json()["data"]
    assert entry["key_id"] is not None
    policy(client)
    RetentionTask(settings.model_copy(update={"keep_jobs_days": 0.5}), sessions).purge()  # the operator's days
    left = {jobs[0], jobs[2], waiting}
    assert {job_id for job_id in kept if counts(sessions, job_id)[0]} == left, "a pin holds against them, too"


def test_who_may_set_a_policy_and_to_what(client: TestClient, sessions: Sessions) -> None:
    for bad in ({"keep_last": 0}, {"keep_days": 0}, {"keep_days": "7"}, {"keep": 1}):
        assert client.put("/v1/retention", json=bad).status_code == 422
    writer = {"Authorization": f"Bearer {create_key(sessions, 'w', ['jobs:read', 'jobs:write'])}"}
    for method, path in (("PUT", "/v1/retention"), ("POST", "/v1/retention/run")):
        answer = client.request(method, path, json={} if method == "PUT" else None, headers=writer)
        assert (answer.status_code, answer.json()["code"]) == (403, "insufficient_scope")
    assert client.post("/v1/retention/preview", json={"keep_last": 1}, headers=writer).status_code == 200


def test_more_than_one_answer_lists(
    client: TestClient, sessions: Sessions, submit: Submit, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.store.queue.retention.BATCH", 2)
    monkeypatch.setattr("api.retention.endpoints.MAX_SHOWN", 4)
    for _ in range(7):
        ended(sessions, submit, settings, days_ago=40)
    policy(client, keep_last=1)
    assert client.post("/v1/retention/preview").json()["has_more"]
    first, second = (client.post("/v1/retention/run").json() for _ in range(2))
    assert [(len(page["data"]), page["has_more"]) for page in (first, second)] == [(4, True), (2, False)]
