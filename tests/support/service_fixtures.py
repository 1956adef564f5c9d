"""Fixtures: a service on the real PostgreSQL and Valkey, with short times and a stub engine.

The conftests of the folders that need them import them by name.
"""

import base64
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import redis
import uvicorn
from fastapi.testclient import TestClient
from huggingface_hub import constants
from sqlalchemy import delete, text, update

from api.__main__ import SERVER
from api.http import rate_limit, stream_permits
from api.http.security import create_key
from api.main import create_app
from api.settings import Settings
from api.store.accounts import projects
from api.store.engine import Sessions, connect, dispose
from api.store.queue import jobs
from api.store.tables.jobs import Job, Project
from tests.support.hub_server import TOKEN, HubServer
from tests.support.proofs import prove_here
from tests.support.service import (
    STUB_ENGINE,
    Server,
    WorkerProcess,
    job_columns,
    write_stub_model,
)
from tests.support.waiting import PATIENCE_S, wait_until
from worker.supervisor import Supervisor

TABLES = (
    "outbox, event, log_line, attempt, seat, publication, chat_turn, chat, artifact, job, sweep, worker, "
    "idempotency_key, upload_part, upload, dataset, api_key, sign_in, audit_entry, hub_token, webhook, "
    "webhook_delivery, retention_policy, integrity_finding, share, member, publish_target, "
    "alias_request, registry_alias, registry_version, registered_model"
)

# Few rows are deleted sooner than all these tables are truncated. As a replica without triggers: they guard the audit.
EMPTY = (
    "DO $$ BEGIN SET LOCAL session_replication_role = replica;"
    + "".join(f"DELETE FROM {table.strip()};" for table in TABLES.split(","))
    + "END $$"
)


@pytest.fixture
def sessions(postgres_url: str) -> Iterator[Sessions]:
    """An empty, migrated database."""
    sessions = connect(postgres_url)
    with sessions.begin() as session:
        session.execute(text(EMPTY))
        session.execute(delete(Project).where(Project.id != projects.DEFAULT))
        limits = (*projects.QUOTAS, "requests_per_minute")
        session.execute(update(Project).values(dict.fromkeys(limits) | {"protected_aliases": ["production"]}))
    yield sessions
    dispose(sessions)


@pytest.fixture
def settings(request: pytest.FixtureRequest, postgres_url: str, broker_url: str, tmp_path: Path) -> Settings:
    """The stub engine, model folders below ``tmp_path``, and leases that no busy machine outlives.

    Tests marked ``short_leases`` wait for lost ones.
    """
    with redis.Redis(unix_socket_path=broker_url.removeprefix("redis+socket://")) as broker:
        for key in (rate_limit.KEY, stream_permits.KEY):  # requests and streams of the test before
            for counted in broker.keys(f"{key}*"):
                broker.delete(counted)
    return Settings(
        database_url=postgres_url,
        broker_url=broker_url,
        data_dir=tmp_path / "data",
        model_roots=str(tmp_path / "models"),
        lease_s=6 if request.node.get_closest_marker("short_leases") else 60,
        heartbeat_s=0.4,
        poll_s=0.2,
        stop_grace_s=1,
        retry_base_s=0.1,
        engine_threads=1,
        engine_command=f"{sys.executable} -S {STUB_ENGINE}",
        confine_engine=False,  # the stub leaves notes for the tests wherever it is told to
        secret_key=base64.b64encode(b"a key of 32 bytes, for the tests").decode(),
    )


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """The stand-in, for the API in this process and, by the environment, for workers."""
    with HubServer() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)  # of other processes
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        for name, value in (environment | {"HF_TOKEN": TOKEN}).items():
            monkeypatch.setenv(name, value)
        for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield hub
        huggingface_hub.close_session()  # type: ignore[attr-defined]


@pytest.fixture
def make_model(settings: Settings) -> Callable[..., Path]:
    """``make_model("name", mode="slow")``: a model folder with headers that plan, and orders for the stub engine."""

    def make(name: str = "tiny", *, width: int = 64, **stub: Any) -> Path:
        return write_stub_model(settings.model_roots[0] / name, width=width, **stub)

    return make


