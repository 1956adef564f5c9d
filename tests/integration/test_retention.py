"""What is forgotten after its time, and what never is."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, text

from api.jobs import tidying
from api.jobs.tidying import Tidying
from api.settings import Settings
from api.store import control, leases
from api.store.engine import Sessions
from api.store.leases import Lease
from api.store.logs import NewLine
from api.store.tables import Event, Job, LogLine
from tests.integration.conftest import WorkerProcess

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
    Tidying(settings.model_copy(update={"keep_logs_days": 7, "keep_jobs_days": 30}), sessions).tidy()
    assert counts(sessions, young[0]) == [1, 3, 1]
    assert counts(sessions, talked[0]) == [1, 0, 0]
    assert counts(sessions, old[0]) == [0, 0, 0]
    assert counts(sessions, running) == [1, 2, 1] and counts(sessions, waiting) == [1, 1, 0]
    assert [folder.exists() for _, folder in (young, talked, old)] == [True, True, False]
    with sessions.begin() as session:
        assert session.execute(text("SELECT action, object_id FROM audit_entry")).all() == [("job.purge", old[0])]


def test_by_default_nothing_is_forgotten(sessions: Sessions, submit: Submit, settings: Settings) -> None:
    job_id, folder = ended(sessions, submit, settings, days_ago=4000)
    Tidying(settings, sessions).tidy()
    assert counts(sessions, job_id) == [1, 3, 1] and folder.exists()


def test_more_than_a_batch(
    sessions: Sessions, submit: Submit, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.store.retention.BATCH", 2)
    for _ in range(5):
        ended(sessions, submit, settings, days_ago=40)
    Tidying(settings.model_copy(update={"keep_logs_days": 7}), sessions).tidy()
    Tidying(settings.model_copy(update={"keep_jobs_days": 7}), sessions).tidy()
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
    tidy = Tidying(settings, sessions)
    tidy.tidy()
    assert gone_folder.exists()  # it may be that of a database that is older than the disk
    age(gone_folder, days=2)
    tidy.tidy()
    assert not gone_folder.exists()
    assert all(folder.exists() for folder in (kept_folder, *others))
    assert counts(sessions, kept)[0] == 1


def test_it_runs_by_itself_once_an_hour(
    settings: Settings, sessions: Sessions, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[float] = []
    monkeypatch.setattr(Tidying, "tidy", lambda self: ran.append(time.monotonic()))
    once = Tidying(settings, sessions)
    with sessions.begin() as session:
        assert [once.run(session) for _ in range(3)] == [0, 0, 0]
        assert len(ran) == 1
        monkeypatch.setattr(tidying, "INTERVAL_S", 0.0)
        Tidying(settings, sessions).run(session)
    assert len(ran) == 2


def test_a_job_that_runs_keeps_its_folder(
    settings: Settings, sessions: Sessions, make_model: Callable[..., Path], submit: Submit,
    start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job],
) -> None:  # fmt: skip
    """With the oldest possible folder and a real worker that publishes into it."""
    job_id = submit(make_model(mode="steady"))
    folder = settings.artifacts_dir / job_id
    folder.mkdir(parents=True)
    age(folder, days=400)
    tidy = Tidying(settings.model_copy(update={"keep_logs_days": 1e-9, "keep_jobs_days": 1000}), sessions)
    start_worker()
    wait_for(job_id, "running")
    while (job := wait_for(job_id, "running", "succeeded")).state == "running":
        age(folder, days=400)
        tidy.tidy()
        assert counts(sessions, job_id)[1] > 0  # type: ignore[operator]
        time.sleep(0.1)
    tidy.tidy()
    with sessions.begin() as session:
        path = session.execute(text("SELECT path FROM artifact WHERE id = :id"), {"id": job.artifact_id}).scalar_one()
        with pytest.raises(Exception, match="cannot"):
            control.cancel(session, job_id)
    assert (Path(path) / "MANIFEST.json").is_file()