@pytest.fixture
def submit(sessions: Sessions) -> Callable[..., str]:
    """``submit(model_dir, priority=9)``: a queued job straight in the database. Returns its id."""

    def submit(model_dir: Path | str = "/nowhere", **asked: Any) -> str:
        with sessions.begin() as session:
            return jobs.submit(session, **job_columns(model_dir, **asked)).id

    return submit


@pytest.fixture
def get_job(sessions: Sessions) -> Callable[[str], Job]:
    """The job as it is now."""

    def get(job_id: str) -> Job:
        with sessions.begin() as session:
            job = jobs.find(session, job_id)
            assert job is not None
            return job

    return get


@pytest.fixture
def wait_for(get_job: Callable[[str], Job]) -> Callable[..., Job]:
    """``wait_for(job_id, "running")``: the job once it is in one of the states."""

    def wait(job_id: str, *states: str, timeout_s: float = PATIENCE_S, phase: str | None = None) -> Job:
        job = get_job(job_id)

        def is_there() -> bool:
            nonlocal job
            job = get_job(job_id)
            return job.state in states and (phase is None or job.phase == phase)

        wait_until(
            is_there, timeout_s=timeout_s, note=lambda: f"still {job.state} (phase {job.phase}), error {job.error}"
        )
        return job

    return wait


@pytest.fixture
def client(settings: Settings, sessions: Sessions) -> Iterator[TestClient]:
    """The API with a key that may do everything. Its background thread runs, too."""
    key = create_key(sessions, "test")
    with TestClient(create_app(settings), headers={"Authorization": f"Bearer {key}"}) as client:
        yield client


@pytest.fixture
def server(settings: Settings, sessions: Sessions) -> Iterator[Server]:
    """``server.connect()``: a client of a real HTTP server in a thread."""
    config = uvicorn.Config(create_app(settings), port=0, log_level="warning", timeout_graceful_shutdown=1, **SERVER)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    wait_until(lambda: running.started or not thread.is_alive())
    assert running.started
    port = running.servers[0].sockets[0].getsockname()[1]
    yield Server(f"http://127.0.0.1:{port}", create_key(sessions, "test"))
    running.should_exit = True
    thread.join(15)
    assert not thread.is_alive()


@pytest.fixture
def start_worker(settings: Settings, tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """``start_worker()``: a worker; all of them are killed after the test: a drain would take a second."""
    started: list[WorkerProcess] = []

    def start(other_settings: Settings | None = None, **how: Any) -> WorkerProcess:
        started.append(WorkerProcess(other_settings or settings, tmp_path / f"worker{len(started)}.log", **how))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()
        print(worker.log.read_text())


@pytest.fixture
def start_here(settings: Settings) -> Iterator[Callable[..., Supervisor]]:
    """``start_here()``: a worker in this process."""
    started: list[Supervisor] = []

    def start(other_settings: Settings | None = None) -> Supervisor:
        started.append(Supervisor(other_settings or settings, lambda topic, payload: None))
        started[-1].start()
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.drain()
    for supervisor in started:
        supervisor.join()


@pytest.fixture
def read_pids() -> Callable[[Path], list[list[int]]]:
    """The process ids that the stub noted: one [engine, grandchild] a start."""

    def read(path: Path, num_starts: int = 1, timeout_s: float = PATIENCE_S) -> list[list[int]]:
        def starts() -> list[list[int]]:
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            return [json.loads(line) for line in lines if line.endswith("\n")]

        wait_until(lambda: len(starts()) >= num_starts, timeout_s=timeout_s, note=lambda: "the engine did not start")
        return starts()

    return read


@pytest.fixture
def proof_in_this_process(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``proving_here`` for one test, undone in turn with whatever else the test patches."""
    monkeypatch.setattr("quantcore.engine.pipeline.job.prove_in_fresh_process", prove_here)
    return prove_here
